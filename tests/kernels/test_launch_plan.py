"""Planned calls launch what the ops themselves launch, and only where that is the same launch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_testing import same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.kernels import activation, add_rms_norm, launch, launch_plan, rms_norm, rope, swiglu
from recompute.kernels.launch import IMPLEMENTATIONS, Launch
from recompute.kernels.launch_plan import MAX_ATTEMPTS, PlannedCall

M, H = 6, 16
assert all((activation, add_rms_norm, rms_norm, rope, swiglu)), "they register their ops"


def made(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def heads(count: int, seed: int) -> Tensor:
    return made(1, M, count, 8, seed=seed).transpose(1, 2)


CALLS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "rms_norm_forward": lambda s: (made(1, M, H, seed=s), made(H, seed=s), 1e-6, "llama"),
    "rms_norm_regenerate": lambda s: (made(M, H, seed=s), made(H, seed=s), made(M, seed=s), "gemma"),
    "rms_norm_backward": lambda s: (
        *(made(M, H, seed=s), made(M, H, seed=s + 1), made(H, seed=s), made(M, seed=s)),
        *("llama", True, True, made(M, H, seed=s + 2), True),
    ),
    "add_rms_norm_forward": lambda s: (made(M, H, seed=s), made(M, H, seed=s + 1), None, 1e-6, "none"),
    "rope": lambda s: (
        heads(4, s),
        heads(2, s + 1),
        made(1, M, 8, seed=s),
        made(1, M, 8, seed=s),
        1,
        torch.float32,
        False,
    ),
    "glu_forward": lambda s: (made(M, H, seed=s), made(M, H, seed=s + 1), "gelu"),
    "glu_backward": lambda s: (made(M, H, seed=s), made(M, 2 * H, seed=s + 1), None, "silu", True, True, True),
    "activation_forward": lambda s: (made(M, H, seed=s), "relu2"),
    "activation_backward": lambda s: (made(M, H, seed=s), made(M, H, seed=s + 1), None, "gelu"),
}


def implementation(name: str) -> Callable[..., Any]:
    return next(function for op, function in IMPLEMENTATIONS.items() if op._opname == name)


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


@pytest.mark.parametrize(
    ("name", "given"), [("glu_backward_", (0, 1, 2, 3, 4)), ("activation_backward_", (0, 1, None, 2))]
)
def test_in_place_it_writes_where_the_op_writes(name: str, given: tuple[int | None, ...], device: str) -> None:
    """given: for each argument the seed of its values; None where the op is given no tensor."""
    function = implementation(name)
    call = PlannedCall(function)
    for seed in range(2):
        ours, theirs = (
            [None if each is None else made(M, H, seed=seed + each).to(device) for each in given] for _ in "ab"
        )
        assert call(*ours, "silu") is None
        function(*theirs, "silu")
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
    current, runtime = [1], SimpleNamespace(launch_enter_hook=Hooks(), launch_exit_hook=Hooks())
    monkeypatch.setattr(launch, "triton", SimpleNamespace(knobs=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    spy = Spy(lambda x, n: x)
    writer = launch_plan._Writer(spy, {"a0": x})
    writer.allocate("t0", y)
    assert writer.launch(Launch(None, M, (x, None, y, 5, 1e-6), {}, compiled, ("llama", 64)))
    call = writer.function(["a0", "a1"], "t0", torch.device("cuda", 1))

    out = call(x, 5)
    ((*fixed, given, nothing, made_there, number, eps, casting, block),) = runs
    assert fixed == [M, 1, 1, 101, 7, (1, 2), None, None, None]
    assert given is x
    assert made_there is out
    assert (nothing, number, eps, casting, block) == (None, 5, 1e-6, "llama", 64)

    current[0] = 0  # another device is current
    assert call(x, 5) is x
    current[0] = 1
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hook.calls.append(print)
        assert call(x, 5) is x
        hook.calls.clear()
    assert (spy.calls, len(runs)) == (3, 1)
