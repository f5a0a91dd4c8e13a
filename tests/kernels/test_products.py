"""Activations, and SwiGLU and GEGLU: what backward makes on request, of values and of codes, and extreme values."""

import functools
import itertools
import math

import hypothesis
import pytest
import torch
from cases import eager_glu
from hypothesis import given
from hypothesis import strategies as st
from kernel_testing import DTYPES, EAGER_ACTIVATIONS, LAYOUTS, Work, doubled, each_dtype, make, run, same_bits

from recompute.kernels import activation as module
from recompute.kernels import launch
from recompute.kernels import swiglu as swiglu_module
from recompute.kernels.activation import ACTIVATION, ACTIVATIONS, GATE_ACTIVATIONS, GLU
from recompute.kernels.blockwise_8bit import FORMATS, dequantize_blockwise, quantize_blockwise
from recompute.kernels.swiglu import geglu, glu_backward_from_codes, swiglu

BLOCK = 32
each_activation = pytest.mark.parametrize("activation", GATE_ACTIVATIONS)
packed_or_not = pytest.mark.parametrize("packed", [False, True])


def backward(dproduct, gate, up, activation, *needs):
    return GLU.backward(dproduct, gate, None, up, None, 0, activation, *needs)


def backward_(dproduct, gate, up, dgate, dup, activation):
    GLU.backward_(dproduct, gate, None, up, None, dgate, dup, 0, activation)


def assert_same(found, expected):
    for value, truth in zip(found, expected, strict=True):
        assert value is None is truth or (value.dtype is truth.dtype and torch.equal(value, truth))


@each_dtype
@each_activation
@pytest.mark.parametrize("columns", [256, 257])
def test_backward_regenerates_the_products_own_bits(columns, activation, dtype, device):
    packed = 4 * make(5, 2 * columns, device=device, dtype=dtype)
    dproduct = make(5, columns, device=device, dtype=dtype, seed=2)
    halves = packed.chunk(2, -1)
    forms = {
        "halves": halves,
        "apart": tuple(half.contiguous() for half in halves),
        "unaligned": tuple(map(LAYOUTS["unaligned"], halves)),
        "packed": (packed, None),
    }
    product = GLU.forward(*forms["apart"], activation)
    assert product.shape == (5, columns)
    expected = backward(dproduct, *forms["apart"], activation, True, True, True)
    assert torch.equal(expected[2], product)
    for name, (gate, up) in forms.items():
        assert torch.equal(GLU.forward(gate, up, activation), product), name
        dgate, dup, again = backward(dproduct, gate, up, activation, True, True, True)
        assert torch.equal(again, product), name
        overwritten = dproduct.clone()
        given = torch.full_like(dgate, torch.nan), None if dup is None else torch.full_like(dup, torch.nan)
        backward_(overwritten, gate, up, *given, activation)
        assert torch.equal(overwritten, product), name
        for gradients in ((dgate, dup), given):
            assert all(gradient is None or gradient.is_contiguous() for gradient in gradients)
            found = gradients if up is not None else gradients[0].chunk(2, -1)
            assert all(map(torch.equal, found, expected[:2])), name


@pytest.mark.parametrize("needed", list(itertools.product((False, True), repeat=3)), ids=str)
def test_only_what_is_asked_for_is_made(needed, device):
    gate, up, dproduct = (make(3, 65, device=device, seed=seed) for seed in range(3))
    everything = backward(dproduct, gate, up, "gelu", True, True, True)
    wanted = [value if need else None for value, need in zip(everything, needed, strict=True)]
    assert_same(backward(dproduct, gate, up, "gelu", *needed), wanted)
    given = [torch.full_like(gate, torch.nan) if need else None for need in needed[:2]]
    backward_(overwritten := dproduct.clone(), gate, up, *given, "gelu")
    assert_same((*given, overwritten), (*wanted[:2], everything[2]))
    for packed in (False, True):
        dproduct, codes = codes_of(packed, device=device)
        everything = glu_backward_from_codes(dproduct, *codes, "gelu", True, True, True, BLOCK)
        wanted = [value if need else None for value, need in zip(everything, needed, strict=True)]
        assert_same(glu_backward_from_codes(dproduct, *codes, "gelu", *needed, BLOCK), wanted)


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_a_frozen_half_costs_nothing_in_backward(trained, monkeypatch, device):
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
        columns, gate_rows, gate_stride, up_rows, up_stride = module._rows(gate, up)
        assert columns == 20
        assert (gate_rows.data_ptr(), up_rows.data_ptr()) == (gate.data_ptr(), up.data_ptr())
        rows = range(gate.numel() // columns)
        for found, stride, half in ((gate_rows, gate_stride, gate), (up_rows, up_stride, up)):
            addressed = torch.stack([found.as_strided((20,), (1,), found.storage_offset() + r * stride) for r in rows])
            assert torch.equal(addressed, half.reshape(-1, 20))


STRIDES = {
    "columns": lambda: make(2, 6).t(),
    "windows": lambda: make(40).unfold(0, 8, 4),
    "every second row": lambda: make(6, 8)[::2],
    "every second column": lambda: make(4, 6, 16)[..., ::2],
    "leading dimensions changed": lambda: make(4, 6, 8).transpose(0, 1),
    "none at all": lambda: make(0),
    "no rows": lambda: make(3, 0, 2),
    **{f"of {numel}": lambda numel=numel: make(numel) for numel in (2, 14, 2046, 2048, 2050)},
}


@pytest.mark.parametrize("name", STRIDES)
@packed_or_not
def test_any_shape_and_strides(packed, name, device):
    given = STRIDES[name]().to(device)
    inputs = [each.detach().requires_grad_() for each in ([given] if packed else given.chunk(2, -1))]
    if not packed and inputs[0].shape != inputs[-1].shape:
        return
    inputs = inputs if len(inputs) > 1 or packed else [*inputs, inputs[0].detach().requires_grad_()]
    found = run(swiglu, inputs)
    assert found[0].is_contiguous()
    assert same_bits(found, run(swiglu, [each.detach().contiguous().requires_grad_() for each in inputs]))
    for value, truth in zip(found, run(eager_glu("silu"), doubled(inputs), torch.float32), strict=True):
        assert value.shape == truth.shape
        assert (value - truth).norm() <= 4 * 2**-24 * truth.norm()


OPS = {"silu": swiglu, "gelu": functools.partial(geglu, approximate="none"), "gelu_tanh": geglu}
EXTREMES = [0.0, -0.0, 1e-30, 60.0, -60.0, 88.0, -88.0, -104.0, 1e4, -1e4, math.inf, -math.inf, math.nan]


@each_activation
def test_extreme_values_are_eagers(activation, device):
    values = [value for value in EXTREMES if activation != "gelu" or value != math.inf]  # nan in PyTorch on some CPUs
    gate = torch.tensor(values, device=device).requires_grad_()
    inputs = [gate, torch.full_like(gate, 2.0).requires_grad_()]
    # exp's argument is rounded, so its result is off by up to |gate| roundings; and a device may flush to zero what is
    # below float32's normal numbers.
    bounds = {"rtol": 104 * 2**-24, "atol": 104 * 2**-126, "equal_nan": True}
    for value, truth in zip(run(OPS[activation], inputs), run(eager_glu(activation), inputs), strict=True):
        torch.testing.assert_close(value, truth, **bounds)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_no_value_is_too_large_for_a_rectifier(activation, device):
    """Infinite values that it cuts off leave no NaN behind, and NaN stays what it is."""
    x = torch.tensor(EXTREMES, device=device, requires_grad=True)
    expected = EAGER_ACTIVATIONS[activation](x)
    dactive = torch.full_like(x, math.inf)
    (gradient,) = torch.autograd.grad(expected, x, dactive)
    active = ACTIVATION.forward(x.detach(), None, activation)
    assert torch.equal(active.nan_to_num(7.0), expected.detach().nan_to_num(7.0))
    if activation == "relu":  # eager's relu2 multiplies infinite by zero before it cuts off
        found = ACTIVATION.backward(dactive, x.detach(), None, None, None, 0, activation, True, False, False)[0]
        assert torch.equal(found.nan_to_num(7.0), gradient.nan_to_num(7.0))


@each_activation
def test_no_digits_are_lost_where_the_activation_saturates(activation, device):
    gate = torch.linspace(-9, 9, 181, device=device).requires_grad_()
    inputs = [gate, torch.ones_like(gate).requires_grad_()]

    def gradients(function, inputs):
        return torch.autograd.grad(function(*inputs).sum(), inputs)

    eager = eager_glu(activation)
    results = gradients(OPS[activation], inputs), gradients(eager, inputs), gradients(eager, doubled(inputs))
    for value, peer, truth in zip(*results, strict=True):
        assert (value - truth).abs().max() <= max(4 * 2**-24 * truth.abs().max(), (peer - truth).abs().max())


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float64)],
    ids=str,
)
def test_mixed_dtypes_promote(dtypes, device):
    inputs = [make(5, 6, device=device, dtype=each, seed=n).requires_grad_() for n, each in enumerate(dtypes)]
    product, *gradients = run(swiglu, inputs)
    assert product.dtype is torch.promote_types(*dtypes)
    assert [each.dtype for each in gradients] == [*dtypes]
    assert [each.dtype for each in backward(product, *inputs, "silu", True, True, True)] == [*dtypes, product.dtype]


def encoded(*values, format="fp8"):
    """The codes and scales of gate and up, or of packed ones and no more."""
    found = [each for value in values for each in quantize_blockwise(value, BLOCK, format)]
    return [*found, *[None] * (4 - len(found))]


def codes_of(packed, columns=96, dtype=torch.bfloat16, device="cpu", format="fp8"):
    """dproduct, and codes and scales of gate and up."""
    gate, up = (3 * make(5, columns, seed=seed) for seed in range(2))
    values = [torch.cat([gate, up], -1)] if packed else [gate, up]
    dproduct = make(5, columns, seed=2, device=device, dtype=dtype)
    return dproduct, encoded(*(value.to(device, dtype) for value in values), format=format)


def decoded_first(dproduct, codes, activation):
    gate, up = (
        None if each is None else dequantize_blockwise(each, scales, dproduct.dtype, BLOCK)
        for each, scales in (codes[:2], codes[2:])
    )
    return backward(dproduct, gate, up, activation, True, True, True)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@given(
    packed=st.booleans(), columns=st.sampled_from([96, 48, 50, 1]), activation=st.sampled_from(GATE_ACTIVATIONS),
    format=st.sampled_from([*FORMATS]), dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_codes_give_the_bits_of_what_they_stand_for(packed, columns, activation, format, dtype, device):
    dproduct, codes = codes_of(packed, columns, dtype, device, format)
    expected = decoded_first(dproduct, codes, activation)
    assert_same(glu_backward_from_codes(dproduct, *codes, activation, True, True, True, BLOCK), expected)
    given = [None if value is None else torch.full_like(value, torch.nan) for value in expected[:2]]
    GLU.backward_(overwritten := dproduct.clone(), *codes, *given, BLOCK, activation)
    assert_same((*given, overwritten), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_codes_of_what_is_not_gated_give_the_bits_of_what_they_stand_for(activation, device):
    dactive, x = (make(5, 50, seed=seed, device=device, dtype=torch.bfloat16) for seed in range(2))
    codes, scales = quantize_blockwise(x, BLOCK)
    y = dequantize_blockwise(codes, scales, x.dtype, BLOCK)
    needs = (True, False, True)
    expected = ACTIVATION.backward(dactive, y, None, None, None, 0, activation, *needs)
    assert torch.equal(expected[2], ACTIVATION.forward(y, None, activation))
    assert_same(ACTIVATION.backward(dactive, codes, scales, None, None, BLOCK, activation, *needs), expected)


@pytest.mark.parametrize(
    ("packed", "columns", "launches"), [(False, 96, 1), (False, 50, 1), (True, 96, 1), (True, 50, 2)]
)
def test_one_launch_where_blocks_are_not_cut(packed, columns, launches, device, launched):
    dproduct, codes = codes_of(packed, columns, device=device)
    launched.clear()
    glu_backward_from_codes(dproduct, *codes, "silu", block=BLOCK)
    assert len(launched) == (launches if launch.uses_triton(dproduct) else 0)


@pytest.mark.parametrize("change", [lambda x: x.transpose(0, 1), lambda x: x.mT])
@packed_or_not
def test_codes_and_gradients_of_any_dense_strides(change, packed, device):
    values = [change(make(2, 8, 64, seed=seed, device=device)) for seed in range(2 - packed)]
    codes = encoded(*values)
    dproduct = make(*swiglu(*values).shape, seed=2, device=device)
    expected = decoded_first(dproduct, codes, "silu")
    for strided in (dproduct, torch.stack([dproduct, dproduct], -1)[..., 0], dproduct.mT.contiguous().mT):
        found = glu_backward_from_codes(strided, *codes, "silu", True, True, True, BLOCK)
        assert_same(found, expected)
        assert all(value is None or value.is_contiguous() for value in found)
    empty = torch.empty(0, 32, device=device)
    found = glu_backward_from_codes(empty, *encoded(empty, empty), "silu", True, True, True, BLOCK)
    assert [value.shape for value in found] == [(0, 32)] * 3


@packed_or_not
@pytest.mark.parametrize("format", FORMATS)
def test_ops_pass_opcheck_with_codes(format, packed, device):
    dproduct, codes = codes_of(packed, device=device, format=format)
    given = [None if each is None else torch.zeros_like(each, dtype=dproduct.dtype) for each in codes[::2]]
    with Work() as seen:
        GLU.backward(dproduct, *codes, BLOCK, "silu", True, True, True)
        GLU.backward_(dproduct, *codes, *given, BLOCK, "silu")
    assert len(seen.calls) == 2
    # The check of schemas multiplies every argument, which torch's CPU does not do with fp8.
    seen.check(*["test_schema"] * (format == "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("as_codes", [False, True])
@packed_or_not
def test_more_than_2_to_the_31_elements(packed, as_codes):
    rows, columns = 2**20 + 1, 2**11
    values = [torch.zeros(rows, columns * (1 + packed), device="cuda", dtype=torch.bfloat16) for _ in range(2 - packed)]
    for seed, value in enumerate(values):
        value[-1:] = make(1, value.shape[1], seed=seed)
    last = [value[-1:].clone() for value in values]
    dproduct = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    dproduct[-1:] = make(1, columns, seed=2)
    if as_codes:
        (codes, codes_of_last), needs = (
            map(lambda each: encoded(*each), (values, last)),
            ("silu", True, True, True, BLOCK),
        )
        del values
        found = glu_backward_from_codes(dproduct, *codes, *needs)
        expected = glu_backward_from_codes(dproduct[-1:].clone(), *codes_of_last, *needs)
    else:
        assert torch.equal(swiglu(*values)[-1:], swiglu(*last))
        found, expected = (
            backward(gradient, *[*each, None][:2], "silu", True, True, True)
            for gradient, each in ((dproduct, values), (dproduct[-1:], last))
        )
    assert_same([None if value is None else value[-1:] for value in found], expected)
