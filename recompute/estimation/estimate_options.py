"""The options of an estimate, which are checked before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from recompute.errors import EstimateError
from recompute.estimation.adapters import ALL_LINEAR, Adapters
from recompute.estimation.static_memory import DTYPE_RECIPES, OPTIMIZERS, check_sharding, read_option

LOSSES = ("full", "chunked")


class EstimateOptions(NamedTuple):
    """A dtype recipe, an optimizer, a sharding and a loss, by their names in ``static_memory`` and ``LOSSES``."""

    dtype: str
    optimizer: str
    sharding: str
    devices: int
    loss: str
    microbatches: int = 1
    """In a step. The gradients of those before are there while one runs."""
    microbatches_in_flight: int = 1
    """The most that are between forward and backward at once, as in a pipeline."""
    lora: Any = None
    lora_targets: str | Sequence[str] = ALL_LINEAR
    base: str = ""

    @property
    def adapters(self) -> Adapters | None:
        """What trains in the place of all parameters; None: nothing does."""
        return Adapters(self.lora, self.lora_targets, self.base).read()

    def read(self) -> EstimateOptions:
        """The same options, with other spellings replaced by the names themselves ("bf16" by "bfloat16").

        Raises ``EstimateError`` for a name that is unknown, and for numbers that do not fit together.
        """
        if not 1 <= self.microbatches_in_flight <= self.microbatches:
            raise EstimateError(
                "expected at least one microbatch in flight, and at most as many as a step has; found "
                f"microbatches_in_flight={self.microbatches_in_flight} and microbatches={self.microbatches}"
            )
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
