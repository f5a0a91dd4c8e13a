"""SwiGLU's elementwise core: the product that backward regenerates, extreme values, dtypes and sizes."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward


def make(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_regenerates_the_products_own_bits(dtype: torch.dtype, device: str):
    gate, up = (4 * make(40, 257, device=device, dtype=dtype, seed=seed) for seed in (0, 1))
    product = swiglu_forward(gate, up)
    dproduct = make(40, 257, device=device, dtype=dtype, seed=2)
    dgate, dup, again = swiglu_backward(dproduct, gate, up, True)
    assert torch.equal(again, product)
    without = swiglu_backward(dproduct, gate, up, False)
    assert torch.equal(without[0], dgate)
    assert torch.equal(without[1], dup)
    assert without[2] is None


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (1023,), (1024,), (1025,), (3, 0, 2), (2, 3, 5, 7)])
def test_any_shape(shape: tuple[int, ...], device: str):
    gate, up = (make(*shape, device=device, seed=seed).requires_grad_() for seed in (0, 1))
    product = swiglu(gate, up)
    dproduct = make(*shape, device=device, seed=2)
    dgate, dup = torch.autograd.grad(product, (gate, up), dproduct)
    peers = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    expected = F.silu(peers[0]) * peers[1]
    wanted = torch.autograd.grad(expected, peers, dproduct.double())
    for value, truth in zip((product, dgate, dup), (expected, *wanted), strict=True):
        assert value.shape == shape
        assert (value - truth).norm() <= 4 * 2**-24 * truth.norm()


def test_extreme_values_are_eagers(device: str):
    infinity = float("inf")
    values = [
        0.0,
        -0.0,
        1e-30,
        60.0,
        -60.0,
        88.0,
        -88.0,
        -104.0,
        1e4,
        -1e4,
        infinity,
        -infinity,
        float("nan"),
    ]
    gate = torch.tensor(values, device=device).requires_grad_()
    up = torch.full_like(gate, 2.0).requires_grad_()
    product, expected = swiglu(gate, up), F.silu(gate) * up
    found = torch.autograd.grad(product.sum(), (gate, up))
    wanted = torch.autograd.grad(expected.sum(), (gate, up))
    for value, truth in zip((product, *found), (expected, *wanted), strict=True):
        # exp's argument is rounded, so its result is off by up to |gate| roundings; and a device may flush to
        # zero what is below float32's normal numbers.
        torch.testing.assert_close(value, truth, rtol=104 * 2**-24, atol=104 * 2**-126, equal_nan=True)


@pytest.mark.parametrize(
    ("gate_dtype", "up_dtype", "expected"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
def test_mixed_dtypes_promote(gate_dtype: torch.dtype, up_dtype: torch.dtype, expected: torch.dtype, device: str):
    gate = make(5, 6, device=device, dtype=gate_dtype).requires_grad_()
    up = make(5, 6, device=device, dtype=up_dtype, seed=1).requires_grad_()
    product = swiglu(gate, up)
    assert product.dtype is expected
    product.sum().backward()
    assert gate.grad is not None
    assert gate.grad.dtype is gate_dtype
    assert up.grad is not None
    assert up.grad.dtype is up_dtype


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    numel = 2**31 + 5
    gate, up = (torch.empty(numel, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gate[-9:], up[-9:] = make(9, seed=0), make(9, seed=1)
    product = swiglu_forward(gate, up)
    assert torch.equal(product[-9:], swiglu_forward(gate[-9:], up[-9:]))
    dgate, dup, again = swiglu_backward(up, gate, up, True)
    expected = swiglu_backward(up[-9:], gate[-9:], up[-9:], True)
    for value, truth in zip((dgate, dup, again), expected, strict=True):
        assert torch.equal(value[-9:], truth)


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.ones(2, 3), torch.ones(3), "gate has shape (2, 3) and up (3,)"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), "up is torch.int32"),
        (torch.ones(2, device="meta"), torch.ones(2), "gate is on meta and up on cpu"),
    ],
)
def test_wrong_arguments_are_refused(gate: Tensor, up: Tensor, message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        swiglu(gate, up)
