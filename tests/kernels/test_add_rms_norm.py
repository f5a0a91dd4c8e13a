"""add + RMSNorm: both outputs and all gradients against eager's two steps, and what is done in one pass."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from kernel_calls import RMS, add_rms_norm_reference, rms_norm_regenerate
from kernel_testing import (
    DTYPES,
    FLOAT32_ROUNDING,
    each_device_of_compiled_code,
    each_dtype,
    make,
    relative_error,
)
from norm_testing import INTERPRETERS_ROUNDING
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels import norm_ops as module
from recompute.kernels.rms_norm import add_rms_norm, rms_norm

OPS = torch.ops.recompute

CASTINGS = ["llama", "gemma", "none"]
EPS = 1e-6

each_casting = pytest.mark.parametrize("casting", CASTINGS)
each_residual = pytest.mark.parametrize("has_residual", [True, False], ids=["residual", "no residual"])


def make_inputs(
    rows: int, hidden: int, device: str, dtype: torch.dtype = torch.float32, has_residual: bool = True
) -> list[Tensor | None]:
    """x, residual and weight."""
    x, weight = make(rows, hidden, device=device, dtype=dtype), make(hidden, device=device, dtype=dtype, seed=1)
    residual = make(rows, hidden, device=device, dtype=dtype, seed=2) if has_residual else None
    return [None if tensor is None else tensor.requires_grad_() for tensor in (x, residual, weight)]


def trained(inputs: list[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]


def gradients_like(outputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [make(*output.shape, seed=seed).to(output) for seed, output in enumerate(outputs, 3)]


def run(function: Any, inputs: list[Tensor | None], casting: str = "llama") -> list[Tensor]:
    outputs = function(*inputs, EPS, casting)
    gradients = torch.autograd.grad(outputs, trained(inputs), gradients_like(outputs))
    return [*(output.detach() for output in outputs), *gradients]


def assert_as_good_as_eager(inputs: list[Tensor | None], casting: str) -> None:
    found, eager = run(add_rms_norm, inputs, casting), run(add_rms_norm_reference, inputs, casting)
    assert torch.equal(found[1], eager[1])
    doubles = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    y, h = add_rms_norm_reference(*doubles, EPS, casting)
    gradients = [gradient.double() for gradient in gradients_like((found[0], found[1]))]
    exact = [y.detach(), h.detach(), *torch.autograd.grad((y, h), trained(doubles), gradients)]
    slack = INTERPRETERS_ROUNDING if launch.uses_triton(*inputs) and not y.is_cuda else FLOAT32_ROUNDING
    for value, peer, truth in zip(found, eager, exact, strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, truth.shape)
        assert relative_error(value, truth) <= 1.05 * relative_error(peer, truth) + slack


@each_residual
@each_casting
@each_dtype
@pytest.mark.parametrize(("rows", "hidden"), [(0, 64), (1, 123), (7, 768), (199, 64)])
def test_errors_are_no_larger_than_eagers(
    rows: int, hidden: int, dtype: torch.dtype, casting: str, has_residual: bool, device: str
):
    assert_as_good_as_eager(make_inputs(rows, hidden, device, dtype, has_residual), casting)


@pytest.mark.gpu
@each_residual
@each_casting
@each_dtype
@pytest.mark.parametrize("hidden", [64, 123, 768, 4096, 5120, 14336, 65536, 131072])
@pytest.mark.parametrize("rows", [7, 8192])
def test_errors_at_real_sizes_are_no_larger_than_eagers(
    rows: int, hidden: int, dtype: torch.dtype, casting: str, has_residual: bool
):
    assert_as_good_as_eager(make_inputs(min(rows, 2**26 // hidden), hidden, "cuda", dtype, has_residual), casting)


@pytest.mark.slow
def test_rows_wider_than_a_program_holds(device: str):
    assert_as_good_as_eager(make_inputs(2, 33_000, device), "llama")


@pytest.mark.parametrize("dtypes", [*itertools.product(DTYPES[:2], repeat=3)], ids=str)
def test_dtypes_are_promoted_as_eager_promotes_them(dtypes: tuple[torch.dtype, ...], device: str):
    inputs = [
        tensor.detach().to(dtype).requires_grad_()
        for tensor, dtype in zip(make_inputs(6, 100, device), dtypes, strict=True)
    ]
    assert_as_good_as_eager(inputs, "llama")


@each_residual
@each_dtype
@pytest.mark.parametrize("casting", CASTINGS)
def test_the_recipe_gives_back_the_bits_of_the_output(
    casting: str, dtype: torch.dtype, has_residual: bool, device: str, monkeypatch: pytest.MonkeyPatch
):
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "record", lambda *arguments: recorded.append(arguments))
    inputs = make_inputs(9, 300, device, dtype, has_residual)
    y, h = add_rms_norm(*inputs, EPS, casting)
    ((output, regenerate, *arguments),) = recorded
    assert output is y
    assert arguments[0] is h
    with torch.no_grad():
        value = regenerate(*arguments)
    assert torch.equal(value, y)
    assert (value.dtype, value.stride()) == (y.dtype, y.stride())


def test_a_stream_of_another_dtype_gives_its_bits_back(device: str):
    """Forward reads bfloat16 beside float32, and what regenerates float32 alone: sums may run in other orders."""
    x = make(9, 300, device=device, dtype=torch.bfloat16)
    y, h, _, rstd = RMS.forward(x, make(9, 300, device=device, seed=1), None, None, EPS, "none")
    assert h.dtype is torch.float32
    assert torch.equal(rms_norm_regenerate(h, None, rstd, "none"), y)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@each_residual
def test_the_streams_gradient_joins_in_the_one_pass(has_residual: bool, device: str):
    inputs = make_inputs(5, 64, device, has_residual=has_residual)
    with Ops() as forward:
        outputs = add_rms_norm(*inputs)
    ops = [function for function, _ in forward.calls if function.namespace == "recompute"]
    assert ops == [OPS.rms_norm_forward.default]
    gradients = gradients_like(outputs)
    with Ops() as backward:
        torch.autograd.grad(outputs, trained(inputs), gradients)
    ((_, arguments),) = [call for call in backward.calls if call[0] is OPS.rms_norm_backward.default]
    assert arguments[-1].data_ptr() == gradients[1].data_ptr()
    assert not [function for function, _ in backward.calls if "add" in str(function)]


@each_residual
def test_only_what_is_needed_is_saved(has_residual: bool, device: str):
    inputs = make_inputs(5, 64, device, has_residual=has_residual)
    y, h = add_rms_norm(*inputs)
    saved, weight, _, _, rstd = y.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert saved.data_ptr() == h.data_ptr()
    assert weight is inputs[2]
    assert (rstd.shape, rstd.dtype) == ((5,), torch.float32)
    assert (h.data_ptr() == inputs[0].data_ptr()) is not has_residual  # type: ignore[union-attr]


@each_residual
@pytest.mark.parametrize("missing", ["y", "h", "both"])
def test_an_output_without_a_gradient(missing: str, has_residual: bool, device: str):
    def gradients(function: Any) -> tuple[Tensor | None, ...]:
        y, h = function(*inputs, EPS, "llama")
        used = {"y": h * 3, "h": y * 3, "both": (h.detach() * 1).requires_grad_()}[missing]
        return torch.autograd.grad(used.sum(), trained(inputs), allow_unused=True)

    inputs = make_inputs(5, 64, device, has_residual=has_residual)
    for value, expected in zip(gradients(add_rms_norm), gradients(add_rms_norm_reference), strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            torch.testing.assert_close(value, expected)


@each_residual
def test_frozen_inputs_get_no_gradient_and_change_no_other(has_residual: bool, device: str):
    inputs = make_inputs(5, 64, device, has_residual=has_residual)
    expected = dict(zip([0, 1, 2] if has_residual else [0, 2], run(add_rms_norm, inputs)[2:], strict=True))
    for chosen in itertools.product((False, True), repeat=3):
        leaves = [
            None if tensor is None else tensor.detach().requires_grad_(trains)
            for tensor, trains in zip(inputs, chosen, strict=True)
        ]
        if not trained(leaves):
            continue
        y, h = add_rms_norm(*leaves)
        assert y.requires_grad
        assert h.requires_grad is (chosen[0] or (has_residual and chosen[1]))
        with Ops() as seen:
            torch.autograd.backward(
                [o for o in (y, h) if o.requires_grad], gradients_like((y, h))[: 1 + h.requires_grad]
            )
        ((_, arguments),) = [call for call in seen.calls if call[0] is OPS.rms_norm_backward.default]
        assert arguments[7:9] == (h.requires_grad, chosen[2])
        for index, leaf in enumerate(leaves):
            if leaf is not None:
                assert torch.equal(leaf.grad, expected[index]) if chosen[index] else leaf.grad is None


@each_residual
@each_dtype
def test_a_second_backward_gives_the_same_bits_and_writes_nowhere(dtype: torch.dtype, has_residual: bool, device: str):
    inputs = make_inputs(9, 80, device, dtype, has_residual)
    outputs = add_rms_norm(*inputs)
    gradients = gradients_like(outputs)
    watched = [*trained(inputs), *outputs, *gradients]
    before = [(tensor.detach().clone(), tensor._version) for tensor in watched]
    first, second = (torch.autograd.grad(outputs, trained(inputs), gradients, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert all(
        torch.equal(t, value) and t._version == version for t, (value, version) in zip(watched, before, strict=True)
    )


@each_residual
def test_gradients_of_gradients(has_residual: bool, device: str):
    small = [None if tensor is None else tensor.detach()[..., :4].double().requires_grad_()
             for tensor in make_inputs(3, 8, "cpu", has_residual=has_residual)]  # fmt: skip

    def op(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(tensors[0], tensors[1] if has_residual else None, tensors[-1])

    assert torch.autograd.gradcheck(op, trained(small))
    assert torch.autograd.gradgradcheck(op, trained(small))

    inputs = make_inputs(6, 80, device, has_residual=has_residual)

    def twice(function: Any) -> list[Tensor]:
        outputs = function(*inputs, EPS, "llama")
        first = torch.autograd.grad(outputs, trained(inputs), gradients_like(outputs), create_graph=True)
        return [*first, *torch.autograd.grad(sum(value.square().sum() for value in first), trained(inputs))]

    for value, expected in zip(twice(add_rms_norm), twice(add_rms_norm_reference), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


@each_residual
def test_strides_do_not_matter(has_residual: bool, device: str):
    inputs = make_inputs(6, 96, device, has_residual=has_residual)
    expected = run(add_rms_norm, inputs)
    changed = [
        None if tensor is None else tensor.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()
        for tensor in inputs
    ]
    outputs = add_rms_norm(*changed)
    gradients = [gradient.mT.contiguous().mT for gradient in gradients_like(outputs)]
    found = [*outputs, *torch.autograd.grad(outputs, trained(changed), gradients, retain_graph=True)]
    assert all(map(torch.equal, found, expected))
    y, h = outputs
    expanded = torch.autograd.grad(y.sum() + h.sum(), trained(changed))
    ones = torch.autograd.grad(add_rms_norm(*inputs), trained(inputs), [torch.ones_like(y)] * 2)
    assert all(map(torch.equal, expanded, ones))


@each_device_of_compiled_code
@each_residual
def test_compiled_results_are_the_eager_ones(has_residual: bool, device: str):
    def block(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        y, h = add_rms_norm(*inputs)
        return y * 2, h * 3

    torch.compiler.reset()
    inputs = make_inputs(6, 64, device, has_residual=has_residual)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = [run(lambda *arguments, f=f: f(*arguments[:3]), inputs) for f in (compiled, block)]
    assert all(map(torch.equal, *results))


@each_residual
def test_a_stream_that_is_changed_in_place_is_refused(has_residual: bool, device: str):
    y, h = add_rms_norm(*make_inputs(3, 64, device, has_residual=has_residual))
    with pytest.raises(RuntimeError, match="modified"):  # at once where h is a view of x, else by backward
        (y.sum() + h.add_(1).sum()).backward()


def test_no_grad_and_inference_mode_save_nothing(device: str):
    for has_residual, mode in itertools.product((True, False), (torch.no_grad, torch.inference_mode)):
        inputs = make_inputs(3, 64, device, has_residual=has_residual)
        expected = add_rms_norm(*inputs)
        with mode():
            outputs = add_rms_norm(*inputs)
        assert [output.grad_fn for output in outputs] == [None, None]
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    hidden = 4096
    rows = 2**31 // hidden + 2
    x, residual = (torch.ones(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x[-2:], residual[-2:] = (make(2, hidden, device="cuda", dtype=torch.bfloat16, seed=seed) for seed in range(2))
    y, h = add_rms_norm(x.requires_grad_(), residual)
    last = x[-2:].detach().requires_grad_()
    last_y, last_h = add_rms_norm(last, residual[-2:])
    assert torch.equal(y[-2:], last_y)
    assert torch.equal(h[-2:], last_h)
    dy = torch.ones((), device="cuda", dtype=torch.bfloat16).expand_as(y)
    (dx,) = torch.autograd.grad((y, h), x, (dy, dy))
    (expected,) = torch.autograd.grad((last_y, last_h), last, (dy[-2:], dy[-2:]))
    assert torch.equal(dx[-2:], expected)


def test_without_residual_y_is_rms_norms(device: str):
    x, _, weight = make_inputs(5, 64, device)
    assert torch.equal(add_rms_norm(x, None, weight)[0], rms_norm(x, weight))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 4), torch.ones(4)), "x has shape (2, 4) and residual (4,); expected the same shape"),
        ((torch.ones(2, 4), None, torch.ones(3)), "add_rms_norm: weight has shape (3,)"),
        ((torch.ones(2, 4), torch.ones(2, 4, dtype=torch.int32)), "residual is torch.int32"),
        ((torch.ones(2, 4), torch.ones(2, 4, device="meta")), "x is on cpu and residual on meta"),
        ((torch.ones(2, 4), None, None, EPS, "lama"), "add_rms_norm: unknown casting 'lama'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)):
        add_rms_norm(*arguments)
