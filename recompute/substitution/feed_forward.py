"""MLPs: recognized by their formula, computed by ``kernels.gated_mlp`` and ``kernels.mlp``.

A gated one is ``down(activation(gate(x)) * up(x))``. The kernels hold what gate and up give, and neither the activation
nor the product. One that is not gated is ``down(activation(up(x)))``, of which they hold what up gives. A Linear may be
``torch.nn.Linear`` or any module with its formula, such as Hugging Face's Conv1D, whose weight lies transposed.

Dropout is passed over where its probability is 0. Where it is more, an MLP that is not gated may have a dropout of its
output: the module itself drops then, as it does without a policy. An MLP with dropout elsewhere is not recognized.

The activation may be a submodule, or an expression in forward, such as ``torch.nn.functional.silu(self.w1(x))``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from recompute.compiled.runner import Forward
from recompute.engine.reachable_objects import base_of
from recompute.kernels.activation import activation_reference
from recompute.kernels.swiglu import ACTIVATIONS as GATE_ACTIVATIONS
from recompute.substitution.careful_calls import careful
from recompute.substitution.kernel_runner import (
    PLAIN_TENSORS,
    KernelRunner,
    drop_nothing,
    is_hooked,
    is_plain_linear,
    only_argument,
)
from recompute.substitution.module_formula import Formula, copy_without_policy, formula_of
from recompute.substitution.settings import ANY_SETTINGS, Settings
from recompute.substitution.trial import computes_the_same


@dataclass(frozen=True)
class Activation:
    """The name of the submodule that is the activation, or else the name by which the kernels know it."""

    module: str | None = None
    known_as: str | None = None


@dataclass(frozen=True)
class GatedMLP:
    """The names of the submodules. Where ``up`` is None, ``gate`` gives both halves."""

    gate: str
    up: str | None
    down: str
    activation: Activation


@dataclass(frozen=True)
class UngatedMLP:
    """The names of the submodules."""

    up: str
    down: str
    activation: Activation
    dropout: str | None = None
    """A dropout of the output, as GPT-2 has it; None: there is none, or it drops nothing."""


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The gated MLP that ``module`` computes, if that is all it does."""
    formula = formula_of(module)
    return None if formula is None else _gated(formula)


def _gated(formula: Formula) -> GatedMLP | None:
    match formula.tree:
        case ("module", int(down), ("mul", left, right)):
            pass
        case _:
            return None
    for active, other in ((left, right), (right, left)):
        found = _activated(formula, active)
        match found, other:
            case (activation, ("module", int(gate), ("input", 0))), ("module", int(up), ("input", 0)):
                return GatedMLP(formula.names[gate], formula.names[up], formula.names[down], activation)
            case (activation, ("getitem", chunks, 0)), ("getitem", others, 1) if chunks == others:
                match chunks:
                    case ("chunk", ("module", int(both), ("input", 0)), 2, -1):
                        return GatedMLP(formula.names[both], None, formula.names[down], activation)
    return None


def _ungated(formula: Formula) -> UngatedMLP | None:
    ways: list[tuple[str | None, int, Any]] = []
    match formula.tree:
        case ("module", int(outer), given):
            ways.append((None, outer, given))
            match given:
                case ("module", int(down), active):  # what is around it may be a dropout
                    ways.append((formula.names[outer], down, active))
    for dropout, down, active in ways:
        match _activated(formula, active):
            case activation, ("module", int(up), ("input", 0)):
                return UngatedMLP(formula.names[up], formula.names[down], activation, dropout)
    return None


def _activated(formula: Formula, tree: Any) -> tuple[Activation, Any] | None:
    """An activation, and what it is given; None if ``tree`` is none of something that a submodule has given."""
    match tree:
        case ("module", int(index), inner) if inner != _X:
            return Activation(module=formula.names[index]), inner
    for inner in _given_by_modules(tree):
        name = _known_activation(replace(formula, tree=_of_input(tree, inner)))
        if name is not None:
            return Activation(known_as=name), inner
    return None


def _given_by_modules(tree: Any) -> Iterator[Any]:
    """What submodules give of the input, and halves of that, in the order in which a tree has them."""
    match tree:
        case ("module", int(), ("input", 0)) | ("getitem", ("chunk", ("module", int(), ("input", 0)), 2, -1), _):
            yield tree
        case tuple():
            for part in tree:
                yield from _given_by_modules(part)


def _of_input(tree: Any, inner: Any) -> Any:
    """``tree`` with the input in the place of ``inner``. It becomes None, which is nothing known, if it has others."""
    if tree == inner:
        return _X
    if not isinstance(tree, tuple):
        return tree
    return None if tree[:1] in (("input",), ("module",)) else tuple([_of_input(part, inner) for part in tree])


def find_activation(module: nn.Module) -> str | None:
    """The name by which ``kernels.mlp`` knows what ``module`` computes, if it knows it, and not in place; else None."""
    formula = formula_of(module)
    if formula is None:
        return None
    match formula.tree:
        case (type() as function, ("input", 0)) if issubclass(function, Function):
            found = formula_of(_ForwardOf(function))
            name = None if found is None else _known_activation(found)
        case _:
            name = _known_activation(formula)
    return name if name is not None and _is_activation(module, name) else None


def _known_activation(formula: Formula) -> str | None:
    tree = _with_values(formula.tree, formula.numbers)
    return next((name for name, known in _ACTIVATIONS if tree == known), None)


class _ForwardOf(nn.Module):
    """What an autograd Function computes, apart from its gradient."""

    def __init__(self, function: type[Function]):
        super().__init__()
        self.function = function
        self.context = _NoContext()

    def forward(self, x: Tensor) -> Any:
        return self.function.forward(self.context, x)


class _NoContext:
    def save_for_backward(self, *tensors: Any) -> None:
        pass


def _is_activation(module: nn.Module, name: str) -> bool:
    """Whether a module gives the values and the gradients of an activation. A trace does not tell of gradients."""
    copy = copy_without_policy(module, module.training)
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        near = torch.linspace(-12, 12, 999, dtype=torch.float64, device="cpu")
        x = torch.cat((near, 1e3 * near)).requires_grad_()
        dy = 10 ** torch.linspace(-3, 3, x.numel(), dtype=torch.float64, device="cpu") * torch.cos(7 * x.detach())
        y = activation_reference(x, name)
        (dx,) = torch.autograd.grad(y, x, dy)
        try:
            found = careful(base_of(module).forward)(copy, x)
            (gradient,) = torch.autograd.grad(found, x, dy)
        except Exception:
            # Any module comes here, and its forward or its backward may raise anything. Then it is not recognized.
            return False
        is_same = found.shape == gradient.shape == x.shape and x._version == 0
        return is_same and bool(
            ((gradient - dx).abs() <= 1e-7 * dy.abs()).all() and ((found - y).abs() <= 1e-7 * (1 + y.abs())).all()
        )


def _with_values(tree: Any, numbers: tuple[float, ...]) -> Any:
    """A tree in which numbers stand as they are, and integers as floating-point numbers."""
    match tree:
        case ("input", _):
            return tree
        case ("number", int(index)):
            return numbers[index]
        case (("mul" | "add") as name, left, right):
            return _sorted(name, *(_with_values(each, numbers) for each in (left, right)))
        case tuple():
            return tuple([_with_values(each, numbers) for each in tree])
    return float(tree) if type(tree) is int else tree


def _sorted(name: str, left: Any, right: Any) -> Any:
    return (name, *sorted((left, right), key=repr))


_X = ("input", 0)
_CUBIC = _sorted("add", _X, _sorted("mul", 0.044715, ("pow", _X, 3.0)))
_TANH = ("tanh", _sorted("mul", (2 / torch.pi) ** 0.5, _CUBIC))
_FACTOR = _sorted("add", 1.0, _sorted("mul", _X, _sorted("mul", 0.044715, _X)))
_MEGATRON_TANH = ("tanh", _sorted("mul", _sorted("mul", 0.79788456, _X), _FACTOR))  # as Megatron and Bloom write it
_FAST_FACTOR = _sorted("add", 1.0, _sorted("mul", _sorted("mul", 0.044715, _X), _X))
_FAST_TANH = ("tanh", _sorted("mul", _sorted("mul", _X, 0.7978845608), _FAST_FACTOR))
_ERF = ("erf", ("truediv", _X, 2**0.5))
_ACTIVATIONS: list[tuple[str, Any]] = [
    ("silu", ("silu", _X)),
    ("gelu", ("gelu", _X)),
    ("gelu", ("gelu", _X, "none")),
    ("gelu", _sorted("mul", _sorted("mul", 0.5, _X), _sorted("add", 1.0, _ERF))),  # written out, as ESM has it
    ("gelu_tanh", ("gelu", _X, "tanh")),
    ("gelu_tanh", _sorted("mul", _sorted("mul", 0.5, _X), _sorted("add", 1.0, _TANH))),  # NewGELU, written out
    ("gelu_tanh", _sorted("mul", _sorted("mul", 0.5, _X), _sorted("add", 1.0, _MEGATRON_TANH))),
    ("gelu_tanh", _sorted("mul", _sorted("mul", 0.5, _X), _sorted("add", 1.0, _FAST_TANH))),  # FastGELU
    ("quick_gelu", _sorted("mul", _X, ("sigmoid", _sorted("mul", 1.702, _X)))),
    ("relu", ("relu", _X)),
    ("relu2", ("square", ("relu", _X))),
    ("relu2", ("pow", ("relu", _X), 2.0)),
]
"""Names of activations, and what ``_with_values`` gives for modules that compute them."""


@dataclass(frozen=True)
class KernelLinear:
    """A Linear that the kernels can compute, and the class of the module that was recognized as one."""

    cls: type[nn.Module]
    weight: str
    bias: str | None
    is_transposed: bool
    """Whether the weight is (inputs, outputs), and not (outputs, inputs)."""
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    def operands(self, module: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias; None where ``module`` is another than it was, or has hooks or tensors of other classes."""
        if module is None or base_of(module) is not self.cls or is_hooked(module):
            return None
        weight, bias = getattr(module, self.weight), None if self.bias is None else getattr(module, self.bias)
        if type(weight) not in PLAIN_TENSORS or not (bias is None or type(bias) in PLAIN_TENSORS):
            return None
        return (weight.t() if self.is_transposed else weight, bias) if self.settings.are_those_of(module) else None


_PLAIN_LINEAR = KernelLinear(nn.Linear, "weight", "bias", is_transposed=False)


def find_linear(module: nn.Module | None) -> KernelLinear | None:
    """The Linear that ``module`` computes, if that is all it does."""
    if module is None or is_plain_linear(module):
        return None if module is None else _PLAIN_LINEAR
    formula = None if is_hooked(module) or any(module.children()) else formula_of(module)
    if formula is None:
        return None
    found: tuple[int, int | None, bool] | None = None
    shape_of_x = ("getitem", ("size", _X), slice(None, -1))
    match formula.tree:
        case ("view", ("addmm", ("attribute", int(bias)), ("view", x, -1, ("size", y, -1)), ("attribute", int(w))), to):
            if x == y == _X and to == _sorted("add", shape_of_x, getattr(module, formula.names[w]).shape[1:]):
                found = w, bias, True
        case ("matmul", x, ("getattr", ("attribute", int(w)), "T")) if x == _X:
            found = w, None, False
        case ("add", ("attribute", int(bias)), ("matmul", x, ("getattr", ("attribute", int(w)), "T"))) if x == _X:
            found = w, bias, False
    if found is None:
        return None
    weight, bias_index, is_transposed = found
    bias_name = None if bias_index is None else formula.names[bias_index]
    return KernelLinear(base_of(module), formula.names[weight], bias_name, is_transposed, Settings.of(module))


MLPOperands = tuple[tuple[Any, ...], dict[str, Any]]
"""Weights, and the biases by the names of the kernels' arguments. Of a gated MLP the weights are gate's, up's, which is
None where gate gives both halves, and down's; of another, up's and down's."""


@dataclass(frozen=True)
class KernelMLP:
    """An MLP that the kernels can compute, with the activation that it had when it was recognized."""

    parts: GatedMLP | UngatedMLP
    linears: tuple[tuple[str, str, KernelLinear], ...]
    """For each Linear the name of its part (``gate``, ``up`` or ``down``), of its module, and how it is computed."""
    activation: str
    activation_module: nn.Module | None
    """None: it is an expression in forward."""
    dropouts: tuple[str, ...]
    """The names of dropouts that drop nothing, or of attributes that are their probabilities."""
    settings: Settings
    activation_settings: Settings

    @property
    def is_gated(self) -> bool:
        return isinstance(self.parts, GatedMLP)

    def operands(self, mlp: nn.Module) -> MLPOperands | None:
        """The operands; None where the Linears or the activation have been replaced, have hooks, or dropout drops."""
        modules = mlp._modules
        if not self._has_its_activation(modules):
            return None
        if not drop_nothing(mlp, self.dropouts) or not self.settings.are_those_of(mlp):
            return None
        weights, biases = {}, {}
        for part, name, linear in self.linears:
            operands = linear.operands(modules[name])
            if operands is None:
                return None
            weights[part], biases[f"{part}_bias"] = operands
        if self.is_gated:
            weights.setdefault("up", None)  # type: ignore[arg-type]
            return (weights["gate"], weights["up"], weights["down"]), biases
        return (weights["up"], weights["down"]), biases

    def _has_its_activation(self, modules: dict[str, nn.Module | None]) -> bool:
        name, module = self.parts.activation.module, self.activation_module
        if name is None or module is None:
            return True
        return modules[name] is module and not is_hooked(module) and self.activation_settings.are_those_of(module)

    @property
    def dropout(self) -> str | None:
        """The name of the dropout of the output; None if there is none."""
        return self.parts.dropout if isinstance(self.parts, UngatedMLP) else None

    def drops(self, mlp: nn.Module) -> bool:
        """Whether the dropout of the output drops, so that its mask is held."""
        dropout: Any = None if self.dropout is None else mlp._modules[self.dropout]
        return dropout is not None and dropout.training and dropout.p > 0

    def kernel(
        self, mlp: nn.Module, operands: MLPOperands, *, compresses: bool, tile: int | None
    ) -> Callable[[Tensor], Tensor]:
        """What computes the MLP of a tensor."""
        from recompute.kernels.gated_mlp import gated_mlp
        from recompute.kernels.mlp import mlp as ungated_mlp

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
    formula = formula_of(module)
    parts = None if formula is None else _gated(formula) or _ungated(formula)
    if formula is None or parts is None:
        return None
    activation = None if parts.activation.module is None else module._modules[parts.activation.module]
    name = parts.activation.known_as
    if activation is not None:
        name = None if is_hooked(activation) else find_activation(activation)
    if name is None:
        return None
    if isinstance(parts, GatedMLP) and name not in GATE_ACTIVATIONS:
        return None
    if isinstance(parts, UngatedMLP) and parts.dropout and type(module._modules[parts.dropout]) is not nn.Dropout:
        return None
    names = {part: getattr(parts, part, None) for part in ("gate", "up", "down")}
    found = [(part, path, find_linear(module._modules.get(path))) for part, path in names.items() if path is not None]
    linears = tuple([(part, path, linear) for part, path, linear in found if linear is not None])
    if len(linears) < len(found):
        return None
    activation_settings = ANY_SETTINGS if activation is None else Settings.of(activation)
    mlp = KernelMLP(parts, linears, name, activation, formula.dropouts, Settings.of(module), activation_settings)
    operands = mlp.operands(module)
    if operands is None:
        return None
    compute = mlp.kernel(module, operands, compresses=False, tile=None)
    return mlp if computes_the_same(module, (parts, linears, name), compute, operands[0][0].shape[-1]) else None


def how_it_holds(runner: KernelRunner, mlp: KernelMLP) -> str:
    """For the note of a runner whose kernels compute an MLP."""
    if runner.tile is not None:
        return f", {runner.tile:,} tokens at a time"
    held = "gate and up" if mlp.is_gated else f"what {mlp.parts.up} gives"
    return f", {held} in 8 bits" if runner.compresses else ""


@dataclass
class KernelMLPRunner(KernelRunner):
    mlp: KernelMLP
    has_mlp = True

    @property
    def wants_tape(self) -> bool:  # type: ignore[override]
        return self.mlp.dropout is not None  # of which a tape drops the mask

    def _what(self) -> str:
        return f"{'gated_mlp' if self.mlp.is_gated else 'mlp'} ({self.mlp.activation}){how_it_holds(self, self.mlp)}"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        operands = self.mlp.operands(module)
        if operands is None:
            return forward(*args, **kwargs)  # an adapter or a hook was added since the policy was applied
        kernel = self.mlp.kernel(module, operands, compresses=self.compresses, tile=self.tile)
        inputs, (weights, biases) = (only_argument(args, kwargs),), operands
        kind = base_of(module), self.mlp.activation, self.mlp.drops(module), self.compresses, self.tile
        return self.compute(kind, inputs, [*weights, *biases.values()], kernel, forward)
