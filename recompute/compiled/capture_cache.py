"""The graphs of regions: those that the regions under one policy share, and those that one region tries for a call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from recompute.compiled.captured_graph import CachedGraphs, CapturedGraph, GuardedGraphs
from recompute.engine.checkpoint.region import StateHook
from recompute.engine.cut.plan_cache import PlanCache
from recompute.engine.thread_state import is_fake


class CaptureCache:
    """The regions under one policy share this: plans of the cut, captured graphs, and hooks for state.

    With hooks nothing is captured: no guard notices a change of the state that they note.
    """

    def __init__(self, state_hooks: Sequence[StateHook] = ()) -> None:
        self.state_hooks = state_hooks
        self.plan_cache = PlanCache()
        self.warned_of_evaluation = False
        self._graphs: dict[Hashable, CachedGraphs] = {}

    def graphs_of(self, function: Hashable, rule: Hashable) -> CachedGraphs:
        """The graphs of all regions that run ``function`` under ``rule``."""
        key = function, rule, is_fake()
        return self._graphs.get(key) or self._graphs.setdefault(key, CachedGraphs())


@dataclass
class RegionGraphs:
    """The graphs that a region tries for a call."""

    shared: CachedGraphs
    own: GuardedGraphs | None = None
    """Graphs of this region alone, if none of those that it shares fits."""
    misses: int = 0
    """Calls in a row without a graph."""
    unused: int = 0
    """Graphs taken since one was last run again."""
    failure: str = ""
    """Why no more frames are recorded; "" if there may be more."""

    @property
    def all(self) -> list[CapturedGraph]:
        return [*(self.own.graphs if self.own else ()), *self.shared.graphs.graphs]
