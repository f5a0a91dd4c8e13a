"""The frontier of a region: the bytes that it holds under each price, and under each limit."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from recompute.engine.cut.best_cuts import costs_of, cuts_by_nbytes, sweep
from recompute.engine.cut.save_plan import SavePlan, tables


class Point(NamedTuple):
    """The bytes that a region holds under a rule with ``price``, and the time of its ops that run again."""

    price: float
    """In bytes a second, as a rule takes it. It is well inside of this point's interval of prices."""
    held_nbytes: int
    """The bytes of the values that are kept and do not live anyway."""
    rerun_seconds: float
    """The time of running ops again, on the nominal accelerator of ``engine.cut.ops``."""


class LimitPoint(NamedTuple):
    """The bytes that a region holds under a rule with ``hold``, and the time of its ops that run again."""

    hold: int
    """In bytes. It is well inside of this point's interval of limits."""
    held_nbytes: int
    rerun_seconds: float


def frontier(plan: SavePlan) -> tuple[Point, ...]:
    """The points of the region of ``plan``: from a high price, where it holds most, to 0, where it holds least.

    An op that the plan's rule does not run again does not run again here either; the plan does not even know its time.
    So have the plan made by a rule whose ``rerun`` lists all families in question. Its ``price`` does not matter.
    """
    values, ops = tables(plan)
    points = [(price, costs_of(values, ops, cut)) for price, cut in sweep(values, ops)]
    return tuple(Point(price, costs.nbytes, float(costs.seconds)) for price, costs in points)


def finer_frontier(plan: SavePlan) -> tuple[LimitPoint, ...]:
    """The points at limits of bytes, from the one that holds most to the one that holds least.

    Points of ``frontier`` are among them. The plan is as ``frontier`` takes it. A point is left out if the next one
    holds so little more that a limit between the two would be a matter of chance.
    """
    cuts = cuts_by_nbytes(*tables(plan))
    least_gap = _TELLING * cuts[0].nbytes
    return tuple(
        LimitPoint(_between(cut.nbytes, more.nbytes), cut.nbytes, float(cut.seconds))
        for more, cut in pairwise(cuts)
        if more.nbytes - cut.nbytes >= least_gap
    )


_TELLING = 0.01  # of the most that a cut holds


def _between(low: int, high: int) -> int:
    """About the mean of two numbers of bytes, a multiple of the largest power of two that is far from both."""
    middle, unit = (low + high) // 2, 1
    while low + (high - low) // 4 <= (middle // (2 * unit)) * 2 * unit:
        unit *= 2
    return middle // unit * unit
