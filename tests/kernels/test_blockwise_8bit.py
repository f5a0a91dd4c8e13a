"""Blockwise quantization: how far values come back from where they were, special values, layouts, sizes and devices."""

import math
import re

import hypothesis
import kernel_testing
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_testing import DTYPES, Work, each_device_of_compiled_code, each_dtype, make
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.blockwise_8bit import (
    FORMATS,
    dequantize_blockwise,
    dequantize_blockwise_reference,
    dequantize_op,
    native_format,
    quantize_blockwise,
    quantize_blockwise_reference,
    quantize_blockwise_with_error,
    quantize_op,
)

INFINITY, NAN = float("inf"), float("nan")
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
"""The least subnormal number of each dtype."""

each_format = pytest.mark.parametrize("format", FORMATS)
draws = hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])


@st.composite
def tensors(draw):
    """A tensor of one dimension and a block size: values of all magnitudes side by side, special ones among them."""
    dtype = draw(st.sampled_from(DTYPES))
    block = draw(st.sampled_from([1, 2, 16, 128]))
    numel = draw(st.integers(0, 4 * block + 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    low, high = sorted(draw(st.tuples(st.integers(-150, 128), st.integers(-150, 128))))
    exponents = low + (high - low) * torch.rand(numel, generator=generator, dtype=torch.float64)
    x = (torch.randn(numel, generator=generator, dtype=torch.float64) * exponents.exp2()).to(dtype)
    largest = torch.finfo(dtype).max
    drawn = draw(st.lists(st.floats(width=32) | st.sampled_from([largest, -largest, 448.0, 464.0, 127.0, 0.5])))
    for value in drawn if numel else ():
        x[draw(st.integers(0, numel - 1))] = value
    return x, block


def bits(x):
    """What tells any two values apart, zeros by their signs. There is one NaN."""
    x = torch.where(x.isnan(), torch.nan, x) if x.dtype in DTYPES else x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def same(left, right):
    return all(
        a is None is b
        or (a.dtype is b.dtype and a.stride() == b.stride() and torch.equal(bits(a), bits(b.to(a.device))))
        for a, b in zip(left, right, strict=True)
    )


def absmax_of_each(x, block):
    """For each element of a flat tensor the largest finite magnitude of its block, in float64."""
    finite = x.double().abs()
    finite = torch.where(finite < INFINITY, finite, 0.0)
    whole = F.pad(finite, (0, -len(x) % block)).unflatten(0, (-1, block)) if len(x) else finite[:, None]
    return whole.amax(-1).repeat_interleave(block)[: len(x)]


def bound(x, y, scales, block, format):
    """How far y may be from x: what the docstring of the file promises."""
    scale = scales.double().repeat_interleave(block)[: x.numel()]
    if format == "fp8":
        allowed = torch.maximum(2**-4 * x.double().abs(), 2**-10 * scale)
    else:
        absmax = absmax_of_each(x, block)
        coarse = torch.maximum((1 + 2**-14) * absmax / 254, torch.tensor(2.0**-127))
        allowed = coarse + ROUNDING[x.dtype] * y.double().abs()
    return allowed + SMALLEST[x.dtype] / 2


AMONG_OTHERS = torch.tensor([1.0, NAN, -2.0, INFINITY, 0.5, -INFINITY, -NAN, 0.0]), 8
ALONE = torch.tensor([NAN, INFINITY]), 2


@draws
@given(drawn=tensors(), format=st.sampled_from([*FORMATS]))
@example(drawn=AMONG_OTHERS, format="fp8")
@example(drawn=AMONG_OTHERS, format="int8")
@example(drawn=ALONE, format="fp8")
@example(drawn=ALONE, format="int8")
def test_values_come_back_within_the_bound(drawn, format, device):
    x, block = drawn[0].to(device), drawn[1]
    codes, scales, error = quantize_blockwise_with_error(x, block, format)
    y = dequantize_blockwise(codes, scales, x.dtype, block)
    finite = x.isfinite()
    assert torch.equal(y.isfinite(), finite)
    assert torch.equal(y.isnan(), ~finite)
    assert not y[x == 0].any()
    assert scales.isfinite().all()
    x, y, scales = (tensor.cpu() for tensor in (x, y, scales))
    distance = torch.where(finite.cpu(), (y.double() - x.double()).abs(), 0.0)
    assert (distance <= bound(x, y, scales, block, format))[finite.cpu()].all()
    absmax = absmax_of_each(x, block)
    worst = (distance / torch.where(absmax > 0, absmax, 1.0)).amax().item() if len(x) else 0.0
    assert error.shape == ()
    assert error.item() == pytest.approx(worst, rel=1e-6, abs=2**-140)


@draws
@given(drawn=tensors(), format=st.sampled_from([*FORMATS]))
def test_no_way_to_run_it_changes_a_bit(drawn, format, device):
    x, block = drawn
    found = quantize_blockwise_with_error(x.to(device), block, format)
    expected = quantize_blockwise_reference(x, block, format, True)
    assert same(found, expected)
    for dtype in DTYPES:
        y = dequantize_blockwise(*found[:2], dtype, block)
        assert same([y], [dequantize_blockwise_reference(*expected[:2], dtype, block)])
    assert same(quantize_blockwise(x.to(device), block, format), found[:2])


@draws
@given(drawn=tensors())
def test_what_came_back_from_fp8_is_compressed_without_a_further_error(drawn, device):
    x, block = drawn[0].to(device), drawn[1]
    y = dequantize_blockwise(*quantize_blockwise(x, block, "fp8"), x.dtype, block)
    y = torch.where(y.abs() < 2 ** (10 - 126), 0.0, y)  # which the least scale, or the dtype, rounds once more
    codes, scales, error = quantize_blockwise_with_error(y, block, "fp8")
    assert error == 0
    assert torch.equal(dequantize_blockwise(codes, scales, y.dtype, block).nan_to_num(7), y.nan_to_num(7))


@each_format
@each_dtype
def test_a_code_is_the_nearest_one(dtype, format, device):
    x = make(40, 16, device=device) * 2.0 ** make(40, 1, seed=1, device=device).mul(3).round()
    codes, scales = quantize_blockwise(x := x.to(dtype), 16, format)
    of_bytes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.arange(-127.0, 128.0) if format == "int8" else of_bytes.float()
    values = values[values.isfinite()].to(device).double()
    scaled = x.double() / scales.double()[:, None]
    nearest = (scaled[..., None] - values).abs().amin(-1)
    distance = (scaled - codes.double()).abs()
    assert (distance <= nearest * (1 + 1e-5) + 1e-5 * (format == "int8")).all()


SCALES_OF = {448.0: 1.0, 449.0: 2.0, 896.0: 2.0, 224.0: 0.5, 225.0: 1.0, 1.0: 2.0**-8, 3.4e38: 2.0**120}
SCALES_OF |= {0.0: 2.0**-126, 2.0**-149: 2.0**-126}


@pytest.mark.parametrize(("absmax", "scale"), SCALES_OF.items())
def test_the_scale_of_fp8_is_the_least_power_of_2_that_serves(absmax, scale, device):
    for sign in (1, -1):
        _, scales = quantize_blockwise(torch.tensor([0.0, sign * absmax], device=device), 2, "fp8")
        assert scales.tolist() == [scale]


def test_a_value_halfway_goes_to_the_even_code(device):
    x = torch.tensor([448.0, 17.0, 19.0, 2**-10, 3 * 2**-10, 1.0, 0.0, -17.0], device=device)
    assert dequantize_blockwise(*quantize_blockwise(x, 8, "fp8"), x.dtype, 8).tolist() == (
        [448.0, 16.0, 20.0, 0.0, 2**-8, 1.0, 0.0, -16.0]
    )
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.0], device=device)
    assert quantize_blockwise(x, 8, "int8")[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 3]


@each_format
@each_dtype
def test_every_value_of_16_bits_comes_back_near_and_the_largest_stay_finite(dtype, format, device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = (x if dtype is not torch.float16 else x.view(dtype)).to(device, dtype)
    largest = torch.tensor([1.0, -1.0, 0.5, 0.97, 0.9], device=device).mul(torch.finfo(dtype).max).to(dtype)
    for values, block in ((x, 1), (x, 256), (largest, 8)):
        codes, scales = quantize_blockwise(values, block, format)
        y = dequantize_blockwise(codes, scales, dtype, block)
        finite = values.isfinite()
        assert torch.equal(y.isfinite(), finite)
        allowed = bound(*(tensor.cpu() for tensor in (values, y, scales)), block, format)
        assert ((y.double() - values.double()).abs().cpu() <= allowed)[finite.cpu()].all()


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "unaligned": kernel_testing.LAYOUTS["unaligned"],
    "part of a storage": lambda x: torch.stack([x, x])[1],
    "every second column": kernel_testing.LAYOUTS["every second column"],
    "half of a packed projection": lambda x: torch.cat([x, x], -1).chunk(2, -1)[1],
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten().as_strided((4, 5), (2, 1)),
    "one number": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@each_format
def test_codes_lie_as_the_values_do(format, layout, device):
    x = LAYOUTS[layout](make(3, 5, 7, device=device, dtype=torch.bfloat16))
    before, like = x.clone(), torch.empty_like(x)
    codes, scales = quantize_blockwise(x, 16, format)
    y = dequantize_blockwise(codes, scales, x.dtype, 16)
    assert codes.shape == y.shape == x.shape
    assert codes.stride() == y.stride() == like.stride()
    if layout in ("contiguous", "transposed", "unaligned", "part of a storage", "one number"):
        assert codes.stride() == x.stride()
    flat = like.copy_(x).as_strided((x.numel(),), (1,))
    expected, expected_scales = quantize_blockwise(flat, 16, format)
    assert same([codes.as_strided((x.numel(),), (1,)), scales], [expected, expected_scales])
    assert same([y.as_strided((x.numel(),), (1,))], [dequantize_blockwise(expected, expected_scales, x.dtype, 16)])
    assert torch.equal(x, before)


SHAPES = [((0,), 128), ((3, 0, 2), 1), ((), 128), ((1,), 1), ((5, 127), 128), ((4096,), 128), ((4097,), 4096)]


@pytest.mark.parametrize(("shape", "block"), [*SHAPES, ((33, 300), 64)])
@each_format
def test_any_shape(shape, block, format, device):
    x = make(*shape, device=device)
    codes, scales, error = quantize_blockwise_with_error(x, block, format)
    assert codes.shape == x.shape
    assert codes.dtype is FORMATS[format]
    assert scales.shape == (math.ceil(x.numel() / block),)
    assert codes.nbytes + scales.nbytes == x.numel() + 4 * len(scales)
    y = dequantize_blockwise(codes, scales, x.dtype, block)
    assert (y - x).abs().sum() <= 2**-4 * x.abs().sum()
    assert 0 <= error <= 2**-4
    assert same((codes, scales, error), quantize_blockwise_reference(x, block, format, True))


def test_one_launch_a_call_and_no_gradient_flows(device, launched):
    x = make(4, 128, device=device).requires_grad_()
    found = quantize_blockwise_with_error(x)
    y = dequantize_blockwise(*found[:2], x.dtype)
    assert not any(tensor.requires_grad for tensor in (*found, y))
    assert len(launched) == (2 if launch.uses_triton(x) else 0)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
@each_format
def test_ops_pass_opcheck(layout, format, device):
    x = LAYOUTS[layout](make(3, 5, 7, device=device, dtype=torch.bfloat16))
    with Work() as seen:
        codes, scales, _ = quantize_op(x, 16, format, True)
        dequantize_op(codes, scales, x.dtype, 16)
    assert len(seen.calls) == 2
    # The check of schemas multiplies every result, which torch's CPU does not do with fp8.
    seen.check(*["test_schema"] * (format == "fp8"))


@each_device_of_compiled_code
def test_compiled_results_are_the_eager_ones(device):
    def there_and_back(x):
        codes, scales, error = quantize_op(x, 64, None, True)
        return dequantize_op(codes, scales, x.dtype, 64) * 2 + error

    x = make(5, 50, device=device)
    torch.compiler.reset()
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), there_and_back(x))


DEVICES = [("cpu", None, None, "fp8"), ("meta", None, None, "fp8"), ("mps", None, None, "int8")]
DEVICES += [("cuda:0", capability, None, "fp8") for capability in ((9, 0), (8, 9), None)]


@pytest.mark.parametrize(
    ("device", "capability", "hip", "format"),
    [*DEVICES, ("cuda:0", (8, 6), None, "int8"), ("cuda:0", (9, 4), "6.4", "int8")],
)
def test_the_device_decides_on_the_format(device, capability, hip, format, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert native_format.__wrapped__(torch.device(device)) == format


def test_without_a_format_it_is_the_devices(device):
    x = make(2, 64, device=device)
    for format in FORMATS:
        assert quantize_blockwise(x, 64, format)[0].dtype is FORMATS[format]
    assert quantize_blockwise(x, 64)[0].dtype is FORMATS[native_format(x.device)]


def test_fp8_is_refused_where_the_device_has_none(monkeypatch):
    monkeypatch.setattr("recompute.kernels.blockwise_8bit.native_format", lambda device: "int8")
    codes, scales = quantize_blockwise(torch.ones(2))
    assert codes.dtype is torch.int8
    with pytest.raises(KernelError, match=re.escape("cpu has no fp8")):
        quantize_blockwise(torch.ones(2), format="fp8")
    with pytest.raises(KernelError, match=re.escape("dequantize_blockwise: cpu has no fp8")):
        dequantize_blockwise(codes.to(torch.float8_e4m3fn), scales, torch.float32)


@pytest.mark.gpu
def test_the_host_does_not_wait():
    x = make(64, 128, device="cuda", dtype=torch.bfloat16)
    there_and_back = [quantize_blockwise_with_error(x), dequantize_blockwise(*quantize_blockwise(x), x.dtype)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codes, scales, _ = quantize_blockwise_with_error(x)
        y = dequantize_blockwise(codes, scales, x.dtype)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, there_and_back[1])


@pytest.mark.gpu
@each_format
def test_more_than_2_to_the_31_elements(format):
    numel = 2**31 + 133
    x = torch.zeros(numel, device="cuda", dtype=torch.bfloat16)
    first = numel // 128 * 128
    x[first - 256 :] = make(numel - first + 256)
    codes, scales, error = quantize_blockwise_with_error(x, format=format)
    end = x[first - 256 :].clone()
    expected = quantize_blockwise_with_error(end, format=format)
    assert same((codes[first - 256 :], scales[first // 128 - 2 :], error), expected)
    assert not codes[: first - 256].view(torch.int8).any()
    y = dequantize_blockwise(codes, scales, x.dtype)
    assert torch.equal(y[first - 256 :], dequantize_blockwise(*expected[:2], x.dtype))
