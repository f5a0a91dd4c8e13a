"""What a module computes, read off its traced graph, so that a kernel can stand in whatever the class is called."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from recompute.engine.context import snapshot


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
    """The root-mean-square norm that ``module`` computes, if that is what it does."""
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
    """The gated MLP that ``module`` computes, if that is what it does: submodules and one product, nothing else."""
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


def is_silu(module: nn.Module) -> bool:
    """Whether ``module`` computes SiLU and leaves its input as it is."""
    traced = _trace(module)
    return traced is not None and traced.formula == ("silu", ("input", 0))


# fmt: off
_DRAWLESS = frozenset((
    "input", "attribute", "to", "dtype", "mul", "add", "sub", "truediv", "neg", "pow", "square", "mean", "rsqrt",
    "sqrt", "sigmoid", "silu", "relu", "gelu", "tanh", "layer_norm", "rms_norm",
))
# fmt: on


def draws_nothing(module: nn.Module) -> bool:
    """Whether ``module`` is known to draw no random number: it computes a formula of ops that don't."""
    traced = _trace(module)

    def is_drawless(value: Any) -> bool:
        return not isinstance(value, tuple) or not value or (value[0] in _DRAWLESS and all(map(is_drawless, value[1:])))

    return traced is not None and isinstance(traced.formula, tuple) and is_drawless(traced.formula)


@dataclass(frozen=True)
class _Traced:
    """A module's result as a nested tuple, in which numbers and attributes stand by position: names don't matter."""

    formula: Any
    names: tuple[str, ...]
    numbers: tuple[float, ...]


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def _trace(module: nn.Module) -> _Traced | None:
    """None where the module's forward is more than one expression of its argument, the same in training and not."""
    try:
        trained, evaluated = (_Formula().of(_Tracer().trace(_stand_in(module, mode))) for mode in (True, False))
    except _UNTRACEABLE:
        return None
    return trained if trained == evaluated else None


# What a forward that branches on values, checks shapes or unpacks its arguments raises when it is given a proxy.
_UNTRACEABLE = (
    fx.proxy.TraceError,
    AttributeError,
    NameError,
    TypeError,
    ValueError,
    RuntimeError,
    LookupError,
    AssertionError,
)


def _stand_in(module: nn.Module, training: bool) -> nn.Module:
    """Another instance with the same contents: a forward that assigns to ``self`` leaves proxies behind when traced."""
    stand_in = object.__new__(type(module))
    for name, value in vars(module).items():
        stand_in.__dict__[name] = snapshot(value)
    stand_in.training = training
    return stand_in


class _Formula:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.numbers: list[float] = []
        self.inputs = 0

    def of(self, graph: fx.Graph) -> _Traced | None:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "output":
                return _Traced(values.get(node.args[0]), tuple(self.names), tuple(self.numbers))
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
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
        match name, args:
            case "getattr", (value, "dtype"):
                return ("dtype", value)
            case "float", (value,):
                return ("to", value, torch.float32)
            case "type_as", (value, other):
                return ("to", value, ("dtype", other))
            case (("mul" | "add"), (left, right)):
                return (name, *sorted((left, right), key=repr))
            case "silu", (value, *rest) if not any(rest):
                return ("silu", value)
        return (name, *args)

    def _argument(self, value: Any, values: dict[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, float):
            self.numbers.append(value)
            return "number"
        return value

    def _index(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1
