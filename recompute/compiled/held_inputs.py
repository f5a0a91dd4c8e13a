"""How the code of a captured forward holds its inputs, and how a region's graph runs on these again.

It runs again, under autograd, where the region's program cannot run backward. The backward of that is exact for any
gradients, and can be differentiated in its turn.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recompute.compiled.region_graph import INPUT, OTHER, Edge, ends_of, numbered_nodes
from recompute.engine.saved_tensors import describe
from recompute.engine.tape.op_arguments import copied
from recompute.errors import UnsupportedError

Versioned = tuple[Tensor, int]
"""A tensor, and its version when it was held."""
State = tuple[int, int]
"""The version of a tensor and the address of its memory."""
Other = tuple[Any, Tensor | None, State | None]
"""An input that backward does not read: the tensor or a weak reference to it, its memory if that is held, its state.

Its state is None if it may have any value.
"""

# The memory of a parameter is held as autograd holds that of a view: its ``data`` may be replaced.
_HOLDS = {
    "saved": "None",
    "itself": "(t{0}, t{0}._version)",
    "memory": "(t{0}.detach(), t{0}._version)",
    "copy": "versioned(copied(t{0}))",
}
_STATE = "(t{0}._version, address(t{0}))"
_FINDS = {
    "itself": f"t{{0}}, None, {_STATE}",
    "memory": f"weak(t{{0}}), t{{0}}.detach(), {_STATE}",
    "weak": f"weak(t{{0}}), None if is_sure else t{{0}}.detach(), {_STATE}",
    "updated": "t{0}, None, None",
}


def held_of(held: Sequence[tuple[int, str, str]], others: Sequence[tuple[int, str]]) -> str:
    """The last three results of forward's code: the inputs to be saved by autograd, to be held, and to be looked at.

    held, others: as ``Program`` has them, with the variables of the former.
    """
    saved = [name for _, how, name in held if how == "saved"]
    kept = [_HOLDS[how].format(position) for position, how, _ in held]
    seen = [f"({_FINDS[how].format(position)})" for position, how in others]
    return f"[{', '.join(saved)}], [{', '.join(kept)}], [{', '.join(seen)}]"


HELPERS: dict[str, Any] = {
    "versioned": lambda tensor: (tensor, tensor._version),
    "copied": copied,
    "weak": weakref.ref,
    "address": torch._C.TensorBase.data_ptr,
}
"""The objects that the text of ``held_of`` refers to by name."""


_DIFFERS = (
    "in {}: this backward differs from the captured one (gradients of other outputs, other strides, another autocast, "
    "or create_graph=True), and forward cannot run again because {}. Add `capture: false` to the module's rule."
)

_REACHES_LESS = (
    "in {}: backward reaches only some of its outputs, and these depend on fewer inputs than the captured backward. "
    "Captured code is one autograd node: it would pass a gradient of None to the other inputs, where plain PyTorch "
    "calls no hook and no backward at all. Add `capture: false` to the module's rule."
)


def refuse_none(name: str, inputs: Iterable[Any]) -> None:
    """Refuse to hand None to these inputs, where plain PyTorch would not go, unless that has no effect.

    It has none on a parameter without hooks. In a distributed run there may be hooks that nobody can see.
    """
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    for tensor in inputs:
        is_quiet = isinstance(tensor, nn.Parameter) and tensor.is_leaf and not is_distributed
        if not is_quiet or tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise UnsupportedError(_REACHES_LESS.format(name))


def checked_other(other: Other, name: str, *, may_be_memory: bool) -> Tensor:
    """That input of the region called ``name``, as it was in forward. may_be_memory: it needs no graph."""
    tensor, memory, state = other
    if not isinstance(tensor, Tensor):  # a weak reference
        tensor = tensor()
        if tensor is None and may_be_memory:
            tensor = memory
    if tensor is None:
        raise UnsupportedError(_DIFFERS.format(name, "one of its inputs has been freed"))
    if state is not None and (tensor._version, tensor.data_ptr()) != state:
        raise UnsupportedError(_DIFFERS.format(name, f"one of its inputs, a {describe(tensor)}, has changed since"))
    return tensor


def with_new_graphs(tensors: Sequence[Tensor], edges: Collection[int], leaves: Collection[int]) -> list[Tensor]:
    """The inputs, with graphs of their own at ``edges``.

    leaves: which of these are leaves. Autocast may cast a leaf once, and any other tensor where it is read.
    """
    given = [tensor.detach().requires_grad_(position in edges) for position, tensor in enumerate(tensors)]
    with torch.enable_grad():
        return [each if position in leaves else each.view_as(each) for position, each in enumerate(given)]


def contributions_of(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None], given: Sequence[Tensor], edges: Sequence[int]
) -> list[Tensor | None]:
    """The contributions to the gradients of the inputs at ``edges``, one each, as they come.

    They are not added up here. Autograd adds them to those of others one by one, as in plain PyTorch: sums of sums
    would be rounded in another way.
    """
    both = zip(outputs, gradients, strict=True)
    pairs = [(output, gradient) for output, gradient in both if gradient is not None and output.requires_grad]
    if not pairs:
        return [None] * len(edges)
    roots, come = zip(*pairs, strict=True)
    inputs = list(dict.fromkeys(edges))
    wanted = [given[position] for position in inputs]
    numbers, graph = numbered_nodes([root.grad_fn for root in roots], ends_of(wanted))
    found: dict[int, list[Tensor]] = {position: [] for position in inputs}

    def see(passes: Sequence[Edge], into: Sequence[Tensor | None], _: Any) -> None:
        for edge, gradient in zip(passes, into, strict=True):
            if edge is not None and edge[0] == INPUT and edge[1] != OTHER and gradient is not None:
                found[inputs[edge[1]]].append(gradient)

    reaching = [(node, graph[n]) for node, n in numbers.items() if any(e and e[0] == INPUT for e in graph[n])]
    hooks = [node.register_hook(partial(see, passes)) for node, passes in reaching]
    try:
        torch.autograd.grad(roots, wanted, come, create_graph=torch.is_grad_enabled(), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[position].pop(0) if found[position] else None for position in edges]
