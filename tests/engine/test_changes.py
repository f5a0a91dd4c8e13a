"""Tensors that change between forward and backward, and what is kept as it is: right, or refused by name."""

import copy
from collections import OrderedDict

import numpy as np
import pytest
import torch
from bodies import BODIES
from corpus import FEW_STEPS
from corpus import assert_as_plain as assert_body_as_plain
from engine_testing import (
    HIDDEN,
    RULES_OF_SETTINGS,
    SETTINGS,
    Census,
    Projections,
    RMSNorm,
    Stack,
    assert_as_without,
    assert_step_as_without,
    bits,
    both_actions,
    every_rule,
    governing,
    holding,
    loss_of,
    module_of,
    no_garbage_collection,
    policy,
    tokens,
    weak,
)
from tiers import by_default
from torch import nn

import recompute
from recompute.engine.bit_comparison import verifying
from recompute.engine.cut.save_plan import LARGEST_COPY
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
    assert_step_as_without(model, policy(("norm", action)), tokens())


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


@pytest.mark.parametrize("name", [name for name in BODIES if name.startswith("buffer: of ")])
def test_a_buffer_of_any_dtype_that_is_a_view_of_others_memory_verifies(name):
    with verifying():
        assert_body_as_plain(BODIES[name], SETTINGS["recompute"], FEW_STEPS)


def _gradients(model, result, **options):
    return [bits(grad) for grad in torch.autograd.grad(result.sum(), list(model.parameters()), **options)]


def test_one_buffer_of_two_regions_and_of_what_is_between_them():
    buffer, inputs = torch.zeros(HIDDEN), [tokens() for _ in range(3)]

    def forward(self, x):
        buffer.lerp_(x.detach().mean(0), 0.5)
        z = (self.linear(x) - buffer).exp()
        return z.sin() * z.tanh()

    def between(self, x):
        buffer.mul_(0.5)
        return x + buffer

    def step(model):
        buffer.zero_()
        return torch.autograd.grad(sum(model(x).sum() for x in inputs), list(model.parameters()))

    one, other = (module_of(forward, linear=nn.Linear(HIDDEN, HIDDEN)) for _ in range(2))
    model, rules = nn.Sequential(one, module_of(between), other), governing(SETTINGS["recompute"], "0", "2")
    assert_as_without(model, rules, lambda model: [step(model), step(model)])


def test_a_tensor_that_is_too_large_to_copy_is_refused_if_it_changes_and_held_without_a_copy():
    def forward(self, x):
        y = self.linear(x)
        return y.sin() + ((y - self.table).exp() + (y + self.table).exp()).tanh()

    plain = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    most = LARGEST_COPY // (HIDDEN * 4)
    for rows in (most, most + 1):
        plain.inside.register_buffer("table", torch.rand(rows, HIDDEN))
        model, x = copy.deepcopy(plain), tokens(rows, HIDDEN)
        expected = _gradients(plain, plain(x))
        recompute.apply(model, governing(SETTINGS["recompute"]))
        with Census() as census:
            result = model(x)
        fits = rows == most
        assert census.alive_nbytes() == (3 if fits else 2) * x.nbytes, (
            "the projection, the result, and a copy if it fits"
        )
        model.inside.table.mul_(2.0)
        if fits:
            assert _gradients(model, result) == expected
        else:
            with pytest.raises(MutationError, match=rf"^in .*\({rows}, 8\).*modified in place after it was saved"):
                _gradients(model, result)


@pytest.mark.parametrize(
    "rules",
    by_default({**RULES_OF_SETTINGS, "its norm": policy(("inside.norm", "recompute"))}, "checkpoint", "its norm"),
)
def test_what_the_user_keeps_stays_alive_until_the_graph_is_gone(rules):
    kept = []

    def forward(self, x):
        logits = recompute.keep(self.norm(x))
        kept.append(weak(logits))
        return (logits.sin() * x).sin()

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, rules)
    kept.clear()
    with no_garbage_collection():
        result = model(tokens())
        assert not kept[0].expired()
        result.sum().backward()
        del result
        assert all(reference.expired() for reference in kept)


def test_a_kept_module_inside_a_checkpointed_one_keeps_what_it_saves():
    references = []

    def forward(self, x):
        hidden = x.exp()
        references.append(weak(hidden))
        return hidden.sin()

    model = holding(lambda self, x: self.kept(x.cos()).tan(), kept=module_of(forward))
    recompute.apply(model, policy(("inside.kept", "keep"), ("inside", "checkpoint")))
    result = model(tokens())
    assert not references[0].expired()
    result.sum().backward()
    assert_step_as_without(model, {"rules": "none"}, tokens(), drops=False)


def test_keep_returns_the_tensor_itself_outside_of_regions_and_takes_nothing_else():
    x = tokens()
    assert recompute.keep(x) is x
    with pytest.raises(TypeError, match="takes a tensor, got list"):
        recompute.keep([x])


@pytest.mark.parametrize("name", ["a name", "gemm", 3])
def test_keep_refuses_what_no_rule_can_list_as_a_name(name):
    with pytest.raises(ValueError, match=f"a name of letters, digits and '_', .* got {name!r}"):
        recompute.keep(tokens(), name)
