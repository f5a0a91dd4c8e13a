"""Brings a model's regions to where they stay in a long run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recompute.compiled.captured_region import CapturedRegion, Observing, RecordingNext
from recompute.engine.thread_state import local, swapped

LEAST_STEPS, MOST_STEPS = 2, 12
"""In the first step custom Functions are met. In the second a region may take the plan of one like it."""


def settle(regions: Sequence[CapturedRegion], run: Callable[[bool], Any]) -> None:
    """Run steps until each region goes on as it is going to: as captured code, if it can.

    run: runs a forward, each time on the same arguments, and also a backward if it is given True.
    """
    with swapped(local, "is_settling", True):
        for count in range(MOST_STEPS):
            before = [region.state for region in regions]
            run(any(isinstance(state, Observing) for state in before))
            states = [region.state for region in regions]
            is_under_way = any(isinstance(state, (RecordingNext, Observing)) for state in states)
            if count + 1 >= LEAST_STEPS and (states == before or not is_under_way):
                return
