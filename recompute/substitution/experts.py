"""Activations of stacked experts, fused with the product that follows them, by ``kernels.swiglu``.

Experts whose weights are stacked in one parameter run their matrix products in plain Python; only the activation is a
module. That module returns a ``LazyActivation``. A product that finds it among its factors becomes one kernel, which
holds neither the activation's output nor the product.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from recompute.compiled.captured_graph import Fusion
from recompute.compiled.guards import is_tracing
from recompute.compiled.runner import Forward
from recompute.engine.checkpoint.module_state import base_of
from recompute.kernels.swiglu import APPROXIMATE, geglu, swiglu
from recompute.substitution.kernel_runner import KernelRunner, only_argument
from recompute.substitution.lazy_tensors import PRODUCTS, LazyTensor
from recompute.substitution.settings import Settings


def has_stacked_experts(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


@dataclass
class KernelActivationRunner(KernelRunner):
    activation: str
    settings: Settings
    """Of the activation."""

    def _what(self) -> str:
        return f"{self.activation}, fused with the product behind it"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not self.settings.are_those_of(module):
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
        is_by_kernel = self.fallback is None or self.is_where_kernels_are(args, kwargs)
        if is_tracing() and is_by_kernel and self.settings.are_those_of(module):
            return activated(only_argument(args, kwargs), self.activation)
        return forward(*args, **kwargs)  # nothing is held for backward


def activated(gate: Tensor, activation: str) -> Tensor:
    """The activation in the graph of a captured region, in which ``FUSION`` looks for the product behind it."""
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate=APPROXIMATE[activation])


def _fuse(graph: Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not activated:
            continue
        gate, activation = node.args
        for product in list(node.users):
            if product.op != "call_function" or product.target not in _PRODUCTS or product.kwargs:
                continue
            (other,) = [factor for factor in product.args if factor is not node] or (None,)
            if isinstance(other, Node) and _is_like(other.meta["example_value"], gate.meta["example_value"]):
                product.target, product.args = gated, (gate, other, activation)
        if not node.users:
            graph.erase_node(node)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, by a kernel."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, APPROXIMATE[activation])


_PRODUCTS = frozenset({operator.mul, torch.mul, torch.multiply})
FUSION = Fusion((activated,), _fuse)
"""Of the activations of stacked experts with the products behind them."""


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
        if function not in PRODUCTS or kwargs or len(args) != 2:
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
