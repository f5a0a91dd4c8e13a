"""Random numbers: a region draws the same ones again, whatever from, and backward leaves no trace in any stream."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    CPU,
    HIDDEN,
    TOKENS,
    Tracker,
    assert_as_plain,
    bits,
    both_actions,
    holding,
    policed,
    policy,
    tokens,
)
from tiers import one_in
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recompute
from recompute.counters import memory_trace
from recompute.engine import rng
from recompute.engine.rng import RngState, is_random_source

GENERATOR = torch.Generator()


def test_generators_are_read_as_quickly_where_the_package_is_imported_under_fake_tensors() -> None:
    with FakeTensorMode():
        memory = rng._GlobalCpu().memory()
    assert memory is not None
    seen = memory[0].raw
    torch.rand(1)
    assert memory[0].raw != seen


def test_random_state_is_held_only_by_regions_that_draw() -> None:
    def held(probability: float) -> int:
        model = holding(lambda self, x: (F.dropout(x, self.p) if self.p else x.cos()).exp().sum(), p=probability)
        policed(model)
        model(tokens()).backward()
        x = tokens()
        before = states_alive()
        with memory_trace(CPU) as trace:
            result = model(x)
            trace.mark("forward")
        states = states_alive() - before
        assert trace.held_nbytes["forward"] == 4, "the result alone: states are Python's"
        result.backward()
        assert states_alive() == before
        return states

    assert held(0.0) == 0
    assert held(0.5) == 1


def states_alive() -> int:
    return sum(type(value) is RngState for value in gc.get_objects())


@pytest.mark.parametrize(
    "kind", ["rand", "one normal number", "two of float64", "integers", "seed", "state", "Python's", "NumPy's"]
)
def test_whatever_moves_a_default_generator_is_seen(kind: str) -> None:
    """Also what moves only what a generator holds back: every second normal number."""
    moves: dict[str, Callable[[], Any]] = {
        "rand": lambda: torch.rand(1),
        "one normal number": lambda: torch.randn(1),
        "two of float64": lambda: torch.randn(2, dtype=torch.float64),
        "integers": lambda: torch.randint(7, (1,)),
        "seed": lambda: torch.manual_seed(3),
        "state": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
        "Python's": lambda: random.gauss(0, 1),
        "NumPy's": lambda: np.random.standard_normal(),
    }
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        for _ in range(3):  # the second normal number of two is drawn by the first
            state = RngState()
            assert state.drawn() is None
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1:]
            moves[kind]()
            drawn = state.drawn()
            moved = [
                not torch.equal(before[0], torch.get_rng_state()),
                before[1] != random.getstate(),
                any(not np.array_equal(a, b) for a, b in zip(before[2], np.random.get_state()[1:], strict=True)),
            ]
            assert any(moved) == (drawn is not None)
            if drawn is not None:
                with drawn.replayed():
                    assert torch.equal(before[0], torch.get_rng_state())
                    assert before[1] == random.getstate()
                    assert all(np.array_equal(a, b) for a, b in zip(before[2], np.random.get_state()[1:], strict=True))


def test_the_state_of_the_default_generators_is_not_read_again_where_nobody_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    RngState()
    for kind in (rng._CpuSource, rng._PythonSource, rng._LegacyNumpySource):
        monkeypatch.setattr(kind, "state", lambda _: pytest.fail("it was read"))
    assert RngState().drawn() is None


def test_the_cpus_generator_alone_is_not_read_again_where_nobody_draws_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured region that draws on CUDA asks for it in each run."""
    torch.rand(1)
    before = RngState.of(torch.default_generator, "a region")
    expected = torch.rand(1)
    with before.replayed():
        assert torch.equal(torch.rand(1), expected)
    again = RngState.of(torch.default_generator, "a region")
    monkeypatch.setattr(rng._CpuSource, "state", lambda _: pytest.fail("it was read"))
    assert RngState.of(torch.default_generator, "a region").drawn() is again.drawn() is None


# Generators


class Draws(nn.Module):
    """A region that draws from ``generator``, got in one of many ways; ``around`` passes what is passed."""

    def __init__(self, inside: nn.Module, *args: Any, **kwargs: Any):
        super().__init__()
        self.inside = inside
        self.args, self.kwargs = args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, *self.args, **self.kwargs)


def masked(x: Tensor, generator: torch.Generator) -> Tensor:
    return (x * torch.rand(x.shape, generator=generator)).exp().sin()


def masked_globally(x: Tensor) -> Tensor:
    return masked(x, GENERATOR)


def by_attribute(generator: torch.Generator) -> nn.Module:
    return holding(lambda self, x: masked(x, self.generator), generator=generator)


def by_method(generator: torch.Generator) -> nn.Module:
    model = holding(lambda self, x: self.draw(x), generator=generator)
    type(model.inside).draw = lambda self, x: masked(x, self.generator)
    return model


def by_closure(generator: torch.Generator) -> nn.Module:
    return holding(lambda self, x: masked(x, generator))


def by_default(generator: torch.Generator) -> nn.Module:
    return holding(lambda self, x, drawn_from=generator: masked(x, drawn_from))


class Global(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return masked(x, GENERATOR)


class GlobalInHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return masked_globally(x)


class GlobalInMethod(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)

    def draw(self, x: Tensor) -> Tensor:
        return masked(x, GENERATOR)


class Config:
    def __init__(self, generator: torch.Generator):
        self.generator = generator


GENERATORS: dict[str, Callable[[torch.Generator], nn.Module]] = {
    "argument": lambda g: Draws(holding(lambda self, x, g: masked(x, g)).inside, g),
    "keyword": lambda g: Draws(holding(lambda self, x, g: masked(x, g)).inside, g=g),
    "in a list": lambda g: Draws(holding(lambda self, x, gs: masked(x, gs[0]["g"])).inside, [{"g": g}]),
    "in an object": lambda g: Draws(holding(lambda self, x, c: masked(x, c.generator)).inside, Config(g)),
    "attribute": by_attribute,
    "attribute of a submodule": lambda g: holding(lambda self, x: self.sub(x), sub=by_attribute(g)),
    "in a list attribute": lambda g: holding(lambda self, x: masked(x, self.generators[0]), generators=[g]),
    "in an object attribute": lambda g: holding(lambda self, x: masked(x, self.config.generator), config=Config(g)),
    "method": by_method,
    "closure": by_closure,
    "default": by_default,
    "global": lambda g: Draws(Global()),
    "global in a helper": lambda g: Draws(GlobalInHelper()),
    "global in a method": lambda g: Draws(GlobalInMethod()),
}


@both_actions
@pytest.mark.parametrize("way", one_in(2, list(GENERATORS)))
def test_a_generator_is_found_in_whichever_way_the_region_gets_it(way: str, action: str) -> None:
    generator = GENERATOR if "global" in way else torch.Generator()
    model, x = GENERATORS[way](generator), tokens()

    def run() -> list[Any]:
        generator.manual_seed(5)
        result = model(x)
        torch.rand(3, generator=generator)
        before = generator.get_state()
        grads = torch.autograd.grad(result.sum(), x)
        assert bits(generator.get_state()) == bits(before)
        return [bits(value) for value in (result, *grads)]

    expected = run()
    policed(model, action)
    assert run() == expected


def test_a_generator_that_a_module_gets_after_the_policy_was_applied_is_found() -> None:
    model, x = holding(lambda self, x: masked(x, self.generator), generator=None), tokens()

    def run() -> Any:
        return bits(torch.autograd.grad(model(x).sum(), x)[0])

    policed(model)
    model.inside.generator = torch.Generator().manual_seed(1)
    found = run()
    torch.manual_seed(0)
    mask = torch.rand(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((x * mask).exp().sin().sum(), x)
    assert found == bits(expected)


@both_actions
def test_a_module_that_comes_to_draw_only_after_the_policy_was_applied(action: str) -> None:
    """A schedule that raises a dropout's probability from nothing, say."""
    model = holding(lambda self, x: torch.sigmoid(F.dropout(x, self.p) if self.p > 0 else x), p=0.0)
    x = tokens()

    def run() -> list[Any]:
        torch.manual_seed(1)
        found = []
        for model.inside.p in (0.0, 0.5):
            found += torch.autograd.grad(model(x).sum(), x)
        return [bits(value) for value in (*found, torch.get_rng_state())]

    expected = run()
    model.inside.p = 0.0
    policed(model, action)
    assert run() == expected


def deep(x: Tensor) -> Tensor:
    return deeper(x)


def deeper(x: Tensor) -> Tensor:
    return masked(x, GENERATOR)


def test_a_generator_that_is_not_drawn_from_is_left_alone() -> None:
    class Guarded:
        """Counts how often its state is put back."""

        def __init__(self) -> None:
            self.sets = 0

        def get_states(self) -> dict[str, Any]:
            return {"a": torch.zeros(1)}

        def set_states(self, states: dict[str, Any]) -> None:
            self.sets += 1

    tracker, x = Guarded(), tokens()
    model = policed(holding(lambda self, x: F.dropout(x, 0.5).exp(), tracker=tracker))
    model(x).sum().backward()
    assert tracker.sets == 0


# Trackers, as in tensor parallelism


TRACKER = Tracker()


def get_tracker() -> Tracker:
    return TRACKER


def forked(x: Tensor, tracker: Tracker) -> Tensor:
    x = F.dropout(x, 0.5)
    with tracker.fork():
        return F.dropout(x, 0.5).exp().sin()


class ByAccessor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return forked(x, get_tracker())


TRACKERS: dict[str, Callable[[Tracker], nn.Module]] = {
    "argument": lambda t: Draws(holding(lambda self, x, t: forked(x, t)).inside, t),
    "attribute": lambda t: holding(lambda self, x: forked(x, self.tracker), tracker=t),
    "closure": lambda t: holding(lambda self, x: forked(x, t)),
    "accessor": lambda t: Draws(ByAccessor()),
}


@both_actions
@pytest.mark.parametrize("way", TRACKERS)
def test_a_trackers_forks_draw_the_same_numbers_again(way: str, action: str) -> None:
    tracker = TRACKER if way == "accessor" else Tracker()
    model, x = TRACKERS[way](tracker), tokens()

    def run() -> list[Any]:
        torch.manual_seed(2)
        tracker.states = {"model": torch.Generator().manual_seed(1).get_state()}
        result = model(x) + model(x)
        before = [tracker.states["model"].clone(), torch.get_rng_state()]
        grads = torch.autograd.grad(result.sum(), x)
        after = [tracker.states["model"], torch.get_rng_state()]
        assert [bits(state) for state in after] == [bits(state) for state in before]
        return [bits(value) for value in (result, *grads, *after)]

    expected = run()
    policed(model, action)
    assert run() == expected


# Other sources


def test_a_module_that_draws_in_training_only_may_be_put_under_a_policy_in_eval() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                x = x + torch.rand_like(x)
            return torch.sigmoid(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.noisy = Noisy()

        def forward(self, x: Tensor) -> Tensor:
            return self.noisy(x).sin()

    for action in ("checkpoint", "recompute"):
        model, x = Model(), tokens()

        def run(model: nn.Module = model, x: Tensor = x) -> Any:
            torch.manual_seed(4)
            return bits(torch.autograd.grad(model(x).sum(), x)[0])

        expected = run()
        model.eval()
        recompute.apply(model, policy(("noisy", action)))
        model.train()
        assert run() == expected


def test_regions_in_regions_draw_the_same_numbers_again() -> None:
    model = holding(lambda self, x: F.dropout(self.a(F.dropout(x, 0.5)), 0.5) + self.b(x))
    model.inside.a = holding(lambda self, x: F.dropout(x.exp(), 0.5).sin()).inside
    model.inside.b = holding(lambda self, x: F.dropout(x.sin(), 0.5) * torch.rand(())).inside
    rules = policy(("inside.a", "checkpoint"), ("inside.b", "recompute"), ("inside", "checkpoint"))
    assert_as_plain(model, rules, tokens())


# The unit itself


def test_drawn_says_which_sources_changed() -> None:
    idle, drawn = torch.Generator(), torch.Generator()
    state = RngState([idle, drawn])
    assert state.drawn() is None
    expected = torch.rand(2, generator=drawn)
    changed = state.drawn()
    assert changed is not None
    before = [generator.get_state() for generator in (idle, drawn)]
    with changed.replayed():
        assert torch.equal(torch.rand(2, generator=drawn), expected)
        torch.rand(1, generator=idle)
    assert not torch.equal(idle.get_state(), before[0]), "not drawn from, so not put back"
    assert torch.equal(drawn.get_state(), before[1])


def test_replayed_puts_states_back_after_an_error() -> None:
    state = RngState()
    torch.rand(1)
    changed = state.drawn()
    before = torch.get_rng_state()
    with pytest.raises(KeyError), changed.replayed():
        {}[torch.rand(5)]
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_and_trackers_are_sources_and_nothing_else_is() -> None:
    class Half:
        def get_states(self) -> None: ...

    own = random.Random(1)
    for source in (
        torch.Generator(),
        Tracker(),
        own,
        own.random,
        random.random,
        np.random.rand,
        np.random.default_rng(),
    ):
        assert is_random_source(source)
    for other in (Tracker, Half(), torch.zeros(1), None, nn.Linear(1, 1), torch, random.SystemRandom(), str.upper):
        assert not is_random_source(other)
