"""Writes the graph that torch's frontend took of a forward as a formula."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

Formula = Any
"""A result as nested tuples: ``("mul", ("input",), ("parameter", "weight"))``. Each cast is written out, also where
torch promotes an operand. The operands of sums and products are in one order."""
INPUT = ("input",)

_NAMES: dict[Any, str] = {
    **{getattr(operator, name): name for name in ("add", "mul", "sub", "matmul", "getitem", "truediv", "pow")},
    **{getattr(torch, name): name for name in ("add", "mul", "sub", "matmul", "pow", "mean", "rsqrt", "square")},
    **{getattr(torch, name): name for name in ("sigmoid", "tanh", "erf", "relu", "addmm", "rms_norm")},
    torch.ops.aten.numpy_T: "t",
    **{getattr(F, name): name for name in ("relu", "silu", "gelu", "linear", "dropout", "layer_norm", "rms_norm")},
}
"""The ops of the formulas that we look for. Any other function stands in a formula as itself, and matches nothing."""
_METHODS = {"add", "mul", "sub", "matmul", "pow", "mean", "rsqrt", "square", "sigmoid", "tanh", "relu", "chunk", "view"}
_METHODS |= {"t", "addmm"}
_CASTS = {"to", "float", "half", "bfloat16", "double", "type_as"}
_PARAMETERS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "linear": ("input", "weight", "bias"),
    "dropout": ("input", "p", "training", "inplace"),
    "gelu": ("input", "approximate"),
    "silu": ("input", "inplace"),
    "relu": ("input", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "pow": ("input", "exponent"),
    "chunk": ("input", "chunks", "dim"),
    "sub": ("input", "other"),
    "to": ("input", "dtype"),
}
"""The parameters of ops that may be given by name, in order."""


def cast(formula: Formula, dtype: torch.dtype, to: torch.dtype) -> Formula:
    return formula if dtype is to else ("to", formula, to)


def add(left: Formula, right: Formula) -> Formula:
    return ("add", *sorted((left, right), key=repr))


def mul(left: Formula, right: Formula) -> Formula:
    return ("square", left) if left == right else ("mul", *sorted((left, right), key=repr))


def parameters_in(formula: Formula) -> list[str]:
    """The paths of the parameters in a formula, each once."""
    if not isinstance(formula, tuple):
        return []
    if formula[:1] == ("parameter",):
        return [formula[1]]
    return list(dict.fromkeys(name for part in formula for name in parameters_in(part)))


class FormulaWriter:
    """Writes the formula of a graph. The tensors that it is given are the module's own, or else its input."""

    def __init__(self, module: nn.Module, graph: fx.Graph, given: Sequence[Any]):
        self._graph = graph
        self._names = {id(each): ("parameter", name) for name, each in module.named_parameters()}
        self._names |= {id(each): ("buffer", name) for name, each in module.named_buffers()}
        self._given = iter(given)
        self._rows: tuple[str, ...] = ()
        """The input's shape, but for its width."""
        self._formulas: dict[fx.Node, Formula] = {}
        self._read: set[fx.Node] = set()

    def formula(self) -> Formula | None:
        """None if the graph returns anything but one tensor, or computes what nobody reads: that may have an effect."""
        for node in self._graph.nodes:
            if node.op == "output":
                result = node.args[0]
                is_one = isinstance(result, tuple) and len(result) == 1 and isinstance(result[0], fx.Node)
                computed = {each for each in self._formulas if each.op != "placeholder"} - self._read
                return self._formulas[result[0]] if is_one and computed <= {result[0]} else None
            self._read |= set(node.all_input_nodes)
            self._formulas[node] = self._of(node)
        return None

    def _of(self, node: fx.Node) -> Formula:
        if node.op == "placeholder":
            value = next(self._given)
            if not isinstance(value, Tensor) or id(value) in self._names:
                return self._names.get(id(value))
            self._rows = _shape(node)[:-1]
            return INPUT
        if node.op == "call_method":
            name = node.target if node.target in _METHODS | _CASTS else operator.methodcaller(str(node.target))
        else:
            name = _NAMES.get(node.target, node.target)  # type: ignore[arg-type]
        args = _in_order(name, list(node.args), dict(node.kwargs))
        if name in _CASTS:
            is_cast = len(args) == 1 + (name in ("to", "type_as"))
            if is_cast and (name != "to" or isinstance(args[1], (torch.dtype, fx.Node))):
                return cast(self._value(args[0]), _dtype(args[0]), _dtype(node))
        if name in ("add", "mul", "sub", "truediv") and len(args) == 2:
            left, right = (self._promoted(each, _dtype(node)) for each in args)
            return {"add": add, "mul": mul}[name](left, right) if name in ("add", "mul") else (name, left, right)
        values = [self._value(each) for each in args]
        match name, values:
            case builtins.getattr, [value, "T"]:
                return ("t", value)
            case "pow", [value, -0.5]:
                return ("rsqrt", value)
            case "pow", [value, 2.0]:
                return ("square", value)
            case "mean", [value, -1.0 | (-1.0,), True]:
                return ("mean", value)
            case "view", [value, *_]:
                shape, before = _shape(node), _shape(node.args[0])
                if shape[:-1] == self._rows:
                    return ("unflatten", value)
                return ("flatten", value) if len(shape) == 2 and shape[-1] == before[-1] else None
            case (("silu" | "relu"), [value, False]):
                return (name, value)
            case "dropout", [value, p, bool(training)] | [value, p, bool(training), False]:
                return ("dropout", value, p) if training and p else value
        return (name, *values)

    def _promoted(self, value: Any, dtype: torch.dtype) -> Formula:
        is_tensor = isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), Tensor)
        return cast(self._value(value), _dtype(value), dtype) if is_tensor else self._value(value)

    def _value(self, value: Any) -> Formula:
        if isinstance(value, fx.Node):
            return self._formulas[value]
        if isinstance(value, (list, tuple)):
            return tuple([self._value(each) for each in value])
        return float(value) if type(value) is int else value


def _dtype(node: Any) -> torch.dtype:
    return node.meta["example_value"].dtype


def _shape(node: Any) -> tuple[str, ...]:
    return tuple(map(str, node.meta["example_value"].shape))


def _in_order(name: Any, args: list[Any], keywords: dict[str, Any]) -> list[Any]:
    """The arguments of an op by position. Those that stay keywords match nothing."""
    order = _PARAMETERS.get(name, ())[len(args) :][: len(keywords)] if isinstance(name, str) else ()
    if keywords.keys() == set(order):
        return [*args, *(keywords[each] for each in order)]
    return [*args, *(("keyword", *item) for item in keywords.items())]
