"""The arguments of an op, as the dispatcher sees them: tensors that are views of storages, and others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.custom_ops import _maybe_get_opdef
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from recompute.engine.cut.layout import Layout, is_dense
from recompute.engine.cut.ops import tensors_in
from recompute.engine.reachable_objects import find_generators
from recompute.engine.rng import GLOBALS, RngState
from recompute.engine.thread_state import is_fake, is_in_cuda_graph

PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
LISTS = frozenset((list, tuple))
_CONSTANTS = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
)

_NEVER_DRAW = frozenset(("bitsandbytes",))
"""Libraries whose ops draw no random numbers."""


class NotRegenerable(Exception):
    """Why an op's outputs cannot be regenerated."""


def not_plain(tensor: Tensor) -> str:
    """What a tensor is for which ``is_plain`` is false, in a message."""
    return f"a {type(tensor).__name__} that is not an ordinary strided tensor"


def not_regenerable(tensor: Tensor) -> NotRegenerable:
    return NotRegenerable(f"it reads {not_plain(tensor)}")


def parameter_of(tensor: Tensor) -> Tensor | None:
    """``tensor`` if it is a parameter, or the parameter that it is a view of."""
    if _is_parameter(tensor):
        return tensor
    base = tensor._base
    return base if base is not None and _is_parameter(base) and base.dtype is tensor.dtype else None


def _is_parameter(tensor: Tensor) -> bool:
    kind = type(tensor)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(tensor, nn.Parameter))


def is_constant(value: Any) -> bool:
    """Whether a value is a constant, or a named tuple or a frozen dataclass of some. A graph has its equals."""
    if hasattr(type(value), "_fields") or type(value) is torch.Size:
        return all(map(is_constant, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        is_frozen = value.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return is_frozen and all(is_constant(getattr(value, each.name)) for each in dataclasses.fields(value))
    return isinstance(value, _CONSTANTS)


def without(places: Collection[int | str], args: Sequence[Any]) -> list[Any]:
    return [None if place in places else value for place, value in enumerate(args)]


def at(places: tuple[int | str, ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [kwargs.get(place) if isinstance(place, str) else args[place] for place in places]


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a view of a storage, and nothing else."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_neg() or tensor.is_conj())
    )


def is_frozen(value: Any) -> bool:
    """Whether it is a frozen parameter of a class of its own, such as one of codes, that ops see as a plain one."""
    is_own = isinstance(value, nn.Parameter) and type(value) is not nn.Parameter and not value.requires_grad
    return is_own and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__


def copied(tensor: Tensor) -> Tensor:
    """``tensor`` as a view of a copy of its whole storage."""
    layout, nbytes = Layout.of(tensor), tensor.untyped_storage().nbytes()
    if is_dense(layout, nbytes):
        return tensor.clone()
    memory = tensor.as_strided((nbytes // layout.dtype.itemsize,), (1,), 0)
    return memory.clone().as_strided(layout.shape, layout.stride, layout.offset)


def watch(op: Any, values: Iterable[Any], name: str) -> RngState | None:
    """The states of all generators that an op of another library may be about to draw from, whatever its tags say.

    values: its arguments. name: of the module that calls it.
    """
    if is_fake():
        return None
    if is_in_cuda_graph():
        raise NotRegenerable("it may draw random numbers, which cannot be noticed while a CUDA graph is captured")
    given = [value for value in values if isinstance(value, torch.Generator)]
    return RngState([*generators_of(op), *given], name=name, only_torch=True)


@functools.cache
def generators_of(op: Any) -> list[Any]:
    """The generators that the names in an op's code lead to, if it is written in Python.

    Where torch keeps that code to itself, as of ``torch.library.impl``, these are Python's and NumPy's own.
    """
    if isinstance(op, OpOverload) and op.namespace in _NEVER_DRAW:
        return []
    found = find_generators((op,))
    if isinstance(op, OpOverload) and _maybe_get_opdef(op) is None:
        name = op.name().replace("::", "/")
        keys = [key.removeprefix(f"{name}/") for key in torch.library._impls if key.startswith(f"{name}/")]
        found += GLOBALS if any(not key.startswith(("Meta", "Autograd")) for key in keys) else ()
    return found


def capture(args: Iterable[Any], kwargs: dict[str, Any], name: str) -> RngState | None:
    """The state of the generator that an op of the module called ``name`` is about to draw from."""
    if is_fake():
        return None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Generator):
            return RngState.of(value, name)
    tensors = tensors_in(args)
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cpu":
        return RngState.of(torch.default_generator, name)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return RngState.of(torch.cuda.default_generators[index], name)
    raise NotRegenerable(f"it draws random numbers on a {device.type} device, whose generator is not supported")
