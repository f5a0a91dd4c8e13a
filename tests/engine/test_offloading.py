"""Offloading by others around a policy, and gradients that share memory with what was saved."""

from contextlib import nullcontext

import pytest
import torch
from engine_testing import (
    HIDDEN,
    RMSNorm,
    Stack,
    assert_as_without,
    bits,
    every_rule,
    function_of,
    holding,
    loss_of,
    tokens,
    weak,
)
from torch.autograd.graph import save_on_cpu

import recompute

# Offloaded views, and outputs of backward that view what was unpacked


GivesBackWhatItSaved = function_of(
    lambda x, saved: x.clone(),
    lambda grad, saved: (saved.view(HIDDEN, -1).view_as(grad), None),
    saves=lambda result, x, saved: (saved,),
)
"""Its gradient is a view of the tensor that it saved."""


def _chain(self, x):
    for _ in range(3):
        hidden = self.norm(x)
        x = GivesBackWhatItSaved.apply(hidden, hidden.detach().exp())
        x = (x + hidden).sin()
        x.register_hook(GRADIENTS.append)
        hidden.register_hook(GRADIENTS.append)
    return x


GRADIENTS = []


@every_rule
@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_that_view_an_unpacked_tensor_are_not_overwritten(rules, offloads):
    x = tokens()

    def run(model):
        GRADIENTS.clear()
        with save_on_cpu() if offloads else nullcontext():
            result = model(x)
        found = []
        for _ in range(2):
            found += [*torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True), *GRADIENTS]
            GRADIENTS.clear()
        before = [bits(grad) for grad in found]
        loss_of(model(x * 2)).backward()
        torch.autograd.grad(result.sum(), [x, *model.parameters()])
        assert [bits(grad) for grad in found] == before
        return found

    assert_as_without(holding(_chain, norm=RMSNorm()), rules, run)


@every_rule
def test_a_gradient_that_views_an_unpacked_tensor_may_be_changed_by_who_gets_it(rules):
    """As clipping does in place. A second backward is right, or refused as in plain eager."""

    def forward(self, x):
        y = self.norm(x)
        return GivesBackWhatItSaved.apply(x, y.detach().exp()) + y

    model, x = holding(forward, norm=RMSNorm()), tokens()

    def grad(result):
        return torch.autograd.grad(result, x, torch.ones_like(result), retain_graph=True)[0]

    expected = bits(grad(model(x)))
    recompute.apply(model, rules)
    changed = []
    x.register_hook(changed.append)
    result = model(x)
    first = grad(result)
    assert bits(first) == expected
    for gradient in (first, *changed):
        gradient.zero_()
    try:
        second = grad(result)
    except RuntimeError as error:
        assert "modified" in str(error)  # noqa: PT017
    else:
        assert bits(second) == expected


@every_rule
def test_what_was_offloaded_is_freed_with_the_graph(rules):
    packed = []

    def pack(tensor):
        copied = tensor.clone()
        packed.append(weak(copied))
        return copied

    model = Stack()
    recompute.apply(model, rules)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(tokens())
    assert packed
    loss_of(result).backward()
    del result
    assert all(reference.expired() for reference in packed)
