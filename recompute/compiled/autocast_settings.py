"""Captured regions under autocast and torch's other settings: which are in force, and what autocast has cast.

Autocast casts a parameter once in its span and gives that one cast to all who read the parameter. So gradients are
added up in the lower precision, in one node of autograd's graph. A captured region must read the same cast, and give
its gradients to the same node, and other code must find the region's casts in the cache. Therefore a region does not
cast parameters itself. It asks autocast for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from recompute.engine.bit_comparison import is_verifying
from recompute.engine.modes import count_dispatch_modes, count_function_modes
from recompute.engine.numerics import Autocast as Autocast
from recompute.engine.numerics import Numerics
from recompute.engine.numerics import autocast_in_force as autocast_in_force
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import has_only_our_hooks, top_hooks
from recompute.engine.thread_state import is_in_cuda_graph, local


class CallSettings(NamedTuple):
    """The settings of torch under which something runs. They may decide which ops a function calls."""

    numerics: Numerics
    autocast: Autocast | None
    cached: tuple[int, ...]
    """The positions of the inputs that autocast casts but once, if it casts them."""

    @staticmethod
    def of(given: Sequence[Tensor] = ()) -> CallSettings:
        """Those in force. given: the inputs of what runs."""
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
    """Whether nothing around a region has a say in how its ops run or what becomes of what they save."""
    if (
        local.active_frames
        or count_dispatch_modes()
        or count_function_modes()
        or is_verifying()
        or _has_any_global_hook()
    ):
        return False
    return (
        has_only_our_hooks(top_hooks())
        and not torch.is_anomaly_enabled()
        and ((autocast := autocast_in_force()) is None or autocast.is_known)
        and not is_in_cuda_graph()  # in which no state of a generator can be read
    )


_ROWS: dict[tuple[Any, ...], Tensor] = {}
"""Tensors of no rows, by their shapes, dtypes and devices."""


def cast_of(parameter: Tensor) -> Tensor:
    """What autocast's cache has for a parameter of 1 to 5 dimensions, with its graph. It is cast now if need be.

    The cache cannot be asked, so this has a product read the parameter, and takes what autograd saves of that. The
    other factor has no rows: nothing is computed. It takes 2 µs, and the cast.
    """
    device = parameter.device.type
    if top_hooks() is None:
        return _saved_by_product(parameter, torch.get_autocast_dtype(device))
    with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):  # the hooks in force are not for this
        return _saved_by_product(parameter, torch.get_autocast_dtype(device))


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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


def _no_rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    key = shape, dtype, device
    found = _ROWS.get(key)
    if found is None:
        found = _ROWS[key] = torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
    return found
