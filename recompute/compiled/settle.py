"""Brings a model's regions to where they stay in a long run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recompute.compiled.captured_region import CapturedRegion, Observing, RecordingNext, Refused
from recompute.engine.thread_state import is_fake, local, swapped

LEAST_STEPS, MOST_STEPS = 2, 12
"""In the first step custom Functions are met. In the second a region may take the plan of one like it."""
MOST_FAILURES = 3
"""A region that has been recorded more often without a program will hardly get one."""
_UNDER_WAY = RecordingNext, Observing


def settle(regions: Sequence[CapturedRegion], run: Callable[[bool], Any]) -> None:
    """Run steps until each region goes on as it is going to: as captured code, or else refused.

    Where captured code fails on tensors without values, no region is captured.

    run: runs a forward, each time on the same arguments, and also a backward if it is given True.
    """
    with swapped(local, "is_settling", True):
        try:
            _settle(regions, run)
        except Exception:
            if not is_fake() or not refuse_all(regions):
                raise
            _settle(regions, run)


def _settle(regions: Sequence[CapturedRegion], run: Callable[[bool], Any]) -> None:
    for count in range(MOST_STEPS):
        before = [region.state for region in regions]
        # A region that is called several times in a step may be recorded and observed in the same one.
        run(any(isinstance(state, _UNDER_WAY) for state in before))
        states = [region.state for region in regions]
        if count + 1 >= LEAST_STEPS and (states == before or not any(map(_is_under_way, regions))):
            break
    for region in regions:
        if region.was_tried and not region.is_captured:
            region.refuse(region.failure)


def refuse_all(regions: Sequence[CapturedRegion]) -> bool:
    """Have no region run as captured code. Returns whether any might have."""
    others = [region for region in regions if not isinstance(region.state, Refused)]
    for region in others:
        region.refuse("its code cannot run without values")
    return bool(others)


def _is_under_way(region: CapturedRegion) -> bool:
    failures = region.recordings - len(region.programs)
    return isinstance(region.state, _UNDER_WAY) and failures <= MOST_FAILURES
