"""Under autocast an op holds its parameters, which are alive anyway, and casts them again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
from kernel_testing import make, relative_error, same_bits
from torch import Tensor, nn

from recompute.kernels.gated_mlp import gated_mlp
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.mlp import mlp

TOKENS, H, INNER, V = 6, 32, 48, 40
TARGET = torch.arange(TOKENS) % V

GATED = {
    "gate_weight": (INNER, H),
    "up_weight": (INNER, H),
    "down_weight": (H, INNER),
    "gate_bias": (INNER,),
    "up_bias": (INNER,),
    "down_bias": (H,),
}
UNGATED = {name: shape for name, shape in GATED.items() if "gate" not in name}
LINEAR = {"weight": (V, H), "bias": (V,)}


def of_linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear_cross_entropy(x, weight, TARGET.to(x.device), bias)


OPS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "gated_mlp": (gated_mlp, GATED),
    "gated_mlp by tiles": (partial(gated_mlp, tile=4), GATED),
    "mlp": (mlp, UNGATED),
    "mlp by tiles": (partial(mlp, tile=4), UNGATED),
    "linear_cross_entropy": (of_linear_cross_entropy, LINEAR),
}
"""Each op, as a function of x and of its parameters by name, and the shapes of these."""

each_op = pytest.mark.parametrize("op", OPS)


def make_inputs(op: str, device: str) -> list[Tensor]:
    shapes = ((TOKENS, H), *OPS[op][1].values())
    return [make(*shape, seed=seed, device=device).requires_grad_() for seed, shape in enumerate(shapes)]


def run(op: str, inputs: Sequence[Tensor], device: str) -> tuple[Tensor, list[Tensor]]:
    """The output under autocast, and the tensors that are saved for backward."""
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autocast(device, torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        function, shapes = OPS[op]
        return function(inputs[0], **dict(zip(shapes, inputs[1:], strict=True))), saved


@each_op
def test_no_copy_of_a_parameter_is_held(op: str, device: str) -> None:
    x, *parameters = make_inputs(op, device)
    _, saved = run(op, (x, *parameters), device)
    held = {tensor.data_ptr() for tensor in saved}
    weights = [parameter for parameter in parameters if parameter.dim() == 2]
    assert held.issuperset(weight.data_ptr() for weight in weights)
    shapes = {weight.shape for weight in weights}
    assert not [tensor for tensor in saved if tensor.dtype is torch.bfloat16 and tensor.shape in shapes]


@each_op
@pytest.mark.parametrize("trains", [True, False])
def test_of_what_is_made_in_forward_the_smaller_copy_is_held(op: str, trains: bool, device: str) -> None:
    x, *parameters = make_inputs(op, device)
    made = [2 * parameter.detach().requires_grad_(trains) for parameter in parameters]
    _, saved = run(op, (x, *made), device)
    shapes = {weight.shape for weight in parameters if weight.dim() == 2}
    assert {tensor.dtype for tensor in saved if tensor.shape in shapes} == {torch.bfloat16}


def of_parameters_and_of_copies(op: str, device: str) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The inputs and the output, where the op casts the parameters, and where they were cast outside."""
    for cast in (lambda tensor: tensor, lambda tensor: tensor.to(torch.bfloat16)):
        x, *parameters = inputs = make_inputs(op, device)
        y, _ = run(op, (x, *map(cast, parameters)), device)
        yield inputs, y


@each_op
def test_gradients_are_those_of_copies_made_outside_bit_for_bit(op: str, device: str) -> None:
    results = [
        [y, *torch.autograd.grad(y.float().square().sum(), inputs)]
        for inputs, y in of_parameters_and_of_copies(op, device)
    ]
    assert same_bits(*results)
    assert {gradient.dtype for gradient in results[0][1:]} == {torch.float32}


@each_op
def test_second_derivatives_are_those_of_copies_made_outside(op: str, device: str) -> None:
    results = []
    for inputs, y in of_parameters_and_of_copies(op, device):
        first = torch.autograd.grad(y.float().square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), inputs))
    for found, expected in zip(*results, strict=True):
        assert relative_error(found, expected) < 0.02  # sums over both of a weight's uses are rounded apart


@each_op
def test_frozen_parameters_get_no_gradient_and_no_copy_of_them_is_held(op: str, device: str) -> None:
    x, *parameters = make_inputs(op, device)
    frozen = [nn.Parameter(parameter.detach(), requires_grad=False) for parameter in parameters]
    y, saved = run(op, (x, *frozen), device)
    y.float().sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in frozen)
    shapes = {weight.shape for weight in parameters if weight.dim() == 2}
    assert not [tensor for tensor in saved if tensor.dtype is torch.bfloat16 and tensor.shape in shapes]
