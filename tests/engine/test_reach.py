"""Random numbers that are drawn out of sight: in helpers, methods, objects and libraries, not by the forward itself."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
import types
from collections.abc import Callable, Iterator
from random import random as drawn_by_name
from typing import Any

import numpy as np
import pytest
import torch
from engine_testing import bits, both_actions, holding, policed, tokens
from numpy.random import rand as numpy_by_name
from tiers import one_in
from torch import Tensor, nn

import recompute
from recompute.engine.reachable_objects import find_generators
from recompute.engine.rng import RngState

OWN_RANDOM = random.Random(1)
OWN_NUMPY = np.random.default_rng(1)
OWN_LEGACY = np.random.RandomState(1)
OWN_TORCH = torch.Generator()


def once(helper: Callable[[], float]) -> Callable[[Any, Tensor], Tensor]:
    """A forward whose gradient depends on what ``helper`` draws."""
    return lambda self, x: (x.sin() * helper()).exp().sin()


# The global generators: however a region gets at them


def python_in_a_helper() -> float:
    return random.random()


def one_call_deeper() -> float:
    return python_in_a_helper()


def numpy_two_calls_deep() -> float:
    return (lambda: float(np.random.rand()))()


class Sampler:
    """A generator of its own, and others that it does not own."""

    def __init__(self) -> None:
        self.own = random.Random(3)

    def draw(self) -> float:
        return random.gauss(0, 1)

    def draw_own(self) -> float:
        return self.own.random()

    @property
    def drawn(self) -> float:
        return self.own.random()

    def __call__(self) -> float:
        return self.draw_own()

    def scaled(self, factor: float) -> float:
        return self.own.random() * factor

    doubled = functools.partialmethod(scaled, 2.0)


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = np.random.default_rng(3)

    def draw(self) -> float:
        return float(self.own.random())


SAMPLER, SLOTTED = Sampler(), Slotted()
TABLE: dict[str, Callable[[], float]] = {"uniform": lambda: random.uniform(0, 1), "own": lambda: OWN_RANDOM.random()}
LIBRARY = types.ModuleType("a_library_of_somebody")
exec(
    "import random\ndef draw():\n    return random.betavariate(2, 3)\nclass Inside:\n    rng = random.Random(5)",
    vars(LIBRARY),
)

GLOBAL: dict[str, Callable[[], float]] = {
    "a helper": python_in_a_helper,
    "a helper's helper": one_call_deeper,
    "a name": lambda: drawn_by_name(),
    "NumPy by name": lambda: float(numpy_by_name()),
    "NumPy two calls deep": numpy_two_calls_deep,
    "a lambda in a dict": lambda: TABLE["uniform"](),
    "another object's method": lambda: SAMPLER.draw(),
    "a library's function": lambda: LIBRARY.draw(),
    "a module imported inside": lambda: float(__import__("numpy").random.standard_normal()),
    "getattr": lambda: getattr(random, "ran" + "dom")(),
    "a shuffle": lambda: random.sample(range(100), 3)[0] / 100,
    "both": lambda: random.random() + float(np.random.rand()),
    "every second normal number of NumPy": lambda: float(np.random.randn()),
    "every second normal number of Python": lambda: random.gauss(0, 1),
}


def steps(model: nn.Module) -> list[Any]:
    """Two training steps, each of two forwards before one backward: gradients and the states of all streams."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    OWN_RANDOM.seed(1)
    SAMPLER.own.seed(1)
    LIBRARY.Inside.rng.seed(1)
    SLOTTED.own.bit_generator.state = OWN_NUMPY.bit_generator.state = np.random.default_rng(1).bit_generator.state
    OWN_LEGACY.seed(1)
    OWN_TORCH.manual_seed(1)
    found: list[Any] = []
    for _ in range(2):
        x = tokens()
        losses = [model(x).sum(), model(x).sum()]
        random.random()
        torch.rand(2)
        for loss in losses:
            found += map(bits, torch.autograd.grad(loss, x))
        found += [random.random(), np.random.randn(), random.gauss(0, 1), OWN_RANDOM.random(), SAMPLER.own.random()]
        found += [OWN_NUMPY.random(), SLOTTED.own.random(), OWN_LEGACY.randn(), bits(OWN_TORCH.get_state())]
    return found


@both_actions
@pytest.mark.parametrize("way", one_in(2, list(GLOBAL)))
def test_the_global_generators_of_python_and_numpy_are_minded_wherever_they_are_drawn_from(
    way: str, action: str
) -> None:
    model = holding(once(GLOBAL[way]))
    expected = steps(model)
    policed(model, action)
    assert steps(model) == expected


@pytest.mark.parametrize("way", ["a helper", "NumPy two calls deep", "every second normal number of NumPy"])
def test_a_region_that_comes_to_draw_in_a_later_run_draws_the_same_again(way: str) -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            return (x.sin() * (GLOBAL[way]() if self.runs % 3 == 0 else 1.0)).exp().sin()

    model = holding(lambda self, x: self.late(x), late=Late())
    model.inside.late.runs = 0
    expected = steps(model)
    model.inside.late.runs = 0
    policed(model)
    assert steps(model) == expected


def test_a_decorated_function_draws_the_same_in_its_helpers() -> None:
    def function(x: Tensor) -> Tensor:
        return (x.sin() * one_call_deeper() * SAMPLER.draw_own()).exp().sin()

    expected = steps(function)  # type: ignore[arg-type]
    rules = {"rules": [{"match": "**", "action": "checkpoint"}]}
    assert steps(recompute.recompute(function, policy=rules)) == expected


@both_actions
def test_a_region_that_seeds_moves_no_stream_when_it_runs_again(action: str) -> None:
    """Its second run ends where it began, as if nothing had been drawn."""

    def reseed() -> float:
        random.seed(2)
        np.random.seed(2)
        torch.manual_seed(2)
        return random.random() + float(np.random.rand()) + float(torch.rand(()))

    model = holding(once(reseed))
    expected = steps(model), bits(torch.get_rng_state())
    policed(model, action)
    assert (steps(model), bits(torch.get_rng_state())) == expected


def test_numpys_global_functions_may_draw_from_another_bit_generator() -> None:
    state = RngState()
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = RngState()
        assert state.drawn() is None
        expected = np.random.rand(3)
        drawn = state.drawn()
        assert drawn is not None
        with drawn.replayed():
            assert bits(torch.from_numpy(np.random.rand(3))) == bits(torch.from_numpy(expected))
        after = np.random.rand()
        with drawn.replayed():
            np.random.rand(3)
            assert np.random.rand() == after
    finally:
        np.random.set_bit_generator(before)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "getrandbits": lambda: random.getrandbits(8),
    "gauss, first": lambda: random.gauss(0, 1),
    "gauss, second": lambda: random.gauss(0, 1),
    "seed": lambda: random.seed(3),
    "setstate": lambda: random.setstate(random.Random(4).getstate()),
    "rand": np.random.rand,
    "randn, first": np.random.randn,
    "randn, second": np.random.randn,
    "numpy seed": lambda: np.random.seed(3),
    "set_state": lambda: np.random.set_state(np.random.RandomState(4).get_state()),
    "624 words": lambda: np.random.bytes(624 * 4),
    "binomial": lambda: np.random.binomial(10, 0.5),
}


def test_no_draw_from_a_global_generator_goes_unseen() -> None:
    """By a look at memory, which is what tells whether to ask for the state."""
    random.seed(1)
    np.random.seed(1)
    for name, draw in DRAWS.items():
        state = RngState()
        assert state.drawn() is None, name
        draw()
        assert state.drawn() is not None, name
        with state.replayed():
            assert state.drawn() is None, name


# Generators of one's own, as far as names lead to them


@functools.cache
def cached_sampler() -> Sampler:
    return SAMPLER


@contextlib.contextmanager
def noisy() -> Iterator[float]:
    yield OWN_LEGACY.randn()


def with_context() -> float:
    with noisy() as drawn:
        return drawn


OWN: dict[str, Callable[[], float]] = {
    "Python's": lambda: OWN_RANDOM.random(),
    "NumPy's": lambda: float(OWN_NUMPY.random()),
    "NumPy's of old, every second": lambda: float(OWN_LEGACY.randn()),
    "torch's": lambda: float(torch.rand((), generator=OWN_TORCH)),
    "an object's": lambda: SAMPLER.draw_own(),
    "an object's, when it is called": lambda: SAMPLER(),
    "an object's, by a property": lambda: SAMPLER.drawn,
    "an object's, in a slot": lambda: SLOTTED.draw(),
    "in a dict of functions": lambda: TABLE["own"](),
    "a library's": lambda: LIBRARY.Inside.rng.random(),
    "behind a cache": lambda: cached_sampler().draw_own(),
    "behind a context manager": with_context,
    "behind a partial": functools.partial(lambda sampler: sampler.draw_own(), SAMPLER),
    "behind a partial method": lambda: SAMPLER.doubled(),
    "behind a method made of a partial": types.MethodType(
        functools.partial(lambda factor, sampler: sampler.scaled(factor), 2.0), SAMPLER
    ),
}


@both_actions
@pytest.mark.parametrize("way", one_in(2, list(OWN)))
def test_a_generator_that_only_a_helper_has_is_found_by_the_names_in_its_code(way: str, action: str) -> None:
    helper = OWN[way]
    model = holding(once(lambda: helper()))
    expected = steps(model)
    policed(model, action)
    assert steps(model) == expected


CALLABLES: dict[str, Any] = {
    "a function in C": len,
    "an op": torch.sin,
    "a bound function in C": [].append,
    "a partial of a function in C": functools.partial(len, ()),
    "a method made of a function in C": types.MethodType(len, ()),
    "a method made of a method": types.MethodType(types.MethodType(max, 1), 2),
    "a method made of a partial": types.MethodType(functools.partial(print, "int8"), 1),
    "a method made of an object": types.MethodType(SAMPLER, 1),
    "a class": RngState,
    "an object": operator.itemgetter(0),
    "a ufunc": np.sin,
    "a cached function": functools.cache(len),
    "a generic function": functools.singledispatch(len),
    "a dispatcher's op": torch.ops.aten.sin.default,
}


@both_actions
def test_a_module_may_hold_whatever_can_be_called(action: str) -> None:
    model = holding(lambda self, x: x.sin().exp().sin())
    for name, value in CALLABLES.items():
        setattr(model.inside, name, value)
    expected = [steps(model) for _ in range(4)]
    policed(model, action)
    assert [steps(model) for _ in range(4)] == expected


class InHook(nn.Module):
    """Draws from its own generator in a hook alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.register_forward_hook(lambda module, args, result: result * SAMPLER.draw_own())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp().sin()


def test_a_generator_that_only_a_hook_or_a_method_has_is_found() -> None:
    for inside in (InHook(), holding(lambda self, x: self.scaled(x)).inside):
        if not isinstance(inside, InHook):
            type(inside).scaled = lambda self, x: (x.sin() * OWN_RANDOM.random()).exp()  # type: ignore[attr-defined]
        model = holding(lambda self, x: self.part(x), part=inside)
        expected = steps(model)
        policed(model)
        assert steps(model) == expected


GIVEN: dict[str, Callable[[], Any]] = {
    "Python's": lambda: OWN_RANDOM,
    "NumPy's": lambda: OWN_NUMPY,
    "an object": lambda: SAMPLER,
    "a list of objects": lambda: [SAMPLER],
    "a dict": lambda: {"rng": OWN_RANDOM},
    "a method": lambda: OWN_RANDOM.random,
    "a function": lambda: TABLE["own"],
}


@both_actions
@pytest.mark.parametrize("way", GIVEN)
def test_a_generator_of_python_or_numpy_among_the_arguments_draws_the_same_again(way: str, action: str) -> None:
    def draw(given: Any) -> float:
        if isinstance(given, (list, dict)):
            return draw(next(iter(given.values() if isinstance(given, dict) else given)))
        if isinstance(given, Sampler):
            return given.draw_own()
        return given() if callable(given) else float(given.random())

    inside = holding(lambda self, x, given: (x.sin() * draw(given)).exp().sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = inside.inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, GIVEN[way]())

    model = Model()
    expected = steps(model)
    policed(model, action)
    assert steps(model) == expected


def test_the_search_for_generators_runs_no_code_and_ends() -> None:
    class Trap:
        rng = OWN_RANDOM

        @property
        def touched(self) -> float:
            raise AssertionError("a property was run")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError("an attribute was asked for")

        def again(self) -> Any:
            return self.again().touched, self.rng

    trap = Trap()
    trap.__dict__["me"] = [trap, {"me": trap}]

    def function() -> Any:
        return trap.touched, trap.again(), trap.me, function()

    assert find_generators([function]) == [OWN_RANDOM]


def test_a_generator_of_the_operating_system_is_no_reason_to_fail() -> None:
    """It has no state: what is drawn from it comes out differently the second time, and here nothing is."""
    model = holding(lambda self, x: (x * self.secure.k).exp().sin(), secure=random.SystemRandom())
    model.inside.secure.k = 2.0
    expected = steps(model)
    policed(model)
    assert steps(model) == expected


@pytest.mark.parametrize("make", [lambda: random.Random(4), lambda: np.random.default_rng(4)], ids=["Python", "NumPy"])
def test_a_generator_that_takes_the_place_of_another_in_a_later_run_draws_the_same_again(
    make: Callable[[], Any],
) -> None:
    def gradients(model: nn.Module) -> list[Any]:
        found = []
        for _ in range(3):
            model.inside.sampler = make()  # type: ignore[union-attr]
            found.append(bits(torch.autograd.grad(model(x).sum(), x)[0]))
        return found

    x = tokens()
    model = holding(lambda self, x: (x.sin() * self.sampler.random()).exp().sin(), sampler=make())
    expected = gradients(model)
    assert gradients(policed(model, "checkpoint")) == expected
