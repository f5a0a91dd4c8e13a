"""Chooses how each region of a training step runs, so that the step is the fastest within a budget.

It knows the profile's table alone, and runs no model. ``prediction`` says which bytes are alive at every moment of a
step. At all moments they must stay within the budget, and offloaded ones within the host's memory, where the profile
knows its link to the host. ``microbatches`` says how choices are found for several microbatches in flight.

Gradients do not depend on choices. So the choices before i affect i and later places by few numbers, which allows
dynamic programming: see ``cheapest_walk``. It assumes no order of the choices, of the peaks or of the places. It is
exact, since bytes are integers and seconds are whole picoseconds. The table is less exact than that: the seconds of
choices that offload are not measured (``profiling.offloaded_choices``).

The host's memory rarely binds, so Σ moved is carried along only where the fastest assignment is above it. That is exact
for models of some ten layers. For larger ones it would take minutes: there the first so many places offload, as many as
there is room for, and the choices are the fastest with that. It finds an assignment wherever there is one.

Measured on one core, for 80 layers: 15 choices take 0.15 s if the layers are equal or of two kinds, and 0.6 s if all
differ. The 128 choices that a Llama-8B layer has on an H200, with those that offload, take 0.6 to 1.1 s, and 15 s where
the host's memory binds.

A mixed-integer program (``scipy.optimize.milp``) takes 0.06 s for 80 equal layers, but 20 to over 60 s if every sixth
is of another kind, and is exact only up to its tolerances. The tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from recompute.errors import BudgetError
from recompute.planning import cheapest_walk
from recompute.planning.cheapest_walk import Way
from recompute.planning.microbatches import Needs, within_shared_room
from recompute.planning.prediction import (
    Assignment,
    Prediction,
    choices_of,
    gradients_above,
    held_nbytes_of,
    moment_name,
    moments,
    predict,
    staying_nbytes,
)
from recompute.profiling.cost_table import Choice, Profile
from recompute.units import humanize

_PICOSECONDS = 1e12
_FRONTIER_POINTS = 21
_UNBOUNDED = 1 << 50  # bytes: every assignment fits into that budget


class Solution(NamedTuple):
    """How each place runs, and the step's prediction."""

    assignment: Assignment
    prediction: Prediction


class Uniform(NamedTuple):
    """A solution of one choice: each region that offers a choice of this name has it, any other its first choice."""

    choice: str
    solution: Solution


def solve(profile: Profile, budget_nbytes: int) -> Solution:
    """The fastest assignment whose memory is at no moment above the budget; of equally fast ones, the least peak wins.

    Raises ``BudgetError`` where there is none. It names the least peak that any assignment has.
    """
    problem = _Problem(profile)
    best = problem.fastest(budget_nbytes)
    if best is None:
        raise BudgetError(_impossible(profile, budget_nbytes))
    seconds = _picoseconds_of(profile, best)
    while (leaner := problem.fastest(best.prediction.peak_nbytes - 1, seconds)) is not None:
        best = leaner
    return best


def floor(profile: Profile) -> Solution:
    """An assignment with the least peak of all: no smaller budget can be met. Another with this peak may be faster.

    Raises ``BudgetError`` where every assignment offloads more than the host's memory can hold.
    """
    problem, low = _Problem(profile), profile.static_nbytes
    found = problem.leanest(_UNBOUNDED)
    if found is None:
        raise BudgetError(_too_much_for_the_host(profile))
    best = Solution(found, predict(profile, found))
    while low < best.prediction.peak_nbytes:  # none below low can be met
        middle = (low + best.prediction.peak_nbytes) // 2
        if (found := problem.leanest(middle)) is None:
            low = middle + 1
        else:
            best = Solution(found, predict(profile, found))
    return best


def is_fastest(profile: Profile, solution: Solution) -> bool:
    """Whether no assignment is faster, whatever its peak."""
    least = [min(map(_picoseconds, region.choices)) for region in profile.regions]
    return _picoseconds_of(profile, solution) == sum(least[place.region] for place in profile.places)


def uniforms(profile: Profile, budget_nbytes: int) -> list[Uniform]:
    """The uniform solution of each name of a choice, if that is within the budget; the fastest first.

    The parts before the first region and after the last one may have other choices, which make no uniform solution.
    """
    inner = profile.places[1:-1] or profile.places
    names = dict.fromkeys(choice.name for place in inner for choice in profile.regions[place.region].choices)
    rows = [[choice.name for choice in region.choices] for region in profile.regions]
    found = []
    for name in names:
        of_region = [row.index(name) if name in row else 0 for row in rows]
        assignment = tuple(of_region[place.region] for place in profile.places)
        solution = Solution(assignment, predict(profile, assignment))
        if solution.prediction.peak_nbytes <= budget_nbytes and _fits_the_host(profile, assignment):
            found.append(Uniform(name, solution))
    return sorted(found, key=lambda uniform: _order(uniform.solution))


def frontier(
    profile: Profile, points: int = _FRONTIER_POINTS, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Solution]:
    """The best that each budget gives, from the fastest solution to the one with the least peak.

    No assignment has both a smaller peak and fewer seconds than one of these solutions. There are at most ``points`` of
    them (2 or more), which include both ends. Where the frontier has more, budgets at equal distances are solved for.
    """
    least = floor(profile).prediction.peak_nbytes
    found = [solve(profile, _UNBOUNDED)]
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


def _picoseconds(choice: Choice) -> int:
    return round((choice.forward_seconds + choice.backward_seconds) * _PICOSECONDS)


def _picoseconds_of(profile: Profile, solution: Solution) -> int:
    return sum(map(_picoseconds, choices_of(profile, solution.assignment)))


def _undominated(choices: Sequence[Choice], host_binds: bool) -> list[int]:
    """The indices of the choices that are worth trying, in order.

    A choice is not if another one is no worse in seconds, in both peaks, in held bytes before and after offloading,
    and, if the host's memory binds, in moved bytes. Of equal ones the first is tried. A choice that offloads nothing
    makes no offloading one redundant: it does not have the bytes of the place before leave.
    """

    def costs_of(choice: Choice) -> tuple[int, ...]:
        peaks = choice.forward_peak_nbytes, choice.backward_peak_nbytes
        moved = choice.moved_nbytes if host_binds else 0
        return _picoseconds(choice), choice.held_nbytes, staying_nbytes(choice), *peaks, moved

    costs = [costs_of(choice) for choice in choices]

    def is_better(j: int, i: int) -> bool:
        if choices[i].moved_nbytes and not choices[j].moved_nbytes:
            return False
        return all(map(int.__le__, costs[j], costs[i])) and (costs[j] != costs[i] or j < i)

    return [i for i in range(len(choices)) if not any(is_better(j, i) for j in range(len(choices)) if j != i)]


class _Problem:
    """A profile, and the choices in it that are worth trying."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._usable: dict[bool, list[list[int]]] = {}

    def leanest(self, budget_nbytes: int) -> Assignment | None:
        """An assignment within the budget and the host's memory; None if there is none."""
        found = self._within_room(budget_nbytes, staying_nbytes)
        if found is None or _fits_the_host(self.profile, found):
            return found
        places = self._places(budget_nbytes, lambda choice: choice.moved_nbytes, host_binds=True)
        found = cheapest_walk.cheapest(places)
        return None if found is None or not _fits_the_host(self.profile, found) else found

    def fastest(self, budget_nbytes: int, most_picoseconds: int | None = None) -> Solution | None:
        """The fastest solution within the budget and the host's memory; None if there is none.

        most_picoseconds: the most that its regions may take.
        """
        if self.leanest(budget_nbytes) is None:
            return None
        found = self._within_room(budget_nbytes, _picoseconds, most_picoseconds)
        if found is not None and not _fits_the_host(self.profile, found):
            assert self.profile.link is not None, "without a link the host has no bound"
            assert self.profile.microbatches_in_flight == 1, "with several in flight no region offloads"
            places = self._places(budget_nbytes, host_binds=True)
            found = cheapest_walk.cheapest(places, most_picoseconds, self.profile.link.host_nbytes)
            if found is None and most_picoseconds is None:
                found = self._first_offload(budget_nbytes, places)
        return None if found is None else _tidied(self.profile, found)

    def _within_room(
        self, budget_nbytes: int, cost: Callable[[Choice], int], most: int | None = None
    ) -> Assignment | None:
        """The cheapest assignment within the budget, also if several microbatches are in flight; the host may not bind.

        most: the highest cost to look for.
        """
        others = self.profile.microbatches_in_flight - 1
        room = budget_nbytes - self.profile.static_nbytes
        if not others:
            return cheapest_walk.cheapest(self._places(budget_nbytes, cost), most)

        def find_one(own: int, held: int) -> Assignment | None:
            # After its last place a microbatch is in flight as the others are: there it may hold as much as they.
            end = [Way(0, 0, 0, 0, held)]
            places = self._places(self.profile.static_nbytes + own, cost, step_room=room)
            found = cheapest_walk.cheapest([*places, end], most)
            return None if found is None else found[:-1]

        def needs(assignment: Assignment) -> Needs:
            choices = choices_of(self.profile, assignment)
            held = held_nbytes_of(choices)
            alive = [nbytes for moment, nbytes in moments(self.profile, assignment) if moment.place is not None]
            return Needs(max(alive) - self.profile.static_nbytes - others * held, held, sum(map(cost, choices)))

        return within_shared_room(room, others, find_one, needs)

    def _first_offload(self, budget_nbytes: int, places: cheapest_walk.Places) -> Assignment:
        """A fast assignment within the budget and the host's memory, where to find the fastest would take long.

        It is the fastest of those in which only the first so many places offload, or offload more than they have to.
        These hold for the longest time. How many they are is found by halving.
        """
        lean = self.leanest(budget_nbytes)
        assert lean is not None, "the budget can be met"
        fitting, low, high = [lean], 0, len(places) + 1
        while high - low > 1:
            count = (low + high) // 2
            few = [
                ways if i < count else [way for way in ways if way.moved == min(other.moved for other in ways)]
                for i, ways in enumerate(places)
            ]
            found = cheapest_walk.cheapest(few)
            if found is None or _fits_the_host(self.profile, found):
                low = count
            else:
                high = count
            if found is not None and _fits_the_host(self.profile, found):
                fitting.append(found)
        return min(fitting, key=lambda assignment: _order(Solution(assignment, predict(self.profile, assignment))))

    def _places(
        self,
        budget_nbytes: int,
        cost: Callable[[Choice], int] = _picoseconds,
        *,
        host_binds: bool = False,
        step_room: int | None = None,
    ) -> list[list[Way]]:
        """The ways to pass each place; none where the optimizer's step alone is over the budget.

        step_room: the bytes that the optimizer's step has, if these are not as many as forward and backward have.
        """
        profile, room = self.profile, budget_nbytes - self.profile.static_nbytes
        above = gradients_above(profile)
        if above[0] + profile.optimizer_peak_nbytes > (room if step_room is None else step_room):
            return [[] for _ in profile.places]
        if host_binds not in self._usable:
            self._usable[host_binds] = [_undominated(region.choices, host_binds) for region in profile.regions]
        found = []
        for place, gradients in zip(profile.places, above[1:], strict=True):
            ways = []
            for index in self._usable[host_binds][place.region]:
                choice = profile.regions[place.region].choices[index]
                most = min(room - choice.forward_peak_nbytes, room - gradients - choice.backward_peak_nbytes)
                if most >= 0:
                    ways.append(Way(index, cost(choice), staying_nbytes(choice), choice.moved_nbytes, most))
            found.append(ways)
        return found


def _fits_the_host(profile: Profile, assignment: Assignment) -> bool:
    moved = sum(choice.moved_nbytes for choice in choices_of(profile, assignment))
    return profile.link is None or moved <= profile.link.host_nbytes


def _tidied(profile: Profile, assignment: Assignment) -> Solution:
    """The assignment, tidied: equal choices stand together where that does not raise the peak.

    A plan such as "layers 0-15 run one way, 16-31 another" is easier to read than one that alternates. So the choices
    of one region's places are sorted, once among places next to each other and once among all of them. Of the three
    assignments, leave out those with a higher peak than before; the one with the fewest changes is returned. Seconds,
    held bytes and moved bytes stay what they are, since only places of the same region swap choices.

    The order is the one that keeps backward's peak low, where nothing is offloaded. Take two neighbours, a before b, of
    a region that leaves g bytes of gradients, with the backward peaks A and B. While b runs backward, a holds held_a;
    while a does, b has left g. So the peak of the two, less g, is max(A, a' + B), where a' = held_a - g. With their
    choices swapped it is max(B, b' + A). The first is no higher

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


def _too_much_for_the_host(profile: Profile) -> str:
    """The error's message where no budget can be met."""
    assert profile.link is not None, "without a link the host has no bound"
    least = [min(choice.moved_nbytes for choice in region.choices) for region in profile.regions]
    return (
        f"every plan offloads at least {humanize(sum(least[place.region] for place in profile.places))}, and the host "
        f"has room for {humanize(profile.link.host_nbytes)}. Allow ways that offload less, or nothing"
    )


def _impossible(profile: Profile, budget_nbytes: int) -> str:
    """The error's message: why no plan meets the budget, which budget could be met, and what else would help."""
    best = floor(profile)
    moment, peak = max(moments(profile, best.assignment), key=lambda pair: pair[1])
    gradients = gradients_above(profile)
    alive = gradients[0 if moment.place is None else moment.place + 1 if moment.kind == "backward" else -1]
    static = profile.static_nbytes
    helps = []
    if moment.place is None and profile.optimizer_peak_nbytes:
        helps.append(
            f"an optimizer whose step needs less than {humanize(profile.optimizer_peak_nbytes)} more (fused=True)"
        )
    if moment.place == len(profile.places) - 1:
        helps.append("a cross-entropy without logits (policy auto, or kernels.linear_cross_entropy)")
    if static + alive >= peak // 2:
        helps.append("more shards (FSDP, ZeRO), smaller optimizer states, or offloading them")
    if profile.microbatches_in_flight > 1:
        helps.append("fewer microbatches in flight (more stages, or another schedule)")
    helps.append("a smaller batch or shorter sequences")
    if budget_nbytes < static:
        what = f"is below static memory (parameters, optimizer states, the batch), which is {humanize(static)}"
    else:
        what = "cannot be met"
    shares = f"static memory is {humanize(static)} of it" + (f", gradients are {humanize(alive)}" if alive else "")
    return (
        f"a budget of {humanize(budget_nbytes)} ({budget_nbytes:,} bytes) {what}: every plan needs at least "
        f"{humanize(peak)} ({peak:,} bytes), in the {moment_name(profile, moment)} ({shares}). "
        f"What would help: {'; '.join(helps)}"
    )
