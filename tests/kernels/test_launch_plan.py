"""Plans launch what the ops themselves launch, and only where that is the same launch: in captured code and eagerly."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_testing import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.kernels import (
    activation,
    launch,
    launch_plan,
    norm_ops,
    rope,
)
from recompute.kernels.launch import IMPLEMENTATIONS, Launch
from recompute.kernels.launch_plan import CALLS_BEFORE_PLAN, MAX_ATTEMPTS, PlannedCall, PlansByLayout

M, H = 6, 16
assert all((activation, norm_ops, rope)), "they register their ops"


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(count: int, seed: int) -> Tensor:
    return made(1, M, count, 8, seed=seed).transpose(1, 2)


CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "rms_norm_forward": lambda s: (made(M, H, seed=s), None, made(H, seed=s), None, 1e-6, "llama"),
    "rms_norm_forward of heads": lambda s: (heads(4, s), None, made(8, seed=s), None, 1e-6, "llama"),
    "rms_norm_forward of a sum": lambda s: (made(M, H, seed=s), made(M, H, seed=s + 1), None, None, 1e-6, "none"),
    "layer_norm_forward": lambda s: (made(M, H, seed=s), None, made(H, seed=s), made(H), 1e-6, "layer_norm"),
    "rms_norm_backward of heads": lambda s: (
        *(heads(4, s), heads(4, s + 1), made(8, seed=s), None, None, made(1, M, 4, seed=s).transpose(1, 2)),
        *("llama", True, True, False, heads(4, s + 2)),
    ),
    "rms_norm_regenerate": lambda s: (made(M, H, seed=s), made(H, seed=s), None, None, made(M, seed=s), "gemma"),
    "rms_norm_backward": lambda s: (
        *(made(M, H, seed=s), made(M, H, seed=s + 1), made(H, seed=s), None, None, made(M, seed=s)),
        *("llama", True, True, False, made(M, H, seed=s + 2)),
    ),
    "rope": lambda s: (
        *(heads(4, s), heads(2, s + 1), made(1, M, 8, seed=s), made(1, M, 8, seed=s)),
        *(1, torch.float32, False),
    ),
    "glu_forward": lambda s: (made(M, H, seed=s), made(M, H, seed=s + 1), "gelu"),
    "glu_backward": lambda s: (
        *(made(M, H, seed=s), made(M, 2 * H, seed=s + 1), None, None, None),
        *(128, "silu", True, True, True),
    ),
    "activation_forward": lambda s: (made(M, H, seed=s), None, "relu2"),
    "activation_backward": lambda s: (
        *(made(M, H, seed=s), made(M, H, seed=s + 1), None, None, None),
        *(128, "gelu", True, False, False),
    ),
}


def implementation(name: str) -> Callable[..., Any]:
    return IMPLEMENTATIONS[overload(name)]


def overload(name: str) -> Any:
    return getattr(torch.ops.recompute, name.partition(" ")[0]).default


def tensors(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [each for each in results if each is not None]


class Spy:
    """Counts the calls of an implementation."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self.function(*arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_planned_call_gives_the_bits_and_layouts_of_the_op(name: str, device: str) -> None:
    spy = Spy(implementation(name))
    call = PlannedCall(spy)
    for seed in range(3):
        arguments = [each.to(device) if isinstance(each, Tensor) else each for each in CALLS[name](10 * seed)]
        found, expected = tensors(call(*arguments)), tensors(spy.function(*arguments))
        assert same_bits(found, expected)
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        assert [each.dtype for each in found] == [each.dtype for each in expected]
    runs_kernels = launch.uses_triton(made(1).to(device))
    assert call.is_planned == runs_kernels
    assert spy.calls == (1 if runs_kernels else 3)


IN_PLACE = {
    activation.GLU.backward_: ("glu_backward_", (0, 1, None, 2, None, 3, 4)),
    activation.ACTIVATION.backward_: ("activation_backward_", (0, 1, None, None, None, 2, None)),
}
"""Of each op its name, and for each argument the seed of its values; None where it is given no tensor."""


@pytest.mark.parametrize(("name", "given"), IN_PLACE.values())
def test_in_place_it_writes_where_the_op_writes(name: str, given: tuple[int | None, ...], device: str) -> None:
    function = implementation(name)
    call = PlannedCall(function)
    for seed in range(2):
        ours, theirs = (
            [None if each is None else made(M, H, seed=seed + each).to(device) for each in given] for _ in "ab"
        )
        assert call(*ours, 128, "silu") is None
        function(*theirs, 128, "silu")
        assert same_bits(tensors(tuple(ours)), tensors(tuple(theirs)))
    assert call.is_planned == launch.uses_triton(made(1).to(device))


def planned() -> tuple[PlannedCall, Spy, list[tuple[Any, ...]]]:
    """A planned call of an op that launches one kernel, the spy of its implementation, and what was launched."""
    launched: list[tuple[Any, ...]] = []
    kernel = {(M,): lambda *arguments, **settings: launched.append((arguments, settings))}

    def run(x: Tensor, scale: float) -> Tensor:
        y = x.new_empty(x.shape)
        launch.run(kernel, M, x, y, scale, BLOCK=16)
        return y

    spy = Spy(run)
    call = PlannedCall(spy)
    call(made(M, H), 0.5)
    assert (call.is_planned, spy.calls) == (True, 1)
    launched.clear()
    return call, spy, launched


def test_an_address_of_another_alignment_goes_to_the_implementation() -> None:
    call, spy, launched = planned()
    call(made(M, H), 0.5)
    assert (spy.calls, len(launched)) == (1, 1)
    call(made(M * H + 1)[1:].view(M, H), 0.5)
    assert (spy.calls, len(launched)) == (2, 2)


def test_a_plan_that_begins_with_another_alignment_waits_for_a_better_one() -> None:
    call = PlannedCall(lambda x: launch.run({(M,): lambda *_: None}, M, x, y := x.new_empty(x.shape)) or y)
    call(made(M * H + 1)[1:].view(M, H))
    assert not call.is_planned
    call(made(M, H))
    assert call.is_planned


@pytest.mark.parametrize("also", [torch.zeros_like, torch.clone, lambda x: x.mul_(1)])
def test_what_does_more_than_launch_is_not_planned(also: Callable[[Tensor], Tensor]) -> None:
    def run(x: Tensor) -> Tensor:
        y = also(x)
        launch.run({(M,): lambda *_: None}, M, x, y)
        return y

    spy = Spy(run)
    call = PlannedCall(spy)
    for _ in range(MAX_ATTEMPTS + 2):
        call(made(M, H))
    assert not call.is_planned
    assert call._attempts == MAX_ATTEMPTS
    assert spy.calls == MAX_ATTEMPTS + 2


def test_what_launches_on_other_memory_is_not_planned() -> None:
    other = made(M, H)
    call = PlannedCall(lambda x: launch.run({(M,): lambda *_: None}, M, x, other) or x.new_empty(x.shape))
    call(made(M, H))
    assert not call.is_planned


def test_under_a_mode_nothing_is_planned() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    call = PlannedCall(lambda x: launch.run({(M,): lambda *_: None}, M, x, y := x.new_empty(x.shape)) or y)
    with Mode():
        call(made(M, H))
    assert not call.is_planned


class Hooks:
    """Triton's, of a profiler."""

    def __init__(self) -> None:
        self.calls: list[Any] = []


def test_on_cuda_it_runs_what_triton_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    compiled = SimpleNamespace(run=lambda *values: runs.append(values), function=7, packed_metadata=(1, 2))
    x, y = made(M, H), made(M, H)
    current, hooks = [1], (Hooks(), Hooks())
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


def launches(*tensors: Tensor) -> None:
    launch.run({(M,): lambda *_: None}, M, *tensors)


class Copies(Spy):
    """An op of two tensors that launches one kernel, which copies both: its results tell which was given where."""

    def __init__(self, *views: Callable[[Tensor], Tensor]) -> None:
        super().__init__(self.copies)
        self.views = views or (lambda x: x, lambda x: x)

    def copies(self, *given: Tensor) -> tuple[Tensor, ...]:
        seen = tuple(view(x) for view, x in zip(self.views, given, strict=True))
        results = tuple(x.new_empty(x.shape) for x in seen)
        launch.run({(M,): self.launch}, M, *seen, *results)
        return results

    @staticmethod
    def launch(x: Tensor, y: Tensor, x_copy: Tensor, y_copy: Tensor) -> None:
        x_copy.copy_(x)
        y_copy.copy_(y)


def test_a_plan_is_not_made_of_a_call_that_gives_one_tensor_twice() -> None:
    call = PlannedCall(Copies())
    x, y = made(M, H), made(M, H, seed=1)
    for _ in range(MAX_ATTEMPTS + 1):
        call(x, x)
    assert same_bits(call(x, y), (x, y))
    assert call.is_planned
    assert same_bits(call(y, x), (y, x))
    assert same_bits(call(x, x), (x, x))


def test_a_plan_is_not_made_of_a_view_that_may_be_of_another_tensor_next_time() -> None:
    """The kernel is given the second rows of both, which lie in one memory in the first call alone."""
    call = PlannedCall(Copies(*[lambda x: x[1:]] * 2))
    both = made(2, M, H)
    for _ in range(MAX_ATTEMPTS):
        assert same_bits(call(*both), both[:, 1:])
    x, y = made(M, H, seed=1), made(M, H, seed=2)
    assert same_bits(call(x, y), (x[1:], y[1:]))
    assert not call.is_planned


def test_what_cannot_be_planned_holds_no_memory_for_it() -> None:
    freed = []

    def run(x: Tensor) -> Tensor:
        first = x.new_empty(x.shape)
        alive = weakref.ref(first)
        launches(x, first)
        y = x.clone()
        launches(x, second := x.new_empty(x.shape))
        alive_too = weakref.ref(second)
        del first, second
        freed.append((alive() is None, alive_too() is None))
        return y

    PlannedCall(run)(made(M, H))
    assert freed == [(True, True)]


RMS = norm_ops.OPS["llama"]
EAGER = {
    "rms_norm_forward": RMS.forward,
    "rms_norm_forward of heads": RMS.forward,
    "rms_norm_backward": RMS.backward,
    "rope": rope._rope_op,
    "glu_backward": activation.GLU.backward,
    "activation_backward": activation.ACTIVATION.backward,
}


@pytest.fixture
def plans_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops make plans of eager calls on the CPU, too."""
    monkeypatch.setattr(launch_plan, "_can_be_planned", lambda arguments: True)


def spied(name: str, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Counts the runs of an op's implementation in eager calls."""
    plans = launch.PLANS[overload(name)]
    spy = Spy(implementation(name))
    monkeypatch.setattr(plans, "_implementation", spy)
    return spy


@pytest.mark.parametrize("name", EAGER)
def test_an_eager_op_plans_layouts_that_come_again(
    name: str, device: str, plans_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = spied(name, monkeypatch)
    for seed in range(CALLS_BEFORE_PLAN + 2):
        arguments = [each.to(device) if isinstance(each, Tensor) else each for each in CALLS[name](10 * seed)]
        found, expected = tensors(EAGER[name](*arguments)), tensors(implementation(name)(*arguments))
        assert same_bits(found, expected)
        assert [each.stride() for each in found] == [each.stride() for each in expected]
    runs_kernels = launch.uses_triton(made(1).to(device))
    assert spy.calls == CALLS_BEFORE_PLAN + (0 if runs_kernels else 2)


@pytest.mark.parametrize("op", IN_PLACE, ids=[name for name, _ in IN_PLACE.values()])
def test_an_eager_op_in_place_is_planned(
    op: Callable[..., Any], device: str, plans_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, given = IN_PLACE[op]
    spy = spied(name, monkeypatch)
    for seed in range(CALLS_BEFORE_PLAN + 2):
        ours, theirs = (
            [None if each is None else made(M, H, seed=seed + each).to(device) for each in given] for _ in "ab"
        )
        assert op(*ours, 128, "silu") is None
        implementation(name)(*theirs, 128, "silu")
        assert same_bits(tensors(tuple(ours)), tensors(tuple(theirs)))
    assert spy.calls == CALLS_BEFORE_PLAN + (0 if launch.uses_triton(made(1).to(device)) else 2)


OTHERS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
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
def test_a_plan_is_for_its_layouts_alone(
    other: str, device: str, plans_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = (each.to(device) for each in (made(M, H), made(H)))
    for _ in range(CALLS_BEFORE_PLAN):
        RMS.forward(x, None, weight, None, 1e-6, "llama")
    spy = spied("rms_norm_forward", monkeypatch)
    arguments = OTHERS[other](x, weight)
    found, expected = tensors(RMS.forward(*arguments)), tensors(implementation("rms_norm_forward")(*arguments))
    assert same_bits(found, expected)
    assert [each.stride() for each in found] == [each.stride() for each in expected]
    is_in_the_plan = other == "alignment" and launch.uses_triton(x)  # the plan itself runs the implementation there
    assert spy.calls == (0 if is_in_the_plan else 1)


def test_on_the_cpu_an_eager_op_runs_its_implementation() -> None:
    for _ in range(CALLS_BEFORE_PLAN + 1):
        RMS.forward(made(M, H), None, made(H), None, 1e-6, "llama")
    plans = launch.PLANS[overload("rms_norm_forward")]
    assert [*plans.by_layouts.values()] == [implementation("rms_norm_forward")]
    assert plans._calls == {}


def test_what_has_no_plan_runs_the_implementation_for_good() -> None:
    spy = Spy(torch.clone)
    plans = PlansByLayout(spy)
    calls, x = CALLS_BEFORE_PLAN + MAX_ATTEMPTS - 1, made(M, H)
    for number in range(calls):
        assert plans.by_layouts == {}
        call_as_on_cuda(plans, ("layouts",), x)
        assert spy.calls == number + 1
    assert plans.by_layouts == {("layouts",): spy}


def call_as_on_cuda(plans: PlansByLayout, layouts: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_plan, "_can_be_planned", lambda arguments: True)
        return plans.run_without_plan(layouts, arguments)


def test_layouts_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_plan, "MAX_LAYOUTS", 4)
    plans = PlansByLayout(lambda x: launches(x, y := x.new_empty(x.shape)) or y)
    for number in range(20):
        call_as_on_cuda(plans, number, made(M, H))
        assert len(plans._calls) <= 5
    monkeypatch.setattr(launch_plan, "CALLS_BEFORE_PLAN", 1)
    for number in range(20):
        call_as_on_cuda(plans, number, made(M, H))
        assert number in plans.by_layouts
        assert len(plans.by_layouts) <= 4


@pytest.mark.parametrize("name", EAGER)
def test_who_is_to_see_an_op_sees_it_where_there_is_a_plan(
    name: str, device: str, plans_anywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    arguments = [each.to(device) if isinstance(each, Tensor) else each for each in CALLS[name](0)]
    for _ in range(CALLS_BEFORE_PLAN):
        expected = tensors(EAGER[name](*arguments))
    spy = spied(name, monkeypatch)
    with Mode():
        found = tensors(EAGER[name](*arguments))
    assert overload(name) in seen
    assert same_bits(found, expected)
    assert spy.calls == (0 if launch.uses_triton(made(1).to(device)) else 1)  # the dispatcher runs the plan, too
    meta = [each.to("meta") if isinstance(each, Tensor) else each for each in arguments]
    assert all(each.is_meta for each in tensors(EAGER[name](*meta)))
    compiled = torch.compile(EAGER[name], backend="eager", fullgraph=True)
    assert same_bits(tensors(compiled(*arguments)), expected)
