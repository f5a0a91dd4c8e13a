"""Copies of models and batches on fake tensors, which take no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_leaves, tree_map_only

from recompute.engine.fake_mode import FakeMode
from recompute.engine.thread_state import swapped
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.estimation.quantized_linear import standing_for

_CPU = torch.device("cpu")


def fake_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the model on fake CPU tensors, in training mode. Call it under the mode of fake tensors.

    The model may be on any device, also on ``meta``, and is left as it is. A policy on it is not on the copy. Linears
    of bitsandbytes are replaced by others with the same bytes.

    dtype: for the copy's floating-point parameters; None to leave them as they are.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in tree_leaves(vars(module)):  # parameters, buffers, and tensors in lists and dicts
            if not isinstance(value, Tensor) or id(value) in memo:
                continue
            if isinstance(value, nn.Parameter):
                kind = dtype if value.is_floating_point() else None
                memo[id(value)] = nn.Parameter(_fake(value, kind), value.requires_grad)
            else:
                memo[id(value)] = _fake(value)
        if (stand_in := standing_for(module)) is not None:
            stand_in.bias = None if module.bias is None else memo[id(module.bias)]
            memo[id(module)] = stand_in
    return copy.deepcopy(model, memo).train()


@contextmanager
def modules_move() -> Iterator[None]:
    """Inside, ``nn.Module.to`` and its like give modules new fake parameters; shared ones stay shared.

    Torch's own swaps them, and refuses to where something else refers to them, such as an adapter's base layer. Fake
    tensors can be copied, as adapters copy modules that they save: torch's own copy asks for their addresses.
    """
    moved: dict[Tensor, Tensor] = {}

    def applied(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for part in module.children() if recurse else ():
            part._apply(change)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    new = moved[parameter] if parameter in moved else change(parameter)
                if new is not parameter and parameter not in moved:
                    new = moved[parameter] = nn.Parameter(new, parameter.requires_grad)
                module._parameters[name] = new  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else change(buffer)
        return module

    with swapped(nn.Module, "_apply", applied), swapped(FakeTensor, "__deepcopy__", _copied):
        yield


def _copied(tensor: Any, memo: dict[int, Any]) -> Tensor:
    if id(tensor) not in memo:
        new = tensor.detach().clone()
        memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    return memo[id(tensor)]


def fake_batch(batch: Any) -> Any:
    """The batch with fake CPU tensors in the place of its own. Call it under the mode of fake tensors."""
    return tree_map_only(Tensor, _fake, batch)


def shapes_chosen_in_turn() -> bool:
    """Whether the mode that is on has let shapes depend on choices that it took in turn."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return isinstance(mode, FakeMode) and mode.values.chose_in_turn


def _fake(tensor: Any, dtype: torch.dtype | None = None) -> Any:
    if inner_tensors(tensor):  # a wrapper, as of codes: of fake ones in the dtypes that they have
        names, rest = tensor.__tensor_flatten__()
        held = {name: _fake(getattr(tensor, name)) for name in names}
        return type(tensor).__tensor_unflatten__(held, rest, tensor.shape, tensor.stride())
    dtype = dtype or tensor.dtype
    made: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_CPU)
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    has_values = not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
    made._known = getattr(tensor, "_known", None)
    if isinstance(mode, FakeMode) and has_values and not (dtype.is_floating_point or dtype.is_complex):
        with unset_fake_temporarily():
            values = tensor.detach().to(_CPU).clone()
        mode.values.note(made, values)
    return made
