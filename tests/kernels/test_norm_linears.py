"""RMSNorm and the Linears behind it as one node: what each subset of gradients costs, what is held, what comes back."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_testing import FLOAT32_ROUNDING, make, relative_error
from mlp_testing import (
    EPS,
    NoGradient,
    Work,
    assert_no_larger_error,
    assert_no_worse_than_eager,
    flops,
    make_weight,
    normalize,
    run,
)
from tiers import slow
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.scopes import RecipeScope
from recompute.engine.thread_state import local
from recompute.errors import KernelError
from recompute.kernels.norm_linears import norm_linears
from recompute.kernels.rms_norm import CASTINGS, rms_norm

B, S, H = 2, 20, 48
SIZES = (40, 24, 24)


def make_inputs(
    biases: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (B, S, H),
    sizes: tuple[int, ...] = SIZES,
) -> list[Any]:
    """x, the norm's weight, three weights, three biases; with biases the norm has no weight and one bias is missing."""
    hidden = shape[-1]
    made: list[Any] = [make(*shape), None if biases else make(hidden, seed=1)]
    made += [make_weight(size, hidden, seed=seed) for seed, size in enumerate(sizes, 2)]
    made += [make(sizes[0], seed=5), None, make(sizes[2], seed=7)] if biases else [None] * 3
    return [None if tensor is None else tensor.to(device, dtype).requires_grad_() for tensor in made]


def ours(casting: str = "llama", through_h: bool = True) -> Callable[..., tuple[Tensor, ...]]:
    def function(x: Tensor, norm_weight: Any, *parameters: Any) -> tuple[Tensor, ...]:
        outputs, h = norm_linears(x, norm_weight, parameters[:3], parameters[3:], EPS, casting)
        return (*outputs, h * 1) if through_h else outputs

    return function


def eager(casting: str = "llama", through_h: bool = True) -> Callable[..., tuple[Tensor, ...]]:
    def function(x: Tensor, norm_weight: Any, *parameters: Any) -> tuple[Tensor, ...]:
        n = normalize(x, norm_weight, casting)
        outputs = tuple(map(functools.partial(F.linear, n), parameters[:3], parameters[3:]))
        return (*outputs, x * 1) if through_h else outputs

    return function


def given(inputs: list[Any]) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None]


with_and_without_biases = pytest.mark.parametrize("biases", [False, True], ids=["no biases", "biases"])


@with_and_without_biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, biases: bool, device: str):
    assert_no_worse_than_eager(ours(), eager(), make_inputs(biases, device, dtype))


@pytest.mark.parametrize("casting", CASTINGS)
def test_every_casting(casting: str, device: str):
    assert_no_worse_than_eager(ours(casting), eager(casting), make_inputs(False, device, torch.bfloat16))


@with_and_without_biases
@pytest.mark.parametrize("through_h", [False, True])
def test_gradients_of_every_order(through_h: bool, biases: bool):
    inputs = make_inputs(biases, dtype=torch.float64, shape=(2, 3), sizes=(2, 1, 2))
    assert torch.autograd.gradcheck(ours("gemma", through_h), inputs)
    assert torch.autograd.gradgradcheck(ours("gemma", through_h), inputs)


@pytest.mark.parametrize("biases", [False, True])
def test_outputs_may_be_changed_in_place(biases: bool):
    inputs = make_inputs(biases)
    expected = torch.autograd.grad(sum((2 * y).sum() for y in ours(through_h=False)(*inputs)), given(inputs))
    outputs = ours(through_h=False)(*inputs)
    for output in outputs:
        output *= 2
    assert all(map(torch.equal, torch.autograd.grad(sum(y.sum() for y in outputs), given(inputs)), expected))


def test_h_is_x():
    x, norm_weight, *weights = make_inputs()[:5]
    outputs, h = norm_linears(x, norm_weight, weights)
    assert [tuple(output.shape) for output in outputs] == [(B, S, size) for size in SIZES]
    assert h.data_ptr() == x.data_ptr()
    assert torch.equal(h, x)
    assert h.requires_grad
    with pytest.raises(RuntimeError, match="modified inplace"):
        h += 1
    _, h = norm_linears(x.detach(), norm_weight, weights)
    assert not h.requires_grad


@pytest.mark.parametrize("reached", list(itertools.product((False, True), repeat=4)))
def test_outputs_without_a_gradient_cost_nothing(reached: tuple[bool, ...], device: str):
    """reached: which of the outputs, and h last, have a gradient."""
    inputs = make_inputs(False, device)
    doubles = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    results = []
    for function, leaves in ((ours(through_h=False), inputs), (eager(through_h=False), doubles)):
        outputs = function(*leaves)
        x = leaves[0]
        if leaves is inputs:
            outputs, h = norm_linears(*leaves[:2], leaves[2:5])
            x = h
        loss = sum((i + 2) * t.sum() for i, (t, reach) in enumerate(zip((*outputs, x), reached, strict=True)) if reach)
        with Work() as work:
            if any(reached):
                results.append(torch.autograd.grad(loss, leaves[:5], allow_unused=True))
        if leaves is inputs:
            linears = sum(reached[:3])
            assert work.counts == +Counter(
                {"mm": linears + bool(linears), "addmm": max(linears - 1, 0), "rms_norm_backward": bool(linears)}
            )
    for value, truth in zip(*results, strict=True) if results else ():
        if truth is None:
            assert value is None
        else:
            assert relative_error(value, truth) <= 8 * FLOAT32_ROUNDING


def test_when_no_output_has_a_gradient_nothing_runs():
    inputs = make_inputs()
    outputs = [NoGradient.apply(output) for output in ours()(*inputs)]
    gradients = torch.autograd.grad(sum(output.sum() for output in outputs), given(inputs), allow_unused=True)
    assert gradients == (None,) * 5


@pytest.mark.parametrize("trained", [t for t in itertools.product((False, True), repeat=5) if any(t)])
def test_backward_does_what_is_needed_and_no_more(trained: tuple[bool, ...], device: str):
    """trained: x, the norm's weight and the three weights."""
    inputs = make_inputs(False, device)
    expected = torch.autograd.grad(sum(t.sum() for t in ours()(*inputs)), given(inputs))
    for tensor, train in zip(inputs, trained, strict=False):
        tensor.requires_grad_(train)
    found = flops(ours(through_h=False), inputs)
    assert found == flops(eager(through_h=False), inputs)
    reaches_norm, trains_linears = any(trained[:2]), any(trained[2:])
    work_of_one = [2 * B * S * H * size for size in SIZES]
    backward = sum(w * (reaches_norm + train) for w, train in zip(work_of_one, trained[2:], strict=True))
    assert found == (sum(work_of_one), backward)

    for tensor in inputs[:5]:
        tensor.grad = None
    y = sum(t.sum() for t in ours()(*inputs))
    with Work() as work:
        y.backward()
    ops = {name: count for name, count in work.counts.items() if name not in ("mm", "addmm")}
    if reaches_norm:
        assert ops == {"rms_norm_backward": 1}
        made = tuple(tensor is not None for tensor in work.results_of("rms_norm_backward"))
        assert made == (*trained[:2], trains_linears)
    else:
        assert ops == {"rms_norm_regenerate": 1}
    for tensor, train, gradient in zip(inputs, trained, expected, strict=False):
        assert torch.equal(tensor.grad, gradient) if train else tensor.grad is None


@with_and_without_biases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_trains", [False, True])
def test_the_regenerated_output_of_the_norm_has_forwards_bits(
    x_trains: bool, dtype: torch.dtype, biases: bool, device: str
):
    inputs = make_inputs(biases, device, dtype)
    inputs[0].requires_grad_(x_trains)
    if inputs[1] is not None:
        inputs[1].requires_grad_(x_trains)
    with Work() as work:
        sum(output.sum() for output in ours()(*inputs)).backward()
    n = work.results_of("rms_norm_backward")[2] if x_trains else work.results_of("rms_norm_regenerate")
    assert torch.equal(n, work.results_of("rms_norm_forward")[0].view_as(n))


@with_and_without_biases
def test_only_x_and_a_float_a_row_are_held(biases: bool, device: str):
    inputs = make_inputs(biases, device, torch.bfloat16)
    outputs = ours(through_h=False)(*inputs)
    known = {tensor.data_ptr() for tensor in given(inputs)}
    saved = [tensor for tensor in outputs[0].grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    held = [tensor for tensor in saved if tensor.data_ptr() not in known]
    assert len(saved) - len(held) == len(known)
    assert sum(tensor.nbytes for tensor in held) == 4 * B * S


@with_and_without_biases
def test_a_second_backward_gives_the_same_bits_and_writes_nowhere(biases: bool, device: str):
    inputs = make_inputs(biases, device, torch.bfloat16)
    outputs = ours()(*inputs)
    gradients = [make(*output.shape, seed=9).to(output) for output in outputs]
    saved = [tensor for tensor in outputs[0].grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    watched = [*given(inputs), *outputs, *gradients, *saved]
    before = [(tensor.detach().clone(), tensor._version) for tensor in watched]
    first = torch.autograd.grad(outputs, given(inputs), gradients, retain_graph=True)
    second = torch.autograd.grad(outputs, given(inputs), gradients)
    assert all(map(torch.equal, first, second))
    for tensor, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mT.contiguous().mT, lambda t: t[:, :1].expand(t.shape), lambda t: t[:1, :1, :1].expand(t.shape)],
)
def test_any_strides(change: Callable[[Tensor], Tensor], device: str):
    x, *others = make_inputs(False, device)
    inputs = [change(x.detach()).requires_grad_(), *others]
    gradients = [change(make(B, S, size, seed=9, device=device)) for size in (*SIZES, H)]
    results = []
    for function, dtype in ((ours(), torch.float32), (eager(), torch.float32), (eager(), torch.float64)):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
        given_gradients = [gradient.to(dtype) for gradient in gradients]
        results.append(torch.autograd.grad(function(*leaves), given(leaves), given_gradients))
    for value, peer, truth in zip(*results, strict=True):
        assert relative_error(value, truth) <= 2 * relative_error(peer, truth) + FLOAT32_ROUNDING


@pytest.mark.parametrize("shape", [(H,), (0, H), (1, H), (3, 0, H), (B, 1, S, H)])
def test_any_leading_dimensions(shape: tuple[int, ...], device: str):
    inputs = make_inputs(False, device, torch.float64, shape)
    for values, truths in zip(run(ours(), inputs), run(eager(), inputs), strict=True):
        for value, truth in zip(values, truths, strict=True):
            assert value is None is truth or value.shape == truth.shape
            torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_eagers(x_dtype: torch.dtype, backward_inside: bool, device: str):
    x, *others = make_inputs(True, device)
    inputs = [x.detach().to(x_dtype).requires_grad_(), *others]
    results = []
    for function in (ours(), eager()):
        with torch.autocast(device, torch.bfloat16):
            outputs = function(*inputs)
            gradients = [make(*output.shape, seed=9).to(output) for output in outputs]
            if backward_inside:
                found = torch.autograd.grad(outputs, given(inputs), gradients)
        if not backward_inside:
            found = torch.autograd.grad(outputs, given(inputs), gradients)
        results.append([*outputs, *found])
    doubles = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    wide = eager()(*doubles)
    exact = [*wide, *torch.autograd.grad(wide, given(doubles), [gradient.double() for gradient in gradients])]
    for value, peer, truth in zip(*results, exact, strict=True):
        assert_no_larger_error(value, peer, truth)


@pytest.mark.parametrize("biases", [False, *slow(True)])
def test_compiled_results_are_the_eager_ones(biases: bool, device: str):
    inputs = make_inputs(biases, device)
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: sum(t.sum() for t in ours()(*inputs)), fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), sum(t.sum() for t in ours()(*inputs))
    assert torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(y, given(inputs)) for y in (found, expected)), strict=True)
    assert all(torch.equal(value, truth) for value, truth in pairs)


def test_without_gradients_nothing_is_saved(device: str):
    inputs = make_inputs(False, device)
    expected = ours()(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs = ours()(*inputs)
        assert all(output.grad_fn is None for output in outputs)
        assert all(map(torch.equal, outputs, expected))


def test_meta_tensors_give_shapes_and_dtypes():
    inputs = make_inputs(dtype=torch.bfloat16)
    outputs, gradients = run(ours(), [None if t is None else t.detach().to("meta").requires_grad_() for t in inputs])
    assert [(*output.shape,) for output in outputs] == [(B, S, size) for size in (*SIZES, H)]
    assert {output.dtype for output in outputs} == {torch.bfloat16}
    for gradient, tensor in zip(gradients, inputs, strict=True):
        assert gradient is None is tensor or (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


def test_a_stream_that_comes_back_is_dropped(device: str):
    x, norm_weight, *others = make_inputs(False, device)
    results, dropped = [], []
    for scope in (contextlib.nullcontext(), RecipeScope(RegionStatistics("a model"))):
        before = local.statistics.dropped_nbytes
        with scope:
            outputs = ours()(rms_norm(x, norm_weight), norm_weight, *others)
        dropped.append(local.statistics.dropped_nbytes - before)
        results.append(torch.autograd.grad(sum(t.sum() for t in outputs), (x, norm_weight, *others[:3])))
    assert dropped == [0, x.nbytes]
    assert all(map(torch.equal, *results))


SQUARE = torch.ones(3, 3)
ROW = torch.ones(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SQUARE, ROW, []), "expected weights (O_i, H), at least one"),
        ((SQUARE, ROW, [SQUARE, torch.ones(3, 2)]), "weights[1] (3, 2)"),
        ((SQUARE, ROW, [SQUARE, ROW]), "weights[1] (3,)"),
        ((SQUARE, ROW, [SQUARE], [torch.ones(2)]), "biases[0] (2,)"),
        ((SQUARE, ROW, [SQUARE, SQUARE], [ROW]), "as many biases"),
        ((SQUARE, SQUARE, [SQUARE]), "weight has shape (3, 3)"),
        ((torch.tensor(1.0), None, [SQUARE]), "x has no dimension"),
        ((SQUARE, ROW, [SQUARE.to("meta")]), "x is on cpu and weights[0] on meta"),
        ((SQUARE, ROW, [SQUARE.int()]), "weights[0] is torch.int32"),
        ((SQUARE, ROW, [SQUARE.half(), SQUARE.half()]), "normalized x torch.float32, weights[0] torch.float16"),
        ((SQUARE, ROW, [SQUARE], None, EPS, "t5"), "unknown casting 't5'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)) as refusal:
        norm_linears(*arguments)
    assert str(refusal.value).startswith("norm_linears: ")


def test_second_derivatives_pass_by_outputs_with_nothing_trained_behind_them():
    x, weight = torch.randn(3, 4), torch.ones(4)
    frozen, trained = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    (one, other), _ = norm_linears(x, weight, (frozen, trained))
    (gradient,) = torch.autograd.grad((one * other).sum(), trained, create_graph=True)
    expected = (one.detach().t() @ rms_norm(x, weight)).detach()
    torch.testing.assert_close(gradient.detach(), expected)


@pytest.mark.parametrize("sizes", [(0, 3), (4, 0)], ids=["no inputs", "no outputs"])
def test_features_may_be_none(sizes: tuple[int, int]):
    hidden, outputs = sizes
    x, weight = torch.randn(2, hidden, requires_grad=True), torch.randn(outputs, hidden, requires_grad=True)
    (y,), _ = norm_linears(x, torch.ones(hidden), (weight,))
    assert y.shape == (2, outputs)
    y.sum().backward()
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)
