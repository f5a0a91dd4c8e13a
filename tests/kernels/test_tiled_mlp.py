"""MLPs over some tokens at a time: the same outputs and gradients, in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import make, relative_error
from mlp_testing import flops, make_weight
from torch import Tensor

from recompute.counters import step_memory
from recompute.errors import KernelError
from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.mlp import mlp

TOKENS, H, I, TILE = 50, 48, 96, 16  # noqa: E741
GEMM_FLOPS = 2 * 2 * TOKENS * H * I
Form = Callable[..., Tensor]
each_form = pytest.mark.parametrize("form", [gated_mlp, mlp])
each_biases = pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])


def operands(
    form: Form, device: str = "cpu", dtype: torch.dtype = torch.float32, *, biases: bool = False, sizes: Any = (H, I)
) -> tuple[Tensor, dict[str, Tensor]]:
    """x, and the weights and biases by name."""
    h, i = sizes
    shapes: dict[str, tuple[int, ...]] = {"gate_weight": (i, h), "up_weight": (i, h), "down_weight": (h, i)}
    shapes |= {"gate_bias": (i,), "up_bias": (i,), "down_bias": (h,)} if biases else {}
    given = {
        name: (make_weight if len(shape) > 1 else make)(*shape, seed=seed, device=device, dtype=dtype).requires_grad_()
        for seed, (name, shape) in enumerate(shapes.items(), 3)
        if form is gated_mlp or "gate" not in name
    }
    return make(2, TOKENS, h, seed=1, device=device, dtype=dtype).requires_grad_(), given


@each_form
@each_biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_are_those_of_all_tokens_at_once(
    dtype: torch.dtype, biases: bool, form: Form, device: str
) -> None:
    x, given = operands(form, device, dtype, biases=biases)
    whole, tiled = (form(x, **given, tile=tile) for tile in (None, TILE))
    dy = make(*whole.shape, seed=10, device=device, dtype=dtype)
    expected, found = (torch.autograd.grad(y, [x, *given.values()], dy) for y in (whole, tiled))
    rounding = 4 * torch.finfo(dtype).eps
    assert relative_error(tiled, whole) <= rounding
    assert all(relative_error(one, other) <= rounding for one, other in zip(found, expected, strict=True))


@each_form
def test_gradients_of_every_order(form: Form) -> None:
    x, given = operands(form, dtype=torch.float64, sizes=(4, 2))
    x = x.detach()[:1, :3].clone().requires_grad_()

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        return form(x, **dict(zip(given, weights, strict=True)), tile=2)

    inputs = [x, *given.values()]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("trained", ["x", "gate_weight", "down_weight"])
def test_what_is_frozen_gets_no_gradient(trained: str, device: str) -> None:
    x, given = operands(gated_mlp, device)
    named = {"x": x, **given}
    for name, tensor in named.items():
        tensor.requires_grad_(name == trained)
    gated_mlp(x, **given, tile=TILE).sum().backward()
    assert [name for name, tensor in named.items() if tensor.grad is not None] == [trained]


def test_backward_runs_two_products_again_and_no_third(device: str) -> None:
    x, given = operands(gated_mlp, device)

    def function(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return gated_mlp(x, gate, up, down, tile=TILE)

    assert flops(function, [x, *given.values()]) == (3 * GEMM_FLOPS, (2 + 6) * GEMM_FLOPS)


@each_form
def test_only_the_input_is_held_and_no_intermediate_is_ever_whole(form: Form) -> None:
    x, given = operands(form)

    def measured(tile: int | None) -> Any:
        return step_memory(lambda: form(x, **given, tile=tile).sum(), torch.device("cpu"))

    for tensor in (x, *given.values()):
        tensor.grad = torch.zeros_like(tensor)
    whole, tiled = measured(None), measured(TILE)
    stream, intermediate = (2 * TOKENS * width * 4 for width in (H, I))
    assert tiled.activation_bytes_held == 4  # the loss: x itself lives anyway
    assert whole.activation_bytes_held - tiled.activation_bytes_held >= (len(given) - 1) * intermediate
    weights = len(given) * H * I * 4
    assert tiled.peak_bytes <= 3 * stream + 2 * weights + 6 * intermediate * TILE / (2 * TOKENS) + 4 * H * 4 + 1024
    assert tiled.peak_bytes < whole.peak_bytes


@each_form
@each_biases
@pytest.mark.parametrize("tile", [None, TILE])
def test_what_comes_out_may_be_changed_in_place(tile: int | None, biases: bool, form: Form) -> None:
    x, given = operands(form, biases=biases)
    inputs = [x, *given.values()]
    expected = torch.autograd.grad((form(x, **given, tile=tile) * 2).sum(), inputs)
    y = form(x, **given, tile=tile)
    y *= 2
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), inputs), expected))


@each_form
def test_a_tile_of_no_tokens_is_refused(form: Form, device: str) -> None:
    x, given = operands(form, device)
    with pytest.raises(KernelError, match="mlp: tile is 0; expected at least 1 token, or None"):
        form(x, **given, tile=0)
