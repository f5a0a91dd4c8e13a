"""Runs a model on a batch and changes nothing: copies of arguments, the tensors where backward starts, restoring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.checkpoint.copies import OBJECT, Copier, StateCopies, map_leaves
from recompute.engine.checkpoint.module_state import LearnedBuffers, ModuleState
from recompute.engine.reachable_objects import find_generators
from recompute.engine.rng import RngState
from recompute.errors import ModelError, MutationError
from recompute.estimation.factories import own_loss

Loss = Callable[[Any], Tensor]


def sources_of(model: nn.Module, batch: Any) -> list[Any]:
    """The generators that the model may draw from, besides the default ones of torch, Python and NumPy."""
    reached: list[Any] = [*model.modules()]
    map_leaves(reached.append, dict(batch) if isinstance(batch, Mapping) else batch)
    return find_generators(reached)


def arguments_of(batch: Any, dtype: torch.dtype | None = None) -> tuple[tuple, dict[str, Any]]:
    """A copy of the batch, whose tensors are leaves of a new graph. A tensor that occurs twice is copied once."""
    copies: dict[int, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return Copier(OBJECT).copy(value)
        if id(value) not in copies:
            copies[id(value)] = copy_of(value, dtype)
        return copies[id(value)]

    if isinstance(batch, Mapping):
        return (), {name: map_leaves(copied, value) for name, value in batch.items()}
    return map_leaves(copied, batch if isinstance(batch, tuple) else (batch,)), {}


def roots(
    output: Any, loss: Loss | None, gradient_of: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors of a model's output where backward starts, and their gradients (None for a scalar).

    These are the scalar that ``loss`` returns; without it the output's own ``loss``; or else every tensor in the
    output, each with the gradient that ``gradient_of`` returns: by default, one of fixed signs.
    """
    if loss is not None:
        return [loss(output)], [None]
    if (own := own_loss(output)) is not None:
        return [own], [None]
    found = [tensor for tensor in named(output).values() if tensor.requires_grad]
    if not found:
        raise ModelError("nothing in the model's output requires a gradient; expected a loss, or tensors of floats")
    return found, [(gradient_of or fixed_signs)(tensor) for tensor in found]


@contextmanager
def left_as_it_was(model: nn.Module, sources: Iterable[Any]) -> Iterator[None]:
    """Inside, ``model`` is in training mode without gradients. At the end it and the random state are as before."""
    copies = StateCopies()
    state = ModuleState([model], LearnedBuffers(), copies)
    state.watch(copies.tensors)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    attributes = [value for module in model.modules() for value in vars(module).values()]
    hooks = [(value, value.copy()) for value in attributes if isinstance(value, dict)]  # and other tables of modules
    with RngState(sources).replayed(), state.replayed(type(model).__name__, StateCopies()), _put_back(copies.tensors):
        try:
            if not model.training:
                model.train()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for table, entries in hooks:
                table.clear()
                table.update(entries)
    if (what := state.changed()) is not None:
        raise MutationError(
            f"{what}, is changed by forward or backward (an optimizer in a hook?), so two runs cannot be compared. "
            "Remove what changes it first."
        )


@contextmanager
def _put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Undo at the end all writes into ``tensors`` inside."""
    before = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors if not tensor.is_inference()]
    with torch.autograd._unsafe_preserve_version_counter(tuple([tensor for tensor, _, _ in before])):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, version, copy in before:
                    if tensor._version != version:
                        tensor.copy_(copy)


def copy_of(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A leaf with the same values, floating-point ones in ``dtype`` if there is one."""
    copy = tensor.detach().clone()
    if dtype is not None and copy.is_floating_point():
        copy = copy.to(dtype)
    return copy.requires_grad_(tensor.requires_grad)


def named(value: Any) -> dict[str, Tensor]:
    """The tensors in ``value``, by key or by position."""
    if isinstance(value, Mapping):
        parts = [(str(key), part) for key, part in value.items()]
    else:
        parts = [(str(i), part) for i, part in enumerate(value if isinstance(value, (tuple, list)) else [value])]
    found: dict[str, Tensor] = {}
    for name, part in parts:
        leaves: list[Any] = []
        map_leaves(leaves.append, part)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        found |= {name if len(tensors) == 1 else f"{name}[{i}]": tensor for i, tensor in enumerate(tensors)}
    return found


def fixed_signs(tensor: Tensor) -> Tensor:
    """1 or -1, at random and always the same: numbers that no dtype rounds."""
    generator = torch.Generator(tensor.device).manual_seed(0)
    return torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device).mul_(2).sub_(1).to(tensor.dtype)
