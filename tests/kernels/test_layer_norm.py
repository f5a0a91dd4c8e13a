"""LayerNorm: shapes, strides and extreme values, the modules that compute it, and what backward does on request."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import layer_norm_backward, layer_norm_forward, layer_norm_reference, layer_norm_regenerate
from kernel_testing import FLOAT32_ROUNDING, each_dtype, make, relative_error
from norm_testing import HEADS, INTERPRETERS_ROUNDING
from tiers import by_default
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels import norm_kernels as kernels
from recompute.kernels.layer_norm import layer_norm

EPS = 1e-5
AFFINE = {"weight and bias": (True, True), "weight": (True, False), "bias": (False, True), "neither": (False, False)}
each_affine = pytest.mark.parametrize("affine", by_default(AFFINE, "weight and bias", "weight", "neither"))
Launched = list[tuple[Any, dict[str, Any]]]


def eager(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def make_inputs(
    *shape: int, device: str, dtype: torch.dtype = torch.float32, affine: tuple[bool, bool] = (True, True)
) -> list[Tensor | None]:
    """x, weight and bias."""
    x = make(*shape, device=device, dtype=dtype)
    parameters = (make(shape[-1], device=device, dtype=dtype, seed=seed) for seed in (1, 2))
    return [x, *(each if is_there else None for each, is_there in zip(parameters, affine, strict=True))]


def run(function: Any, inputs: list[Tensor | None], dy_dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and the gradients of all inputs that there are, for a dy that has ``dy_dtype``'s precision."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in inputs]
    y = function(*leaves, EPS)
    dy = make(*y.shape, dtype=dy_dtype, seed=3).to(y)
    return [y.detach(), *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy)]


def assert_as_good_as_eager(inputs: list[Tensor | None]) -> None:
    found, peers = run(layer_norm, inputs), run(eager, inputs)
    exact = run(eager, [None if each is None else each.double() for each in inputs], found[0].dtype)
    x = inputs[0]
    assert x is not None
    is_interpreted = launch.uses_triton(x) and not x.is_cuda
    is_one_sample = x.is_cuda and x.shape[:-1].numel() == 1  # all of a row errs with its rstd
    slack = INTERPRETERS_ROUNDING if is_interpreted or is_one_sample else FLOAT32_ROUNDING
    for value, peer, truth in zip(found, peers, exact, strict=True):
        assert (value.shape, value.dtype) == (truth.shape, peer.dtype)
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + slack


@each_affine
@pytest.mark.parametrize("hidden", [7, 100, 257, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 37])
def test_any_number_of_rows_and_columns(rows: int, hidden: int, affine: tuple[bool, bool], device: str):
    assert_as_good_as_eager(make_inputs(rows, hidden, device=device, affine=affine))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [9_000, 33_000])
def test_rows_wider_than_a_program_holds(hidden: int, device: str):
    assert_as_good_as_eager(make_inputs(2, hidden, device=device))


@each_affine
@each_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(3, 0), (1, 123), (7, 768), (199, 64)])
def test_errors_are_no_larger_than_eagers(
    rows: int, hidden: int, dtype: torch.dtype, affine: tuple[bool, bool], device: str
):
    assert_as_good_as_eager(make_inputs(rows, hidden, device=device, dtype=dtype, affine=affine))


@pytest.mark.gpu
@each_affine
@each_dtype
@pytest.mark.parametrize("hidden", [64, 123, 768, 1600, 4096, 5120, 14336, 65536, 131072])
@pytest.mark.parametrize("rows", [1, 7, 199, 8192])
def test_errors_at_real_sizes_are_no_larger_than_eagers(
    rows: int, hidden: int, dtype: torch.dtype, affine: tuple[bool, bool]
):
    assert_as_good_as_eager(make_inputs(min(rows, 2**26 // hidden), hidden, device="cuda", dtype=dtype, affine=affine))


@pytest.mark.parametrize("mean", [30.0, -1000.0])
def test_a_mean_that_is_large_beside_the_deviation(mean: float, form: str, device: str):
    x, *parameters = make_inputs(5, 300, device=device)
    assert_as_good_as_eager([x + mean, *parameters])


@pytest.mark.parametrize("scale", [1e4, 1e-4])
@each_dtype
def test_large_and_small_values_beside_rows_that_are_constant(dtype: torch.dtype, scale: float, form: str, device: str):
    x, weight, bias = make_inputs(5, 300, device=device, dtype=dtype)
    assert x is not None
    x = x.float().mul(scale).clamp(-6e4, 6e4).to(dtype)
    x[1], x[2] = 0, 3
    assert_as_good_as_eager([x, weight, bias])
    y, *_ = run(layer_norm, [x, weight, bias])
    assert torch.equal(y[1], bias)
    assert torch.equal(y[2], bias)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
def test_infinities_and_nans_go_where_eagers_go_and_nowhere_else(form: str, device: str):
    inputs = make_inputs(6, 300, device=device)
    clean = run(layer_norm, inputs)
    x = inputs[0]
    assert x is not None
    x[1, 3], x[3, 5], x[4, 70] = torch.inf, -torch.inf, torch.nan
    found, formula = run(layer_norm, inputs), run(layer_norm_reference, inputs)
    for value, peer in zip(found, formula, strict=True):
        assert torch.equal(value.isnan(), peer.isnan())
        assert torch.equal(value.isinf(), peer.isinf())
    assert found[0].isnan().any(-1).tolist() == [False, True, False, True, True, False]
    for value, expected in zip(found[:2], clean[:2], strict=True):
        assert torch.equal(value[[0, 2, 5]], expected[[0, 2, 5]])
    assert torch.equal(found[3], clean[3])  # the bias's gradient reads no x


def test_many_rows_a_program_and_many_programs(multiprocessors: int, form: str, device: str):
    assert_as_good_as_eager(make_inputs(75, 300, device=device))


def test_no_rows(device: str):
    y, dx, dweight, dbias = run(layer_norm, make_inputs(0, 5, device=device))
    assert y.shape == dx.shape == (0, 5)
    assert torch.equal(dweight, torch.zeros_like(dweight))
    assert torch.equal(dbias, torch.zeros_like(dbias))


@pytest.mark.parametrize("shape", [(60,), (4, 60), (2, 2, 60), (2, 1, 2, 60)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...], device: str):
    x, *parameters = make_inputs(*shape, device=device)
    found = run(layer_norm, [x, *parameters])
    rows = run(layer_norm, [x.view(-1, 60), *parameters])
    assert [value.shape for value in found] == [shape, shape, (60,), (60,)]
    for value, expected in zip(found, rows, strict=True):
        assert torch.equal(value, expected.view(value.shape))


def test_a_row_of_one_number_is_its_own_mean(device: str):
    x, weight, bias = make_inputs(5, 1, device=device)
    y, dx, dweight, dbias = run(layer_norm, [x, weight, bias])
    assert torch.equal(y, bias.expand(5, 1))
    assert torch.equal(dx, torch.zeros_like(dx))
    assert torch.equal(dweight, torch.zeros_like(dweight))
    torch.testing.assert_close(dbias, make(5, 1, seed=3).sum(0).to(dbias))


class Olmo(OlmoLayerNorm):
    """Under the constructor of the others."""

    def __init__(self, hidden: int, eps: float):
        super().__init__(hidden)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "torch": nn.LayerNorm,
    "torch without bias": lambda hidden, eps: nn.LayerNorm(hidden, eps, bias=False),
    "torch without affine": lambda hidden, eps: nn.LayerNorm(hidden, eps, elementwise_affine=False),
    "Cohere": CohereLayerNorm,
    "OLMo": Olmo,
}


def parameters_of(norm: nn.Module) -> list[Tensor | None]:
    """Weight and bias, to which random values are given."""
    found = [getattr(norm, name, None) for name in ("weight", "bias")]
    with torch.no_grad():
        for seed, parameter in enumerate(found, 1):
            if parameter is not None:
                parameter.copy_(make(*parameter.shape, seed=seed))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_dtypes_and_values_are_those_of_the_models(model: Any, dtype: torch.dtype, device: str):
    norm = model(100, eps=EPS).to(device, dtype)
    parameters = parameters_of(norm)
    x = make(6, 100, device=device, dtype=dtype)
    found = run(layer_norm, [x, *parameters])
    trained = [parameter for parameter in parameters if parameter is not None]
    y = norm(x.requires_grad_())
    wanted = [y, *torch.autograd.grad(y, [x, *trained], make(6, 100, seed=3).to(y))]
    doubles = [None if each is None else each.detach().double() for each in (x, *parameters)]
    exact = run(layer_norm_reference, doubles, dtype)
    for value, peer, truth in zip(found, wanted, exact, strict=True):
        assert value.dtype is peer.dtype
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + INTERPRETERS_ROUNDING
    if dtype is not torch.float32:  # rounded in the same places: only near-ties may fall to the other side
        assert (found[0] == y).float().mean() >= 0.99


@pytest.mark.parametrize("parameter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_another_dtype_get_gradients_of_theirs(
    dtype: torch.dtype, parameter_dtype: torch.dtype, device: str
):
    x, *parameters = make_inputs(9, 100, device=device)
    inputs = [x.to(dtype), *(each.to(parameter_dtype) for each in parameters)]
    found, formula = run(layer_norm, inputs), run(layer_norm_reference, inputs)
    assert [each.dtype for each in found] == [dtype, dtype, parameter_dtype, parameter_dtype]
    for value, peer in zip(found, formula, strict=True):
        assert relative_error(value, peer.double()) <= 2 * torch.finfo(value.dtype).eps


def test_a_weight_of_zero_gets_its_gradient(device: str):
    x, weight, bias = make_inputs(8, 10, device=device)
    of_zeros, of_ones = (run(layer_norm, [x, torch.full_like(weight, value), bias])[2] for value in (0.0, 1.0))
    assert of_zeros.abs().min() > 0
    assert torch.equal(of_zeros, of_ones)


TRAINED = {
    "all": (True, True, True),
    "x": (True, False, False),
    "weight": (False, True, False),
    "bias": (False, False, True),
    "x and bias": (True, False, True),
    "x, where there is no weight": (True, None, True),
}


@pytest.mark.parametrize("trains", TRAINED.values(), ids=TRAINED)
def test_frozen_inputs_cost_no_work(trains: tuple[bool | None, ...], form: str, device: str, launched: Launched):
    tensors = make_inputs(5, 300, device=device)
    pairs = zip(tensors, trains, strict=True)
    inputs = [None if each is None or train is None else each.requires_grad_(train) for each, train in pairs]
    y = layer_norm(*inputs)
    assert bool(launched) == launch.uses_triton(*inputs)
    uses_kernels = bool(launched)
    launched.clear()
    y.backward(make(5, 300, device=device, seed=2))
    for each in inputs:
        assert each is None or (each.grad is not None) is each.requires_grad
    if uses_kernels:
        dots = [kernels._dots_kernel] if form == "columns" and trains[0] else []
        sums = [kernels._sum_kernel] if trains[1] or trains[2] else []
        assert [kernel for kernel, _ in launched] == [*dots, kernels._backward_kernel, *sums]
        arguments = launched[len(dots)][1]
        assert (arguments["dx"] is not None) is trains[0]
        assert (arguments["weight_parts"] is not None) is bool(trains[1])
        assert (arguments["bias_parts"] is not None) is bool(trains[2])
        assert arguments["dresidual"] is None


@each_affine
@each_dtype
def test_what_is_regenerated_has_the_bits_of_forward(
    dtype: torch.dtype, affine: tuple[bool, bool], form: str, device: str
):
    x, weight, bias = make_inputs(5, 300, device=device, dtype=dtype, affine=affine)
    y, mean, rstd = layer_norm_forward(x, weight, bias, EPS)
    assert (mean.dtype, rstd.dtype) == (torch.float32, torch.float32)
    assert torch.equal(layer_norm_regenerate(x, weight, bias, mean, rstd), y)


@each_dtype
def test_the_gradient_of_the_stream_is_added_before_rounding(dtype: torch.dtype, form: str, device: str):
    x, weight, bias = make_inputs(9, 300, device=device, dtype=dtype)
    dy, dresidual = (make(9, 300, device=device, dtype=dtype, seed=seed) for seed in (3, 4))

    def gradient(*tensors: Any) -> Tensor:
        x, dy, dresidual, weight, bias = tensors
        _, mean, rstd = layer_norm_forward(x, weight, bias, EPS)
        saved = (x, weight, bias, mean, rstd)
        dx, *others = layer_norm_backward(dy, *saved, True, True, True, dresidual=dresidual)
        _, *expected = layer_norm_backward(dy, *saved, True, True, True)
        assert all(map(torch.equal, others, expected))
        return dx

    tensors = (x, dy, dresidual, weight, bias)
    exact = gradient(*(tensor.double() for tensor in tensors))
    found = gradient(*tensors)
    assert found.dtype is dtype
    # What one rounding leaves, of each element that it rounds, and of float32's own error beside it.
    assert ((found - exact).abs() <= torch.finfo(dtype).eps / 2 * exact.abs() + 1e-5).all()


@each_dtype
@pytest.mark.parametrize("view", HEADS)
def test_heads_are_read_in_place(view: str, dtype: torch.dtype, device: str, launched: Launched):
    heads = HEADS[view](make(2, 6, 7, 64, device=device, dtype=dtype))
    parameters = [make(64, device=device, dtype=dtype, seed=seed) for seed in (1, 2)]
    assert not heads.is_contiguous()
    found = run(layer_norm, [heads, *parameters])
    if launched:
        assert launched[0][1]["x"].data_ptr() == heads.data_ptr()
        x_in_backward = next(given["x"] for kernel, given in launched if kernel is kernels._backward_kernel)
        assert x_in_backward.data_ptr() == heads.data_ptr()
    copied = run(layer_norm, [heads.contiguous(), *parameters])
    meta = run(layer_norm, [each.to("meta") for each in (heads, *parameters)])
    assert [value.stride() for value in found] == [value.stride() for value in meta]
    assert torch.equal(found[0], copied[0])
    assert torch.equal(found[1], copied[1])
    for value, expected in zip(found[2:], copied[2:], strict=True):
        assert relative_error(value, expected.double()) <= 2 * torch.finfo(dtype).eps  # summed in another order


def test_every_run_gives_the_same_bits(form: str, device: str):
    inputs = make_inputs(31, 300, device=device)
    first = run(layer_norm, inputs)
    for _ in range(3 if device == "cuda" else 1):
        assert all(map(torch.equal, run(layer_norm, inputs), first))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    hidden = 4096
    rows = 2**31 // hidden + 2
    x = torch.ones(rows, hidden, device="cuda", dtype=torch.bfloat16)
    x[-2:] = make(2, hidden, device="cuda", dtype=torch.bfloat16)
    weight, bias = (make(hidden, device="cuda", dtype=torch.bfloat16, seed=seed) for seed in (1, 2))
    y = layer_norm(x.requires_grad_(), weight, bias)
    assert torch.equal(y[-2:], layer_norm(x[-2:], weight, bias))
    dy = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    last = x[-2:].detach().requires_grad_()
    (expected,) = torch.autograd.grad(layer_norm(last, weight, bias), last, dy[-2:])
    assert torch.equal(dx[-2:], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 4), torch.ones(3)), r"weight has shape (3,); expected (4,) for x of shape (2, 4)"),
        ((torch.ones(2, 4), None, torch.ones(1, 4)), "bias has shape (1, 4); expected (4,)"),
        ((torch.tensor(1.0),), "no dimension to normalize over"),
        ((torch.ones(2, 4, dtype=torch.int64),), "x is torch.int64"),
        ((torch.ones(2, 4), torch.ones(4, dtype=torch.int32)), "weight is torch.int32"),
        ((torch.ones(2, 4), None, torch.ones(4, device="meta")), "x is on cpu and bias on meta"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        layer_norm(*arguments)
