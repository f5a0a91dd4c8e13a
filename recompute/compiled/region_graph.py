"""Autograd's graph of a region, from its outputs back to its inputs, and the ops of its nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.tape.autocast import run_as_called
from recompute.engine.thread_state import local
from recompute.engine.wrapper_tensors import SEE, passed_on

_ATEN = torch.ops.aten

INPUT = -1
"""Stands for the number of a node in an edge that leads to a region's input. Then its slot is the input's position."""

OTHER = -1
"""Stands for the slot in an edge that leads to where an input's gradient goes, and is no input's."""

MODE_DEPENDENT = frozenset((
    "CumprodBackward0", "LinalgHouseholderProductBackward0", "MaskedFillBackward1", "MaskedSelectBackward0",
    "MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0", "OrmqrBackward0", "ProdBackward0",
    "ProdBackward1",
))  # fmt: skip
"""The nodes whose formulas make other calls under a dispatch mode, with other strides or bits.

No others were found among the ops of torch's own tests (``op_db``), on strided inputs, too. Clamp, maximum and minimum
have other formulas as well, but only to fill out of place, which an observation undoes.
"""

Edge = tuple[int, int] | None
"""Where a gradient goes: the number of a node, and the slot of it; None if nobody takes the gradient."""
Ends = Mapping[Any, Mapping[int, int]]
"""The nodes that the inputs' gradients go to, and the positions of the inputs, by the slots of these nodes."""


def ends_of(inputs: Sequence[Tensor]) -> Ends:
    ends: dict[Any, dict[int, int]] = {}
    for position, tensor in enumerate(inputs):
        if tensor.requires_grad:
            edge = torch.autograd.graph.get_gradient_edge(tensor)
            ends.setdefault(edge.node, {})[edge.output_nr] = position
    return ends


def numbered_nodes(roots: Iterable[Any], ends: Ends) -> tuple[dict[Any, int], list[list[Edge]]]:
    """The nodes from ``roots`` on with their numbers; and for each number, where the node's gradients go."""
    numbers = {node: number for number, node in enumerate(dict.fromkeys(roots))}
    pending, edges = list(numbers), []
    for node in pending:  # it grows meanwhile
        found: list[Edge] = []
        for target, slot in node.next_functions:
            if target is None:
                found.append(None)
            elif target in ends:
                found.append((INPUT, ends[target].get(slot, OTHER)))
            else:
                if target not in numbers:
                    numbers[target] = len(numbers)
                    pending.append(target)
                found.append((numbers[target], slot))
        edges.append(found)
    return numbers, edges


def reached_from(number: int, edges: Sequence[Sequence[Edge]]) -> frozenset[int]:
    """The positions of the inputs that the gradients of a node reach."""
    known, pending, positions = {number}, [number], set()
    while pending:
        for target, slot in filter(None, edges[pending.pop()]):
            if target == INPUT:
                positions.add(slot)
            elif target not in known:
                known.add(target)
                pending.append(target)
    return frozenset(positions)


class BackwardOps(TorchDispatchMode):
    """Shows the calls of a node of the graph to an observation, as they run outside of any mode.

    Under a mode some formulas fill a fresh result of ``where`` out of place, which makes it contiguous. Without one
    they fill it in place, and it keeps its strides, which decide the order of later sums. So here, too, it is filled
    in place.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[..., Any], name: str):
        """observe: the method of the observation, ``(op, args, kwargs, run) -> output``. name: the region's."""
        super().__init__()
        self._observe = weakref.WeakMethod(observe)  # weakly, because its object holds this
        self._name = name
        self._chosen: Callable[[], Tensor | None] = lambda: None
        """The output of the last ``where``, as long as it lives."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (passed := passed_on(self, op, types, args, kwargs)) is not SEE:
            return passed
        observe = self._observe()
        if local.regenerating or observe is None:
            return op(*args, **kwargs)
        if op is _ATEN.masked_fill.Scalar and args[0] is self._chosen():
            op = _ATEN.masked_fill_.Scalar
        output = observe(op, args, kwargs, partial(run_as_called, op, args, kwargs, self._name))
        if op is _ATEN.where.self:
            self._chosen = weakref.ref(output)
        return output
