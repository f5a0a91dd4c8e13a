"""What a frame's result depends on besides its code: inputs, module state, autocast. Captured, compared, put back."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_is_leaf, tree_map

from recompute.engine.exposed import is_shared
from recompute.engine.recipe import count_different
from recompute.engine.saved import Foreign, Kept, describe, hold, storage_key, version_of
from recompute.engine.sharded import has_layout
from recompute.errors import MutationError


class _Input:
    """A tensor among a frame's arguments, and as it stands while the frame runs."""

    __slots__ = ("before", "original", "requires_grad", "saved", "stride", "version")

    def __init__(self, tensor: Tensor, name: str):
        # A parameter stays the object that it is, which code may ask for; other tensors become leaves of a new graph.
        self.saved = Kept(tensor, name) if isinstance(tensor, nn.Parameter) else hold(tensor, name)
        self.stride = tensor.stride() if isinstance(self.saved, Foreign) and tensor.layout is torch.strided else None
        self.requires_grad = tensor.requires_grad
        self.original: Tensor | None = tensor
        self.version = version_of(tensor)
        self.before: Tensor | None = None
        """A copy of what an array has the memory of: whoever writes to that changes no version."""
        if is_shared(tensor):
            self.expose()

    def expose(self) -> None:
        """Others may write to it unseen."""
        if self.before is None and type(self.saved) is Kept:
            self.before = self.saved.tensor.detach().clone()

    def changed(self) -> bool:
        """Whether it has been modified in place since."""
        if self.original is not None and version_of(self.original) != self.version:
            return True
        return self.before is not None and count_different(self.saved.tensor, self.before) > 0  # type: ignore[attr-defined]

    def restore(self) -> Tensor:
        tensor = self.saved.get()
        if isinstance(tensor, nn.Parameter):
            return tensor
        if self.stride is not None and tensor.stride() != self.stride and 0 not in self.stride:
            # Hooks like save_on_cpu give back another layout, in which the same code may add in another order.
            tensor = torch.empty_strided(tensor.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return tensor.detach().requires_grad_(self.requires_grad)


class _Opaque:
    """An object with state that forward may change, such as a key/value cache, and a copy of its state before."""

    __slots__ = ("before", "fingerprint", "used", "value")

    def __init__(self, value: Any):
        # Weakly: a cache is given tensors of the very graph that this belongs to (invariant 8).
        self.value = weakref.ref(value) if hasattr(value, "__weakref__") else lambda: None
        self.before = snapshot(value)
        self.fingerprint = fingerprint(self.before)
        self.used = False

    def settle(self) -> None:
        """At the end of the frame: note whether it changed the object."""
        self.used = fingerprint(self.value()) != self.fingerprint

    def changed(self) -> bool:
        """Whether a tensor in it has been modified in place: that state cannot be put back."""
        return fingerprint(self.before) != self.fingerprint

    def restore(self) -> Any:
        """The object as it was: itself, if the frame leaves it alone and nobody else has changed it."""
        value = self.value()
        as_it_was = not self.used and fingerprint(value) == self.fingerprint
        return value if as_it_was else snapshot(self.before)


class Inputs:
    """A frame's arguments, with every tensor in tuples, lists, dicts and dataclasses held for backward."""

    __slots__ = ("_arguments", "_name", "_opaque", "_tensors", "others")

    def __init__(self, arguments: tuple[tuple, dict], name: str):
        self._name = name
        self._tensors: dict[int, _Input] = {}  # by id: one tensor passed twice is one tensor again
        self._opaque: dict[int, _Opaque] = {}
        self.others: list[Any] = []
        """The arguments that are neither."""
        self._arguments = map_leaves(self._hold, arguments)

    def _hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if (held := self._tensors.get(id(value))) is None:
                held = self._tensors[id(value)] = _Input(value, self._name)
            return held
        if _is_opaque(value):
            return self._opaque.setdefault(id(value), _Opaque(value))
        self.others.append(value)
        return value

    def hand_out(self, tensor: Tensor) -> None:
        """The memory of a tensor is about to become an array."""
        key = storage_key(tensor)
        for held in self._tensors.values():
            if key is not None and held.original is not None and storage_key(held.original) == key:
                held.expose()

    def changed(self) -> str | None:
        """Names an argument that has been modified in place since, if there is one."""
        for held in self._tensors.values():
            if held.changed():
                return f"an argument, a {describe(held.before if held.original is None else held.original)}"  # type: ignore[arg-type]
        for opaque in self._opaque.values():
            if opaque.changed():
                return f"a tensor in an argument, a {type(opaque.before).__name__}"
        return None

    def settle(self) -> tuple[list[Tensor], list[Tensor]]:
        """At the end of the frame: forget the arguments' graph.

        Returns the tensors that were given, and those of them that are held as they are.
        """
        for opaque in self._opaque.values():
            opaque.settle()
        given, kept = [], []
        for held in self._tensors.values():
            if held.original is not None:
                given.append(held.original)
                held.original = None
            if type(held.saved) is Kept:
                kept.append(held.saved.tensor)
        return given, kept

    @contextmanager
    def restored(self) -> Iterator[tuple[tuple, dict]]:
        """The same arguments, their tensors leaves of a new graph."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {self._name}: {what}, has been modified in place between forward and backward, so the region "
                "cannot be run again as it ran"
            )

        restored: dict[int, Any] = {id(held): held.restore() for held in self._tensors.values()}
        restored |= {id(opaque): opaque.restore() for opaque in self._opaque.values()}
        yield map_leaves(lambda value: restored.get(id(value), value), self._arguments)


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
    return not callable(value) and not isinstance(value, _IMMUTABLE) and _attributes(value) is not None


def _attributes(value: Any) -> dict[str, Any] | None:
    """What an object of a class written in Python refers to by name; None for any other."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    if not slots and not hasattr(value, "__dict__"):
        return None
    found = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__weakref__"}
    return {**found, **getattr(value, "__dict__", {})}


def fingerprint(value: Any) -> Any:
    """What a value refers to: two fingerprints differ if it was changed in between, or a tensor in it was."""
    return _fingerprint(value, _DEPTH, {})


def _fingerprint(value: Any, depth: int, seen: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if not depth or not (isinstance(value, (dict, list, tuple)) or _is_opaque(value)):
        return value if isinstance(value, (int, float, str, bytes, type(None))) else id(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    parts: list[Any] = [type(value)]
    if isinstance(value, dict):
        parts += [(key, _fingerprint(item, depth - 1, seen)) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        parts += [_fingerprint(item, depth - 1, seen) for item in value]
    if _is_opaque(value):
        parts += [(key, _fingerprint(item, depth - 1, seen)) for key, item in (_attributes(value) or {}).items()]
    return parts


def snapshot(value: Any) -> Any:
    """A copy of the objects, lists and dicts in ``value``: they refer alike to each other, and to the same tensors."""
    return _snapshot(value, _DEPTH, {})


def _snapshot(
    value: Any, depth: int, copies: dict[int, Any]
) -> Any:  # no closure, which would be a cycle (invariant 8)
    if not depth or not (isinstance(value, (dict, list, tuple)) or _is_opaque(value)):
        return value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple([_snapshot(item, depth - 1, copies) for item in value])
    try:
        copied = copies[id(value)] = copy.copy(value)
    except TypeError:  # a stream, a lock: not state that forward changes
        return value
    if copied is value:  # a logger, a singleton
        return value
    if isinstance(value, dict):
        dict.update(copied, {key: _snapshot(item, depth - 1, copies) for key, item in value.items()})
    elif isinstance(value, list):
        list.__setitem__(copied, slice(None), [_snapshot(item, depth - 1, copies) for item in value])
    if _is_opaque(value):
        for name, item in (_attributes(value) or {}).items():
            object.__setattr__(copied, name, _snapshot(item, depth - 1, copies))
    return copied


_DEPTH = 6  # a cache, its layers, a layer, its attributes: and not all that hangs on a configuration


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
            inside = [value.__self__, value.__func__, *getattr(value.__self__, "__dict__", {}).values()]
        elif isinstance(value, FunctionType):
            inside = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            inside += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            used = [value.__globals__.get(name) for name in _names(value.__code__)]
            found += used
            for helper in used:  # as Megatron's random tracker is got from a function; what else those use is their own
                if isinstance(helper, FunctionType):
                    names = _names(helper.__code__)
                    globals_ = (helper.__globals__.get(name) for name in names)
                    found += [value for value in globals_ if not isinstance(value, (ModuleType, Tensor, nn.Module))]
        elif value is function and hasattr(value, "__dict__"):  # an object that can be called
            inside = [type(value).__call__, *vars(value).values()]
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


def surroundings(modules: Iterable[nn.Module]) -> list[Any]:
    """What the forwards of ``modules`` reach besides arguments, parameters and buffers, by attribute or name."""
    found: list[Any] = []
    for module in modules:
        found += reachable(type(module).forward)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                found += [value, *(value if isinstance(value, (list, tuple)) else ())]
                found += value.values() if isinstance(value, dict) else ()
    return found


RUNNER = "_recompute_runner"
"""In the ``__dict__`` of a module under a policy: how it runs its forward. A DataParallel replica gets a copy."""


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, and not the one that a policy puts in its place."""
    return getattr(type(module), "_recompute_base", type(module))


class ModuleState:
    """What the modules that a frame runs are made of: their classes, attributes, parameters and buffers.

    Buffers that forward itself changes in place, such as batch-norm statistics, are copied before it runs. Which those
    are is learned in the first frame with the same training flags, by value too because kernels write some of them
    without a new version; ``learned`` keeps it from frame to frame.
    """

    __slots__ = ("_before", "_buffers", "_flags", "_learned", "_modules", "_versions")

    def __init__(
        self,
        roots: Iterable[nn.Module],
        tensors: Iterable[Tensor],
        learned: dict[tuple[bool, ...], frozenset[int]],
    ):
        modules = list(roots)
        seen = set(modules)
        parameters: list[Tensor | None] = []
        buffers: list[Tensor] = []
        for module in modules:  # grows as it goes
            parameters.extend(module._parameters.values())
            if module._buffers:
                buffers += [buffer for buffer in module._buffers.values() if buffer is not None]
            for child in module._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    modules.append(child)
        self._modules = [(module, type(module), _attributes_of(module.__dict__)) for module in modules]
        self._flags = tuple([module.training for module in modules])
        self._buffers = buffers
        self._learned = learned
        self._before: dict[int, Tensor] = {}
        steady: list[Tensor] = buffers
        if buffers:
            changing = learned.get(self._flags)
            indices = range(len(buffers)) if changing is None else changing
            self._before = {index: buffers[index].detach().clone() for index in indices}
            steady = [buffer for index, buffer in enumerate(buffers) if changing is None or index not in changing]
        parameters += steady
        parameters += tensors
        for _, _, attributes in self._modules:
            parameters += [value for value in attributes.values() if type(value) is Tensor]
        self._versions = [(t, version_of(t), t.requires_grad) for t in parameters if t is not None]

    def settle(self) -> None:
        """At the end of the frame: keep copies of those buffers only that it changed."""
        if self._buffers and self._flags not in self._learned:
            versions = {id(tensor): version for tensor, version, _ in self._versions}
            self._before = {
                index: before
                for index, before in self._before.items()
                if version_of(buffer := self._buffers[index]) != versions[id(buffer)] or _differ(before, buffer)
            }
            self._learned[self._flags] = frozenset(self._before)
            ours = {id(self._buffers[index]) for index in self._before}
            self._versions = [version for version in self._versions if id(version[0]) not in ours]

    def unlearn(self) -> None:
        """The frame changed something that others with these flags did not: learn again."""
        self._learned.pop(self._flags, None)

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers, all alive anyway (invariant 7)."""
        return [tensor for tensor, _, _ in self._versions] + self._buffers

    def changed(self) -> str | None:
        """Names a parameter or buffer that has been modified since, if there is one."""
        for tensor, version, _ in self._versions:
            if version_of(tensor) != version:
                return f"{self._name(tensor)}, a {describe(tensor)}"
        return None

    def _name(self, tensor: Tensor) -> str:
        for module, _, _ in self._modules:
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                if value is tensor:
                    return name
        return "what it refers to"

    @contextmanager
    def replayed(self, name: str) -> Iterator[None]:
        """Modules as they were when the frame began; as they are now again afterwards."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {name}: {what}, has been modified in place between forward and backward (an optimizer step?), so "
                "the region cannot be run again as it ran. Call backward first, or leave this module out of the policy."
            )
        buffers = [self._buffers[index] for index in self._before]
        with ExitStack() as stack:
            if buffers:
                stack.enter_context(torch.autograd._unsafe_preserve_version_counter(tuple(buffers)))
                stack.callback(_assign, buffers, [buffer.detach().clone() for buffer in buffers])
                _assign(buffers, list(self._before.values()))
            for tensor, _, requires_grad in self._versions:
                if tensor.requires_grad is not requires_grad and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(requires_grad)
            for module, kind, attributes in self._modules:
                stack.callback(_become, module, type(module), module.__dict__.copy())
                attributes = _attributes_of(attributes)
                if any(map(_is_shared_out, (*module._parameters.values(), *attributes["_parameters"].values()))):
                    attributes["_parameters"] = module._parameters  # gathered or not, as whoever does that has them now
                _become(module, kind, attributes)
            yield


def _attributes_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's attributes, to be put in force again: adding to a list or a dict among them changes the copy too."""
    copied = attributes.copy()
    if type(attributes["_parameters"]) is dict:  # else it does something, as DeepSpeed's, which gathers weights
        copied["_parameters"] = attributes["_parameters"].copy()
    copied["_buffers"] = attributes["_buffers"].copy()
    for name, value in attributes.items():
        kind = type(value)
        if kind is list:
            copied[name] = [_apart(item) if type(item) is Tensor else item for item in value]
        elif kind is Tensor:
            copied[name] = _apart(value)
        elif kind is dict and name[0] != "_":
            copied[name] = value.copy()
    return copied


def _is_shared_out(parameter: Tensor | None) -> bool:
    return parameter is not None and has_layout(parameter)


def _apart(tensor: Tensor) -> Tensor:
    """Without its graph: that of an auxiliary loss, say, would be held from step to step."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _become(module: nn.Module, kind: type, attributes: dict[str, Any]) -> None:
    if type(module) is not kind:
        module.__class__ = kind
    current = module.__dict__  # only what differs is changed: other threads may be using the module
    for name in current.keys() - attributes.keys():
        del current[name]
    current.update({name: value for name, value in attributes.items() if current.get(name, _become) is not value})


def _differ(before: Tensor, now: Tensor) -> bool:
    if before.is_meta or isinstance(before, FakeTensor):
        return False
    if before.layout is not torch.strided:
        before, now = before.to_dense(), now.to_dense()
    return not torch.equal(before, now)


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


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
