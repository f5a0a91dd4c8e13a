"""Tensors of subclasses that wrap others, as quantized weights do: two are the same if they hold the same tensors.

A wrapper has no memory of its own. ``detach`` makes another one, around the same tensors.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _pop_mode, _push_mode

from recompute.engine.dtensors import are_sharded

SEE = object()
"""The mode has to look at the op itself."""


def passed_on(mode: Any, op: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result for a dispatch mode of an op that comes to it again as other ops; ``SEE`` for any other op.

    A wrapper calls ops on the tensors that it wraps. It does so below autograd, so ops arrive that consist of others.
    """
    if types and not are_sharded(types) and any(map(_is_wrapper, types)):
        return NotImplemented
    if not _is_composite(op) or torch.is_inference_mode_enabled():
        return SEE
    if any(isinstance(each, Tensor) and each.is_nested for each in args):  # it has kernels of its own
        return SEE
    _push_mode(mode)
    try:
        return op.decompose(*args, **kwargs)
    finally:
        _pop_mode()


def _is_wrapper(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


@functools.cache
def _is_composite(op: Any) -> bool:
    """Whether an op is nothing but other ops, on any device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return (
        isinstance(op, OpOverload)
        and op.namespace != "prim"
        and has_kernel(op.name(), "CompositeImplicitAutograd")
        and not any(has_kernel(op.name(), device) for device in ("CPU", "CUDA"))
    )


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper holds, also in wrappers inside of it; none of any other tensor, nor of a DTensor."""
    kind: Any = type(tensor)
    if kind is Tensor or kind is nn.Parameter or kind.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return []
    if issubclass(kind, FakeTensor) or are_sharded((kind,)) or tensor.data_ptr():
        return []
    if hasattr(kind, "__tensor_flatten__"):
        held: list[Any] = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    else:
        held = [value for value in vars(tensor).values() if isinstance(value, Tensor)]
    return [inner for each in held for inner in inner_tensors(each) or (each,)]


def nbytes_held(tensor: Tensor) -> int:
    """The bytes of the storages of a tensor, or of those that it wraps."""
    return sum(each.untyped_storage().nbytes() for each in inner_tensors(tensor) or (tensor,))
