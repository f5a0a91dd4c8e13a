"""RMSNorm: shapes, the three casting conventions against their models, and what a frozen weight costs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels import rms_norm as module
from recompute.kernels.rms_norm import MAX_HIDDEN, rms_norm, rms_norm_reference

CASTINGS = ["llama", "gemma", "none"]
EPS = 1e-6
FLOAT32_ROUNDING = 2**-24


def make(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def run(function: Any, x: Tensor, weight: Tensor, casting: str) -> list[Tensor]:
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = function(x, weight, EPS, casting)
    dy = make(*y.shape, seed=2).to(y)
    return [y.detach(), *torch.autograd.grad(y, (x, weight), dy)]


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def assert_as_good_as_the_formula(x: Tensor, weight: Tensor, casting: str) -> None:
    found = run(rms_norm, x, weight, casting)
    formula = run(rms_norm_reference, x, weight, casting)
    exact = run(rms_norm_reference, x.double(), weight.double(), casting)
    for value, peer, truth in zip(found, formula, exact, strict=True):
        assert value.shape == truth.shape
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + FLOAT32_ROUNDING


@pytest.mark.parametrize("casting", CASTINGS)
@pytest.mark.parametrize("hidden", [7, 100, 257, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 37])
def test_any_number_of_rows_and_columns(rows: int, hidden: int, casting: str, device: str):
    x, weight = make(rows, hidden, device=device), make(hidden, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, casting)


@pytest.mark.parametrize("casting", CASTINGS)
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


@pytest.mark.parametrize("hidden", [MAX_HIDDEN, 70_000])
def test_wide_rows(hidden: int, device: str):
    x, weight = make(2, hidden, device=device), make(hidden, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, "llama")


@pytest.mark.parametrize("multiprocessors", [1, 8])
def test_many_rows_a_program_and_many_programs(multiprocessors: int, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: multiprocessors)
    x, weight = make(75, 2048, device=device), make(2048, device=device, seed=1)
    assert_as_good_as_the_formula(x, weight, "llama")


@pytest.mark.parametrize("casting", CASTINGS)
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
    exact = run(rms_norm_reference, x.double(), norm.weight.double(), casting)
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


class BackwardResults(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.results: list[tuple[Tensor | None, Tensor | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if function is torch.ops.recompute.rms_norm_backward.default:
            self.results.append(results)
        return results


@pytest.mark.parametrize(("x_trains", "weight_trains"), [(True, True), (True, False), (False, True), (True, None)])
def test_frozen_inputs_cost_no_work(
    x_trains: bool, weight_trains: bool | None, device: str, monkeypatch: pytest.MonkeyPatch
):
    launched: list[tuple[Any, ...]] = []
    launch_kernel = launch.run

    def spy(kernel: Any, programs: int, *arguments: Any, **settings: Any) -> None:
        launched.append((kernel, arguments))
        launch_kernel(kernel, programs, *arguments, **settings)

    monkeypatch.setattr(launch, "run", spy)
    x = make(5, 100, device=device).requires_grad_(x_trains)
    weight = None if weight_trains is None else make(100, device=device).requires_grad_(weight_trains)
    y = rms_norm(x, weight)
    uses_kernels = bool(launched)
    assert uses_kernels == launch.uses_triton(x)
    launched.clear()
    with BackwardResults() as seen:
        y.backward(make(5, 100, device=device, seed=2))

    ((dx, dweight),) = seen.results
    assert (dx is not None) is x_trains
    assert (dweight is not None) is bool(weight_trains)
    if uses_kernels:
        kernels = [kernel for kernel, _ in launched]
        expected = [module._backward_kernel, *([module._sum_rows_kernel] if weight_trains else [])]
        assert kernels == expected
        _, _, _, _, given_dx, partials, *_ = launched[0][1]
        assert (given_dx is not None) is x_trains
        assert (partials is not None) is bool(weight_trains)


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
        ((torch.ones(2, 4), None, EPS, "lama"), "unknown casting 'lama'; expected one of llama, gemma, none"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        rms_norm(*arguments)
