"""Guards beside those of torch's frontend: of the methods that a traced call has called, and of settings.

torch's frontend guards functions that it finds in globals, closures and instances, but no method that it finds on a
class. Libraries replace such methods in the middle of a run, and IPython's autoreload replaces their code. Nor does it
guard environment variables, attributes of a dict, nor, in torch 2.11, those of a tuple, a number or a string, and
numbers, and lists of some, that it finds on a class.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from enum import Enum
from itertools import repeat
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch import nn

from recompute.engine.checkpoint.reached_state import class_attributes_read, environment, reads_environment
from recompute.engine.reachable_objects import Walk, dict_of
from recompute.engine.tape.op_arguments import is_constant

_code_of = attrgetter("__code__")
_PLAIN = (int, float, complex, str, bytes, type(None))

_UNGUARDED = (dict, tuple, int, float, str)

_Noted = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...], tuple[FunctionType, ...], tuple[Any, ...]]
"""Classes and objects, names, and the attribute of each by the name; functions, and the code that each had."""


class CalledMethods:
    """Methods of classes with their code, settings of classes, and attributes of dicts, tuples, numbers and strings."""

    def __init__(self) -> None:
        # Parallel tuples, as looking at all of them must take no more than a microsecond or two. They are replaced
        # together, as other threads look meanwhile. The frontend takes a module's call for one of its forward: hence
        # the first entry.
        self._noted: _Noted = (nn.Module,), ("__call__",), (nn.Module.__call__,), (), ()
        self._environment: dict[Any, Any] | None = None
        """The environment variables, if code that was traced may read some."""

    def note(self, function: Any, receiver: Any) -> None:
        """A traced call calls ``function`` with ``receiver``, an object or a class, as its first argument."""
        if type(function) is not FunctionType or receiver is None:
            return
        kind = receiver if isinstance(receiver, type) else type(receiver)
        place = _place_of(function, kind)
        if place is None:
            return
        self._add(*place, getattr(*place))
        classes, names, found, functions, codes = self._noted
        if function not in functions:
            self._noted = classes, names, found, (*functions, function), (*codes, function.__code__)

    def _add(self, owner: Any, name: str, value: Any) -> None:
        classes, names, found, functions, codes = self._noted
        if not any(each is owner and known == name for each, known in zip(classes, names, strict=True)):
            self._noted = (*classes, owner), (*names, name), (*found, value), functions, codes

    def note_reads(self, roots: Iterable[Any]) -> None:
        """A call of ``roots``, functions and modules, is traced: note all that it may read without a guard.

        Custom Functions are not traced. They run.
        """
        walk = Walk(roots, enters_functions=False)
        if reads_environment(walk):
            self._environment = environment()
        places: list[tuple[Any, str, Any]] = [(*place, getattr(*place, None)) for place in class_attributes_read(walk)]
        places = [(*place, deepcopy(value)) for *place, value in places if _is_plain(value)]
        for owner in walk.values:
            if isinstance(owner, _UNGUARDED) and not isinstance(owner, Enum):
                own = dict_of(owner)
                # A value that is no constant may change and stay the same object: then no code is ever current.
                places += [
                    (owner, name, v if is_constant(v := own[name]) else object()) for name in walk.names & own.keys()
                ]
        for place in places:
            self._add(*place)

    def are_as_before(self) -> bool:
        """Whether all that was noted, and the environment, is the same."""
        if self._environment is not None and self._environment != environment():
            return False
        classes, names, found, functions, codes = self._noted
        return tuple(map(getattr, classes, names, repeat(None))) == found and tuple(map(_code_of, functions)) == codes


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (type(value) in (list, tuple, set, frozenset) and all(map(_is_plain, value)))


def _place_of(function: FunctionType, kind: type) -> tuple[type, str] | None:
    """Where ``function`` is a method of ``kind``: a class and a name; None if it is none.

    The class is ``kind``, or the one that has the method if ``kind`` has another of that name, as under ``super()``.
    """
    for owner in kind.__mro__:
        for name, value in vars(owner).items():
            if _function_in(value) is function:
                first = next(vars(each)[name] for each in kind.__mro__ if name in vars(each))
                return (kind if first is value else owner), name
    return None


def _function_in(value: Any) -> Any:
    """The function that an attribute of a class calls."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
