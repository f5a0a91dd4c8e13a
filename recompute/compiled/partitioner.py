"""Chooses which ops of a region run again in backward while AOTAutograd traces the region: by one minimum cut.

AOTAutograd runs a forward twice: first to look at it, then to make a graph of it and of its backward. While it makes
the graph it calls no saved-tensor hooks. So the first run tells which tensors autograd saves. The second run has the
same ops, and tells the nodes of the graph. The nodes of an op are those that were added while it ran.

Unlike a tape in eager code, this never meets a value that was overwritten: AOTAutograd has made the graph functional.
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
from torch.utils.checkpoint import CheckpointPolicy

from recompute.engine.cut.best_cuts import best_cut
from recompute.engine.cut.minimum_cut import Op, Value
from recompute.engine.cut.op_costs import seconds
from recompute.engine.cut.ops import Kind, OpFacts, size_hint
from recompute.engine.dtensors import local_of
from recompute.engine.storage_numbers import StorageNumbers
from recompute.engine.tape.op_arguments import at

if TYPE_CHECKING:
    from torch.fx import Graph, Node


class _Call(NamedTuple):
    """An op that the region has run."""

    op: Any
    policy: CheckpointPolicy
    is_costly: bool
    nodes: list[Node]
    """Its nodes in the graph, the last first."""


class RegionPartitioner:
    """The values and ops of one region, and the cut over them.

    Values and ops are numbered as they come.
    """

    def __init__(self, graph: Graph | None, price: float, hold: int | None):
        """graph: the one that AOTAutograd makes; None in the first run. price, hold: those of an ``OpPolicy``."""
        self._graph = graph
        self._price, self._hold = price, hold
        self._values: list[Value] = []
        self._ops: list[Op] = []
        self._calls: list[_Call] = []
        self._demanded: set[int] = set()
        """The values that backward needs."""
        self._saved_early: list[Tensor] = []
        """Tensors that autograd saved before the region ran an op on them, so that they have no number yet."""
        self._given: list[tuple[int, bool]] = []
        """The values from outside, and whether each requires a gradient."""
        self._current = StorageNumbers()
        """The number of the value in each storage."""
        self._size = 0
        """How many nodes the graph had before the op that runs."""

    def before_op(self) -> None:
        """An op is about to run."""
        self._size = 0 if self._graph is None else len(self._graph.nodes)

    def after_op(
        self, op: Any, known: OpFacts, policy: CheckpointPolicy, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> None:
        """That op has run. policy: by the rules around it."""
        inputs = [self._number(tensor) for tensor in _tensors((args, kwargs))]
        for tensor in self._saved_early:
            if (number := self._current.of(tensor)) is not None:
                self._demanded.add(number)
        self._saved_early = []
        outputs = _tensors(output)
        if known.kind is Kind.VIEW:
            for tensor in outputs:
                if self._current.of(tensor) is None and inputs:  # a view that does not say that it is one
                    self._current.bind(tensor.untyped_storage(), inputs[0])
            return
        written = _tensors(at(known.writes, args, kwargs))
        distinct = {tensor.untyped_storage()._cdata: tensor for tensor in (*written, *outputs)}
        made = [self._new(tensor) for tensor in distinct.values()]
        if policy is CheckpointPolicy.MUST_RECOMPUTE:
            self._demanded.update(inputs)
        elif not torch.is_grad_enabled():  # a custom autograd.Function may save all of it, unseen
            self._demanded.update(inputs, made)
        may_rerun = policy is not CheckpointPolicy.MUST_SAVE
        costs = _seconds(op, args, kwargs, output) if policy is CheckpointPolicy.PREFER_RECOMPUTE else 0.0
        self._ops.append(Op(tuple(dict.fromkeys(inputs)), tuple(made), costs, may_rerun))
        nodes: list[Node] = []
        if self._graph is not None:
            nodes += islice(reversed(self._graph.nodes), len(self._graph.nodes) - self._size)
        self._calls.append(_Call(op, policy, known.is_costly, nodes))

    def see_save(self, tensor: Tensor) -> None:
        """Autograd saves a tensor, in the first run."""
        tensor = local_of(tensor)
        number = self._current.of(tensor)
        if number is None:  # it comes from outside, and gets its number when an op reads it
            self._saved_early.append(tensor)
        else:
            self._demanded.add(number)

    def remember_saves(self) -> None:
        """The first run has ended."""
        _saves[self._signature()] = frozenset(self._demanded)
        while len(_saves) > _MOST_SIGNATURES:
            _saves.pop(next(iter(_saves)))

    def nodes_to_save(self) -> list[Node] | None:
        """The second run has ended: the nodes of the ops that the rules let run again, but the cut does not.

        None if no first run had the same ops: then the tensors that autograd saves are unknown.
        """
        demanded = _saves.get(self._signature())
        if demanded is None:
            return None
        values = [value._replace(demanded=number in demanded) for number, value in enumerate(self._values)]
        cut = best_cut(values, self._ops, self._price, self._hold)
        rerun = cut.rerun.union(self._derived(cut.kept))
        nodes: list[Node] = []
        for index, call in enumerate(self._calls):
            if call.policy is CheckpointPolicy.PREFER_RECOMPUTE and index not in rerun:
                nodes += [node for node in call.nodes if not _is_inside(node, set(call.nodes))]
        return nodes

    def _derived(self, kept: Collection[int]) -> Iterator[int]:
        """The ops of values that come back from ``kept`` without a costly op, so that others may drop them."""
        there = set(kept)
        read = {number for op in self._ops for number in op.inputs}
        for index, (op, call) in enumerate(zip(self._ops, self._calls, strict=True)):
            may_rerun = call.policy is not CheckpointPolicy.MUST_SAVE
            if may_rerun and not call.is_costly and there.issuperset(op.inputs):
                there.update(op.outputs)
                others = [number for number in op.outputs if number not in kept]
                if len(others) == len(op.outputs) or not read.issuperset(others):
                    yield index

    def _signature(self) -> Hashable:
        """Both runs of a region have this in common, and are recognized by it."""
        return tuple([call.op for call in self._calls]), tuple(self._ops), tuple(self._values), tuple(self._given)

    def _number(self, tensor: Tensor) -> int:
        number = self._current.of(tensor)
        if number is None:
            number = self._new(tensor, alive=_is_parameter(tensor))
            self._given.append((number, tensor.requires_grad))
        return number

    def _new(self, tensor: Tensor, *, alive: bool = False) -> int:
        self._values.append(Value(size_hint(tensor.untyped_storage().nbytes()), demanded=False, alive=alive))
        self._current.bind(tensor.untyped_storage(), number := len(self._values) - 1)
        return number


_saves: dict[Hashable, frozenset[int]] = {}
"""For each region that has had its first run, by its signature: the values that backward needs."""
_MOST_SIGNATURES = 1024


def merge_with_region_before(graph: Graph, start: int, *, is_cut: bool) -> None:
    """Have torch take the region whose nodes begin at ``start`` for a part of the one before it, if that has a cut.

    Otherwise torch would save all that goes from one region to the other, though the cut of the first one may have it
    come back.
    """
    nodes = iter(reversed(graph.nodes))
    own = [node for node in islice(nodes, len(graph.nodes) - start) if _REGION in node.meta]
    before = next((node for node in nodes if _REGION in node.meta), None)
    region = None if before is None else before.meta.get(_CUT)
    for node in reversed(own):
        region = node.meta[_REGION] if region is None else region
        node.meta[_REGION] = region
        if is_cut:
            node.meta[_CUT] = region


_REGION, _CUT = "ac_graph_id", "recompute_cut"
"""In a node's meta: torch's number of the region that it is in; and the same number where that region has a cut."""


def _is_inside(node: Node, own: set[Node]) -> bool:
    """Whether only other nodes of the same op read a node. Such a step may be a part of the op's backward too."""
    is_tensor = node.target is not getitem and isinstance(node.meta.get("val"), Tensor)
    return is_tensor and bool(node.users) and own.issuperset(node.users)


def _is_parameter(tensor: Any) -> bool:
    """Whether AOTAutograd has put this in a parameter's place. Of a part of a DTensor that is not known."""
    if isinstance(tensor, FunctionalTensor):
        tensor = torch._from_functional_tensor(tensor.elem)
    return isinstance(tensor, nn.Parameter)


def _tensors(values: Any) -> list[Tensor]:
    return [local_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _seconds(op: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> float:
    """The time of an op with the traced sizes. To ask for these must not add guards on them."""
    with _disable_current_modes():
        return seconds(op, *tree_map_only(Tensor, _stand_in, (args, kwargs, output)))


def _stand_in(tensor: Tensor) -> Tensor:
    return torch.empty([*map(size_hint, local_of(tensor).shape)], dtype=tensor.dtype, device="meta")
