"""What goes into a region and what comes out of it: any object, and objects with a state of their own."""

import pytest
import torch
from bodies.arguments import KINDS_OF_CACHES, Cache, Node, attend
from engine_testing import (
    HIDDEN,
    INSIDE,
    assert_as_plain,
    bits,
    calls,
    holding,
    module_of,
    no_garbage_collection,
    policed,
    tokens,
    weak,
)
from torch import nn

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
    assert_as_plain(module_of(forward, norm=norm, inside=nn.Sequential(norm, nn.Sigmoid())), INSIDE, tokens())


def test_an_object_with_many_parts_costs_as_many_steps_as_it_has_parts():
    model, x = policed(holding(lambda self, x, tree: (x * tree.scale).exp())), tokens()

    def cost(parts):
        tree = Node(None, parts)
        return calls(lambda: model(x, tree))

    cost(1)
    assert cost(40) < 10 * cost(4)
