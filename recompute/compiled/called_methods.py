"""The methods that a traced call has called, and whether they still are what they were.

torch's frontend guards functions that it finds in globals, closures and instances, but no method that it finds on a
class. Libraries replace such methods in the middle of a run, and IPython's autoreload replaces their code.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch import nn

_code_of = attrgetter("__code__")


class CalledMethods:
    """Methods of classes. A method is what a class gives by a name; its code is minded, too."""

    def __init__(self) -> None:
        # Parallel lists, because looking at all of them must take no more than a microsecond or two. The first entry is
        # there because the frontend takes a module's call for one of its forward.
        self._classes: list[type] = [nn.Module]
        self._names = ["__call__"]
        self._found: tuple[Any, ...] = (nn.Module.__call__,)
        self._functions: list[FunctionType] = []
        self._codes: tuple[Any, ...] = ()

    def note(self, function: Any, receiver: Any) -> None:
        """A traced call calls ``function`` with ``receiver``, an object or a class, as its first argument."""
        if type(function) is not FunctionType or receiver is None:
            return
        kind = receiver if isinstance(receiver, type) else type(receiver)
        place = _place_of(function, kind)
        if place is None:
            return
        owner, name = place
        if (owner, name) not in zip(self._classes, self._names, strict=True):
            # In this order another thread that looks meanwhile finds a difference, at worst.
            self._classes.append(owner)
            self._names.append(name)
            self._found += (getattr(owner, name),)
        if function not in self._functions:
            self._functions.append(function)
            self._codes += (function.__code__,)

    def are_as_before(self) -> bool:
        """Whether all methods, and their code, are what they were when they were noted."""
        return (
            tuple(map(getattr, self._classes, self._names, repeat(None))) == self._found
            and tuple(map(_code_of, self._functions)) == self._codes
        )


def _place_of(function: FunctionType, kind: type) -> tuple[type, str] | None:
    """The class and the name by which ``function`` is a method of ``kind``; None if it is none.

    The class is ``kind``, or the one that has the method if ``kind`` has another of that name, as under ``super()``.
    """
    for owner in kind.__mro__:
        for name, value in vars(owner).items():
            if any(each is function for each in _functions_in(value)):
                first = next(vars(each)[name] for each in kind.__mro__ if name in vars(each))
                return (kind if first is value else owner), name
    return None


def _functions_in(value: Any) -> Iterator[Any]:
    """The functions that an attribute of a class may call."""
    if isinstance(value, property):
        yield value.fget
    elif isinstance(value, (classmethod, staticmethod)):
        yield value.__func__
    else:
        yield value
