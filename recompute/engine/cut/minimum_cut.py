"""Which of a frame's values to keep, so that the ops it may run again bring back the rest: one exact minimum cut.

Every value v has a bit a_v, "available in backward". Every op o has a bit r_o, "run again". The constraints are:

- a_v = 1 for each value that backward demands;
- if r_o = 1, then a_v = 1 for each input of o;
- r_o = 0 for each op that may not run again.

A value that is available, but that no op regenerates, has to be kept. So the cost to minimize is

    sum of the bytes of v over a_v = 1, r_producer(v) = 0   +   price * sum of the seconds of o over r_o = 1

Each constraint is an implication between bits, and each term of the cost is a product of one bit and another's
complement. Such a problem is a minimum cut: the bits that are 1 are on one side of it, the others on the other side.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

# Capacities are whole numbers, in units of a byte divided by this. With floats, rounding could break a tie of two cuts.
_SCALE = 1 << 20


class Value(NamedTuple):
    """A tensor that an op wrote, or that the frame was given. An op that writes in place makes a new value."""

    nbytes: int | None
    """The bytes that it takes to keep it; None if it cannot be kept, as its memory is gone or was overwritten."""
    demanded: bool
    """Whether backward needs it."""
    alive: bool
    """Whether it lives anyway, so that keeping it costs nothing."""


class Op(NamedTuple):
    """A call that made the values `outputs` from the values `inputs`. The numbers are places in the table of values."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seconds: float
    may_rerun: bool


class Cut(NamedTuple):
    """The numbers of the values to keep, and of the ops to run again for everything else that is needed."""

    kept: frozenset[int]
    """The values that backward or an op in `rerun` needs, and that live anyway or that no op in `rerun` makes."""
    rerun: frozenset[int]


def minimum_cut(values: Sequence[Value], ops: Sequence[Op], price: float) -> Cut:
    """The cheapest way to have every demanded value in backward, when a second costs as much as `price` bytes.

    `ops` come in the order they ran, and each value is the output of at most one. `price` is finite and at least 0,
    in bytes per second; at 0 the fewest bytes are kept, however long that takes.

    Several cuts may have the least cost. This one runs the fewest ops again: any other runs these too, and more.
    A higher price never adds an op. Seconds times price are rounded to a millionth of a byte.

    Raises ValueError, naming them, if some demanded values can be neither kept nor regenerated.
    """
    assert 0 <= price < math.inf, f"the price of a second is {price} bytes"
    producers = _producers(values, ops)
    demanded = {index for index, value in enumerate(values) if value.demanded}
    lost = [index for index in sorted(demanded) if values[index].nbytes is None and index not in producers]
    if lost:
        raise ValueError(f"values {lost} are demanded, but can be neither kept nor regenerated")
    return cut_that_reruns(values, ops, _cheapest_rerun(values, ops, price, producers, demanded))


def cut_that_reruns(values: Sequence[Value], ops: Sequence[Op], rerun: frozenset[int]) -> Cut:
    """The cut that runs these ops again and keeps all other values that are needed."""
    made = {output for index in rerun for output in ops[index].outputs}
    demanded = {index for index, value in enumerate(values) if value.demanded}
    needed = demanded.union(*(ops[index].inputs for index in rerun))
    return Cut(frozenset(index for index in needed if index not in made or is_free(values[index])), rerun)


def is_free(value: Value) -> bool:
    """Whether keeping it costs nothing."""
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

    The graph holds only values that demanded ones come from. A value has a node of its own only if several ops want it;
    if one op alone wants it, that op's node stands for both.

    An edge runs from a node that forbids a bit to one that asks for it. networkx puts no more nodes than it must on the
    far side of a cut, so with this direction it finds the cut with the fewest bits set.

    Capacities are Python's own numbers, of any size. SciPy would cut them off at 32 bits without an error.
    """
    import networkx as nx  # the import takes as long as a hundred cuts, and some never need one

    forbidden, demand, first_value = -1, -2, len(ops)
    wanters: dict[int, list[int]] = {index: [demand] for index in demanded if not is_free(values[index])}
    capacities: dict[tuple[int, int], float] = defaultdict(int)
    walk = list(wanters)
    for index in walk:  # the loop appends to it
        op = producers.get(index, forbidden)
        if op == forbidden or (forbidden, op) in capacities:
            continue
        capacities[forbidden, op] = round(min(price * ops[op].seconds * _SCALE, sys.float_info.max))
        for source in set(ops[op].inputs):
            if source not in wanters and not is_free(values[source]):
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
