"""Chooses the ways to run a region that are worth measuring: as it is, by hooks, by kernels, and under a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from recompute.engine.cut.frontier import Point, finer_frontier, frontier
from recompute.engine.cut.ops import facts
from recompute.engine.cut.save_plan import FrameSteps, SavePlan, solve
from recompute.policy.rules import FAMILIES, PRICE, REPEATABLE, size_as_written
from recompute.substitution.head import held_by_loss
from recompute.units import humanize

TILE = 16384
"""An MLP in tiles computes so many tokens at a time, as in the preset ``long``."""

_MOST_POINTS = 8  # by prices, on a frontier of hooks or of kernels
_MOST_IN_ALL = 12  # on both frontiers together, points by limits of bytes included
# The fewest points by limits, however many there are by prices. A Llama layer has 22 ways to run then. Three
# assignments profile them for 32 layers, and seven for 8. Its 18 ways by prices take three and six assignments.
_LEAST_FINER = 4
# Two points are not worth telling apart if they differ by less than this, in shares of the most that any point holds
# and of the region's own seconds.
_CLOSE = 0.03
_ALIKE = 0.01  # of what a point holds: another one that holds as much may as well stand for it
_MIB = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """A way to run a region: a name, the fields of a rule, and about how much it should hold."""

    name: str
    rule: Mapping[str, Any] | None
    predicted_nbytes: int


KEEP = "keep"
CHECKPOINT = "checkpoint"
HOOK = "hook"
KERNEL = "kernel"


def recomputing_rule(via: str) -> dict[str, Any]:
    """The fields of a rule that runs no costly op again."""
    return {"action": "recompute", "via": via}


def rerunning_rule(via: str) -> dict[str, Any]:
    """The fields of a rule that may run every repeatable op again."""
    return {**recomputing_rule(via), "rerun": [family for family in FAMILIES if family in REPEATABLE], "price": 0.0}


def candidates_of(
    by_hooks: SavePlan | None,
    by_kernels: SavePlan | None,
    via_kernels: str | None,
    *,
    on_a_tape: bool = False,
    in_tiles: str | None = None,
    compress: bool = False,
) -> list[Candidate]:
    """The ways to run a region whose ops these plans list.

    on_a_tape: whether a tape runs around its kernels, whatever the rule says. If not, a rule without ``rerun`` and
        without a price drops only tensors that kernels regenerate themselves.
    in_tiles: the ``via`` of a kernel that computes the MLP over some tokens at a time; None: there is none.
    compress: whether some ways hold 8-bit codes.
    """
    as_it_is, cheap = Point({}, _saved_nbytes(by_hooks), 0.0), _cheap(by_hooks, HOOK)
    plain = Point(recomputing_rule(via_kernels or HOOK), _saved_nbytes(by_kernels), 0.0)
    if via_kernels is not None and on_a_tape:
        plain = _cheap(by_kernels, via_kernels)
    further = {HOOK: _Frontier(by_hooks, HOOK, (as_it_is, cheap))}
    if via_kernels is not None:
        further[KERNEL] = _Frontier(by_kernels, via_kernels, (plain,))
    *_, last = further.values()  # where kernels stand in, plans rarely choose hooks
    last.refine(max(_MOST_IN_ALL - sum(len(one.points) for one in further.values()), _LEAST_FINER))
    found = [Candidate(KEEP, None, as_it_is.held_nbytes)]
    for how, frontier_of in further.items():
        point = cheap if how == HOOK else plain
        found.append(Candidate(how, point.rule, point.held_nbytes))
        if compress:
            rule = {**point.rule, "compress": True}
            found.append(Candidate(f"{how}, in 8 bits", rule, point.held_nbytes // 2))  # about half of the bytes
        found += frontier_of.candidates(how)
    if in_tiles is not None:
        found += _in_tiles(in_tiles, cheap if via_kernels is None else plain)
    if by_hooks is not None and any(facts(step.op).family == "attention" for step in by_hooks.steps if step.is_costly):
        found.append(Candidate(f"{CHECKPOINT}, attention kept", {"action": "checkpoint", "keep": ["attention"]}, 1))
    found.append(Candidate(CHECKPOINT, {"action": "checkpoint"}, 0))
    return found


def head_candidates(via: str, head: nn.Module, logits: Tensor | None) -> list[Candidate]:
    """The ways to have kernels stand in for what runs after the regions, up to ``head``.

    logits: the head's output in a forward, on any device; None if ``head`` is a norm, and the model has no head.

    A head that holds its logits until backward does not recompute them. That is another way where logits take more
    memory than the kernel holds anyway.
    """
    rule = recomputing_rule(via)
    found = [Candidate(KERNEL, rule, -1)]
    if logits is not None:
        weight: Any = head.weight
        usual, most = held_by_loss(logits, weight), held_by_loss(logits, weight, math.inf)
        if most > (1 + _CLOSE) * usual:
            hold = size_as_written(-(-most // _MIB) * _MIB)
            found.append(Candidate(f"{KERNEL}, holding the logits", {**rule, "hold": hold}, most))
    return found


def _saved_nbytes(plan: SavePlan | None) -> int:
    """The bytes of all saved tensors that are not alive anyway."""
    known = () if plan is None else [plan.facts[number] for number in plan.demanded]
    return sum(each.nbytes for each in known if not each.alive)


def _in_tiles(via: str, plain: Point) -> Iterator[Candidate]:
    """Ways that never make a tensor of the MLP's width for all tokens, which is the peak of long sequences.

    The last one counts as holding least of all. A checkpoint's backward makes such tensors.
    """
    rerun = rerunning_rule(via)
    others = [family for family in rerun["rerun"] if family != "attention"]
    yield Candidate(f"{KERNEL}, in tiles", {**plain.rule, "via": via, "tile": TILE}, plain.held_nbytes)
    yield Candidate(f"{KERNEL}, in tiles, attention kept", {**rerun, "rerun": others, "tile": TILE}, 1)
    yield Candidate(f"{KERNEL}, in tiles, all run again", {**rerun, "tile": TILE}, -1)


def _cheap(plan: SavePlan | None, via: str) -> Point:
    """The rule that runs no costly op again."""
    rule = recomputing_rule(via)
    if plan is None:
        return Point(rule, 0, 0.0)
    steps = [step._replace(reason="costly") if step.is_costly else step for step in plan.steps]
    least = solve(FrameSteps(steps, plan.facts, plan.saves, plan.overwritten), (), PRICE)
    return Point(rule, least.kept_nbytes, sum(steps[index].seconds for index in least.rerun))


class _Frontier:
    """The further points of a plan that are worth measuring, each from the one that holds most."""

    def __init__(self, plan: SavePlan | None, via: str, others: Sequence[Point]) -> None:
        """others: points that are measured in any case."""
        fields = rerunning_rule(via)
        by_price = [] if plan is None else frontier(plan)
        points = [point._replace(rule={**fields, **point.rule}) for point in by_price]
        self._plan, self._fields, self._others = plan, fields, others
        self._nbytes = max(point.held_nbytes for point in (*points, *others))
        self._seconds = 0.0 if plan is None else sum(step.seconds for step in plan.steps)
        self.points = self._apart(_without_twins(points), others)
        """The points of prices; of many, the most telling ones."""
        while len(self.points) > _MOST_POINTS:
            losses = [_area(*self.points[index - 1 : index + 2]) for index in range(1, len(self.points) - 1)]
            del self.points[1 + losses.index(min(losses))]
        self._finer: list[Point] = []

    def refine(self, most: int) -> None:
        """Add the most useful points of limits of bytes, up to ``most``."""
        fields = {key: value for key, value in self._fields.items() if key != "price"}
        by_limit = [] if self._plan is None else finer_frontier(self._plan)
        finer = [point._replace(rule={**fields, "hold": size_as_written(point.rule["hold"])}) for point in by_limit]
        self._finer = self._apart(finer, (*self._others, *self.points))
        while len(self._finer) > most:
            self._finer.remove(min(self._finer, key=self._loss_without))

    def _apart(self, points: Sequence[Point], others: Sequence[Point]) -> list[Point]:
        """The points that are close neither to others nor to each other. Of two close ones, the leaner one stays."""
        kept: list[Point] = []
        for point in reversed(points):
            if not any(
                abs(point.held_nbytes - other.held_nbytes) <= _CLOSE * self._nbytes
                and abs(point.rerun_seconds - other.rerun_seconds) <= _CLOSE * self._seconds
                for other in (*others, *kept)
            ):
                kept.append(point)
        return kept[::-1]

    def _loss_without(self, point: Point) -> float:
        """The loss without a point, in bytes times seconds.

        A budget between it and the next larger point would take the next smaller one.
        """
        points = (*self._others, *self.points, *self._finer)
        more = [other.held_nbytes for other in points if other.held_nbytes > point.held_nbytes]
        less = [other.rerun_seconds for other in points if other.held_nbytes < point.held_nbytes]
        return (min(more) - point.held_nbytes) * (min(less) - point.rerun_seconds) if more and less else math.inf

    def candidates(self, how: str) -> Iterator[Candidate]:
        points = sorted((*self.points, *self._finer), key=lambda point: -point.held_nbytes)
        texts = Counter(humanize(point.held_nbytes) for point in points)
        for point in points:  # no two of them hold the same number of bytes
            text = humanize(point.held_nbytes)
            exact = f"{point.held_nbytes:,} B" if texts[text] > 1 else text
            yield Candidate(f"{how}, holding {exact}", point.rule, point.held_nbytes)


def _without_twins(points: Sequence[Point]) -> list[Point]:
    """Of points that hold about the same, the one that takes the least time: a norm's statistics make no difference."""
    kept: list[Point] = []
    for point in points:  # from the one that holds most
        if not kept or kept[-1].held_nbytes > (1 + _ALIKE) * point.held_nbytes:
            kept.append(point)
    return kept


def _area(left: Point, middle: Point, right: Point) -> float:
    """Twice the area of the triangle of three points of a frontier: the loss without the middle one."""
    (a, b), (c, d) = [
        (one.held_nbytes - two.held_nbytes, two.rerun_seconds - one.rerun_seconds)
        for one, two in pairwise([left, middle, right])
    ]
    return abs(a * d - b * c)
