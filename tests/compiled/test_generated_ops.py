"""Each op of the generator's table gives the bits of ATen's kernel on CUDA, and about its values in the interpreter."""

import pytest
import torch
from generated_testing import as_one_kernel

from recompute.compiled.generated.pointwise_ops import COPIES, PLACED, ROWS
from recompute.engine.cut.filled_memory import ALLOCATE

ATEN = torch.ops.aten
UNARY = {
    "add a number": lambda x: ATEN.add.Tensor(x, 0.1),
    "add.Scalar": lambda x: ATEN.add.Scalar(x, 1e-6),
    "sub.Scalar": lambda x: ATEN.sub.Scalar(x, 0.3),
    "rsub.Scalar": lambda x: ATEN.rsub.Scalar(x, 1.0),
    "mul by a number": lambda x: ATEN.mul.Tensor(x, 0.1),
    "mul.Scalar": lambda x: ATEN.mul.Scalar(x, 0.1),
    "div by a number": lambda x: ATEN.div.Tensor(x, 7.0),
    "div.Scalar": lambda x: ATEN.div.Scalar(x, 0.3),
    **{f"pow {power}": lambda x, power=power: ATEN.pow.Tensor_Scalar(x, power) for power in (1, 2, 3, 0.5, -0.5, -1)},
    **{
        name: getattr(ATEN, name)
        for name in ("neg", "abs", "reciprocal", "exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "rsqrt", "tanh")
    },
    **{name: getattr(ATEN, name) for name in ("sigmoid", "floor", "silu", "gelu", "relu", "logical_not", "clone")},
    "gelu by tanh": lambda x: ATEN.gelu(x, approximate="tanh"),
    **{
        f"{name}.Scalar": lambda x, name=name: getattr(ATEN, name).Scalar(x, 0.1)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{
        f"to {dtype}": lambda x, dtype=dtype: ATEN._to_copy(x, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    },
    "float64": lambda x: ATEN.mul.Tensor(ATEN.reciprocal(x.double().clamp(1e-12)), 448.0).float(),
    "clamp": lambda x: ATEN.clamp(x, -0.7, 1.3),
    "clamp from below": lambda x: ATEN.clamp(x, 0.1),
    "zeros": lambda x: ATEN.add.Tensor(x, ATEN.zeros(x.shape, dtype=x.dtype, device=x.device)),
    "new_zeros": lambda x: ATEN.sub.Tensor(ATEN.new_zeros(x, x.shape), x),
    "zeros_like": lambda x: ATEN.sub.Tensor(ATEN.zeros_like(x), x),
    "ones": lambda x: ATEN.div.Tensor(ATEN.ones(x.shape, dtype=x.dtype, device=x.device), x),
    "ones_like": lambda x: ATEN.div.Tensor(ATEN.ones_like(x), x),
    "logical_and": lambda x: ATEN.logical_and(ATEN.gt.Scalar(x, -1), ATEN.lt.Scalar(x, 1)),
    "logical_or": lambda x: ATEN.logical_or(ATEN.gt.Scalar(x, 1), ATEN._to_copy(x, dtype=torch.bfloat16)),
    "slice_backward": lambda x: ATEN.slice_backward(x, [x.shape[0] + 64], 0, 32, x.shape[0] + 32, 1),
    "slice_backward of every third": lambda x: ATEN.slice_backward(x, [3 * x.shape[0]], 0, 1, 3 * x.shape[0], 3),
    "as_strided_scatter": lambda x: ATEN.as_strided_scatter(x, x[2:] * 2, [x.shape[0] - 2], [1], 1),
    "to bool": lambda x: ATEN.bitwise_not(ATEN._to_copy(x, dtype=torch.bool)),
    "floor_divide": lambda x: ATEN.floor_divide(ATEN._to_copy(ATEN.gt.Scalar(x, 1), dtype=torch.int64), 2),
    "select_backward": lambda x: ATEN.select_backward(x, [2, x.shape[0]], 0, 1),
}
BINARY = {
    "add": ATEN.add.Tensor,
    "sub": ATEN.sub.Tensor,
    "add alpha": lambda x, y: ATEN.add.Tensor(x, y, alpha=0.3),
    "sub alpha": lambda x, y: ATEN.sub.Tensor(x, y, alpha=3),
    "mul": ATEN.mul.Tensor,
    "div": ATEN.div.Tensor,
    "mul by float32": lambda x, y: ATEN.mul.Tensor(x, ATEN._to_copy(y, dtype=torch.float32)),
    "mul by a mask": lambda x, y: ATEN.mul.Tensor(ATEN.gt.Scalar(y, 0), x),
    **{f"{name}.Tensor": getattr(ATEN, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "where": lambda x, y: ATEN.where(ATEN.gt.Tensor(x, y), x, y),
    "masked_fill": lambda x, y: ATEN.masked_fill(x, ATEN.gt.Tensor(x, y), -1e4),
    "silu_backward": ATEN.silu_backward,
    "sigmoid_backward": ATEN.sigmoid_backward,
    "tanh_backward": ATEN.tanh_backward,
    "gelu_backward": ATEN.gelu_backward,
    "gelu_backward by tanh": lambda x, y: ATEN.gelu_backward(x, y, approximate="tanh"),
    "threshold_backward": lambda x, y: ATEN.threshold_backward(x, y, 0),
    "native_dropout_backward": lambda x, y: ATEN.native_dropout_backward(x, ATEN.gt.Scalar(y, 0), 1.1111111),
    "cat": lambda x, y: ATEN.cat([x, y]),
    "stack": lambda x, y: ATEN.stack([x, y]),
}


OPS = {**UNARY, **BINARY}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def patterns(dtype, device):
    """All values of a 16-bit dtype; of float32 2 ** 23 patterns, as many normal numbers, and special ones."""
    if dtype is not torch.float32:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    generator = torch.Generator(device).manual_seed(0)
    some = torch.randint(-(2**31), 2**31, (2**23,), device=device, generator=generator)
    normal = torch.randn(2**23 - 2**14, device=device, generator=generator) * 4
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-45, 1e-38, 3e38], device=device)
    return torch.cat([some.to(torch.int32).view(dtype), normal, special.repeat(2**11)[: 2**14]])


def operands(name, dtype, device):
    x = patterns(dtype, device)
    if name in UNARY:
        return [x]
    generator = torch.Generator(device).manual_seed(1)
    x = x.repeat(2**24 // x.numel())
    y = x[torch.randperm(x.numel(), device=device, generator=generator)]
    usual = torch.randn(2, x.numel() // 2, device=device, generator=generator).to(dtype)
    return [torch.cat([x[::2], usual[0]]), torch.cat([y[::2], usual[1]])]


def differing(found, expected):
    """How many elements differ in a bit; every NaN is one value."""
    if not found.is_floating_point():
        return int((found != expected).sum())
    integer = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[found.itemsize]
    same = (found.view(integer) == expected.view(integer)) | (found.float().isnan() & expected.float().isnan())
    return int((~same).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_a_row_gives_the_bits_of_aten(name, dtype):
    found, expected = as_one_kernel(OPS[name], *operands(name, dtype, "cuda"))()
    assert [differing(one, other) for one, other in zip(found, expected, strict=True)] == [0]


@pytest.mark.parametrize("name", OPS)
def test_a_row_gives_the_values_of_aten_in_the_interpreter(name):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1500, generator=generator) for _ in range(1 if name in UNARY else 2)]
    (found,), (expected,) = as_one_kernel(OPS[name], *given)()
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    tolerance = 1e-2 if expected.dtype is torch.bfloat16 else 1e-3 if expected.dtype is torch.float16 else 1e-5
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_cast_to_float8_gives_the_bits_of_aten(target, source):
    """Ties, numbers too large and too small, infinities and NaNs among them."""
    some = patterns(torch.bfloat16, "cpu").to(source)
    if source is not torch.bfloat16:
        some = torch.cat([some, torch.arange(-(2**14), 2**14) / 2**5, torch.arange(-(2**14), 2**14) / 2**20]).to(source)
    (found,), (expected,) = as_one_kernel(lambda x: ATEN._to_copy(x, dtype=target), some)()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


OF_INTEGERS = {
    "product": lambda x, n: ATEN.mul.Tensor(x, n),
    "difference": lambda x, n: ATEN.sub.Tensor(x, n),
    "quotient": lambda x, n: ATEN.div.Tensor(x, n),
    "comparison": lambda x, n: ATEN.lt.Tensor(x, n),
    "comparison with a fraction": lambda x, n: ATEN.ge.Scalar(n, 0.5),
    "comparison of flags with a fraction": lambda x, n: ATEN.gt.Scalar(ATEN.ge.Tensor(n, x), 0.5),
}


@pytest.mark.parametrize("function", OF_INTEGERS.values(), ids=OF_INTEGERS)
def test_integers_are_rounded_to_the_dtype_of_the_numbers_beside_them(function):
    n = torch.arange(-3000, 3000) * 7
    (found,), (expected,) = as_one_kernel(function, n.half(), n)()
    assert differing(found, expected) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "div", "lt.Tensor"])
def test_one_number_of_another_dtype_is_rounded_to_that_of_the_numbers_beside_it(name, dtype):
    x = patterns(dtype, "cuda")
    for number in (torch.tensor(0.1), torch.tensor(1.001).half(), torch.tensor(4099)):
        (found,), (expected,) = as_one_kernel(BINARY[name], x, number.cuda())()
        assert differing(found, expected) == 0


def test_every_row_of_the_table_is_reviewed():
    seen = set()
    x = torch.rand(4)

    class Sees(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(op)
            return op(*args, **(kwargs or {}))

    with Sees():
        for name, op in OPS.items():
            op(*[x] * (1 if name in UNARY else 2))
    assert {*ROWS, *COPIES, *PLACED} - ALLOCATE - seen == set()
