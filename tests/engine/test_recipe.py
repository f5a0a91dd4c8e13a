"""Recipes: what ops record of themselves, handles and their views, the book that knows storages, held tensors."""

import pytest
import torch
from engine_testing import bits, holding, in_threads, no_garbage_collection, policy, tokens, weak

import recompute
from recompute.engine.recipe_book import open_book, record
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.scopes import RecipeScope
from recompute.errors import RegenerationError


class Cube:
    """An op that knows itself: counts how often it is regenerated."""

    def __init__(self):
        self.regenerated = 0
        self.given = []

    def __call__(self, x, scale=1.0):
        y = x.pow(3) * scale
        record(y, self.again, x, scale)
        return y

    def again(self, x, scale):
        self.regenerated += 1
        self.given.append((x, scale))
        assert not torch.is_grad_enabled()
        return x.pow(3) * scale


def scoped(function, *args, statistics=None):
    with RecipeScope(statistics or RegionStatistics("the model")):
        return function(*args)


def assert_gradient(result, x, plain):
    found, expected = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (result, plain(x)))
    assert bits(found) == bits(expected)


def test_a_recorded_output_is_dropped_wherever_it_is_saved_and_regenerated_once_for_all():
    cube, references = Cube(), []

    def forward(x):
        y = cube(x)
        references.append(weak(y))
        return y.sin() + y.cos() + y * y

    x = tokens()
    result = scoped(forward, x)
    assert references[0].expired()
    for turn in (1, 2):
        assert_gradient(result, x, lambda x: (y := x.pow(3) * 1.0).sin() + y.cos() + y * y)
        assert cube.regenerated == turn


def test_recipes_chain_through_dropped_inputs():
    cube, references = Cube(), []

    def forward(x):
        for _ in range(3):
            x = cube(x, 0.5)
            references.append(weak(x))
        return x.sin()

    x = tokens()
    with no_garbage_collection() as engine_objects:
        result = scoped(forward, x)
        assert all(reference.expired() for reference in references)
        thrice = lambda x: (((x.pow(3) * 0.5).pow(3) * 0.5).pow(3) * 0.5).sin()  # noqa: E731
        assert_gradient(result, x, thrice)
        del result
        assert engine_objects() == {}


def test_nothing_is_recorded_outside_of_a_scope_or_without_gradients():
    cube, x = Cube(), tokens()
    assert open_book() is None
    cube(x).sin().sum().backward()
    with torch.no_grad():
        hidden = scoped(cube, x)
    (hidden * x).sum().backward()
    with RecipeScope(RegionStatistics("outer")), torch.no_grad():
        y = cube(x)
    (y * x).sum().backward()
    assert cube.regenerated == 0


def test_a_recorded_output_that_is_mutated_is_kept_as_it_was_when_saved():
    cube = Cube()

    def forward(x):
        y = cube(x)
        y.add_(1.0)
        return y.sin()

    x = tokens()
    assert_gradient(scoped(forward, x), x, lambda x: (x.pow(3) + 1).sin())
    assert cube.regenerated == 0


@pytest.mark.parametrize("what", ["shape", "stride", "dtype"])
def test_a_recipe_that_gives_back_another_layout_is_refused(what):
    others = {
        "shape": lambda x: x.exp()[:3],
        "stride": lambda x: x.exp().t().contiguous().t(),
        "dtype": lambda x: x.exp().double(),
    }

    def forward(x):
        y = x.exp()
        record(y, others[what], x)
        return y.t().sin()

    result = scoped(forward, tokens())
    with pytest.raises(RegenerationError, match=r"in .*was dropped.*was regenerated"):
        result.sum().backward()


def test_two_threads_in_backward_of_one_graph_regenerate_right_values():
    cube, x = Cube(), tokens(64, 64)
    result = scoped(lambda x: (y := cube(x, 0.1)).sin() * y.cos(), x)
    (expected,) = torch.autograd.grad(result.sum(), x, retain_graph=True)
    found = []

    def backward():
        for _ in range(20):
            found.append(bits(torch.autograd.grad(result.sum(), x, retain_graph=True)[0]))

    in_threads(*[backward] * 3)
    assert found == [bits(expected)] * 60


def test_an_op_may_record_itself_inside_of_a_region():
    cube = Cube()
    model, x = holding(lambda self, x: (y := cube(x)).sin() + y.cos()), tokens()
    recompute.apply(model, policy(("inside", "checkpoint")))
    cube.given.clear()
    assert_gradient(model(x), x, lambda x: (y := x.pow(3)).sin() + y.cos())
