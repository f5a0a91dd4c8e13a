"""Dispatch modes, function modes and torch's settings that are not the same in forward and in backward."""

import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from engine_testing import set_by
from tiers import slow
from tiny import BATCH, LENGTH, VOCABULARY, TinyDecoder
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import recompute
from recompute.engine import numerics, recipe_book, region_statistics, scopes

SIZE = 8
CHECKPOINT = {"rules": [{"match": "**", "action": "checkpoint"}]}
KEEPS = {"rules": [{"match": "**.mlp", "action": "keep"}, {"match": "layers.*", "action": "recompute", "via": "hook"}]}
REGIONS = {
    "recompute": recompute.recompute,
    "checkpoint": recompute.recompute(policy=CHECKPOINT),
}
every_region = pytest.mark.parametrize("region_of", REGIONS.values(), ids=REGIONS)


def dispatch_mode(alter):
    """A dispatch mode, which turns what ops give into ``alter(op, output)``."""

    class Alters(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return alter(op, op(*args, **(kwargs or {})))

    Alters.__name__ = alter.__name__
    return Alters


def function_mode(alter):
    """The same of functions, by their names."""

    class Alters(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return alter(getattr(function, "__name__", ""), function(*args, **(kwargs or {})))

    Alters.__name__ = alter.__name__
    return Alters


def plus_one(op, output):
    """Turns every mul into mul + 1, and every sin into twice that."""
    if op is torch.ops.aten.mul.Tensor:
        return output + 1
    return output * 2 if op is torch.ops.aten.sin.default else output


def noise(op, output):
    """Adds noise to every output of floating point in memory of its own."""
    if isinstance(output, Tensor) and output.is_floating_point() and not op.is_view:
        output = output + torch.rand_like(output) / 8
    return output


def function_plus_one(name, output):
    """Turns every mul into mul + 1, and doubles what other functions give, a detach too."""
    if "mul" in name:
        return output + 1
    return output * 2 if name in ("sin", "detach", "as_strided", "clone") else output


def function_noise(name, output):
    if isinstance(output, Tensor) and name in ("mul", "sin", "cos", "exp", "detach", "clone"):
        return output + torch.rand_like(output) / 8
    return output


class DispatchCount(TorchDispatchMode):
    """Counts ops."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


DispatchPlusOne, FunctionPlusOne = dispatch_mode(plus_one), function_mode(function_plus_one)
ALTERING = [DispatchPlusOne, dispatch_mode(noise), FunctionPlusOne, function_mode(function_noise)]
every_mode = pytest.mark.parametrize("kind", [ALTERING[0], *slow(*ALTERING[1:-1]), ALTERING[-1]])


def _chain(x):
    return (x.sin() * x.cos()).exp() * x.t().t() * x[:4].exp().sum()


def _in_place(x):
    y = x.exp().mul(2)
    y.mul_(x.cos())
    return y.sin() * F.dropout(x.sin(), 0.5)


BODIES = [_chain, _in_place]
every_body = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__[1:])


def gradients(function, forward=nullcontext, backward=nullcontext):
    """Those of a few frames, ``forward`` around forward and ``backward`` around backward; and random draws."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(SIZE, requires_grad=True)
        with forward():
            y = function(x)
        with backward():
            y.sum().backward()
        assert x.grad is not None
        found += [x.grad, torch.rand(3)]
    return found


def assert_same(actual, expected):
    assert [torch.equal(ours, plain) for ours, plain in zip(actual, expected, strict=True)] == [True] * len(expected)


@every_region
@every_mode
@every_body
def test_a_mode_around_forward_alone(region_of, kind, body):
    expected = gradients(body, kind)
    assert_same(gradients(region_of(body), kind), expected)


@every_region
@every_mode
@every_body
def test_a_mode_inside_of_the_region(region_of, kind, body):
    def inside(x):
        y = x.exp()
        with kind():
            z = body(x) * y
        return z * y.cos()

    assert_same(gradients(region_of(inside)), gradients(inside))


@every_mode
@every_body
def test_a_mode_around_forward_and_backward_sees_what_a_tape_runs_again_and_changes_it_not(kind, body):
    assert_same(gradients(recompute.recompute(body), kind, kind), gradients(body, kind, kind))
    assert_same(gradients(recompute.recompute(body), nullcontext, kind), gradients(body, nullcontext, kind))


@every_region
def test_two_modes_of_which_one_is_around_backward_too(region_of):
    @contextmanager
    def both():
        with outer, DispatchPlusOne(), FunctionPlusOne():
            yield

    def run(function):
        outer.count = 0
        found = gradients(function, both, lambda: outer)
        assert outer.count > 0
        return found

    outer = DispatchCount()
    assert_same(run(region_of(_chain)), run(_chain))


@every_region
def test_a_mode_that_counts_sees_in_forward_what_it_would_see_and_in_backward_what_runs_again(region_of):
    def counts(function):
        forward = 0
        backward = DispatchCount()
        for _ in range(2):
            x = torch.ones(SIZE, requires_grad=True)
            with DispatchCount() as count, saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                y = function(x)
            forward += count.count  # before it is in force again, around what a checkpoint runs again
            with backward:
                y.sum().backward()
        return forward, backward.count

    plain, ours = counts(_chain), counts(region_of(_chain))
    assert ours[0] == plain[0]
    assert ours[1] > plain[1]


@every_region
def test_flops_are_counted_as_they_run(region_of):
    def flops(function):
        x = torch.ones(SIZE, SIZE, requires_grad=True)
        with FlopCounterMode(display=False) as forward:
            y = function(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def body(x):
        return (x.sin() @ x.cos()).exp()

    plain, ours = flops(body), flops(region_of(body))
    assert ours[0] == plain[0] == 2 * SIZE**3
    assert ours[1] == plain[1] + (plain[0] if region_of is REGIONS["checkpoint"] else 0)


def _a_module(policy):
    torch.manual_seed(0)
    model = TinyDecoder(layers=1)
    recompute.apply(model, policy)
    return model


@pytest.mark.parametrize("policy", ["elementwise", "hook", "full"])
@every_mode
def test_a_mode_around_the_forward_of_a_decoder(policy, kind):
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY

    def gradients_of(policy):
        model = _a_module(policy)
        for seed in range(2):
            torch.manual_seed(seed)
            with kind():
                loss = model(ids).sum()
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert_same(gradients_of(policy), gradients_of("none"))


@pytest.mark.parametrize("kind", ALTERING)
def test_what_ops_that_know_themselves_gave_is_not_what_a_mode_made_of_it(kind):
    def gradient(scope):
        torch.manual_seed(0)
        x = torch.randn(SIZE, requires_grad=True)
        with scopes.RecipeScope(region_statistics.RegionStatistics("a test")) if scope else nullcontext(), kind():
            y = x.sin()
            if scope:
                recipe_book.record(y, torch.sin, x)
            z = y.exp() * y.cos()
        z.sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def _numbers(x):
    """What the default dtype decides of: promotion from whole numbers, and random factories."""
    whole = torch.arange(1, SIZE + 1)
    y = x * whole.sin() * (whole / 3) * (whole * 1.5).cos() * torch.rand(SIZE) * whole.double().mean(dtype=None)
    return y.sin() * torch.full((SIZE,), 0.3) * torch.linspace(0, 1, SIZE).exp() * torch.tensor(0.7) * whole.sqrt()


flushing = partial(set_by, torch.set_flush_denormal, True, False)
SETTINGS = {
    "doubles": partial(set_by, torch.set_default_dtype, torch.float64, torch.float32),
    "flushing": flushing,
    "medium": partial(set_by, torch.set_float32_matmul_precision, "medium", "highest"),
    "threads": lambda: set_by(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "deterministic": partial(set_by, torch.use_deterministic_algorithms, True, False),
    "no mkldnn": partial(torch.backends.mkldnn.flags, enabled=False),
    "no NNPACK": partial(set_by, torch._C._set_nnpack_enabled, False, torch._C._get_nnpack_enabled()),
    "measured convolutions": partial(set_by, torch._C._set_cudnn_benchmark, True, False),
    "cuBLASLt": partial(set_by, torch._C._set_blas_preferred_backend, *map(torch._C._BlasBackend, (2, 1))),
    "plain attention": lambda: sdpa_kernel(SDPBackend.MATH),
    # As an attribute it cannot be set where OpInfo was imported.
    "newer precision": lambda: torch.backends.flags(fp32_precision="tf32"),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


@every_region
@every_setting
def test_settings_around_forward_alone(region_of, setting):
    with setting():  # which may leave something else behind than it found
        pass
    before = numerics.Numerics()
    assert_same(gradients(region_of(_numbers), setting), gradients(_numbers, setting))
    assert_same(gradients(region_of(_numbers), nullcontext, setting), gradients(_numbers, nullcontext, setting))
    assert numerics.Numerics() == before


@every_setting
def test_settings_inside_of_forward_alone(setting):
    def body(x):
        with setting():
            y = F.conv2d(_numbers(x).outer(x)[None], torch.ones(SIZE, 1, 3, 3)) * torch.rand(SIZE).sum()
        return y * y.sum(1, keepdim=True)

    rules = [{"match": "**", "action": "recompute", "rerun": ["convolution"]}]
    assert_same(gradients(recompute.recompute(policy={"rules": rules})(body)), gradients(body))


@every_region
@every_setting
def test_what_runs_again_runs_under_the_settings_of_its_forward(region_of, setting):
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.cos.default:
                seen.append(numerics.Numerics())
            return op(*args, **(kwargs or {}))

    x = torch.ones(SIZE, requires_grad=True)
    with setting():
        y = region_of(lambda x: x.exp().cos() * x)(x)
        in_forward = numerics.Numerics()
    before = numerics.Numerics()
    assert before != in_forward
    with Sees():
        y.sum().backward()
    assert seen[0] == in_forward
    assert numerics.Numerics() == before


@every_region
def test_denormals_matrices_and_long_sums_come_back_bit_for_bit(region_of):
    def body(x):
        small = x * 1e-30 * 1e-10
        return (small * 1e30).exp() * (small * 1e30 * 1e10)

    assert_same(gradients(region_of(body), flushing), gradients(body, flushing))


@every_region
@pytest.mark.parametrize("set_globally", [True, False])
def test_a_default_device_in_force_in_forward_alone(region_of, set_globally):
    def on_meta():
        return set_by(torch.set_default_device, "meta", None) if set_globally else torch.device("meta")

    def body(x):
        made = torch.rand(SIZE)
        assert made.device.type == "meta"
        assert torch.ones(2).sin().device.type == "meta"
        return x.exp().cos() * x

    assert_same(gradients(region_of(body), on_meta), gradients(body, on_meta))

    def on_cpu(x):
        return x * torch.rand(SIZE).sin() * torch.arange(SIZE).cos()

    assert_same(gradients(region_of(on_cpu), nullcontext, on_meta), gradients(on_cpu, nullcontext, on_meta))


@pytest.fixture
def unwarned():
    scopes._goes_without.cache_clear()
    yield
    scopes._goes_without.cache_clear()


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("policy", ["elementwise", "hook", "full", "auto", "kernel", KEEPS], ids=str)
def test_a_forward_without_saved_tensor_hooks_runs_as_without_a_policy_and_says_so_once(policy):
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY
    plain, ours = _a_module("none"), _a_module(policy)
    with disable_saved_tensors_hooks("no hooks here"):
        plain(ids).sum().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ours.zero_grad()
                ours(ids).sum().backward()
    assert len([each for each in caught if "saved-tensor hooks are disabled" in str(each.message)]) == 1
    for expected, actual in zip(plain.parameters(), ours.parameters(), strict=True):
        if policy == "kernel":  # which rounds in its own way
            torch.testing.assert_close(actual.grad, expected.grad)
        else:
            assert torch.equal(actual.grad, expected.grad)


@every_region
def test_a_backward_without_saved_tensor_hooks(region_of):
    def without():
        return disable_saved_tensors_hooks("no hooks here")

    assert_same(gradients(region_of(_chain), nullcontext, without), gradients(_chain, nullcontext, without))
    with without():
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == "no hooks here"
