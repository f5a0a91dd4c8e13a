"""Predicts a training step whose regions run by their choices: the bytes alive at every moment, and the seconds.

Places are numbered in forward's order. If each place i runs by its choice, these bytes are alive at every moment:

    forward of i      static + Σ_{j<i} (held_j - moved_j) + leaving_i + forward_peak_i
    backward of i     static + Σ_{j<i} (held_j - moved_j) + leaving_i + backward_peak_i + Σ_{j>i} gradient_j
    optimizer step    static + Σ_j gradient_j + optimizer_peak

Place j offloads moved_j. These bytes leave the device once forward of the next offloading place has ended, and come
back when backward reaches that place. So leaving_i are the bytes of the last offloading place before i; 0 if there is
none. The host's memory bounds Σ moved_j, where the profile knows its link to the host.

If n microbatches are in flight at once, n - 1 times the held bytes of all places are alive beside them: see
``microbatches``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from recompute.profiling.cost_table import Choice, Profile

Assignment = tuple[int, ...]
"""For each place, the index of its choice among its region's."""

MomentKind = Literal["forward", "backward", "optimizer step"]


class Moment(NamedTuple):
    """A part of the step: forward or backward of the place with this index, or, for None, the optimizer's step."""

    kind: MomentKind
    place: int | None = None


class Prediction(NamedTuple):
    """The bytes and the seconds of a step."""

    peak_nbytes: int
    """The most bytes alive at once, static bytes included."""
    peak_moment: str
    """When that is: "backward of model.layers.3", "optimizer step" …"""
    held_nbytes: int
    """The bytes held on the device for backward when forward has ended, without static bytes."""
    step_seconds: float
    moved_nbytes: int = 0
    """The bytes that a step offloads."""


def choices_of(profile: Profile, assignment: Assignment) -> list[Choice]:
    """The choice of each place."""
    regions = [profile.regions[place.region] for place in profile.places]
    return [region.choices[index] for region, index in zip(regions, assignment, strict=True)]


def moments(profile: Profile, assignment: Assignment) -> Iterator[tuple[Moment, int]]:
    """Each moment of the step, and the most bytes alive at once during it, static bytes included."""
    choices, above = choices_of(profile, assignment), gradients_above(profile)
    leaving = leaving_before(choices)
    stays = profile.static_nbytes + (profile.microbatches_in_flight - 1) * held_nbytes_of(choices)
    for i, choice in enumerate(choices):
        alive = stays + leaving[i]
        yield Moment("forward", i), alive + choice.forward_peak_nbytes
        yield Moment("backward", i), alive + choice.backward_peak_nbytes + above[i + 1]
        stays += staying_nbytes(choice)
    yield Moment("optimizer step"), profile.static_nbytes + above[0] + profile.optimizer_peak_nbytes


def held_nbytes_of(choices: Sequence[Choice]) -> int:
    """The bytes that one microbatch holds on the device when its forward has ended."""
    return sum(map(staying_nbytes, choices)) + leaving_before(choices)[-1]


def leaving_before(choices: Sequence[Choice]) -> list[int]:
    """For each place, and after the last one, the bytes that the last offloading place before it moves.

    They are still on the device in the place's forward, and there again in its backward.
    """
    leaving = [0]
    for choice in choices:
        leaving.append(choice.moved_nbytes or leaving[-1])
    return leaving


def predict(profile: Profile, assignment: Assignment) -> Prediction:
    """The step in which each place runs as ``assignment`` says."""
    choices = choices_of(profile, assignment)
    moment, peak = max(moments(profile, assignment), key=lambda pair: pair[1])
    times = profile.microbatches
    seconds = [profile.optimizer_seconds]
    for choice in choices:
        seconds += [times * choice.forward_seconds, times * choice.backward_seconds]
    held = profile.microbatches_in_flight * held_nbytes_of(choices)
    moved = times * sum(choice.moved_nbytes for choice in choices)
    return Prediction(peak, moment_name(profile, moment), held, math.fsum(seconds), moved)


def moment_name(profile: Profile, moment: Moment) -> str:
    """The moment as messages name it: "backward of model.layers.3"."""
    if moment.place is None:
        return moment.kind
    place = profile.places[moment.place]
    return f"{moment.kind} of {place.path or profile.regions[place.region].name}"


def gradients_above(profile: Profile) -> list[int]:
    """For each place, the bytes of gradients that it and all places after it leave behind; a 0 follows the last.

    Backward runs the places from the last to the first, so these gradients are there once the place's backward is done.
    """
    above = [0]
    for place in reversed(profile.places):
        above.append(above[-1] + profile.regions[place.region].gradient_nbytes)
    return above[::-1]


def staying_nbytes(choice: Choice) -> int:
    """The bytes that it holds on the device once offloaded ones have left."""
    return choice.held_nbytes - choice.moved_nbytes
