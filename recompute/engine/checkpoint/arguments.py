"""A frame's arguments: taken apart, held for backward, compared, and put together again as they were."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import pickle
import weakref
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from recompute.engine.bit_comparison import count_different
from recompute.engine.rng import GENERATORS
from recompute.engine.saved_tensors import (
    Hooks,
    KeptTensor,
    PackedByOuterHook,
    describe,
    laid_out,
    pack_through,
    storage_key,
    top_hooks,
    version_of,
)
from recompute.engine.tape.exposed_memory import is_shared
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import MutationError


class _HeldTensor:
    """A tensor among a frame's arguments: what holds it for backward, and how it was when the frame began."""

    __slots__ = ("attributes", "before", "inner", "original", "requires_grad", "saved", "stride", "version")

    def __init__(self, tensor: Tensor, name: str, hooks: Hooks | None):
        """hooks: the saved-tensor hooks in force, which hold it (invariant 9)."""
        # A parameter is held as the object itself, which code may ask for. Other tensors become leaves of a new graph.
        is_plain = type(tensor) is Tensor
        is_parameter = not is_plain and isinstance(tensor, nn.Parameter)
        self.saved = KeptTensor(tensor, name) if is_parameter else pack_through(hooks, tensor.detach(), name)
        self.attributes = tensor.__dict__.copy() if tensor.__dict__ else None
        is_foreign = type(self.saved) is PackedByOuterHook
        self.stride = tensor.stride() if is_foreign and tensor.layout is torch.strided else None
        self.requires_grad = tensor.requires_grad
        self.original: Tensor | None = tensor
        self.version = version_of(tensor)
        self.inner = () if is_plain else [(inner, version_of(inner)) for inner in inner_tensors(tensor)]
        self.before: Tensor | None = None
        """A copy, if an array has the same memory: writing to the array changes no version."""
        if is_shared(tensor):
            self.expose()

    def expose(self) -> None:
        """Others may write to it unseen from now on: take a copy to compare with."""
        if self.before is None and type(self.saved) is KeptTensor:
            self.before = self.saved.tensor.detach().clone()

    def changed(self) -> bool:
        """Whether it has been modified in place since."""
        if self.original is not None and version_of(self.original) != self.version:
            return True
        if any(version_of(inner) != version for inner, version in self.inner):
            return True
        return self.before is not None and count_different(self.saved.tensor, self.before) > 0  # type: ignore[attr-defined]

    def restore(self) -> Tensor:
        tensor = self.saved.get()
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            return tensor
        if self.stride is not None:
            tensor = laid_out(tensor, self.stride)
        tensor = tensor.detach()
        if self.requires_grad:
            tensor.requires_grad_()
        if self.attributes:  # it is of a subclass, whose ``detach`` may not copy them
            vars(tensor).update({**self.attributes, **vars(tensor)})
        return tensor


class _HeldObject:
    """An object with state that forward may change, such as a key/value cache, and a copy of its state before."""

    __slots__ = ("before", "fingerprint", "value", "was_changed")

    def __init__(self, value: Any, generators: list[Any]):
        """generators: the random generators in ``value`` are added to it."""
        # Weakly, because forward puts tensors into a cache whose graph this is a part of (invariant 8).
        self.value = weakref.ref(value) if hasattr(value, "__weakref__") else lambda: None
        self.before = _snapshot(value, _DEPTH, {}, generators)
        self.fingerprint = fingerprint(self.before)
        self.was_changed = False

    def settle(self) -> None:
        """At the end of the frame: note whether it changed the object."""
        self.was_changed = fingerprint(self.value()) != self.fingerprint

    def changed(self) -> bool:
        """Whether a tensor in it has been modified in place: that state cannot be put back."""
        return fingerprint(self.before) != self.fingerprint

    def restore(self) -> Any:
        """The object as it was when the frame began: itself if nobody has changed it since, else a copy."""
        value = self.value()
        as_it_was = not self.was_changed and fingerprint(value) == self.fingerprint
        return value if as_it_was else snapshot(self.before)


class HeldArguments:
    """A frame's arguments, with every tensor in tuples, lists, dicts and dataclasses held for backward."""

    __slots__ = ("_arguments", "_hooks", "_name", "_opaque", "_tensors", "others")

    def __init__(self, arguments: tuple[tuple, dict], name: str):
        self._name = name
        self._hooks: Hooks | None = top_hooks()
        self._tensors: dict[int, _HeldTensor] = {}  # by id: one tensor passed twice is one tensor again
        self._opaque: dict[int, _HeldObject] = {}
        self.others: list[Any] = []
        """The arguments that are no tensors or objects with state, generators in such, parameters with attributes."""
        self._arguments = take_apart(self._hold, arguments)
        self._hooks = None  # hooks refer to the scopes around

    def _hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if (held := self._tensors.get(id(value))) is None:
                held = self._tensors[id(value)] = _HeldTensor(value, self._name, self._hooks)
                if held.attributes and isinstance(value, nn.Parameter):
                    self.others.append(value)
            return held
        if type(value) in _ATOMS:
            return value
        if _is_opaque(value):
            if (opaque := self._opaque.get(id(value))) is None:
                opaque = self._opaque[id(value)] = _HeldObject(value, self.others)
            return opaque
        self.others.append(value)
        return value

    def hand_out(self, tensor: Tensor) -> None:
        """The memory of a tensor is about to become an array."""
        key = storage_key(tensor)
        for held in self._tensors.values():
            if key is not None and held.original is not None and storage_key(held.original) == key:
                held.expose()

    def changed(self) -> str | None:
        """Names an argument that has been modified in place since, or that can be used only once, if there is one."""
        for held in self._tensors.values():
            if held.changed():
                known = (held.original, held.before, *[tensor for tensor, _ in held.inner])
                tensor = next(each for each in known if each is not None)
                return f"an argument, a {describe(tensor)}, has been modified in place"
        for opaque in self._opaque.values():
            if opaque.changed():
                return f"a tensor in an argument, a {type(opaque.before).__name__}, has been modified in place"
        for value in self.others:
            if isinstance(value, Iterator):
                return f"an argument, a {type(value).__name__}, may have been used up"
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
            if type(held.saved) is KeptTensor:
                kept.append(held.saved.tensor)
        return given, kept

    def restored(self) -> tuple[tuple, dict]:
        """The same arguments, their tensors leaves of a new graph."""
        if (what := self.changed()) is not None:
            raise MutationError(
                f"in {self._name}: {what} between forward and backward, so the region cannot be run again as it ran"
            )

        parts: list[Any] = [*self._tensors.values(), *self._opaque.values()]
        restored = {id(part): part.restore() for part in parts}
        return put_together(lambda value: restored.get(id(value), value), self._arguments)


class _SplitContainer:
    """A container of another kind than a tuple, list or dict, taken apart."""

    __slots__ = ("build", "parts")

    def __init__(self, parts: Any, build: Callable[[Any], Any]):
        self.parts = parts
        self.build = build


def take_apart(leaf: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``leaf`` called on all that is in its tuples, lists, dicts, dataclasses and registered pytrees.

    The result has no containers of those classes, which might refuse what ``leaf`` returns. ``put_together`` makes them
    again.
    """
    return _mapped(leaf, value, {}, splits=True)


def put_together(leaf: Callable[[Any], Any], part: Any) -> Any:
    """What ``take_apart`` took apart, made again, with ``leaf`` called on what stands in the place of each leaf."""
    return _mapped(leaf, part, {}, splits=False)


def _mapped(leaf: Callable[[Any], Any], value: Any, seen: dict[int, Any], *, splits: bool) -> Any:
    """splits: whether other containers than tuples, lists and dicts are taken apart."""
    kind = type(value)
    if kind is Tensor or kind in _ATOMS:
        return leaf(value)
    if kind is tuple:
        return tuple([_mapped(leaf, item, seen, splits=splits) for item in value])
    if (known := seen.get(id(value))) is not None:  # one list passed twice is one list again
        return known
    if kind is dict:
        seen[id(value)] = found = {}
        found.update({key: _mapped(leaf, item, seen, splits=splits) for key, item in value.items()})
        return found
    if kind is list:
        seen[id(value)] = items = []
        items += [_mapped(leaf, item, seen, splits=splits) for item in value]
        return items
    if kind is _SplitContainer:
        seen[id(value)] = made = value.build(_mapped(leaf, value.parts, seen, splits=splits))
        return made
    if not splits or (split := _split(value)) is None:
        return leaf(value)
    parts, build = split
    seen[id(value)] = node = _SplitContainer(None, build)
    node.parts = _mapped(leaf, parts, seen, splits=splits)
    return node


_ATOMS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size, nn.Parameter))


def _split(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """The parts of a container, in plain containers, and what makes it again of such parts; None of anything else.

    No constructor runs, because it may want other arguments or do more than keep them. Only classes that are registered
    as pytrees are made as they were registered.
    """
    kind = type(value)
    if (node := SUPPORTED_NODES.get(kind)) is not None:
        children, context = node.flatten_fn(value)
        return children, lambda parts: node.unflatten_fn(parts, context)
    if isinstance(value, tuple):
        return (tuple(value), getattr(value, "__dict__", {})), functools.partial(_tuple_of, kind)
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, nn.Module)) or _empty(kind) is None:
        return None
    return _attributes(value), functools.partial(_object_of, kind)


def _tuple_of(kind: Any, parts: tuple[tuple, dict[str, Any]]) -> Any:
    items, attributes = parts
    made = tuple.__new__(kind, items)
    if attributes:
        made.__dict__.update(attributes)
    return made


def _object_of(kind: Any, attributes: dict[str, Any]) -> Any:
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _empty(kind: Any) -> Any:
    """An object without attributes, made by no constructor; None if the class holds more than attributes."""
    try:
        return object.__new__(kind)
    except TypeError:
        return None


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf of its tuples, lists, dicts, dataclasses and registered pytrees replaced."""
    return put_together(lambda leaf: leaf, take_apart(function, value))


_IMMUTABLE = (Tensor, nn.Module, type, enum.Enum, functools.partial, MethodType, ModuleType, *GENERATORS)


def _is_opaque(value: Any) -> bool:
    kind: Any = type(value)
    return _are_opaque(kind)


@functools.lru_cache(4096)
def _are_opaque(kind: Any) -> bool:
    """Whether the state of objects of this class is in attributes, so that it can be compared and copied."""
    if issubclass(kind, _IMMUTABLE) or any("__call__" in vars(base) for base in kind.__mro__):
        return False
    return bool(_slots_of(kind)) or kind.__dictoffset__ != 0


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` and in slots."""
    kind: Any = type(value)
    slots = _slots_of(kind)
    own = getattr(value, "__dict__", {})
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **own} if slots else own


@functools.lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple([name for name in found if name != "__weakref__"])


def fingerprint(value: Any) -> Any:
    """What a value refers to. Two fingerprints differ if the value, or a tensor in it, was changed in between."""
    return _fingerprint(value, _DEPTH, {})


def _fingerprint(value: Any, depth: int, seen: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if not depth or not (isinstance(value, (dict, list, tuple)) or _is_opaque(value)):
        return value if isinstance(value, (int, float, str, bytes, type(None))) else id(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    attributes = _attributes(value).items() if _is_opaque(value) else ()
    return [type(value), *[(key, _fingerprint(item, depth - 1, seen)) for key, item in (*items, *attributes)]]


def snapshot(value: Any) -> Any:
    """A copy of the objects, lists and dicts in ``value``. The copies refer to each other, and to the same tensors."""
    return _snapshot(value, _DEPTH, {}, [])


def _snapshot(value: Any, depth: int, copies: dict[int, Any], generators: list[Any]) -> Any:
    # It is no closure, because one that calls itself is a cycle (invariant 8).
    if not depth or not (isinstance(value, (dict, list, tuple)) or _is_opaque(value)):
        if isinstance(value, GENERATORS):  # ``RngState`` captures their states
            generators.append(value)
        return value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) is tuple:
        return tuple([_snapshot(item, depth - 1, copies, generators) for item in value])
    try:
        copied = copies[id(value)] = copy.copy(value)
    except _REFUSALS:
        if (copied := _empty(type(value))) is None:  # a stream, say: not state that forward changes
            return value
        copies[id(value)] = copied
    if copied is value:  # a logger, a singleton
        return value
    if isinstance(value, dict):
        dict.update(copied, {key: _snapshot(item, depth - 1, copies, generators) for key, item in value.items()})
    elif isinstance(value, list):
        list.__setitem__(copied, slice(None), [_snapshot(item, depth - 1, copies, generators) for item in value])
    if _is_opaque(value):
        for name, item in _attributes(value).items():
            object.__setattr__(copied, name, _snapshot(item, depth - 1, copies, generators))
    return copied


_REFUSALS = (TypeError, ValueError, AttributeError, RuntimeError, pickle.PickleError)
"""What a class raises that refuses to be copied, or that only its constructor can make."""

_DEPTH = 6  # enough for a cache, its layers, a layer and its attributes, and not for all that a configuration refers to
