"""Captured regions under autocast and torch's other settings: which are in force, and what autocast has cast.

Autocast casts a parameter once in its span and gives that one cast to all who read the parameter. So gradients are
added up in the lower precision, in one node of autograd's graph. A captured region must read the same cast, and give
its gradients to the same node, and other code must find the region's casts in the cache. Therefore a region does not
cast parameters itself. It asks autocast for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from recompute.engine.bit_comparison import is_verifying
from recompute.engine.modes import count_dispatch_modes, count_function_modes
from recompute.engine.numerics import Numerics
from recompute.engine.saved_tensors import has_only_our_hooks, top_hooks
from recompute.engine.thread_state import is_in_cuda_graph, local

_DEVICES = ("cpu", "cuda")


class Autocast:
    """Autocast's settings as they are when this is made."""

    __slots__ = ("_caches", "_devices")

    def __init__(self) -> None:
        self._devices = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
        self._caches = torch.is_autocast_cache_enabled()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Autocast) and (self._devices, self._caches) == (other._devices, other._caches)

    @property
    def is_known(self) -> bool:
        """Whether it is on for one of the devices that this knows."""
        return any(is_enabled for _, is_enabled, _ in self._devices)

    def put(self) -> None:
        for device, is_enabled, dtype in self._devices:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self._caches)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A span in which autocast is as it was then, with a cache that ends with the span."""
        with ExitStack() as stack:
            for device, is_enabled, dtype in self._devices:
                if is_enabled:
                    stack.enter_context(torch.autocast(device, dtype, is_enabled, self._caches))
            yield

    def cached(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The positions of those whose casts it caches, if a matrix product reads them."""
        if not self._caches:
            return ()
        on = [device for device, is_enabled, _ in self._devices if is_enabled]
        return tuple(
            [
                position
                for position, tensor in enumerate(tensors)
                if tensor.dtype is torch.float32
                and tensor.requires_grad
                and tensor.is_leaf
                and tensor.device.type in on
                and not tensor._is_view()
            ]
        )


def autocast_in_force() -> Autocast | None:
    """None where autocast is off."""
    return Autocast() if torch._C._is_any_autocast_enabled() else None


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
