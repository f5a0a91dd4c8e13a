"""What happens where a region's program cannot run backward: the region's graph runs again, under autograd.

The backward of that is exact for any gradients, and can be differentiated in its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.saved_tensors import describe
from recompute.errors import UnsupportedError

_DIFFERS = (
    "in {}: backward differs from those before it (other outputs take a gradient, or gradients of another layout, it "
    "runs under another autocast, or it is differentiated in its turn), and forward cannot run again, as {}. Give the "
    "rule `capture: false`."
)

_REACHES_LESS = (
    "in {}: backward comes by some of its outputs, but those that had gradients before depend on more inputs. Captured "
    "code is one node of autograd's graph, which would hand a gradient of None to these inputs, and so to hooks and "
    "modules before them; plain PyTorch does not go there. Give the rule `capture: false`."
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


State = tuple[int, int]
"""The version of a tensor and the address of its memory."""


Other = tuple[Any, Tensor | None, State]
"""An input that backward does not read: the tensor or a weak reference to it, its memory if that is held, its state."""


def state_of(tensor: Tensor) -> State:
    return tensor._version, tensor.data_ptr()


class Given:
    """The inputs of a frame, collected again in backward."""

    def __init__(self, name: str):
        self._name = name
        self._tensors: dict[int, Tensor] = {}

    def hold(self, position: int, tensor: Tensor) -> None:
        """An input that the frame has held."""
        self._tensors[position] = tensor

    def find(self, position: int, tensor: Tensor | None, state: State) -> None:
        """An input that the frame has not held; None if it is gone. state: the one that it had in forward."""
        if tensor is None:
            raise UnsupportedError(_DIFFERS.format(self._name, "a tensor that it was given is gone"))
        if state_of(tensor) != state:
            raise UnsupportedError(
                _DIFFERS.format(self._name, f"a {describe(tensor)} that it was given has changed since")
            )
        self._tensors[position] = tensor

    def tensors(self, edges: Collection[int], leaves: Collection[int], *, is_differentiated: bool) -> list[Tensor]:
        """All inputs. They have their graphs if backward is differentiated. Otherwise those at ``edges`` have new ones.

        leaves: which of these are leaves. Autocast may cast a leaf once, and any other tensor where it is read.
        """
        tensors = [self._tensors[position] for position in range(len(self._tensors))]
        if is_differentiated:
            return tensors
        given = [tensor.detach().requires_grad_(position in edges) for position, tensor in enumerate(tensors)]
        with torch.enable_grad():
            return [each if position in leaves else each.view_as(each) for position, each in enumerate(given)]


def contributions_of(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None], given: Sequence[Tensor], edges: Sequence[int]
) -> list[Tensor | None]:
    """The contributions to the gradients of the inputs at ``edges``, one each, in the order in which they come.

    They are not added up here. Autograd adds them to those of others one by one, as in plain PyTorch: sums of sums
    would be rounded in another way.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if not pairs:
        return [None] * len(edges)
    ends = {}
    for position in set(edges):
        edge = torch.autograd.graph.get_gradient_edge(given[position])
        ends[edge.node, edge.output_nr] = position
    found: dict[int, list[Tensor]] = {position: [] for position in edges}
    pending = [output.grad_fn for output, _ in pairs]
    known, hooks = set(pending), []

    def see(targets: list[int | None], into: Sequence[Tensor | None], _: Any) -> None:
        for position, gradient in zip(targets, into, strict=True):
            if position is not None and gradient is not None:
                found[position].append(gradient)

    nodes = {node for node, _ in ends}
    while pending:
        node = pending.pop()
        targets = [ends.get(edge) for edge in node.next_functions]
        if any(position is not None for position in targets):
            hooks.append(node.register_hook(partial(see, targets)))
        following = {target for target, _ in node.next_functions if target is not None} - nodes - known
        known |= following
        pending += following
    try:
        torch.autograd.grad(
            [output for output, _ in pairs],
            [given[position] for position in dict.fromkeys(edges)],
            [gradient for _, gradient in pairs],
            create_graph=torch.is_grad_enabled(),
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    return [found[position].pop(0) if found[position] else None for position in edges]
