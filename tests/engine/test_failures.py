"""What goes wrong goes wrong as in plain eager, or earlier and by name; and it leaves nothing behind."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    Boom,
    Projections,
    RMSNorm,
    Stack,
    assert_as_without,
    bits,
    both_actions,
    every_rule,
    every_tape,
    function_of,
    holding,
    loss_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
)
from torch import Tensor, nn

import recompute
from recompute.engine.saved_tensors import top_hooks
from recompute.engine.thread_state import local
from recompute.errors import RegenerationError

# What does not run the same way twice


def changing(forward):
    """A region whose ``forward`` is told how often it has run, by something that no engine can know of."""
    runs = itertools.count(1)  # its state is in C
    return policed(holding(lambda self, x: forward(x, next(runs))))


def test_a_refused_regeneration_leaves_nothing_behind_and_the_next_model_step_works():
    model, x = changing(lambda x, run: F.dropout(x[: 3 if run in (2, 3) else 5], 0.5).exp().sum()), tokens()
    result = model(x)
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError):
        result.backward()
    assert bits(torch.get_rng_state()) == before
    model(x).backward()


def _one_more(x, run):
    if run == 2:
        (x * 2).exp()
    return (x * 3).exp().sin().sum()


DRIFTS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "shape": (lambda x, run: x[: 5 if run == 1 else 3].exp().sum(), r"\(5, 8\).*\(3, 8\).*exp"),
    "dtype": (lambda x, run: x.to(torch.float64 if run == 1 else x.dtype).exp().sum(), r"float64.*float32.*exp"),
    "other tensor": (lambda x, run: (x if run == 1 else x * 1).cos().exp().sin().sum(), r"tensor 0 .*\(6, 8\).*cos"),
    "fewer": (lambda x, run: _repeat(torch.cos, 3 if run == 1 else 2, x.exp()).sum(), r"4 tensors in forward, 3 "),
    "one more ahead of the others, of the same shape": (_one_more, ""),
    "another op": (lambda x, run: (x * 3 if run == 1 else x[:, :1].exp() * x).exp().sum(), r"\(6, 8\).*\(6, 1\).*exp"),
}


def _repeat(function, times, x):
    for _ in range(times):
        x = function(x)
    return x


@pytest.mark.parametrize("kind", DRIFTS)
def test_checkpoint_refuses_a_region_that_saves_something_else_and_shows_both(kind):
    forward, message = DRIFTS[kind]
    model = changing(forward)
    result = model(tokens())
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError, match=rf"(?s)inside.*{message}"):
        result.backward()
    assert bits(torch.get_rng_state()) == before


@torch.library.custom_op("recompute_tests::unsteady", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def unsteady(x: Tensor) -> Tensor:
    """Never the same twice, and no generator of torch's knows why."""
    return x * SOURCE.random()


SOURCE = random.Random(0)


unsteady.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0] / ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[0]),
)


def _unseen(x):
    """Memory that something other than an op fills, with other numbers each time."""
    noise = torch.empty(x.shape)
    noise.numpy()[:] = SOURCE.random()
    return noise


UNSTEADY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an op that is not deterministic": lambda self, x: unsteady(self.linear(self.norm(x))).exp().sin(),
    "a number from Python": lambda self, x: (self.linear(self.norm(x)) * SOURCE.random()).exp().sin(),
    "memory filled unseen": lambda self, x: (self.linear(self.norm(x)) * _unseen(x)).exp().sin(),
    "another shape": lambda self, x: self.linear(self.norm(x))[: SOURCE.randrange(1, 6)].exp().sin(),
    "another path": lambda self, x: _repeat(torch.sin, SOURCE.randrange(2, 6), self.linear(self.norm(x))),
}


@every_tape
@pytest.mark.parametrize("kind", UNSTEADY)
def test_the_tape_keeps_what_would_not_come_out_the_same(rules, kind):
    model = holding(UNSTEADY[kind], linear=nn.Linear(HIDDEN, HIDDEN), norm=RMSNorm())
    x = tokens()

    def run(model):
        SOURCE.seed(3)
        result = model(x)
        drawn = SOURCE.getstate()
        grads = [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]
        assert SOURCE.getstate() == drawn, "no Python runs again"
        return result, grads

    assert_as_without(model, rules, run)


@both_actions
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_nothing_behind(action, error):
    switch = {"fails": False}

    def forward(self, x):
        hidden = self.norm(x).exp()
        if switch["fails"]:
            raise error
        return hidden.sin()

    model, x = holding(forward, norm=RMSNorm()), tokens()
    expected = bits(torch.autograd.grad(model(x).sum(), x)[0])
    recompute.apply(model, policy(("inside", action), ("inside.norm", "recompute")))
    switch["fails"] = True
    with no_garbage_collection() as engine_objects:
        with pytest.raises(error):
            model(x)
        switch["fails"] = False
        assert bits(torch.autograd.grad(model(x).sum(), x)[0]) == expected
        assert engine_objects() == {}


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_regeneration_leaves_all_as_it_was_and_a_retry_succeeds(error):
    switch = np.zeros(1 << 17, bool)  # a checkpoint does not look into so large an array

    def forward(self, x):
        hidden = F.dropout(self.norm(x), 0.5)
        self.mean.mul_(0.5).add_(hidden.detach().mean())
        self.count += 1
        if switch[0]:
            raise error
        return hidden.exp() * self.mean

    model, x = holding(forward, norm=RMSNorm(), count=0), tokens()
    model.inside.register_buffer("mean", torch.zeros(()))
    wanted = [x, *model.parameters()]

    def state():
        flags = [module.training for module in model.modules()]
        return [bits(torch.get_rng_state()), bits(model.inside.mean), model.inside.count, flags]

    def run(attempts):
        torch.manual_seed(5)
        model.inside.mean.zero_()
        model.train()
        result = model(x)
        model.eval()
        before = state()
        switch[0] = True
        for _ in range(attempts):
            with pytest.raises(error):
                torch.autograd.grad(result.sum(), wanted, retain_graph=True)
            assert state() == before
            assert top_hooks() is None
        switch[0] = False
        grads = torch.autograd.grad(result.sum(), wanted)
        assert state() == before
        return [bits(grad) for grad in grads]

    expected = run(attempts=0)
    policed(model, "checkpoint")
    assert run(attempts=2) == expected


def test_a_backward_that_fails_elsewhere_is_retried_with_the_right_gradients_and_holds_nothing_afterwards():
    errors = [Boom()]

    def backward(gradient, _):
        if errors:
            raise errors.pop()
        return gradient

    fails = function_of(lambda x: x.clone(), backward)
    model, x = policed(holding(lambda self, x: fails.apply(x.exp()).exp().sin())), tokens()
    with no_garbage_collection() as engine_objects:
        result = model(x)
        with pytest.raises(Boom):
            result.sum().backward(retain_graph=True)
        (found,) = torch.autograd.grad(result.sum(), x)
        del result
        assert engine_objects() == {}
    (expected,) = torch.autograd.grad(x.exp().exp().sin().sum(), x)
    assert bits(found) == bits(expected)


def test_saved_tensor_hooks_switched_off_by_the_user_leave_no_scope_open():
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x)
    assert local.books == []


@every_rule
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_a_users_hook_between_two_regions(rules, error):
    model, x = Stack(count=2), tokens()
    switch = {"fails": False}

    def fail(*_):
        if switch["fails"]:
            raise error

    model.layers[0].register_full_backward_hook(fail)
    model.layers[1].attention.register_full_backward_pre_hook(fail)

    def run(model):
        loss = loss_of(model(x))
        drawn = bits(torch.get_rng_state())
        switch["fails"] = True
        with pytest.raises(error):
            torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        switch["fails"] = False
        assert bits(torch.get_rng_state()) == drawn
        return torch.autograd.grad(loss, [x, *model.parameters()])

    assert_as_without(model, rules, run)
