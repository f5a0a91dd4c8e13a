"""The settings of torch that an op's result depends on besides its arguments: captured, compared, put back.

An op that runs again in backward must run under the settings of forward. The default dtype decides what type promotion
and factories give, the number of threads in which order a sum is added up, and flags which algorithm runs and how it
rounds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

Getter = Callable[[], Any]
Setter = Callable[[Any], Any]

_C = torch._C
_tiny = sys.float_info.min


def _flushes_denormals() -> bool:
    """``torch.set_flush_denormal`` has no getter: the flag is the processor's, and holds for Python's floats too."""
    return _tiny * 0.5 == 0.0


def _unless_refused(get: Getter, put: Setter) -> tuple[Getter, Setter]:
    """Of an older setting: None where it contradicts the newer ``fp32_precision``, for torch raises an error then."""

    def getter() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return getter, lambda value: None if value is None else put(value)


def _determinism() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_determinism(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _reduced(name: str) -> tuple[Getter, Setter]:
    put = getattr(_C, f"_set_cublas_allow_{name}_reduced_precision_reduction")
    return getattr(_C, f"_get_cublas_allow_{name}_reduced_precision_reduction"), lambda value: put(*value)


def _fp32(backend: str, op: str) -> tuple[Getter, Setter]:
    get, put = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter
    return functools.partial(get, backend, op), functools.partial(put, backend, op)


# The order in which attention's backends are tried is not among these. On Hopper torch itself changes it during the
# first attention (``priority_order`` in ATen/native/transformers/cuda/sdp_utils.cpp), in the middle of a region.
_SETTINGS: tuple[tuple[Getter, Setter], ...] = (
    (torch.get_default_dtype, _C._set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (_flushes_denormals, torch.set_flush_denormal),
    (_determinism, _set_determinism),
    (_C._get_deterministic_fill_uninitialized_memory, _C._set_deterministic_fill_uninitialized_memory),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_mkldnn_deterministic, _C._set_mkldnn_deterministic),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    (_C._get_cublas_allow_fp16_accumulation, _C._set_cublas_allow_fp16_accumulation),
    _reduced("fp16"),
    _reduced("bf16"),
    (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    (_C._get_cudnn_sdp_enabled, _C._set_sdp_use_cudnn),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _C._set_math_sdp_allow_fp16_bf16_reduction),
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
)
_getters = [get for get, _ in _SETTINGS]
_NOTHING: AbstractContextManager[None] = nullcontext()


class Numerics:
    """The settings as they are when this is made."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = [get() for get in _getters]

    def are_in_force(self) -> bool:
        return [get() for get in _getters] == self._values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numerics) and self._values == other._values

    def put(self) -> None:
        """Put those in force that are not."""
        for (get, put), value in zip(_SETTINGS, self._values, strict=True):
            if get() != value:
                put(value)

    def replayed(self) -> AbstractContextManager[None]:
        """The span in which these settings are in force. Afterwards the present ones are again."""
        present = Numerics()
        return _NOTHING if present._values == self._values else self._instead_of(present)

    @contextmanager
    def _instead_of(self, present: Numerics) -> Iterator[None]:
        try:
            self.put()
            yield
        finally:
            present.put()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The span in which ``dtype`` is the default one."""
    present = torch.get_default_dtype()
    _C._set_default_dtype(dtype)
    try:
        yield
    finally:
        _C._set_default_dtype(present)
