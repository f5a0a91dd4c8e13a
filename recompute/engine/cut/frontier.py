"""The frontier of a region: the bytes that it holds under each price, and under each limit."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from recompute.engine.cut.best_cuts import CutCosts, costs_of, cuts_by_nbytes, sweep
from recompute.engine.cut.save_plan import SavePlan, tables


class Point(NamedTuple):
    """A way to run a region: fields of a rule, the bytes that are held then, and the time of ops that run again."""

    rule: Mapping[str, Any]
    """Of a frontier: ``price`` in bytes a second, or ``hold`` in bytes, well inside of this point's interval."""
    held_nbytes: int
    """The bytes of the values that are kept and do not live anyway."""
    rerun_seconds: float
    """The time of running ops again, on the nominal accelerator of ``engine.cut.ops``."""


def frontier(plan: SavePlan) -> list[Point]:
    """The points that prices give the region of ``plan``, from the one that holds most to the one that holds least.

    An op that the plan's rule does not run again does not run again here either; the plan does not even know its time.
    So have the plan made by a rule whose ``rerun`` lists all families in question. Its ``price`` does not matter.
    """
    values, ops = tables(plan)
    return [_point(costs_of(values, ops, cut), price=price) for price, cut in sweep(values, ops)]


def finer_frontier(plan: SavePlan) -> list[Point]:
    """The points that limits of bytes give, from the one that holds most to the one that holds least.

    Points of ``frontier`` are among them. The plan is as ``frontier`` takes it. A point is left out if the next one
    holds so little more that a limit between the two would be a matter of chance.
    """
    cuts = cuts_by_nbytes(*tables(plan))
    least_gap = _TELLING * cuts[0].nbytes
    return [
        _point(cut, hold=_between(cut.nbytes, more.nbytes))
        for more, cut in pairwise(cuts)
        if more.nbytes - cut.nbytes >= least_gap
    ]


def _point(costs: CutCosts, **rule: float) -> Point:
    return Point(rule, costs.nbytes, float(costs.seconds))


_TELLING = 0.01  # of the most that a cut holds


def _between(low: int, high: int) -> int:
    """About the mean of two numbers of bytes, a multiple of the largest power of two that is far from both."""
    middle, unit = (low + high) // 2, 1
    while low + (high - low) // 4 <= (middle // (2 * unit)) * 2 * unit:
        unit *= 2
    return middle // unit * unit
