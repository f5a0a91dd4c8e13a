"""Chooses the ways to run a region that are worth measuring: as it is, by hooks, by kernels, and under a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from recompute.engine.cut.frontier import frontier
from recompute.engine.cut.ops import facts
from recompute.engine.cut.save_plan import SavePlan, solve
from recompute.policy.meaning import REPEATABLE
from recompute.policy.rules import FAMILIES, PRICE
from recompute.units import humanize

_MOST_POINTS = 8  # of a frontier, hooks' or kernels'
# Two points are not worth telling apart if they differ by less than this, in shares of the most that any point holds
# and of the region's own seconds.
_CLOSE = 0.03


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
    """The fields of a rule by which no costly op runs again."""
    return {"action": "recompute", "via": via}


def rerunning_rule(via: str) -> dict[str, Any]:
    """The fields of a rule by which every op may run again that can be repeated at all."""
    return {**recomputing_rule(via), "rerun": [family for family in FAMILIES if family in REPEATABLE], "price": 0.0}


def candidates_of(
    by_hooks: SavePlan | None, by_kernels: SavePlan | None, via_kernels: str | None, *, compress: bool = False
) -> list[Candidate]:
    """The ways to run a region whose ops these plans list. compress: also those that hold what they can in 8 bits."""
    plain = _Point(None, _saved_nbytes(by_hooks), 0.0)
    cheap = _cheap(by_hooks)
    found = [Candidate(KEEP, None, plain.held_nbytes), Candidate(HOOK, cheap.rule, cheap.held_nbytes)]
    if compress:
        found.append(_in_8_bits(HOOK, cheap))
    found += _further(by_hooks, HOOK, HOOK, (plain, cheap))
    if via_kernels is not None:  # kernels hold what they save themselves, and drop nothing else
        plain = _Point(recomputing_rule(via_kernels), _saved_nbytes(by_kernels), 0.0)
        found.append(Candidate(KERNEL, plain.rule, plain.held_nbytes))
        if compress:
            found.append(_in_8_bits(KERNEL, plain))
        found += _further(by_kernels, via_kernels, KERNEL, (plain,))
    if by_hooks is not None and any(facts(step.op).family == "attention" for step in by_hooks.steps if step.is_costly):
        found.append(Candidate(f"{CHECKPOINT}, attention kept", {"action": "checkpoint", "keep": ["attention"]}, 1))
    found.append(Candidate(CHECKPOINT, {"action": "checkpoint"}, 0))
    return found


def _saved_nbytes(plan: SavePlan | None) -> int:
    """The bytes that are held if nothing is dropped: what autograd saves and what is not alive anyway."""
    known = () if plan is None else [plan.facts[number] for number in plan.demanded]
    return sum(each.nbytes for each in known if not each.alive)


class _Point(NamedTuple):
    """A way to run a region, by a rule or none, with its costs on a nominal accelerator."""

    rule: Mapping[str, Any] | None
    held_nbytes: int
    rerun_seconds: float


def _in_8_bits(how: str, exact: _Point) -> Candidate:
    """The same way, with codes of 8 bits in the places of what bears them: about half of what it holds."""
    return Candidate(f"{how}, in 8 bits", {**(exact.rule or {}), "compress": True}, exact.held_nbytes // 2)


def _cheap(plan: SavePlan | None) -> _Point:
    """The rule by which no costly op runs again."""
    rule = recomputing_rule(HOOK)
    if plan is None:
        return _Point(rule, 0, 0.0)
    steps = [step._replace(reason="costly") if step.is_costly else step for step in plan.steps]
    least = solve(steps, plan.facts, plan.saves, plan.overwritten, (), PRICE)
    return _Point(rule, least.kept_nbytes, sum(steps[index].seconds for index in least.rerun))


def _further(plan: SavePlan | None, via: str, how: str, others: Sequence[_Point]) -> Iterator[Candidate]:
    """The points of the plan's frontier that are not close to ``others``; if they are many, the most telling ones."""
    if plan is None:
        return
    points = [
        _Point({**rerunning_rule(via), "price": price}, held_nbytes, rerun_seconds)
        for price, held_nbytes, rerun_seconds in frontier(plan)
    ]
    nbytes = max(point.held_nbytes for point in (*points, *others))
    seconds = sum(step.seconds for step in plan.steps)
    kept: list[_Point] = []
    for point in reversed(points):  # of two that are close, the one that holds less is taken
        if not any(_are_close(point, other, nbytes, seconds) for other in (*others, *kept)):
            kept.append(point)
    while len(kept) > _MOST_POINTS:
        losses = [_area(*kept[index - 1 : index + 2]) for index in range(1, len(kept) - 1)]
        del kept[1 + losses.index(min(losses))]
    texts = Counter(humanize(point.held_nbytes) for point in kept)
    for point in reversed(kept):  # no two points of a frontier hold the same number of bytes
        text = humanize(point.held_nbytes)
        exact = f"{point.held_nbytes:,} B" if texts[text] > 1 else text
        yield Candidate(f"{how}, holding {exact}", point.rule, point.held_nbytes)


def _are_close(one: _Point, other: _Point, nbytes: int, seconds: float) -> bool:
    return (
        abs(one.held_nbytes - other.held_nbytes) <= _CLOSE * nbytes
        and abs(one.rerun_seconds - other.rerun_seconds) <= _CLOSE * seconds
    )


def _area(left: _Point, middle: _Point, right: _Point) -> float:
    """Twice the area of the triangle between three points of a frontier: what is lost without the middle one."""
    (a, b), (c, d) = [
        (one.held_nbytes - two.held_nbytes, two.rerun_seconds - one.rerun_seconds)
        for one, two in pairwise([left, middle, right])
    ]
    return abs(a * d - b * c)
