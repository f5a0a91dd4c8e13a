"""The objects that code can use without getting them as arguments. The names in the code lead to them."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef, _maybe_get_opdef
from torch._ops import OpOverload
from torch.autograd import Function

from recompute.engine.dtensors import is_managed_elsewhere
from recompute.engine.rng import GLOBALS, is_random_source


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class that ``module`` has without a policy, which puts another one in its place."""
    return getattr(type(module), "_recompute_base", type(module))


def dict_of(value: Any) -> Any:
    """The ``__dict__`` of any object; {} if it has none. No ``__getattr__`` is asked, which may raise anything."""
    try:
        return object.__getattribute__(value, "__dict__")
    except Exception:  # a proxy has a property in its place, which may raise anything
        return {}


def taken_apart(value: Any) -> tuple[list[FunctionType], list[Any]]:
    """The Python functions that run where ``value``, any callable, is called; and all else that it holds.

    A value that is not made of others, as an object or a function in C, counts as all else.
    """
    functions: list[FunctionType] = []
    others: list[Any] = []
    pending, seen = [value], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, MethodType):
            others.append(value.__self__)
            pending.append(value.__func__)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            others += [*value.args, *value.keywords.values()]
            pending.append(value.func)
        elif isinstance(value, (staticmethod, classmethod)):
            pending.append(value.__func__)
        elif isinstance(value, (property, functools.cached_property)):
            pending.append(value.fget if isinstance(value, property) else value.func)
        elif isinstance(value, (CustomOpDef, OpOverload)) and (op := _maybe_get_opdef(value)) is not None:  # in Python
            pending += [op._init_fn, *op._backend_fns.values()]
        else:
            is_function = isinstance(value, FunctionType)
            (functions if is_function else others).append(value)
            if "__wrapped__" in (own := dict_of(value)):  # as by functools.cache
                pending.append(own["__wrapped__"])
    return functions, others


def find_generators(roots: Iterable[Any]) -> list[Any]:
    """The random generators that ``roots`` may use; see ``Walk``."""
    return list({id(value): value for value in Walk(roots).values if is_random_source(value)}.values())


class Walk:
    """A walk through all that ``roots``, which are functions, modules or any objects, may use.

    Follows the names in their code through helpers, methods, Python modules, objects and containers. It does not enter
    torch, NumPy, SymPy, Triton or Python itself. No name leads to an attribute whose name is computed, to code in C or
    to a generator that is made while the code runs: it misses those.
    """

    def __init__(self, roots: Iterable[Any], *, enters_functions: bool = True):
        """enters_functions: whether it goes through custom ``autograd.Function``s, too."""
        self._enters_functions = enters_functions
        self.values: list[Any] = []
        """The objects reached; some of them more than once."""
        self.defaults: list[Tensor] = []
        """The tensors among the defaults of functions."""
        self.names: set[str] = set()
        """All names in the code."""
        self.assigned: set[str] = set()
        """The names of attributes that it sets, which an object may have from then on."""
        self.globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        """The dicts of globals that the code names, and the names."""
        self.cells: dict[int, CellType] = {}
        """The variables of closures, by ``id``."""
        self._functions: list[tuple[FunctionType, Any]] = []  # each with the object or class whose method it is
        walked: set[tuple[int, int]] = set()
        values: list[Any] = list(roots)
        names: tuple[str, ...] = ()
        while True:
            self._walk_values(values, names)
            while not values:
                if not self._functions:
                    modules = {value.__name__ for value in self.values if type(value) is ModuleType}
                    if "random" in self.names or not modules.isdisjoint(("random", "numpy.random")):
                        self.values += GLOBALS
                    return
                function, owner = self._functions.pop()
                if (id(function), id(owner)) not in walked:
                    walked.add((id(function), id(owner)))
                    names = () if is_foreign(function) else tuple({*_names(function.__code__)})
                    values = [function.__globals__.get(name) for name in names]
                    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
                    self.defaults += (value for value in defaults if isinstance(value, Tensor))
                    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
                    values += [owner, *defaults, *cells]
                    self._note(function, names)

    def _note(self, function: FunctionType, names: tuple[str, ...]) -> None:
        if is_foreign(function):
            return
        space = function.__globals__
        self.names.update(names)
        self.assigned.update(_assigned(function.__code__))
        self.globals.update({(id(space), name): (space, name) for name in names if name in space})
        self.cells.update({id(cell): cell for cell in function.__closure__ or ()})

    def _walk_values(self, values: list[Any], names: tuple[str, ...]) -> None:
        """Go through ``values`` and all that they hold. names: the ones in the code that uses them."""
        seen: set[int] = set()
        while values:
            value = values.pop()
            if isinstance(value, _PRIMITIVE) or id(value) in seen:
                continue
            if isinstance(value, Tensor) and (not vars(value) or is_managed_elsewhere(value)):
                continue
            if not self._enters_functions and isinstance(value, type) and issubclass(value, Function):
                continue
            seen.add(id(value))
            self.values.append(value)
            if isinstance(value, (dict, list, tuple, set, deque)):
                values += itertools.islice(value.values() if isinstance(value, dict) else value, _MANY)
                continue
            called, others = taken_apart(value)
            owner = value.__self__ if isinstance(value, MethodType) else None
            self._functions += [(function, owner) for function in called]
            is_made_of_others = called or len(others) != 1 or others[0] is not value
            if is_made_of_others:
                values += [each for each in others if each is not value]
            elif not is_foreign(value):
                for attribute in _named(value, names):
                    if type(attribute) in _HOLDERS or isinstance(attribute, _PRIMITIVE):
                        values += (attribute,) if attribute else ()  # a module has eight empty dicts of hooks
                        continue
                    called, others = taken_apart(attribute)
                    self._functions += [(function, value) for function in called]
                    values += others


_PRIMITIVE = (int, float, complex, str, bytes, type(None))
_HOLDERS = (dict, OrderedDict, list, tuple, set)
_MANY = 1000  # the rest of a longer container, such as a vocabulary, is left alone
_FOREIGN = frozenset((*sys.stdlib_module_names, "torch", "numpy", "sympy", "triton", __name__.partition(".")[0]))


def is_foreign(value: Any) -> bool:
    """Whether it is code of torch, NumPy, SymPy, Triton, Python or this package, which need not be searched.

    Such code draws from the global generators, or from generators among its arguments.
    """
    if isinstance(value, (nn.Module, Tensor, SimpleNamespace, Namespace)):
        return False  # even torch's own may have attributes and hooks of the user's
    if isinstance(value, ModuleType):
        name = value.__name__
    elif isinstance(value, FunctionType):
        name = value.__globals__.get("__name__", "")
    else:
        name = (value if isinstance(value, type) else type(value)).__module__
    return str(name).partition(".")[0] in _FOREIGN


def _named(value: Any, names: Iterable[str]) -> Iterator[Any]:
    """The attributes of ``value`` that are called ``names``. They are looked up in a way that runs no property."""
    if isinstance(value, nn.Module):
        yield from _defined(base_of(value), "forward")
        yield from _attributes_of(value)
    elif isinstance(value, Tensor):
        yield from vars(value).values()
    elif isinstance(value, type) and issubclass(value, Function):
        yield from (*_defined(value, "forward"), *_defined(value, "setup_context"))
    elif not isinstance(value, (type, ModuleType)) and callable(value):
        yield from _defined(type(value), "__call__")
    own = dict_of(value)
    children = own.get("_modules", {})
    for name in names:
        if name in own:
            yield own[name]
        elif name in children:
            yield children[name]
        elif not isinstance(value, (ModuleType, Tensor)):
            for attribute in _defined(value if isinstance(value, type) else type(value), name):
                with suppress(AttributeError, TypeError):  # a slot is empty, or it is one of a class's instances
                    yield attribute.__get__(value) if isinstance(attribute, MemberDescriptorType) else attribute


def _defined(kind: type, name: str) -> list[Any]:
    return next(([vars(base)[name]] for base in kind.__mro__ if name in vars(base)), [])


def _attributes_of(module: nn.Module) -> Iterator[Any]:
    """The attributes of a module but for modules, also in its lists and dicts."""
    for name, value in vars(module).items():
        if name != "_modules":
            yield value
            yield from value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(settings, "scale", 1.0)
            yield constant


@functools.lru_cache(4096)
def _assigned(code: CodeType) -> frozenset[str]:
    """The attributes that the code sets; any, if it does so by ``setattr``."""
    if "setattr" in code.co_names:
        return frozenset(_names(code))
    inside = [_assigned(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return frozenset(own.union(*inside))
