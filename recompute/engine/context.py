"""What a frame's result depends on besides its code: inputs, module state, autocast. Captured, compared, put back."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_is_leaf, tree_map

from recompute.engine.recipe import Kept, describe, hold, version_of
from recompute.engine.rng import is_source
from recompute.errors import MutationError


class _Input:
    """A tensor among a frame's arguments, and as it stands while the frame runs."""

    __slots__ = ("original", "requires_grad", "saved", "version")

    def __init__(self, tensor: Tensor, name: str):
        # A parameter stays the object that it is, which code may ask for; other tensors become leaves of a new graph.
        self.saved = Kept(tensor, name) if isinstance(tensor, nn.Parameter) else hold(tensor, name)
        self.requires_grad = tensor.requires_grad
        self.original: Tensor | None = tensor
        self.version = version_of(tensor)

    def restore(self) -> Tensor:
        tensor = self.saved.get()
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().requires_grad_(self.requires_grad)


class _Opaque:
    """An object with state that forward may change, such as a key/value cache, and a copy of its state before."""

    __slots__ = ("before", "fingerprint", "value")

    def __init__(self, value: Any):
        self.value = value
        self.before = _snapshot(value)
        self.fingerprint = _fingerprint(self.before)

    def changed(self) -> bool:
        """Whether a tensor in it has been modified in place: that state cannot be put back."""
        return _fingerprint(self.before) != self.fingerprint

    def restore(self) -> Any:
        return self.value if _fingerprint(self.value) == self.fingerprint else _snapshot(self.before)


class Inputs:
    """A frame's arguments, with every tensor in tuples, lists, dicts and dataclasses held for backward."""

    __slots__ = ("_arguments", "_name", "_opaque", "_tensors", "others")

    def __init__(self, arguments: tuple[tuple, dict], name: str):
        self._name = name
        self._tensors: list[_Input] = []
        self._opaque: list[_Opaque] = []
        self.others: list[Any] = []
        """The arguments that are neither."""

        def visit(value: Any) -> Any:
            if isinstance(value, Tensor):
                self._tensors.append(held := _Input(value, name))
                return held
            if _is_opaque(value):
                self._opaque.append(opaque := _Opaque(value))
                return opaque
            self.others.append(value)
            return value

        self._arguments = map_leaves(visit, arguments)

    def changed(self) -> str | None:
        """Names an argument that has been modified in place since, if there is one."""
        for held in self._tensors:
            if held.original is not None and version_of(held.original) != held.version:
                return f"an argument, a {describe(held.original)}"
        for opaque in self._opaque:
            if opaque.changed():
                return f"a tensor in an argument, a {type(opaque.value).__name__}"
        return None

    def settle(self) -> list[Tensor]:
        """At the end of the frame: forget the arguments' graph, and return the tensors that are held as they are."""
        alive = []
        for held in self._tensors:
            held.original = None
            if isinstance(held.saved, Kept):
                alive.append(held.saved.tensor)
        return alive

    def restore(self) -> tuple[tuple, dict]:
        """The same arguments, their tensors leaves of a new graph."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {self._name}: {what}, has been modified in place between forward and backward, so the region "
                "cannot be run again as it ran"
            )

        def visit(value: Any) -> Any:
            return value.restore() if isinstance(value, (_Input, _Opaque)) else value

        return map_leaves(visit, self._arguments)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf of its tuples, lists, dicts, dataclasses and registered pytrees replaced."""
    kind = type(value)
    if kind is Tensor:
        return function(value)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in value])
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()} if value else {}
    if kind is list:
        return [map_leaves(function, item) for item in value]
    if not tree_is_leaf(value):
        return tree_map(functools.partial(map_leaves, function), value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(mapped, field.name, map_leaves(function, getattr(value, field.name)))
        return mapped
    return function(value)


_IMMUTABLE = (Tensor, nn.Module, type, enum.Enum, torch.Generator, functools.partial, MethodType, ModuleType)


def _is_opaque(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, _IMMUTABLE)


def _fingerprint(value: Any, depth: int = 6) -> Any:
    """What a value refers to: two fingerprints differ if it was changed in between, or a tensor in it was."""
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if depth:
        if isinstance(value, dict):
            return tuple((key, _fingerprint(item, depth - 1)) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(_fingerprint(item, depth - 1) for item in value)
        if _is_opaque(value):
            return _fingerprint(vars(value), depth - 1)
    return value if isinstance(value, (int, float, str, bytes, type(None))) else id(value)


def _snapshot(value: Any, depth: int = 6) -> Any:
    """A copy of the objects, lists and dicts in ``value`` that refers to the same tensors."""
    if depth and (isinstance(value, (dict, list)) or _is_opaque(value)):
        copied = copy.copy(value)
        if isinstance(value, dict):
            copied.update((key, _snapshot(item, depth - 1)) for key, item in value.items())
        elif isinstance(value, list):
            copied[:] = [_snapshot(item, depth - 1) for item in value]
        else:
            vars(copied).update(_snapshot(vars(value), depth - 1))
        return copied
    return tuple(_snapshot(item, depth - 1) for item in value) if depth and type(value) is tuple else value


def reachable(function: Callable[..., Any]) -> list[Any]:
    """What ``function`` can use without being passed it: bound arguments, closure, defaults and named globals."""
    found: list[Any] = []
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            inside = [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            inside = [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            inside = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            inside += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            used = (value.__globals__.get(name) for name in _names(value.__code__))
            found += [value for value in used if not isinstance(value, FunctionType)]  # not into other modules' code
        else:
            continue
        found += inside
        pending += inside
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def random_sources(modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> list[Any]:
    """The generators and trackers among ``others``, in the modules' attributes and in what their forwards can reach."""
    values = list(others)
    for module in modules:
        values += [*vars(module).values(), *reachable(type(module).forward)]
    unique = {id(value): value for value in values if is_source(value)}
    return list(unique.values())


class ModuleState:
    """The parameters' and buffers' versions and the training flags of the modules that a frame runs.

    Buffers that forward itself changes, such as batch-norm statistics, are copied before it runs. Which those are is
    learned in the first frame with the same training flags, by value because kernels write some of them without a new
    version; ``learned`` keeps it from frame to frame.
    """

    __slots__ = ("_before", "_buffers", "_flags", "_learned", "_modules", "_tensors")

    def __init__(
        self,
        roots: Sequence[nn.Module],
        tensors: Iterable[Tensor],
        learned: dict[tuple[bool, ...], frozenset[int]],
    ):
        self._modules = pending = list(roots)
        seen = set(pending)
        parameters = list(tensors)
        buffers: list[Tensor] = []
        for module in pending:  # grows as it goes
            parameters.extend(module._parameters.values())  # type: ignore[arg-type]
            if module._buffers:
                buffers += [tensor for tensor in module._buffers.values() if tensor is not None]
            if module._modules:
                children = [child for child in module._modules.values() if child is not None and child not in seen]
                seen.update(children)
                pending.extend(children)
        self._flags = tuple([module.training for module in pending])
        self._tensors = [(tensor, version_of(tensor)) for tensor in parameters if tensor is not None]
        self._buffers = buffers
        self._before: dict[int, Tensor] = {}
        self._learned = learned
        if buffers:
            changing = learned.get(self._flags, range(len(buffers)))
            self._before = {index: buffers[index].detach().clone() for index in changing}
            steady = set(range(len(buffers))).difference(learned.get(self._flags, ()))
            self._tensors += [(buffers[index], version_of(buffers[index])) for index in sorted(steady)]

    def settle(self) -> None:
        """At the end of the frame: keep copies of those buffers only that it changed."""
        if self._buffers and self._flags not in self._learned:
            changed = {i: before for i, before in self._before.items() if not torch.equal(before, self._buffers[i])}
            self._learned[self._flags] = frozenset(changed)
            self._before = changed
            ours = {id(self._buffers[index]) for index in changed}
            self._tensors = [(tensor, version) for tensor, version in self._tensors if id(tensor) not in ours]

    def unlearn(self) -> None:
        """The frame changed something that others with these flags did not: learn again."""
        self._learned.pop(self._flags, None)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers, all alive anyway (invariant 7)."""
        return [tensor for tensor, _ in self._tensors] + self._buffers

    def changed(self) -> str | None:
        """Names a parameter or buffer that has been modified since, if there is one."""
        for tensor, version in self._tensors:
            if version_of(tensor) != version:
                return f"{self._name(tensor)}, a {describe(tensor)}"
        return None

    def _name(self, tensor: Tensor) -> str:
        for root in self._modules:
            for name, value in (*root.named_parameters(), *root.named_buffers()):
                if value is tensor:
                    return f"{name} of {type(root).__name__}"
        return "a tensor that the function refers to"

    @contextmanager
    def replayed(self, name: str) -> Iterator[None]:
        """Training flags and changing buffers as they were before the frame; as they are now again afterwards."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {name}: {what}, has been modified in place between forward and backward (an optimizer step?), so "
                "the region cannot be run again as it ran. Call backward first, or leave this module out of the policy."
            )
        flags = [module.training for module in self._modules]
        buffers = [self._buffers[index] for index in self._before]
        with ExitStack() as stack:
            if buffers:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tuple(buffers)))
                stack.callback(_assign, buffers, [buffer.detach().clone() for buffer in buffers])
                _assign(buffers, list(self._before.values()))
            stack.callback(_set_training, self._modules, flags)
            _set_training(self._modules, self._flags)
            yield


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        if module.training is not flag:
            module.training = flag


class Autocast:
    """The autocast state of every device type that has one switched on; of none, mostly."""

    __slots__ = ("_cache", "_dtypes")

    def __init__(self) -> None:
        self._dtypes: dict[str, torch.dtype] = {}
        if torch._C._is_any_autocast_enabled():
            self._dtypes = {d: torch.get_autocast_dtype(d) for d in _device_types() if torch.is_autocast_enabled(d)}
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def replayed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for device in _device_types():
                if device in self._dtypes or torch.is_autocast_enabled(device):
                    dtype = self._dtypes.get(device)
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, enabled=dtype is not None, cache_enabled=self._cache)
                    )
            yield


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
