"""Captured regions that write to buffers, in backwards unlike the one that was recorded: these run forward again."""

import copy

import pytest
import torch
from bodies.autograd import vmapped_with_an_array
from capture_testing import STEPS_TO_SETTLE
from corpus import counting
from engine_testing import HIDDEN, TOKENS, assert_same
from torch import nn

import recompute


def model():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    norm.running_mean, norm.running_var = torch.tensor([[0.0] * 4, [1.0] * 4])  # which share memory
    return nn.ModuleDict({"inside": nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), nn.Linear(4, 4))})


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


class Departing(nn.Module):
    """torch.compile's graph of it runs other ops than its eager forward, after ``first``."""

    def __init__(self, first):
        super().__init__()
        self.first, self.norm = first, nn.Tanh()

    def forward(self, x):
        return vmapped_with_an_array(self, self.first(x))


@pytest.mark.parametrize("first", [nn.BatchNorm1d(HIDDEN), nn.ELU(inplace=True)], ids=["norm", "in place"])
@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_a_graph_that_departs_has_changed_nothing(action, first):
    plain = nn.ModuleDict({"inside": Departing(first)})
    governed = copy.deepcopy(plain)
    recompute.apply(governed, {"rules": [{"match": "inside", "action": action}]})
    for number in range(STEPS_TO_SETTLE):
        found = []
        for each in (plain, governed):
            x = torch.linspace(-1, 2, TOKENS * HIDDEN).view(TOKENS, HIDDEN).mul(number + 1).requires_grad_()
            sum(each["inside"](y).square().sum() for y in (x.sin(), x.cos())).backward()
            found.append({"x": x.grad, **each.state_dict()})
        assert_same(*found)


class Shifted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("shift", torch.zeros(4))
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        y = (super().forward(x) + self.shift).exp().sin()
        self.count.add_(1)
        return y


@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_what_it_reads_may_come_to_share_memory_with_what_it_updates(action):
    plain = nn.ModuleDict({"inside": Shifted()})
    governed = copy.deepcopy(plain)
    recompute.apply(governed, {"rules": [{"match": "inside", "action": action}]})
    for number in range(STEPS_TO_SETTLE + 2):
        for each in (plain, governed):
            if number == STEPS_TO_SETTLE:
                each.inside.count = each.inside.shift.detach()
            each.inside(batch(number)).square().sum().backward()
    assert_same(*[{"weight": each.inside.weight.grad, **each.state_dict()} for each in (plain, governed)])
