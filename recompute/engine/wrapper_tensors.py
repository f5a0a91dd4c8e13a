"""Tensors of subclasses that wrap others, as quantized weights do: two are the same if they hold the same tensors.

A wrapper has no memory of its own. ``detach`` makes another one, around the same tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from recompute.engine.dtensors import are_sharded


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
