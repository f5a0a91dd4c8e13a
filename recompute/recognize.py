"""What a module computes, read off its traced graph, so that a kernel can stand in whatever the class is called."""

from __future__ import annotations

import functools
import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from recompute.engine.context import RUNNER, base_of, fingerprint, snapshot
from recompute.engine.rng import RngState


@dataclass(frozen=True)
class Norm:
    """``rms_norm(x, weight, eps, casting)``; ``weight`` is the attribute's name, or None."""

    weight: str | None
    eps: float
    casting: str


@dataclass(frozen=True)
class GatedMLP:
    """``down(activation(gate(x)) * up(x))``, each the name of a submodule."""

    gate: str
    up: str
    down: str
    activation: str


def find_norm(module: nn.Module) -> Norm | None:
    """The root-mean-square norm that ``module`` computes, if that is all it does."""
    if type(module) is nn.RMSNorm:
        if len(module.normalized_shape) != 1 or module.eps is None:
            return None
        return Norm(None if module.weight is None else "weight", module.eps, "none")
    traced = _trace(module)
    if traced is None:
        return None
    for pattern, casting in _norm_patterns():
        if traced.formula == pattern.formula:
            numbers = dict(zip(pattern.numbers, traced.numbers, strict=True))
            eps = numbers.pop(_EPS)
            if all(expected == found for expected, found in numbers.items()):
                return Norm(traced.names[0] if traced.names else None, eps, casting)
    return None


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The gated MLP that ``module`` computes, if that is all it does: four submodules and one product."""
    traced = _trace(module)
    if traced is None:
        return None
    match traced.formula:
        case ("module", int(down), ("mul", left, right)):
            pass
        case _:
            return None
    for factors in ((left, right), (right, left)):
        match factors:
            case (("module", int(act), ("module", int(gate), ("input", 0))), ("module", int(up), ("input", 0))):
                return GatedMLP(*(traced.names[index] for index in (gate, up, down, act)))
    return None


def is_silu(module: nn.Module) -> bool:
    """Whether ``module`` computes SiLU, and leaves its input as it is."""
    traced = _trace(module)
    return traced is not None and traced.formula == ("silu", ("input", 0))


_EPS = 0.1234567  # stands for any epsilon in the patterns


class _Llama(nn.Module):
    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + _EPS)
        return hidden.to(x.dtype) if self.weight is None else self.weight * hidden.to(x.dtype)


class _Gemma(_Llama):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        return hidden.type_as(x) if self.weight is None else (hidden * (1.0 + self.weight.float())).type_as(x)


@functools.cache
def _norm_patterns() -> tuple[tuple[_Traced, str], ...]:
    modules = [(_Llama(True), "llama"), (_Gemma(True), "gemma"), (_Llama(False), "llama")]
    return tuple((traced, casting) for module, casting in modules if (traced := _trace(module)) is not None)


@dataclass(frozen=True)
class _Traced:
    """A module's result as a nested tuple, in which numbers and attributes stand by position: names don't matter."""

    formula: Any
    names: tuple[str, ...]
    numbers: tuple[float, ...]


def _trace(module: nn.Module) -> _Traced | None:
    """None where the module's forward is more than one expression of its one argument, the same in training and not.

    Nothing of the module is changed, whatever its forward does.
    """
    try:
        if len(inspect.signature(base_of(module).forward).parameters) != 2:
            return None
    except ValueError:  # a builtin's
        return None
    trained, evaluated = (_trace_once(module, training) for training in (True, False))
    return trained if trained == evaluated else None


def _trace_once(module: nn.Module, training: bool) -> _Traced | None:
    stand_in = object.__new__(base_of(module))
    stand_in.__dict__.update(snapshot(vars(module)), training=training)
    stand_in.__dict__.pop(RUNNER, None)
    before = fingerprint(vars(stand_in))
    try:
        with RngState().replayed():
            graph = _Tracer().trace(stand_in)
    except Exception:
        # Any forward may be asked, and may raise anything at a proxy that it takes for a tensor: it is not recognized.
        return None
    if fingerprint(vars(stand_in)) != before:
        return None  # it notes something on itself, which what stands in for it would not
    return _Formula().of(graph)


class _Proxy(fx.Proxy):
    """Refuses to be changed in place, which a trace would take for a new value."""

    def _in_place(self, other: Any) -> Any:
        raise fx.proxy.TraceError("an operation in place")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = __ifloordiv__ = __imod__ = _in_place


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


# By identity, as a function of the user's may bear an op's name. None of these draws or changes anything.
_FUNCTIONS = {
    getattr: "getattr",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.neg: "neg",
    operator.pow: "pow",
    torch.add: "add",
    torch.mul: "mul",
    torch.pow: "pow",
    torch.mean: "mean",
    torch.rsqrt: "rsqrt",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
    F.silu: "silu",
    F.relu: "relu",
    F.gelu: "gelu",
    F.layer_norm: "layer_norm",
    F.rms_norm: "rms_norm",
}
_METHODS = {"to", "float", "type_as", "pow", "mean", "rsqrt", "mul", "add", "sub", "sigmoid", "tanh"}


class _Formula:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[float] = []
        self.inputs = 0

    def of(self, graph: fx.Graph) -> _Traced | None:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "output":
                result = node.args[0]
                formula = values[result] if isinstance(result, fx.Node) else None
                return _Traced(formula, tuple(self.names), tuple(self.numbers))
            values[node] = self._node(node, values)
        return None

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args = [self._argument(value, values) for value in (*node.args, *node.kwargs.values())]
        match node.op:
            case "placeholder":
                self.inputs += 1
                return ("input", self.inputs - 1)
            case "get_attr":
                return ("attribute", self._index(str(node.target)))
            case "call_module":
                return ("module", self._index(str(node.target)), *args)
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
            case (("silu" | "relu"), (value, *rest)):
                return (node.target, value) if any(rest) else (name, value)  # in place, or not
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
