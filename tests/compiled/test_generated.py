"""Captured code in generated kernels: the same bits, fewer kernels, nothing written that only a group reads."""

import copy
import re
from concurrent.futures import Future

import pytest
import torch
from capture_testing import Around, Twins
from engine_testing import function_of, module_of, twins_of
from generated_testing import as_one_kernel, generated, interpreted, kernels_made, wait_for, written
from tiers import one_in, slow
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.compiled.generated import generated_kernel
from recompute.compiled.generated.fusing import fused
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.row_sums import InTurn, index_put_rows, rows_added
from recompute.compiled.generated.safe_softmax import safe_softmax
from recompute.compiled.generated.spaces import Elements
from recompute.compiled.generated.switch import Generates, generating_on
from recompute.compiled.program_writer import deciding
from recompute.diagnostics.comparing_runs import same_bits
from recompute.kernels.launch_plan import PlannedCall

each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)


def rotated(q, cos, sin):
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin


def rotation_backward(gradient, cos, sin):
    half, shape = gradient.shape[-1] // 2, list(gradient.shape)
    turned, slice_backward = gradient * sin, torch.ops.aten.slice_backward
    left = slice_backward(-turned[..., :half], shape, 3, half, shape[-1], 1)
    return left + slice_backward(turned[..., half:], shape, 3, 0, half, 1) + gradient * cos


def written_in_place(x, y):
    x = x * 2
    before = x + 1
    x.mul_(y).div_(3.0).masked_fill_(y > 0, 0.5)
    return x.copy_(before - x) * before


def scaled_in_place(x, rows, columns):
    """As torchao scales a GEMM of float8: by a product in float32 that is as large as the output."""
    return (x.half() + 1).mul_(rows.float() * columns.float())


def scaled_along(x, dim):
    """As torchao's rowwise float8 has it."""
    scale = (448.0 / x.abs().amax(dim, keepdim=True).double().clamp(1e-12)).float()
    scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (x.float() * scale).clamp(-448.0, 448.0), scale.reciprocal()


def cast_along(x, dim):
    scaled, inverse = scaled_along(x, dim)
    return scaled.to(torch.float8_e4m3fn), inverse


def filled_by_parts(x, y):
    """As keys are put together of a part for each head and one for all heads."""
    keys = x.new_empty(2, 3, 5, 12)
    keys[..., :8] = x.transpose(1, 2)
    keys[..., 8:] = y.transpose(1, 2).expand(2, 3, 5, 4)
    keys[:, 1] = keys[:, 0] * 2
    return keys.add_(1)


def strided_gradients(even, odd):
    slice_backward, size = torch.ops.aten.slice_backward, [3, 8]
    return slice_backward(even * 2, size, 1, 0, 2**63 - 1, 2) + slice_backward(odd, size, 1, 1, 2**63 - 1, 2)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


GROUPS = {
    "broadcast over rows and columns": (lambda x, w, r: x * w + r * 2, [draw(6, 8), draw(8), draw(6, 1)]),
    "a scalar tensor": (lambda x, s: x * s + 1, [draw(5, 7), draw(1).reshape(())]),
    "views between calls": (lambda x, y: (x.exp().view(2, 3, 8) + y).transpose(0, 1) * 2, [draw(6, 8), draw(2, 3, 8)]),
    "transposed inputs": (lambda x, y: (x.t() + y).neg(), [draw(9, 5), draw(5, 9)]),
    "copies to another order": (lambda x: (x.transpose(1, 2) + 1).contiguous().mul(3), [draw(2, 4, 6, 8)]),
    "slices": (lambda x: x[:, 2:6] * x[:, 4:8] - x[:, :4], [draw(5, 9)]),
    "strided slices": (lambda x: x[:, ::2] * x[:, 1::2] + 1, [draw(5, 8)]),
    "rotary embeddings": (rotated, [draw(2, 6, 3, 8).transpose(1, 2), draw(1, 1, 6, 8), draw(1, 1, 6, 8)]),
    "their backward": (rotation_backward, [draw(2, 3, 6, 8), draw(1, 1, 6, 8), draw(1, 1, 6, 8)]),
    "several outputs": (lambda g, a, b: (g * b, g * a, (a * b).exp()), [draw(4, 6)] * 1 + [draw(6, 4).t(), draw(4, 6)]),
    "casts": (lambda x: (x.to(torch.float16).mul(3).float() + 1, x * 2), [draw(4, 6)]),
    "one place of each row": (lambda x, i, v: x.scatter(-1, i, v) * 2, [draw(9, 5), draw(9, 1).long() % 5, draw(9, 1)]),
    "what is written in place": (written_in_place, [draw(6, 8), draw(8)]),
    "what a wider operand is written into": (scaled_in_place, [draw(6, 8), draw(6, 1), draw(8)]),
    "scales of rows, in float64 among others": (lambda x: scaled_along(x * 2, -1), [draw(256, 40)]),
    "scales of columns, which lie in memory as rows": (lambda x: scaled_along(x.t(), 0), [draw(256, 40)]),
    "parts that are filled one by one": (filled_by_parts, [draw(2, 5, 3, 8), draw(2, 5, 1, 4)]),
    "gradients of strided slices": (strided_gradients, [draw(3, 4), draw(3, 4)]),
    "integers": (lambda i: (i // 4, (i > 3).bitwise_not(), i.to(torch.bool)), [draw(9, 5).mul(30).long()]),
    "zeros like a tensor": (lambda x, y: torch.zeros_like(x) + y * 2, [draw(9, 5), draw(9, 5)]),
    "masks": (lambda x, y: torch.where(x > y, x, y).masked_fill(x == y, 0.5) * (x > 0), [draw(4, 6), draw(4, 6) * 2]),
}


ON_DEVICES = [
    pytest.param("cpu", torch.float32, marks=interpreted),
    *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in (torch.float32, torch.bfloat16, torch.float16)),
]
each_dtype_on_cuda = pytest.mark.parametrize(("device", "dtype"), ON_DEVICES, ids=str)


def assert_as_aten(function, given, device, dtype, **tolerance):
    """One kernel gives what ATen gives, in the same layout: bit for bit, where no ``tolerance`` is given."""
    given = [each.to(device, dtype if each.is_floating_point() else None) for each in given]
    for one, other in zip(*as_one_kernel(function, *given)(), strict=True):
        assert one.stride() == other.stride()
        if tolerance:
            torch.testing.assert_close(one, other, **tolerance, equal_nan=True)
        else:
            assert torch.equal(one, other)


@each_dtype_on_cuda
@pytest.mark.parametrize("name", GROUPS)
def test_one_kernel_computes_a_group_of_calls_on_cuda_bit_for_bit(name, device, dtype):
    assert_as_aten(*GROUPS[name], device, dtype, **({"rtol": 1e-6, "atol": 1e-6} if device == "cpu" else {}))


def kernels_of(function, *given, generates=Generates.EXACT):
    """The kernels that a function's calls become, and the lines that remain of ATen's."""
    code, numbers = written(function, *given, generates=generates)
    names = dict(code.names)
    statements = fused(code.statements, [code.tensors[number] for number in numbers], code.recording, names)
    kernels = [value for value in names.values() if isinstance(value, GeneratedKernel)]
    return kernels, [statement.text for statement in statements if "aten_" in statement.text]


def two_of_products(x):
    first, second = x @ x, x.t() @ x
    return x * 2 + 1, x * 3 + first + second


@pytest.mark.parametrize(("function", "waits"), [(lambda x: (x @ x).sin() * 2, False), (two_of_products, True)])
def test_threads_wait_for_each_other_before_they_overwrite_what_they_read(function, waits):
    """Triton may give an element to another thread where it is stored than where it is loaded."""
    ((kernel,), _) = kernels_of(function, draw(40, 40))
    assert ("tl.debug_barrier()" in kernel.source) is waits


def scores_with_a_sink(scores, mask, sinks):
    """Attention with a further column that takes part in softmax alone, as gpt-oss has it."""
    heads, rows = scores.shape[1:3]
    scores = scores * 0.5 + mask
    sink = sinks.reshape(1, -1, 1, 1).expand(len(scores), heads, rows, 1)
    both = torch.cat([scores, sink], -1)
    most, place = both.max(-1, keepdim=True)
    return torch.softmax(both - most, -1), place


def their_gradient(gradient, output, place):
    columns = output.shape[-1]
    padded = torch.ops.aten.slice_backward(gradient, list(output.shape), 3, 0, columns - 1, 1)
    of_both = torch.ops.aten._softmax_backward_data(padded, output, -1, output.dtype)
    of_most = of_both.neg().sum(-1, keepdim=True)
    of_both = of_both + torch.zeros_like(of_both).scatter(-1, place, of_most)
    return of_both[..., :-1] * 0.5, of_both[..., -1:] * 1


def masked_scores(rows, width):
    """Among them rows of minus infinity alone, and a row with NaN beside that, with infinity, and of infinity alone."""
    scores = draw(rows, width)
    scores[[2, 3, 4, 70, -1]], scores[7, ::2], scores[77] = -torch.inf, -torch.inf, torch.inf
    scores[9], scores[9, -1], scores[11, 0], scores[12, 3] = -torch.inf, torch.nan, torch.inf, torch.nan
    return scores


BY_ROWS = {
    "softmax": (lambda x: (x * 2 + 1).softmax(-1) * 3, [draw(300, 100)]),
    "softmax of scores and a mask": (lambda x, m: (x * 0.1 + m).softmax(-1), [draw(1, 4, 64, 30), draw(1, 1, 64, 30)]),
    "softmax in float32": (lambda x: torch.softmax(x, -1, dtype=torch.float32).to(x.dtype) + x, [draw(256, 33)]),
    "softmax of slices": (lambda x: x[:, 3:60].softmax(-1) + 1, [draw(256, 70)]),
    "log_softmax": (lambda x: (x * 2).log_softmax(-1), [draw(260, 9)]),
    "softmax backward": (
        lambda g, y: torch.ops.aten._softmax_backward_data(g * 2, y, -1, y.dtype) * 0.5,
        [draw(300, 65), draw(300, 65).softmax(-1)],
    ),
    "log_softmax backward": (
        lambda g, y: torch.ops.aten._log_softmax_backward_data(g * 2, y, -1, y.dtype) * 0.5,
        [draw(300, 65), draw(300, 65).log_softmax(-1)],
    ),
    "softmax with masked rows": (lambda x: torch.ops.aten._safe_softmax(x * 2, -1) + 1, [masked_scores(300, 70)]),
    "a norm": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w, [draw(512, 48), draw(48)]),
    "sums and rows of them": (lambda x, y: ((x * y).sum(-1), x * y.amax(-1, keepdim=True)), [draw(257, 40)] * 2),
    "a mean without its dimension": (lambda x: (x + 1).mean(-1).exp(), [draw(4, 64, 40)]),
    "a sink": (scores_with_a_sink, [draw(1, 4, 64, 16), draw(1, 1, 64, 16), draw(4)]),
    "a sink's backward": (
        their_gradient,
        [draw(1, 4, 64, 16), draw(1, 4, 64, 17).softmax(-1), draw(1, 4, 64, 1).mul(20).long() % 17],
    ),
    "NaN and infinities": (
        lambda x: (x * 1).softmax(-1) + (x * 1).amax(-1, keepdim=True),
        [draw(256, 8).index_put((torch.arange(3), torch.arange(3)), torch.tensor([torch.nan, torch.inf, -torch.inf]))],
    ),
}
"""What goes over the last dimension, among what is pointwise."""


class TestRows:
    @each_dtype_on_cuda
    @pytest.mark.parametrize("name", one_in(2, list(BY_ROWS)))
    def test_one_kernel_goes_over_rows_and_is_as_close_to_aten_as_a_sum_can_be(self, name, device, dtype):
        if device == "cpu":
            kernels, others = kernels_of(BY_ROWS[name][0], *BY_ROWS[name][1], generates=Generates.ROUNDED)
            assert {kernel.name[:7] for kernel in kernels} == {"by_rows"}
            assert others == []
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        assert_as_aten(*BY_ROWS[name], device, dtype, rtol=tolerance, atol=1e-6 if device == "cpu" else tolerance)

    @pytest.mark.parametrize("name", BY_ROWS)
    def test_a_policy_that_is_exact_leaves_rows_to_aten(self, name):
        function, given = BY_ROWS[name]
        kernels, others = kernels_of(function, *given)
        assert all(kernel.name.startswith("pointwise") for kernel in kernels)
        assert others != []

    @pytest.mark.parametrize("runs_again", [True, False])
    def test_what_decides_in_forward_and_again_in_backward_has_atens_bits(self, runs_again):
        """Two kernels may round in two ways: then a token would go to one expert in forward, to another in backward."""

        def choose(x):
            shares = (x * 2).softmax(-1)
            return shares * (shares > shares.mean(-1, keepdim=True))

        code, numbers = written(choose, draw(300, 8), generates=Generates.ROUNDED)
        calls = code.recording.calls
        code.recording.stable = deciding(calls, range(len(calls)) if runs_again else (), code.recording)
        names = dict(code.names)
        statements = fused(code.statements, [code.tensors[number] for number in numbers], code.recording, names)
        atens = [each.text.partition("aten_")[2].partition("(")[0] for each in statements if "aten_" in each.text]
        assert atens == (["mul_Tensor", "_softmax_default", "mean_dim"] if runs_again else [])

    @each_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_masked_rows_have_the_bits_of_aten_without_a_look_at_the_others(self, device, dtype):
        scores = masked_scores(131, 67).reshape(1, 131, 67).to(device, dtype)
        with generating_on(device):
            code, _ = written(lambda x: torch.ops.aten._safe_softmax(x, -1), scores)
        assert safe_softmax in code.names.values()
        found, expected = safe_softmax(scores, -1), torch.ops.aten._safe_softmax(scores, -1)
        assert same_bits(found, expected)

    def test_columns_few_rows_and_rows_that_are_long_or_lie_apart_are_atens(self):
        for function, given in (
            (lambda x: (x * 2).softmax(0), draw(300, 300)),
            (lambda x: (x.t() * 2).sum(-1), draw(300, 300)),
            (lambda x: (x * 2).softmax(-1), draw(9, 100)),
            (lambda x: (x * 2).sum(-1), torch.zeros(1, 1).expand(300, 20000)),
            (lambda x: (x * 2).abs().amax(-1), torch.zeros(1, 1).expand(300, 9000)),
        ):
            _, others = kernels_of(function, given, generates=Generates.ROUNDED)
            assert [line for line in others if "softmax" in line or "sum" in line or "norm" in line] != []

    def test_what_is_read_in_another_order_is_a_kernel_of_its_own(self):
        kernels, others = kernels_of(
            lambda x: ((x * 2).softmax(-1).t() + 1).contiguous(), draw(300, 300), generates=Generates.ROUNDED
        )
        assert {kernel.name.partition("_")[0] for kernel in kernels} == {"by", "pointwise"}
        assert others == []


def turned(matrix):
    return matrix.t().clone(memory_format=torch.contiguous_format)


TURNED = {
    "alone": turned,
    "as it is cast": lambda x: turned((x * 2).to(torch.float8_e5m2)),
    "beside another cast": lambda x: ((x * 3).to(torch.float8_e4m3fn), turned((x * x[:1]).to(torch.float8_e4m3fn))),
    "a cast of a transposed matrix": lambda x: turned((x.t() * x.t()[:, :1]).to(torch.float8_e4m3fn).t()),
}


@interpreted
@pytest.mark.parametrize("shape", [*slow(((128, 128),)), (200, 333), *slow(((384, 129),))], ids=str)
@pytest.mark.parametrize("name", TURNED)
def test_a_kernel_turns_a_matrix_of_float8_as_it_makes_it(name, shape):
    """A GEMM reads one operand by columns, and ATen would turn it number by number."""
    x = draw(*shape).to(torch.float8_e4m3fn if name == "alone" else torch.float32)
    kernels, others = kernels_of(TURNED[name], x)
    assert [kernel.name.partition("_")[0] for kernel in kernels] == ["turned"]
    assert others == []
    for found, expected in zip(*as_one_kernel(TURNED[name], x)(), strict=True):
        assert found.stride() == expected.stride()
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


ADDED = {
    "rows": (9, (40,), (6,), torch.float32),
    "many rows of few places": (3, (200,), (300,), torch.bfloat16),
    "elements": (5, (64,), (), torch.float16),
    "rows of matrices, and places without any": (50, (20,), (3, 4), torch.float32),
}


class TestRowSums:
    @staticmethod
    def of(name, device):
        places, rows, shape, dtype = ADDED[name]
        index = torch.randint(-places, places, rows, generator=torch.Generator().manual_seed(0)).to(device)
        initial, values = draw(places, *shape).to(device, dtype), draw(*rows, *shape).to(device, dtype)
        code, _ = written(
            lambda x, i, v: x.index_put([i], v, accumulate=True), initial, index, values, generates=Generates.ROUNDED
        )
        (call,) = code.recording.calls
        assert rows_added(call, code.recording, code.tensors.__contains__) is not None
        exact = initial.double().index_put([index], values.double(), accumulate=True).to(dtype)
        return index_put_rows(initial, index, values), exact

    @each_device
    @pytest.mark.parametrize("name", ADDED)
    def test_rows_add_up_where_they_go_to_in_the_same_order_each_time(self, name, device):
        found, exact = self.of(name, device)
        torch.testing.assert_close(found, exact)
        assert all(torch.equal(found, self.of(name, device)[0]) for _ in range(5 if device == "cuda" else 1))

    @interpreted
    def test_a_policy_that_may_round_adds_rows_by_a_kernel(self):
        def gradient(x, i, v):
            return x.index_put([i], v, accumulate=True)

        given = draw(4, 6), torch.tensor([1, 1, 3]), draw(3, 6)
        for generates, by_kernel in ((Generates.ROUNDED, True), (Generates.EXACT, False)):
            with generating_on("cpu"):
                code, _ = written(gradient, *given, generates=generates)
            assert ("PlannedCall" in [type(each).__name__ for each in code.names.values()]) is by_kernel

    @each_device
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *slow(torch.float16)], ids=str)
    @pytest.mark.parametrize("times", [0, *slow(1), 3, *slow(4)])
    def test_an_exact_policy_adds_rows_in_turn(self, times, dtype, device):
        rows, width, places = 60, 40, 60 // times if times else 7
        values, order = draw(rows, width).to(device, dtype), torch.randperm(rows, device=device)

        def gradient(v, experts):
            index = experts.sort(stable=True).indices // times if times else experts % places
            return v.new_zeros(places, width).index_put([index], v, accumulate=True)

        with generating_on(device):
            code, numbers = written(gradient, values, order)
            run = code.compiled(["def run(t0, t1):"], f"t{numbers[0]}", [f"t{numbers[0]}"])
        (in_turn,) = (each for each in code.names.values() if isinstance(each, (InTurn, PlannedCall)))
        for _ in range(3):
            assert same_bits(run(values, order), gradient(values, order))
        is_trusted = (
            device == "cuda" or dtype is not torch.bfloat16
        )  # the interpreter rounds to bfloat16 in another way
        assert times == 1 or isinstance(in_turn._run, PlannedCall) is is_trusted

    @each_device
    @pytest.mark.parametrize(
        ("generates", "counts"), [(Generates.EXACT, [0, 1, 1]), (Generates.ROUNDED, [2, 1, 1])], ids=str
    )
    def test_rows_that_were_sorted_by_their_experts_are_not_sorted_again(self, device, generates, counts):
        """counts: how often each of two places, and of all, gets its rows by an order that is known."""

        def gradients(experts, v, tokens):
            experts, order = experts.sort()
            experts.clamp_(max=2)  # nobody reads it
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=order.device)
            to_tokens = torch.zeros_like(tokens).index_put([order // 2], v, accumulate=True)
            one_each = [torch.zeros_like(v).index_put([index], v, accumulate=True) for index in (order, inverse)]
            return to_tokens, *one_each

        given = [each.to(device) for each in (draw(12).mul(4).long(), draw(12, 6), draw(6, 6))]
        with generating_on(device):
            code, numbers = written(gradients, *given, generates=generates)
            names = [code.tensors[number] for number in numbers]
            run = code.compiled(["def run(t0, t1, t2):"], f"({', '.join(names)})", names)
        lines = [line for line in run.source.splitlines() if re.match(rf"\s*({'|'.join(names)}) =", line)]
        assert not re.search("arange|index_put__|clamp_", run.source), "the inverse is made by one kernel"
        assert [", 0, None, " not in line and "aten" not in line for line in lines] == [count > 0 for count in counts]
        for found, expected, count in zip(run(*given), gradients(*given), counts, strict=True):
            torch.testing.assert_close(found, expected)
            assert count != 1 or torch.equal(found, expected)


def norm(x):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def backward_of_a_gated_mlp(a, b, gradient, w):
    """What it multiplies is made in the pass that makes the gradients."""
    product = a * b
    of_weight = gradient.t() @ product
    inner = gradient @ w
    return of_weight, inner * b, inner * a


GROUPED = {
    "what only a group reads never reaches memory": (lambda x: ((x * 2).exp() + 1).tanh(), [draw(64)], [1], []),
    "a cast is made in each group that reads it": (norm, [draw(8, 16).bfloat16()], [1, 1], ["mean_dim"]),
    "a cast to float8 reads each row once": (lambda x: cast_along(x, -1), [draw(300, 8)], [2], []),
    "a cast to float8 of a transposed matrix, too": (lambda x: cast_along(x.t(), 0), [draw(300, 8)], [2], []),
    "a scale of each column is made once": (
        lambda x: cast_along(x, 0), [draw(300, 8)], [2, 1], ["linalg_vector_norm_default"],
    ),
    "a GEMM between two calls keeps them apart": (
        lambda x, w: ((x * 2).exp() @ w * 3).tanh(), [draw(8, 8)] * 2, [1, 1], ["mm_default"],
    ),
    "groups that read the same become one": (lambda g, a, b: (g * a, g * b), [draw(64)] * 3, [2], []),
    "a GEMM waits for a group that needs another": (backward_of_a_gated_mlp, [draw(8, 8)] * 4, [3], ["mm_default"] * 2),
    "what reads no tensor is no kernel": (
        lambda x: x.new_zeros(1, 8).expand(64, 8).clone(), [draw(64)], [], ["new_zeros_default", "clone_default"],
    ),
    "what is not in the table stays with ATen": (
        lambda x: torch.erfinv(x * 0.1) + torch.lgamma(x), [draw(64)], [],
        ["mul_Tensor", "erfinv_default", "lgamma_default", "add_Tensor"],
    ),
}  # fmt: skip
"""A function of tensors; how often each kernel stores; and the ops that remain ATen's."""


def made_twice_of_what_is_overwritten(x, w):
    a = x @ x
    c = a * 0.5
    part, whole = c[:1] * 2, c * 3
    a.cumsum_(1)
    return part + (w @ w)[:1], whole, a


def made_before_what_is_read_beside_it(x, w):
    a = x @ x
    c = a * 0.5
    a.cumsum_(1)
    return c + a @ w, a


def sizes_of_what_is_overwritten(x, w):
    a = x * 2
    sizes = a.abs()
    a.cumsum_(1)
    return sizes.max() + w, a


def places_of_a_permutation_that_is_overwritten(x, w):
    permutation = x[:, 0].sort()[1]
    places = permutation // 2
    permutation.mul_(-1).add_(7)  # another one
    return torch.ops.aten.index_put(torch.zeros(4, 8), [places], x * 2, True), permutation


ORDERED = {
    **{
        function.__name__: function
        for function in (
            made_twice_of_what_is_overwritten,
            made_before_what_is_read_beside_it,
            sizes_of_what_is_overwritten,
            places_of_a_permutation_that_is_overwritten,
        )
    },
    "a buffer that is overwritten as a whole": lambda x, w: (x * w).copy_(x) * 2,
    "a dimension of size one that is written in place": lambda x, w: (x[None].transpose(0, 1) * 2).relu_(),
    "one number": lambda x, w: x[0].sum() * 2 + 1,
    "one number of a transposed matrix": lambda x, w: (x[:1] @ w[:, :2]).t()[:1] * 2 + 1,
}
"""Functions of two matrices, which become kernels among ATen's calls."""


@interpreted
@pytest.mark.parametrize("function", ORDERED.values(), ids=ORDERED)
def test_kernels_among_other_calls_read_what_these_left(function):
    given = [(draw(8, 8) + number, draw(8, 8).t() - number) for number in range(3)]
    with generating_on("cpu"):
        code, numbers = written(function, *given[0], generates=Generates.ROUNDED)
        results = [code.tensors[number] for number in numbers]
        run = code.compiled(["def run(t0, t1):"], f"({', '.join(results)},)", [*results, "t0", "t1"])
    for x, w in given:
        expected = function(x, w)
        for one, other in zip(run(x, w), expected if isinstance(expected, tuple) else [expected], strict=True):
            torch.testing.assert_close(one.view(other.shape), other, rtol=1e-6, atol=1e-6)
        for kernel in run.kernels:
            kernel._compiled.result()
    assert all(kernel.is_exact for kernel in run.kernels)


class TestGrouping:
    @pytest.mark.parametrize(("function", "given", "stores", "atens"), GROUPED.values(), ids=GROUPED)
    def test_what_becomes_one_kernel(self, function, given, stores, atens):
        kernels, others = kernels_of(function, *given)
        assert [kernel.source.count("tl.store") for kernel in kernels] == stores
        assert [line.partition(" = ")[2].partition("(")[0].removeprefix("aten_") for line in others] == atens
        assert given[0].dtype is torch.float32 or all("tl.float32" in kernel.source for kernel in kernels)

    def test_memory_that_nobody_reads_afterwards_is_written_to(self):
        kernels, _ = kernels_of(lambda x, w: (x @ w).exp() * 2, draw(8, 8), draw(8, 8))
        assert kernels[0]._reused == {0: 0}
        kernels, _ = kernels_of(lambda x: x.exp() * 2, draw(8, 8))
        assert kernels[0]._reused == {}

        def attention(q, k, mask, sinks, v):
            scores, _ = scores_with_a_sink((q @ k).view(2, 4, 64, 64), mask, sinks)
            return scores[..., :-1].reshape(8, 64, 64) @ v

        given = draw(8, 64, 16), draw(8, 16, 64), draw(1, 1, 64, 64), draw(4), draw(8, 64, 16)
        with generating_on("cpu"):
            kernels, others = kernels_of(attention, *given, generates=Generates.ROUNDED)
        assert [kernel._reused for kernel in kernels] == [{0: 1}]
        assert len(others) == 2

    def test_memory_that_is_filled_in_part_is_read(self):
        def filled(x, parts):
            whole = x.new_empty(8, 8)
            for part in range(parts):
                whole[part * 4 : part * 4 + 4] = x * part
            return whole.exp()

        for parts, others_left in ((2, 0), (1, 1)):
            with generating_on("cpu"):
                kernels, others = kernels_of(lambda x, parts=parts: filled(x, parts), draw(4, 8))
            assert len(kernels) == 1
            assert len(others) == others_left

    def test_a_kernel_of_its_own_repeats_an_operand(self):
        masked = lambda x, mask: x.masked_fill(mask, 0.0)  # noqa: E731
        for rows, count in ((2**10, 1), (8, 0)):
            kernels, _ = kernels_of(masked, torch.zeros(rows, 2**10), torch.zeros(rows, 1, dtype=torch.bool))
            assert len(kernels) == count


def normed(x, weight):
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return scale, weight * (wide * scale).to(x.dtype)


@each_device
def test_a_sum_in_another_order_may_round_what_is_computed_of_it_differently(device):
    """However exact the sum itself is, which is a result, too."""
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape).to(device, torch.bfloat16) for shape in ((256, 256), (256,)))
    kernel, given = generated(normed, x, weight)
    if device == "cpu":  # the order of a sum on CUDA may be ATen's, by chance
        assert not torch.equal(kernel._launch(*given)[1], normed(x, weight)[1])
    kernel(*given)
    kernel._compiled.result()
    kernel(*given)
    assert kernel.is_exact, kernel.reason


@interpreted
@pytest.mark.parametrize("action", [{"action": "recompute", "via": "hook"}, {"action": "checkpoint"}], ids=str)
def test_a_captured_region_in_generated_kernels_is_exact(action):
    def forward(self, x):
        hidden = self.up(x)
        parts = hidden.new_empty(4, 16)
        parts[:, :8] = (F.relu(hidden) * hidden)[:, 8:]
        parts[:, 8:] = hidden[:, ::2]
        return x + self.down(parts.mul_(0.5)) * 0.25

    torch.manual_seed(0)
    block = module_of(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8))
    lean, plain = twins_of(nn.Sequential(block, copy.deepcopy(block)))
    with generating_on("cpu"), kernels_made() as made:
        recompute.apply(lean, {"version": 1, "rules": [{"match": "*", **action}]})
        for step in range(10):
            x = draw(4, 8) + step
            for net in (plain, lean):
                net.zero_grad()
                net(x).pow(2).sum().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), lean.parameters(), strict=True))
            wait_for(made)
    assert any(kernel.is_exact for kernel in made)
    assert [kernel.reason for kernel in made if kernel.reason] == []


Keeps = function_of(torch.sin, lambda gradient, x, y: gradient * x.cos() + y, saves=lambda y, x: (x, y), hides=True)
"""Keeps what it is given and what it gives."""


def read_by_kernels_later(self, x):
    h = self.up(x)
    y = Keeps.apply(h)
    return (h * 3).neg() * 0.5, (y * 3).neg() * 0.5, (h * 3).neg() + y @ (y * 0.5).t() @ y


def written_by_kernels_later(self, x):
    h = self.up(x)
    y = Keeps.apply(h)
    h.mul_(2).neg_()
    return h * 0.5 + y


def gradients_read_by_kernels_later(self, x):
    return (x * 2).neg() + Keeps.apply(self.up(x))


@interpreted
@pytest.mark.parametrize("forward", [read_by_kernels_later, written_by_kernels_later, gradients_read_by_kernels_later])
def test_kernels_leave_alone_the_memory_that_a_function_may_keep(forward):
    def step(module):
        x = draw(4, 8).requires_grad_()
        outputs = module(x)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = [draw(4, 8) + number for number in range(len(outputs))]
        torch.autograd.backward(outputs, gradients, retain_graph=True)
        torch.autograd.backward(outputs, gradients)
        return [*outputs, *gradients, x.grad]

    twins = Twins(Around(module_of(forward, up=nn.Linear(8, 8))))
    with generating_on("cpu"):
        twins.settle(step)
        for _ in range(3):
            for kernel in twins.regions[0].kernels:
                if kernel._compiled is not None:
                    kernel._compiled.result()
            twins.step(step)
        assert twins.regions[0].kernels


class TestAtRunTime:
    @staticmethod
    def kernel(source, aten):
        from recompute.engine.cut.layout import Layout

        return GeneratedKernel(source, aten, Elements(1024), [Layout.of(torch.empty(1024))])

    SOURCE = (
        "def doubled(p0, p1):\n    a = tl.program_id(0) * 1024 + tl.arange(0, 1024)\n"
        "    tl.store(p1 + a, tl.load(p0 + a) * {factor})\n"
    )

    def test_aten_runs_until_the_kernel_is_compiled(self, monkeypatch):
        waiting = []
        monkeypatch.setattr(generated_kernel, "_compiling", set())
        monkeypatch.setattr(
            generated_kernel,
            "_compilers",
            lambda: type("Never", (), {"submit": lambda *a: waiting.append(a) or Future()}),
        )

        kernel = self.kernel(self.SOURCE.format(factor=2.0), lambda x: (x * 2,))
        x = draw(1024)
        assert torch.equal(kernel(x)[0], x * 2)
        assert len(waiting) == 1
        assert not kernel.is_exact

    @interpreted
    def test_a_kernel_of_other_bits_never_runs_again(self):
        kernel = self.kernel(self.SOURCE.format(factor=2.5), lambda x: (x * 2,))
        x = draw(1024)
        for _ in range(3):
            assert torch.equal(kernel(x)[0], x * 2)
            kernel._compiled.result()
        assert kernel.reason == "its first call did not give ATen's result"

    @interpreted
    @pytest.mark.parametrize("alive", [[808], [5000, 3000, 808]], ids=["at once", "in the third call"])
    def test_a_kernel_waits_in_a_backward_until_comparing_makes_no_new_peak(self, monkeypatch, alive):
        kernel, calls, exact = self.kernel(self.SOURCE.format(factor=2.0), lambda x: (x * 2,)), len(alive), []
        doubled = function_of(lambda x: x * 2, lambda g: kernel(g)[0], saves=lambda *_: ())
        monkeypatch.setattr(generated_kernel, "allocated_nbytes", lambda device: (alive.pop(0), 9000))

        def backward(times):
            y = draw(1024).requires_grad_()
            for _ in range(times):
                y = doubled.apply(y)
                y.register_hook(lambda _: exact.append(kernel.is_exact))
            y.square().sum().backward()

        backward(1)
        kernel._compiled.result()
        backward(calls + 1)
        assert exact[1:] == [False] * calls + [True]

    @interpreted
    def test_a_kernel_waits_in_no_second_backward(self, monkeypatch):
        kernel = self.kernel(self.SOURCE.format(factor=2.0), lambda x: (x * 2,))
        doubled = function_of(lambda x: x * 2, lambda g: kernel(g)[0], saves=lambda *_: ())
        monkeypatch.setattr(generated_kernel, "allocated_nbytes", lambda device: (5000, 9000))
        exact = []
        for _ in range(3):
            doubled.apply(draw(1024).requires_grad_()).square().sum().backward()
            exact.append(kernel.is_exact)
            kernel._compiled.result()
        assert exact == [False, False, True]
