"""Precision in which values come back, and memory: what is held, when it dies, and what costs nothing."""

import copy
import gc
import itertools
import weakref
from contextlib import nullcontext

import pytest
import torch
from engine_testing import (
    BOTH,
    CPU,
    HIDDEN,
    RULES_OF_SETTINGS,
    SETTINGS,
    TOKENS,
    Census,
    Stack,
    bits,
    both_actions,
    calls,
    every_policy_of_a_stack,
    every_rule,
    function_of,
    governing,
    holding,
    loss_of,
    module_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
    twins_of,
    weak,
)
from tiers import by_default
from tiny import counted_ops
from torch import nn
from torch.nn import functional as F

import recompute
from recompute.counters import memory_trace
from recompute.errors import PolicyWarning

# Peak


def _memory(count, rules, *, retains_graph=False):
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


@every_policy_of_a_stack
def test_a_step_holds_less_and_peaks_lower_than_without_the_policy(rules):
    plain_held, plain_peak = _memory(6, None)
    held, peak = _memory(6, rules)
    assert held < plain_held
    assert peak < plain_peak


@every_rule
def test_what_is_regenerated_for_one_layer_is_gone_before_the_next(rules):
    few_held, few_peak = _memory(4, rules, retains_graph=True)
    many_held, many_peak = _memory(9, rules, retains_graph=True)
    assert many_peak - few_peak <= many_held - few_held


def test_a_first_frame_lets_go_of_what_is_cheap_and_not_saved():
    """A frame without a plan holds what autograd saves, and of other values what is costly to make again."""
    model, x = module_of(lambda self, x: torch.sin(x + 1 + 1 + 1 + 1)), tokens(2048, HIDDEN).requires_grad_()
    recompute.apply(model, policy(("**", "recompute")))
    with memory_trace(CPU) as trace:
        model(x)
    assert trace.peak_nbytes < 2.1 * x.nbytes  # the value that an op reads, and the one that it makes


def test_at_no_price_a_tape_without_a_plan_holds_only_what_autograd_saves():
    """If running again had a price, it would hold what each costly op gives, to choose from."""
    peaks = {}
    for price in (0, 1):
        model, x = Stack(count=2, p=0.0), tokens(32, HIDDEN)
        rule = {"type": "Layer", "action": "recompute", "via": "hook", "rerun": ["gemm", "attention"], "price": price}
        recompute.apply(model, {"rules": [rule]})
        with memory_trace(CPU) as trace:
            model(x)
        peaks[price] = trace.peak_nbytes
    assert peaks[0] < 0.95 * peaks[1]


@every_rule
def test_a_graph_of_gradients_dies_without_garbage_collection(rules):
    model, x = Stack(count=1, p=0.0), tokens()
    model.layers[0].attention = model.layers[0].attention.q  # the CPU's fused attention has no second derivative
    recompute.apply(model, rules)

    def run():
        (first,) = torch.autograd.grad(loss_of(model(x)), x, create_graph=True)
        torch.autograd.grad(first.pow(2).sum(), x)
        return weak(first)

    run()
    with no_garbage_collection():
        assert run().expired()
        assert gc.collect() == 0


@every_rule
def test_a_retained_backward_leaves_no_more_held_than_before_it(rules):
    model, x = Stack(count=2, p=0.0), tokens()
    recompute.apply(model, rules)
    loss_of(model(x)).backward()
    with no_garbage_collection(), memory_trace(CPU) as trace:
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


@pytest.mark.parametrize("rules", by_default({**RULES_OF_SETTINGS, "both": BOTH}, "both"))
def test_neither_memory_nor_objects_grow_from_step_to_step(rules):
    model = Stack(count=1)
    handle = recompute.apply(model, rules)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, objects = [tokens(TOKENS + more, HIDDEN) for more in range(2)], []
    with no_garbage_collection() as engine_objects, memory_trace(CPU) as trace:
        for step, x in zip(range(40), itertools.cycle(inputs)):
            loss_of(model(x)).backward()
            x.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step in (19, 39):  # by the first one what can be captured is
                trace.mark(str(step))
                objects.append(len(gc.get_objects()))
        assert engine_objects() == {}
    assert trace.held_nbytes["39"] == trace.held_nbytes["19"]
    assert abs(objects[1] - objects[0]) < 20
    assert handle.stats().regenerations > 0


WAYS = {"eval": nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@every_policy_of_a_stack
@pytest.mark.parametrize("way", WAYS)
def test_without_training_nothing_more_is_held_no_op_is_added_and_few_calls(rules, way):
    (under, plain), x = twins_of(Stack(count=2, p=0.0).train(way != "eval")), tokens(grad=False)
    handle = recompute.apply(under, rules)

    def cost(model):
        with WAYS[way]():
            model(x)
            with no_garbage_collection() as engine_objects, Census() as census, counted_ops() as ops:
                result = model(x)
                assert engine_objects() == {}
            return (census.alive_nbytes(), bits(result), ops), calls(lambda: model(x))

    (found, count), (expected, plain_count) = cost(under), cost(plain)
    assert found == expected
    assert count - plain_count <= 10 * len(list(under.modules()))
    assert handle.stats().frames == 0


def test_what_autograd_saved_of_a_dropout_and_what_runs_again_reads_is_held_once_and_counted_once():
    model, x = holding(lambda self, x: F.dropout(x.exp(), 0.5).sin()), tokens()
    handle = recompute.apply(model, policy(("inside", "recompute")))
    for _ in range(2):  # the second frame follows the plan of the first
        before = handle.stats()
        with Census() as census:
            result = model(x)
        step = handle.stats() - before
        assert step.kept_nbytes == 2 * x.nbytes, "what exp returned, and the mask, on which the product runs again"
        assert census.alive_nbytes() - result.nbytes == step.kept_nbytes


def test_regenerated_values_are_freed_during_backward_when_their_last_consumer_had_them():
    seen, values = [], []
    # Its backward runs after that of all that comes later in forward.
    watch = function_of(lambda x: x.clone(), lambda grad, _: (seen.append(all(v.expired() for v in values)), grad)[1])
    note = values.append  # a checkpoint would have a list that it sees appended to but once

    def forward(self, x):
        hidden = x.exp()
        note(weak(hidden))
        return hidden.sin()

    model = policed(holding(forward))
    values.clear()
    x = tokens()
    model(watch.apply(x)).sum().backward()
    assert len(values) == 2, "run in forward and in backward"
    assert seen == [True]


@both_actions
def test_a_region_that_is_not_dropped_holds_no_more_than_plain_eager_holds(action):
    model, x = holding(lambda self, x: (x.mul_(2.0) + 1.0).sin()), tokens()

    def held():
        hidden = x * 1.0
        reference = weak(hidden)
        result = model(hidden)
        del hidden
        alive = not reference.expired()
        result.sum().backward()
        return alive

    assert not held()
    policed(model, action)
    with (
        pytest.warns(PolicyWarning, match="an argument, .* has been modified in place")
        if action == "checkpoint"
        else nullcontext()
    ):
        assert not held()


@every_rule
def test_a_look_at_a_saved_tensor_outside_of_backward_runs_each_op_once_and_holds_nothing(rules):
    def forward(self, x):
        return (x.cos() * x.tanh()).exp().sin()  # both factors come from x, which must not come back for each anew

    (model, plain), x = twins_of(holding(forward)), tokens()
    recompute.apply(model, rules)
    for _ in range(2):
        result, expected = model(x), plain(x)
    with no_garbage_collection():
        for _ in range(2):
            with counted_ops() as ops:
                saved = result.grad_fn._saved_self
            assert {ops[f"aten.{name}"] for name in ("cos", "tanh", "mul", "exp")} == {1}
            assert bits(saved) == bits(expected.grad_fn._saved_self)
            reference = weak(saved)
            del saved
            assert reference.expired()
    found, gradient = (torch.autograd.grad(each.sum(), x)[0] for each in (result, expected))
    assert bits(found) == bits(gradient)


def test_a_module_that_a_graph_outlives_dies_when_the_graph_does():
    model = policed(holding(lambda self, x: x.exp().sin()))
    reference = weakref.ref(model.inside)
    with no_garbage_collection():
        result = model(tokens())
        del model
        result.sum().backward()
        del result
        assert reference() is None


@pytest.mark.parametrize(
    ("start", "is_read", "is_dropped"),
    [(2, False, True), (3, False, False), (2, True, False)],
    ids=["all", "but for a column", "read before"],
)
def test_memory_that_copies_fill_altogether_comes_back(start, is_read, is_dropped):
    """Of memory that is only allocated, something unseen may fill the rest."""

    def forward(self, x):
        y = self.linear(x)
        both = y.new_empty(TOKENS, HIDDEN + 2)
        if start > 2:
            both[:, 2:start].fill_(1.0)
        both[:, :2].copy_(x[:1, :2])
        first = both[:, :1].clone() if is_read else 0.0
        both[:, start:].copy_(y[:, start - 2 :].exp())
        return both.sin() + first

    x = tokens()
    model = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    plain = copy.deepcopy(model)
    handle = recompute.apply(model, governing(SETTINGS["recompute"]))
    for _ in range(8):
        found, expected = (
            [bits(each) for each in torch.autograd.grad(loss_of(m(x)), list(m.parameters()))] for m in (model, plain)
        )
        assert found == expected
    made = handle.plans()["inside"].kept_nbytes - x.nbytes
    assert (made == TOKENS * HIDDEN * 4) is is_dropped  # what the linear layer gives
