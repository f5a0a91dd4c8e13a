"""Captured regions that write to buffers, in backwards unlike the one that was recorded: these run forward again."""

import copy

import pytest
import torch
from capture_testing import STEPS_TO_SETTLE
from corpus import counting
from engine_testing import assert_same
from torch import nn

import recompute


def model():
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
    return nn.ModuleDict({"inside": inside})


def batch(number):
    return torch.linspace(-1, 2, 32).view(8, 4).mul(number + 1).sin().requires_grad_()


def twice(result, x):
    (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
    gradient.square().sum().backward()  # not to the bit, where it is the first one of captured code
    return [gradient.detach()]


def batched(result, x):
    return torch.autograd.grad(result, x, torch.eye(32).view(32, 8, 4)[:3], is_grads_batched=True)


def expanded(result, x):
    return torch.autograd.grad(result.sum(), x)


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("backward", [twice, batched, expanded])
@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_forward_runs_again_on_copies_of_what_it_updates(backward, action):
    plain = model()
    governed = copy.deepcopy(plain)
    recompute.apply(governed, {"rules": [{"match": "inside", "action": action}]})
    for number in range(STEPS_TO_SETTLE):
        for each in (plain, governed):
            each.inside(batch(number)).square().sum().backward()
    found = []
    with counting() as count:
        for each in (plain, governed):
            inputs = [batch(7), batch(8)]
            results = [each.inside(x) for x in inputs]  # the second updates what the first has updated
            gradients = [gradient for pair in zip(results, inputs, strict=True) for gradient in backward(*pair)]
            found.append({**dict(enumerate(gradients)), **each.state_dict()})
    assert count() == 2
    assert_same(*found)
