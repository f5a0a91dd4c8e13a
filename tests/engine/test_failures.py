"""What goes wrong goes wrong as in plain eager, or earlier and by name; and it leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    Projections,
    RMSNorm,
    assert_as_plain,
    bits,
    both_actions,
    holding,
    loss_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
)
from torch import Tensor, nn

import recompute
from recompute.engine.recipes import local
from recompute.engine.saved_tensors import top_hooks
from recompute.errors import MutationError, RegenerationError

# What does not run the same way twice


def changing(forward: Callable[[Tensor, int], Tensor]) -> nn.Module:
    """A region whose ``forward`` is told how often it has run, by something that no engine can know of."""
    runs: list[int] = []

    def count(self: Any, x: Tensor) -> Tensor:
        runs.append(len(runs) + 1)
        return forward(x, runs[-1])

    model = policed(holding(count))
    runs.clear()
    return model


def test_a_region_that_is_different_every_second_time_is_refused() -> None:
    model = changing(lambda x, run: x[: 5 if run % 2 else 3].exp().sum())
    result = model(tokens())
    with pytest.raises(RegenerationError):
        result.backward()


def test_an_extra_saved_tensor_of_the_same_shape_ahead_of_the_others_is_refused() -> None:
    def forward(x: Tensor, run: int) -> Tensor:
        if run == 2:
            (x * 2).exp()
        return (x * 3).exp().sin()

    model = changing(forward)
    result = model(tokens())
    with pytest.raises(RegenerationError):
        result.sum().backward()


def test_a_refused_regeneration_leaves_nothing_behind_and_the_next_model_step_works() -> None:
    model, x = changing(lambda x, run: F.dropout(x[: 3 if run in (2, 3) else 5], 0.5).exp().sum()), tokens()
    result = model(x)
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError):
        result.backward()
    assert bits(torch.get_rng_state()) == before
    model(x).backward()


# Errors and interruptions


class Boom(Exception):
    pass


@both_actions
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_an_exception_in_forward_leaves_nothing_behind(action: str, error: type[BaseException]) -> None:
    switch = {"fails": False}

    def forward(self: Any, x: Tensor) -> Tensor:
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
def test_an_exception_in_regeneration_leaves_all_as_it_was_and_a_retry_succeeds(error: type[BaseException]) -> None:
    switch = {"fails": False}

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(x), 0.5)
        self.mean.mul_(0.5).add_(hidden.detach().mean())
        self.count += 1
        if switch["fails"]:
            raise error
        return hidden.exp() * self.mean

    model, x = holding(forward, norm=RMSNorm(), count=0), tokens()
    model.inside.register_buffer("mean", torch.zeros(()))
    wanted = [x, *model.parameters()]

    def state() -> list[Any]:
        flags = [module.training for module in model.modules()]
        return [bits(torch.get_rng_state()), bits(model.inside.mean), model.inside.count, flags]

    def run(attempts: int) -> list[Any]:
        torch.manual_seed(5)
        model.inside.mean.zero_()
        model.train()
        result = model(x)
        model.eval()
        before = state()
        switch["fails"] = True
        for _ in range(attempts):
            with pytest.raises(error):
                torch.autograd.grad(result.sum(), wanted, retain_graph=True)
            assert state() == before
            assert top_hooks() is None
        switch["fails"] = False
        grads = torch.autograd.grad(result.sum(), wanted)
        assert state() == before
        return [bits(grad) for grad in grads]

    expected = run(attempts=0)
    policed(model, "checkpoint")
    assert run(attempts=2) == expected


def test_a_backward_that_fails_elsewhere_is_retried_with_the_right_gradients_and_holds_nothing_afterwards() -> None:
    class Fails(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if Fails.broken:
                raise Boom
            return grad

    def forward(self: Any, x: Tensor) -> Tensor:
        return Fails.apply(x.exp()).exp().sin()

    model, x = policed(holding(forward)), tokens()
    with no_garbage_collection() as engine_objects:
        result = model(x)
        with pytest.raises(Boom):
            result.sum().backward(retain_graph=True)
        Fails.broken = False
        (found,) = torch.autograd.grad(result.sum(), x)
        del result
        assert engine_objects() == {}
    (expected,) = torch.autograd.grad(x.exp().exp().sin().sum(), x)
    assert bits(found) == bits(expected)


def test_saved_tensor_hooks_switched_off_by_the_user_leave_no_scope_open() -> None:
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        model(x)
    assert local.books == []


# In-place


@both_actions
def test_in_place_operations_on_a_regions_own_intermediates(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.norm(x).mul_(2.0).add_(x)
        y[1:].clamp_(max=1.5)
        return y.sigmoid_().sin()

    assert_as_plain(holding(forward, norm=RMSNorm()), policy(("inside", action)), tokens())


@both_actions
def test_a_saved_tensor_overwritten_later_in_its_region_is_refused_as_in_plain_eager(action: str) -> None:
    model = holding(lambda self, x: x.sigmoid().mul_(2.0).sin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(tokens()).sum().backward()
    policed(model, action)
    with pytest.raises(MutationError, match=r"inside \(Body\).*SigmoidBackward0 needs has been modified in place"):
        model(tokens()).sum().backward()


@both_actions
def test_a_regions_result_mutated_before_a_consumer_saves_it(action: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = RMSNorm(), nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y.mul_(2.0)
            y[0] += 1.0
            return self.linear(y)

    assert_as_plain(Model(), policy(("norm", action)), tokens())


def after_mutation(action: str) -> tuple[Any, Any]:
    """A gradient that needs a norm's output as it was before it was mutated, in plain eager and under ``action``."""
    model, x = Projections(), tokens()
    outputs: list[Tensor] = []
    (expected,) = torch.autograd.grad(loss_of(model(x)), model.q.weight)
    recompute.apply(model, policy(("norm", action)))
    model.norm.register_forward_hook(lambda module, args, result: outputs.append(result))
    loss = loss_of(model(x))
    with torch.no_grad():
        outputs[0].zero_()
    (found,) = torch.autograd.grad(loss, model.q.weight)
    return bits(found), bits(expected)


def test_a_regions_result_that_a_consumer_saved_and_that_is_mutated_is_refused_if_it_is_kept() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_mutation("checkpoint")


def test_a_regions_result_that_a_consumer_saved_and_that_is_mutated_comes_back_as_it_was_if_it_is_dropped() -> None:
    found, expected = after_mutation("recompute")
    assert found == expected


def test_a_kept_tensor_that_was_mutated_raises_and_names_the_op_that_wants_it() -> None:
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    given = x * 1.0
    hidden = given.exp()

    class Outside(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.exp()

    model.q = nn.Sequential(model.q, Outside())
    saved = []
    model.q.register_forward_hook(lambda module, args, result: saved.append(result))
    loss = loss_of(model(hidden))
    with torch.no_grad():
        saved[0].add_(1.0)
    with pytest.raises(MutationError, match=r"Projections.*ExpBackward"):
        loss.backward()
