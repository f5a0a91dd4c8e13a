"""Plans for steps of several microbatches, of gradient accumulation or of a pipeline with some of them in flight.

A profile measures one microbatch. A step has M, and at most n are in flight: they have run forward, and wait for their
backward or run it. When the n-th of them runs, these bytes are alive beside those of a step of one:

    all gradients                 microbatches before it have left them
    M · microbatch_nbytes         batches, and gradients of outputs
    n · output_nbytes             outputs that only the caller holds: logits in a pipeline's last stage
    (n - 1) · held bytes          the graphs of the others in flight

One microbatch runs at a time, so its peak counts once. One batch or gradient more than the step's own is on its way to
another stage, or from it: so there are M beside the first, and not M - 1.

All but the last line do not depend on choices, so ``with_microbatches`` adds them to static bytes. That is too much in
two ways. A region's new gradients count together, although each is freed once it is added to the old one. And if all
microbatches are in flight at once (n = M, as in GPipe), no gradients are there before the first backward.

The last line depends on all choices together, also on those of later places. ``within_shared_room`` finds them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

from recompute.errors import PlanError
from recompute.estimation.estimate_options import check_microbatches
from recompute.profiling.cost_table import Profile, RegionCosts

_Found = TypeVar("_Found")


class Needs(NamedTuple):
    """The bytes that an assignment needs of the room that microbatches in flight share."""

    own: int
    """The peak of the microbatch that runs."""
    held: int
    """The saved bytes of each of the others in flight."""
    cost: int


def with_microbatches(profile: Profile, microbatches: int, in_flight: int) -> Profile:
    """The profile of a step of so many microbatches; ``profile`` itself if that is 1.

    With several in flight, ways that offload are left out: copies were measured beside one.

    Raises ``PlanError`` if the numbers do not fit together, or the profile is one of several microbatches already.
    """
    check_microbatches(microbatches, in_flight, PlanError)
    if microbatches == 1:
        return profile
    if profile.microbatches > 1:
        raise PlanError(
            f"profile: expected one of a single microbatch, as recompute.profile returns; found one for "
            f"{profile.microbatches} microbatches. Plan with the profile that recompute.profile returned"
        )

    def of(region: RegionCosts) -> RegionCosts:
        choices = tuple([choice for choice in region.choices if in_flight == 1 or not choice.moved_nbytes])
        if not choices:
            raise PlanError(
                f"{region.name}: with several microbatches in flight nothing is offloaded, and each of its choices "
                "offloads"
            )
        return region.model_copy(update={"gradient_nbytes": 0, "choices": choices})

    gradients = sum(profile.regions[place.region].gradient_nbytes for place in profile.places)
    more = gradients + microbatches * profile.microbatch_nbytes + in_flight * profile.output_nbytes
    changes = {
        "static_nbytes": profile.static_nbytes + more,
        "regions": tuple(map(of, profile.regions)),
        "microbatches": microbatches,
        "microbatches_in_flight": in_flight,
    }
    return profile.model_copy(update=changes)


def within_shared_room(
    room: int,
    others: int,
    find: Callable[[int, int], _Found | None],
    needs: Callable[[_Found], Needs],
) -> _Found | None:
    """The cheapest assignment with ``own + others * held <= room``; None if there is none.

    find: returns the cheapest one with at most so many bytes of its own, and at most so many held by each other one.
    others: 1 or more.

    If an assignment's own bytes are from ``low`` to ``high``, the others may hold ``(room - low) // others`` each. So
    ``find(high, (room - low) // others)`` is no dearer than any that fits there. If it fits itself, it is the cheapest.
    If not, the interval is split between its own bytes and those that the others would have left for it. Neither half
    finds it again: in the lower one its own bytes are too many, in the upper one the others'. The interval that may
    have the cheapest one comes first.
    """
    order = count()
    intervals: list[tuple[int, int, int, int, _Found]] = []

    def look(low: int, high: int) -> None:
        found = find(high, (room - low) // others) if low <= high else None
        if found is not None:
            heapq.heappush(intervals, (needs(found).cost, next(order), low, high, found))

    look(0, room)
    while intervals:
        _, _, low, high, found = heapq.heappop(intervals)
        own, held, _ = needs(found)
        left = room - others * held
        if own <= left:
            return found
        middle = (left + own) // 2  # left <= middle < own
        look(low, middle)
        look(middle + 1, high)
    return None
