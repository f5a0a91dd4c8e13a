"""Gated MLPs, ``down(activation(gate(x)) * up(x))``: recognized by their formula, computed by ``kernels.gated_mlp``.

The kernels hold what gate and up give, and neither the activation nor the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from recompute.compiled.runner import Forward
from recompute.engine.checkpoint.module_state import base_of
from recompute.substitution.kernel_runner import KernelRunner, is_hooked, is_plain_linear, only_argument
from recompute.substitution.module_formula import formula_of


@dataclass(frozen=True)
class GatedMLP:
    """The names of the submodules. Where ``up`` is None, ``gate`` gives both halves."""

    gate: str
    up: str | None
    down: str
    activation: str


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The gated MLP that ``module`` computes, if that is all it does."""
    formula = formula_of(module)
    if formula is None:
        return None
    match formula.tree:
        case ("module", int(down), ("mul", left, right)):
            pass
        case _:
            return None
    for factors in ((left, right), (right, left)):
        match factors:
            case (("module", int(act), ("module", int(gate), ("input", 0))), ("module", int(up), ("input", 0))):
                return GatedMLP(*(formula.names[index] for index in (gate, up, down, act)))
            case (("module", int(act), ("getitem", chunks, 0)), ("getitem", others, 1)) if chunks == others:
                match chunks:
                    case ("chunk", ("module", int(both), ("input", 0)), 2, -1):
                        return GatedMLP(formula.names[both], None, formula.names[down], formula.names[act])
    return None


def find_activation(module: nn.Module) -> str | None:
    """``silu``, ``gelu`` or ``gelu_tanh`` if ``module`` computes that, and not in place; else None."""
    formula = formula_of(module)
    match None if formula is None else formula.tree:
        case ("silu", ("input", 0)):
            return "silu"
        case ("gelu", ("input", 0)) | ("gelu", ("input", 0), "none"):
            return "gelu"
        case ("gelu", ("input", 0), "tanh"):
            return "gelu_tanh"
    return None


MLPOperands = tuple[tuple[Tensor, Tensor | None, Tensor], dict[str, Any]]
"""The weights of gate, up and down, and the biases by the names of the kernels' arguments."""


@dataclass(frozen=True)
class KernelMLP:
    """A gated MLP that the kernels can compute, with the activation module that it had when it was recognized."""

    parts: GatedMLP
    activation: str
    activation_module: nn.Module

    def operands(self, mlp: nn.Module) -> MLPOperands | None:
        """The operands; None where the Linears or the activation have been replaced, or have hooks."""
        parts, modules = self.parts, mlp._modules
        gate, up, down = modules[parts.gate], modules[parts.up] if parts.up else None, modules[parts.down]
        if modules[parts.activation] is not self.activation_module or is_hooked(self.activation_module):
            return None
        if not is_plain_linear(gate) or not is_plain_linear(down):
            return None
        if up is None:
            return (gate.weight, None, down.weight), {"gate_bias": gate.bias, "down_bias": down.bias}
        if not is_plain_linear(up):
            return None
        biases = {"gate_bias": gate.bias, "up_bias": up.bias, "down_bias": down.bias}
        return (gate.weight, up.weight, down.weight), biases


def find_kernel_mlp(module: nn.Module) -> KernelMLP | None:
    """The gated MLP that ``module`` computes, if the kernels know its activation and its Linears are plain."""
    children = module._modules.values()
    if not 3 <= len(children) <= 6 or any(child is None or any(child.children()) for child in children):
        return None
    parts = find_gated_mlp(module)
    activation = None if parts is None else module._modules[parts.activation]
    name = None if activation is None or is_hooked(activation) else find_activation(activation)
    if parts is None or activation is None or name is None:
        return None
    mlp = KernelMLP(parts, name, activation)
    return None if mlp.operands(module) is None else mlp


def how_it_holds(runner: KernelRunner) -> str:
    """For the note of a runner whose kernels compute a gated MLP."""
    if runner.tile is not None:
        return f", {runner.tile:,} tokens at a time"
    return ", gate and up in 8 bits" if runner.compresses else ""


@dataclass
class KernelMLPRunner(KernelRunner):
    mlp: KernelMLP

    def _what(self) -> str:
        return f"gated_mlp ({self.mlp.activation}){how_it_holds(self)}"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.gated_mlp import gated_mlp

        operands = self.mlp.operands(module)
        if operands is None:
            return forward(*args, **kwargs)  # an adapter or a hook was added since the policy was applied
        (weights, biases), activation = operands, self.mlp.activation

        def kernel(x: Tensor) -> Tensor:
            return gated_mlp(x, *weights, activation, **biases, compress=self.compresses, tile=self.tile)

        inputs = (only_argument(args, kwargs),)
        kind = base_of(module), activation, self.compresses, self.tile
        return self.compute(kind, inputs, [*weights, *biases.values()], kernel, forward)
