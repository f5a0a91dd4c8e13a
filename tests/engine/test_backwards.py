"""Runs of every kind: several backwards of one graph or parts of it, of gradients, in hooks, with frozen parts."""

import pytest
import torch
from bodies.runs import RUNS
from engine_testing import (
    HIDDEN,
    RULES_OF_SETTINGS,
    SETTINGS,
    Holder,
    RMSNorm,
    Stack,
    assert_as_without,
    assert_step_as_without,
    bits,
    every_policy_of_a_stack,
    every_rule,
    governing,
    holding,
    loss_of,
    module_of,
    tokens,
)
from tiers import by_default, one_in, slow
from torch import nn
from torch.autograd import grad

import recompute

# Of a stack of layers


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@every_policy_of_a_stack
@pytest.mark.parametrize("run", one_in(4, RUNS))
def test_a_run_of_a_stack_gives_what_it_gives_without_a_policy(run, rules):
    x = tokens()

    def observe(model):
        model.zero_grad()
        return run.run(model, x.detach().clone().requires_grad_())

    assert_as_without(run.make(), rules, observe, drops=run.drops)


FROZEN = {
    "nothing": [],
    "norms": ["norm"],
    "mlp": ["mlp"],
    "all but one layer": ["layers.0", "layers.2", "norm"],
    "all but the last bias": ["layers", "norm", "head.weight"],
}


@every_policy_of_a_stack
@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("takes", [False, True])
def test_parameters_and_inputs_that_require_no_gradient(rules, frozen, takes):
    model = Stack(count=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN[frozen]))
    is_trained = takes or frozen != "all but the last bias"  # or else no layer saves anything
    assert_step_as_without(model, rules, tokens(grad=takes), drops=is_trained)


@pytest.mark.parametrize("rules", by_default(RULES_OF_SETTINGS, "recompute"))
def test_what_is_frozen_may_change_from_step_to_step(rules):
    def run(model):
        found = []
        for frozen in ("", "mlp", "", "norm", "layers", "norm", ""):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not frozen or frozen not in name)
            for takes in (False, True):
                x = tokens(grad=takes)
                loss_of(model(x)).backward()
                found += [x.grad, *(parameter.grad for parameter in model.parameters())]
                model.zero_grad()
        return found

    assert_as_without(Stack(count=1), rules, run)


@every_rule
def test_where_nothing_requires_gradients_nothing_comes_to(rules):
    model, x = Stack(p=0.0).requires_grad_(False), tokens(grad=False)
    expected = bits(model(x))
    recompute.apply(model, rules)
    result = model(x)
    assert not result.requires_grad
    assert bits(result) == expected


@every_rule
def test_two_results_of_one_region_run_backward_one_after_the_other(rules):
    """They share nothing that a first backward, which retains no graph, would free."""
    model = holding(lambda self, x, y: (self.a(x).exp().sin(), self.b(y).exp().cos()), a=RMSNorm(), b=RMSNorm())
    x, y = tokens(), tokens()

    def run(model):
        one, other = model(x, y)
        return grad(other.sum(), [y, model.inside.b.weight]), grad(one.sum(), [x, model.inside.a.weight])

    assert_as_without(model, rules, run)


@every_rule
def test_a_region_of_integers_or_of_no_arguments(rules):
    embedding = holding(lambda self, ids: self.norm(self.table(ids)).sin(), table=nn.Embedding(5, 8), norm=RMSNorm())
    assert_step_as_without(embedding, rules, torch.tensor([[1, 2, 2], [0, 4, 1]]))
    learned = holding(lambda self: self.norm(self.start.exp()).sin(), start=nn.Parameter(tokens()), norm=RMSNorm())
    assert_step_as_without(learned, rules)


def _nest():
    """Three regions, one in another, and one beside each."""

    def around(inner):
        def forward(self, x):
            y = self.linear(self.norm(x)).sin()
            return y if inner is None else self.beside(y) * self.region(y.exp())

        parts = {} if inner is None else {"region": inner, "beside": around(None)}
        return module_of(forward, norm=RMSNorm().double(), linear=nn.Linear(HIDDEN, HIDDEN).double(), **parts)

    return Holder(around(around(around(None))))


@pytest.mark.parametrize("inner", by_default(SETTINGS, "checkpoint", "recompute", "checkpoint without attention"))
@pytest.mark.parametrize("outer", by_default(SETTINGS, "checkpoint", "recompute", "checkpoint without attention"))
@pytest.mark.parametrize("order", [*slow(1, 2), 3])
def test_nested_regions_and_siblings_to_third_order_gradients(outer, inner, order):
    x = tokens(dtype=torch.float64)
    rules = {"rules": [*governing(outer, "inside", "**.beside")["rules"], *governing(inner, "**.region")["rules"]]}

    def run(model):
        value, found = model(x).pow(2).sum(), []
        for _ in range(order):
            (first, *others) = grad(value, [x, *model.parameters()], create_graph=True)
            found += [first, *others]
            value = first.pow(2).sum() + sum(each.sum() for each in others)
        return found

    assert_as_without(_nest(), rules, run)
