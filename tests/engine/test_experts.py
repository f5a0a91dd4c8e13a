"""Mixtures of experts, whose routing must not change."""

import numpy as np
import pytest
import torch
from engine_testing import (
    HIDDEN,
    SETTINGS,
    GatedMLP,
    RMSNorm,
    assert_as_without,
    assert_step_as_without,
    every_rule,
    every_tape,
    governing,
    module_of,
    tokens,
)
from torch import nn

import recompute
from recompute.errors import RegenerationError

# Mixtures of experts

EXPERTS, CHOSEN = 4, 2


def mixture(self, x):
    """Each token goes to the two experts that a router prefers."""
    x = self.norm(x)
    logits = self.jitter(self.router(x))
    if self.keeps:
        logits = recompute.keep(logits)
    weights, chosen = logits.softmax(-1).topk(CHOSEN)
    NOTE_ROUTE(chosen.tolist())
    result = torch.zeros_like(x)
    for index, expert in enumerate(self.experts):
        rows, places = (chosen == index).nonzero(as_tuple=True)
        result = result.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
    return result


ROUTES = []
"""Where tokens went, run by run."""
NOTE_ROUTE = ROUTES.append
"""By this a checkpoint does not see the list: it would have it appended to but once."""


class Unsteady:
    """Turns the router's preferences around in every second run, which no engine can know of."""

    def __init__(self):
        self.sign = np.ones(1 << 14)  # too large an array to be looked into

    def __call__(self, logits):
        self.sign *= -1
        return logits * 1.0 + float(self.sign[0]) * torch.linspace(-5.0, 5.0, EXPERTS)


def _randomly(logits):
    return logits * (0.5 + torch.rand_like(logits))


def _mixture(jitter, keeps=False):

    router, experts = nn.Linear(HIDDEN, EXPERTS, bias=False), nn.ModuleList(GatedMLP() for _ in range(EXPERTS))
    inside = module_of(mixture, norm=RMSNorm(), router=router, experts=experts, jitter=jitter, keeps=keeps)
    return module_of(lambda self, x: (x + self.layers[0](x)).sin(), layers=nn.ModuleList([inside]))


@every_rule
def test_a_router_with_random_jitter_decides_the_same_again(rules):
    assert_step_as_without(_mixture(_randomly), rules, tokens())


def _run_unsteady(x):
    def run(model):
        model.layers[0].jitter.sign[:] = 1.0
        ROUTES.clear()
        result = model(x)
        grads = [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]
        assert all(route == ROUTES[0] for route in ROUTES), "whoever runs forward again finds the same routes"
        return result, grads

    return run


@every_rule
def test_routing_that_the_user_keeps_is_not_decided_differently(rules):
    assert_as_without(_mixture(Unsteady(), keeps=True), rules, _run_unsteady(tokens()))


def test_routing_that_nobody_keeps_is_decided_differently_where_python_runs_again():
    """What the test above guards against does happen."""
    model, x = _mixture(Unsteady()), tokens()
    recompute.apply(model, governing(SETTINGS["checkpoint"]))
    ROUTES.clear()
    result = model(x)
    with pytest.raises(RegenerationError):
        result.sum().backward()
    assert ROUTES[0] != ROUTES[1]


@every_tape
def test_the_tape_decides_no_routing_again(rules):
    assert_as_without(_mixture(Unsteady()), rules, _run_unsteady(tokens()))
    assert len(ROUTES) == 1
