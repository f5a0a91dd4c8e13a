"""An activation and the Linear that reads it, computed by ``kernels.activation_linear``.

These are the second half of an MLP that is not gated. Where all of the MLP is in one module, ``feed_forward`` finds it.
Elsewhere its parts lie apart: in the forward of a decoder layer, as OPT's, BART's and Whisper's, or in two modules, as
BERT's and ESM's. There ``linear_reader`` finds the Linear that reads the activation. The activation returns a
``LazyActive``; so does a module that is a Linear and its activation, if that is an expression, as in ESM's. The Linear
that finds this as its input computes both, and only what the activation reads is held. Whatever else comes to read it
gets what the activation gives: so does a dropout that drops something.

ReLU is left alone: autograd holds nothing of it but its output, which the Linear behind it holds, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from recompute.compiled.captured_graph import Fusion
from recompute.compiled.guards import is_tracing
from recompute.compiled.runner import Forward, Runner
from recompute.engine.reachable_objects import base_of
from recompute.engine.saved_tensors import RegionStatistics
from recompute.kernels.activation_linear import activation_linear
from recompute.kernels.linears import autocasts
from recompute.substitution.feed_forward import ActiveLinear, find_activation, find_active_linear
from recompute.substitution.kernel_runner import PLAIN_TENSORS, KernelRunner, is_hooked, is_plain_linear, only_argument
from recompute.substitution.lazy_tensors import LazyTensor, mode_of
from recompute.substitution.linear_reader import LinearReader, dropout_gives_its_input, find_linear_reader
from recompute.substitution.norm import linear_operands
from recompute.substitution.settings import Settings


@dataclass
class KernelActivationLinearRunner(KernelRunner):
    activation: str
    settings: Settings
    """Of the activation."""
    reader: LinearReader
    behind: ActiveLinear | None = None
    """The Linear in the module whose output the activation reads; None: it reads the module's input."""

    @classmethod
    def for_module(
        cls, statistics: RegionStatistics, fallback: Runner | None, module: nn.Module, root: nn.Module
    ) -> KernelActivationLinearRunner | None:
        """The runner of ``module``, if that is an activation that a Linear in ``root`` alone reads.

        The module may be a Linear and the activation of that.
        """
        if is_hooked(module):
            return None
        if next(module.parameters(), next(module.children(), None)) is None:
            behind, activation = None, find_activation(module)
        else:
            behind = find_active_linear(module)
            activation = None if behind is None else behind.activation
        if activation is None or activation == "relu" or (reader := find_linear_reader(module, root)) is None:
            return None
        return cls(statistics, fallback, activation, Settings.of(module), reader, behind)

    def _what(self) -> str:
        return f"activation_linear ({self.activation}), with {self.reader.name}"

    def _is_as_found(self, module: nn.Module) -> bool:
        """Whether it may be deferred. What has taken the Linear's place may not take a lazy tensor."""
        return (
            not self.compresses  # of which the tape around knows more
            and not is_hooked(module)
            and (self.behind is None or is_plain_linear(module._modules.get(self.behind.linear)))
            and self.settings.are_those_of(module)
            and self.reader.is_as_found()
        )

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not self._is_as_found(module) or self.reader.has_backward_hooks():
            return forward(*args, **kwargs)
        x, activation, active_of = only_argument(args, kwargs), self.activation, forward
        if self.behind is not None:
            x = _child(module, self.behind.linear)(x)
            active_of = self.behind.activation_in(module).forward

        def with_linear(weight: Tensor, bias: Tensor | None) -> Tensor:
            def kernel(x: Tensor) -> Tensor:
                return activation_linear(x, weight, bias, activation)

            def as_written(x: Tensor) -> Tensor:
                return F.linear(active_of(x), weight, bias)

            return self.compute((base_of(module),), (x,), (weight, bias), kernel, as_written)

        return LazyActive.of(x, lambda: active_of(x), with_linear)

    def run_kernel_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)  # a compiler fuses what it can

    @property
    def fusion_around(self) -> Fusion:  # type: ignore[override]
        return FUSION

    def run_plain(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not torch.compiler.is_compiling():
            return super().run_plain(module, forward, args, kwargs)
        active = forward(*args, **kwargs)
        if not is_tracing() or not self._is_as_found(module):
            return active
        if self.fallback is not None and not self.is_where_kernels_are(args, kwargs):
            return active
        x = only_argument(args, kwargs)
        if self.behind is not None:
            x = _child(module, self.behind.linear)(x)  # a second time: ``FUSION`` erases one of both
        return activated(active, x, self.activation)


def _child(module: nn.Module, name: str) -> Any:
    return module._modules[name]


class LazyActive(LazyTensor):
    """``activation(x)``. A Linear that reads it is computed by one kernel with it."""

    _with_linear: Callable[[Tensor, Tensor | None], Tensor]

    @staticmethod
    def of(
        x: Tensor, compute: Callable[[], Tensor], with_linear: Callable[[Tensor, Tensor | None], Tensor]
    ) -> LazyActive:
        """with_linear: computes from a weight and a bias what the Linear with these gives."""
        made = LazyActive(tuple(x.shape), (x,), compute)
        made._with_linear = with_linear
        return made

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not args or args[0] is not self:
            return NotImplemented
        if function is F.dropout and dropout_gives_its_input(*args[1:], **kwargs):
            return self
        if function is not F.linear or mode_of(self.device) != self._mode:
            return NotImplemented
        weight, bias = linear_operands(*args[1:], **kwargs)
        dtypes = {each.dtype for each in (weight, bias) if each is not None}
        if type(weight) not in PLAIN_TENSORS or not (autocasts(self.device.type) or dtypes == {self.dtype}):
            return NotImplemented
        return self._with_linear(weight, bias)


def activated(active: Tensor, x: Tensor, activation: str) -> Tensor:
    """What an activation gives of ``x``, in the graph of a captured region, in which ``FUSION`` looks for Linears."""
    return active


def _fuse(graph: Graph) -> None:
    for node in [each for each in graph.nodes if each.op == "call_function" and each.target is activated]:
        active, x, activation = _operands(node)
        for reader in _readers(graph, node):
            weight, bias = linear_operands(*_operands(reader)[1:], **reader.kwargs)  # type: ignore[arg-type]
            reader.target, reader.args, reader.kwargs = activation_linear, (x, weight, bias, activation), {}
        node.replace_all_uses_with(active)
        graph.erase_node(node)
        erase_unused(graph, active, until=x)
        erase_unused(graph, x)


def _operands(node: Node) -> Any:
    return node.args


def _readers(graph: Graph, node: Node) -> list[Node]:
    """The Linears that read what a node gives. Dropouts of it that drop nothing are taken out of the graph."""
    found = []
    for user in list(node.users):
        if user.op != "call_function" or not user.args or user.args[0] is not node:
            continue
        if user.target is F.linear:
            found.append(user)
        elif user.target is F.dropout and dropout_gives_its_input(*_operands(user)[1:], **user.kwargs):  # type: ignore[arg-type]
            found += _readers(graph, user)
            user.replace_all_uses_with(node)
            graph.erase_node(user)
    return found


def erase_unused(graph: Graph, node: Node, *, until: Node | None = None) -> None:
    """Erase a node that nobody uses, and what it alone has used."""
    if node is until or node.users or node.op == "placeholder":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for each in inputs:
        erase_unused(graph, each, until=until)


FUSION = Fusion((activated,), _fuse)
"""Of activations with the Linears behind them."""
