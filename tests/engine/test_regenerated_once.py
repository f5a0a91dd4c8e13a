"""However many read a value, it is regenerated once: in a backward, and in a frame that leaves its plan."""

import functools
from contextlib import nullcontext

import pytest
import torch
from engine_testing import HIDDEN, Census, bits, holding, policy, tokens, twins_of
from tiers import by_default, one_in
from torch import nn

import recompute
from recompute.engine.bit_comparison import verifying

TAPE = policy(("inside", "recompute"))


NOT_COUNTED = ("detach", "alias", "clone", "equal", "view", "reshape", "as_strided")


class Counted(Census):
    """Counts the ops, but copies, views and comparisons, whoever runs them, and knows what memory they made."""

    __module__ = Census.__module__
    ops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops += not any(word in str(function) for word in NOT_COUNTED)
        return super().__torch_dispatch__(function, types, args, kwargs)


def repeated(step):
    return lambda x, count: functools.reduce(lambda x, _: step(x), range(count), x)


def _all_before(x, count):
    values = [x]
    for _ in range(count):
        values.append(torch.stack(values).sin().sum(0))
    return values[-1]


_diamonds = repeated(lambda x: x.sin() * x.tanh())
SHAPES = {
    "diamonds": _diamonds,
    "four branches": repeated(lambda x: torch.stack([x.sin(), x.cos(), x.tanh(), x.sigmoid()]).mean(0)),
    "a chain": repeated(lambda x: x.sin().exp()),
    "all that came before": _all_before,
    "views": repeated(lambda x: x.t().sin().t() * x[:].tanh()),
    "in place": repeated(lambda x: (x.sin() * 2).add_(x.cos()).tanh()),
}
ENDINGS = {
    "another op": (lambda y: y.sigmoid() * y, lambda y: y.exp() * y),
    "more ops": (lambda y: y.sin(), lambda y: y.sin().exp() * y),
    "fewer ops": (lambda y: y.sin().exp() * y, lambda y: y.sin()),
}
every_shape = pytest.mark.parametrize("shape", one_in(2, SHAPES))
verified = pytest.mark.parametrize("verify", by_default({"": False, "verified": True}, ""))


def branching(shape, endings):
    """A model whose region goes on as ``model.inside.turn`` says."""
    return holding(lambda self, x: endings[self.turn](shape(self.linear(x), 5)), linear=nn.Linear(HIDDEN, HIDDEN))


def run(model, turn, x):
    model.inside.turn = turn
    with Counted() as counted:
        result = model(x)
    return result, counted


def gradients(model, result, x):
    with Counted() as counted:
        found = torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True)
    return [bits(grad) for grad in found], counted.ops


@every_shape
@verified
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_frame_that_leaves_its_plan_and_each_backward_run_every_op_again_at_most_once(shape, ending, verify):
    (model, plain), x = twins_of(branching(shape, ending)), tokens(HIDDEN, HIDDEN)
    handle = recompute.apply(model, TAPE)
    with verifying() if verify else nullcontext():
        for turn in (0, 1, 0, 1):
            expected, forward = run(plain, turn, x)
            expected_gradients, backward = gradients(plain, expected, x)
            result, counted = run(model, turn, x)
            assert counted.ops <= 2 * forward.ops
            if not verify:
                assert counted.alive_nbytes() <= forward.alive_nbytes(), "what came back on the way is not held"
            assert bits(result) == bits(expected)
            for _ in range(2):
                found, ops = gradients(model, result, x)
                assert found == expected_gradients
                assert ops <= backward + forward.ops
    assert handle.stats().dropped_nbytes > 0


@every_shape
@verified
def test_a_graph_that_nobody_wants_costs_nothing(shape, verify):
    """One result is abandoned before the frame leaves its plan, another one after the frame."""

    def body(self, x):
        y = self.linear(x)
        shape(y, 4)
        other = shape(y + 1, 5)
        return (other.exp() * other if self.turn else other.sin()), shape(y + 2, 4)

    (model, plain), x = twins_of(holding(body, linear=nn.Linear(HIDDEN, HIDDEN))), tokens(HIDDEN, HIDDEN)
    recompute.apply(model, TAPE)
    with verifying() if verify else nullcontext():
        for turn in (0, 0, 1, 1):
            (expected, _), forward = run(plain, turn, x)
            expected_gradients, backward = gradients(plain, expected, x)
            (result, _), counted = run(model, turn, x)
            assert counted.ops <= 2 * forward.ops
            found, ops = gradients(model, result, x)
            assert found == expected_gradients
            assert ops <= backward + forward.ops


def test_a_gradient_taken_inside_of_a_frame_that_follows_its_plan_runs_every_op_again_at_most_once():
    def forward(self, x):
        y = _diamonds(self.linear(x), 5)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.exp() * slope

    (model, plain), x = twins_of(holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))), tokens(HIDDEN, HIDDEN)
    recompute.apply(model, TAPE)
    for _ in range(3):
        expected, ops = run(plain, 0, x)
        result, counted = run(model, 0, x)
        assert counted.ops <= 2 * ops.ops
        assert gradients(model, result, x)[0] == gradients(plain, expected, x)[0]
