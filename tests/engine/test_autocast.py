"""Values come back in the precision that they had in forward, wherever backward runs."""

from contextlib import nullcontext

import pytest
import torch
from engine_testing import (
    Stack,
    assert_as_without,
    assert_step_as_without,
    every_policy_of_a_stack,
    every_rule,
    holding,
    loss_of,
    tokens,
)
from tiers import slow


@every_policy_of_a_stack
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)], ids=str)
@pytest.mark.parametrize("where", ["outside", "inside", "inside another"])
def test_backward_regenerates_in_the_autocast_dtype_of_forward(rules, dtype, where):
    x = tokens()
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16

    def run(model):
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(x))
        around = {"outside": None, "inside": dtype, "inside another": other}[where]
        with nullcontext() if around is None else torch.autocast("cpu", dtype=around):
            return torch.autograd.grad(loss, [x, *model.parameters()])

    assert_as_without(Stack(), rules, run)


@every_rule
def test_what_ran_outside_of_autocast_regenerates_outside_of_it(rules):
    x = tokens()

    def run(model):
        result = model(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.autograd.grad(result.sum(), [x, *model.parameters()])

    assert_as_without(Stack(), rules, run)
    assert_as_without(holding(lambda self, x: torch.exp(x * 0.1).sin().cos().tanh()), rules, run)


@every_rule
def test_weights_that_autocast_casts_once_for_several_regions(rules):
    model = Stack(count=2)
    model.layers[1] = model.layers[0]
    assert_step_as_without(model, rules, tokens(), around=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
