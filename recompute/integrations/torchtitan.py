"""torchtitan: a policy in the place of its activation checkpointing, in the job's configuration.

    activation_checkpoint=RecomputeAC.Config(policy="elementwise")

torchtitan applies it where it applies its own: after tensor and context parallelism, before it compiles and shards the
blocks. Written for torchtitan 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC

from recompute.attach.apply import apply


class RecomputeAC(FullAC):
    """Puts the model under ``policy``.

    It derives from ``FullAC`` because the command line takes the classes alone that the job's configuration names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        policy: str = "elementwise"
        """A preset's name, or the path of a policy file."""

    def apply(self, model: nn.Module) -> None:
        apply(model, self.config.policy)
