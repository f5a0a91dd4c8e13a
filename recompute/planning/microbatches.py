"""Plans for steps of several microbatches, some of which are in flight at once: gradient accumulation and pipelines.

A profile measures one microbatch. Of M in a step, n are in flight at most: they have run forward, and wait for their
backward or run it. When the n-th of them runs, these bytes are alive beside those of a step of one:

    the gradients of microbatches before it, of all parameters         as they add up
    M times what each microbatch has of its own                        its batch, and the gradients of outputs
    n times what only the caller holds of outputs                      logits, which a pipeline's last stage holds
    (n - 1) times what all regions hold                                the graphs of the others in flight

What runs at the moment, of forward or of backward, is one microbatch: its peak counts once. One batch or gradient more
than the step's own is on its way to another stage, or from it: so these are M beside the first, and not M - 1.

All but the last line do not depend on what is chosen, so ``with_microbatches`` adds them to static bytes. That is too
much in two ways. A region's new gradients count together, although each is freed once it is added to the old one. And
if all microbatches are in flight at once (n = M, as in GPipe), no gradients are there before the first backward.

The last line depends on all choices together, those of later places too. ``within_shared_room`` finds them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple, TypeVar

from recompute.errors import PlanError
from recompute.policy.document import show
from recompute.profiling.cost_table import Profile, RegionCosts

_Found = TypeVar("_Found")


class Needs(NamedTuple):
    """What a choice for each place needs of the room that microbatches in flight share, in bytes."""

    own: int
    """The most that is alive of the microbatch that runs."""
    held: int
    """What each of the others in flight holds."""
    cost: int


def check_microbatches(microbatches: int, in_flight: int) -> None:
    """Raise ``PlanError`` unless these are whole numbers, 1 <= ``in_flight`` <= ``microbatches``."""
    for name, number in (("microbatches", microbatches), ("microbatches_in_flight", in_flight)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PlanError(f"{name}: expected a whole number, at least 1; found {show(number)}")
    if in_flight > microbatches:
        raise PlanError(
            f"microbatches_in_flight: expected at most microbatches, which is {microbatches}, as no more are in flight "
            f"than a step has; found {in_flight}. Pass microbatches=, the number that the schedule has"
        )


def with_microbatches(profile: Profile, microbatches: int, in_flight: int) -> Profile:
    """The profile of a step of so many microbatches; ``profile`` itself if that is 1.

    With several in flight, ways that offload are left out: what is known of the copies is how they run beside one.

    Raises ``PlanError`` if the numbers do not fit together, or the profile is one of several microbatches already.
    """
    check_microbatches(microbatches, in_flight)
    if microbatches == 1:
        return profile
    if profile.microbatches > 1:
        raise PlanError(
            f"expected a profile of one microbatch, as recompute.profile makes; found one that was planned for "
            f"{profile.microbatches} of them: plan with the profile that it was made from"
        )

    def of(region: RegionCosts) -> RegionCosts:
        choices = tuple([choice for choice in region.choices if in_flight == 1 or not choice.moved_nbytes])
        if not choices:
            raise PlanError(f"{region.name}: expected a way to run it that does not offload; found none")
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
    """The cheapest of what needs ``own + others * held <= room``; None if there is nothing that does.

    find: the cheapest of what needs at most so much of its own, and lets each of the others hold at most so much.
    others: 1 or more.

    Whatever fits needs some number of bytes of its own. Where that number is from ``low`` to ``high``, the others may
    hold ``(room - low) // others`` each. So ``find(high, (room - low) // others)`` is no dearer than what fits there.
    If it fits itself, it is the cheapest. If it does not, the interval is split between what it needs of its own and
    what the others would have left for that. In neither half it is found again: in the lower one it needs too much of
    its own, in the upper one the others hold too much. The interval that may have the cheapest comes first.
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
