"""Captured regions under torch's settings: which are in force, how they are put back, and the casts of autocast.

Autocast casts a parameter once in its span and gives that one cast to all who read the parameter. So gradients are
added up in the lower precision, in one node of autograd's graph. A captured region must read the same cast, and give
its gradients to the same node, and other code must find the region's casts in the cache. Therefore a region does not
cast parameters itself. It asks autocast for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from recompute.engine.bit_comparison import is_verifying
from recompute.engine.modes import count_dispatch_modes, count_function_modes, has_foreign_modes
from recompute.engine.numerics import Autocast, Numerics, autocast_in_force
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import has_only_our_hooks, top_hooks
from recompute.engine.thread_state import is_fake, local


class CallSettings(NamedTuple):
    """Settings of torch. A function may call other ops under other settings."""

    numerics: Numerics
    autocast: Autocast | None
    cached: tuple[int, ...]
    """The positions of the inputs that autocast casts but once, if it casts them."""

    @staticmethod
    def of(given: Sequence[Tensor] = ()) -> CallSettings:
        """Those in force. given: the inputs of a run."""
        autocast = autocast_in_force()
        return CallSettings(Numerics(), autocast, () if autocast is None else autocast.cached(given))


class GlobalState:
    """Random states and switches of torch, which code that stops in its middle may leave changed."""

    def __init__(self) -> None:
        self._rng = RngState()
        self._numerics = Numerics()
        self._grad = torch.is_grad_enabled()
        self._autocast = Autocast()
        self._nesting = _autocast_nesting()

    def put_back(self) -> None:
        self._rng.restore()
        self._numerics.put()
        torch.set_grad_enabled(self._grad)
        self._autocast.put()
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def leaving_vmaps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's ``forward``, which leaves no ``vmap`` open if it raises: a graph has no ``finally``."""

    def run(*inputs: Any) -> Any:
        transforms = torch._C._functorch
        depth = transforms.get_dynamic_layer_stack_depth()
        try:
            return forward(*inputs)
        finally:
            while transforms.get_dynamic_layer_stack_depth() > depth:
                transforms._vmap_decrement_nesting()

    return run


def is_undisturbed() -> bool:
    """Whether nothing around a region changes how its ops run, or how their saved tensors are held."""
    if local.active_frames or is_verifying():
        return False
    if (count_dispatch_modes() or count_function_modes()) and (has_foreign_modes() or not is_fake()):
        return False
    return (
        not _has_any_global_hook()
        and has_only_our_hooks(top_hooks())
        and not torch.is_anomaly_enabled()
        and ((autocast := autocast_in_force()) is None or autocast.is_known)
    )


def cast_of(parameter: Tensor) -> Tensor:
    """The cast of a parameter of 1 to 5 dimensions in autocast's cache, with its graph. It is cast now if need be.

    The cache cannot be asked. So a product reads the parameter, and autograd saves the cast for it. The other factor
    has no rows: nothing is computed. It takes 2 µs, and the cast.
    """
    device = parameter.device.type
    if top_hooks() is None:
        return _saved_by_product(parameter, torch.get_autocast_dtype(device))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # the hooks in force are not for this
        return _saved_by_product(parameter, torch.get_autocast_dtype(device))


def _saved_by_product(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    shape = parameter.shape
    if len(shape) <= 2:
        node: Any = torch.matmul(_no_rows((0, shape[0]), dtype, parameter.device), parameter).grad_fn
        saved: Tensor = node._saved_vec if len(shape) == 1 else node._saved_mat2
    elif len(shape) == 3:
        node = torch.bmm(_no_rows((shape[0], 0, shape[1]), dtype, parameter.device), parameter).grad_fn
        saved = node._saved_mat2
    else:
        convolution = F.conv2d if len(shape) == 4 else F.conv3d
        node = convolution(_no_rows((0, *shape[1:]), dtype, parameter.device), parameter).grad_fn
        saved = node._saved_weight
    return saved


@functools.cache
def _no_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
