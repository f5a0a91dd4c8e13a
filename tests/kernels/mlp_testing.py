"""What the tests of gated products, and of the ops with Linears in them, have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_testing import FLOAT32_ROUNDING, make, relative_error
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

EPS = 1e-6
EAGER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
}
Results = tuple[list[Tensor], list[Tensor | None]]
"""Outputs, and the gradients of inputs."""


def make_weight(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return (make(*shape, seed=seed) / shape[-1] ** 0.5).to(device, dtype)


def activate(gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(gate)
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def normalize(x: Tensor, weight: Tensor | None, casting: str = "llama") -> Tensor:
    """As Hugging Face's modules do."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    if casting == "llama":
        return n.to(x.dtype) if weight is None else weight * n.to(x.dtype)
    gain = 1.0 if weight is None else weight.to(wide.dtype) + (casting == "gemma")
    return (n * gain).to(x.dtype)


def listed(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def run(function: Callable[..., Any], inputs: Sequence[Tensor | None], dtype: torch.dtype | None = None) -> Results:
    """With leaves of the values and ``requires_grad`` of ``inputs``, and a gradient for each output."""
    leaves = [
        None if tensor is None else tensor.detach().to(dtype or tensor.dtype).requires_grad_(tensor.requires_grad)
        for tensor in inputs
    ]
    outputs = listed(function(*leaves))
    gradients = [make(*output.shape, seed=90 + index).to(output) for index, output in enumerate(outputs)]
    torch.autograd.backward(outputs, gradients)
    return outputs, [None if leaf is None else leaf.grad for leaf in leaves]


def assert_no_larger_error(value: Tensor, peer: Tensor, exact: Tensor, name: str = "output") -> None:
    """Eager's may be 1.05 times smaller.

    The error of n elements is a sample: the ratio of two of them strays from the true one by about 1 / sqrt(n).
    """
    assert (value.dtype, value.shape) == (peer.dtype, peer.shape)
    factor = 1.05 + 3 / max(value.numel(), 1) ** 0.5
    assert relative_error(value, exact) <= factor * relative_error(peer, exact) + FLOAT32_ROUNDING, name


def assert_no_worse_than_eager(
    op: Callable[..., Any], eager: Callable[..., Any], inputs: Sequence[Tensor | None]
) -> None:
    """Outputs and gradients are as near to float64's as eager's are."""
    ours, theirs, exact = run(op, inputs), run(eager, inputs), run(eager, inputs, torch.float64)
    for kind, mine, peers, truths in zip(("output", "gradient"), ours, theirs, exact, strict=True):
        for index, (value, peer, truth) in enumerate(zip(mine, peers, truths, strict=True)):
            if value is None or peer is None or truth is None:
                assert value is peer is truth
            else:
                assert_no_larger_error(value, peer, truth, f"{kind} {index}")


def flops(function: Callable[..., Any], inputs: Sequence[Tensor | None]) -> tuple[int, int]:
    """Of forward and of backward."""
    with FlopCounterMode(display=False) as forward:
        outputs = listed(function(*inputs))
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward([output.sum() for output in outputs if output.requires_grad])
    return forward.get_total_flops(), backward.get_total_flops()


class Work(TorchDispatchMode):
    """Counts matrix products and our own ops; of the latter it keeps arguments and results too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if function._opname in {"mm", "addmm", "bmm", "matmul"} or function.namespace == "recompute":
            self.counts[function._opname] += 1
        if function.namespace == "recompute":
            self.calls.append((function._opname, args, results))
        return results

    def results_of(self, name: str) -> Any:
        (results,) = (results for called, _, results in self.calls if called == name)
        return results

    def arguments_of(self, name: str) -> tuple[Any, ...]:
        (arguments,) = (arguments for called, arguments, _ in self.calls if called == name)
        return arguments


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None
