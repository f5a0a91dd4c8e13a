"""A region that a compiler traces: its ops as the tape would see them, and the cut that says which of them run again.

AOTAutograd runs forward once to look at it, and once to make a graph of it and of its backward. While it makes the
graph it calls no hooks on what autograd saves, so what a region saves is learned the first time, and known the second
time by what ran. Nodes are found by when they came. No value is gone or written over here: who writes in place has been
made functional.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from itertools import islice
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from recompute.engine.cut.minimum_cut import Op, Value, minimum_cut
from recompute.engine.cut.ops import Kind, OpFacts, seconds
from recompute.engine.dtensors import local_of
from recompute.engine.tape.op_arguments import at

if TYPE_CHECKING:
    from torch.fx import Graph, Node


class Again(NamedTuple):
    """What the rules around an op make of it."""

    may: bool
    """Whether it may run again."""
    must: bool = False
    """Whether it will, whatever that costs: as in a checkpoint."""


class _Call(NamedTuple):
    op: Any
    again: Again
    is_costly: bool
    nodes: list[Node]
    """Of the graph, that it has become; the last one comes first."""


class Traced:
    """The values and ops of a region, of which ``graph`` is being made."""

    def __init__(self, graph: Graph | None, price: float):
        """graph: None the first time."""
        self._graph = graph
        self._price = price
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._calls: list[_Call] = []
        self._demanded: set[int] = set()
        self._saved: list[Tensor] = []  # by autograd, before an op that the region has not come to
        self._given: list[tuple[int, bool]] = []  # from outside, and whether it requires a gradient
        self._current: dict[int, int] = {}  # the value in each storage, by the address of its StorageImpl …
        self._alive: list[Tensor] = []  # … which cannot be used again while these are
        self._size = 0

    def begin(self) -> None:
        """An op is about to run."""
        self._size = 0 if self._graph is None else len(self._graph.nodes)

    def end(self, op: Any, known: OpFacts, again: Again, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """That op has run."""
        inputs = [self._number(tensor) for tensor in _tensors((args, kwargs))]
        for tensor in self._saved:
            if (number := self._current.get(tensor.untyped_storage()._cdata)) is not None:
                self._demanded.add(number)
        self._saved = []
        outputs = _tensors(output)
        if known.kind is Kind.VIEW:
            for tensor in outputs:
                key = tensor.untyped_storage()._cdata
                if key not in self._current and inputs:  # of those that say they are none
                    self._enter(tensor, inputs[0])
            return
        written = _tensors(at(known.writes, args, kwargs))
        distinct = {tensor.untyped_storage()._cdata: tensor for tensor in (*written, *outputs)}
        made = [self._new(tensor) for tensor in distinct.values()]
        if again.must:
            self._demanded.update(inputs)
        elif not torch.is_grad_enabled():  # what a custom autograd.Function saves of it is not seen: it may be all
            self._demanded.update(inputs, made)
        costs = 0.0 if again.must or not again.may else _seconds(op, args, kwargs, output)
        self._ops.append(Op(tuple(dict.fromkeys(inputs)), tuple(made), costs, again.may))
        nodes: list[Node] = []
        if self._graph is not None:
            nodes += islice(reversed(self._graph.nodes), len(self._graph.nodes) - self._size)
        self._calls.append(_Call(op, again, known.family is not None, nodes))

    def save(self, tensor: Tensor) -> None:
        """Autograd saves a tensor, the first time."""
        tensor = local_of(tensor)
        number = self._current.get(tensor.untyped_storage()._cdata)
        if number is None:  # it is given, and numbered when an op reads it
            self._saved.append(tensor)
        else:
            self._demanded.add(number)

    def learn(self) -> None:
        """The region is done, the first time."""
        _demands[self._key()] = frozenset(self._demanded)
        while len(_demands) > _MOST:
            _demands.pop(next(iter(_demands)))

    def held(self) -> list[Node] | None:
        """The nodes of what does not run again, though rules would let it; None where nothing was learned of it.

        The region is done, the second time.
        """
        demanded = _demands.get(self._key())
        if demanded is None:
            return None
        values = [value._replace(demanded=number in demanded) for number, value in enumerate(self._values)]
        cut = minimum_cut(values, self._ops, self._price)
        again = cut.rerun.union(self._derived(cut.kept))
        nodes: list[Node] = []
        for index, call in enumerate(self._calls):
            if call.again.may and not call.again.must and index not in again:
                nodes += [node for node in call.nodes if not _is_inside(node, set(call.nodes))]
        return nodes

    def _derived(self, kept: Collection[int]) -> Iterator[int]:
        """The ops of what comes back from ``kept`` without a costly op: whoever saves it outside may drop it."""
        there = set(kept)
        read = {number for op in self._ops for number in op.inputs}
        for index, (op, call) in enumerate(zip(self._ops, self._calls, strict=True)):
            if call.again.may and not call.is_costly and there.issuperset(op.inputs):
                there.update(op.outputs)
                others = [number for number in op.outputs if number not in kept]
                if len(others) == len(op.outputs) or not read.issuperset(others):
                    yield index

    def _key(self) -> Hashable:
        return tuple([call.op for call in self._calls]), tuple(self._ops), tuple(self._values), tuple(self._given)

    def _number(self, tensor: Tensor) -> int:
        number = self._current.get(tensor.untyped_storage()._cdata)
        if number is None:
            number = self._new(tensor, alive=_is_parameter(tensor))
            self._given.append((number, tensor.requires_grad))
        return number

    def _new(self, tensor: Tensor, *, alive: bool = False) -> int:
        self._values.append(Value(_known(tensor.untyped_storage().nbytes()), demanded=False, alive=alive))
        return self._enter(tensor, len(self._values) - 1)

    def _enter(self, tensor: Tensor, number: int) -> int:
        self._alive.append(tensor)
        self._current[tensor.untyped_storage()._cdata] = number
        return number


def join(graph: Graph, start: int, *, is_cut: bool) -> None:
    """Have torch take the region whose nodes begin at ``start`` for a part of the last one before it, if that is a cut.

    At the border of two regions torch saves what goes from one to the other. Where a cut has decided on the first one,
    that is saved or comes back as the cut says.
    """
    nodes = iter(reversed(graph.nodes))
    own = [node for node in islice(nodes, len(graph.nodes) - start) if _REGION in node.meta]
    last = next((node for node in nodes if _REGION in node.meta), None)
    joined = None if last is None else last.meta.get(_CUT)
    for node in reversed(own):
        joined = node.meta[_REGION] if joined is None else joined
        node.meta[_REGION] = joined
        if is_cut:
            node.meta[_CUT] = joined


_REGION, _CUT = "ac_graph_id", "recompute_cut"
"""In a node's meta: torch's number of the region that it is in; and the same where that is a cut."""

_demands: dict[Hashable, frozenset[int]] = {}
"""What autograd saves in the regions that were seen a first time."""
_MOST = 1024


def _is_inside(node: Node, own: set[Node]) -> bool:
    """Whether a node is but a step on the way to what its op gives: the op's backward may have the same step."""
    is_tensor = node.target is not getitem and isinstance(node.meta.get("val"), Tensor)
    return is_tensor and bool(node.users) and own.issuperset(node.users)


def _is_parameter(tensor: Any) -> bool:
    """Of what is traced, which AOTAutograd has put in the parameter's place. Of a DTensor's part, nobody knows."""
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    return isinstance(tensor, nn.Parameter)


def _tensors(values: Any) -> list[Tensor]:
    return [local_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _seconds(op: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> float:
    """What an op costs on tensors of the sizes that are traced with, which are not to become a guard's."""
    with _disable_current_modes():
        return seconds(op, *tree_map_only(Tensor, _stand_in, (args, kwargs, output)))


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty([*map(_known, local_of(tensor).shape)], dtype=tensor.dtype, device="meta")


def _known(size: Any) -> int:
    """A size, or the one that stands for it as long as it is not known."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1
