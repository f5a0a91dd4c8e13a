"""Chooses how each region of a training step runs, so that the step is the fastest within a budget.

It knows the profile's table alone, and runs no model. Places are numbered in forward's order. If each place i runs by
its choice, these bytes are alive, and must stay within the budget at every moment:

    forward of i      static + Σ_{j<i} held_j + forward_peak_i
    backward of i     static + Σ_{j<i} held_j + backward_peak_i + Σ_{j>i} gradient_j
    optimizer step    static + Σ_j gradient_j + optimizer_peak

The gradients are the same whatever is chosen. So the choices before i affect i and what follows by one number, Σ held.
That allows dynamic programming (Nemhauser and Ullmann, Management Science 15(9), 1969):

1. Walk the places in order, with every pair (Σ held, Σ seconds) that some choices so far lead to.
2. Leave out the pairs with which a place would be over the budget.
3. Leave out each pair that another one is no worse than in both numbers: it leads to nothing better.
4. After the last place, the pair with the fewest seconds is the optimum.

This assumes nothing of the order of the choices, of which peak is larger, or of which places are alike. It is exact,
since bytes are integers and seconds are whole picoseconds.

Measured on one core, with 12 choices a layer: 80 equal layers take 0.04 s (2,000 pairs), 80 layers of which every sixth
is of another kind 0.2 s, 80 layers that all differ 0.5 s (16,000 pairs).

A mixed-integer program (``scipy.optimize.milp``, no gap allowed) does not need to know each layer by itself: it can
count how many of a run of equal layers take each choice. It takes 0.06 s for the 80 equal layers. But where kinds
alternate such runs are short, and the second case takes it 20 to over 60 s. It is also exact only up to its tolerances.
The tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recompute.errors import BudgetError
from recompute.profiling.cost_table import Choice, Profile
from recompute.units import humanize

Assignment = tuple[int, ...]
"""For each place, the index of its choice among its region's."""

MomentKind = Literal["forward", "backward", "optimizer step"]

_PICOSECONDS = 1e12
_FRONTIER_POINTS = 21


class Moment(NamedTuple):
    """A part of the step: of the place with the index ``place``, or, if that is None, the optimizer's step."""

    kind: MomentKind
    place: int | None = None


class Prediction(NamedTuple):
    """What a step takes."""

    peak_nbytes: int
    """The most bytes alive at once, static bytes included."""
    peak_moment: str
    """When that is: "backward of model.layers.3", "optimizer step" …"""
    held_nbytes: int
    """What is held for backward when forward has ended, without static bytes."""
    step_seconds: float


class Solution(NamedTuple):
    """How each place runs, and what the step is predicted to take then."""

    assignment: Assignment
    prediction: Prediction


class Uniform(NamedTuple):
    """A solution of one choice: each region that offers a choice of this name has it, any other its first choice."""

    choice: str
    solution: Solution


def choices_of(profile: Profile, assignment: Assignment) -> list[Choice]:
    """The choice of each place."""
    regions = [profile.regions[place.region] for place in profile.places]
    return [region.choices[index] for region, index in zip(regions, assignment, strict=True)]


def moments(profile: Profile, assignment: Assignment) -> Iterator[tuple[Moment, int]]:
    """Each moment of the step, and the most bytes alive at once during it, static bytes included."""
    choices, above = choices_of(profile, assignment), _gradients_above(profile)
    alive = profile.static_nbytes
    for i, choice in enumerate(choices):
        yield Moment("forward", i), alive + choice.forward_peak_nbytes
        yield Moment("backward", i), alive + choice.backward_peak_nbytes + above[i + 1]
        alive += choice.held_nbytes
    yield Moment("optimizer step"), profile.static_nbytes + above[0] + profile.optimizer_peak_nbytes


def predict(profile: Profile, assignment: Assignment) -> Prediction:
    """What the step takes if each place runs as ``assignment`` says."""
    choices = choices_of(profile, assignment)
    moment, peak = max(moments(profile, assignment), key=lambda pair: pair[1])
    seconds = [profile.optimizer_seconds]
    for choice in choices:
        seconds += [choice.forward_seconds, choice.backward_seconds]
    return Prediction(
        peak, moment_name(profile, moment), sum(choice.held_nbytes for choice in choices), math.fsum(seconds)
    )


def moment_name(profile: Profile, moment: Moment) -> str:
    """The moment as messages name it: "backward of model.layers.3"."""
    if moment.place is None:
        return moment.kind
    place = profile.places[moment.place]
    return f"{moment.kind} of {place.path or profile.regions[place.region].name}"


def solve(profile: Profile, budget_nbytes: int) -> Solution:
    """The fastest assignment whose memory is at no moment above the budget; of equally fast ones, the least peak wins.

    Raises ``BudgetError`` where there is none. It names the least peak that any assignment has.
    """
    best = _fastest(profile, budget_nbytes)
    if best is None:
        raise BudgetError(_impossible(profile, budget_nbytes))
    while (leaner := _fastest(profile, best.prediction.peak_nbytes - 1)) is not None:
        if _picoseconds_of(profile, leaner) > _picoseconds_of(profile, best):
            break
        best = leaner
    return best


def floor(profile: Profile) -> Solution:
    """An assignment with the least peak of all: no smaller budget can be met. Another with this peak may be faster."""
    first = tuple(0 for _ in profile.places)
    low, high = 0, predict(profile, first).peak_nbytes  # the budget high can be met, none below low can
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _leanest(profile, middle) is not None else (middle + 1, high)
    assignment = _leanest(profile, high)
    assert assignment is not None, "the budget that an assignment takes is met by it"
    return Solution(assignment, predict(profile, assignment))


def is_fastest(profile: Profile, solution: Solution) -> bool:
    """Whether no assignment is faster, whatever its peak."""
    least = [min(map(_picoseconds, region.choices)) for region in profile.regions]
    return _picoseconds_of(profile, solution) == sum(least[place.region] for place in profile.places)


def uniforms(profile: Profile, budget_nbytes: int) -> list[Uniform]:
    """For each name of a choice, the uniform solution of it, if that is within the budget; the fastest first."""
    names = dict.fromkeys(choice.name for region in profile.regions for choice in region.choices)
    found = []
    for name in names:
        indices = [[choice.name for choice in region.choices] for region in profile.regions]
        of_region = [row.index(name) if name in row else 0 for row in indices]
        assignment = tuple(of_region[place.region] for place in profile.places)
        found.append(Uniform(name, Solution(assignment, predict(profile, assignment))))
    fitting = [uniform for uniform in found if uniform.solution.prediction.peak_nbytes <= budget_nbytes]
    return sorted(fitting, key=lambda uniform: _order(uniform.solution))


def frontier(
    profile: Profile, points: int = _FRONTIER_POINTS, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Solution]:
    """The best that each budget gives, from the fastest solution to the one with the least peak.

    No assignment has both a smaller peak and fewer seconds than one of these solutions. There are at most ``points`` of
    them (2 or more), which include both ends. Where the frontier has more, budgets at equal distances are solved for.
    """
    least = floor(profile).prediction.peak_nbytes
    found = [solve(profile, _unbounded(profile))]
    most = found[0].prediction.peak_nbytes
    for i in range(1, points):
        if found[-1].prediction.peak_nbytes == least:
            break
        progress(len(found), points)
        budget = most - (most - least) * i // (points - 1)
        found.append(solve(profile, min(budget, found[-1].prediction.peak_nbytes - 1)))
    return found


def _order(solution: Solution) -> tuple[float, int]:
    return solution.prediction.step_seconds, solution.prediction.peak_nbytes


def _unbounded(profile: Profile) -> int:
    """A budget that every assignment fits into."""
    dearest = [max(region.choices, key=_most_alive) for region in profile.regions]
    return (
        profile.static_nbytes
        + profile.optimizer_peak_nbytes
        + sum(_most_alive(dearest[place.region]) for place in profile.places)
        + _gradients_above(profile)[0]
    )


def _most_alive(choice: Choice) -> int:
    return max(choice.held_nbytes, choice.forward_peak_nbytes, choice.backward_peak_nbytes)


def _gradients_above(profile: Profile) -> list[int]:
    """For each place, the bytes of gradients that it and all places after it leave behind; a 0 follows the last.

    Backward runs the places from the last to the first, so these gradients are there once the place's backward is done.
    """
    above = [0]
    for place in reversed(profile.places):
        above.append(above[-1] + profile.regions[place.region].gradient_nbytes)
    return above[::-1]


def _picoseconds(choice: Choice) -> int:
    return round((choice.forward_seconds + choice.backward_seconds) * _PICOSECONDS)


def _picoseconds_of(profile: Profile, solution: Solution) -> int:
    return sum(map(_picoseconds, choices_of(profile, solution.assignment)))


def _undominated(choices: Sequence[Choice]) -> list[int]:
    """The indices of the choices that are worth trying, in order.

    A choice is not if another one is no worse in seconds, held bytes and both peaks. Of equal ones the first is tried.
    """
    costs = [
        (_picoseconds(choice), choice.held_nbytes, choice.forward_peak_nbytes, choice.backward_peak_nbytes)
        for choice in choices
    ]
    return [
        i
        for i, cost in enumerate(costs)
        if not any(
            all(map(int.__le__, other, cost)) and (other != cost or j < i) for j, other in enumerate(costs) if j != i
        )
    ]


def _room(profile: Profile, budget_nbytes: int) -> Iterator[tuple[int, int]]:
    """For each place, how many bytes may be alive in its forward and in its backward.

    Static bytes and, in backward, the gradients of the places after it are subtracted.
    """
    room = budget_nbytes - profile.static_nbytes
    for above in _gradients_above(profile)[1:]:
        yield room, room - above


def _fits_the_optimizer(profile: Profile, budget_nbytes: int) -> bool:
    needed = profile.static_nbytes + _gradients_above(profile)[0] + profile.optimizer_peak_nbytes
    return needed <= budget_nbytes


def _fastest(profile: Profile, budget_nbytes: int) -> Solution | None:
    """The fastest solution within the budget, by the steps of this file's docstring; None if there is none."""
    if not _fits_the_optimizer(profile, budget_nbytes):
        return None
    usable = [_undominated(region.choices) for region in profile.regions]
    held, picoseconds = np.zeros(1, np.int64), np.zeros(1, np.int64)
    # For each place and each pair there: the index of the pair before it, and the choice that leads from that to it.
    steps: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
    for place, (forward_room, backward_room) in zip(profile.places, _room(profile, budget_nbytes), strict=True):
        reached = []
        for index in usable[place.region]:
            choice = profile.regions[place.region].choices[index]
            most = min(forward_room - choice.forward_peak_nbytes, backward_room - choice.backward_peak_nbytes)
            end = int(np.searchsorted(held, most, side="right"))  # held is sorted: the pairs up to here fit
            reached.append((held[:end] + choice.held_nbytes, picoseconds[:end] + _picoseconds(choice), index, end))
        held, picoseconds = np.concatenate([row[0] for row in reached]), np.concatenate([row[1] for row in reached])
        if not len(held):
            return None
        # This sort is stable: of equal pairs, the one by the choice that is listed first stays.
        order = np.lexsort((picoseconds, held))
        best_before = np.minimum.accumulate(picoseconds[order])
        order = order[np.concatenate([[True], picoseconds[order][1:] < best_before[:-1]])]
        held, picoseconds = held[order], picoseconds[order]
        before = np.concatenate([np.arange(end) for *_, end in reached])
        indices = np.repeat([index for *_, index, _ in reached], [end for *_, end in reached])
        steps.append((before[order], indices[order]))
    at = len(held) - 1  # of the pairs that are left, the one with the most bytes has the fewest seconds
    assignment = []
    for before, indices in reversed(steps):
        assignment.append(int(indices[at]))
        at = int(before[at])
    return _tidied(profile, tuple(reversed(assignment)))


def _tidied(profile: Profile, assignment: Assignment) -> Solution:
    """The assignment, tidied: equal choices stand together where that does not raise the peak.

    A plan such as "layers 0-15 run one way, 16-31 another" is easier to read than one that alternates. So the choices
    of one region's places are sorted, once among places next to each other and once among all of them. Of the three
    assignments, leave out those with a higher peak than before; the one with the fewest changes is returned. Seconds
    and held bytes stay what they are, since only places of the same region swap choices.

    The order is the one that keeps backward's peak low. Take two neighbours, a before b, of a region that leaves g
    bytes of gradients, with the backward peaks A and B. While b runs backward, a holds held_a; while a does, b has left
    g. So the peak of the two, less g, is max(A, a' + B), where a' = held_a - g. With their choices swapped it is
    max(B, b' + A). The first is no higher

    - if a' < 0 <= b',
    - if both a' and b' are negative, and A <= B,
    - if neither is negative, and A - a' >= B - b'.
    """

    def order(i: int) -> tuple[bool, int, int]:
        region = profile.regions[profile.places[i].region]
        choice = region.choices[assignment[i]]
        grows = choice.held_nbytes >= region.gradient_nbytes
        peak = choice.backward_peak_nbytes
        return grows, choice.held_nbytes - peak if grows else peak, assignment[i]

    regions = [place.region for place in profile.places]
    runs = np.cumsum([0, *(a != b for a, b in pairwise(regions))]).tolist()
    found = [Solution(assignment, predict(profile, assignment))]
    for group in (runs, regions):
        ordered = list(assignment)
        for key in set(group):
            places = [i for i, of in enumerate(group) if of == key]
            for i, j in zip(places, sorted(places, key=order), strict=True):
                ordered[i] = assignment[j]
        found.append(Solution(tuple(ordered), predict(profile, tuple(ordered))))
    fitting = [other for other in found if other.prediction.peak_nbytes <= found[0].prediction.peak_nbytes]
    return min(fitting, key=lambda other: _changes(profile, other.assignment))


def _changes(profile: Profile, assignment: Assignment) -> int:
    """How often the choice changes from a place to the next one of the same region."""
    latest: dict[int, int] = {}
    count = 0
    for place, index in zip(profile.places, assignment, strict=True):
        count += latest.get(place.region, index) != index
        latest[place.region] = index
    return count


def _leanest(profile: Profile, budget_nbytes: int) -> Assignment | None:
    """An assignment within the budget; None if there is none.

    Each place takes the choice that fits and holds the least, which leaves the most room for the places after it.
    """
    if not _fits_the_optimizer(profile, budget_nbytes):
        return None
    held = 0
    assignment = []
    for place, (forward_room, backward_room) in zip(profile.places, _room(profile, budget_nbytes), strict=True):
        choices = profile.regions[place.region].choices
        fitting = [
            (choice.held_nbytes, _picoseconds(choice), index)
            for index, choice in enumerate(choices)
            if held + choice.forward_peak_nbytes <= forward_room and held + choice.backward_peak_nbytes <= backward_room
        ]
        if not fitting:
            return None
        least, _, index = min(fitting)
        held += least
        assignment.append(index)
    return tuple(assignment)


def _impossible(profile: Profile, budget_nbytes: int) -> str:
    """The error's message: why no plan meets the budget, which budget could be met, and what else would help."""
    best = floor(profile)
    moment, peak = max(moments(profile, best.assignment), key=lambda pair: pair[1])
    gradients = _gradients_above(profile)
    alive = gradients[0 if moment.place is None else moment.place + 1 if moment.kind == "backward" else -1]
    static = profile.static_nbytes
    helps = []
    if moment.place is None and profile.optimizer_peak_nbytes:
        helps.append(
            f"an optimizer whose step needs less than {humanize(profile.optimizer_peak_nbytes)} of its own (fused=True)"
        )
    if moment.place == len(profile.places) - 1:
        helps.append("a cross-entropy in chunks, which makes no logits (policy auto, or kernels.linear_cross_entropy)")
    if static + alive >= peak // 2:
        helps.append("more shards (FSDP, ZeRO), optimizer states of fewer bytes, or offloading them")
    helps.append("a smaller batch or shorter sequences")
    if budget_nbytes < static:
        what = f"is below static memory (parameters, optimizer states, the batch), which is {humanize(static)}"
    else:
        what = "cannot be met"
    shares = f"static memory is {humanize(static)} of it" + (f", gradients are {humanize(alive)}" if alive else "")
    return (
        f"a budget of {humanize(budget_nbytes)} ({budget_nbytes:,} bytes) {what}: whatever is chosen, "
        f"{humanize(peak)} ({peak:,} bytes) are alive at once, in the {moment_name(profile, moment)} ({shares}). "
        f"What would help: {'; '.join(helps)}"
    )
