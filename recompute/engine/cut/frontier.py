"""The frontier of a region: each way to drop and regenerate that is best at some price of a second.

A cut holds some bytes and takes some seconds to run ops again, and its cost at a price is a straight line over that
price. The cheapest cuts are therefore the lower envelope of lines: a cut is the cheapest one on an interval of prices,
and between the cuts at two prices there are others only if, at the price where these two cost the same, the minimum cut
is neither. So all of them are found, with two minimum cuts a point, and no grid of prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from recompute.engine.cut.minimum_cut import Cut, Op, Value, minimum_cut
from recompute.engine.cut.save_plan import SavePlan, tables


class Point(NamedTuple):
    """What a rule with ``price`` holds in a region, and what it runs again there."""

    price: float
    """In bytes a second, and well inside of the prices that give this point: as a rule's ``price`` takes it."""
    held_nbytes: int
    """Of what is kept and does not live anyway."""
    rerun_seconds: float
    """Of running ops again, on the nominal accelerator of ``engine.cut.ops``."""


def frontier(plan: SavePlan) -> tuple[Point, ...]:
    """All that the region of ``plan`` can hold: from a high price, where it holds most, to 0, where it holds least.

    What the plan's rule does not run again is not run again here either, nor has the plan its time. So have it made by
    a rule whose ``rerun`` lists all families that may be in question, whatever its ``price``.
    """
    values, ops = tables(plan.steps, plan.facts, plan.saves, plan.overwritten)
    found = [(price, _line(values, ops, cut)) for price, cut in sweep(values, ops)]
    return tuple(Point(price, line.nbytes, float(line.seconds)) for price, line in found)


def sweep(values: Sequence[Value], ops: Sequence[Op]) -> list[tuple[float, Cut]]:
    """The cuts that are the cheapest at some price, each with such a price, from the highest price to 0.

    The tables are those of ``minimum_cut``, which gives each cut again at its price, and may raise ValueError. Left out
    are cuts that are the cheapest on less than a millionth of their price.
    """
    lines = _hull(_lines(values, ops))
    borders = [_border(*pair) for pair in pairwise(lines)]
    found = []
    for high, line, low in zip([None, *borders], lines, [*borders, None], strict=True):
        price = 0.0 if low is None else _between(float(low), float(4 * low if high is None else high))
        if minimum_cut(values, ops, price) == line.cut:  # not where rounding makes another one as cheap
            found.append((price, line.cut))
    return found


class _Line(NamedTuple):
    """The cost of a cut over the price."""

    cut: Cut
    nbytes: int
    seconds: Fraction


def _line(values: Sequence[Value], ops: Sequence[Op], cut: Cut) -> _Line:
    nbytes = sum(values[index].nbytes or 0 for index in cut.kept if not values[index].alive)
    return _Line(cut, nbytes, sum((Fraction(ops[index].seconds) for index in cut.rerun), Fraction()))


def _border(left: _Line, right: _Line) -> Fraction:
    """The price at which two cuts cost the same."""
    return (left.nbytes - right.nbytes) / (right.seconds - left.seconds)


def _lines(values: Sequence[Value], ops: Sequence[Op]) -> list[_Line]:
    """All that are the cheapest somewhere, and perhaps some that are so nowhere alone, in the order of their seconds.

    A lower price only ever adds ops: what is found between two cuts runs again what the one does, and not all that the
    other does.
    """
    last = _line(values, ops, minimum_cut(values, ops, 0.0))
    shortest = min((op.seconds for op in ops if op.may_rerun and op.seconds > 0), default=None)
    if shortest is None:
        return [last]
    most = (1 + sum(value.nbytes or 0 for value in values)) / shortest  # at which nothing that takes time runs again
    found, pending = [_line(values, ops, minimum_cut(values, ops, most))], [last]
    while pending:
        left, right = found[-1], pending[-1]
        if _is_before(left, right):
            between = _line(values, ops, minimum_cut(values, ops, float(_border(left, right))))
            if _is_before(left, between) and _is_before(between, right):
                pending.append(between)
                continue
            found.append(right)
        pending.pop()
    return found


def _is_before(left: _Line, right: _Line) -> bool:
    return left.seconds < right.seconds and left.nbytes > right.nbytes


def _hull(lines: Sequence[_Line]) -> list[_Line]:
    """Those that are the cheapest on an interval that is worth the name."""
    kept: list[_Line] = []
    for line in lines:
        while len(kept) > 1 and _border(*kept[-2:]) <= _border(kept[-1], line) * _NARROW:
            kept.pop()
        kept.append(line)
    return kept


_NARROW = 1 + Fraction(1, 10**6)


def _between(low: float, high: float) -> float:
    """About the geometric mean, with as few digits as leave it far from both ends."""
    middle = math.sqrt(low * high)
    rounded = [float(f"{middle:.{digits}e}") for digits in range(1, 16)]
    return next((price for price in rounded if math.sqrt(low * middle) < price < math.sqrt(middle * high)), middle)
