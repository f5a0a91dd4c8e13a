"""The fastest cuts that hold no more than so many bytes, also those that no price gives.

Two GEMMs that take equally long for each byte of their outputs run again at the same prices, as those of gate and up of
an MLP do. So no price keeps one of the two. Nor does any price give a cut that costs more at each than some other one.

Such cuts are found from those that prices give. From each of these, one op after the other is left to not run again:
each time the one that saves the most seconds, together with what ran for its sake alone. What it made is then kept.

The cuts found do not depend on the limit. So every limit between what one of them holds and what the next one holds
gives the same cut.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from recompute.engine.cut.minimum_cut import Cut, Op, Value, cut_that_reruns, is_free, minimum_cut
from recompute.engine.cut.price_sweep import sweep
from recompute.errors import warn
from recompute.units import humanize

# Of the seconds that a cut takes to run ops again: an op that takes less is not worth a cut of its own.
_TELLING = 0.01


class CutCosts(NamedTuple):
    """A cut, the bytes that it holds and that do not live anyway, and the seconds of what it runs again."""

    cut: Cut
    nbytes: int
    seconds: float


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
            f"hold: expected at most {humanize(most_nbytes)} of a module's forward; holding {humanize(least.nbytes)}, "
            "the least that the rule's rerun and keep allow. Let more run again, as with rerun: [gemm], or raise hold"
        )
    return next((each.cut for each in found if each.nbytes <= most_nbytes), least.cut)


def cuts_by_nbytes(values: Sequence[Value], ops: Sequence[Op]) -> list[CutCosts]:
    """Cuts from the one that holds most to the one that holds least. Each takes longer than the one before it.

    All cuts that a price gives are among them, and some between those. Raises ValueError as ``minimum_cut`` does.
    """
    found = [_costs_of(values, ops, cut) for _, cut in sweep(values, ops)]
    found += [costs for start in found for costs in _with_less_and_less_rerun(values, ops, start)]
    kept: list[CutCosts] = []
    for costs in sorted(found, key=lambda costs: (costs.nbytes, costs.seconds)):
        if not kept or costs.seconds < kept[-1].seconds:
            kept.append(costs)
    return kept[::-1]


def nbytes_and_seconds(values: Sequence[Value], ops: Sequence[Op], cut: Cut) -> tuple[int, float]:
    """What a cut holds that does not live anyway, and how long the ops take that it runs again."""
    nbytes = sum(values[index].nbytes or 0 for index in cut.kept if not values[index].alive)
    return nbytes, math.fsum(ops[index].seconds for index in cut.rerun)


def _costs_of(values: Sequence[Value], ops: Sequence[Op], cut: Cut) -> CutCosts:
    return CutCosts(cut, *nbytes_and_seconds(values, ops, cut))


def _with_less_and_less_rerun(values: Sequence[Value], ops: Sequence[Op], start: CutCosts) -> Iterator[CutCosts]:
    """Cuts that run ever fewer of the ops of ``start`` again, down to none that takes long."""
    least, costs = _TELLING * start.seconds, start
    while long := [index for index in sorted(costs.cut.rerun) if ops[index].seconds > least]:
        cuts = [_without(values, ops, costs.cut.rerun, index) for index in long]
        fewer = [_costs_of(values, ops, cut) for cut in cuts if cut is not None]
        if not fewer:
            return
        costs = min(fewer, key=lambda costs: (costs.seconds, costs.nbytes))
        yield costs


def _without(values: Sequence[Value], ops: Sequence[Op], rerun: Collection[int], left_out: int) -> Cut | None:
    """The cut in which an op does not run again, nor any op that only it needed; None if a value would be lost."""
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
