"""SwiGLU and GEGLU: every activation and form, what backward regenerates, extreme values, dtypes and sizes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import glu_backward, glu_backward_, glu_forward
from kernel_testing import make
from mlp_testing import (
    activate,
    assert_no_worse_than_eager,
)
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import activation as activation_module
from recompute.kernels import swiglu as swiglu_module
from recompute.kernels.activation import GATE_ACTIVATIONS as ACTIVATIONS
from recompute.kernels.activation import GLU
from recompute.kernels.swiglu import geglu, swiglu

OPS: dict[str, Callable[..., Tensor]] = {
    "silu": swiglu,
    "gelu": functools.partial(geglu, approximate="none"),
    "gelu_tanh": geglu,
}
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def eager(activation: str, gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = (gate, up) if up is not None else gate.chunk(2, -1)
    return activate(gate, activation) * up


@each_dtype
@each_activation
@pytest.mark.parametrize("packed", [False, True])
def test_errors_are_no_larger_than_eagers(packed: bool, activation: str, dtype: torch.dtype, device: str):
    inputs = [3 * make(7, 514 if packed else 257, seed=seed, device=device, dtype=dtype) for seed in range(2 - packed)]
    for tensor in inputs:
        tensor.requires_grad_()
    assert_no_worse_than_eager(OPS[activation], functools.partial(eager, activation), inputs)


def unaligned(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


@each_dtype
@each_activation
@pytest.mark.parametrize("columns", [256, 257])
def test_backward_regenerates_the_products_own_bits(columns: int, activation: str, dtype: torch.dtype, device: str):
    packed = 4 * make(5, 2 * columns, device=device, dtype=dtype)
    dproduct = make(5, columns, device=device, dtype=dtype, seed=2)
    halves = packed.chunk(2, -1)
    forms = {
        "halves": halves,
        "apart": tuple(half.contiguous() for half in halves),
        "unaligned": tuple(map(unaligned, halves)),
        "packed": (packed, None),
    }
    product = glu_forward(*forms["apart"], activation)
    assert product.shape == (5, columns)
    expected = glu_backward(dproduct, *forms["apart"], activation, True, True, True)
    assert torch.equal(expected[2], product)
    for name, (gate, up) in forms.items():
        assert torch.equal(glu_forward(gate, up, activation), product), name
        dgate, dup, again = glu_backward(dproduct, gate, up, activation, True, True, True)
        assert torch.equal(again, product), name
        overwritten = dproduct.clone()
        given = torch.full_like(dgate, torch.nan), None if dup is None else torch.full_like(dup, torch.nan)
        glu_backward_(overwritten, gate, up, *given, activation)
        assert torch.equal(overwritten, product), name
        for gradients in ((dgate, dup), given):
            assert all(gradient is None or gradient.is_contiguous() for gradient in gradients)
            found = gradients if up is not None else gradients[0].chunk(2, -1)
            assert all(map(torch.equal, found, expected[:2])), name


@pytest.mark.parametrize("with_product", [False, True])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True), (False, False)])
def test_only_what_is_asked_for_is_made(needed: tuple[bool, bool], with_product: bool, device: str):
    gate, up, dproduct = (make(3, 65, device=device, seed=seed) for seed in range(3))
    everything = glu_backward(dproduct, gate, up, "gelu", True, True, True)
    found = glu_backward(dproduct, gate, up, "gelu", *needed, with_product)
    for value, expected, need in zip(found, everything, (*needed, with_product), strict=True):
        assert torch.equal(value, expected) if need else value is None
    given = [torch.full_like(gate, torch.nan) if need else None for need in needed]
    glu_backward_(overwritten := dproduct.clone(), gate, up, *given, "gelu")
    for value, expected in zip((*given, overwritten), everything, strict=True):
        assert value is None or torch.equal(value, expected)


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_a_frozen_half_costs_nothing_in_backward(
    trained: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch, device: str
):
    asked = []
    spy = GLU._replace(backward=lambda *a: asked.append(a[-3:]) or GLU.backward(*a))
    monkeypatch.setattr(swiglu_module, "GLU", spy)
    gate, up = (make(4, 6, seed=seed).to(device).requires_grad_(train) for seed, train in enumerate(trained))
    swiglu(gate, up).sum().backward()
    assert asked == [(*trained, False)]


def test_halves_are_read_where_they_are():
    t = make(2, 3, 40)
    for leading in (t, t[:, 1:2], t[1:], t[:1].expand(2, 3, 40)[:, 0]):
        gate, up = leading.chunk(2, -1)
        columns, gate_rows, gate_stride, up_rows, up_stride = activation_module._rows(gate, up)
        assert columns == 20
        assert (gate_rows.data_ptr(), up_rows.data_ptr()) == (gate.data_ptr(), up.data_ptr())
        rows = range(gate.numel() // columns)
        for found, stride, half in ((gate_rows, gate_stride, gate), (up_rows, up_stride, up)):
            addressed = torch.stack([found.as_strided((20,), (1,), found.storage_offset() + r * stride) for r in rows])
            assert torch.equal(addressed, half.reshape(-1, 20))


@pytest.mark.parametrize("change", [lambda t: t.mT, lambda t: t[..., ::2], lambda t: t.transpose(0, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_any_strides(change: Callable[[Tensor], Tensor], packed: bool, device: str):
    t = change(make(4, 6, 8, device=device))
    inputs = [t.detach().requires_grad_()] if packed else [h.detach().requires_grad_() for h in t.chunk(2, -1)]
    plain = [tensor.detach().contiguous().requires_grad_() for tensor in inputs]
    found, expected = swiglu(*inputs), swiglu(*plain)
    assert found.is_contiguous()
    assert torch.equal(found, expected)
    gradient = make(1, device=device).expand(found.shape)
    pairs = zip(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, plain, gradient), strict=True
    )
    assert all(torch.equal(value, truth) for value, truth in pairs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(0,), (2,), (14,), (2046,), (2048,), (2050,), (3, 0, 2), (2, 0), (2, 3, 5, 8)])
def test_any_shape(shape: tuple[int, ...], packed: bool, device: str):
    inputs = [make(*shape, device=device, seed=seed).requires_grad_() for seed in range(2 - packed)]
    product = swiglu(*inputs)
    dproduct = make(*product.shape, device=device, seed=2)
    gradients = torch.autograd.grad(product, inputs, dproduct)
    peers = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = eager("silu", *peers)
    wanted = torch.autograd.grad(expected, peers, dproduct.double())
    for value, truth in zip((product, *gradients), (expected, *wanted), strict=True):
        assert value.shape == truth.shape
        assert (value - truth).norm() <= 4 * 2**-24 * truth.norm()


INFINITY = float("inf")
EXTREMES = [0.0, -0.0, 1e-30, 60.0, -60.0, 88.0, -88.0, -104.0, 1e4, -1e4, INFINITY, -INFINITY, float("nan")]


@each_activation
def test_extreme_values_are_eagers(activation: str, device: str):
    values = [value for value in EXTREMES if activation != "gelu" or value != INFINITY]  # nan in PyTorch on some CPUs
    gate = torch.tensor(values, device=device).requires_grad_()
    up = torch.full_like(gate, 2.0).requires_grad_()
    product, expected = OPS[activation](gate, up), eager(activation, gate, up)
    found = torch.autograd.grad(product.sum(), (gate, up))
    wanted = torch.autograd.grad(expected.sum(), (gate, up))
    for value, truth in zip((product, *found), (expected, *wanted), strict=True):
        # exp's argument is rounded, so its result is off by up to |gate| roundings; and a device may flush to
        # zero what is below float32's normal numbers.
        torch.testing.assert_close(value, truth, rtol=104 * 2**-24, atol=104 * 2**-126, equal_nan=True)


@each_activation
def test_no_digits_are_lost_where_the_activation_saturates(activation: str, device: str):
    gate = torch.linspace(-9, 9, 181, device=device).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    found = torch.autograd.grad(OPS[activation](gate, up).sum(), (gate, up))
    peers = torch.autograd.grad(eager(activation, gate, up).sum(), (gate, up))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (gate, up)]
    exact = torch.autograd.grad(eager(activation, *doubles).sum(), doubles)
    for value, peer, truth in zip(found, peers, exact, strict=True):
        assert (value - truth).abs().max() <= max(4 * 2**-24 * truth.abs().max(), (peer - truth).abs().max())


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


def test_packed_is_saved_and_gets_its_gradient_as_one_tensor(device: str):
    packed = make(3, 4, 10, device=device).requires_grad_()
    product = swiglu(packed)
    saved = [tensor for tensor in product.grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    assert [tensor.data_ptr() for tensor in saved] == [packed.data_ptr()]
    (gradient,) = torch.autograd.grad(product.sum(), packed)
    assert gradient.is_contiguous()
    assert gradient.untyped_storage().nbytes() == packed.untyped_storage().nbytes()


@pytest.mark.parametrize("packed", [False, True])
def test_the_op_in_place_says_what_it_writes(packed: bool, device: str):
    gate, up = (make(4, 6, device=device, seed=seed) for seed in range(2))
    inputs = (torch.cat([gate, up], -1), None) if packed else (gate, up)
    given = [None if tensor is None else torch.zeros_like(tensor) for tensor in inputs]
    gate, up = inputs
    arguments = (make(4, 6, device=device, seed=2), gate, None, up, None, *given, 128, "silu")
    torch.library.opcheck(
        torch.ops.recompute.glu_backward_.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@each_activation
def test_gradients_of_gradients(activation: str):
    packed = make(3, 8).double().requires_grad_()
    assert torch.autograd.gradcheck(OPS[activation], packed)
    assert torch.autograd.gradgradcheck(OPS[activation], packed)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_more_than_2_to_the_31_elements(packed: bool):
    numel = 2**31 + 5
    shape = (2**20 + 1, 2**11) if packed else (numel,)
    inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2 - packed)]
    for seed, tensor in enumerate(inputs):
        tensor[-1:] = make(*tensor[-1:].shape, seed=seed)
    product = swiglu(*inputs)
    last = [tensor[-1:].clone() for tensor in inputs]
    assert torch.equal(product[-1:], swiglu(*last))
    gate, up = inputs if not packed else (inputs[0], None)
    gate_end, up_end = last if not packed else (last[0], None)
    found = glu_backward(product, gate, up, "silu", True, True, True)
    expected = glu_backward(product[-1:], gate_end, up_end, "silu", True, True, True)
    for value, truth in zip(found, expected, strict=True):
        assert value is None is truth or torch.equal(value[-1:], truth)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: swiglu(torch.ones(2, 3), torch.ones(3)), "swiglu: gate has shape (2, 3) and up (3,)"),
        (lambda: geglu(torch.ones(2), torch.ones(2, dtype=torch.int32)), "geglu: up is torch.int32"),
        (lambda: swiglu(torch.ones(2, device="meta"), torch.ones(2)), "gate is on meta and up on cpu"),
        (lambda: swiglu(torch.ones(2, 3)), "swiglu: gate has shape (2, 3); expected (..., 2 · I)"),
        (lambda: geglu(torch.tensor(1.0)), "geglu: gate has shape ()"),
        (lambda: geglu(torch.ones(2), torch.ones(2), "erf"), "unknown approximate 'erf'; expected 'tanh' or 'none'"),
    ],
)
def test_wrong_arguments_are_refused(function: Callable[[], Any], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        function()


def test_geglu_is_what_gelu_says_by_default():
    gate, up = make(9), make(9, seed=1)
    torch.testing.assert_close(geglu(gate, up), F.gelu(gate, approximate="tanh") * up)
    torch.testing.assert_close(geglu(gate, up, approximate="none"), F.gelu(gate) * up)


@pytest.mark.parametrize(
    "make_packed",
    [lambda: make(2, 5).t(), lambda: make(40).unfold(0, 8, 4), lambda: make(6, 8)[::2]],
    ids=["columns", "windows", "every second row"],
)
def test_packed_gradients_are_packed_however_the_halves_lie(make_packed: Callable[[], Tensor], device: str):
    packed = make_packed().to(device).requires_grad_()
    whole = packed.detach().contiguous().requires_grad_()
    gradients = [torch.autograd.grad(swiglu(each).square().sum(), each)[0] for each in (packed, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
