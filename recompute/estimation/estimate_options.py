"""The options of an estimate, which are checked before anything heavy is imported."""

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
        """The same options, with other spellings replaced by the names themselves ("bf16" by "bfloat16").

        Raises ``EstimateError`` for a name that is unknown.
        """
        return EstimateOptions(
            read_option("dtype", self.dtype, DTYPE_RECIPES),
            read_option("optimizer", self.optimizer, OPTIMIZERS),
            check_sharding(self.sharding, self.devices),
            self.devices,
            read_option("loss", self.loss, LOSSES),
        )
