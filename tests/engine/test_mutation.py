"""Tensors and weights that change between forward and backward: right gradients, or a refusal by name."""

from collections import OrderedDict

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
    holding,
    loss_of,
    module_of,
    policed,
    policy,
    tokens,
)
from torch import nn

import recompute
from recompute.errors import MutationError

# Mutated tensors that are needed as they were


@every_rule
def test_a_mutated_tensor_that_the_user_keeps_raises(rules):
    def forward(self, x):
        kept = recompute.keep(self.norm(x))
        return kept, kept.exp() * kept

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, rules)
    kept, result = model(tokens())
    with torch.no_grad():
        kept.add_(1.0)
    with pytest.raises(RuntimeError, match=r"(?s)\[?6, 8\]?.*modified"):
        result.sum().backward()


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


REFUSED_LATER = {
    "its op saved it": (lambda self, x: self.norm(x).sigmoid(), lambda y: y.mul_(2.0)),
    "of which its op saved a view": (lambda self, x: self.norm(x).exp().t(), lambda y: y[0].zero_()),
}


@every_rule
@pytest.mark.parametrize("kind", REFUSED_LATER)
def test_a_mutation_that_plain_eager_refuses_gives_no_wrong_gradient(rules, kind):
    """It is refused, or the gradient is that of the value which forward had: a dropped one comes back as it was."""
    forward, mutate = REFUSED_LATER[kind]
    model, x = holding(forward, norm=RMSNorm()), tokens()

    def grads(mutate):
        y = model(x)
        with torch.no_grad():
            mutate(y)
        return [bits(grad) for grad in torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]

    expected = grads(lambda y: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(mutate)
    recompute.apply(model, rules)
    try:
        found = grads(mutate)
    except RuntimeError as error:
        assert "modified" in str(error)  # noqa: PT017
    else:
        assert found == expected


@every_rule
@pytest.mark.parametrize("updated", ["layers.0.mlp.down_proj.weight", "layers.1.norm1.weight", "layers.1.norm2.weight"])
def test_a_weight_updated_before_backward_is_refused_as_in_plain_eager(rules, updated):
    model, x = Stack(count=2), tokens()

    def update():
        loss = loss_of(model(x))
        weight = model.get_parameter(updated)
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        update().backward()
    recompute.apply(model, rules)
    with pytest.raises(MutationError, match="modified in place"):
        update().backward()


@both_actions
def test_a_saved_tensor_overwritten_later_in_its_region_is_refused_as_in_plain_eager(action):
    model = holding(lambda self, x: x.sigmoid().mul_(2.0).sin())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(tokens()).sum().backward()
    policed(model, action)
    with pytest.raises(MutationError, match=r"inside \(Body\).*SigmoidBackward0 needs .* was modified in place"):
        model(tokens()).sum().backward()


@both_actions
def test_a_regions_result_mutated_before_a_consumer_saves_it(action):
    def forward(self, x):
        y = self.norm(x)
        y.mul_(2.0)
        y[0] += 1.0
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


def test_a_product_of_batches_that_was_mutated_is_refused():
    """What matmul returns counts its own versions: it is an unsafe view of the product."""
    weight = nn.Parameter(torch.rand(HIDDEN, HIDDEN))
    model = holding(lambda self, x: (product := x.expand(2, -1, -1) @ self.weight, product.sin()), weight=weight)
    product, result = policed(model, "recompute")(tokens())
    with torch.no_grad():
        product.add_(1.0)
    with pytest.raises(MutationError, match="modified"):
        result.sum().backward()
