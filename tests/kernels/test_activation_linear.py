"""A Linear that reads an activation: what is its own, beside what every op promises (``test_kernel_ops``)."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import make
from mlp_testing import EAGER_ACTIVATIONS, Work, assert_no_worse_than_eager, flops, make_weight
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import activation_linear as activation_linear_module
from recompute.kernels.activation import ACTIVATIONS
from recompute.kernels.activation_linear import activation_linear
from recompute.kernels.mlp import mlp

B, S, H, I, O = 2, 20, 24, 48, 40  # noqa: E741
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def make_inputs(device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = make(B, S, I), make_weight(O, I, seed=1), make(O, seed=2)
    return [each.to(device, dtype).requires_grad_() for each in made]


def ours(activation: str = "gelu") -> Callable[..., Tensor]:
    return lambda x, weight, bias: activation_linear(x, weight, bias, activation)


def eager(activation: str = "gelu") -> Callable[..., Tensor]:
    return lambda x, weight, bias: F.linear(EAGER_ACTIVATIONS[activation](x), weight, bias)


@each_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, activation: str, device: str) -> None:
    assert_no_worse_than_eager(ours(activation), eager(activation), make_inputs(device, dtype))


@each_activation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_and_this_have_the_bits_of_mlp(dtype: torch.dtype, activation: str, device: str) -> None:
    x, up, up_bias = make(B, S, H), make_weight(I, H, seed=3), make(I, seed=4)
    _, down, down_bias = make_inputs(device, dtype)
    x, up, up_bias = (each.to(device, dtype).requires_grad_() for each in (x, up, up_bias))
    inputs = (x, up, up_bias, down, down_bias)
    outcomes = []
    for y in (
        mlp(x, up, down, activation, up_bias=up_bias, down_bias=down_bias),
        activation_linear(F.linear(x, up, up_bias), down, down_bias, activation),
    ):
        outcomes.append((y, *torch.autograd.grad(y, inputs, make(B, S, O, seed=9).to(y))))
    assert all(map(torch.equal, *outcomes))


@each_activation
def test_gradients_of_every_order(activation: str) -> None:
    inputs = [make(*shape).double().requires_grad_() for shape in ((1, 3, 2), (3, 2), (3,))]
    assert torch.autograd.gradcheck(ours(activation), inputs)
    assert torch.autograd.gradgradcheck(ours(activation), inputs)


SUBSETS = [trained for trained in itertools.product((True, False), repeat=3) if any(trained)]


@pytest.mark.parametrize("trained", SUBSETS)
def test_backward_does_what_is_needed_and_no_more(trained: tuple[bool, ...], device: str) -> None:
    inputs = make_inputs(device)
    expected = torch.autograd.grad(ours()(*inputs).sum(), inputs)
    chosen = [each.detach().requires_grad_(trains) for each, trains in zip(inputs, trained, strict=True)]
    x_trains, weight_trains, _ = trained
    assert flops(ours(), chosen) == flops(eager(), chosen)
    for tensor in chosen:
        tensor.grad = None
    y = ours()(*chosen)
    with Work() as work:
        y.sum().backward()
    core = ("activation_backward_" if weight_trains else "activation_backward") if x_trains else "activation_forward"
    products = x_trains + weight_trains
    assert work.counts == (Counter({"mm": products, core: 1}) if products else Counter())
    for tensor, trains, gradient in zip(chosen, trained, expected, strict=True):
        assert torch.equal(tensor.grad, gradient) if trains else tensor.grad is None


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])  # the interpreter makes cycles
def test_its_input_is_freed_once_it_has_been_read(retain: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight, bias = make_inputs(device)
    leaf = make(B, S, I).to(device).requires_grad_()
    y = activation_linear(leaf * 1, weight, bias)
    node: Any = y.grad_fn
    storage = StorageWeakRef(node.saved_tensors[0].untyped_storage())
    dead = []
    gradients = activation_linear_module.linear_gradients

    def looking(*arguments: Any, **options: Any) -> Any:
        dead.append(storage.expired())
        return gradients(*arguments, **options)

    monkeypatch.setattr(activation_linear_module, "linear_gradients", looking)
    gc.disable()
    try:
        first = torch.autograd.grad(y.sum(), (leaf, weight, bias), retain_graph=retain)
    finally:
        gc.enable()
    assert dead == [not retain]
    if retain:
        assert all(map(torch.equal, first, torch.autograd.grad(y.sum(), (leaf, weight, bias))))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y.sum(), (leaf, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_computes_the_activation_in_the_inputs_dtype(dtype: torch.dtype, device: str) -> None:
    """And the matrix products in its own, as PyTorch does."""
    x, weight, bias = make_inputs(device)
    x = x.detach().to(dtype).requires_grad_()
    outcomes = []
    for function in (ours(), eager()):
        with torch.autocast(x.device.type, torch.bfloat16):
            y = function(x, weight, bias)
        gradients = torch.autograd.grad(y, (x, weight, bias), make(B, S, O, seed=9).to(y))
        outcomes.append((y, *gradients))
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).double().norm() <= 2**-7 * other.double().norm()


@pytest.mark.parametrize("shape", [(I,), (0, I), (1, I), (B, 1, S, I)])
def test_any_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    _, weight, bias = make_inputs(device, torch.float64)
    x = make(*shape).to(device).double().requires_grad_()
    dy = make(*shape[:-1], O, seed=9).to(device).double()
    outcomes = [torch.autograd.grad(each(x, weight, bias), (x, weight, bias), dy) for each in (ours(), eager())]
    for value, truth in zip(*outcomes, strict=True):
        torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, bias = make_inputs("cpu")
    with pytest.raises(KernelError, match="unknown activation 'tanh'"):
        activation_linear(x, weight, bias, "tanh")
    for operands in ((x[..., 1:], weight, bias), (x, weight[0], bias), (x, weight, bias[1:]), (x.sum(), weight, bias)):
        with pytest.raises(KernelError, match=r"expected x \(\.\.\., I\), weight \(O, I\) and bias \(O,\); found x"):
            activation_linear(*operands)
    with pytest.raises(KernelError, match="expected one dtype"):
        activation_linear(x, weight.half(), bias)
