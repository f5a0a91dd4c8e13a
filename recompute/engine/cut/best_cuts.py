"""The cuts that are best at some price of a second, and fast ones within a limit of bytes, at no price the best.

A cut holds some bytes and takes some seconds to run ops again, so its cost is a straight line over the price. The
cheapest cuts are the lower envelope of these lines: each is the cheapest one on an interval of prices. To find what
lies between the cuts at two prices, solve the minimum cut at the price where these two cost the same. If it is one of
them, there is nothing between them. If it is a third one, go on at both sides of that. This finds every point, with two
minimum cuts for each, and without a grid of prices.

Two GEMMs that take equally long for each byte of their outputs run again at the same prices, as an MLP's for gate and
up do. So no price keeps one of the two. Nor is a cut the best one anywhere if another cut costs less at each price.
Such cuts are found from the best ones. From each of these, one op after the other is taken out of the ops that run
again: each time the op that saves the most seconds, together with all ops that ran for its sake alone. Its outputs are
then kept. The cuts found do not depend on the limit. So all limits from the bytes of one cut up to those of the next
have the same cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from recompute.engine.cut.minimum_cut import Cut, Op, Value, cut_that_reruns, is_free, minimum_cut
from recompute.errors import warn
from recompute.units import humanize


class CutCosts(NamedTuple):
    """A cut, the bytes that it holds and that do not live anyway, and the seconds of its ops that run again."""

    cut: Cut
    nbytes: int
    seconds: Fraction
    """Exact, so that no rounding breaks a tie of two cuts."""


def costs_of(values: Sequence[Value], ops: Sequence[Op], cut: Cut) -> CutCosts:
    nbytes = sum(values[index].nbytes or 0 for index in cut.kept if not values[index].alive)
    return CutCosts(cut, nbytes, sum((Fraction(ops[index].seconds) for index in cut.rerun), Fraction()))


def sweep(values: Sequence[Value], ops: Sequence[Op]) -> list[tuple[float, Cut]]:
    """The cuts that are the cheapest at some price, each with such a price, from the highest price to 0.

    The tables are those of ``minimum_cut``, which finds each cut again at its price. A cut is left out if it
    is the cheapest on an interval narrower than a millionth of its price. Raises ValueError where ``minimum_cut`` does.
    """
    lines = _hull(_lines(values, ops))
    borders = [_border(*pair) for pair in pairwise(lines)]
    found = []
    for high, line, low in zip([None, *borders], lines, [*borders, None], strict=True):
        price = 0.0 if low is None else _between(float(low), float(4 * low if high is None else high))
        if minimum_cut(values, ops, price) == line.cut:  # rounding may make another one as cheap
            found.append((price, line.cut))
    return found


def _border(left: CutCosts, right: CutCosts) -> Fraction:
    """The price at which two cuts cost the same."""
    return (left.nbytes - right.nbytes) / (right.seconds - left.seconds)


def _lines(values: Sequence[Value], ops: Sequence[Op]) -> list[CutCosts]:
    """The lines of all cuts that are the cheapest somewhere, in the order of their seconds.

    Some of them may be nowhere the cheapest alone. A lower price never takes an op away. So a cut between two others
    runs all ops again that the one runs, and not all that the other runs.
    """
    last = costs_of(values, ops, minimum_cut(values, ops, 0.0))
    shortest = min((op.seconds for op in ops if op.may_rerun and op.seconds > 0), default=None)
    if shortest is None:
        return [last]
    most = (1 + sum(value.nbytes or 0 for value in values)) / shortest  # here nothing runs again that takes time
    found, pending = [costs_of(values, ops, minimum_cut(values, ops, most))], [last]
    while pending:
        left, right = found[-1], pending[-1]
        if _is_before(left, right):
            between = costs_of(values, ops, minimum_cut(values, ops, float(_border(left, right))))
            if _is_before(left, between) and _is_before(between, right):
                pending.append(between)
                continue
            found.append(right)
        pending.pop()
    return found


def _is_before(left: CutCosts, right: CutCosts) -> bool:
    return left.seconds < right.seconds and left.nbytes > right.nbytes


def _hull(lines: Sequence[CutCosts]) -> list[CutCosts]:
    """Those that are the cheapest on an interval that is wide enough (``_NARROW``)."""
    kept: list[CutCosts] = []
    for line in lines:
        while len(kept) > 1 and _border(*kept[-2:]) <= _border(kept[-1], line) * _NARROW:
            kept.pop()
        kept.append(line)
    return kept


_NARROW = 1 + Fraction(1, 10**6)


def _between(low: float, high: float) -> float:
    """About the geometric mean, rounded to the fewest digits that keep it far from both ends."""
    middle = math.sqrt(low * high)
    rounded = [float(f"{middle:.{digits}e}") for digits in range(1, 16)]
    return next((price for price in rounded if math.sqrt(low * middle) < price < math.sqrt(middle * high)), middle)


def best_cut(values: Sequence[Value], ops: Sequence[Op], price: float, most_nbytes: int | None = None) -> Cut:
    """The cheapest cut at ``price``; where there is a limit of bytes, a fast one within that, whatever the price.

    If every cut holds more than the limit, it is the one that holds least, and there is a ``PolicyWarning``. Raises
    ValueError as ``minimum_cut`` does.
    """
    if most_nbytes is None:
        return minimum_cut(values, ops, price)
    found = cuts_by_nbytes(values, ops)
    least = found[-1]
    if least.nbytes > most_nbytes:
        warn(
            f"hold: expected at most {humanize(most_nbytes)} for one forward of a module; the least that the rule's "
            f"rerun and keep allow is {humanize(least.nbytes)}. Let more run again, as with rerun: [gemm], or raise "
            "hold"
        )
    return next((each.cut for each in found if each.nbytes <= most_nbytes), least.cut)


def cuts_by_nbytes(values: Sequence[Value], ops: Sequence[Op]) -> list[CutCosts]:
    """Cuts from the one that holds most to the one that holds least. Each takes longer than the one before it.

    The best cut at each price is among them, and some between those. Raises ValueError as ``minimum_cut`` does.
    """
    found = [costs_of(values, ops, cut) for _, cut in sweep(values, ops)]
    found += [costs for start in found for costs in _with_less_and_less_rerun(values, ops, start)]
    kept: list[CutCosts] = []
    for costs in sorted(found, key=lambda costs: (costs.nbytes, costs.seconds)):
        if not kept or costs.seconds < kept[-1].seconds:
            kept.append(costs)
    return kept[::-1]


# A share of the seconds that a cut takes to run ops again: an op that takes less is not worth a cut of its own.
_TELLING = 0.01


def _with_less_and_less_rerun(values: Sequence[Value], ops: Sequence[Op], start: CutCosts) -> Iterator[CutCosts]:
    """Cuts that run ever fewer of the ops of ``start`` again, down to none that takes long."""
    least, costs = float(start.seconds) * _TELLING, start
    while long := [index for index in sorted(costs.cut.rerun) if ops[index].seconds > least]:
        cuts = [_without(values, ops, costs.cut.rerun, index) for index in long]
        fewer = [costs_of(values, ops, cut) for cut in cuts if cut is not None]
        if not fewer:
            return
        costs = min(fewer, key=lambda costs: (costs.seconds, costs.nbytes))
        yield costs


def _without(values: Sequence[Value], ops: Sequence[Op], rerun: Collection[int], left_out: int) -> Cut | None:
    """The cut without an op, and without all ops that ran for it alone; None if a value would be lost."""
    producers = {output: index for index in rerun if index != left_out for output in ops[index].outputs}
    needed = [index for index, value in enumerate(values) if value.demanded]
    still: set[int] = set()
    for value in needed:  # the loop appends to it
        producer = producers.get(value)
        if producer is None:
            if values[value].nbytes is None:
                return None
        elif producer not in still and not is_free(values[value]):
            still.add(producer)
            needed += ops[producer].inputs
    return cut_that_reruns(values, ops, frozenset(still))
