"""Copies of what code can change: containers, arrays and objects, each with all that is in it.

For each class one ``Way`` says what its objects hold, and what makes another one. Arguments, attributes of modules, and
what is in globals and closures are copied when a frame begins, and those copies are copied for each replay. So a replay
finds what forward found, and nobody finds what a replay changes.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import sys
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from recompute.engine.rng import GENERATORS
from recompute.engine.saved_tensors import version_of

COLLECTION, RECORD, OBJECT = range(3)
"""What a copier enters: containers of any class; dataclasses and pytrees, too; and all else that has attributes."""
NUMBERS = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
ATOMS = NUMBERS | {Tensor, nn.Parameter}
_WHOLE = (Tensor, nn.Module, type, enum.Enum, functools.partial, MethodType, ModuleType, torch.Size, *GENERATORS)
_FLAT = (np.ndarray, bytearray, array)
_SERIES = (tuple, list, deque)
_BASES = (OrderedDict, defaultdict, dict, *_SERIES, set, *_FLAT, MappingProxyType, SimpleNamespace)
_IN_PYTHON = (UserDict, UserList, ChainMap)
_DEPTH = 5  # of objects in objects: enough for a cache and its layers, and not for all that a configuration refers to
_MOST_BYTES = 1 << 16  # of an array: copying these takes no longer than launching a kernel


class Way(NamedTuple):
    """How the objects of a class are taken apart."""

    rank: int
    base: Any
    """The class in C that makes an empty one and holds the items, whatever methods the class itself has."""
    slots: tuple[MemberDescriptorType, ...]

    def parts(self, value: Any) -> Iterator[tuple[Any, Any]]:
        """What ``value`` holds, by keys, positions, slots and names."""
        if issubclass(self.base, (dict, MappingProxyType)):
            yield from self.base.items(value)
        elif self.base in _SERIES:
            yield from enumerate(self.base.__iter__(value))
        elif self.base is set:
            yield from ((each, True) for each in set.__iter__(value))
        elif self.base in _FLAT and _is_small(value):
            yield None, bytes(value) if self.base is bytearray else value.tobytes()
        yield from self.in_slots(value)
        if (own := getattr(value, "__dict__", value)) is not value:
            yield from own.items()

    def in_slots(self, value: Any) -> Iterator[tuple[MemberDescriptorType, Any]]:
        for slot in self.slots:
            try:
                yield slot, slot.__get__(value)
            except AttributeError:  # it is empty
                continue


@functools.lru_cache(4096)
def way_of(kind: Any) -> Way | None:
    """How objects of this class are taken apart; None if they are not, or are more than can be seen of them."""
    base: Any = next((base for base in _BASES if issubclass(kind, base)), object)
    if kind in ATOMS or issubclass(kind, _WHOLE) or (base in _FLAT and kind is not base):
        return None
    if base in (*_FLAT, MappingProxyType):
        return Way(COLLECTION, base, ())
    try:
        base.__new__(kind)
    except TypeError:  # a stream, say, is made by its own class in C
        return None
    slots = [each for base in kind.__mro__ if "__slots__" in vars(base) for each in vars(base).values()]
    descriptors = tuple([each for each in slots if isinstance(each, MemberDescriptorType)])
    if base not in (object, SimpleNamespace) or issubclass(kind, _IN_PYTHON):
        return Way(COLLECTION, base, descriptors)
    if not (descriptors or kind.__dictoffset__) or any("__call__" in vars(base) for base in kind.__mro__):
        return None
    return Way(RECORD if dataclasses.is_dataclass(kind) else OBJECT, base, descriptors)


class Registered:
    """An object of a class that is registered as a pytree, taken apart. It is made as it was registered."""

    __slots__ = ("build", "parts")

    def __init__(self, parts: list[Any], build: Callable[[list[Any]], Any]):
        self.parts = parts
        self.build = build


class Copier:
    """Makes copies that refer to each other as what they are copies of does.

    No method of what is copied runs: it may want other values, or do more than to keep them.
    """

    def __init__(self, rank: int = COLLECTION):
        """rank: what it enters."""
        self.rank = rank
        self._made: dict[int, Any] = {}  # by the id of the original, which has to live as long as this copies
        self._taken: list[Any] = []  # what lives for that alone
        self._depth = _DEPTH

    def leaf(self, value: Any) -> Any:
        """What stands in the place of ``value``, which it does not enter."""
        return value

    def copy_once(self, value: Any) -> Any:
        """A copy, after which it forgets what it has copied."""
        made = self.copy(value)
        self._made.clear()
        self._taken.clear()
        return made

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return self.leaf(value)
        if kind is tuple:
            return tuple([self.copy(item) for item in value])
        if (known := self._made.get(id(value))) is not None:
            return known
        made: Any
        if kind is dict or kind is list:
            made = self._made[id(value)] = kind()
            if kind is list:
                made += value if _are_numbers(value) else [self.copy(item) for item in value]
            else:
                made |= value if _are_numbers(value.values()) else {key: self.copy(item) for key, item in value.items()}
            return made
        if kind is Registered:
            made = self._made[id(value)] = value.build([self.copy(part) for part in value.parts])
            return made
        if self.rank == RECORD and kind in SUPPORTED_NODES and kind not in _BASES:
            node = SUPPORTED_NODES[kind]
            children, context = node.flatten_fn(value)
            self._taken.append(children)
            made = self._made[id(value)] = Registered([], lambda parts: node.unflatten_fn(parts, context))
            made.parts += [self.copy(child) for child in children]
            return made
        way = way_of(kind)
        if way is None or way.rank > self.rank or not self._depth:
            return self.leaf(value)
        self._depth -= way.rank == OBJECT
        made = self._copied(value, kind, way)
        self._depth += way.rank == OBJECT
        return made

    def _copied(self, value: Any, kind: Any, way: Way) -> Any:
        base = way.base
        if base in _FLAT:
            return copy.copy(value) if _is_small(value) else self.leaf(value)
        if base is MappingProxyType:
            made = self._made[id(value)] = MappingProxyType({key: self.copy(item) for key, item in value.items()})
            return made
        if base is tuple:
            made = self._made[id(value)] = tuple.__new__(kind, [self.copy(item) for item in tuple.__iter__(value)])
        else:
            made = self._made[id(value)] = base.__new__(kind)
            self._fill(made, value, base)
        for slot, part in way.in_slots(value):
            slot.__set__(made, self.copy(part))
        if own := getattr(value, "__dict__", None):
            if base is SimpleNamespace:
                vars(made).update(self.copy(own))
            else:  # which may be ``value`` itself, and whatever its class has for ``__setattr__``
                object.__setattr__(made, "__dict__", self.copy(own))
        return made

    def _fill(self, made: Any, value: Any, base: Any) -> None:
        if base is list:
            list.extend(made, [self.copy(item) for item in list.__iter__(value)])
        elif base is deque:
            deque.__init__(made, [self.copy(item) for item in deque.__iter__(value)], value.maxlen)
        elif base is set:
            set.update(made, value)
        elif issubclass(base, dict):
            if base is defaultdict:
                made.default_factory = value.default_factory
            for key, item in base.items(value):
                base.__setitem__(made, key, self.copy(item))


class StateCopies(Copier):
    """Copies of what code reads and may change, with aliases of the tensors in it, which have no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        """The tensors: aliases of plain ones, and others themselves."""
        self.found: list[Any] = []
        """All else that has no parts here but numbers: functions, objects, modules."""

    def leaf(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if type(value) is Tensor:
                value = self._alias(value)
            self.tensors.append(value)
        elif type(value) not in NUMBERS:
            self.found.append(value)
        return value

    def _alias(self, tensor: Tensor) -> Tensor:
        """Without its graph. Else the graph of an auxiliary loss, say, would be held from step to step."""
        if (alias := self._made.get(id(tensor))) is None:
            alias = self._made[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.__dict__:
                alias.__dict__.update(self.copy(tensor.__dict__))
        return alias

    def all(self, values: list[Any], most: int | None = None) -> list[Any]:
        """Copies of all of these; ``values`` itself, if nothing among them needs one.

        most: leave longer containers alone, as vocabularies.
        """
        for kind in set(map(type, values)) - _inert:
            way = way_of(kind)
            if issubclass(kind, Tensor) or (way is not None and way.rank == COLLECTION):
                return [value if most is not None and _is_longer(value, most) else self.copy(value) for value in values]
            if len(_inert) > _MOST_CLASSES:  # made by functions, perhaps
                _inert.intersection_update(NUMBERS)
            _inert.add(kind)
        self.found += [value for value in values if type(value) not in NUMBERS]
        return values


_inert: set[type] = set(NUMBERS)
"""Classes of which ``StateCopies`` needs no copies, as far as it has met them."""
_MOST_CLASSES = 4096


class Mapper(Copier):
    """Puts what ``function`` returns in the place of all that it does not enter."""

    def __init__(self, function: Callable[[Any], Any], rank: int = RECORD):
        super().__init__(rank)
        self._function = function

    def leaf(self, value: Any) -> Any:
        return self._function(value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf of its containers, dataclasses and registered pytrees replaced."""
    return Copier(RECORD).copy(Mapper(function).copy(value))


def _are_numbers(values: Iterable[Any]) -> bool:
    return NUMBERS.issuperset(map(type, values))


def _is_longer(value: Any, most: int) -> bool:
    way = way_of(type(value))
    return way is not None and way.rank == COLLECTION and len(value) > most


def _is_small(value: Any) -> bool:
    return (value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)) <= _MOST_BYTES


def fingerprint(value: Any) -> Any:
    """What a value refers to. Two fingerprints differ if the value, or a tensor in it, was changed in between."""
    return _fingerprint(value, _DEPTH, {})


def _fingerprint(value: Any, depth: int, seen: dict[int, int]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if (way := way_of(kind)) is None or not depth:
        return value if kind in NUMBERS else id(value)
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    depth -= way.rank == OBJECT
    return [kind, *[(key, _fingerprint(part, depth, seen)) for key, part in way.parts(value)]]
