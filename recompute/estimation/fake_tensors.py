"""Copies of models and batches on fake tensors, which take no memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_CPU = torch.device("cpu")


def fake_copy(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the model on fake CPU tensors, in training mode. Call it under the mode of fake tensors.

    The model may be on any device, also on ``meta``, and is left as it is. A policy on it is not on the copy.

    dtype: for the copy's floating-point parameters; None to leave them as they are.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                memo[id(value)] = _fake(value, value.dtype)
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                kind = dtype if dtype and parameter.is_floating_point() else parameter.dtype
                memo[id(parameter)] = nn.Parameter(_fake(parameter, kind), parameter.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo.setdefault(id(buffer), _fake(buffer, buffer.dtype))
    return copy.deepcopy(model, memo).train()


def move(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> None:
    """``model.to(device, dtype)``, which refuses some fake tensors (torch 2.13). Shared tensors stay shared."""
    moved: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in moved:
                moved[parameter] = nn.Parameter(_like(parameter, device, dtype), parameter.requires_grad)
            module._parameters[name] = None if parameter is None else moved[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else _like(buffer, device, dtype)


def _like(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    return torch.empty_like(tensor, device=device, dtype=dtype if tensor.is_floating_point() else None)


def fake_batch(batch: Any) -> Any:
    """The batch with fake CPU tensors in the place of its own. Call it under the mode of fake tensors."""
    return tree_map_only(Tensor, lambda tensor: _fake(tensor, tensor.dtype), batch)


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=_CPU)
