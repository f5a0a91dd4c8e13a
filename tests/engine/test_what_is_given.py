"""What goes into a region and comes out of it: objects, aliases, views, and what others pack and unpack."""

from contextlib import nullcontext

import pytest
import torch
from bodies.arguments import KINDS_OF_CACHES, Cache, Node, attend
from engine_testing import (
    HIDDEN,
    INSIDE,
    TOKENS,
    RMSNorm,
    assert_as_without,
    assert_step_as_without,
    bits,
    calls,
    every_rule,
    function_of,
    holding,
    loss_of,
    module_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
    weak,
)
from torch import nn
from torch.autograd.graph import save_on_cpu

import recompute
from recompute.errors import MutationError, PolicyWarning

ONCE = {
    "generator": lambda x: (scale for scale in (2.0, 3.0)),
    "zip": lambda x: zip([2.0], strict=True),
    "iterator": lambda x: iter([2.0, 3.0]),
}


@pytest.mark.parametrize("kind", ONCE)
def test_an_argument_that_can_be_used_but_once_leaves_the_region_as_it_is(kind):
    def forward(self, x, values):
        first = next(values)
        return (x * (first[0] if isinstance(first, tuple) else first)).exp().sin()

    model, x = holding(forward), tokens()
    (expected,) = torch.autograd.grad(model(x, ONCE[kind](x)).sum(), x)
    policed(model)
    with pytest.warns(PolicyWarning, match=r"inside .* nothing is dropped there: an argument, .* consumed"):
        result = model(x, ONCE[kind](x))
    assert bits(torch.autograd.grad(result.sum(), x)[0]) == bits(expected)


@pytest.mark.parametrize("kind", KINDS_OF_CACHES.values(), ids=KINDS_OF_CACHES)
def test_what_stands_for_a_cache_goes_by_reference_count(kind):
    model, x = policed(holding(attend)), tokens()
    with no_garbage_collection() as engine_objects:
        cache = kind()
        first = model(x, cache)
        reference = weak(first)
        cache.update(first)  # so that what the second region was given holds it
        second = model(x, cache)
        second.sum().backward()
        del first, second
        model(x, cache)  # without a backward
        del cache
        assert reference.expired()
        assert engine_objects() == {}


def test_a_tensor_of_an_object_argument_mutated_before_backward_is_refused():
    cache = Cache()
    cache.keys.append(torch.ones(2, HIDDEN))
    model, x = policed(holding(attend)), tokens()
    result = model(x, cache)
    cache.keys[0].mul_(2.0)
    with pytest.raises(MutationError, match="a tensor in an argument, a Cache"):
        result.sum().backward()


def test_inputs_graphs_are_not_kept_by_a_region_that_does_not_need_them():
    model, x = (
        policed(holding(lambda self, x: x.detach().exp() * self.scale, scale=nn.Parameter(torch.ones(())))),
        tokens(),
    )
    with no_garbage_collection():
        before = x.exp()
        reference = weak(before)
        result = model((before * before).cos())
        del before
        assert reference.expired()
        result.sum().backward()
    assert x.grad is None


def test_statistics_of_one_norm_used_inside_and_outside_of_a_region():
    forward = lambda self, x: self.inside(self.norm(self.inside(self.norm(x)))).sin()  # noqa: E731
    norm = nn.BatchNorm1d(HIDDEN)
    assert_step_as_without(module_of(forward, norm=norm, inside=nn.Sequential(norm, nn.Sigmoid())), INSIDE, tokens())


def test_an_object_with_many_parts_costs_as_many_steps_as_it_has_parts():
    model, x = policed(holding(lambda self, x, tree: (x * tree.scale).exp())), tokens()

    def cost(parts):
        tree = Node(None, parts)
        return calls(lambda: model(x, tree))

    cost(1)
    assert cost(40) < 10 * cost(4)


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


@every_rule
def test_an_expanded_tensor_comes_back_as_small_as_it_was(rules):
    sizes = []

    def backward(gradient, x, seen):
        sizes.append(seen.untyped_storage().nbytes())
        return gradient * x, None

    looks = function_of(lambda x, seen: x.exp(), backward)
    model = holding(lambda self, x: looks.apply(x, x[:1].exp().mul(2.0).expand(1000, -1)))
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
