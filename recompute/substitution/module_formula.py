"""Writes down what a module computes as a formula. Formulas can be compared whatever the modules' names are.

``torch.fx`` traces the module's forward. Submodules, attributes and floating-point numbers are numbered in the order in
which they are used, so that two modules that compute the same have equal formulas.
"""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from recompute.engine.checkpoint.arguments import fingerprint, snapshot
from recompute.engine.checkpoint.module_state import RUNNER, base_of
from recompute.engine.rng import RngState


@dataclass(frozen=True)
class Formula:
    """A module's result as nested tuples: ``("mul", ("attribute", 0), ("input", 0))``."""

    tree: Any
    names: tuple[str, ...]
    """The names that ``("attribute", index)`` and ``("module", index, ...)`` refer to."""
    numbers: tuple[float, ...]
    """The numbers that ``("number", index)`` refers to."""
    dropouts: tuple[str, ...] = ()
    """The paths of submodules, and of attributes that are zero, by which it drops nothing: see ``drops_nothing``."""


def formula_of(module: nn.Module, tracer: Callable[[], Tracer] | None = None) -> Formula | None:
    """The formula of ``module``; None unless forward is one expression of its one argument, the same in ``eval()``.

    Tracing does not change the module, whatever its forward does.

    Args:
        tracer: makes a tracer for forwards with other numbers of arguments.
    """
    if is_decorated(module) and getattr(vars(module).get(RUNNER), "runner", module) is not None:
        return None  # its forward runs a policy of its own
    try:
        if tracer is None and len(inspect.signature(base_of(module).forward).parameters) != 2:
            return None
    except ValueError:  # a builtin has no signature
        return None
    trained, evaluated = (_traced(module, training, tracer or Tracer) for training in (True, False))
    return trained if trained == evaluated else None


def drops_nothing(dropout: Any) -> bool:
    """Whether a dropout is passed over in formulas: a module whose probability is 0, or that probability itself."""
    return dropout.p == 0 if type(dropout) is nn.Dropout else type(dropout) in (float, int) and dropout == 0


def is_decorated(module: nn.Module) -> bool:
    """Whether the class of ``module`` is decorated with a policy."""
    return hasattr(type(module), "_recompute_decorated")


def copy_without_policy(module: nn.Module, training: bool) -> nn.Module:
    """A module of the same class with the same attributes, which a trial may replace without changing ``module``."""
    copy = object.__new__(base_of(module))
    copy.__dict__.update(snapshot(vars(module)), training=training)
    if not is_decorated(module):
        copy.__dict__.pop(RUNNER, None)
    return copy


def _traced(module: nn.Module, training: bool, tracer: Callable[[], Tracer]) -> Formula | None:
    copy = copy_without_policy(module, training)
    before = fingerprint(vars(copy))
    traced = tracer()
    try:
        with RngState().replayed():
            graph = traced.trace(copy)
    except Exception:
        # Any module's forward comes here, and may raise anything where it gets a proxy in place of a tensor. Then it
        # is not recognized.
        return None
    if fingerprint(vars(copy)) != before:
        return None  # forward sets attributes of the module, which a kernel in its place would not
    builder = _FormulaBuilder()
    formula = builder.build(graph)
    dropouts = traced.dropouts
    if builder.has_dropout:  # of which the trace does not say where its probability is from
        dropouts += [name for name, value in _settings(module) if type(value) is float and value == 0]
    return None if formula is None else replace(formula, dropouts=tuple(dropouts))


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The module's attributes and those of its config, with their paths."""
    for name, value in vars(module).items():
        yield name, value
        if name == "config" and hasattr(value, "__dict__"):
            for key, setting in vars(value).items():
                yield f"{name}.{key}", setting


def trace_of(module: nn.Module, tracer: Tracer) -> list[fx.Node]:
    """The nodes of a trace of the module's forward in training, as far as it comes. The module does not change."""
    copy = copy_without_policy(module, training=True)
    try:
        with RngState().replayed():
            tracer.trace(copy)
    except Exception:
        # Any module's forward comes here, and may raise anything where it gets a proxy in place of a tensor.
        return list(tracer.graph.nodes) if hasattr(tracer, "graph") else []
    return list(tracer.graph.nodes)


class _Proxy(fx.Proxy):
    """Refuses to be changed in place: a trace cannot tell that from making a new value.

    Something may be added in place, of which a formula says more: see ``_FormulaBuilder``.
    """

    def _in_place(self, other: Any) -> Any:
        raise fx.proxy.TraceError("an operation in place")

    def __iadd__(self, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = __ifloordiv__ = __imod__ = _in_place


class Tracer(fx.Tracer):
    """Traces a module's own forward, in which submodules are calls. Those that do nothing are passed over.

    An autograd Function is a call of its class, whose backward no trace of its forward would tell.
    """

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[str] = []
        """The names of dropouts that were passed over."""

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with _functions_as_calls():
            return super().trace(root, concrete_args)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(m) is nn.Dropout and drops_nothing(m) and not kwargs:
            self.dropouts.append(self.path_of_module(m))
            return args[0]
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


_patching = threading.RLock()


@contextmanager
def _functions_as_calls() -> Iterator[None]:
    """Inside, to apply an autograd Function to a proxy is to make a proxy."""
    patched: Any = Function
    with _patching:
        apply = vars(Function)["apply"]

        def noted(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            proxy = next((each for each in tree_leaves((args, kwargs)) if isinstance(each, fx.Proxy)), None)
            if proxy is None:  # on another thread, for one
                return apply.__func__(cls, *args, **kwargs)
            return proxy.tracer.create_proxy("call_function", cls, args, kwargs)

        patched.apply = classmethod(noted)
        try:
            yield
        finally:
            patched.apply = apply


# The ops of the formulas that we look for. Any other function stands in a formula as itself, and matches nothing, not
# even if a user has given it the name of an op. The operands of sums and products are sorted.
_FUNCTIONS = {
    getattr: "getattr",
    operator.add: "add",
    operator.iadd: "iadd",
    operator.mul: "mul",
    operator.sub: "sub",
    operator.matmul: "matmul",
    operator.getitem: "getitem",
    operator.pow: "pow",
    torch.add: "add",
    torch.mul: "mul",
    torch.sub: "sub",
    torch.pow: "pow",
    torch.mean: "mean",
    torch.rsqrt: "rsqrt",
    torch.square: "square",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    torch.relu: "relu",
    torch.addmm: "addmm",
    torch.matmul: "matmul",
    F.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
}
_METHODS = {"to", "float", "type_as", "pow", "mean", "rsqrt", "mul", "add", "sub", "chunk", "view", "size"}


def _adds_to_what_a_module_gives(node: fx.Node) -> bool:
    """Whether a sum in place changes what a submodule gives, and nothing but the sum is read of it afterwards."""
    left = node.args[0]
    return isinstance(left, fx.Node) and left.op == "call_module" and set(left.users) == {node}


class _FormulaBuilder:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[float] = []
        self.inputs = 0
        self.has_dropout = False
        """Whether a call of ``torch.nn.functional.dropout`` was passed over."""

    def build(self, graph: fx.Graph) -> Formula | None:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "output":
                result, tree = node.args[0], None
                if isinstance(result, fx.Node):
                    tree = values[result]
                elif isinstance(result, tuple) and all(isinstance(each, fx.Node) for each in result):
                    tree = ("tuple", *[values[each] for each in result])
                return Formula(tree, tuple(self.names), tuple(self.numbers))
            if node.target is operator.iadd and not _adds_to_what_a_module_gives(node):
                return None
            values[node] = self._node(node, values)
        return None

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.target is F.dropout and len(node.args) == 1 and drops_nothing(node.kwargs.get("p")):
            self.has_dropout = True
            return values[node.args[0]]  # type: ignore[index]
        args = [self._argument(value, values) for value in node.args]
        keywords = {key: self._argument(value, values) for key, value in node.kwargs.items()}
        if node.op == "call_module":
            return ("module", self._index(str(node.target)), *args, *(("keyword", *item) for item in keywords.items()))
        args += keywords.values()
        match node.op:
            case "placeholder":
                self.inputs += 1
                return ("input", self.inputs - 1)
            case "get_attr":
                return ("attribute", self._index(str(node.target)))
            case "call_method":
                name = node.target if node.target in _METHODS else operator.methodcaller(str(node.target))
            case _:
                name = _FUNCTIONS.get(node.target, node.target)  # type: ignore[arg-type]
        match name, args:
            case "getattr", (value, "dtype"):
                return ("dtype", value)
            case "float", (value,):
                return ("to", value, torch.float32)
            case "type_as", (value, other):
                return ("to", value, ("dtype", other))
            case (("mul" | "add"), (left, right)):
                return (name, *sorted((left, right), key=repr))
            case (("silu" | "relu"), (value, in_place)):
                return (node.target, value) if in_place else (name, value)
        return (name, *args)

    def _argument(self, value: Any, values: dict[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, float):
            self.numbers.append(value)
            return ("number", len(self.numbers) - 1)
        return tuple(value) if isinstance(value, (list, tuple)) else value

    def _index(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1
