"""The options of an estimate, which are checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from recompute.errors import EstimateError, RecomputeError
from recompute.estimation.adapters import ALL_LINEAR, Adapters
from recompute.estimation.static_memory import DTYPE_RECIPES, OPTIMIZERS, check_counts, check_sharding, read_option

LOSSES = ("full", "chunked")


def check_microbatches(microbatches: int, in_flight: int, error: type[RecomputeError] = EstimateError) -> None:
    """Raise ``error`` unless these are whole numbers, 1 <= ``in_flight`` <= ``microbatches``."""
    check_counts(error, microbatches=microbatches, microbatches_in_flight=in_flight)
    if in_flight > microbatches:
        raise error(
            f"microbatches_in_flight: expected at most the {microbatches} microbatches of a step; found {in_flight}. "
            "Pass microbatches=, the number of microbatches in the schedule"
        )


class EstimateOptions(NamedTuple):
    """A dtype recipe, an optimizer, a sharding and a loss, by their names in ``static_memory`` and ``LOSSES``."""

    dtype: str
    optimizer: str
    sharding: str
    devices: int
    loss: str
    microbatches: int = 1
    """In a step. While one runs, the gradients of earlier ones are there."""
    microbatches_in_flight: int = 1
    """The most that are between forward and backward at once, as in a pipeline."""
    lora: Any = None
    lora_targets: str | Sequence[str] = ALL_LINEAR
    base: str = ""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that train in the place of all parameters; None: there are none."""
        return Adapters(self.lora, self.lora_targets, self.base).read()

    def read(self) -> EstimateOptions:
        """The same options, with other spellings replaced by the names themselves ("bf16" by "bfloat16").

        Raises ``EstimateError`` for a name that is unknown, and for numbers that do not fit together.
        """
        check_microbatches(self.microbatches, self.microbatches_in_flight)
        adapters = self.adapters or Adapters()
        return EstimateOptions(
            read_option("dtype", self.dtype, DTYPE_RECIPES),
            read_option("optimizer", self.optimizer, OPTIMIZERS),
            check_sharding(self.sharding, self.devices),
            self.devices,
            read_option("loss", self.loss, LOSSES),
            self.microbatches,
            self.microbatches_in_flight,
            *adapters,
        )
