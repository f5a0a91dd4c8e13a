"""A Llama of a given shape over bytes, which an ablation's ``model`` section describes."""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, model_validator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


class ModelFile(BaseModel):
    """A YAML file that describes a Llama, as an ablation's configuration does. Its other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    model: ModelShape


def build_llama(
    shape: ModelShape, *, positions: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> LlamaForCausalLM:
    """A model in training mode, initialized on ``device`` from the seed; leaves the global random state as it was."""
    llama = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(llama, dtype=dtype, attn_implementation="sdpa").train()
