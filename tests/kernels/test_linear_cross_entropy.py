"""The head and its loss, and the loss alone: every option against PyTorch's, and what they refuse."""

import gc
import itertools
import math
import subprocess
import sys
import weakref
from collections import Counter

import kernel_testing
import pytest
import torch
from cases import EXTRAS
from kernel_testing import FLOAT32_ROUNDING, IGNORED, doubled, each_dtype, like, listed, make, relative_error, same_bits
from loss_testing import ON_CPU, H, M, V, assert_as_good_as_eager, assert_every_two_meet, eager, make_inputs, run
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from recompute.counters import memory_trace
from recompute.errors import KernelError
from recompute.kernels import launch, logit_blocks
from recompute.kernels.cross_entropy import cross_entropy
from recompute.kernels.divergence_rows import KINDS
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_divergence import linear_divergence
from recompute.kernels.linear_log_probs import linear_log_probs

OPTIONS = [
    # smoothing, z_loss, softcap, class weights, bias, reduction, logits_bytes
    (0.0, 0.0, None, False, False, "mean", None),
    (0.1, 0.01, 5.0, True, True, "mean", 0),
    (0.1, 0.0, 5.0, False, True, "sum", math.inf),
    (0.0, 0.01, None, True, False, "sum", 0),
    (0.1, 0.01, None, True, False, "none", math.inf),
    (0.0, 0.0, 5.0, True, True, "none", None),
    (0.0, 0.01, 5.0, False, False, "none", 0),
    (0.1, 0.0, None, False, True, "mean", 0),
    (0.0, 0.01, None, True, True, "mean", math.inf),
    (0.1, 0.01, 5.0, True, False, "sum", None),
]
NAMES = ("label_smoothing", "z_loss", "softcap", "class_weights", "bias", "reduction", "logits_bytes")


def test_every_two_options_meet():
    assert_every_two_meet(NAMES, OPTIONS)


@each_dtype
@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: "-".join(map(str, row)))
def test_errors_are_no_larger_than_eagers(row, dtype, device):
    # Of few values on CUDA, whose products sum in other orders, two samples of errors say little of each other.
    tokens, hidden, vocabulary = (M, H, V) if device == "cpu" else (512, 256, 8000)
    inputs, target = make_inputs(device, dtype, tokens, hidden, vocabulary)
    options = dict(zip(NAMES, row, strict=True))
    options["class_weights"] = make(vocabulary, seed=4).abs().to(device) if options["class_weights"] else None
    assert_as_good_as_eager(inputs, target, **options)


@each_dtype
@pytest.mark.parametrize("row", OPTIONS, ids=lambda row: "-".join(map(str, row)))
def test_errors_from_the_logits_on_are_no_larger_than_eagers(row, dtype, device):
    options = dict(zip(NAMES, row, strict=True))
    del options["bias"], options["logits_bytes"]
    options["class_weights"] = make(V, seed=4).abs().to(device) if options["class_weights"] else None
    target = make_inputs(device)[1]
    logits = make(M, V).mul(2).to(device, dtype).requires_grad_()
    gradients = []
    for function, given in ((cross_entropy, logits), (eager, logits), (eager, doubled([logits])[0])):
        arguments = (given, target) if function is cross_entropy else (given, torch.eye(V).to(given), target)
        loss = function(*arguments, **options)
        gradients.append(torch.autograd.grad(loss, given, make(*loss.shape, seed=9).to(loss))[0])
    found, peer, exact = gradients
    assert found.dtype is peer.dtype
    exponentials = FLOAT32_ROUNDING * (device == "cuda")  # Triton's are off by up to two roundings
    assert relative_error(found, exact) <= 1.05 * relative_error(peer, exact) + FLOAT32_ROUNDING + exponentials


@pytest.mark.parametrize(("tokens", "hidden", "vocabulary"), [(1, 1, 2), (3, 123, 257), (33, 7, 521), (7, 64, 1)])
@pytest.mark.parametrize("logits_bytes", [0, math.inf])
def test_any_shape(tokens, hidden, vocabulary, logits_bytes, device):
    inputs, target = make_inputs(device, torch.float64 if vocabulary < 3 else torch.float32, tokens, hidden, vocabulary)
    target[0] = vocabulary - 1
    found = run(linear_cross_entropy, inputs, target, logits_bytes=logits_bytes)
    exact = run(eager, doubled(inputs), target)
    for value, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (1, 2, 2), (2, 0)])
def test_leading_dimensions_are_those_of_the_target(shape, reduction, device):
    tokens = math.prod(shape)
    inputs, target = make_inputs(device, torch.float32, tokens)
    target.clamp_(min=0)
    flat = run(linear_cross_entropy, inputs, target, reduction=reduction, logits_bytes=0)
    inputs[0] = inputs[0].detach().view(*shape, H).requires_grad_()
    found = run(linear_cross_entropy, inputs, target.view(shape), reduction=reduction, logits_bytes=0)
    assert found[0].shape == (shape if reduction == "none" else ())
    assert found[1].shape == (*shape, H)
    for value, expected in zip(found, flat, strict=True):
        assert torch.equal(value.nan_to_num(), expected.view(value.shape).nan_to_num())
    if not tokens:
        assert found[0].isnan().all() if reduction == "mean" else found[0].sum() == 0
        assert not any(gradient.any() for gradient in found[1:])
    words = target[:, None].expand(-1, 3)
    of_rows, of_shape = (
        linear_log_probs(inputs[0].view(*leading, H), inputs[1], words.reshape(*leading, 3), entropy=True)
        for leading in ((tokens,), shape)
    )
    assert [each.shape for each in of_shape] == [(*shape, 3), shape]
    assert same_bits([each.flatten() for each in of_shape], [each.flatten() for each in of_rows])


def test_where_all_targets_are_ignored(device):
    inputs, target = make_inputs(device)
    target.fill_(7)
    for reduction, expected in (("mean", math.nan), ("sum", 0.0)):
        loss, *gradients = run(linear_cross_entropy, inputs, target, ignore_index=7, reduction=reduction)
        assert loss.isnan() if math.isnan(expected) else loss == expected
        assert not any(gradient.any() for gradient in gradients)
    extras = linear_cross_entropy(*inputs[:2], target, ignore_index=7, return_token_accuracy=True)
    assert extras.token_accuracy.isnan()


def refusal_of(function):
    with pytest.raises(IndexError) as refusal:
        function()
    return str(refusal.value)


@ON_CPU
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "mean"},
        {"reduction": "none", "label_smoothing": 0.1},
        {"reduction": "sum", "class_weights": make(V, seed=4).abs()},
        {"reduction": "mean", "class_weights": make(V, seed=4).abs(), "z_loss": 0.1, "softcap": 9.0},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(("wrong", "ignored"), [(-1, IGNORED), (V, IGNORED), (IGNORED, 5), (2**40, V)])
def test_a_target_that_is_no_class_is_refused_as_pytorch_refuses_it(wrong, ignored, options, device):
    inputs, target = make_inputs(device)
    target[target == IGNORED] = ignored
    target[1] = wrong
    options = {**options, "ignore_index": ignored}
    hidden, weight, bias = inputs
    expected = f"Target {wrong} is out of bounds."
    assert refusal_of(lambda: eager(hidden, weight, target, bias, **options)) == expected
    ways = [{}, {"logits_bytes": 0}, {"logits_bytes": math.inf, "return_argmax": True}, {"return_logits": True}]
    for way in (*ways, {"hold_logits": False}):
        refusal = refusal_of(lambda way=way: linear_cross_entropy(hidden, weight, target, bias, **options, **way))
        assert refusal == expected
    assert refusal_of(lambda: cross_entropy(F.linear(*inputs), target, **options)) == expected
    if wrong != IGNORED:
        words = target.where(target != ignored, IGNORED)[:, None].expand(M, 2)
        assert refusal_of(lambda: linear_log_probs(hidden, weight, words, bias)) == expected
        teacher = make(M, 2, seed=5).to(device)
        assert refusal_of(lambda: linear_divergence(hidden, weight, teacher, teacher_indices=words)) == expected


@pytest.mark.parametrize("ignored", [IGNORED, -1, 5, V, 2**40])
def test_what_is_ignored_is_not_refused_inside_of_the_classes_or_outside(ignored, device):
    inputs, target = make_inputs(device)
    target[target == IGNORED] = ignored
    found = run(linear_cross_entropy, inputs, target, ignore_index=ignored)
    for value, expected in zip(found, run(eager, inputs, target, ignore_index=ignored), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_a_target_of_fake_tensors_is_not_asked_for_its_values():
    with FakeTensorMode():
        loss = linear_cross_entropy(torch.empty(3, 4), torch.empty(5, 4), torch.zeros(3, dtype=torch.int64))
    assert loss.shape == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, y: linear_cross_entropy(x, w, y, return_token_accuracy=True)[:2],
        lambda x, w, y: cross_entropy(F.linear(x, w), y),
    ],
)
def test_a_target_that_is_no_class_is_refused_in_compiled_code(function):
    inputs, target = make_inputs("cpu", vocabulary=8)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs[:2], target), function(*inputs[:2], target))
    target[1] = 8
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        compiled(*inputs[:2], target)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_target_that_is_no_class_fails_an_assertion_on_the_device(dtype):
    """In a process of its own: no other work can follow there."""
    script = f"""
import torch
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
x, w = (torch.randn(4, 16, device="cuda", dtype=torch.{dtype}) for _ in range(2))
y = torch.tensor([0, -100, 3, 1], device="cuda")
graph = torch.cuda.CUDAGraph()
linear_cross_entropy(x, w, y)
with torch.cuda.graph(graph):
    loss = linear_cross_entropy(x, w, y)
graph.replay()
torch.cuda.synchronize()
print("right", loss.isfinite().item(), flush=True)
y[2] = 4
graph.replay()
torch.cuda.synchronize()
print("wrong")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "right True\n"
    assert done.returncode != 0
    assert "device-side assert triggered" in done.stderr


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, of the interpreter
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e4, -1e4])
@pytest.mark.parametrize("logits_bytes", [0, math.inf])
def test_extreme_logits_are_as_in_eager(value, logits_bytes, device):
    inputs, target = make_inputs(device)
    with torch.no_grad():
        inputs[2][100:400] = value  # a whole block of columns among them
    target[target >= 100] = 5
    found = run(linear_cross_entropy, inputs, target, reduction="none", logits_bytes=logits_bytes)
    expected = run(eager, inputs, target, reduction="none")
    counts = target != IGNORED  # what has no loss gets no gradient here; eager's is nan of logits that are
    for index, (a, b) in enumerate(zip(found[:2], expected, strict=False)):
        torch.testing.assert_close(a[counts], b[counts], rtol=1e-4, atol=1e-6, equal_nan=True, msg=str(index))


def test_logits_that_are_small_under_a_cap_keep_their_digits(device):
    logits, target = (make(50, 30) * 1e-3).to(device), torch.zeros(50, dtype=torch.long, device=device)
    logits.requires_grad_()
    (found,) = torch.autograd.grad(cross_entropy(logits, target, softcap=1.0), logits)
    capped = torch.tanh(logits.double())
    (exact,) = torch.autograd.grad(F.cross_entropy(capped, target), logits)
    assert relative_error(found, exact.double()) <= 4 * FLOAT32_ROUNDING


def test_the_strides_of_inputs_and_gradients_do_not_matter(device):
    inputs, target = make_inputs(device)
    hidden, weight, bias = inputs
    strided = [tensor.detach().t().contiguous().t().requires_grad_() for tensor in (hidden, weight)]
    apart = target.repeat_interleave(2)[::2]
    for gradient in (make(1).to(device).expand(M), make(2 * M).to(device)[::2]):
        results = []
        for h, w, t in ((*strided, apart), (hidden, weight, target)):
            losses = linear_cross_entropy(h, w, t, bias, reduction="none", logits_bytes=0)
            results.append([losses, *torch.autograd.grad(losses, (h, w, bias), gradient)])
        for value, expected in zip(*results, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("logits_bytes", [0, math.inf])
def test_extras_come_without_the_logits(logits_bytes, device):
    inputs, target = make_inputs(device, tokens=8)
    logits = F.linear(*(tensor.detach() for tensor in inputs))
    target[1::5] = logits[1::5].argmax(1)
    expected = linear_cross_entropy(*inputs[:2], target, inputs[2])
    for wanted in itertools.product((False, True), repeat=3):
        found = linear_cross_entropy(
            *(*inputs[:2], target, inputs[2]), logits_bytes=logits_bytes, **dict(zip(EXTRAS, wanted, strict=True))
        )
        if not any(wanted):
            assert isinstance(found, Tensor)
            continue
        torch.testing.assert_close(found.loss, expected)
        assert [extra is not None for extra in found[1:4]] == list(wanted)
        assert not any(extra is not None and extra.requires_grad for extra in found[1:])
        if wanted[0]:
            counts = target != IGNORED
            accuracy = (logits.argmax(1) == target)[counts].float().mean()
            assert found.token_accuracy.dtype is torch.float32
            torch.testing.assert_close(found.token_accuracy, accuracy)
        if wanted[1]:
            assert torch.equal(found.argmax, logits.argmax(1))
        if wanted[2]:
            torch.testing.assert_close(found.max_logit, logits.amax(1))


def test_the_first_of_equal_logits_is_the_arg_max(device):
    weight = torch.ones(V, H, device=device)
    weight[:270] = 0
    found = linear_cross_entropy(
        torch.ones(3, H, device=device), weight, torch.zeros(3, dtype=torch.long, device=device), logits_bytes=0,
        return_argmax=True,
    )  # fmt: skip
    assert found.argmax.tolist() == [270] * 3


@each_dtype
def test_logits_on_request_have_gradients_of_their_own(dtype, device):
    inputs, target = make_inputs(device, dtype)
    hidden, weight, bias = inputs
    assert_as_good_as_eager(inputs, target, return_logits=True, softcap=5.0, label_smoothing=0.1)
    found = linear_cross_entropy(hidden, weight, target, bias, softcap=5.0, return_logits=True)
    expected = 5.0 * torch.tanh(F.linear(hidden, weight, bias) / 5.0)
    assert torch.equal(found.logits, expected)
    square = found.logits.float().square().mean()
    values = (found.loss + square, found.loss, square)
    gradients = (torch.autograd.grad(value, inputs, retain_graph=True) for value in values)
    for both, one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(both.float(), one.float() + other.float(), rtol=0.05, atol=1e-3)


@pytest.mark.gpu
@each_dtype
@pytest.mark.parametrize("logits_bytes", [0, None, math.inf])
def test_real_sizes(logits_bytes, dtype):
    inputs, target = make_inputs("cuda", dtype, tokens=2048, hidden=512, vocabulary=32001)
    assert_as_good_as_eager(inputs, target, logits_bytes=logits_bytes)


@pytest.mark.gpu
def test_more_than_two_to_the_31_logits():
    tokens, vocabulary = 40_000, 60_000
    inputs, target = make_inputs("cuda", torch.bfloat16, tokens, 16, vocabulary)
    found = run(linear_cross_entropy, inputs, target, reduction="none", logits_bytes=math.inf)
    blocks = run(linear_cross_entropy, inputs, target, reduction="none")
    last = slice(tokens - 100, tokens)
    exact, peer = (
        eager(given[0][last], given[1], target[last], given[2], reduction="none") for given in (doubled(inputs), inputs)
    )
    assert relative_error(found[0][last], exact) <= 1.35 * relative_error(peer, exact)  # of 100 samples
    for value, other in zip(found, blocks, strict=True):  # a logit that is rounded the other way moves its token's
        assert relative_error(value, other.double()) <= 0.01


def adapted(hidden, weight, target, bias, thin, up, **options):
    """Eager: an adapter's logits are added, then all are scaled, capped and cooled."""
    scale, temperature = options.pop("scale", 1.0), options.pop("temperature", 1.0)
    softcap = options.pop("softcap", None)
    logits = (F.linear(hidden, weight, bias) + F.linear(thin, up)) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return kernel_testing.eager_cross_entropy(logits / temperature, target, **options)


@ON_CPU
@pytest.mark.parametrize("logits_bytes", [None, 0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 1.5, "temperature": 0.7},
        {"scale": 0.5, "softcap": 3.0, "temperature": 0.7, "label_smoothing": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("frozen", [False, True])
def test_an_adapter_adds_to_the_logits(device, options, logits_bytes, frozen):
    (hidden, weight, bias), target = make_inputs(device)
    thin, up = (make(rows, 4, seed=7).to(device).requires_grad_() for rows in (M, V))
    if frozen:
        weight.requires_grad_(False)
        bias.requires_grad_(False)
    trained = [each for each in (hidden, weight, bias, thin, up) if each.requires_grad]
    found = linear_cross_entropy(hidden, weight, target, bias, adapter=(thin, up), logits_bytes=logits_bytes, **options)
    whole = linear_cross_entropy(hidden, weight, target, bias, adapter=(thin, up), return_logits=True, **options)
    expected = adapted(hidden, weight, target, bias, thin, up, **options)
    for loss in (found, whole.loss):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        gradients = (torch.autograd.grad(each, trained, retain_graph=True) for each in (loss, expected))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    log_probs = linear_log_probs(hidden, weight, target, bias, adapter=(thin, up))
    torch.testing.assert_close(log_probs, -adapted(hidden, weight, target, bias, thin, up, reduction="none"))


def test_an_adapted_loss_is_differentiable_twice():
    (hidden, weight, _), target = make_inputs("cpu", torch.float64, 3, 4, 5)
    thin, up = (make(rows, 2, seed=7).double().requires_grad_() for rows in (3, 5))
    loss = lambda *given: linear_cross_entropy(*given[:2], target, adapter=given[2:], scale=0.5)  # noqa: E731
    assert torch.autograd.gradgradcheck(loss, (hidden, weight, thin, up), fast_mode=True)


def test_an_adapter_of_other_shapes_is_refused():
    (hidden, weight, bias), target = make_inputs("cpu")
    for thin, up in ((M, V - 1), (M - 1, V)):
        with pytest.raises(KernelError, match=r"adapter is .* expected thin \(12, 'R'\) and up \(600, R\)"):
            linear_cross_entropy(hidden, weight, target, bias, adapter=(torch.ones(thin, 2), torch.ones(up, 2)))


# What is held and where, which changes no bit; and which matrix products run


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
    with kernel_testing.NoWholeLogits() as seen:
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
