"""Random numbers in captured regions: the same ones, and the generators afterwards where they are without a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from capture_testing import ROWS, SIZE, body, captured_twins, fresh, tokens
from engine_testing import loss_of
from torch import Tensor, nn

DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "dropout": lambda self, x: self.lin(F.dropout(F.gelu(self.lin(x)), 0.3)),
    "a module of dropout": lambda self, x: self.lin(self.dropout(self.lin(x))),
    "bernoulli": lambda self, x: self.lin(x) * torch.bernoulli(torch.full((SIZE,), 0.5)),
    "rand_like": lambda self, x: F.gelu(self.lin(x) + torch.rand_like(x)),
    "randn": lambda self, x: F.gelu(self.lin(x) * torch.randn(SIZE)),
    "uniform_": lambda self, x: self.lin(x) * torch.empty(SIZE).uniform_(),
    "randperm": lambda self, x: self.lin(x)[torch.randperm(ROWS)],
    "alpha dropout": lambda self, x: F.alpha_dropout(self.lin(x), 0.3, training=True),
    "gumbel": lambda self, x: F.gumbel_softmax(self.lin(x)),
    "a distribution": lambda self, x: torch.distributions.Normal(self.lin(x), 1.0).rsample(),
}


def test_what_is_drawn_between_forward_and_backward_changes_nothing() -> None:
    x = tokens()
    twins = captured_twins(body(DRAWS["dropout"], lin=nn.Linear(SIZE, SIZE)), x)

    def step(module: nn.Module) -> list[Any]:
        torch.manual_seed(3)
        given = fresh(x)
        first, second = module(given), module(given)
        noise = torch.rand(5)
        loss_of(first).backward()
        after = torch.rand(5)
        second.sum().backward()  # whose gradient is of another layout further in
        return [first, second, given.grad, noise, after]

    assert twins.runs_code(step) == 2


def test_forward_that_runs_again_draws_the_same() -> None:
    x = tokens()
    twins = captured_twins(body(DRAWS["dropout"], lin=nn.Linear(SIZE, SIZE)), x)

    def step(module: nn.Module) -> list[Any]:
        torch.manual_seed(3)
        given = fresh(x)
        y = module.inside(given)
        noise = torch.rand(5)
        y.sum().backward()
        return [y, given.grad, noise, torch.rand(5)]

    for _ in range(2):
        assert twins.runs_code(step) == 1


def test_a_call_by_the_tape_in_between() -> None:
    x, other = tokens(), tokens(ROWS + 1, SIZE)
    twins = captured_twins(body(DRAWS["dropout"], lin=nn.Linear(SIZE, SIZE)), x)

    def step(module: nn.Module) -> list[Any]:
        torch.manual_seed(3)
        found = [module(fresh(each)) for each in (x, other, x)]
        for y in found:
            loss_of(y).backward()
        return found

    assert twins.runs_code(step) == 2
