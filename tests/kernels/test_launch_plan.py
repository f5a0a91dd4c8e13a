"""Plans launch what the ops themselves launch, and only where that is the same launch: in captured code and eagerly."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from kernel_testing import Work, make, same_bits
from torch import Tensor

from recompute.kernels import activation, launch, launch_plan, norm_ops, rope
from recompute.kernels.launch import IMPLEMENTATIONS, Launch
from recompute.kernels.launch_plan import CALLS_BEFORE_PLAN, MAX_ATTEMPTS, PlannedCall, PlansByLayout

M, H = 6, 16


def heads(count, seed):
    return make(1, M, count, 8, seed=seed).transpose(1, 2)


def wide(seed=0):
    return make(M, H, seed=seed)


def norm_backward(s):
    return wide(s), wide(s + 1), make(H, seed=s), None, None, make(M, seed=s)


RMS, GLU, ACTIVATION = norm_ops.OPS["llama"], activation.GLU, activation.ACTIVATION
CALLS = {
    "rms_norm_forward": (RMS.forward, lambda s: (wide(s), None, make(H, seed=s), None, 1e-6, "llama")),
    "rms_norm_forward of heads": (RMS.forward, lambda s: (heads(4, s), None, make(8, seed=s), None, 1e-6, "llama")),
    "rms_norm_forward of a sum": (RMS.forward, lambda s: (wide(s), wide(s + 1), None, None, 1e-6, "none")),
    "layer_norm_forward": (
        norm_ops.OPS["layer_norm"].forward, lambda s: (wide(s), None, make(H, seed=s), make(H), 1e-6, "layer_norm"),
    ),
    "rms_norm_backward of heads": (
        RMS.backward,
        lambda s: (
            *(heads(4, s), heads(4, s + 1), make(8, seed=s), None, None, make(1, M, 4, seed=s).transpose(1, 2)),
            *("llama", True, True, False, heads(4, s + 2)),
        ),
    ),
    "rms_norm_regenerate": (
        RMS.regenerate, lambda s: (wide(s), make(H, seed=s), None, None, make(M, seed=s), "gemma"),
    ),
    "rms_norm_backward": (RMS.backward, lambda s: (*norm_backward(s), "llama", True, True, False, wide(s + 2))),
    "rope": (
        rope._rope_op, lambda s: (heads(4, s), heads(2, s + 1), *[make(1, M, 8, seed=s)] * 2, 1, torch.float32, False),
    ),
    "glu_forward": (GLU.forward, lambda s: (wide(s), wide(s + 1), "gelu")),
    "glu_backward": (
        GLU.backward, lambda s: (wide(s), make(M, 2 * H, seed=s + 1), None, None, None, 128, "silu", True, True, True),
    ),
    "glu_backward_": (
        GLU.backward_, lambda s: (wide(s), wide(s + 1), None, wide(s + 2), None, wide(), wide(), 128, "silu"),
    ),
    "activation_forward": (ACTIVATION.forward, lambda s: (wide(s), None, "relu2")),
    "activation_backward": (
        ACTIVATION.backward, lambda s: (wide(s), wide(s + 1), None, None, None, 128, "gelu", True, False, False),
    ),
    "activation_backward_": (
        ACTIVATION.backward_, lambda s: (wide(s), wide(s + 1), None, None, None, wide(), None, 128, "silu"),
    ),
}  # fmt: skip
"""Of each op, what goes through the dispatcher or around it, and its arguments by a seed."""
EAGER = ("rms_norm_forward", "rms_norm_forward of heads", "rms_norm_backward", "rope", "glu_backward")
EAGER += ("activation_backward", "glu_backward_", "activation_backward_")


def arguments_of(name, seed, device):
    return [each.to(device, copy=True) if isinstance(each, Tensor) else each for each in CALLS[name][1](10 * seed)]


def implementation(name):
    return IMPLEMENTATIONS[overload(name)]


def overload(name):
    return getattr(torch.ops.recompute, name.partition(" ")[0]).default


def tensors(result):
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [each for each in results if isinstance(each, Tensor)]


def same(found, expected):
    strides = ([each.stride() for each in tensors(result)] for result in (found, expected))
    return same_bits(tensors(found), tensors(expected)) and len({str(each) for each in strides}) == 1


class Spy:
    """Counts the calls of an implementation."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *arguments):
        self.calls += 1
        return self.function(*arguments)


def assert_as_the_op(call, name, device, seeds):
    """Results, and what is written in place."""
    for seed in range(seeds):
        ours, theirs = (arguments_of(name, seed, device) for _ in "ab")
        assert same(call(*ours), implementation(name)(*theirs))
        assert same(ours, theirs)


@pytest.mark.parametrize("name", CALLS)
def test_a_planned_call_gives_the_bits_and_layouts_of_the_op(name, device):
    spy = Spy(implementation(name))
    call = PlannedCall(spy)
    assert_as_the_op(call, name, device, 3)
    runs_kernels = launch.uses_triton(make(1).to(device))
    assert (call.planned is not None) == runs_kernels
    assert spy.calls == (1 if runs_kernels else 3)


def launches(*tensors):
    launch.run({(M,): lambda *_: None}, M, *tensors)


def planned():
    """A planned call of an op that launches one kernel, the spy of its implementation, and what was launched."""
    launched = []
    kernel = {(M,): lambda *arguments, **settings: launched.append((arguments, settings))}

    def run(x, scale):
        y = x.new_empty(x.shape)
        launch.run(kernel, M, x, y, scale, BLOCK=16)
        return y

    spy = Spy(run)
    call = PlannedCall(spy)
    call(make(M, H), 0.5)
    assert (call.planned is not None, spy.calls) == (True, 1)
    launched.clear()
    return call, spy, launched


def test_an_address_of_another_alignment_goes_to_the_implementation():
    call, spy, launched = planned()
    call(make(M, H), 0.5)
    assert (spy.calls, len(launched)) == (1, 1)
    call(make(M * H + 1)[1:].view(M, H), 0.5)
    assert (spy.calls, len(launched)) == (2, 2)


def test_a_plan_that_begins_with_another_alignment_waits_for_a_better_one():
    call = PlannedCall(lambda x: launches(x, y := x.new_empty(x.shape)) or y)
    call(make(M * H + 1)[1:].view(M, H))
    assert call.planned is None
    call(make(M, H))
    assert call.planned is not None


@pytest.mark.parametrize("also", [torch.zeros_like, torch.clone, lambda x: x.mul_(1)])
def test_what_does_more_than_launch_is_not_planned(also):
    def run(x):
        y = also(x)
        launches(x, y)
        return y

    spy = Spy(run)
    call = PlannedCall(spy)
    for _ in range(MAX_ATTEMPTS + 2):
        call(make(M, H))
    assert call.planned is None
    assert call._attempts == MAX_ATTEMPTS
    assert spy.calls == MAX_ATTEMPTS + 2


def test_what_launches_on_other_memory_is_not_planned():
    other = make(M, H)
    call = PlannedCall(lambda x: launches(x, other) or x.new_empty(x.shape))
    call(make(M, H))
    assert call.planned is None


def test_under_a_mode_nothing_is_planned():
    call = PlannedCall(lambda x: launches(x, y := x.new_empty(x.shape)) or y)
    with Work():
        call(make(M, H))
    assert call.planned is None


def test_on_cuda_it_runs_what_triton_compiled(monkeypatch):
    runs = []
    compiled = SimpleNamespace(run=lambda *values: runs.append(values), function=7, packed_metadata=(1, 2))
    x, y = make(M, H), make(M, H)
    current, hooks = [1], [SimpleNamespace(calls=[]) for _ in range(2)]  # Triton's, of a profiler
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    spy = Spy(lambda x, n: x)
    writer = launch_plan._Writer(spy, {"a0": x})
    writer.allocate("t0", y)
    assert writer.launch(Launch(None, M, (x, None, y, 5, 1e-6), {}, compiled, ("llama", 64), hooks))
    call = writer.function(["a0", "a1"], "t0", torch.device("cuda", 1))

    out = call(x, 5)
    ((*fixed, given, nothing, made_there, number, eps, casting, block),) = runs
    assert fixed == [M, 1, 1, 101, 7, (1, 2), None, None, None]
    assert given == x.data_ptr()
    assert made_there == out.data_ptr()
    assert (nothing, number, eps, casting, block) == (None, 5, 1e-6, "llama", 64)

    current[0] = 0  # another device is current
    assert call(x, 5) is x
    current[0] = 1
    for hook in hooks:
        hook.calls.append(print)
        assert call(x, 5) is x
        hook.calls.clear()
    assert (spy.calls, len(runs)) == (3, 1)


class Copies(Spy):
    """An op of two tensors that launches one kernel, which copies both: its results tell which was given where."""

    def __init__(self, *views):
        super().__init__(self.copies)
        self.views = views or (lambda x: x, lambda x: x)

    def copies(self, *given):
        seen = tuple(view(x) for view, x in zip(self.views, given, strict=True))
        results = tuple(x.new_empty(x.shape) for x in seen)
        launch.run({(M,): self.launch}, M, *seen, *results)
        return results

    @staticmethod
    def launch(x, y, x_copy, y_copy):
        x_copy.copy_(x)
        y_copy.copy_(y)


def test_a_plan_is_not_made_of_a_call_that_gives_one_tensor_twice():
    call = PlannedCall(Copies())
    x, y = make(M, H), make(M, H, seed=1)
    for _ in range(MAX_ATTEMPTS + 1):
        call(x, x)
    assert same_bits(call(x, y), (x, y))
    assert call.planned is not None
    assert same_bits(call(y, x), (y, x))
    assert same_bits(call(x, x), (x, x))


def test_a_plan_tells_tensors_apart_that_lie_in_one_memory():
    """As a parameter does, and the memory that it had in forward."""
    call = PlannedCall(Copies())
    x, y = make(M, H), make(M, H, seed=1)
    assert same_bits(call(x, x.detach()), (x, x))
    assert call.planned is not None
    assert same_bits(call(x, y), (x, y))


def test_a_plan_is_not_made_of_a_view_that_may_be_of_another_tensor_next_time():
    """The kernel is given the second rows of both, which lie in one memory in the first call alone."""
    call = PlannedCall(Copies(*[lambda x: x[1:]] * 2))
    both = make(2, M, H)
    for _ in range(MAX_ATTEMPTS):
        assert same_bits(call(*both), both[:, 1:])
    x, y = make(M, H, seed=1), make(M, H, seed=2)
    assert same_bits(call(x, y), (x[1:], y[1:]))
    assert call.planned is None


def test_what_cannot_be_planned_holds_no_memory_for_it():
    freed = []

    def run(x):
        first = x.new_empty(x.shape)
        alive = weakref.ref(first)
        launches(x, first)
        y = x.clone()
        launches(x, second := x.new_empty(x.shape))
        alive_too = weakref.ref(second)
        del first, second
        freed.append((alive() is None, alive_too() is None))
        return y

    PlannedCall(run)(make(M, H))
    assert freed == [(True, True)]


@pytest.fixture
def plans_anywhere(monkeypatch):
    """Ops make plans of eager calls on the CPU, too."""
    monkeypatch.setattr(launch_plan, "_can_be_planned", lambda arguments: True)


def spied(name, monkeypatch):
    """Counts the runs of an op's implementation in eager calls."""
    plans = launch.PLANS[overload(name)]
    spy = Spy(implementation(name))
    for each in (plans, *plans.by_layouts.values()):
        monkeypatch.setattr(each, "_implementation", spy)
    return spy


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_op_plans_layouts_that_come_again(name, device, plans_anywhere, monkeypatch):
    spy = spied(name, monkeypatch)
    assert_as_the_op(CALLS[name][0], name, device, CALLS_BEFORE_PLAN + 2)
    assert spy.calls == CALLS_BEFORE_PLAN + (0 if launch.uses_triton(make(1).to(device)) else 2)


OTHERS = {
    "eps": lambda x, w: (x, None, w, None, 0.5, "llama"),
    "casting": lambda x, w: (x, None, w, None, 1e-6, "gemma"),
    "no weight": lambda x, w: (x, None, None, None, 1e-6, "llama"),
    "shape": lambda x, w: (x[:2], None, w, None, 1e-6, "llama"),
    "strides": lambda x, w: (x.t().contiguous().t(), None, w, None, 1e-6, "llama"),
    "dtype": lambda x, w: (x.half(), None, w, None, 1e-6, "llama"),
    "dtype of the weight": lambda x, w: (x, None, w.bfloat16(), None, 1e-6, "llama"),
    "alignment": lambda x, w: (torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x), None, w, None, 1e-6, "llama"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_plan_is_for_its_layouts_alone(other, device, plans_anywhere, monkeypatch):
    x, weight = (each.to(device) for each in (make(M, H), make(H)))
    for _ in range(CALLS_BEFORE_PLAN):
        RMS.forward(x, None, weight, None, 1e-6, "llama")
    spy = spied("rms_norm_forward", monkeypatch)
    arguments = OTHERS[other](x, weight)
    assert same(RMS.forward(*arguments), implementation("rms_norm_forward")(*arguments))
    is_in_the_plan = other == "alignment" and launch.uses_triton(x)  # the plan itself runs the implementation there
    assert spy.calls == (0 if is_in_the_plan else 1)


def test_on_the_cpu_an_eager_op_runs_its_implementation():
    for _ in range(CALLS_BEFORE_PLAN + 1):
        RMS.forward(make(M, H), None, make(H), None, 1e-6, "llama")
    plans = launch.PLANS[overload("rms_norm_forward")]
    assert [*plans.by_layouts.values()] == [implementation("rms_norm_forward")]


def test_layouts_that_never_come_again_are_forgotten(plans_anywhere, monkeypatch):
    monkeypatch.setattr(launch_plan, "MAX_LAYOUTS", 4)
    plans = PlansByLayout(lambda x: launches(x, y := x.new_empty(x.shape)) or y)
    for rows in range(1, 20):
        plans.run(make(rows, H))
        assert (torch.float32, torch.device("cpu"), (rows, H), (H, 1)) in [layouts[0] for layouts in plans.by_layouts]
        assert len(plans.by_layouts) <= 4


@pytest.mark.parametrize("name", EAGER[:6])
def test_who_is_to_see_an_op_sees_it_where_there_is_a_plan(name, device, plans_anywhere, monkeypatch):
    op, arguments = CALLS[name][0], arguments_of(name, 0, device)
    for _ in range(CALLS_BEFORE_PLAN):
        expected = op(*arguments)
    spy = spied(name, monkeypatch)
    with Work() as seen:
        assert same(op(*arguments), expected)
    assert overload(name) in [called for called, *_ in seen.calls]
    assert spy.calls == (0 if launch.uses_triton(make(1).to(device)) else 1)  # the dispatcher runs the plan, too
    meta = [each.to("meta") if isinstance(each, Tensor) else each for each in arguments]
    assert all(each.is_meta for each in tensors(op(*meta)))
    assert same(torch.compile(op, backend="eager", fullgraph=True)(*arguments), expected)
