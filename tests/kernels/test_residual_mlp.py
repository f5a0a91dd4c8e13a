"""Residual stream, norm and gated MLP as one node: its two gradients that are one tensor, its work, what it saves."""

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
from kernel_testing import (
    FLOAT32_ROUNDING,
    each_device_of_compiled_code,
    make,
    relative_error,
)
from mlp_testing import (
    EPS,
    NoGradient,
    Work,
    activate,
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
from recompute.kernels.residual_mlp import residual_mlp
from recompute.kernels.rms_norm import CASTINGS, rms_norm
from recompute.kernels.swiglu import ACTIVATIONS

B, S, H, I = 2, 20, 48, 40  # noqa: E741
FORMS = {  # whether there is a residual, the weights are packed, there are biases, the norm scales
    "plain": (True, False, False, True),
    "no residual": (False, False, False, True),
    "packed": (True, True, False, True),
    "biases": (True, False, True, True),
    "no norm weight": (False, True, True, False),
}


def make_inputs(
    form: str = "plain",
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    sizes: tuple[int, int, int] = (S, H, I),
) -> list[Any]:
    """x, residual, the norm's weight, the three weights, the three biases; what a form has not is None."""
    residual, packed, biases, scales = FORMS[form]
    tokens, hidden, inner = sizes
    stream = (B, tokens, hidden)
    gate = (2 if packed else 1) * inner
    shapes = [stream, stream if residual else None, (hidden,) if scales else None]
    shapes += [(gate, hidden), None if packed else (inner, hidden), (hidden, inner)]
    shapes += [(gate,), None if packed else (inner,), (hidden,)] if biases else [None] * 3
    makers = (make, make, make, make_weight, make_weight, make_weight, make, make, make)
    return [
        None if shape is None else maker(*shape, seed=seed, device=device, dtype=dtype).requires_grad_()
        for seed, (shape, maker) in enumerate(zip(shapes, makers, strict=True))
    ]


def ours(casting: str = "llama", activation: str = "silu") -> Callable[..., Tensor]:
    def function(*inputs: Any) -> Tensor:
        biases = dict(zip(("gate_bias", "up_bias", "down_bias"), inputs[6:], strict=True))
        return residual_mlp(*inputs[:6], EPS, casting, activation, **biases)

    return function


def eager(casting: str = "llama", activation: str = "silu") -> Callable[..., Tensor]:
    def function(x: Tensor, residual: Any, norm: Any, gate: Tensor, up: Any, down: Tensor, *biases: Any) -> Tensor:
        h = x if residual is None else x + residual
        n = normalize(h, norm, casting)
        g = F.linear(n, gate, biases[0])
        g, u = g.chunk(2, -1) if up is None else (g, F.linear(n, up, biases[1]))
        return h + F.linear(activate(g, activation) * u, down, biases[2])

    return function


def given(inputs: list[Any]) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor is not None]


each_form = pytest.mark.parametrize("form", FORMS)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_no_larger_than_eagers(dtype: torch.dtype, form: str, device: str):
    assert_no_worse_than_eager(ours(), eager(), make_inputs(form, device, dtype))


@pytest.mark.parametrize(("casting", "activation"), zip(CASTINGS, ACTIVATIONS, strict=True))
def test_every_casting_and_activation(casting: str, activation: str, device: str):
    inputs = make_inputs("plain", device, torch.bfloat16)
    assert_no_worse_than_eager(ours(casting, activation), eager(casting, activation), inputs)


@each_form
def test_gradients_of_every_order(form: str):
    inputs = make_inputs(form, "cpu", torch.float64, sizes=(1, 3, 2))
    assert torch.autograd.gradcheck(ours("gemma"), inputs)
    assert torch.autograd.gradgradcheck(ours("gemma"), inputs)


class TestTheGradientOfBothSummands:
    """x and residual get one tensor as their gradient, as those of PyTorch's own addition do."""

    @pytest.mark.parametrize("create_graph", [False, True])
    def test_when_both_are_one_tensor(self, create_graph: bool, device: str):
        x, _, *others = make_inputs("plain", device, torch.float64)
        found = torch.autograd.grad(ours()(x, x, *others).sum(), x, create_graph=create_graph)
        expected = torch.autograd.grad(eager()(x, x, *others).sum(), x, create_graph=create_graph)
        if create_graph:
            found, expected = (torch.autograd.grad((g**2).sum(), x) for (g,) in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("create_graph", [False, True])
    @pytest.mark.parametrize("leaves", [True, False])
    def test_when_each_gets_more_from_elsewhere(self, leaves: bool, create_graph: bool, device: str):
        """Autograd adds into what it owns alone: it must not take either for that."""
        x, residual, *others = make_inputs("plain", device, torch.float64)

        def loss(function: Callable[..., Tensor], x: Tensor, residual: Tensor) -> Tensor:
            a, b = (x, residual) if leaves else (x * 1, residual * 1)
            before = (3 * a).sum() + (5 * b).sum()
            return before + (function(a, b, *others) ** 2).sum() + (7 * a * b).sum()

        gradients = []
        for function in (ours(), eager()):
            pair = [tensor.detach().clone().requires_grad_() for tensor in (x, residual)]
            for _ in range(2):  # the second time into the gradients of the first
                loss(function, *pair).backward(create_graph=create_graph)
            gradients.append([tensor.grad for tensor in pair])
            for tensor in pair:
                tensor.grad = None  # which with create_graph would be a cycle
        assert gradients[0][0].data_ptr() != gradients[0][1].data_ptr()
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-11)

    def test_when_one_is_written_to(self, device: str):
        inputs = make_inputs("plain", device)
        ours()(*inputs).sum().backward()
        x, residual = inputs[:2]
        before = residual.grad.clone()
        x.grad.zero_()
        assert torch.equal(residual.grad, before)

    @pytest.mark.parametrize("trained", [(True, False), (False, True)])
    def test_when_one_is_frozen(self, trained: tuple[bool, bool], device: str):
        inputs = make_inputs("plain", device)
        expected = torch.autograd.grad(ours()(*inputs).sum(), inputs[0])
        for tensor, train in zip(inputs, trained, strict=False):
            tensor.requires_grad_(train)
        ours()(*inputs).sum().backward()
        assert [tensor.grad is not None for tensor in inputs[:2]] == list(trained)
        assert torch.equal(inputs[trained.index(True)].grad, *expected)

    def test_when_their_dtypes_differ(self, device: str):
        x, residual, *others = make_inputs("plain", device)
        x = x.detach().bfloat16().requires_grad_()
        y = ours()(x, residual, *others)
        assert y.dtype is torch.float32
        dx, dresidual = torch.autograd.grad(y.sum(), (x, residual))
        assert (dx.dtype, dresidual.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(dx, dresidual.bfloat16())


@pytest.mark.parametrize("trained", [t for t in itertools.product((False, True), repeat=5) if any(t)])
def test_backward_does_what_is_needed_and_no_more(trained: tuple[bool, ...], device: str):
    """trained: the stream, the norm's weight, gate's, up's and down's."""
    stream_trains, norm_trains, gate_trains, up_trains, down_trains = trained
    inputs = make_inputs("plain", device)
    for tensor, train in zip(inputs, (stream_trains, *trained), strict=False):
        tensor.requires_grad_(train)
    assert flops(ours(), inputs) == flops(eager(), inputs)

    y = ours()(*inputs)
    with Work() as work:
        y.sum().backward()
    reaches_norm, trains_linears = stream_trains or norm_trains, gate_trains or up_trains
    expected = Counter(
        {
            "glu_forward": not any(trained[:4]),
            "glu_backward_": any(trained[:4]) and down_trains,
            "glu_backward": any(trained[:4]) and not down_trains,
            "rms_norm_backward": reaches_norm,
            "rms_norm_regenerate": trains_linears and not reaches_norm,
        }
    )
    found = Counter({name: count for name, count in work.counts.items() if name not in ("mm", "addmm")})
    assert found == +expected
    if reaches_norm:
        given = tuple(tensor is not None for tensor in work.results_of("rms_norm_backward"))
        assert given == (stream_trains, norm_trains, trains_linears)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_backward_regenerates_has_forwards_bits(dtype: torch.dtype, form: str, device: str):
    with Work() as work:
        ours()(*make_inputs(form, device, dtype)).sum().backward()
    norm = "add_rms_norm_forward" if FORMS[form][0] else "rms_norm_forward"
    n = work.results_of("rms_norm_backward")[2]
    assert torch.equal(n, work.results_of(norm)[0].view_as(n))
    product = work.arguments_of("glu_backward_")[0]
    assert torch.equal(product, work.results_of("glu_forward").view_as(product))


@each_form
def test_what_is_held_is_known_to_the_byte(form: str, device: str):
    inputs = make_inputs(form, device, torch.bfloat16)
    y = ours()(*inputs)
    known = {tensor.data_ptr() for tensor in given(inputs)}
    saved = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    held = {tensor.data_ptr(): tensor for tensor in saved if tensor.data_ptr() not in known}
    stream = H if FORMS[form][0] else 0  # without a residual it is x, which is there anyway
    assert sum(tensor.nbytes for tensor in held.values()) == B * S * (2 * (stream + 2 * I) + 4)


@each_form
def test_a_second_backward_gives_the_same_bits_and_writes_nowhere(form: str, device: str):
    inputs = make_inputs(form, device, torch.bfloat16)
    y = ours()(*inputs)
    dy = make(*y.shape, seed=9).to(y)
    saved = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]  # type: ignore[union-attr]
    watched = [*given(inputs), y, dy, *saved]
    before = [(tensor.detach().clone(), tensor._version) for tensor in watched]
    first = torch.autograd.grad(y, given(inputs), dy, retain_graph=True)
    second = torch.autograd.grad(y, given(inputs), dy)
    assert all(map(torch.equal, first, second))
    for tensor, (value, version) in zip(watched, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version


@pytest.mark.parametrize(
    "change",
    [lambda t: t.mT.contiguous().mT, lambda t: t[:, :1].expand(t.shape), lambda t: t[:1, :1, :1].expand(t.shape)],
)
def test_gradients_and_streams_of_any_strides(change: Callable[[Tensor], Tensor], device: str):
    x, residual, *others = make_inputs("plain", device)
    inputs = [*(change(tensor.detach()).requires_grad_() for tensor in (x, residual)), *others]
    dy = change(make(B, S, H, seed=9, device=device))
    results = []
    for function, dtype in ((ours(), torch.float32), (eager(), torch.float32), (eager(), torch.float64)):
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
        results.append(torch.autograd.grad(function(*leaves), given(leaves), dy.to(dtype)))
    for value, peer, truth in zip(*results, strict=True):
        assert relative_error(value, truth) <= 2 * relative_error(peer, truth) + FLOAT32_ROUNDING


@pytest.mark.parametrize("shape", [(H,), (0, H), (1, H), (3, 0, H), (B, 1, S, H)])
def test_any_leading_dimensions(shape: tuple[int, ...], device: str):
    others = make_inputs("plain", device, torch.float64)[2:]
    x, residual = (make(*shape, seed=seed, device=device, dtype=torch.float64).requires_grad_() for seed in range(2))
    found, expected = (run(function, [x, residual, *others]) for function in (ours(), eager()))
    for values, truths in zip(found, expected, strict=True):
        for value, truth in zip(values, truths, strict=True):
            assert value is None is truth or value.shape == truth.shape
            torch.testing.assert_close(value, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_eagers(x_dtype: torch.dtype, backward_inside: bool, device: str):
    """The stream and the norm in float32, whatever attention gives; matrix products in bfloat16."""
    x, *others = make_inputs("plain", device)
    inputs = [x.detach().to(x_dtype).requires_grad_(), *others]
    results = []
    for function in (ours(), eager()):
        with torch.autocast(device, torch.bfloat16):
            y = function(*inputs)
            dy = make(*y.shape, seed=9).to(y)
            if backward_inside:
                gradients = torch.autograd.grad(y, given(inputs), dy)
        if not backward_inside:
            gradients = torch.autograd.grad(y, given(inputs), dy)
        results.append([y, *gradients])
    doubles = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in inputs]
    y64 = eager()(*doubles)
    exact = [y64, *torch.autograd.grad(y64, given(doubles), dy.double())]
    for value, peer, truth in zip(*results, exact, strict=True):
        assert_no_larger_error(value, peer, truth)


def test_backward_under_autocast_of_a_forward_without(device: str):
    inputs = make_inputs("plain", device)
    for create_graph in (False, True):
        y = ours()(*inputs)
        grad = functools.partial(torch.autograd.grad, y.sum(), given(inputs), create_graph=create_graph)
        expected = grad(retain_graph=True)
        with torch.autocast(device, torch.bfloat16):
            found = grad()
        assert all(map(torch.equal, found, expected))


@each_device_of_compiled_code
@pytest.mark.parametrize("form", ["plain", *slow("no residual", "packed")])
def test_compiled_results_are_the_eager_ones(form: str, device: str):
    inputs = make_inputs(form, device)
    torch.compiler.reset()
    compiled = torch.compile(lambda *inputs: ours()(*inputs) * 2, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*inputs), ours()(*inputs) * 2
    assert torch.equal(found, expected)
    pairs = zip(*(torch.autograd.grad(y.sum(), given(inputs)) for y in (found, expected)), strict=True)
    assert all(torch.equal(value, truth) for value, truth in pairs)


def test_an_output_without_a_gradient_gives_none():
    inputs = make_inputs()
    gradients = torch.autograd.grad(NoGradient.apply(ours()(*inputs)).sum(), given(inputs), allow_unused=True)
    assert gradients == (None,) * 6


@each_form
def test_without_gradients_nothing_is_saved(form: str, device: str):
    inputs = make_inputs(form, device)
    expected = ours()(*inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = ours()(*inputs)
        assert y.grad_fn is None
        assert torch.equal(y, expected)


def test_meta_tensors_give_shapes_and_dtypes():
    inputs = make_inputs("plain", dtype=torch.bfloat16)
    y, gradients = run(ours(), [None if t is None else t.detach().to("meta").requires_grad_() for t in inputs])
    assert (y[0].shape, y[0].dtype) == ((B, S, H), torch.bfloat16)
    for gradient, tensor in zip(gradients, inputs, strict=True):
        assert gradient is None is tensor or (gradient.shape, gradient.dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize("with_residual", [False, True])
def test_a_stream_that_comes_back_is_dropped(with_residual: bool, device: str):
    x, residual, norm_weight, *others = make_inputs("plain", device)
    results, dropped = [], []
    for scope in (contextlib.nullcontext(), RecipeScope(RegionStatistics("a model"))):
        before = local.statistics.dropped_nbytes
        with scope:
            y = ours()(rms_norm(x, norm_weight), residual if with_residual else None, norm_weight, *others)
        dropped.append(local.statistics.dropped_nbytes - before)
        results.append(torch.autograd.grad(y.sum(), (x, norm_weight, *others[:3])))
    assert dropped == [0, 0 if with_residual else x.nbytes]  # of the sum no recipe is known
    assert all(map(torch.equal, *results))


SQUARE = torch.ones(3, 3)
ROW = torch.ones(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SQUARE, ROW, ROW, SQUARE, SQUARE, SQUARE), "found x (3, 3), residual (3,)"),
        ((SQUARE, None, ROW, SQUARE, SQUARE, torch.ones(2, 3)), "down_weight (2, 3)"),
        ((SQUARE, None, ROW, torch.ones(2, 3), SQUARE, SQUARE), "gate_weight (2, 3)"),
        ((SQUARE, None, SQUARE, SQUARE, SQUARE, SQUARE), "weight has shape (3, 3)"),
        ((torch.tensor(1.0), None, ROW, SQUARE, SQUARE, SQUARE), "found x ()"),
        ((SQUARE, SQUARE.to("meta"), ROW, SQUARE, SQUARE, SQUARE), "x is on cpu and residual on meta"),
        ((SQUARE, SQUARE.int(), ROW, SQUARE, SQUARE, SQUARE), "residual is torch.int32"),
        ((SQUARE, None, ROW, SQUARE.half(), SQUARE.half(), SQUARE.half()), "normalized x torch.float32, gate_weight"),
        ((SQUARE, None, ROW, SQUARE, SQUARE, SQUARE, EPS, "t5"), "unknown casting 't5'"),
        ((SQUARE, None, ROW, SQUARE, SQUARE, SQUARE, EPS, "none", "relu"), "unknown activation 'relu'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], message: str):
    with pytest.raises(KernelError, match=re.escape(message)) as refusal:
        residual_mlp(*arguments)
    assert str(refusal.value).startswith("residual_mlp: ")
