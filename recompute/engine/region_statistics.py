"""The totals of a region since its policy was applied: what was dropped, held and run again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.stopwatch import Stopwatch


@dataclass
class Regenerations:
    """How often backward made something run again, what came back, and what times it."""

    count: int = 0
    """Times that an op ran again, or a whole region."""
    nbytes: int = 0
    """Bytes that came back, including those of values that only served to bring others back."""
    stopwatch: Stopwatch | None = None
    """None unless times were asked for."""
    for_differentiated_gradients: bool = False
    """Whether any of it came back for gradients that are differentiated in their turn."""


@dataclass
class RegionStatistics:
    """The name of a region, for messages, and its totals since the policy was applied."""

    name: str
    frames: int = 0
    """Times it ran forward under the policy."""
    dropped_tensors: int = 0
    """Saved tensors dropped, each storage counted once a frame."""
    dropped_nbytes: int = 0
    kept_nbytes: int = 0
    """Bytes that live only because its frames, or the kernels in its place, saved them for backward."""
    eager_nbytes: int = 0
    """Bytes that the same code holds for backward without the policy."""
    regenerated: Regenerations = field(default_factory=Regenerations)
    """What backward has run again. The tape by which a region is captured counts it for the region, too."""
    offloaded_tensors: int = 0
    """Storages that were copied off the device."""
    offloaded_nbytes: int = 0
    """Bytes of these. They are among those kept, but for what is given to a checkpoint."""
    compressed_tensors: int = 0
    """Tensors that are held as codes of 8 bits."""
    compressed_nbytes: int = 0
    """Bytes that these had."""
    codes_nbytes: int = 0
    """Bytes of their codes and scales, which are among those kept."""
    worst_code_error: Tensor | None = None
    """The largest error of a number that was held so, relative to the largest one of its block. On its device."""
    plan: SavePlan | None = None
    """What its last frame kept and dropped, and why."""
    dropped_outputs: list[DroppedOutput] = field(default_factory=list)
    """The outputs of its last frame that were dropped too."""

    @property
    def regenerations(self) -> int:
        return self.regenerated.count

    @property
    def regenerated_nbytes(self) -> int:
        return self.regenerated.nbytes


class DroppedOutput(NamedTuple):
    """An output of a frame that autograd saved for another module's backward, and that was dropped."""

    made_by: str
    layout: Layout
    nbytes: int
