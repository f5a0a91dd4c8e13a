"""axolotl: a plugin that trains under a policy, by keys of axolotl's YAML file. Written for axolotl 0.19.

plugins: [recompute.integrations.axolotl.RecomputePlugin]
recompute_policy: auto                # a preset's name, the path of a policy file, or a policy
recompute_kwargs: {logits: false}     # RecomputeCallback's other options
gradient_checkpointing: false
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from torch import nn

from recompute.integrations.training import Options
from recompute.integrations.transformers import RecomputeCallback, refuse_arguments
from recompute.policy.document import validate


class AxolotlKeys(BaseModel):
    """The plugin's keys in axolotl's file."""

    recompute_policy: str | dict[str, Any] = "elementwise"
    recompute_kwargs: dict[str, Any] = {}


class RecomputePlugin(BasePlugin):
    def register(self, cfg: Any) -> None:
        """Called before a model is loaded. Raises as ``RecomputeCallback`` does."""
        options = validate(Options, cfg.get("recompute_kwargs") or {}, label="recompute_kwargs")
        self._callback = RecomputeCallback(cfg.get("recompute_policy") or "elementwise", **options.model_dump())
        refuse_arguments(SimpleNamespace(gradient_checkpointing=cfg.get("gradient_checkpointing")), None)

    def get_input_args(self) -> str:
        return f"{__name__}.{AxolotlKeys.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[RecomputeCallback]:
        return [self._callback]
