"""A frame of a region as it was seen: its program is written from that."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from recompute.compiled.autocast_settings import CallSettings
from recompute.compiled.calls import Use
from recompute.compiled.function_calls import FunctionCall
from recompute.compiled.recording import Recording
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.numerics import Autocast


@dataclass
class ObservedFrame:
    """The calls of forward and of backward, and autograd's part between them."""

    recording: Recording
    parameters: Set[int]
    """The positions of the parameters among the inputs."""
    around: CallSettings
    """Those that forward ran under."""
    backward_autocast: Autocast | None = None
    """The autocast that backward ran under."""
    plan: SavePlan | None = None
    """The plan of forward, as soon as that has ended."""
    steps: int = 0
    """How many of the calls were forward's."""
    results: Sequence[Use] = ()
    """The region's outputs."""
    updated: frozenset[int] = frozenset()
    """The buffers of the inputs that forward has written to."""
    fixed: Set[int] = frozenset()
    """The outputs that take no gradient."""
    gradients: list[int | None] = field(default_factory=list)
    """The buffer of each output's gradient."""
    reaches: list[frozenset[int]] = field(default_factory=list)
    """For each output, the positions of the inputs that its gradient reaches."""
    contributions: list[tuple[int, Use | None]] = field(default_factory=list)
    """For each contribution, the input whose gradient it goes to, and the tensor; None if it has not come."""
    saved_views: set[int] = field(default_factory=set)
    """The buffers of the parameters whose views autograd has saved."""
    casts: dict[int, int] = field(default_factory=dict)
    """The buffers of the casts in autocast's cache, and the positions of their parameters, in order."""
    functions: dict[int, FunctionCall] = field(default_factory=dict)
    """The calls of forward that are of custom Functions."""

    @property
    def updated_positions(self) -> tuple[int, ...]:
        """The positions of the inputs that forward has written to, and of those that share memory with these."""
        found = [buffer.given for buffer in self.recording.buffers if buffer.root in self.updated]
        return tuple([position for position in found if position is not None])
