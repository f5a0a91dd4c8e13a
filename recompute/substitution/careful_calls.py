"""Runs a function of the user's, and stops before the first step that could leave something behind.

To recognize what a module computes, its forward is traced and tried while a policy is applied. No one may be able to
tell: a counter, a file, or a list of past values has to be afterwards what it was. So forward is not called itself, but
a copy of it, compiled from its syntax tree, in which each call, each attribute and each assignment asks first. So is
each function that it calls. What cannot be copied, as a function without source, is not called.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import os
from collections.abc import Callable, Iterator
from enum import Enum
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from recompute.source_files import lies_in

_TORCH = os.path.dirname(torch.__file__)


class EffectRefused(Exception):
    """A function was about to do something that could be seen later. It goes no further than this folder."""


def careful(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which raises ``EffectRefused`` before it changes anything but its own local variables."""
    return functools.partial(_Careful().run, function)


class _Careful:
    """One run. The copies of functions call its methods by the name ``_NAME``."""

    def __init__(self) -> None:
        self._refusal: EffectRefused | None = None
        self._read: dict[int, Tensor] = {}
        """The tensors that were attributes of something, by their ids."""

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = self.call(function, *args, **kwargs)
        if self._refusal is not None:  # which the function itself has caught
            raise self._refusal
        return result

    def refuse(self, what: str) -> NoReturn:
        self._refusal = self._refusal or EffectRefused(what)
        raise self._refusal

    def call(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(function)
        if kind is functools.partial:
            return self.call(function.func, *function.args, *args, **{**function.keywords, **kwargs})
        if kind is MethodType and not _is_apply(function):
            return self.call(function.__func__, function.__self__, *args, **kwargs)
        if kind is FunctionType and not lies_in(function.__code__.co_filename, _TORCH):
            return self._copied(function)(*args, **kwargs)
        if function is getattr:
            return self.get(*args)
        if function is isinstance:
            return ask(*args)
        if not _may_be_called(function, args, kwargs):
            self.refuse(f"a call of {function!r}")
        if kind is type or (kind in _METHODS and function in _BUILTINS):
            args = tuple(map(self.items, args))
        return function(*args, **kwargs)

    def get(self, of: Any, name: str, *default: Any) -> Any:
        """``getattr``. A property's function is called with care, too."""
        found = inspect.getattr_static(type(of), name, None)
        if type(found) is property and type(found.fget) is FunctionType:
            return self.call(found.fget, of)
        if type(found) is functools.cached_property:
            self.refuse(f"the cached property {name}")
        value = getattr(of, name, *default)
        if issubclass(type(value), Tensor):
            self._read[id(value)] = value
        return value

    def items(self, iterable: Any) -> Any:
        """What a loop may go over: not an iterator, which would have moved on afterwards."""
        if hasattr(type(iterable), "__next__") and type(iterable) not in (zip, enumerate, reversed):
            self.refuse("a step of an iterator")
        return iterable

    def operand(self, value: Any) -> Any:
        """What an operator may be given: nothing whose class says in Python what the operator does."""
        kind = type(value)
        if kind.__module__.partition(".")[0] not in _ROOTS and not issubclass(kind, (fx.Proxy, Enum)):
            self.refuse(f"an operator of {kind.__name__}")
        return value

    def left_side(self, value: Any) -> None:
        """What may be on the left side of an assignment such as ``+=``, which changes some values in place."""
        is_new = issubclass(type(value), Tensor) and id(value) not in self._read
        if not (is_new or type(value) in _PLAIN or issubclass(type(value), fx.Proxy)):
            self.refuse("an operation in place")

    def manager(self, value: Any) -> Any:
        """What may stand in a ``with`` statement."""
        if type(value).__module__.partition(".")[0] not in ("torch", "contextlib"):
            self.refuse(f"a block of {type(value).__name__}")
        return value

    def _copied(self, function: FunctionType) -> FunctionType:
        code = function.__code__
        if _NAME in code.co_freevars:  # it is defined in a copy
            return function
        try:
            compiled = _compiled(code, function.__qualname__)
        except (SyntaxError, LookupError) as error:
            self.refuse(f"{function.__qualname__}, whose source is not there: {error}")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True)) | {_NAME: CellType(self)}
        closure = tuple(cells[name] for name in compiled.co_freevars)
        made = FunctionType(compiled, function.__globals__, function.__name__, function.__defaults__, closure)
        made.__kwdefaults__ = function.__kwdefaults__
        return made


def ask(value: Any, kinds: Any) -> bool:
    """``isinstance``, in a function of its own: a proxy knows from which one it is asked for its class."""
    return isinstance(value, kinds)


def _is_apply(function: Any) -> bool:
    """Whether it applies an autograd Function."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, Function) and function.__name__ == "apply"


def _may_be_called(function: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves nothing behind, of what has no Python that could be copied, or is torch's own."""
    kind, name = type(function), getattr(function, "__name__", "")
    if issubclass(kind, (nn.Module, fx.proxy.Attribute)) or _is_apply(function):
        return True
    if kwargs.get("out") is not None:
        return False
    if kind is FunctionType:
        file = os.path.relpath(function.__code__.co_filename, _TORCH)
        in_module = file.startswith("nn/modules") and name in _OF_MODULES
        in_library = file.startswith(_TORCH_FILES) and not _changes(name)
        return in_library or in_module or name.startswith(("is_", "get_"))
    if issubclass(kind, type):
        is_torchs = function.__module__.partition(".")[0] == "torch"
        return function in _TYPES or is_torchs or issubclass(function, BaseException)
    if kind.__module__ == "torch._ops":
        return not _changes(name)
    if kind not in _METHODS:
        return False
    if kind is BuiltinFunctionType and function.__module__ == "builtins":
        return function in _BUILTINS and "key" not in kwargs
    if kind is BuiltinFunctionType and function.__module__ in _NAMESPACES:
        return not _changes(name)
    owner = getattr(function, "__self__", args[0] if args else None)  # a method of a class is given its object
    if issubclass(type(owner), (Tensor, fx.Proxy)) or type(owner) in _PLAIN:
        return not _changes(name)
    return (name in _READING and type(owner) in (dict, list, set)) or name.startswith("is_")


def _changes(name: str) -> bool:
    """Whether something called so changes what it is given, or has it call something."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith(("register", "backward", "set_", "__set", "__i"))


_NAME = "_careful_"
_METHODS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_ROOTS = ("builtins", "torch", "numpy")
_PLAIN = (int, float, bool, complex, str, bytes, tuple, frozenset, type(None), torch.Size, torch.dtype, torch.device)
_TYPES = (*_PLAIN, list, dict, set, range, zip, enumerate, reversed, slice, type)
_BUILTINS: set[Any] = {
    abs,
    all,
    any,
    callable,
    divmod,
    hasattr,
    id,
    issubclass,
    len,
    max,
    min,
    pow,
    repr,
    round,
    sorted,
    sum,
}
_READING = ("get", "keys", "values", "items", "copy", "index", "count", "union", "intersection", "difference")
_OF_MODULES = ("forward", "__call__", "__iter__", "__len__", "__getitem__", "keys", "values", "items", "parameters")
_TORCH_FILES = ("nn/functional.py", "functional.py", "_jit_internal.py", "_tensor.py", "overrides.py", "fx/")
_NAMESPACES = ("math", "torch", *(f"torch._C.{name}" for name in ("_nn", "_special", "_linalg", "_fft", "_nested")))


@functools.lru_cache(1024)
def _compiled(code: CodeType, qualname: str) -> CodeType:
    """The code of a copy. Raises ``LookupError`` if there is no source of it, or if that has changed since."""
    nodes, codes = _source_of(code.co_filename)
    found = [node for node in nodes if _is_of(node, code)]
    if len(found) != 1 or code not in codes:
        raise LookupError(f"expected it at line {code.co_firstlineno} of {code.co_filename}")
    around = qualname.split(".")[:-1]
    node = _Asking("" if around[-1:] == ["<locals>"] else "".join(around[-1:])).copied(found[0])
    module = ast.parse(f"def around({', '.join((_NAME, *code.co_freevars))}): pass")
    module.body[0].body = [node if isinstance(node, ast.stmt) else ast.Expr(node)]  # type: ignore[attr-defined]
    made = compile(ast.fix_missing_locations(module), code.co_filename, "exec", dont_inherit=True)
    (defining,) = _codes_in(made)
    return next(_codes_in(defining))


@functools.lru_cache(8)
def _source_of(filename: str) -> tuple[list[Any], frozenset[CodeType]]:
    """The functions of a file: their syntax trees, and their code as of now."""
    tree = ast.parse("".join(linecache.getlines(filename)))
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    codes = [compile(tree, filename, "exec", dont_inherit=True)]
    for each in codes:  # the loop appends to it
        codes += _codes_in(each)
    return nodes, frozenset(codes)


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (each for each in code.co_consts if isinstance(each, CodeType))


def _is_of(node: Any, code: CodeType) -> bool:
    if isinstance(node, ast.Lambda):
        return code.co_name == "<lambda>" and node.lineno == code.co_firstlineno
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


class _Asking(ast.NodeTransformer):
    """Has each step of a function ask a ``_Careful`` first. Statements that would change something are refused."""

    def __init__(self, owner: str):
        """owner: the class that the function is defined in, whose name becomes part of those of private attributes."""
        self._owner = owner.lstrip("_")

    def copied(self, node: Any) -> Any:
        node = copy.deepcopy(node)
        node.decorator_list, node.name = [], f"{_NAME}copy"  # its own name may be that of a global
        return self.generic_visit(node)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _REFUSED_EXPRESSIONS):
            raise LookupError(f"{type(node).__name__} is not copied")
        if isinstance(node, ast.stmt) and (isinstance(node, _REFUSED_STATEMENTS) or _assigns_elsewhere(node)):
            return ast.copy_location(ast.Expr(self._ask("refuse", ast.Constant(ast.unparse(node)))), node)
        return super().visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
            return node  # it asks for the frame that it is called in
        return self._ask("call", node.func, *node.args, keywords=node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        is_private = self._owner and node.attr.startswith("__") and not node.attr.endswith("__")
        name = f"_{self._owner}{node.attr}" if is_private else node.attr
        return self._ask("get", node.value, ast.Constant(name))

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        left = ast.Name(node.target.id, ast.Load())  # type: ignore[union-attr]
        return [ast.copy_location(ast.Expr(self._ask("left_side", left)), node), node]

    def visit_Assign(self, node: ast.Assign) -> Any:
        self.generic_visit(node)
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets):
            node.value = self._ask("items", node.value)
        return node

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = self._ask("items", node.iter)
        return node

    visit_comprehension = visit_For

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> Any:
        self.generic_visit(node)
        return ast.copy_location(ast.ListComp(node.elt, node.generators), node)

    def visit_Starred(self, node: ast.Starred) -> Any:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load):
            node.value = self._ask("items", node.value)
        return node

    def visit_withitem(self, node: ast.withitem) -> Any:
        self.generic_visit(node)
        node.context_expr = self._ask("manager", node.context_expr)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        self.generic_visit(node)
        node.value = self._ask("operand", node.value)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        node.left, node.right = self._ask("operand", node.left), self._ask("operand", node.right)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        self.generic_visit(node)
        node.operand = self._ask("operand", node.operand)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if not all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            node.left = self._ask("operand", node.left)
            node.comparators = [self._ask("operand", each) for each in node.comparators]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        if node.decorator_list:
            raise LookupError("a decorated function inside is not copied")
        return self.generic_visit(node)

    def _ask(self, method: str, *args: Any, keywords: Any = ()) -> Any:
        asked = ast.Attribute(ast.Name(_NAME, ast.Load()), method, ast.Load())
        return ast.copy_location(ast.Call(asked, list(args), list(keywords)), args[0])


_REFUSED_EXPRESSIONS = (ast.Yield, ast.YieldFrom, ast.Await, ast.MatchClass, ast.Global, ast.Nonlocal)
_REFUSED_STATEMENTS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith)


def _assigns_elsewhere(node: ast.stmt) -> bool:
    """Whether a statement itself assigns to something else than local variables, or deletes it."""
    targets = [getattr(node, "target", None), *getattr(node, "targets", ())]
    targets += [item.optional_vars for item in getattr(node, "items", ())]
    leaves = [leaf for target in targets if target is not None for leaf in ast.walk(target)]
    return any(isinstance(leaf, (ast.Attribute, ast.Subscript)) and not _is_read(leaf) for leaf in leaves)


def _is_read(node: Any) -> bool:
    return isinstance(node.ctx, ast.Load)
