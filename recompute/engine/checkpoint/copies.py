"""Copies of values that code can change: containers, arrays and objects, each with all that is in it.

``Contents`` alone says what the objects of a class hold. When a frame begins, it copies arguments, attributes of
modules, and the values of globals and closures. Each replay copies these copies. So a replay finds the values that
forward found, and nobody finds its changes.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import sys
from argparse import Namespace
from array import array
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from operator import length_hint
from types import MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES

from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.engine.reachable_objects import dict_of
from recompute.engine.rng import GENERATORS
from recompute.engine.saved_tensors import version_of

COLLECTION, RECORD, OBJECT = range(3)
"""A copier's ranks: it enters containers of any class; dataclasses and pytrees, too; and all else with attributes."""
NUMBERS = frozenset((int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_are_numbers = NUMBERS.issuperset
_ATOMS = NUMBERS | {Tensor, nn.Parameter}
_WHOLE = (Tensor, nn.Module, type, enum.Enum, functools.partial, MethodType, ModuleType, torch.Size, *GENERATORS)
_DICTS = (OrderedDict, defaultdict, dict)
_ARRAYS = (np.ndarray, bytearray, array)
_BASES = (*_DICTS, list, deque, set, tuple, *_ARRAYS, SimpleNamespace)
_IN_PYTHON = (UserDict, UserList, ChainMap)
_DEPTH = 5  # of objects in objects: enough for a cache and its layers, and not for all that a configuration refers to

Place = tuple[Callable[[Any, Any, Any], Any], Any, Any]
"""A function that puts a part into an object, the key or name of the place, and the part that is there."""


class Contents(NamedTuple):
    """The places of things in objects of a class. No method of the class runs: it may do more than to hold things."""

    rank: int
    base: Any
    """The class in C whose methods make an empty object, read its items and put items there."""
    slots: tuple[MemberDescriptorType, ...]

    def empty(self, value: Any) -> Any:
        """Another object of the class of ``value``, with no items and attributes."""
        if self.base is deque:
            made = deque.__new__(type(value))
            deque.__init__(made, maxlen=value.maxlen)
            return made
        made = self.base.__new__(type(value))
        if self.base is defaultdict:
            made.default_factory = value.default_factory
        return made

    def places(self, value: Any) -> Iterator[Place]:
        """The places in ``value``: its items, unless it is a tuple, and its attributes."""
        base = self.base
        if base in _DICTS:
            yield from ((base.__setitem__, key, part) for key, part in base.items(value))
        elif base is list or base is deque:
            yield from ((_append, index, part) for index, part in enumerate(base.__iter__(value)))
        elif base is set:
            yield from ((_add, part, True) for part in set.__iter__(value))
        for slot in self.slots:
            with suppress(AttributeError):  # it is empty
                yield _put_in_slot, slot, slot.__get__(value)
        own = dict_of(value)
        if own is value:  # a dict whose items are its attributes
            yield object.__setattr__, "__dict__", value
        else:
            yield from ((_put_attribute, name, own[name]) for name in [*own])


def _append(made: Any, index: int, part: Any) -> None:
    (list if isinstance(made, list) else deque).append(made, part)


def _add(made: set[Any], part: Any, _: Any) -> None:
    set.add(made, part)


def _put_in_slot(made: Any, slot: MemberDescriptorType, part: Any) -> None:
    slot.__set__(made, part)


def _put_attribute(made: Any, name: str, part: Any) -> None:
    made.__dict__[name] = part


@functools.lru_cache(4096)
def contents_of(kind: Any) -> Contents | None:
    """The contents of objects of this class; None if they are never taken apart, or hold more than is seen here."""
    base: Any = next((base for base in _BASES if issubclass(kind, base)), object)
    if kind in _ATOMS or issubclass(kind, _WHOLE) or (base in _ARRAYS and kind is not base):
        return None
    if hasattr(kind, "__del__"):  # a copy's end might close a resource that the original still uses
        return None
    try:
        if base not in _ARRAYS:
            base.__new__(kind)
    except TypeError:
        if base is not tuple:  # a stream, say, is made by its own class in C
            return None
    slots = [each for base in kind.__mro__ if "__slots__" in vars(base) for each in vars(base).values()]
    descriptors = tuple([each for each in slots if isinstance(each, MemberDescriptorType)])
    if (kind in SUPPORTED_NODES and kind not in _BASES) or dataclasses.is_dataclass(kind):
        return Contents(RECORD, base, descriptors)
    if base not in (object, SimpleNamespace) or issubclass(kind, _IN_PYTHON):
        return Contents(COLLECTION, base, descriptors)
    has_state = (descriptors or kind.__dictoffset__) and not any("__call__" in vars(each) for each in kind.__mro__)
    is_python_s = kind.__module__ in sys.stdlib_module_names and kind not in (SimpleNamespace, Namespace)
    return None if is_python_s or not has_state else Contents(OBJECT, base, descriptors)  # loggers know all others


class Copier:
    """Makes copies that refer to each other as their originals do."""

    def __init__(self, rank: int = COLLECTION, made: dict[int, Any] | None = None):
        """rank: of the objects that it enters. made: copies that are there already, by the ids of their originals."""
        self.rank = rank
        self._made = {} if made is None else made  # originals live as long as this copies, so no id stands for two
        self._depth = _DEPTH

    def leaf(self, value: Any) -> Any:
        """The copy of a ``value`` that it does not enter."""
        return value

    def copy(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind in _ATOMS:
            return self.leaf(value)
        if kind is tuple:
            return value if _are_numbers(map(type, value)) else tuple([self.copy(item) for item in value])
        if (made := self._made.get(id(value))) is not None:
            return made
        if kind is list:
            made = self._made[id(value)] = []
            made += value if _are_numbers(map(type, value)) else [self.copy(item) for item in value]
            return made
        if kind is dict:
            made = self._made[id(value)] = {}
            is_flat = _are_numbers(map(type, value.values()))
            made |= value if is_flat else {key: self.copy(item) for key, item in value.items()}
            return made
        contents = contents_of(kind)
        if contents is None or contents.rank > self.rank or (contents.rank == OBJECT and not self._depth):
            return self.leaf(value)
        if contents.base in _ARRAYS:
            made = self._made[id(value)] = copy.copy(value) if _is_small(value) else self.leaf(value)
            return made
        if contents.base is tuple:
            items = [self.copy(item) for item in tuple.__iter__(value)]
            try:
                made = self._made[id(value)] = tuple.__new__(kind, items)
            except TypeError:  # it is one of torch's own, from an op
                made = self._made[id(value)] = kind(items)
        else:
            made = self._made[id(value)] = contents.empty(value)
        self._depth -= contents.rank == OBJECT
        for put, key, part in contents.places(value):
            put(made, key, self.copy(part))
        self._depth += contents.rank == OBJECT
        return made


class StateCopies(Copier):
    """Copies of values that code reads and may change. The tensors in them are aliases without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        """The tensors: aliases of plain ones, and others themselves."""
        self.found: list[Any] = []
        """All else that is not copied, but numbers: functions, objects, modules."""

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
        if any(map(_may_change, set(map(type, values)))):
            return [value if most is not None and _is_longer(value, most) else self.copy(value) for value in values]
        self.found += [value for value in values if type(value) not in NUMBERS]
        return values


@functools.lru_cache(4096)
def _may_change(kind: Any) -> bool:
    """Whether ``StateCopies`` copies or watches objects of this class."""
    contents = contents_of(kind)
    return issubclass(kind, Tensor) or (contents is not None and contents.rank == COLLECTION)


class _Mapper(Copier):
    def __init__(self, function: Callable[[Any], Any]):
        super().__init__(RECORD)
        self._function = function

    def leaf(self, value: Any) -> Any:
        return self._function(value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with each leaf of its containers, dataclasses and registered pytrees replaced."""
    return _Mapper(function).copy(value)


def _is_longer(value: Any, most: int) -> bool:
    kind: Any = type(value)
    return _may_change(kind) and not isinstance(value, Tensor) and length_hint(value) > most  # arrays of () have no len


def _is_small(value: Any) -> bool:
    return (value.nbytes if isinstance(value, np.ndarray) else sys.getsizeof(value)) <= LARGEST_COPY


def fingerprint(value: Any, depth: int = _DEPTH, seen: dict[int, int] | None = None) -> Any:
    """A mark of a value. Two marks of it differ if the value, or a tensor in it, was changed in between."""
    kind: Any = type(value)
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if (contents := contents_of(kind)) is None or (contents.rank == OBJECT and not depth):
        return value if kind in NUMBERS else id(value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if contents.base in _ARRAYS:
        return bytes(value) if kind is bytearray else value.tobytes() if _is_small(value) else id(value)
    depth -= contents.rank == OBJECT
    items = tuple.__iter__(value) if contents.base is tuple else ()
    parts = [*enumerate(items), *[(key, part) for _, key, part in contents.places(value)]]
    return [kind, *[(key, fingerprint(part, depth, seen)) for key, part in parts]]
