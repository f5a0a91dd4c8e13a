"""Writes down what a module computes as a formula. Formulas can be compared whatever the modules' names are.

``torch.fx`` traces the module's forward. Submodules, attributes and floating-point numbers are numbered in the order in
which they are used, so that two modules that compute the same have equal formulas.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from recompute.compiled.autocast_settings import Autocast
from recompute.engine.checkpoint.arguments import snapshot
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.reachable_objects import base_of
from recompute.engine.rng import RngState
from recompute.substitution.formula_tracer import COMPARISONS, Tracer, drops_nothing
from recompute.substitution.settings import checkpoint_switch


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
    """The formula of ``module``; None unless forward is one expression of its one argument, the same everywhere.

    It is traced in training, and again in ``eval()`` without gradients and under autocast. Tracing does not change the
    module, whatever its forward does. Under ``tracing_once``, modules that are alike are traced once.

    Args:
        tracer: makes another tracer, as for forwards with other numbers of arguments.
    """
    if is_decorated(module) and getattr(vars(module).get(RUNNER), "runner", module) is not None:
        return None  # its forward runs a policy of its own
    known = _known.get()
    if known is None:
        return _formula_of(module, tracer)
    key = (*tracer.args, tracer.func) if isinstance(tracer, functools.partial) else tracer, _likeness(module)
    if key not in known:
        known[key] = _formula_of(module, tracer), module  # which stays, so that nothing else gets the id of its parts
    return known[key][0]


@contextmanager
def tracing_once() -> Iterator[None]:
    """Inside, nothing changes what modules compute: ``formula_of`` may trace one for all that are alike."""
    if _known.get() is not None:
        yield
        return
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


_known: ContextVar[dict[Hashable, tuple[Formula | None, nn.Module]] | None] = ContextVar("formulas", default=None)


def _likeness(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same: they have a class and all settings in common, and parts that are alike.

    Parameters and buffers are alike if their types, dtypes and shapes are. What is neither these nor a plain value has
    to be one object.
    """
    given = {name: value for name, value in vars(module).items() if name not in _PARTS}
    tensors = [
        (name, each is None or (type(each), each.dtype, None if is_lazy(each) else each.shape))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    ]
    parts = [(name, None if part is None else _likeness(part)) for name, part in module._modules.items()]
    return base_of(module), _value_likeness(given), tuple(tensors), tuple(parts)


_PARTS = ("_parameters", "_buffers", "_modules")
_PLAIN_VALUES = (bool, int, str, type(None), torch.dtype, torch.device)


def _value_likeness(value: Any) -> Hashable:
    if type(value) in _PLAIN_VALUES:
        return type(value), value
    if type(value) is float:
        return float, repr(value)  # 0.0 equals -0.0
    if type(value) in (list, tuple):
        return type(value), tuple([_value_likeness(each) for each in value])
    if type(value) is set:
        return set, frozenset(map(_value_likeness, value))
    if type(value) in (dict, OrderedDict):
        return type(value), tuple([(_value_likeness(key), _value_likeness(each)) for key, each in value.items()])
    return "one object", id(value)


def _formula_of(module: nn.Module, tracer: Callable[[], Tracer] | None) -> Formula | None:
    make = tracer or Tracer
    try:
        if make().takes_one_argument and len(inspect.signature(base_of(module).forward).parameters) != 2:
            return None
    except ValueError:  # a builtin has no signature
        return None
    trained = _traced(module, True, make)
    if trained is None:
        return None
    return trained if trained == _traced(module, False, make) else None


def is_decorated(module: nn.Module) -> bool:
    """Whether the class of ``module`` is decorated with a policy."""
    return hasattr(type(module), "_recompute_decorated")


def copy_without_policy(module: nn.Module, training: bool) -> nn.Module:
    """A module of the same class with the same attributes, which a trial may replace without changing ``module``.

    Its forward is not checkpointed, as a policy is inside of checkpoints.
    """
    copy = object.__new__(base_of(module))
    copy.__dict__.update(snapshot(vars(module)), training=training, **checkpoint_switch(module))
    if not is_decorated(module):
        copy.__dict__.pop(RUNNER, None)
    return copy


def _traced(module: nn.Module, training: bool, tracer: Callable[[], Tracer]) -> Formula | None:
    copy = copy_without_policy(module, training)
    traced = tracer()
    try:
        with RngState().replayed(), _surroundings_of(training):
            graph = traced.trace(copy)
    except Exception:
        # Any module's forward comes here, and may raise anything where it gets a proxy in place of a tensor. Then it
        # is not recognized.
        return None
    builder = _FormulaBuilder()
    formula = builder.build(graph)
    dropouts = traced.dropouts
    if builder.has_dropout:  # of which the trace does not say where its probability is from
        dropouts += [name for name, value in _settings(module) if type(value) is float and value == 0]
    return None if formula is None else replace(formula, dropouts=tuple(dropouts))


@contextmanager
def _surroundings_of(training: bool) -> Iterator[None]:
    """In training gradients are on and autocast is off, else the other way round: a forward may ask for either."""
    before = Autocast()
    try:
        with torch.set_grad_enabled(training):
            for device in ("cpu", "cuda"):
                torch.set_autocast_enabled(device, not training)
            torch.set_autocast_cache_enabled(False)
            yield
    finally:
        before.put()


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
    operator.truediv: "truediv",
    torch.add: "add",
    torch.mul: "mul",
    torch.sub: "sub",
    torch.pow: "pow",
    torch.mean: "mean",
    torch.rsqrt: "rsqrt",
    torch.square: "square",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    torch.erf: "erf",
    torch.relu: "relu",
    torch.addmm: "addmm",
    torch.matmul: "matmul",
    F.relu: "relu",
    F.silu: "silu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
}
_METHODS = {
    *("to", "float", "type_as", "pow", "mean", "rsqrt", "mul", "add", "sub", "chunk", "view", "size"),
    *("square", "sigmoid", "tanh", "relu"),
}
_PARAMETERS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "gelu": ("input", "approximate"),
    "silu": ("input", "inplace"),
    "relu": ("input", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "pow": ("input", "exponent"),
    "chunk": ("input", "chunks", "dim"),
    "to": ("input", "dtype"),
}
"""The parameters of ops that may be given by name, in order."""


def _in_order(name: Any, args: list[Any], keywords: dict[str, Any]) -> list[Any]:
    """The arguments of an op by position. Those that stay keywords match nothing."""
    order = _PARAMETERS.get(name, ())[len(args) :][: len(keywords)]
    if keywords.keys() == set(order):
        return [*args, *(keywords[each] for each in order)]
    return [*args, *(("keyword", *item) for item in keywords.items())]


def _is_all_read(graph: fx.Graph) -> bool:
    """Whether the result is made of all that is computed. What is not may change something in place, or note it."""
    (output,) = graph.find_nodes(op="output")
    read, pending = set(), [output]
    while pending:
        read.update(pending)
        pending = [each for node in pending for each in node.all_input_nodes if each not in read]
    return all(node in read or node.op in _INPUTS or node.target in _QUESTIONS for node in graph.nodes)


_INPUTS = {"placeholder", "get_attr"}
_QUESTIONS = {getattr, operator.getitem, "size", "dim", *COMPARISONS}
"""What changes nothing, even if nobody reads the answer: as one of the sizes in ``batch, length, width = x.shape``."""


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
        if not _is_all_read(graph):
            return None
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
        args = _in_order(name, args, keywords)
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
        if isinstance(value, (list, tuple)):
            return tuple([values[each] if isinstance(each, fx.Node) else each for each in value])
        return value

    def _index(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1
