"""Activations fused with the product that follows them, by ``kernels.swiglu``.

These are the gates of MLPs that ``feed_forward`` does not know: with a dropout of the product, as T5's, a number that
scales the gate, as Falcon-H1's, or a clamp. And those of experts whose weights are stacked in one parameter: they run
their matrix products in plain Python, and only the activation is a module.

That module returns a ``LazyActivation``. A product that finds it among its factors becomes one kernel, which holds
neither the activation's output nor the product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from recompute.compiled.captured_graph import Fusion
from recompute.compiled.guards import is_tracing
from recompute.compiled.runner import Forward, Runner
from recompute.engine.reachable_objects import base_of
from recompute.engine.saved_tensors import RegionStatistics
from recompute.kernels.swiglu import ACTIVATIONS as GATE_ACTIVATIONS
from recompute.kernels.swiglu import APPROXIMATE, geglu, swiglu
from recompute.substitution.activation_and_linear import erase_unused
from recompute.substitution.feed_forward import find_activation
from recompute.substitution.kernel_runner import KernelRunner, is_hooked, only_argument
from recompute.substitution.layer_formula import LayerTracer
from recompute.substitution.lazy_tensors import PRODUCTS, LazyTensor, mode_of
from recompute.substitution.module_formula import trace_of
from recompute.substitution.settings import Settings


def has_stacked_experts(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


def _is_factor(module: nn.Module, parent: nn.Module) -> bool:
    """Whether ``parent`` multiplies what ``module`` gives by something else, and reads it nowhere else.

    Also if its trace ends with an error behind the product, as that of T5's MLP does.
    """
    names = [name for name, child in parent._modules.items() if child is module]
    calls = [node for node in trace_of(parent, LayerTracer(None)) if node.op == "call_module" and node.target in names]
    if len(calls) != 1 or len(calls[0].users) != 1:
        return False
    (product,) = calls[0].users
    others = [each for each in product.args if each is not calls[0]]
    return product.target in _PRODUCTS and len(others) == 1 and isinstance(others[0], Node)


@dataclass
class KernelActivationRunner(KernelRunner):
    activation: str
    settings: Settings
    """Of the activation."""
    is_experts: bool
    """Whether it is that of stacked experts."""

    @classmethod
    def for_module(
        cls, statistics: RegionStatistics, fallback: Runner | None, module: nn.Module, parent: nn.Module
    ) -> KernelActivationRunner | None:
        """The runner of ``module``, if that is an activation that ``parent`` multiplies by something."""
        if is_hooked(module) or any(module.children()):
            return None
        activation, is_experts = find_activation(module), has_stacked_experts(parent)
        if activation not in GATE_ACTIVATIONS or not (is_experts or _is_factor(module, parent)):
            return None
        return cls(statistics, fallback, activation, Settings.of(module), is_experts)

    def _is_as_found(self, module: nn.Module) -> bool:
        if self.compresses and not self.is_experts:  # a tape around knows more of what may be compressed
            return False
        return self.settings.are_those_of(module) and not is_hooked(module)

    def _what(self) -> str:
        return f"{self.activation}, fused with the product behind it"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not self._is_as_found(module):
            return forward(*args, **kwargs)
        gate = only_argument(args, kwargs)
        activation = self.activation

        def kernel(gate: Tensor, up: Tensor) -> Tensor:
            return gated(gate, up, activation)

        def as_written(gate: Tensor, up: Tensor) -> Tensor:
            return forward(gate) * up

        def product(gate: Tensor, up: Tensor) -> Tensor:
            return self.compute((base_of(module),), (gate, up), [], kernel, as_written)

        return LazyActivation.of(gate, lambda: forward(*args, **kwargs), product)

    @property
    def fusion_around(self) -> Fusion:  # type: ignore[override]
        return FUSION

    def run_kernel_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)  # a compiler fuses what it can

    def run_plain(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not torch.compiler.is_compiling():
            return super().run_plain(module, forward, args, kwargs)
        active = forward(*args, **kwargs)
        if not is_tracing() or not self._is_as_found(module):
            return active
        if self.fallback is not None and not self.is_where_kernels_are(args, kwargs):
            return active
        return activated(active, only_argument(args, kwargs), self.activation)


def activated(active: Tensor, gate: Tensor, activation: str) -> Tensor:
    """What an activation gives of ``gate``, in the graph of a captured region. ``FUSION`` looks for products behind."""
    return active


def _fuse(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not activated:
            continue
        active, gate, activation = node.args
        for product in list(node.users):
            if product.op != "call_function" or product.target not in _PRODUCTS or product.kwargs:
                continue
            (other,) = [factor for factor in product.args if factor is not node] or (None,)
            if isinstance(other, Node) and _is_like(other.meta["example_value"], gate.meta["example_value"]):
                product.target, product.args = gated, (gate, other, activation)
        _delay(graph, active, gate, node)
        node.replace_all_uses_with(active)
        graph.erase_node(node)
        erase_unused(graph, active, until=gate)


def _delay(graph: Graph, active: Node, gate: Node, node: Node) -> None:
    """Move what computes an activation to what reads ``node``, which is where a ``LazyActivation`` is computed."""
    reader = next((each for each in graph.nodes if each in node.users), None)
    pending, found = [active], {gate}
    while pending:
        each = pending.pop()
        if each not in found and each.op != "placeholder":
            found.add(each)
            pending += each.all_input_nodes
    for each in list(graph.nodes) if reader is not None else []:
        if each in found - {gate}:
            reader.prepend(each)  # type: ignore[union-attr]


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, by a kernel."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, APPROXIMATE[activation])


_PRODUCTS = frozenset({operator.mul, torch.mul, torch.multiply})
FUSION = Fusion((activated,), _fuse)
"""Of activations with the products behind them."""


class LazyActivation(LazyTensor):
    """``activation(gate)``. Multiplied by another tensor it becomes a gated linear unit, computed by one kernel."""

    _gate: Tensor
    _multiply: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def of(gate: Tensor, compute: Callable[[], Tensor], multiply: Callable[[Tensor, Tensor], Tensor]) -> LazyActivation:
        """multiply: computes ``activation(gate) * up`` from ``gate`` and ``up``."""
        made = LazyActivation(tuple(gate.shape), (gate,), compute)
        made._gate, made._multiply = gate, multiply
        return made

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function not in PRODUCTS or kwargs or len(args) != 2 or mode_of(self.device) != self._mode:
            return NotImplemented
        other = args[1] if args[0] is self else args[0]
        if not _is_like(other, self._gate):
            return NotImplemented
        return self._multiply(self._gate, other)


def _is_like(tensor: Any, other: Tensor) -> bool:
    return (
        isinstance(tensor, Tensor)
        and not isinstance(tensor, LazyTensor)
        and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
    )
