"""RMSNorm: shapes, strides and extreme values, the castings against their models, and what backward does on request."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import rms_norm_backward, rms_norm_forward, rms_norm_reference, rms_norm_regenerate
from kernel_testing import FLOAT32_ROUNDING, each_dtype, make, relative_error
from norm_testing import HEADS, INTERPRETERS_ROUNDING
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels import norm_kernels as kernels
from recompute.kernels.rms_norm import rms_norm

CASTINGS = ["llama", "gemma", "none"]
EPS = 1e-6
each_casting = pytest.mark.parametrize("casting", CASTINGS)


def run(function: Any, x: Tensor, weight: Tensor, casting: str, dy_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and both gradients, for a dy that has ``dy_dtype``'s precision."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, EPS, casting)
    dy = make(*y.shape, dtype=dy_dtype, seed=2).to(y)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def assert_as_good_as_the_formula(x: Tensor, weight: Tensor, casting: str) -> None:
    found = run(rms_norm, x, weight, casting)
    formula = run(rms_norm_reference, x, weight, casting)
    exact = run(rms_norm_reference, x.double(), weight.double(), casting, found[0].dtype)
    is_interpreted = launch.uses_triton(x) and not x.is_cuda
    is_one_sample = x.is_cuda and x.shape[:-1].numel() == 1  # all of a row errs with its rstd
    slack = INTERPRETERS_ROUNDING if is_interpreted or is_one_sample else FLOAT32_ROUNDING
    for value, peer, truth in zip(found, formula, exact, strict=True):
        assert value.shape == truth.shape
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + slack


@each_casting
@pytest.mark.parametrize("hidden", [7, 100, 257, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 37])
def test_any_number_of_rows_and_columns(rows: int, hidden: int, casting: str, device: str):
    x, weight = make(rows, hidden, device=device), make(hidden, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, casting)


@each_casting
@pytest.mark.parametrize("rows", [1, 37])
def test_one_column(rows: int, casting: str, device: str):
    """Where dx is nearly 0 and dweight one number: errors are measured against what they are summed from."""
    x = (make(rows, 1).sign() * torch.linspace(1, 2, rows)[:, None]).to(device)
    weight = make(1, device=device, seed=1)
    found = run(rms_norm, x, weight, casting)
    exact = run(rms_norm_reference, x.double(), weight.double(), casting)
    gain = weight.abs() + 1
    dy = make(rows, 1, seed=2).to(device).abs()
    for value, truth, scale in zip(found, exact, (gain, dy * gain, dy.sum(0)), strict=True):
        assert ((value - truth).abs() <= 8 * FLOAT32_ROUNDING * scale).all()


@pytest.mark.slow
def test_rows_wider_than_a_program_holds(device: str):
    x, weight = make(2, 33_000, device=device), make(33_000, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, "llama")


@each_casting
@each_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(3, 0), (1, 123), (7, 768), (199, 64)])
def test_errors_are_no_larger_than_eagers(rows: int, hidden: int, dtype: torch.dtype, casting: str, device: str):
    x, weight = make(rows, hidden, device=device, dtype=dtype), make(hidden, device=device, dtype=dtype, seed=1)
    assert_as_good_as_the_formula(x, weight, casting)


@pytest.mark.gpu
@each_casting
@each_dtype
@pytest.mark.parametrize("hidden", [64, 123, 768, 4096, 5120, 14336, 65536, 131072])
@pytest.mark.parametrize("rows", [1, 7, 199, 8192])
def test_errors_at_real_sizes_are_no_larger_than_eagers(rows: int, hidden: int, dtype: torch.dtype, casting: str):
    rows = min(rows, 2**26 // hidden)
    x, weight = make(rows, hidden, device="cuda", dtype=dtype), make(hidden, device="cuda", dtype=dtype, seed=1)
    assert_as_good_as_the_formula(x, weight, casting)


@pytest.mark.parametrize("scale", [1e4, 1e-4])
@each_dtype
def test_large_and_small_values_beside_rows_of_zeros(dtype: torch.dtype, scale: float, form: str, device: str):
    x = make(4, 300, device=device).mul(scale).clamp(-6e4, 6e4).to(dtype)
    x[1] = 0
    weight = make(300, device=device, dtype=dtype, seed=1)
    assert_as_good_as_the_formula(x, weight, "llama")
    y, dx, _ = run(rms_norm, x, weight, "llama")
    _, dx_of_eager, _ = run(rms_norm_reference, x, weight, "llama")
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert relative_error(dx[1], dx_of_eager[1].double()) <= torch.finfo(dtype).eps


@each_casting
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_infinities_and_nans_go_where_eagers_go_and_nowhere_else(casting: str, form: str, device: str):
    x, weight = make(6, 300, device=device), make(300, device=device, seed=1)
    clean = run(rms_norm, x, weight, casting)
    x[1, 3], x[3, 5], x[4, 70] = torch.inf, -torch.inf, torch.nan
    found, eager = run(rms_norm, x, weight, casting), run(rms_norm_reference, x, weight, casting)
    for value, peer in zip(found, eager, strict=True):
        assert torch.equal(value.isnan(), peer.isnan())
        assert torch.equal(value.isinf(), peer.isinf())
    untouched = [0, 2, 5]
    for value, expected in zip(found[:2], clean[:2], strict=True):
        assert torch.equal(value[untouched], expected[untouched])


def test_many_rows_a_program_and_many_programs(multiprocessors: int, form: str, device: str):
    x, weight = make(75, 300, device=device), make(300, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, "llama")


@pytest.mark.parametrize("hidden", [1, 64, 1000, 16384, 131072])
@pytest.mark.parametrize("nbytes", [2, 4, 8, 12])
@pytest.mark.parametrize(("is_forward", "is_layer_norm"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("kibibytes", [100, 164, 228], ids=["Ada", "Ampere", "Hopper"])
def test_tiles_fit_into_shared_memory(
    kibibytes: int, is_forward: bool, is_layer_norm: bool, nbytes: int, hidden: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernels, "_shared_memory", lambda device: kibibytes * 1024)
    tiles = kernels._tiles.__wrapped__(is_forward, hidden, nbytes, torch.device("cpu"), is_layer_norm)
    ahead = tiles.constants["STAGES"] - 1
    assert ahead >= 0
    assert ahead * tiles.rows * tiles.columns * nbytes * max(tiles.resident, 1) <= kibibytes * 1024


@each_casting
def test_no_rows(casting: str, device: str):
    y, dx, dweight = run(rms_norm, make(0, 5, device=device), make(5, device=device), casting)
    assert y.shape == dx.shape == (0, 5)
    assert torch.equal(dweight, torch.zeros_like(dweight))


@pytest.mark.parametrize("shape", [(60,), (4, 60), (2, 2, 60), (2, 1, 2, 60)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...], device: str):
    x, weight = make(*shape, device=device), make(60, device=device, seed=1)
    found = run(rms_norm, x, weight, "llama")
    rows = run(rms_norm, x.view(-1, 60), weight, "llama")
    assert [value.shape for value in found] == [shape, shape, (60,)]
    for value, expected in zip(found, rows, strict=True):
        assert torch.equal(value, expected.view(value.shape))


class NoneRMSNorm(nn.RMSNorm):
    """Under the constructor of the two others."""

    def __init__(self, hidden: int, eps: float):
        super().__init__(hidden, eps)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("casting", "model"), [("llama", LlamaRMSNorm), ("gemma", Gemma3RMSNorm), ("none", NoneRMSNorm)]
)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_dtypes_and_values_are_those_of_the_models(
    casting: str, model: Any, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
):
    norm = model(100, eps=EPS).to(device, weight_dtype)
    with torch.no_grad():
        norm.weight.copy_(make(100, seed=1))
    x = make(6, 100, device=device, dtype=dtype)
    expected = norm(x.requires_grad_())
    found = run(rms_norm, x, norm.weight, casting)
    dy = make(6, 100, seed=2).to(expected)
    wanted = [expected, *torch.autograd.grad(expected, (x, norm.weight), dy)]
    exact = run(rms_norm_reference, x.double(), norm.weight.double(), casting, expected.dtype)
    for value, peer, truth in zip(found, wanted, exact, strict=True):
        assert value.dtype is peer.dtype
        bound = 1.05 * relative_error(peer, truth) + FLOAT32_ROUNDING
        assert relative_error(value, truth) <= bound
    if dtype is not torch.float32:  # rounded in the same places: only near-ties may fall to the other side
        assert (found[0] == expected).float().mean() >= 0.99


@pytest.mark.parametrize(("casting", "model"), [("llama", LlamaRMSNorm), ("gemma", Gemma3RMSNorm)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cpu_the_output_has_the_bits_of_hugging_faces(casting: str, model: Any, dtype: torch.dtype):
    norm = model(100, eps=EPS).to(dtype)
    x = make(6, 100, dtype=dtype)
    assert torch.equal(rms_norm(x, norm.weight, EPS, casting), norm(x))


def test_a_weight_of_zero_gets_its_gradient(device: str):
    x, weight = make(8, 10, device=device), torch.zeros(10, device=device)
    _, _, dweight = run(rms_norm, x, weight, "llama")
    _, _, of_ones = run(rms_norm, x, weight + 1, "llama")
    assert dweight.abs().min() > 0
    assert torch.equal(dweight, of_ones)


class Backwards(TorchDispatchMode):
    """The calls of rms_norm's backward: arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.recompute.rms_norm_backward.default:
            self.calls.append((args, results))
        return results


@pytest.mark.parametrize(("x_trains", "weight_trains"), [(True, True), (True, False), (False, True), (True, None)])
def test_frozen_inputs_cost_no_work(
    x_trains: bool, weight_trains: bool | None, form: str, device: str, launched: list[tuple[Any, dict[str, Any]]]
):
    x = make(5, 300, device=device).requires_grad_(x_trains)
    weight = None if weight_trains is None else make(300, device=device).requires_grad_(weight_trains)
    y = rms_norm(x, weight)
    assert bool(launched) == launch.uses_triton(x)
    uses_kernels = bool(launched)
    launched.clear()
    with Backwards() as seen:
        y.backward(make(5, 300, device=device, seed=2))

    ((_, (dx, dweight, _)),) = seen.calls
    assert (dx is not None) is x_trains
    assert (dweight is not None) is bool(weight_trains)
    if uses_kernels:
        dots = [kernels._dots_kernel] if form == "columns" and x_trains else []
        sums = [kernels._sum_kernel] if weight_trains else []
        assert [kernel for kernel, _ in launched] == [*dots, kernels._backward_kernel, *sums]
        arguments = launched[len(dots)][1]
        assert (arguments["dx"] is not None) is x_trains
        assert (arguments["weight_parts"] is not None) is bool(weight_trains)
        assert arguments["dresidual"] is None
        assert arguments["mean"] is arguments["bias_parts"] is None


@each_casting
@each_dtype
def test_what_is_regenerated_has_the_bits_of_forward(dtype: torch.dtype, casting: str, form: str, device: str):
    x, dy = make(5, 300, device=device, dtype=dtype), make(5, 300, device=device, seed=2)
    for weight in (None, make(300, device=device, dtype=dtype, seed=1), make(300, device=device, seed=1)):
        y, rstd = rms_norm_forward(x, weight, EPS, casting)
        assert torch.equal(rms_norm_regenerate(x, weight, rstd, casting), y)
        for needs_dx, needs_dweight in [(True, True), (True, False), (False, True)]:
            gradients = rms_norm_backward(dy.to(y.dtype), x, weight, rstd, casting, True, True)
            plain = rms_norm_backward(dy.to(y.dtype), x, weight, rstd, casting, needs_dx, needs_dweight)
            for value, expected in zip(gradients, plain, strict=True):
                assert expected is None or torch.equal(value, expected)


@each_dtype
def test_the_gradient_of_the_stream_is_added_before_rounding(dtype: torch.dtype, form: str, device: str):
    x, dy, dresidual = (make(9, 300, device=device, dtype=dtype, seed=seed) for seed in range(3))
    weight = make(300, device=device, dtype=dtype, seed=3)

    def gradient(*tensors: Tensor) -> Tensor:
        x, dy, dresidual, weight = tensors
        _, rstd = rms_norm_forward(x, weight, EPS, "llama")
        dx, dweight = rms_norm_backward(dy, x, weight, rstd, "llama", True, True, dresidual)
        _, expected = rms_norm_backward(dy, x, weight, rstd, "llama", True, True)
        assert torch.equal(dweight, expected)
        return dx

    tensors = (x, dy, dresidual, weight)
    exact = gradient(*(tensor.double() for tensor in tensors))
    found = gradient(*tensors)
    assert found.dtype is dtype
    # What one rounding leaves, of each element that it rounds, and of float32's own error beside it.
    assert ((found - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@each_dtype
@pytest.mark.parametrize("view", HEADS)
def test_heads_are_read_in_place(
    view: str, dtype: torch.dtype, device: str, launched: list[tuple[Any, dict[str, Any]]]
):
    heads, weight = HEADS[view](make(2, 6, 7, 64, device=device, dtype=dtype)), make(64, device=device, dtype=dtype)
    assert not heads.is_contiguous()
    found = run(rms_norm, heads, weight, "llama")
    if launched:
        assert launched[0][1]["x"].data_ptr() == heads.data_ptr()
        x_in_backward = next(given["x"] for kernel, given in launched if kernel is kernels._backward_kernel)
        assert x_in_backward.data_ptr() == heads.data_ptr()
    copied = run(rms_norm, heads.contiguous(), weight, "llama")
    eager = copied[0] if view == "shared" else rms_norm_reference(heads, weight, EPS, "llama")
    meta = run(rms_norm, heads.to("meta"), weight.to("meta"), "llama")
    assert [value.stride() for value in found] == [value.stride() for value in meta]
    assert [value.stride() for value in found] == [eager.stride(), eager.stride(), (1,)]
    assert torch.equal(found[0], copied[0])
    assert torch.equal(found[1], copied[1])
    assert relative_error(found[2], copied[2].double()) <= 2 * torch.finfo(dtype).eps  # summed in another order


@pytest.mark.parametrize("change", [Tensor.contiguous, lambda dy: dy[:, :, :1].expand(dy.shape)])
def test_gradients_of_heads_may_have_any_strides(change: Callable[[Tensor], Tensor], device: str):
    heads = make(2, 5, 4, 64, device=device).transpose(1, 2).requires_grad_()
    y = rms_norm(heads)
    dy = change(make(*y.shape, device=device, seed=2))
    (dx,) = torch.autograd.grad(y, heads, dy)
    plain = heads.detach().contiguous().requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm(plain), plain, dy)
    assert torch.equal(dx, expected)


def test_every_run_gives_the_same_bits(form: str, device: str):
    x, weight = make(31, 300, device=device), make(300, device=device, seed=1)
    first = run(rms_norm, x, weight, "llama")
    for _ in range(3 if device == "cuda" else 1):
        assert all(map(torch.equal, run(rms_norm, x, weight, "llama"), first))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    hidden = 4096
    rows = 2**31 // hidden + 2
    x = torch.ones(rows, hidden, device="cuda", dtype=torch.bfloat16)
    x[-2:] = make(2, hidden, device="cuda", dtype=torch.bfloat16)
    weight = make(hidden, device="cuda", dtype=torch.bfloat16, seed=1)
    y = rms_norm(x.requires_grad_(), weight)
    assert torch.equal(y[-2:], rms_norm(x[-2:], weight))
    dy = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    last = x[-2:].detach().requires_grad_()
    (expected,) = torch.autograd.grad(rms_norm(last, weight), last, dy[-2:])
    assert torch.equal(dx[-2:], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 4), torch.ones(3)), r"weight has shape (3,); expected (4,) for x of shape (2, 4)"),
        ((torch.ones(2, 4), torch.ones(1, 4)), "weight has shape (1, 4)"),
        ((torch.tensor(1.0),), "no dimension to normalize over"),
        ((torch.ones(2, 4, dtype=torch.int64),), "x is torch.int64"),
        ((torch.ones(2, 4, dtype=torch.complex64),), "x is torch.complex64"),
        ((torch.ones(2, 4), torch.ones(4, dtype=torch.int32)), "weight is torch.int32"),
        ((torch.ones(2, 4), torch.ones(4, device="meta")), "x is on cpu and weight on meta"),
        ((torch.ones(2, 4), [1.0] * 4), "weight is list; expected a Tensor"),
        ((None, torch.ones(4)), "x is NoneType; expected a Tensor"),
        ((torch.ones(2, 4), None, EPS, "lama"), "unknown casting 'lama'; expected one of llama, gemma, none"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        rms_norm(*arguments)
