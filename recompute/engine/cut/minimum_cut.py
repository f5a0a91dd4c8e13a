"""Which of a frame's values to keep, so that the ops it may run again bring back the rest: one exact minimum cut.

Every value v has a bit a_v, "available in backward", and every op o a bit r_o, "run again". What is demanded has
a_v = 1; r_o = 1 needs a_v = 1 of each input; an op that may not re-run has r_o = 0. A value that is available but not
regenerated is kept, and the cost to minimize is

    sum of the bytes of v over a_v = 1, r_producer(v) = 0   +   price * sum of the seconds of o over r_o = 1

All constraints are implications between bits and each term is a product of one bit and another's complement, so the
bits of least cost are the two sides of a minimum cut.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

_SCALE = 1 << 20  # capacities are whole numbers of this fraction of a byte: a cut in floats may take a tie for a win


class Value(NamedTuple):
    """What an op wrote, or what the frame was given; an op that writes in place makes a new value."""

    nbytes: int | None
    """What keeping it takes; None where it cannot be kept, since its memory is gone or has been written over."""
    demanded: bool
    """Whether backward needs it."""
    alive: bool
    """Whether it lives anyway, so that keeping it costs nothing."""


class Op(NamedTuple):
    """A call that made the values `outputs` from the values `inputs`, both numbered as in the table of values."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    may_rerun: bool


class Cut(NamedTuple):
    """The values to keep, and the ops to run again for all else that is needed, by their numbers."""

    kept: frozenset[int]
    """What backward or an op in `rerun` needs and none regenerates, or lives anyway."""
    rerun: frozenset[int]


def minimum_cut(values: Sequence[Value], ops: Sequence[Op], price: float) -> Cut:
    """The cheapest way to have every demanded value in backward, when a second costs as much as `price` bytes.

    `ops` come in the order they ran, and each value is the output of at most one. `price` is finite and at least 0,
    in bytes per second; at 0 the fewest bytes are kept, however long that takes.

    Of all cuts of the least cost this is the one that runs the fewest ops again: any other runs these too, and more.
    A higher price never adds an op. Seconds times price are rounded to a millionth of a byte.

    Raises ValueError, naming them, if some demanded values can be neither kept nor regenerated.
    """
    assert 0 <= price < math.inf, f"the price of a second is {price} bytes"
    producers = _producers(values, ops)
    demanded = {index for index, value in enumerate(values) if value.demanded}
    lost = [index for index in sorted(demanded) if values[index].nbytes is None and index not in producers]
    if lost:
        raise ValueError(f"values {lost} are demanded, but can be neither kept nor regenerated")
    rerun = _cheapest_rerun(values, ops, price, producers, demanded)
    needed = demanded.union(*(ops[index].inputs for index in rerun))
    kept = frozenset(index for index in needed if producers.get(index) not in rerun or _is_free(values[index]))
    return Cut(kept, rerun)


def _is_free(value: Value) -> bool:
    return value.alive and value.nbytes is not None


def _producers(values: Sequence[Value], ops: Sequence[Op]) -> dict[int, int]:
    """The op that regenerates each value that can be regenerated."""
    producers: dict[int, int] = {}
    lost = {index for index, value in enumerate(values) if value.nbytes is None}
    for index, op in enumerate(ops):
        if op.may_rerun and lost.isdisjoint(op.inputs):
            producers.update(dict.fromkeys(op.outputs, index))
            lost.difference_update(op.outputs)
    return producers


def _cheapest_rerun(
    values: Sequence[Value], ops: Sequence[Op], price: float, producers: dict[int, int], demanded: set[int]
) -> frozenset[int]:
    """The ops with r_o = 1 in the minimum cut.

    The graph holds just what demanded values come from, and a value's bit only where several ops want it: the bit of
    what one op alone wants is that op's own. Its edges run from what forbids a bit to what asks for it, for networkx
    puts on the far side of a minimum cut no more than it must: that is the one with the fewest bits set. Its capacities
    are Python's own numbers, of any size; SciPy's are cut off at 32 bits without a word.
    """
    import networkx as nx  # takes as long as a hundred cuts: not for those who never need one

    forbidden, demand, first_value = -1, -2, len(ops)
    wanters: dict[int, list[int]] = {index: [demand] for index in demanded if not _is_free(values[index])}
    capacities: dict[tuple[int, int], float] = defaultdict(int)
    walk = list(wanters)
    for index in walk:  # which grows
        op = producers.get(index, forbidden)
        if op == forbidden or (forbidden, op) in capacities:
            continue
        capacities[forbidden, op] = round(min(price * ops[op].seconds * _SCALE, sys.float_info.max))
        for source in set(ops[op].inputs):
            if source not in wanters and not _is_free(values[source]):
                wanters[source] = []
                walk.append(source)
            if source not in demanded and source in wanters:
                wanters[source].append(op)
    for index, wanting in wanters.items():
        nbytes = values[index].nbytes
        bit = wanting[0] if len(wanting) == 1 else first_value + index
        capacities[producers.get(index, forbidden), bit] += math.inf if nbytes is None else nbytes * _SCALE
        if len(wanting) > 1:
            capacities.update({(bit, wanter): math.inf for wanter in wanting})
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from((forbidden, demand))
    graph.add_edges_from((tail, head, {"capacity": capacity}) for (tail, head), capacity in capacities.items())
    _, (_, chosen) = nx.minimum_cut(graph, forbidden, demand)
    return frozenset(node for node in chosen if 0 <= node < first_value)
