"""Random numbers: a region draws the same ones again, whatever from, and backward leaves no trace in any stream."""

import gc
import random
from random import gauss

import numpy as np
import sympy
import torch.nn.functional as F
from engine_testing import CPU, holding, policed, tokens

from recompute.counters import memory_trace
from recompute.engine import rng
from recompute.engine.reachable_objects import Walk, find_generators
from recompute.engine.rng import RngState


def test_random_state_is_held_only_by_regions_that_draw():
    def held(probability):
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


def states_alive():
    return sum(type(value) is RngState for value in gc.get_objects())


def test_python_and_numpy_are_read_only_where_code_names_them(monkeypatch):
    """To read them takes 50 us, which a region that leaves them alone does not pay."""
    reads = []
    read = rng.RandomSource.state  # torch's own sources have another
    monkeypatch.setattr(rng.RandomSource, "state", lambda self: (reads.append(1), read(self))[1])
    forwards = {
        lambda self, x: x.exp().sin(): False,
        lambda self, x: (x * np.random.rand()).exp().sin(): True,
        lambda self, x: (x * gauss(0, 1)).exp().sin(): True,
    }
    for forward, is_read in forwards.items():
        model = policed(holding(forward))
        reads.clear()
        model(tokens()).sum().backward()
        assert bool(reads) == is_read


def test_the_search_for_generators_runs_no_code_and_ends():
    own = random.Random(1)

    class Trap:
        rng = own

        @property
        def touched(self):
            raise AssertionError("a property was run")

        def __getattr__(self, name):
            raise AssertionError("an attribute was asked for")

        def again(self):
            return self.again().touched, self.rng

    trap = Trap()
    trap.__dict__["me"] = [trap, {"me": trap}]

    def function():
        return trap.touched, trap.again(), trap.me, function()

    assert find_generators([function]) == [own]


def test_the_search_does_not_enter_the_packages_that_torch_is_made_of():
    assert len(Walk([lambda x: (np.linalg.norm(x), sympy.solve(x))]).globals) == 2
