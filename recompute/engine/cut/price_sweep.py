"""The cuts that are the cheapest at some price of a second.

A cut holds some bytes and takes some seconds to run ops again, so its cost is a straight line over the price. The
cheapest cuts are the lower envelope of these lines: each is the cheapest one on an interval of prices. To find what
lies between the cuts at two prices, solve the minimum cut at the price where these two cost the same. If it is one of
them, there is nothing between them. If it is a third one, go on at both sides of that. This finds every point, with two
minimum cuts for each, and without a grid of prices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from recompute.engine.cut.minimum_cut import Cut, Op, Value, minimum_cut


def sweep(values: Sequence[Value], ops: Sequence[Op]) -> list[tuple[float, Cut]]:
    """The cuts that are the cheapest at some price, each with such a price, from the highest price to 0.

    The tables are those of ``minimum_cut``, which finds each cut again at its price. A cut is left out if the interval
    on which it is the cheapest is narrower than a millionth of its price. Raises ValueError where ``minimum_cut`` does.
    """
    lines = _hull(_lines(values, ops))
    borders = [_border(*pair) for pair in pairwise(lines)]
    found = []
    for high, line, low in zip([None, *borders], lines, [*borders, None], strict=True):
        price = 0.0 if low is None else _between(float(low), float(4 * low if high is None else high))
        if minimum_cut(values, ops, price) == line.cut:  # rounding may make another one as cheap
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
    """The lines of all cuts that are the cheapest somewhere, in the order of their seconds.

    There may be some among them that are nowhere the cheapest alone. A lower price never takes an op away. So a cut
    between two others runs all ops again that the one does, and not all that the other does.
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
    """Those that are the cheapest on an interval that is wide enough (``_NARROW``)."""
    kept: list[_Line] = []
    for line in lines:
        while len(kept) > 1 and _border(*kept[-2:]) <= _border(kept[-1], line) * _NARROW:
            kept.pop()
        kept.append(line)
    return kept


_NARROW = 1 + Fraction(1, 10**6)


def _between(low: float, high: float) -> float:
    """About the geometric mean, rounded to the fewest digits with which it stays far from both ends."""
    middle = math.sqrt(low * high)
    rounded = [float(f"{middle:.{digits}e}") for digits in range(1, 16)]
    return next((price for price in rounded if math.sqrt(low * middle) < price < math.sqrt(middle * high)), middle)
