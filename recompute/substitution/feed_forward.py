"""MLPs: recognized by their formula, computed by ``kernels.gated_mlp`` and ``kernels.mlp``.

A gated one is ``down(activation(gate(x)) * up(x))``. The kernels save the outputs of gate and up, and neither the
activation nor the product. One that is not gated is ``down(activation(up(x)))``. Its kernels save the output of up. A
Linear may be ``torch.nn.Linear`` or any module with its formula, such as Hugging Face's Conv1D, whose weight lies
transposed. The activation may be a submodule, or an expression in forward.

Dropout is passed over where its probability is 0. Where it is more, an MLP that is not gated may have a dropout of its
output: the module itself drops then, as it does without a policy. An MLP with dropout elsewhere is not recognized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recompute.compiled.runner import Forward
from recompute.engine.reachable_objects import base_of
from recompute.kernels.activation import GATE_ACTIVATIONS
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.linears import autocasts
from recompute.kernels.mlp import mlp as ungated_mlp
from recompute.substitution.formula_writer import INPUT, Formula, add, mul
from recompute.substitution.formulas import Conditions, formula_of, takes_one_argument
from recompute.substitution.kernel_runner import PLAIN_TENSORS, KernelRunner, is_hooked, only_argument
from recompute.substitution.settings import ANY_SETTINGS, Settings


def _known_activations() -> dict[Formula, str]:
    """The activations that the kernels know, by the formulas of modules that compute them."""
    tanh = ("tanh", mul((2 / torch.pi) ** 0.5, add(INPUT, mul(0.044715, ("pow", INPUT, 3.0)))))
    # As Megatron and Bloom write it, and FastGELU.
    megatron = ("tanh", mul(mul(0.79788456, INPUT), add(1.0, mul(INPUT, mul(0.044715, INPUT)))))
    fast = ("tanh", mul(mul(INPUT, 0.7978845608), add(1.0, mul(mul(0.044715, INPUT), INPUT))))
    half, erf = mul(0.5, INPUT), ("erf", ("truediv", INPUT, 2**0.5))
    return {
        ("silu", INPUT): "silu",
        ("gelu", INPUT): "gelu",
        ("gelu", INPUT, "none"): "gelu",
        mul(half, add(1.0, erf)): "gelu",
        ("gelu", INPUT, "tanh"): "gelu_tanh",
        **{mul(half, add(1.0, each)): "gelu_tanh" for each in (tanh, megatron, fast)},
        mul(INPUT, ("sigmoid", mul(1.702, INPUT))): "quick_gelu",
        ("relu", INPUT): "relu",
        ("square", ("relu", INPUT)): "relu2",
    }


_ACTIVATIONS = _known_activations()


class _Linear(NamedTuple):
    """A Linear in a formula: the paths of its parameters."""

    weight: str
    bias: str | None
    is_transposed: bool = False
    """Whether the weight is (inputs, outputs), and not (outputs, inputs)."""
    is_torchs: bool = False
    """Whether it is a call of ``torch.nn.functional.linear``."""


def _linear(formula: Formula) -> tuple[_Linear, Formula] | None:
    """A Linear, and the formula of its input."""
    match formula:
        case ("linear", given, ("parameter", str(weight)), None):
            return _Linear(weight, None, is_torchs=True), given
        case ("linear", given, ("parameter", str(weight)), ("parameter", str(bias))):
            return _Linear(weight, bias, is_torchs=True), given
        case ("unflatten", ("addmm", ("parameter", str(bias)), ("flatten", given), ("parameter", str(weight)))):
            return _Linear(weight, bias, is_transposed=True), given
        case ("matmul", given, ("t", ("parameter", str(weight)))):
            return _Linear(weight, None), given
        case ("add", one, other):
            for product, summand in ((one, other), (other, one)):
                match _linear(product), summand:
                    case (_Linear(weight=weight, bias=None, is_torchs=False), given), ("parameter", str(bias)):
                        return _Linear(weight, bias), given
    return None


def _linear_of_input(formula: Formula) -> _Linear | None:
    found = _linear(formula)
    return found[0] if found is not None and found[1] == INPUT else None


def _activated(formula: Formula) -> tuple[str, Formula] | None:
    """An activation, and the formula of its input: a Linear's output, or one half of that."""
    for inner in _given_by_linears(formula):
        if (name := _ACTIVATIONS.get(_of_input(formula, inner))) is not None:
            return name, inner
    return None


def _given_by_linears(formula: Formula) -> Iterator[Formula]:
    half = isinstance(formula, tuple) and formula[:1] == ("getitem",)
    if half or _linear_of_input(formula) is not None:
        yield formula
    elif isinstance(formula, tuple):
        for part in formula:
            yield from _given_by_linears(part)


def _of_input(formula: Formula, inner: Formula) -> Formula:
    """``formula`` with the input in place of ``inner``. Other inputs become None, and so match nothing."""
    if formula == inner:
        return INPUT
    if not isinstance(formula, tuple):
        return formula
    if formula[:1] in (("input",), ("parameter",)):
        return None
    parts = [_of_input(part, inner) for part in formula]
    if parts[0] in ("add", "mul"):
        return (add if parts[0] == "add" else mul)(*parts[1:])
    return tuple(parts)


class _Parts(NamedTuple):
    """The Linears of an MLP. Where a gated one has no ``up``, gate computes both halves."""

    gate: _Linear | None
    up: _Linear | None
    down: _Linear
    activation: str


def _parts_of(formula: Formula) -> _Parts | None:
    found = _linear(formula)
    if found is None:
        return None
    down, hidden = found
    match hidden:
        case ("mul", one, other):
            for active, factor in ((one, other), (other, one)):
                if (gated := _gated(down, active, factor)) is not None:
                    return gated
    match _activated(hidden):
        case (str(activation), inner) if (up := _linear_of_input(inner)) is not None:
            return _Parts(None, up, down, activation)
    return None


def _gated(down: _Linear, active: Formula, factor: Formula) -> _Parts | None:
    match _activated(active), factor:
        case (str(name), ("getitem", chunks, 0.0)), ("getitem", others, 1.0) if chunks == others:
            match chunks:
                case ("chunk", both, 2.0, -1.0) if (gate := _linear_of_input(both)) is not None:
                    return _Parts(gate, None, down, name)
        case (str(name), inner), _:
            gate, up = _linear_of_input(inner), _linear_of_input(factor)
            if gate is not None and up is not None:
                return _Parts(gate, up, down, name)
    return None


@dataclass(frozen=True)
class KernelLinear:
    """A Linear that the kernels can compute, by its name in the MLP, and the class that it had when it was found."""

    name: str
    cls: type[nn.Module]
    weight: str
    bias: str | None
    is_transposed: bool
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    def operands(self, module: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias; None where ``module`` has changed, or has hooks or tensors of other classes."""
        if module is None or base_of(module) is not self.cls or is_hooked(module):
            return None
        weight, bias = getattr(module, self.weight), None if self.bias is None else getattr(module, self.bias)
        if type(weight) not in PLAIN_TENSORS or not (bias is None or type(bias) in PLAIN_TENSORS):
            return None
        return (weight.t() if self.is_transposed else weight, bias) if self.settings.are_those_of(module) else None


def _kernel_linear(linear: _Linear | None, module: nn.Module) -> KernelLinear | None:
    """The child of ``module`` that is this Linear; None if there is none, or the kernels may not replace it."""
    if linear is None:
        return None
    name, _, weight = linear.weight.rpartition(".")
    owner, _, bias = (linear.bias or f"{name}.").rpartition(".")
    child = module._modules.get(name)
    if child is None or owner != name or is_hooked(child):
        return None
    if base_of(child) is nn.Linear:  # forward may also use its weight by itself
        return KernelLinear(name, nn.Linear, "weight", "bias", is_transposed=False) if linear.is_torchs else None
    return KernelLinear(name, base_of(child), weight, bias or None, linear.is_transposed, Settings.of(child))


MLPOperands = tuple[tuple[Any, ...], dict[str, Any]]
"""Weights, and the biases by the names of the kernels' arguments. A gated MLP has the weights of gate, up and down,
where up's is None if gate computes both halves. Any other has those of up and down."""


@dataclass(frozen=True)
class KernelMLP:
    """An MLP that the kernels can compute, with the activation that it had when it was recognized."""

    linears: tuple[tuple[str, KernelLinear], ...]
    """Its Linears, with the names of their parts: ``gate``, ``up`` and ``down``."""
    activation: str
    dropout: str | None
    """The name of a dropout of the output, as GPT-2 has it; None: there is none, or it drops nothing."""
    others: tuple[tuple[str, nn.Module, Settings], ...]
    """The other submodules, such as the activation, and their settings."""
    settings: Settings

    @property
    def is_gated(self) -> bool:
        return self.linears[0][0] == "gate"

    def operands(self, mlp: nn.Module) -> MLPOperands | None:
        """The operands; None where a part has been replaced, has hooks, or computes something else now."""
        modules = mlp._modules
        for name, module, settings in self.others:
            if modules.get(name) is not module or is_hooked(module) or not settings.are_those_of(module):
                return None
        if not self.settings.are_those_of(mlp):
            return None
        weights, biases = {}, {}
        for part, linear in self.linears:
            operands = linear.operands(modules.get(linear.name))
            if operands is None:
                return None
            weights[part], biases[f"{part}_bias"] = operands
        if len({each.dtype for each in weights.values()}) > 1 and not autocasts(weights["down"].device.type):
            return None  # forward may cast in between, as T5's does
        if self.is_gated:
            return (weights["gate"], weights.get("up"), weights["down"]), biases
        return (weights["up"], weights["down"]), biases

    def drops(self, mlp: nn.Module) -> bool:
        """Whether the dropout of the output drops, so that its mask is held."""
        dropout: Any = None if self.dropout is None else mlp._modules[self.dropout]
        return dropout is not None and dropout.training and dropout.p > 0

    def kernel(
        self, mlp: nn.Module, operands: MLPOperands, *, compresses: bool, tile: int | None
    ) -> Callable[[Tensor], Tensor]:
        """The function that computes the MLP."""
        op: Callable[..., Tensor] = gated_mlp if self.is_gated else ungated_mlp
        weights, biases = operands
        dropout = None if self.dropout is None else mlp._modules[self.dropout]

        def compute(x: Tensor) -> Tensor:
            y = op(x, *weights, self.activation, **biases, compress=compresses, tile=tile)
            return y if dropout is None else dropout(y)

        return compute


def find_kernel_mlp(module: nn.Module) -> KernelMLP | None:
    """The MLP that ``module`` computes, if the kernels know its activation and its Linears."""
    children = module._modules.values()
    if not 2 <= len(children) <= 6 or any(child is None or any(child.children()) for child in children):
        return None
    if not takes_one_argument(module) or (formula := formula_of(module, Conditions())) is None:
        return None
    dropout, inner = _dropout_of(formula, module)
    parts = _parts_of(inner)
    if parts is None or formula_of(module, Conditions(rows=None)) != formula:
        return None
    if formula_of(module, Conditions(training=False, rows=(1, 1))) != inner:
        return None
    if parts.gate is not None and (parts.activation not in GATE_ACTIVATIONS or dropout is not None):
        return None
    wanted = {name: linear for name, linear in parts._asdict().items() if isinstance(linear, _Linear)}
    linears = [(name, found) for name, each in wanted.items() if (found := _kernel_linear(each, module)) is not None]
    if len(linears) < len(wanted):
        return None
    apart = {dropout, *(linear.name for _, linear in linears)}
    others = [(name, child) for name, child in module._modules.items() if child is not None and name not in apart]
    settings = tuple([(name, child, Settings.of(child)) for name, child in others])
    mlp = KernelMLP(tuple(linears), parts.activation, dropout, settings, Settings.of(module))
    return None if mlp.operands(module) is None else mlp


def _dropout_of(formula: Formula, module: nn.Module) -> tuple[str | None, Formula]:
    """The name of the dropout that ends ``module``, and the formula of its input."""
    match formula:
        case ("dropout", inner, p):
            those = [name for name, child in module._modules.items() if type(child) is nn.Dropout and child.p > 0]
            if len(those) == 1 and module.get_submodule(those[0]).p == p:
                return those[0], inner
    return None, formula


@dataclass
class KernelMLPRunner(KernelRunner):
    mlp: KernelMLP
    has_mlp = True

    @property
    def wants_tape(self) -> bool:  # type: ignore[override]
        return self.mlp.dropout is not None  # a tape drops its mask

    def _what(self) -> str:
        mlp, how = self.mlp, ""
        if self.tile is not None:
            how = f", {self.tile:,} tokens at a time"
        elif self.compresses:
            how = f", {'gate and up' if mlp.is_gated else f'what {mlp.linears[0][1].name} gives'} in 8 bits"
        return f"kernel: {'gated_mlp' if mlp.is_gated else 'mlp'} ({mlp.activation}){how}"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        operands = self.mlp.operands(module)
        if operands is None:
            return forward(*args, **kwargs)  # an adapter or a hook was added since the policy was applied
        kernel = self.mlp.kernel(module, operands, compresses=self.compresses, tile=self.tile)
        x, (weights, biases) = only_argument(args, kwargs), operands
        kind = base_of(module), self.mlp.activation, self.mlp.drops(module), self.compresses, self.tile
        return self.compute(kind, x, [*weights, *biases.values()], kernel, forward)
