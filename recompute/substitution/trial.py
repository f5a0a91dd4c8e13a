"""Compares what a kernel computes with what the module computes that it is to stand in for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from recompute.engine.reachable_objects import base_of
from recompute.engine.rng import RngState
from recompute.substitution.careful_calls import careful

_agree: dict[Any, bool] = {}


def computes_the_same(module: nn.Module, found: Any, kernel: Callable[[Tensor], Tensor | None], width: int) -> bool:
    """Whether ``kernel`` gives what ``module`` gives of six rows, and the same gradients, up to rounding.

    Modules that are alike are compared once. Parameters without values, as fake and sharded ones, tell nothing: they
    count as the same.

    found: what has been recognized of the module.
    """
    parameters = list(module.parameters())
    if not all(type(each) is nn.Parameter and each.untyped_storage().nbytes() for each in parameters):
        return True
    first = parameters[0] if parameters else torch.empty(0, device="cpu")
    if first.is_meta:
        return True
    key = (base_of(module), found, width, *((each.shape, each.dtype, each.device.type) for each in parameters))
    if key not in _agree:
        _agree[key] = _agrees(module, kernel, first, width)
    return _agree[key]


def _agrees(module: nn.Module, kernel: Callable[[Tensor], Tensor | None], like: Tensor, width: int) -> bool:
    forward = MethodType(base_of(module).forward, module)
    (name,) = inspect.signature(forward).parameters
    state = RngState()  # a dropout draws the same numbers in both, and none as far as others can tell
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        x = torch.linspace(-3, 3, 6 * width, device=like.device, dtype=like.dtype).view(6, width).requires_grad_()
        dy = torch.cos(7 * x.detach())
        try:
            with state.replayed():
                expected = careful(forward)(**{name: x})
            expected = [expected, *torch.autograd.grad(expected, x, dy)]
        except Exception:
            # Any module's forward comes here, and may raise anything. Then it is not recognized.
            return False
        with state.replayed():
            y = kernel(x)
        if y is None:
            return False
        given = [y, *torch.autograd.grad(y, x, dy)]
    precision = max(torch.finfo(x.dtype).eps, torch.finfo(torch.float32).eps)  # of norms that compute in float32
    return x._version == 0 and all(
        one.shape == other.shape and bool((one - other).double().norm() <= precision**0.5 * other.double().norm())
        for one, other in zip(given, expected, strict=True)
    )
