"""Calls of an op on arguments that always have the same layouts: its launches alone, without what led to them.

An op's implementation looks at layouts and dtypes, allocates, and decides how to launch. In captured code the layouts
of a call never change, and so nothing else does. The first call notes what the implementation allocates and launches,
and makes a function of that. Only addresses may differ from call to call: where one is not aligned as it was, the
implementation runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.kernels import launch
from recompute.kernels.launch import Launch

_ATEN = torch.ops.aten
_ALLOCATE = {
    _ATEN.new_empty.default,
    _ATEN.empty_like.default,
    _ATEN.empty.memory_format,
    _ATEN.empty_strided.default,
    _ATEN.new_empty_strided.default,
}
MAX_ATTEMPTS = 3
"""Calls that may be noted in vain before a call stays with the implementation."""


class PlannedCall:
    """Calls ``implementation``, with arguments that have the same layouts, and the same other values, each time."""

    __slots__ = ("_attempts", "_implementation", "_planned")

    def __init__(self, implementation: Callable[..., Any]):
        self._implementation = implementation
        self._planned: Callable[..., Any] | None = None
        self._attempts = 0

    @property
    def is_planned(self) -> bool:
        """Whether the launches of a call are known."""
        return self._planned is not None

    def __call__(self, *arguments: Any) -> Any:
        if self._planned is not None:
            return self._planned(*arguments)
        if self._attempts >= MAX_ATTEMPTS or torch._C._len_torch_dispatch_stack():
            return self._implementation(*arguments)
        self._attempts += 1
        with launch.noting() as launches, _Allocations() as made:
            result = self._implementation(*arguments)
        if launches and not made.others:
            self._planned = _planned(self._implementation, arguments, made.tensors, launches, result)
        return result


class _Allocations(TorchDispatchMode):
    """Notes what is allocated, and the ops that do something else than to allocate or to view."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if op in _ALLOCATE:
            self.tensors.append(result)
        elif not op.is_view and (op._schema.is_mutable or isinstance(result, (Tensor, tuple, list))):
            self.others.append(op)
        return result


def _planned(
    implementation: Callable[..., Any],
    arguments: Sequence[Any],
    made: Sequence[Tensor],
    launches: Sequence[Launch],
    result: Any,
) -> Callable[..., Any] | None:
    """The function that makes these launches; None if they are not all that the implementation does."""
    parameters = [f"a{index}" for index in range(len(arguments))]
    given = {name: value for name, value in zip(parameters, arguments, strict=True) if isinstance(value, Tensor)}
    if not given or not all(map(launch.is_aligned, given.values())):
        return None
    writer = _Writer(implementation, given)
    for index, tensor in enumerate(made):
        writer.allocate(f"t{index}", tensor)
    if not all([writer.launch(each) for each in launches]):
        return None
    results = [writer.whole(each) for each in (result if isinstance(result, tuple) else (result,))]
    if None in results:
        return None
    returned = f"({''.join(f'{each}, ' for each in results)})" if isinstance(result, tuple) else results[0]
    return writer.function(parameters, str(returned), next(iter(given.values())).device)


class _Writer:
    """Writes the function."""

    def __init__(self, implementation: Callable[..., Any], given: dict[str, Tensor]):
        self._names: dict[str, Any] = {"implementation": implementation, "empty_like": torch.empty_like}
        self._names["address_of"] = torch._C.TensorBase.data_ptr  # nobody needs to know of it, as tapes do
        self._lines: list[str] = []
        self._given = given
        self._known = dict(given)
        """The tensors that have a variable, by its name."""
        self._numbers = itertools.count()

    def allocate(self, name: str, tensor: Tensor) -> None:
        alike = next((each for each, other in self._given.items() if _are_alike(tensor, other)), None)
        if alike is not None:
            self._lines.append(f"{name} = empty_like({alike})")
        else:
            like, dtype = next(iter(self._given)), self._named(tensor.dtype)
            shape, stride = tuple(tensor.shape), tensor.stride()
            self._lines.append(f"{name} = {like}.new_empty_strided({shape}, {stride}, dtype={dtype})")
        self._known[name] = tensor

    def launch(self, each: Launch) -> bool:
        """Write a launch; returns whether all tensors in it are known."""
        values = [self._value(value) for value in each.arguments]
        if None in values:
            return False
        listed = ", ".join(map(str, values))
        if each.compiled is None:
            settings = ", ".join(f"{key}={self._named(value)}" for key, value in each.settings.items())
            self._lines.append(f"{self._named(each.kernel)}[({each.programs},)]({listed}, {settings})")
        else:
            run, function = self._named(each.compiled.run), self._named(each.compiled.function)
            metadata = self._named(each.compiled.packed_metadata)
            constants = "".join(f", {self._named(value)}" for value in each.constants)
            self._lines.append(
                f"{run}({each.programs}, 1, 1, stream, {function}, {metadata}, None, None, None, {listed}{constants})"
            )
        return True

    def whole(self, value: Any) -> str | None:
        """The variable of a value; None if it has none."""
        if value is None:
            return "None"
        if not isinstance(value, Tensor):
            return None
        return next((name for name, tensor in self._known.items() if _is_same(tensor, value)), None)

    def _value(self, value: Any) -> str | None:
        if not isinstance(value, Tensor):
            return self._named(value)
        if (name := self.whole(value)) is not None:
            return name
        for name, tensor in self._known.items():
            if tensor.untyped_storage()._cdata == value.untyped_storage()._cdata and tensor.dtype is value.dtype:
                shape, stride = tuple(value.shape), value.stride()
                distance = value.storage_offset() - tensor.storage_offset()
                return f"{name}.as_strided({shape}, {stride}, {name}.storage_offset() + {distance})"
        return None

    def _named(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"c{next(self._numbers)}"
        self._names[name] = value
        return name

    def function(self, parameters: Sequence[str], returned: str, device: torch.device) -> Callable[..., Any]:
        listed = ", ".join(parameters)
        conditions = f"({' | '.join(f'address_of({name})' for name in self._given)}) & 15"
        head = []
        if device.type == "cuda":
            runtime = launch.triton.knobs.runtime
            self._names |= {
                "device_now": torch._C._cuda_getDevice,
                "stream_of": torch._C._cuda_getCurrentRawStream,
                "entry": runtime.launch_enter_hook,
                "exit": runtime.launch_exit_hook,
            }
            conditions += f" or device_now() != {device.index} or entry.calls or exit.calls"
            head.append(f"stream = stream_of({device.index})")
        lines = [
            f"def planned({listed}):",
            f"if {conditions}: return implementation({listed})",
            *head,
            *self._lines,
            f"return {returned}",
        ]
        exec(compile("\n    ".join(lines), "<a planned launch>", "exec"), self._names)
        return self._names["planned"]


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether these are one tensor, or two objects for it."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether ``torch.empty_like(other)`` has the layout of ``one``."""
    like = torch.empty_like(other, device="meta")
    return one.dtype is other.dtype and one.shape == like.shape and one.stride() == like.stride()
