"""What an estimate is asked for, judged before anything heavy is imported."""

from __future__ import annotations

from typing import NamedTuple

from recompute.estimation.static_memory import DTYPE_RECIPES, OPTIMIZERS, check_sharding, read_option

LOSSES = ("full", "chunked")


class EstimateOptions(NamedTuple):
    """A dtype recipe, an optimizer, a sharding and a loss, by their names in ``static_memory`` and ``LOSSES``."""

    dtype: str
    optimizer: str
    sharding: str
    devices: int
    loss: str

    def read(self) -> EstimateOptions:
        """The same by the names that are meant ("bf16" is "bfloat16"). Raises ``EstimateError`` for what is none."""
        return EstimateOptions(
            read_option("dtype", self.dtype, DTYPE_RECIPES),
            read_option("optimizer", self.optimizer, OPTIMIZERS),
            check_sharding(self.sharding, self.devices),
            self.devices,
            read_option("loss", self.loss, LOSSES),
        )
