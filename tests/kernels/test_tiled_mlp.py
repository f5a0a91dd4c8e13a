"""Gated MLPs over some tokens at a time: the same outputs and gradients, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import make, relative_error
from mlp_testing import EPS, flops, make_weight
from torch import Tensor

from recompute.counters import step_memory
from recompute.errors import KernelError
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.residual_mlp import residual_mlp

TOKENS, H, I, TILE = 50, 48, 96, 16  # noqa: E741
GEMM_FLOPS = 2 * 2 * TOKENS * H * I
Operands = dict[str, Any]


def operands(device: str, dtype: torch.dtype = torch.float32, *, biases: bool = False) -> tuple[Tensor, Tensor, Any]:
    """x, residual, and the weights and biases by name."""
    x, residual = (make(2, TOKENS, H, seed=seed, device=device, dtype=dtype) for seed in (1, 2))
    weights = {"gate_weight": (I, H), "up_weight": (I, H), "down_weight": (H, I)}
    given = {
        name: make_weight(*shape, seed=seed, device=device, dtype=dtype)
        for seed, (name, shape) in enumerate(weights.items(), 3)
    }
    if biases:
        shapes = {"gate_bias": I, "up_bias": I, "down_bias": H}
        given |= {
            name: make(size, seed=seed, device=device, dtype=dtype)
            for seed, (name, size) in enumerate(shapes.items(), 6)
        }
    for tensor in (x, residual, *given.values()):
        tensor.requires_grad_()
    return x, residual, given


def the_mlp(x: Tensor, residual: Tensor, norm_weight: Tensor, given: Operands, tile: int | None) -> Tensor:
    return gated_mlp(x, **given, tile=tile)


def with_residual(x: Tensor, residual: Tensor, norm_weight: Tensor, given: Operands, tile: int | None) -> Tensor:
    return residual_mlp(x, residual, norm_weight, **given, eps=EPS, tile=tile)


each_form = pytest.mark.parametrize("form", [the_mlp, with_residual])


@each_form
@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_all_tokens_at_once(
    dtype: torch.dtype, biases: bool, form: Callable[..., Tensor], device: str
) -> None:
    x, residual, given = operands(device, dtype, biases=biases)
    norm_weight = make(H, seed=9, device=device, dtype=dtype).requires_grad_()
    inputs = [x, *given.values(), *([residual, norm_weight] if form is with_residual else [])]
    whole, tiled = (form(x, residual, norm_weight, given, tile) for tile in (None, TILE))
    dy = make(*whole.shape, seed=10, device=device, dtype=dtype)
    expected, found = (torch.autograd.grad(y, inputs, dy) for y in (whole, tiled))
    rounding = 4 * torch.finfo(dtype).eps
    assert relative_error(tiled, whole) <= rounding
    assert all(relative_error(one, other) <= rounding for one, other in zip(found, expected, strict=True))


@each_form
def test_gradients_of_every_order(form: Callable[..., Tensor]) -> None:
    x, residual, given = operands("cpu", torch.float64)
    x, residual = (tensor.detach()[:1, :3, :4].clone().requires_grad_() for tensor in (x, residual))
    norm_weight = make(4, seed=9, dtype=torch.float64).requires_grad_()
    small = {
        name: tensor.detach()[:2, :4].clone() if name != "down_weight" else tensor.detach()[:4, :2].clone()
        for name, tensor in given.items()
    }

    def function(x: Tensor, residual: Tensor, norm_weight: Tensor, *weights: Tensor) -> Tensor:
        return form(x, residual, norm_weight, dict(zip(small, weights, strict=True)), 2)

    inputs = [x, residual, norm_weight, *(tensor.requires_grad_() for tensor in small.values())]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("trained", ["x", "gate_weight", "down_weight"])
def test_what_is_frozen_gets_no_gradient(trained: str, device: str) -> None:
    x, _, given = operands(device)
    named = {"x": x, **given}
    for name, tensor in named.items():
        tensor.requires_grad_(name == trained)
    gated_mlp(x, **given, tile=TILE).sum().backward()
    assert [name for name, tensor in named.items() if tensor.grad is not None] == [trained]


def test_backward_runs_two_products_again_and_no_third(device: str) -> None:
    x, _, given = operands(device)
    inputs = [x, *given.values()]

    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gated_mlp(x, gate, up, down, tile=TILE)

    assert flops(function, inputs) == (3 * GEMM_FLOPS, (2 + 6) * GEMM_FLOPS)


@each_form
def test_only_the_input_is_held_and_no_intermediate_is_ever_whole(form: Callable[..., Tensor]) -> None:
    x, residual, given = operands("cpu")
    norm_weight = make(H, seed=9).requires_grad_()

    def measured(tile: int | None) -> Any:
        return step_memory(lambda: form(x, residual, norm_weight, given, tile).sum(), torch.device("cpu"))

    for tensor in (x, residual, norm_weight, *given.values()):
        tensor.grad = torch.zeros_like(tensor)
    whole, tiled = measured(None), measured(TILE)
    stream, intermediate = (2 * TOKENS * width * 4 for width in (H, I))
    held = stream if form is with_residual else 0  # the sum; x itself lives anyway
    assert tiled.activation_bytes_held == held + 4  # and the loss
    assert whole.activation_bytes_held - tiled.activation_bytes_held >= 2 * intermediate
    weights = 3 * H * I * 4
    assert (
        tiled.peak_bytes <= held + 3 * stream + 2 * weights + 6 * intermediate * TILE / (2 * TOKENS) + 4 * H * 4 + 1024
    )
    assert tiled.peak_bytes < whole.peak_bytes


@each_form
@pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])
@pytest.mark.parametrize("tile", [None, TILE])
def test_what_comes_out_may_be_changed_in_place(tile: int | None, biases: bool, form: Callable[..., Tensor]) -> None:
    x, residual, given = operands("cpu", biases=biases)
    norm_weight = make(H, seed=9).requires_grad_()
    inputs = [x, *given.values()]
    expected = torch.autograd.grad((form(x, residual, norm_weight, given, tile) * 2).sum(), inputs)
    y = form(x, residual, norm_weight, given, tile)
    y *= 2
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), inputs), expected))


def test_a_tile_of_no_tokens_is_refused(device: str) -> None:
    x, _, given = operands(device)
    with pytest.raises(KernelError, match="gated_mlp: tile is 0; expected at least 1 token, or None"):
        gated_mlp(x, **given, tile=0)
