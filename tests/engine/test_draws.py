"""Random numbers: the same ones when an op runs again, from whatever source, and no stream moves for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    Holder,
    RMSNorm,
    Setting,
    Stack,
    Tracker,
    assert_as_without,
    assert_step_as_without,
    bits,
    every_rule,
    every_setting,
    holding,
    loss_of,
    tokens,
)
from tiers import one_in
from torch import Tensor, nn

import recompute

# Same draws, and the stream where it would have been

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.5, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x[None], 0.5)[0],
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "normal in place": lambda x: x * torch.empty_like(x).normal_(),
    "uniform in place on a view": lambda x: x * _half_uniform(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "permutation": lambda x: x[torch.randperm(len(x))] * x,
    "multinomial": lambda x: x[torch.multinomial(torch.ones(len(x)), 3)],
    "gumbel": lambda x: F.gumbel_softmax(x) * x,
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "seeded inside": lambda x: (torch.manual_seed(3), x * torch.rand_like(x))[1],
    "forked inside": lambda x: _forked(x),
    "thrice": lambda x: F.dropout(F.dropout(x, 0.3).exp() * torch.rand(()), 0.3),
    "drawn and thrown away": lambda x: (torch.rand(5), F.dropout(x, 0.5))[1],
}


def _half_uniform(x: Tensor) -> Tensor:
    noise = torch.ones_like(x)
    noise[1:4].uniform_()
    return noise


def _forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        noise = torch.rand_like(x)
    return F.dropout(x, 0.5) * noise


@every_rule
@pytest.mark.parametrize("kind", one_in(2, list(DRAWS)))
def test_the_same_draws_and_the_stream_goes_on_where_it_was(rules: dict[str, Any], kind: str) -> None:
    model = holding(lambda self, x: DRAWS[kind](self.norm(x).sin()).exp().sin(), norm=RMSNorm())
    assert_step_as_without(model, rules, tokens(), drops=kind != "attention with dropout")


@every_rule
def test_draws_between_forward_and_backward_and_after_it_are_what_they_would_have_been(
    rules: dict[str, Any],
) -> None:
    x = tokens()

    def run(model: nn.Module) -> Any:
        losses = [loss_of(model(x)) for _ in range(2)]
        found: list[Any] = [torch.rand(2)]
        for loss in (losses[1], losses[0]):
            for parameter in (x, model.layers[0].norm1.weight, model.layers[2].mlp.up_proj.weight):
                found += [torch.autograd.grad(loss, parameter, retain_graph=True), torch.rand(2)]
        return found

    assert_as_without(Stack(p=0.5), rules, run)


def _masked(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).exp().sin()


GENERATOR = torch.Generator()


class UsesGlobal(nn.Module):
    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return _masked(x.sin(), GENERATOR)


WAYS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "keyword": lambda g: holding(lambda self, x, generator: _masked(x.sin(), generator)),
    "attribute": lambda g: holding(lambda self, x, **others: _masked(x.sin(), self.generator), generator=g),
    "closure": lambda g: holding(lambda self, x, **others: _masked(x.sin(), g)),
    "several": lambda g: holding(lambda self, x, generator: F.dropout(_masked(_masked(x, generator), g), 0.5)),
    "global": lambda g: Holder(UsesGlobal()),
}


@every_rule
@pytest.mark.parametrize("way", WAYS)
def test_custom_generators_draw_the_same_again_and_stay_where_they_are(rules: dict[str, Any], way: str) -> None:
    passed, other, x = torch.Generator(), GENERATOR if way == "global" else torch.Generator(), tokens()
    model = WAYS[way](other)

    def run() -> list[Any]:
        torch.manual_seed(1)
        passed.manual_seed(2)
        other.manual_seed(3)
        result = model(x, generator=passed)
        torch.rand(3, generator=other)
        streams = [torch.get_rng_state(), passed.get_state(), other.get_state()]
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True)[0] for _ in range(2)]
        assert [bits(stream) for stream in streams] == [
            bits(stream) for stream in (torch.get_rng_state(), passed.get_state(), other.get_state())
        ]
        return [bits(value) for value in (result, *grads, *streams)]

    expected = run()
    recompute.apply(model, rules)
    assert run() == expected


@every_rule
def test_a_trackers_forks_draw_the_same_again(rules: dict[str, Any]) -> None:
    tracker, x = Tracker(), tokens()

    def forward(self: Any, x: Tensor) -> Tensor:
        x = F.dropout(x.sin(), 0.5)
        with tracker.fork():
            x = F.dropout(x, 0.5).exp()
        return F.dropout(x, 0.5).sin()

    model = holding(forward)

    def run(model: nn.Module) -> Any:
        tracker.reset()
        result = model(x) + model(x.cos())
        before = [tracker.states["model"].clone(), torch.get_rng_state()]
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True) for _ in range(2)]
        after = [tracker.states["model"], torch.get_rng_state()]
        assert [bits(state) for state in after] == [bits(state) for state in before]
        return result, grads, after

    assert_as_without(model, rules, run)


@every_rule
@pytest.mark.parametrize("source", ["random", "numpy", "numpy generator"])
def test_random_numbers_of_python_and_numpy(rules: dict[str, Any], source: str) -> None:
    own = np.random.default_rng(0)

    def forward(self: Any, x: Tensor) -> Tensor:
        if source == "random":
            return (x.sin() * random.random()).exp().sin()
        numbers = np.random.rand(*x.shape) if source == "numpy" else own.random(x.shape)
        return (x.sin() * torch.from_numpy(numbers.astype("float32"))).exp().sin()

    x = tokens()

    def run(model: nn.Module) -> Any:
        random.seed(3)
        np.random.seed(3)
        own.bit_generator.state = np.random.default_rng(4).bit_generator.state
        grads = torch.autograd.grad(model(x).sum(), x)
        return grads, random.random(), np.random.rand(), own.random()

    assert_as_without(holding(forward), rules, run)


@every_setting
def test_a_decorated_function_draws_the_same_again(setting: Setting) -> None:
    x = tokens()

    def function(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
        return _masked(F.dropout(x.sin(), p), generator)

    def run(function: Callable[..., Tensor]) -> list[Any]:
        torch.manual_seed(5)
        result = function(x, p=0.5, generator=torch.Generator().manual_seed(2))
        torch.rand(3)
        return [bits(value) for value in (result, *torch.autograd.grad(result.sum(), x), torch.rand(1))]

    assert run(recompute.recompute(function, policy={"rules": [{"type": "function", **setting}]})) == run(function)


# Saved tensors that are filled late


class FilledLate(torch.autograd.Function):
    """Saves memory that it fills only when all ops have run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise, result = torch.empty(x.shape), x.exp()
        ctx.save_for_backward(noise, result)
        noise.uniform_()
        noise[:2].numpy()[:] = 2.0
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        noise, result = ctx.saved_tensors
        return grad * noise * result


class FilledUnseen(torch.autograd.Function):
    """As a kernel of one's own does it: no op tells that it writes into the results of others, and into an argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scratch: Tensor) -> Tensor:
        result = x * 0.0
        result.numpy()[:] = x.exp().numpy()
        scratch.numpy()[:] = 2.0
        ctx.save_for_backward(result, scratch)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result, scratch = ctx.saved_tensors
        return grad * result * scratch, None


LATE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "rrelu": lambda self, x: F.rrelu(x, training=True),
    "rrelu in place": lambda self, x: F.rrelu_(x * 1.0, training=True),
    "rrelu twice": lambda self, x: self.act(self.act(x).sin()),
    "rrelu of positive numbers, which draws none": lambda self, x: F.rrelu(x.exp(), training=True),
    "rrelu in eval": lambda self, x: F.rrelu(x, training=False).exp(),
    "custom function": lambda self, x: FilledLate.apply(x),
    "custom kernel": lambda self, x: FilledUnseen.apply(x, x.detach().abs()),
    "batch norm": lambda self, x: self.batch(x).exp(),
}


@every_rule
@pytest.mark.parametrize("kind", one_in(2, list(LATE)))
@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "last"])
def test_ops_that_fill_saved_tensors_late(rules: dict[str, Any], kind: str, last: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = LATE[kind](self, self.norm(x))
        return x if last else x.sin()

    model = holding(forward, norm=RMSNorm(), act=nn.RReLU(), batch=nn.BatchNorm1d(8))
    assert_step_as_without(model, rules, tokens())
