"""Precision in which values come back, and memory: what is held, when it dies, and what costs nothing."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from behaviour_testing import (
    Census,
    assert_as_without,
    assert_step_as_without,
    collector_off,
    every_policy,
    every_setting,
)
from engine_testing import (
    CPU,
    HIDDEN,
    TOKENS,
    Layer,
    Stack,
    bits,
    calls,
    holding,
    loss_of,
    tokens,
    weak,
)
from tiny import counted_ops
from torch import Tensor, nn

import recompute
from recompute.counters import memory_trace

# 1. Autocast


@every_policy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("where", ["outside", "inside", "inside another"])
def test_01_backward_regenerates_in_the_autocast_dtype_of_forward(
    rules: dict[str, Any], dtype: torch.dtype, where: str
) -> None:
    x = tokens()
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def run(model: nn.Module) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(x))
        around = {"outside": None, "inside": dtype, "inside another": other}[where]
        with nullcontext() if around is None else torch.autocast("cpu", dtype=around):
            return torch.autograd.grad(loss, [x, *model.parameters()])

    assert_as_without(Stack(), rules, run)


@every_policy
def test_01_what_ran_outside_of_autocast_regenerates_outside_of_it(rules: dict[str, Any]) -> None:
    x = tokens()

    def run(model: nn.Module) -> Any:
        result = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(result.sum(), [x, *model.parameters()])

    assert_as_without(Stack(), rules, run)
    assert_as_without(holding(lambda self, x: torch.exp(x * 0.1).sin().cos().tanh()), rules, run)


@every_policy
def test_01_autocast_switched_on_and_off_inside_of_a_region(rules: dict[str, Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.second(x.float())
        with torch.autocast("cpu", dtype=torch.float16):
            return self.third(x).exp()

    model = holding(forward, first=Layer(), second=Layer(), third=Layer())
    assert_step_as_without(model, rules, tokens(), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


@every_policy
def test_01_weights_that_autocast_casts_once_for_several_regions(rules: dict[str, Any]) -> None:
    model = Stack(count=2)
    model.layers[1] = model.layers[0]
    assert_step_as_without(model, rules, tokens(), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))


# 2. Peak


def _memory(count: int, rules: dict[str, Any] | None, *, retains_graph: bool = False) -> tuple[int, int]:
    """Bytes held after forward of a stack of ``count`` layers, and at the peak of forward and backward."""
    model, x = Stack(count=count, p=0.0), tokens(32, HIDDEN)
    if rules is not None:
        recompute.apply(model, rules)
    for _ in range(2):  # what the first step makes and keeps, gradients among them, is no step's memory
        loss_of(model(x)).backward()
    with memory_trace(CPU) as trace:
        loss = loss_of(model(x))
        trace.mark("forward")
        loss.backward(retain_graph=retains_graph)
    return trace.held_nbytes["forward"], trace.peak_nbytes


@every_policy
def test_02_a_step_holds_less_and_peaks_lower_than_without_the_policy(rules: dict[str, Any]) -> None:
    plain_held, plain_peak = _memory(6, None)
    held, peak = _memory(6, rules)
    assert held < plain_held
    assert peak < plain_peak


@every_policy
def test_02_what_is_regenerated_for_one_layer_is_gone_before_the_next(rules: dict[str, Any]) -> None:
    few_held, few_peak = _memory(4, rules, retains_graph=True)
    many_held, many_peak = _memory(9, rules, retains_graph=True)
    assert many_peak - few_peak <= many_held - few_held


# 11. Death of the graph


@every_policy
@pytest.mark.parametrize("backwards", [0, 1, 2])
@pytest.mark.parametrize("retain_last", [False, True])
def test_11_the_graph_dies_without_garbage_collection(rules: dict[str, Any], backwards: int, retain_last: bool) -> None:
    model, x = Stack(count=2), tokens()
    recompute.apply(model, rules)
    loss_of(model(x)).backward()
    activations: list[Any] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, args, result: activations.append(weak(result)))
    with collector_off():
        loss = loss_of(model(x))
        for turn in range(backwards):
            loss.backward(retain_graph=retain_last or turn + 1 < backwards)
        del loss
        assert [reference.expired() for reference in activations] == [True] * len(activations)
        assert gc.collect() == 0, "nothing of the step is left to the garbage collector"


@every_policy
def test_11_a_graph_of_gradients_dies_without_garbage_collection(rules: dict[str, Any]) -> None:
    model, x = Stack(count=1, p=0.0), tokens()
    model.layers[0].attention = model.layers[0].attention.q  # the CPU's fused attention has no second derivative
    recompute.apply(model, rules)

    def run() -> Any:
        (first,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        torch.autograd.grad(first.pow(2).sum(), x)
        return weak(first)

    run()
    with collector_off():
        assert run().expired()
        assert gc.collect() == 0


@every_policy
def test_11_a_retained_backward_leaves_no_more_held_than_before_it(rules: dict[str, Any]) -> None:
    model, x = Stack(count=2, p=0.0), tokens()
    recompute.apply(model, rules)
    loss_of(model(x)).backward()
    with collector_off(), memory_trace(CPU) as trace:
        loss = loss_of(model(x))
        trace.mark("forward")
        for turn in ("first", "second"):
            torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
            trace.mark(turn)
        del loss
        trace.mark("gone")
    held = trace.held_nbytes
    assert held["first"] == held["second"] == held["forward"]
    assert held["gone"] == 0


# 23. Many steps


@every_policy
def test_23_memory_does_not_grow_over_100_steps(rules: dict[str, Any]) -> None:
    model = Stack(count=1)
    recompute.apply(model, rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = [tokens(TOKENS + step % 5, HIDDEN) for step in range(100)]
    for x in inputs[:5]:
        loss_of(model(x)).backward()
    with collector_off(), memory_trace(CPU) as trace:
        for step, x in enumerate(inputs):
            loss_of(model(x)).backward()
            x.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step in (20, 99):
                trace.mark(str(step))
    assert trace.held_nbytes["99"] == trace.held_nbytes["20"]


@every_policy
def test_23_objects_do_not_grow_over_100_steps(rules: dict[str, Any]) -> None:
    model, x = Stack(count=1), tokens()
    recompute.apply(model, rules)
    objects = []
    with collector_off():
        for step in range(100):
            loss_of(model(x)).backward()
            if step in (20, 99):
                objects.append(len(gc.get_objects()))
    assert abs(objects[1] - objects[0]) < 20


# 25. Where nothing is trained

WAYS = {"eval": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
every_way = pytest.mark.parametrize("way", WAYS)


def _forward_only(way: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model to put under a policy, one to leave as it is, and an input."""
    model = Stack(count=2, p=0.0)
    model.train(way != "eval")
    return model, copy.deepcopy(model), tokens(grad=False)


@every_policy
@every_way
def test_25_without_training_nothing_more_is_held(rules: dict[str, Any], way: str) -> None:
    under, plain, x = _forward_only(way)
    recompute.apply(under, rules)

    def held(model: nn.Module) -> tuple[int, Any]:
        with WAYS[way]():
            model(x)
            with collector_off(), Census() as census:
                result = model(x)
        return census.alive_nbytes(), bits(result)

    assert held(under) == held(plain)


@every_policy
@every_way
def test_25_without_training_no_op_is_added_and_few_calls(rules: dict[str, Any], way: str) -> None:
    under, plain, x = _forward_only(way)
    handle = recompute.apply(under, rules)

    def cost(model: nn.Module) -> tuple[dict[str, int], int]:
        with WAYS[way]():
            model(x)
            with counted_ops() as ops:
                model(x)
            return ops, calls(lambda: model(x))

    (ops, count), (plain_ops, plain_count) = cost(under), cost(plain)
    assert ops == plain_ops
    assert count - plain_count <= 10 * len(list(under.modules()))
    assert handle.stats().frames == 0


@every_setting
def test_25_a_decorated_function_without_gradients_holds_nothing(setting: dict[str, Any]) -> None:
    references: list[Any] = []

    def function(x: Tensor) -> Tensor:
        hidden = x.exp()
        references.append(weak(hidden))
        return hidden.sin()

    decorated = recompute.recompute(function, policy={"rules": [{"type": "function", **setting}]})
    with torch.no_grad(), collector_off():
        result = decorated(tokens())
        assert references[0].expired()
        assert not result.requires_grad
        assert gc.collect() == 0
