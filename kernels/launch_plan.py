"""Repeats an op on arguments of layouts that it had before: its launches alone, not the code that led to them.

An op's implementation looks at layouts and dtypes, allocates, and decides how to launch. On arguments of the same
layouts all of that comes out the same. So we note once what the implementation allocates and launches, and make a
function of that: a plan. Only addresses may differ from call to call. Where one is not aligned as it was, the
implementation runs.

In captured code the layouts of a call never change: each call there has one plan (``PlannedCall``). Everywhere else an
op looks its plan up by the layouts of its arguments (``PlansByLayout``).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.thread_state import swapped

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
CALLS_BEFORE_PLAN = 16
"""Calls with the same layouts before an op makes a plan for them. A plan takes as long as so many calls save."""

MAX_LAYOUTS = 128
"""The layouts of arguments that an op remembers."""

address_of = torch._C.TensorBase.data_ptr
"""Not ``Tensor.data_ptr``, which tapes watch: nobody writes to what is only compared here."""


class Launch(NamedTuple):
    """A launch that ``launch.run`` has made."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    settings: dict[str, Any]
    compiled: Any
    """Triton's compiled kernel; None where Triton looks it up for each launch."""
    constants: tuple[Any, ...]
    """The constants among the settings, in the order of the kernel's parameters."""
    hooks: tuple[Any, ...] = ()
    """Triton's hooks for launches. If one of them has ``calls``, Triton itself has to launch."""


class _Noting(threading.local):
    launches: list[Launch] | None = None


noting = _Noting()
"""Where ``launch.run`` adds the launches of this thread, while they are noted."""


def noted_launches() -> contextlib.AbstractContextManager[list[Launch]]:
    """Inside, this thread's launches are added to the list that this gives."""
    return swapped(noting, "launches", [])


class PlannedCall:
    """Calls ``implementation``, with arguments that have the same layouts, and the same other values, each time.

    The first ``unplanned`` calls make no plan.
    """

    __slots__ = ("_attempts", "_implementation", "planned")

    def __init__(self, implementation: Callable[..., Any], unplanned: int = 0):
        self._implementation = implementation
        self.planned: Callable[..., Any] | None = None
        """The function that makes the launches of a call; None while they are not known."""
        self._attempts = -unplanned

    def __call__(self, *arguments: Any) -> Any:
        if self.planned is not None:
            return self.planned(*arguments)
        there_is_none = self._attempts >= MAX_ATTEMPTS
        if there_is_none or torch._C._len_torch_dispatch_stack() or not _are_apart(arguments):
            return self._implementation(*arguments)
        self._attempts += 1
        if self._attempts <= 0:
            return self._implementation(*arguments)
        result, self.planned = _noted_call(self._implementation, arguments)
        return result


def layouts_of(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """For each tensor everything but its address and values. All else, and tensor subclasses, stand for themselves."""
    return tuple(
        [(each.dtype, each.device, each.shape, each.stride()) if type(each) in _PLAIN else each for each in arguments]
    )


class PlansByLayout:
    """Runs an op: on CUDA tensors of layouts that come again and again by a plan, else by the implementation."""

    def __init__(self, implementation: Callable[..., Any]):
        self._implementation = implementation
        self.by_layouts: dict[Any, Callable[..., Any]] = {}
        """The function to call: a planned call, or the implementation where there can be none."""

    def run(self, *arguments: Any) -> Any:
        """The op's results."""
        arguments = tuple([tuple(each) if type(each) is list else each for each in arguments])  # a list has no hash
        call = self.by_layouts.get(layouts_of(arguments))
        return self.begin(arguments, self._implementation) if call is None else call(*arguments)

    def begin(self, arguments: tuple[Any, ...], otherwise: Callable[..., Any]) -> Any:
        """The op's results for arguments whose layouts are not in ``by_layouts``.

        otherwise: runs the op on tensors of subclasses, and on those without values.
        """
        if any(isinstance(each, Tensor) and (type(each) not in _PLAIN or each.is_meta) for each in arguments):
            return otherwise(*arguments)
        if len(self.by_layouts) >= MAX_LAYOUTS:
            self.by_layouts.clear()
        call = self._implementation
        if _can_be_planned(arguments):
            call = PlannedCall(call, CALLS_BEFORE_PLAN - 1)
        self.by_layouts[layouts_of(arguments)] = call
        return call(*arguments)


_PLAIN = (Tensor, Parameter)


def _can_be_planned(arguments: tuple[Any, ...]) -> bool:
    """Whether these are CUDA tensors. Elsewhere what an op does takes longer than to decide it."""
    return any(isinstance(each, Tensor) and each.is_cuda for each in arguments)


def _are_apart(arguments: tuple[Any, ...]) -> bool:
    """Whether no tensor is given twice. Otherwise a plan could not tell which of the two a kernel takes."""
    tensors = [id(each) for each in arguments if isinstance(each, Tensor)]
    return len(set(tensors)) == len(tensors)


def _noted_call(
    implementation: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, Callable[..., Any] | None]:
    """The implementation's result, and a plan for the calls to come; None if there can be none."""
    with noted_launches() as launches, _Allocations() as made:
        result = implementation(*arguments)
    if not launches or made.does_more:
        return result, None
    return result, _planned(implementation, arguments, made.tensors, launches, result)


class _Allocations(TorchDispatchMode):
    """Notes what is allocated, up to the first op that does something else than to allocate or to view."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self.does_more = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if self.does_more:
            return result
        if op in _ALLOCATE:
            self.tensors.append(result)
        elif not op.is_view and (op._schema.is_mutable or isinstance(result, (Tensor, tuple, list))):
            self.does_more = True
            self.tensors.clear()  # from here on, hold no memory for a plan that there will not be
            if noting.launches is not None:
                noting.launches.clear()
                noting.launches = None
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
    if not given or not all(address_of(tensor) % 16 == 0 for tensor in given.values()):
        return None
    results = result if isinstance(result, tuple) else (result,)
    writer = _Writer(implementation, given)
    for index, tensor in enumerate(made):
        writer.allocate(f"t{index}", next((each for each in results if _is_all_of(each, tensor)), tensor))
    if not all([writer.launch(each) for each in launches]):
        return None
    names = [writer.whole(each) for each in results]
    if None in names:
        return None
    returned = f"({''.join(f'{each}, ' for each in names)})" if isinstance(result, tuple) else names[0]
    return writer.function(parameters, str(returned), next(iter(given.values())).device)


class _Writer:
    """Writes the function of a plan."""

    def __init__(self, implementation: Callable[..., Any], given: dict[str, Tensor]):
        self._names: dict[str, Any] = {
            "implementation": implementation,
            "empty_like": torch.empty_like,
            "address_of": address_of,
        }
        self._lines: list[str] = []
        self._given = given
        self._known = dict(given)
        """The tensors that have a variable, by its name."""
        self._hooks: list[str] = []
        self._addresses = set(given)
        """The tensors whose addresses have variables, too."""
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
        values = [self._value(value, as_address=each.compiled is not None) for value in each.arguments]
        if None in values:
            return False
        self._hooks = self._hooks or [self._named(hook) for hook in each.hooks]
        listed = ", ".join(map(str, values))
        if each.compiled is None:
            settings = ", ".join(f"{key}={self._named(value)}" for key, value in each.settings.items())
            self._lines.append(f"{self._named(each.kernel)}[({each.programs},)]({listed}, {settings})")
        else:
            runs, function = each.compiled.run, self._named(each.compiled.function)
            # Triton's launcher allocates memory for kernels that ask for some. The others need not go through it.
            is_bare = not (getattr(runs, "global_scratch_size", 1) or getattr(runs, "profile_scratch_size", 1))
            metadata = self._named(each.compiled.packed_metadata)
            constants = "".join(f", {self._named(value)}" for value in each.constants)
            bare = f"{runs.launch_cooperative_grid}, {runs.launch_pdl}, None, None, " if is_bare else ""
            self._lines.append(
                f"{self._named(runs.launch if is_bare else runs)}({each.programs}, 1, 1, stream, {function}, {bare}"
                f"{metadata}, None, None, None, {listed}{constants})"
            )
        return True

    def whole(self, value: Any) -> str | None:
        """The variable of a value; None if it has none."""
        if value is None:
            return "None"
        if not isinstance(value, Tensor):
            return None
        own = [name for name, tensor in self._known.items() if tensor is value]
        own = own or [name for name, tensor in self._known.items() if _is_same(tensor, value)]
        return own[0] if len(own) == 1 else None

    def _value(self, value: Any, *, as_address: bool) -> str | None:
        """The variable of an argument; None if it is a tensor that is not known.

        as_address: give the address of a tensor, which Triton would ask the tensor for, and the driver for its device.
        """
        if not isinstance(value, Tensor):
            return self._named(value)
        alike = {name: tensor for name, tensor in self._known.items() if tensor.dtype is value.dtype}
        own = [name for name, tensor in alike.items() if tensor is value]
        own = own or [name for name, tensor in alike.items() if address_of(tensor) == address_of(value)]
        if own:  # a kernel gets the address alone, and later another tensor need not begin there
            return None if len(own) > 1 and alike[own[0]].numel() else self._address(own[0]) if as_address else own[0]
        around = [name for name, tensor in alike.items() if _share_memory(tensor, value)]
        if len(around) != 1:  # in later calls several tensors may not lie in one memory
            return None
        name, shape, stride = around[0], tuple(value.shape), value.stride()
        distance = value.storage_offset() - alike[name].storage_offset()
        if as_address:
            return f"{self._address(name)} + {distance * value.dtype.itemsize}"
        return f"{name}.as_strided({shape}, {stride}, {name}.storage_offset() + {distance})"

    def _address(self, name: str) -> str:
        """The variable of a tensor's address."""
        if name not in self._addresses:
            self._addresses.add(name)
            self._lines.append(f"p_{name} = address_of({name})")
        return f"p_{name}"

    def _named(self, value: Any) -> str:
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        name = f"c{next(self._numbers)}"
        self._names[name] = value
        return name

    def function(self, parameters: Sequence[str], returned: str, device: torch.device) -> Callable[..., Any]:
        listed = ", ".join(parameters)
        conditions = f"({' | '.join(f'(p_{name} := address_of({name}))' for name in self._given)}) & 15"
        head = []
        if device.type == "cuda":
            self._names |= {"device_now": torch._C._cuda_getDevice, "stream_of": torch._C._cuda_getCurrentRawStream}
            conditions += "".join(
                [f" or device_now() != {device.index}", *(f" or {hook}.calls" for hook in self._hooks)]
            )
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
    return one is other or (_begin_together(one, other) and one.shape == other.shape and one.stride() == other.stride())


def _is_all_of(view: Any, tensor: Tensor) -> bool:
    """Whether ``view`` is ``tensor``, or has its dimensions in another order."""
    if not isinstance(view, Tensor) or not _begin_together(view, tensor):
        return False
    one, other = (sorted(zip(each.shape, each.stride(), strict=True)) for each in (view, tensor))
    return one == other


def _begin_together(one: Tensor, other: Tensor) -> bool:
    return address_of(one) == address_of(other) and _share_memory(one, other) and one.dtype is other.dtype


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether ``torch.empty_like(other)`` has the layout of ``one``."""
    like = torch.empty_like(other, device="meta")
    return one.dtype is other.dtype and one.shape == like.shape and one.stride() == like.stride()
