"""Two LayerNorms of one x: both outputs and all gradients against eager's, and what is done in one pass."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_testing import FLOAT32_ROUNDING, each_dtype, make, relative_error, same_bits
from norm_testing import INTERPRETERS_ROUNDING
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels import launch, norm_kernels
from recompute.kernels.layer_norm import layer_norm, layer_norm_forward, layer_norm_regenerate
from recompute.kernels.twin_layer_norm import twin_layer_norm, twin_layer_norm_forward

EPS = 1e-5
Inputs = list[Any]
"""x, and weight and bias of each norm."""


def make_inputs(rows: int, hidden: int, device: str, dtype: torch.dtype = torch.float32) -> Inputs:
    x = make(rows, hidden, device=device, dtype=dtype)
    parameters = [make(hidden, device=device, dtype=dtype, seed=seed) for seed in range(1, 5)]
    return [each.requires_grad_() for each in (x, *parameters)]


def eager(x: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, other_y = (F.layer_norm(x, x.shape[-1:], *pair, EPS) for pair in (parameters[:2], parameters[2:]))
    return y, other_y, x.view_as(x)


def run(function: Any, inputs: Inputs, reached: tuple[bool, ...] = (True, True, True)) -> list[Tensor]:
    """All outputs and gradients. reached: the outputs that have a gradient."""
    outputs = function(*inputs)
    given = [make(*each.shape, seed=seed).to(each) for seed, each in enumerate(outputs, 5)]
    pairs = list(itertools.compress(zip(outputs, given, strict=True), reached))
    trained = [each for each in inputs if each is not None and each.requires_grad]
    reached_outputs, gradients = zip(*pairs, strict=True)
    found = torch.autograd.grad(reached_outputs, trained, gradients, allow_unused=True)
    return [*(each.detach() for each in outputs), *found]


@pytest.mark.parametrize("hidden", [48, 300])
@each_dtype
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, hidden: int, form: str, device: str) -> None:
    inputs = make_inputs(7, hidden, device, dtype)
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    is_interpreted = launch.uses_triton(inputs[0]) and not inputs[0].is_cuda
    slack = INTERPRETERS_ROUNDING if is_interpreted else FLOAT32_ROUNDING
    for value, peer, truth in zip(run(twin_layer_norm, inputs), run(eager, inputs), run(eager, doubles), strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, truth.shape)
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + slack


REACHED = [reached for reached in itertools.product((True, False), repeat=3) if any(reached[:2])]


@pytest.mark.parametrize("reached", REACHED, ids=str)
def test_outputs_without_a_gradient_count_as_zero(reached: tuple[bool, ...], device: str) -> None:
    inputs = make_inputs(5, 48, device)
    found, expected = run(twin_layer_norm, inputs, reached), run(eager, inputs, reached)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) is (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_only_the_stream_has_a_gradient(device: str) -> None:
    x, *parameters = make_inputs(5, 48, device)
    (gradient,) = torch.autograd.grad(twin_layer_norm(x, *parameters)[2], x, torch.ones_like(x))
    assert torch.equal(gradient, torch.ones_like(x))


@pytest.mark.parametrize("trains", [(True, *[False] * 4), (False, *[True] * 4), (True, False, True, True, False)])
def test_frozen_inputs_get_no_gradient(trains: tuple[bool, ...], form: str, device: str) -> None:
    inputs = make_inputs(5, 300, device)
    expected = run(twin_layer_norm, inputs)[3:]
    chosen = [each.detach().requires_grad_(train) for each, train in zip(inputs, trains, strict=True)]
    reached = (True, True, trains[0])
    found = iter(run(twin_layer_norm, chosen, reached)[3:])
    for train, gradient in zip(trains, expected, strict=True):
        if train:
            torch.testing.assert_close(next(found), gradient)


@each_dtype
def test_outputs_are_those_of_layer_norm_and_come_back(dtype: torch.dtype, form: str, device: str) -> None:
    x, *parameters = (each.detach() for each in make_inputs(5, 300, device, dtype))
    y, other_y, mean, rstd = twin_layer_norm_forward(x, *parameters, EPS)
    for found, pair in ((y, parameters[:2]), (other_y, parameters[2:])):
        assert torch.equal(found, layer_norm(x, *pair, EPS))
        assert torch.equal(found, layer_norm_regenerate(x, *pair, mean, rstd))
    assert same_bits((mean, rstd), layer_norm_forward(x, None, None, EPS)[1:])


def test_each_way_is_one_pass(device: str, launched: list[Any]) -> None:
    inputs = make_inputs(5, 48, device)
    run(twin_layer_norm, inputs)
    kernels = [norm_kernels._forward_kernel, norm_kernels._backward_kernel, *[norm_kernels._sum_kernel] * 2]
    assert [kernel for kernel, _ in launched] == (kernels if launch.uses_triton(inputs[0]) else [])


def test_without_parameters(device: str) -> None:
    x = make(6, 48, device=device).requires_grad_()
    inputs = [x, None, None, None, make(48, device=device, seed=1).requires_grad_()]
    for found, expected in zip(run(twin_layer_norm, inputs), run(eager, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_every_order() -> None:
    inputs = [make(*shape, seed=seed).double().requires_grad_() for seed, shape in enumerate(((3, 4), *[(4,)] * 4))]
    assert torch.autograd.gradcheck(twin_layer_norm, inputs)
    assert torch.autograd.gradgradcheck(twin_layer_norm, inputs)


def test_a_stream_of_heads_and_leading_dimensions(device: str) -> None:
    x = make(2, 3, 4, 16, device=device).transpose(1, 2).requires_grad_()
    inputs = [x, *(make(16, device=device, seed=seed).requires_grad_() for seed in range(1, 5))]
    for found, expected in zip(run(twin_layer_norm, inputs), run(eager, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
