"""The head and its loss: what is held and where, which changes no bit; and which matrix products run."""

import gc
import itertools
import math
import weakref
from collections import Counter

import pytest
import torch
from kernel_testing import NoWholeLogits, like, listed, make, relative_error, same_bits
from loss_testing import H, V, make_inputs, run
from torch._dynamo.testing import CompileCounterWithBackend

from recompute.counters import memory_trace
from recompute.kernels import launch, logit_blocks
from recompute.kernels.divergence_rows import KINDS
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_divergence import linear_divergence
from recompute.kernels.linear_log_probs import linear_log_probs


def losses(name, hidden, weight, bias, **options):
    """What the op gives, of a target or a teacher of its own."""
    target = torch.arange(3 * len(hidden), device=hidden.device) % len(weight)
    if name == "cross-entropy":
        return [linear_cross_entropy(hidden, weight, target[: len(hidden)], bias, **options)]
    if name == "log-probabilities":
        return listed(linear_log_probs(hidden, weight, target.view(-1, 3), bias, entropy=True, **options))
    teacher = [make(len(each), 40, seed=5).to(each) for each in (hidden, weight)]
    return [linear_divergence(hidden, weight, *teacher, student_bias=bias, kind=name, **options)]


HEADS = {"cross-entropy": 1, "log-probabilities": 1, **dict.fromkeys(KINDS, 2)}
each_loss = pytest.mark.parametrize("name", HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_loss
def test_however_much_is_held_the_gradients_are_the_same(name, dtype, device, monkeypatch):
    monkeypatch.setattr(logit_blocks, "WIDTH", 256)  # which decides the order of sums
    inputs, _ = make_inputs(device, dtype, tokens=4, hidden=5, vocabulary=1500)
    block, results = 256 * 4 * dtype.itemsize * HEADS[name], []
    for hold, blocks in ((True, 0), (True, 2), (True, 5), (False, 0), (False, 5), (True, math.inf)):
        outputs = losses(name, *inputs, hold_logits=hold, logits_bytes=blocks * block)
        first, second = (torch.autograd.grad(outputs, inputs, like(outputs), retain_graph=True) for _ in range(2))
        assert same_bits(first, second)
        results.append([*outputs, *first])
    *others, whole = results
    assert all(same_bits(others[0], other) for other in others)
    for value, other in zip(others[0], whole, strict=True):
        assert relative_error(value, other.double()) < 0.02


@pytest.mark.parametrize("device", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
@each_loss
def test_no_tensor_is_larger_than_the_memory_for_logits(name, device):
    inputs, _ = make_inputs(device, tokens=256)
    block = 256 * 256 * 4
    assert block > 2 * V * H * 4  # so large is the weight's gradient, too
    with NoWholeLogits() as seen:
        outputs = losses(name, *inputs, logits_bytes=HEADS[name] * block)
        torch.autograd.backward(outputs, like(outputs))
    assert seen.largest_nbytes == block


def test_gradients_of_some_inputs_first_and_of_others_then(device):
    inputs, target = make_inputs(device, tokens=4, hidden=5, vocabulary=1100)
    expected = run(linear_cross_entropy, inputs, target, logits_bytes=0)[1:]
    for first in range(3):
        loss = linear_cross_entropy(*inputs[:2], target, inputs[2], logits_bytes=0)
        gradient = make(seed=9).to(loss)
        order = [first, *(index for index in range(3) if index != first)]
        for index in order:
            (found,) = torch.autograd.grad(loss, inputs[index], gradient, retain_graph=True)
            assert torch.equal(found, expected[index])


def test_plans_fit_and_no_block_is_written_over_before_it_is_used():
    for tokens, vocabulary, hidden, columns, trains in itertools.product(
        (1, 16, 300, 8192), (257, 1500, 32001, 128256), (7, 64, 1024, 4096), (0, 300, 1000, 20000), (False, True)
    ):
        logits_bytes = columns * tokens * 2
        plan = logit_blocks.plan_blocks(tokens, vocabulary, hidden, 2, logits_bytes, True, trains)
        size = tokens * plan.stride
        spare = plan.in_gradient + plan.beside < plan.blocks
        assert (plan.blocks - 1) * plan.width < vocabulary <= plan.blocks * plan.width
        assert plan.stride >= plan.width
        assert (plan.beside + spare) * size * 2 <= max(logits_bytes, 256 * tokens * 2)
        assert plan.in_gradient == 0 or trains
        end = vocabulary * hidden // 64 * 64
        for block in range(plan.in_gradient):
            written = min((block + 1) * plan.width, vocabulary) * hidden
            assert written <= end - (plan.in_gradient - block) * size
        never = logit_blocks.plan_blocks(tokens, vocabulary, hidden, 2, logits_bytes, False, trains)
        assert never == plan._replace(in_gradient=0, beside=0)


@pytest.mark.parametrize(
    ("shape", "logits_bytes", "plan"),
    [
        ((8192, 128256, 4096), 8448 * 8192 * 2, (8448, 8448, 16, 7, 0)),
        ((8192, 128256, 4096), 1 << 30, (8448, 8448, 16, 7, 6)),
        ((8192, 128256, 4096), 3 << 30, (128256, 128256, 1, 0, 1)),
        ((8192, 151936, 1024), 8448 * 8192 * 2, (8448, 8448, 18, 2, 0)),
        ((2048, 128256, 4096), 8448 * 2048 * 2, (8448, 8448, 16, 14, 0)),
        ((64, 32001, 2048), 1 << 28, (32001, 32064, 1, 0, 1)),
    ],
)
def test_what_is_held_at_the_sizes_of_models(shape, logits_bytes, plan):
    assert logit_blocks.plan_blocks(*shape, 2, logits_bytes, True, True) == plan


@pytest.mark.parametrize(("logits_bytes", "hold"), [(0, True), (0, False), (3 * 256 * 16 * 4, True), (math.inf, True)])
def test_memory_is_what_was_allowed(logits_bytes, hold, device):
    tokens, hidden, vocabulary = 16, 12, 1700
    inputs, target = make_inputs(device, torch.float32, tokens, hidden, vocabulary)
    settings = {"logits_bytes": logits_bytes, "hold_logits": hold}
    with memory_trace(torch.device(device)) as trace:
        loss = linear_cross_entropy(*inputs[:2], target, inputs[2], **settings)
        gc.collect()  # Triton's interpreter leaves its arguments to the collector
        trace.mark("forward")
        gradients = torch.autograd.grad(loss, inputs)
    whole, block = vocabulary * tokens * 4, 256 * tokens * 4
    allowed = min(max(logits_bytes, block), whole * 1.03)
    small = 4096 + tokens * 4 * (2 * 7 + 6)  # two numbers a block and token, and some a token
    if not launch.uses_triton(loss):  # the reference's wide copies of a block
        allowed += 7 * min(max(logits_bytes, block), whole)
    made = sum(gradient.numel() * 4 for gradient in gradients)
    assert trace.peak_nbytes <= made + tokens * hidden * 4 + allowed + small
    if not hold:
        assert trace.held_nbytes["forward"] <= small


def test_nothing_is_held_without_a_backward_to_come(device, monkeypatch):
    inputs, target = make_inputs(device)
    holds = []
    plan = logit_blocks.plan_blocks
    monkeypatch.setattr(logit_blocks, "plan_blocks", lambda *arguments: holds.append(arguments[5]) or plan(*arguments))
    frozen = [tensor.detach() for tensor in inputs]
    expected = linear_cross_entropy(*inputs[:2], target)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(linear_cross_entropy(*inputs[:2], target), expected)
    assert torch.equal(linear_cross_entropy(*frozen[:2], target), expected)
    assert holds == [True, False, False, False]


def test_the_graph_is_freed_without_the_garbage_collector(device):
    inputs, target = make_inputs(device)
    gc.disable()
    try:
        loss = linear_cross_entropy(*inputs[:2], target, logits_bytes=0)
        held = [weakref.ref(tensor) for tensor in loss.grad_fn.held if tensor is not None]
        assert held
        torch.autograd.grad(loss, inputs[0], retain_graph=True)
        assert all(tensor() is None for tensor in held)
        loss = linear_cross_entropy(*inputs[:2], target, logits_bytes=0)
        held = [weakref.ref(tensor) for tensor in loss.grad_fn.held if tensor is not None]
        del loss
        assert all(tensor() is None for tensor in held)
    finally:
        gc.enable()


@pytest.mark.parametrize("logits_bytes", [0, math.inf])
@pytest.mark.parametrize("trained", [t for t in itertools.product((False, True), repeat=3) if any(t)])
def test_frozen_inputs_cost_no_matrix_product(trained, logits_bytes, device, monkeypatch):
    inputs, target = make_inputs(device)
    expected = run(linear_cross_entropy, inputs, target, logits_bytes=logits_bytes)[1:]
    products = Counter()
    for name in ("mm", "addmm"):
        function = getattr(torch, name)

        def counted(*arguments, name=name, function=function, **settings):
            products[name] += 1
            return function(*arguments, **settings)

        monkeypatch.setattr(torch, name, counted)
    chosen = [tensor.detach().requires_grad_(train) for tensor, train in zip(inputs, trained, strict=True)]
    hidden, weight, bias = chosen
    loss = linear_cross_entropy(hidden, weight, target, bias, logits_bytes=logits_bytes, hold_logits=False)
    loss.backward(make(seed=9).to(loss))
    blocks = 1 if logits_bytes else 3
    assert products == Counter(mm=blocks * trained[1], addmm=blocks * (2 + trained[0]))
    for tensor, train, gradient in zip(chosen, trained, expected, strict=True):
        assert torch.equal(tensor.grad, gradient) if train else tensor.grad is None


@pytest.mark.filterwarnings("ignore:.*CuBLAS")
@pytest.mark.parametrize("logits_bytes", [0, math.inf])
@each_loss
def test_no_memory_is_read_that_nobody_has_written(name, logits_bytes, device):
    inputs, _ = make_inputs(device, torch.bfloat16, tokens=40)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory with nan
    try:
        outputs = losses(name, *inputs, logits_bytes=logits_bytes)
        gradients = torch.autograd.grad(outputs, inputs, like(outputs))
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(each.isfinite().all() for each in (*outputs, *gradients))


@pytest.mark.gpu
@pytest.mark.parametrize("logits_bytes", [None, math.inf])
def test_nothing_waits_for_the_device(logits_bytes):
    inputs, target = make_inputs("cuda", torch.bfloat16)
    run(linear_cross_entropy, inputs, target)
    gradient = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = linear_cross_entropy(
            *inputs[:2], target, label_smoothing=0.1, logits_bytes=logits_bytes, return_token_accuracy=True
        )
        torch.autograd.grad(found.loss, inputs[:2], gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_code_serves_any_number_of_tokens():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *given: linear_cross_entropy(*given), fullgraph=True, backend=counter, dynamic=True)
    weight = torch.randn(600, 8, requires_grad=True)
    for tokens in (3, 5, 7, 9):
        hidden, target = torch.randn(tokens, 8, requires_grad=True), torch.randint(0, 600, (tokens,))
        loss = compiled(hidden, weight, target)
        loss.backward()
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(hidden @ weight.t(), target))
    assert counter.frame_count <= 2
    torch.compiler.reset()
