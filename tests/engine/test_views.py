"""Aliases, views and layouts of what goes into a region and comes out of it; tensors that are not plain."""

import pytest
import torch
from engine_testing import (
    HIDDEN,
    TOKENS,
    ExpWith,
    RMSNorm,
    assert_as_without,
    assert_step_as_without,
    both_actions,
    every_rule,
    holding,
    module_of,
    policed,
    policy,
    tokens,
)
from torch import nn

import recompute

# Aliases


def test_an_input_that_a_region_returns_stays_alive_and_is_not_counted():
    model = holding(lambda self, x: (x, x.exp().sin().cos()))
    handle = recompute.apply(model, policy(("inside", "recompute")))
    hidden = tokens() * 1.0
    result = model(hidden)[0].sin() + model(hidden)[1]
    assert handle.stats().dropped_nbytes == 2 * TOKENS * HIDDEN * 4  # each call's sine
    result.sum().backward()


@pytest.mark.parametrize(
    ("first", "follows"),
    [
        (lambda x: x.view(-1, HIDDEN), True),
        (lambda x: x.view(-1), True),
        (lambda x: x[:, 1:], False),
        (lambda x: x.transpose(0, 1), False),
    ],
    ids=["rows", "flat", "a part", "transposed"],
)
def test_an_input_that_autograd_saves_in_another_shape_than_the_first_op_reads(first, follows):
    """As a kernel does that reads the rows of what it saves. Later frames follow the plan if both see the same."""

    def forward(self, x):
        first(x).sum()
        return (x * x).exp()

    model = holding(forward)
    x = torch.randn(2, TOKENS // 2, HIDDEN, requires_grad=True)
    rules = policy(("inside", "recompute"))
    assert_as_without(model, rules, lambda model: [loss_and_gradient(model, x) for _ in range(3)])
    handle = recompute.apply(model, rules)
    loss_and_gradient(model, x)
    assert "inside" in handle.plans()
    loss_and_gradient(model, x)
    assert ("inside" in handle.plans()) is follows


def loss_and_gradient(model, x):
    loss = model(x).sum()
    return loss.detach(), torch.autograd.grad(loss, x)[0]


@both_actions
def test_models_on_the_meta_device_run_without_values(action):
    with torch.device("meta"):
        model = holding(lambda self, x: self.batch(x).exp().sin(), batch=nn.BatchNorm1d(HIDDEN))
        x = torch.empty(TOKENS, HIDDEN, requires_grad=True)
    policed(model, action)
    model(x).sum().backward()
    assert x.grad.shape == x.shape


@every_rule
def test_an_expanded_tensor_comes_back_as_small_as_it_was(rules):
    sizes = []

    def forward(self, x):
        small = x[:1].exp().mul(2.0)
        return ExpWith.apply(x, small.expand(1000, -1), lambda seen: sizes.append(seen.untyped_storage().nbytes()))

    model = holding(forward)
    recompute.apply(model, rules)
    model(tokens() * 1.0).sum().backward()
    assert sizes == [HIDDEN * 4]


@every_rule
def test_a_chain_of_regions_that_return_what_they_are_given(rules):
    def forward(self, x):
        results = [x * 1.0]
        for layer in self.layers:
            results.append(layer(results[-1]))
        return torch.stack([result.sin() for result in results]).exp()

    through = [lambda self, x: x, lambda self, x: x.view_as(x), lambda self, x: self.norm(x), lambda self, x: x]
    layers = nn.ModuleList(module_of(each, norm=RMSNorm()) for each in through)
    assert_step_as_without(module_of(forward, layers=layers), rules, tokens())
