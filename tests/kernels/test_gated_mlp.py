"""The SwiGLU MLP: its matrix products counted, autocast, and where it equals eager to the bit."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from recompute.errors import KernelError
from recompute.kernels.gated_mlp import gated_mlp

B, S, H, I = 2, 5, 16, 24  # noqa: E741
GEMM_FLOPS = 2 * B * S * H * I


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_mlp(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    mlp = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=I, num_attention_heads=2))
    with torch.no_grad():
        for seed, weight in enumerate(mlp.parameters(), 1):
            weight.copy_(make(*weight.shape, seed=seed) / weight.shape[1] ** 0.5)
    return mlp.to(device, dtype)


def call(mlp: Any, x: Tensor) -> Tensor:
    return gated_mlp(x, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


def set_trained(mlp: nn.Module, x: Tensor, trained: tuple[bool, ...]) -> None:
    for tensor, train in zip((x, *mlp.parameters()), trained, strict=True):
        tensor.requires_grad_(train)


class Work(TorchDispatchMode):
    """Counts matrix products and our own ops, and these by how many tensors they give."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if function._opname in {"mm", "addmm", "bmm", "matmul"}:
            self.counts[function._opname] += 1
        elif function.namespace == "recompute":
            tensors = [results] if isinstance(results, Tensor) else results
            self.counts[f"{function._opname} of {sum(t is not None for t in tensors)}"] += 1
        return results


@pytest.mark.parametrize("trained", [t for t in itertools.product((False, True), repeat=4) if any(t)])
def test_backward_does_what_is_needed_and_no_more(trained: tuple[bool, ...], device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device)
    set_trained(mlp, x, trained)
    flops = []
    for function in (lambda: call(mlp, x), lambda: mlp(x)):
        with FlopCounterMode(display=False) as forward:
            y = function()
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        flops.append((forward.get_total_flops(), backward.get_total_flops()))

    x_trains, gate_trains, up_trains, down_trains = trained
    count = 2 * x_trains + gate_trains + up_trains + down_trains + any(trained[:3])
    assert flops == [(3 * GEMM_FLOPS, count * GEMM_FLOPS)] * 2

    y = call(mlp, x)
    with Work() as work:
        y.sum().backward()
    core = f"swiglu_backward of {2 + down_trains}" if any(trained[:3]) else "swiglu_forward of 1"
    assert work.counts == Counter({"mm": count - x_trains, "addmm": int(x_trains), core: 1})


@pytest.mark.parametrize("shape", [(H,), (0, H), (1, H), (B, S, H), (B, 1, S, H)])
def test_any_leading_dimensions(shape: tuple[int, ...], device: str):
    mlp, x = make_mlp(device).double(), make(*shape).to(device).double().requires_grad_()
    inputs = (x, *mlp.parameters())
    y, expected = call(mlp, x), mlp(x)
    dy = make(*shape, seed=9).to(y)
    found, wanted = torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    for value, truth in zip((y, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-13)


def test_on_cpu_in_float32_the_output_has_the_bits_of_hugging_faces():
    mlp, x = make_mlp("cpu"), make(B, S, H)
    assert torch.equal(call(mlp, x), mlp(x))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_eagers(x_dtype: torch.dtype, backward_inside: bool, device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device, x_dtype).requires_grad_()
    inputs = (x, *mlp.parameters())
    results = []
    for function in (lambda: call(mlp, x), lambda: mlp(x)):
        with torch.autocast(device, torch.bfloat16):
            y = function()
            dy = make(*y.shape, seed=9).to(y)
            if backward_inside:
                gradients = torch.autograd.grad(y, inputs, dy)
        if not backward_inside:
            gradients = torch.autograd.grad(y, inputs, dy)
        results.append([y, *gradients])

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    x64, gate, up, down = doubles
    y64 = F.linear(F.silu(F.linear(x64, gate)) * F.linear(x64, up), down)
    exact = [y64, *torch.autograd.grad(y64, doubles, dy.double())]
    for value, peer, truth in zip(*results, exact, strict=True):
        assert value.dtype is peer.dtype
        assert (value - truth).norm() <= 1.05 * (peer - truth).norm()


def test_matrix_products_under_autocast_run_in_its_dtype(device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = call(mlp, x)
    gate, up = y.grad_fn.saved_tensors[-2:]  # type: ignore[union-attr]
    assert (gate.dtype, up.dtype, y.dtype) == (torch.bfloat16,) * 3
    y.sum().backward()
    assert {weight.grad.dtype for weight in mlp.parameters()} == {torch.float32}  # type: ignore[union-attr]


def test_backward_under_autocast_of_a_forward_without(device: str):
    mlp, x = make_mlp(device), make(B, S, H).to(device).requires_grad_()
    inputs = (x, *mlp.parameters())
    for create_graph in (False, True):
        y = call(mlp, x)
        expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True, create_graph=create_graph)
        with torch.autocast(device, torch.bfloat16):
            found = torch.autograd.grad(y.sum(), inputs, create_graph=create_graph)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_float64_is_left_alone_by_autocast():
    mlp, x = make_mlp("cpu", torch.float64), make(B, S, H).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert call(mlp, x).dtype is mlp(x).dtype is torch.float64


SQUARE = torch.ones(3, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 4), SQUARE, SQUARE, SQUARE), "found x (2, 4), gate_weight (3, 3)"),
        ((SQUARE, SQUARE, torch.ones(2, 3), SQUARE), "up_weight (2, 3)"),
        ((SQUARE, SQUARE, SQUARE, torch.ones(3, 2)), "down_weight (3, 2)"),
        ((torch.tensor(1.0), SQUARE, SQUARE, SQUARE), "found x ()"),
        ((SQUARE, SQUARE, SQUARE, SQUARE[0]), "down_weight (3,)"),
        ((SQUARE.to("meta"), SQUARE, SQUARE, SQUARE), "x is on meta and gate_weight on cpu"),
        ((SQUARE.long(), SQUARE, SQUARE, SQUARE), "x is torch.int64"),
        ((SQUARE.half(), SQUARE, SQUARE, SQUARE), "x torch.float16, gate_weight torch.float32"),
        ((SQUARE, SQUARE, SQUARE, SQUARE, "gelu"), "unknown activation 'gelu'; expected silu"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        gated_mlp(*arguments)
