"""Tensors and weights that change between forward and backward: right gradients, or a refusal by name."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from engine_testing import (
    HIDDEN,
    Projections,
    RMSNorm,
    Stack,
    assert_as_plain,
    bits,
    both_actions,
    every_rule,
    loss_of,
    module_of,
    policy,
    tokens,
)
from torch import nn

import recompute
from recompute.errors import MutationError

# Mutated tensors that are needed as they were


@every_rule
def test_a_mutated_tensor_that_a_rule_keeps_raises(rules):
    """As it does without a policy: what a rule keeps, autograd holds and checks itself."""
    outside = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    model = nn.Sequential(OrderedDict(inside=Stack(count=1).layers[0], outside=outside))
    recompute.apply(model, {"rules": [*rules["rules"], {"match": "outside", "action": "keep"}]})
    result = model(tokens())
    loss = result.sum()
    with torch.no_grad():
        result.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[6, 8\]"):
        loss.backward()


@both_actions
@pytest.mark.parametrize("mutate", [lambda y: y[1:].mul_(2.0), lambda y: np.exp(y.numpy(), out=y.numpy())])
def test_a_regions_result_mutated_before_a_consumer_saves_it(mutate, action):
    def forward(self, x):
        y = self.norm(x)
        mutate(y.detach())
        return self.linear(y)

    model = module_of(forward, norm=RMSNorm(), linear=nn.Linear(HIDDEN, HIDDEN))
    assert_as_plain(model, policy(("norm", action)), tokens())


def after_mutation(action):
    """A gradient that needs a norm's output as it was before it was mutated, in plain eager and under ``action``."""
    model, x = Projections(), tokens()
    outputs = []
    (expected,) = torch.autograd.grad(loss_of(model(x)), model.q.weight)
    recompute.apply(model, policy(("norm", action)))
    model.norm.register_forward_hook(lambda module, args, result: outputs.append(result))
    loss = loss_of(model(x))
    with torch.no_grad():
        outputs[0].zero_()
    (found,) = torch.autograd.grad(loss, model.q.weight)
    return bits(found), bits(expected)


def test_a_mutated_result_that_a_consumer_saved_is_refused_if_it_is_kept_and_comes_back_as_it_was_if_it_is_dropped():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        after_mutation("checkpoint")
    found, expected = after_mutation("recompute")
    assert found == expected


def test_a_kept_tensor_that_was_mutated_raises_and_names_the_op_that_wants_it():
    model, x = Projections(), tokens()
    recompute.apply(model, policy(("norm", "recompute")))
    given = x * 1.0
    hidden = given.exp()

    model.q = nn.Sequential(model.q, module_of(lambda self, y: y.exp()))
    saved = []
    model.q.register_forward_hook(lambda module, args, result: saved.append(result))
    loss = loss_of(model(hidden))
    with torch.no_grad():
        saved[0].add_(1.0)
    with pytest.raises(MutationError, match=r"Projections.*ExpBackward"):
        loss.backward()
