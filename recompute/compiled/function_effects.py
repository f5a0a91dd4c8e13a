"""What custom Functions change in Python: attributes of objects that they are given or know, and items of containers.

A graph has the numbers and tensors that code finds there when a call begins. So no code may run as a graph that reads
what a Function inside of it changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from recompute.engine.reachable_objects import Walk
from recompute.engine.tape.functions import FunctionOp

_MANY = 100
CHANGES = "{} changes what the code around it reads"

Found = dict[str, list[Any]]
"""What is there, by its names."""


@functools.cache
def _code_of(op: FunctionOp) -> tuple[frozenset[str], Sequence[tuple[dict[str, Any], str]]]:
    """The names in the code of a Function, and its globals but modules and functions."""
    walk = Walk((op.function,))
    values = [(space, name) for space, name in walk.globals.values()]
    kept = [(space, name) for space, name in values if not isinstance(space.get(name), (ModuleType, FunctionType))]
    return frozenset(walk.names | walk.assigned), kept


def shared_names(op: FunctionOp, read: frozenset[str]) -> frozenset[str]:
    """Those of the names that code reads that the code of a Function has, too."""
    return _code_of(op)[0] & read


def found_by(op: FunctionOp, args: Iterable[Any], names: frozenset[str] | None = None) -> Found:
    """What a Function finds in its arguments and globals. names: those to look for, if not all in its code."""
    own, entries = _code_of(op)
    names = own if names is None else names
    found: Found = {}
    objects = list(args)
    for space, name in entries:
        objects.append(value := space.get(name))
        if name in names:
            _add(found, name, value)
    for value in objects:
        spaces = [getattr(value, "__dict__", None) or {}]
        spaces += [value._buffers, value._parameters] if isinstance(value, nn.Module) else []
        for each in spaces:
            for name in names & each.keys():
                _add(found, name, each[name])
    return found


def _add(found: Found, name: str, value: Any) -> None:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    found.setdefault(name, []).extend((value, *items) if len(items) <= _MANY else (value,))


def changed(before: Found, after: Found) -> frozenset[str]:
    """The names by which something else is found afterwards."""
    return frozenset(
        [name for name in before.keys() | after.keys() if not _are_same(before.get(name), after.get(name))]
    )


def _are_same(one: list[Any] | None, other: list[Any] | None) -> bool:
    if one is None or other is None or len(one) != len(other):
        return False
    return all(a is b for a, b in zip(one, other, strict=True))
