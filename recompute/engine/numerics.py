"""Torch's settings, on which an op's result depends besides its arguments: captured, compared, put back.

An op that runs again in backward must run under the settings of forward. The default dtype decides the dtypes of
promoted types and of factories' outputs. The number of threads decides the order in which a sum is added up. Flags
decide which algorithm runs, and how it rounds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

Getter = Callable[[], Any]
Setter = Callable[[Any], Any]

_C = torch._C
_tiny = sys.float_info.min


def _flushes_denormals() -> bool:
    """``torch.set_flush_denormal`` has no getter: the flag is the processor's, and holds for Python's floats too."""
    return _tiny * 0.5 == 0.0


def _unless_refused(get: Getter, put: Setter) -> tuple[Getter, Setter]:
    """An older setting; None where torch refuses to read it, because it contradicts the newer ``fp32_precision``."""

    def getter() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return getter, lambda value: None if value is None else put(value)


def _reduced(name: str) -> tuple[Getter, Setter]:
    put = getattr(_C, f"_set_cublas_allow_{name}_reduced_precision_reduction")
    return getattr(_C, f"_get_cublas_allow_{name}_reduced_precision_reduction"), lambda value: put(*value)


def _fp32(backend: str, op: str) -> tuple[Getter, Setter]:
    get, put = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return functools.partial(get, backend, op), functools.partial(put, backend, op)


# Torch tries attention's backends in an order that is not among these. On Hopper torch itself changes it during the
# first attention (``priority_order`` in ATen/native/transformers/cuda/sdp_utils.cpp), in the middle of a region.
_SETTINGS: tuple[tuple[Getter, Setter], ...] = (
    (torch.get_default_dtype, _C._set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes_denormals, torch.set_flush_denormal),
    (
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda value: _C._set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    (_C._get_nnpack_enabled, _C._set_nnpack_enabled),
    (_C._get_blas_preferred_backend, _C._set_blas_preferred_backend),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    _reduced("fp16"),
    _reduced("bf16"),
    # These two also set some of those below, so those, more exact, come after them.
    _unless_refused(_C._get_float32_matmul_precision, _C._set_float32_matmul_precision),
    _unless_refused(_C._get_cudnn_allow_tf32, _C._set_cudnn_allow_tf32),
    _fp32("generic", "all"),
    _fp32("cuda", "all"),
    _fp32("cuda", "matmul"),
    _fp32("cuda", "conv"),
    _fp32("mkldnn", "all"),
    _fp32("mkldnn", "matmul"),
    _fp32("mkldnn", "conv"),
    # These only choose among ops that attention consists of.
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
)
_getters = [get for get, _ in _SETTINGS]
_of_all_ops, _of_costly_ops = _getters[:3], _getters[:-5]
_NOTHING: AbstractContextManager[None] = nullcontext()


class Numerics:
    """The settings as they are when this is made."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = tuple([get() for get in _getters])

    def are_in_force(self) -> bool:
        return tuple([get() for get in _getters]) == self._values

    def bear_on(self, *, is_costly: bool) -> bool:
        """Whether an op that is called now computes as under these. is_costly: whether it has algorithms to choose."""
        getters = _of_costly_ops if is_costly else _of_all_ops
        return tuple([get() for get in getters]) == self._values[: len(getters)]

    def __hash__(self) -> int:
        return hash(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numerics) and self._values == other._values

    def put(self) -> None:
        """Put those in force that are not."""
        for (get, put), value in zip(_SETTINGS, self._values, strict=True):
            if get() != value:
                put(value)

    def replayed(self) -> AbstractContextManager[None]:
        """Inside, these settings are in force. Afterwards the present ones are again."""
        present = Numerics()
        return _NOTHING if present._values == self._values else self._instead_of(present)

    @contextmanager
    def _instead_of(self, present: Numerics) -> Iterator[None]:
        try:
            self.put()
            yield
        finally:
            present.put()


_DEVICES = ("cpu", "cuda")
_CASTS = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)
without_casts = functools.partial(_C._ExcludeDispatchKeyGuard, _CASTS)
"""A context: autocast casts nothing inside."""


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
        """Inside, autocast is as it was then, with a cache that ends with the block."""
        with ExitStack() as stack:
            for device, is_enabled, dtype in self._devices:
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


def autocast_again(then: Autocast | None) -> AbstractContextManager[None]:
    """Inside, autocast is as it was where ``autocast_in_force`` returned ``then``."""
    if then is not None:
        return then.again()
    return _without_autocast() if torch._C._is_any_autocast_enabled() else _NOTHING


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, ``dtype`` is the default dtype."""
    present = torch.get_default_dtype()
    _C._set_default_dtype(dtype)
    try:
        yield
    finally:
        _C._set_default_dtype(present)
