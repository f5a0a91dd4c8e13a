"""A Llama of a given shape over bytes, which an ablation's ``model`` section describes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from transformers import LlamaConfig

_VOCABULARY = 256  # byte-level


class ModelShape(BaseModel):
    """The shape of a byte-level Llama."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    hidden_size: PositiveInt = 256
    intermediate_size: PositiveInt = 688
    layers: PositiveInt = 6
    heads: PositiveInt = 8
    kv_heads: PositiveInt = 4

    @model_validator(mode="after")
    def _divides(self) -> ModelShape:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"expected hidden_size to be a multiple of 2 * heads = {2 * self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"expected heads to be a multiple of kv_heads = {self.kv_heads}")
        return self

    def config(self, positions: int) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=positions,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )


class ModelFile(BaseModel):
    """A YAML file that describes a Llama, as an ablation's configuration does. Its other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: ModelShape
