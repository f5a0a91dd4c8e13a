"""What an estimate is asked for, judged before anything heavy is imported."""

from __future__ import annotations

from typing import NamedTuple

from recompute.estimation.static_memory import OPTIMIZERS, RECIPES, check_sharding, chosen

LOSSES = ("full", "chunked")


class Options(NamedTuple):
    """A dtype recipe, an optimizer, a sharding and a loss, by their names in ``static_memory`` and ``LOSSES``."""

    dtype: str
    optimizer: str
    sharding: str
    devices: int
    loss: str

    def read(self) -> Options:
        """The same by the names that are meant ("bf16" is "bfloat16"). Raises ``EstimateError`` for what is none."""
        return Options(
            chosen("dtype", self.dtype, RECIPES),
            chosen("optimizer", self.optimizer, OPTIMIZERS),
            check_sharding(self.sharding, self.devices),
            self.devices,
            chosen("loss", self.loss, LOSSES),
        )
