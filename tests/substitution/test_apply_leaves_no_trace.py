"""``apply`` runs nobody's Python: what a model has and reads is afterwards what it was."""

import collections
import functools
import inspect
import io
import random

import numpy
import pytest
import torch
from engine_testing import function_of
from tiers import one_in
from tiny import rule, rules
from torch import nn

import recompute

CALLS = []
COUNTS = {"calls": 0}
FILE = io.StringIO()
CALLED = 0


@functools.lru_cache
def scale_for(width):
    CALLS.append(width)
    return 1.0 / width


def note(x):
    CALLS.append(x.shape)
    return x


class Meter:
    def __init__(self):
        self.count = 0

    def update(self):
        self.count += 1

    def __mul__(self, other):
        self.count += 1
        return other * 2

    __rmul__ = __mul__


Noting = function_of(lambda x: (CALLS.append(1), x.tanh())[1], lambda gradient: gradient, saves=lambda *_: ())


class Module(nn.Module):
    """An MLP with state of many kinds."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()
        self.register_buffer("steps", torch.zeros(()))
        self.past = collections.deque(maxlen=3)
        self.list = []
        self.dict = {}
        self.set = set()
        self.array, self.tensor, self.count = numpy.ones(8, dtype=numpy.float32), torch.ones(8), 0
        self.meter, self.iterator = Meter(), iter(range(1000))
        self.default = collections.defaultdict(int)
        self.generator = (each for each in range(1000))

    @property
    def counted(self):
        self.count += 1
        return self.count

    @functools.cached_property
    def cached(self):
        return 1

    def _count(self):
        self.count += 1


EFFECTS = {
    "an attribute": "self.last = x",
    "a count": "self.count += 1",
    "an array": "self.array += 0.1",
    "an array by another name": "array = self.array; array += 0.1",
    "a tensor by another name": "tensor = self.tensor; tensor += 1",
    "an item": "self.dict['last'] = x",
    "a deleted item": "del self.dict['first']",
    "a global": "global CALLED; CALLED += 1",
    "one that it would hide": """
    try:
        self.list.append(x)
    except Exception:
        return""",
    "a step of an iterator": "for _ in self.iterator: break",
    "steps of a generator": "_, *_ = self.generator",
    "an operator in Python": "self.meter * 2",
    "a block": "with torch.no_grad(), FILE: pass",
    "a target of a loop": "for self.count in (1, 2): pass",
    "an import": "import this",
    "a deque of past values": "self.past.append(x.detach().mean())",
    "a list": "self.list.append(x)",
    "a list of a global": "CALLS.append(1)",
    "a dict of a global": "COUNTS.update(calls=COUNTS['calls'] + 1)",
    "a set": "self.set.add(x.shape[-1])",
    "a default": "self.default['x']",
    "a helper": "note(x)",
    "a partial": "functools.partial(note, x)()",
    "a cached helper": "scale_for(8)",
    "a property": "self.counted",
    "a cached property": "self.cached",
    "getattr": "getattr(self, 'counted')",
    "setattr": "setattr(self, 'count', 1)",
    "vars": "vars(self).update(count=1)",
    "a method": "self._count()",
    "a method of an object": "self.meter.update()",
    "a method of a class": "list.append(self.list, x)",
    "print": "print(x, file=FILE)",
    "a file": "FILE.write('x')",
    "next": "next(self.iterator)",
    "a list of what is left": "list(self.iterator)",
    "a generator given to a function": "sum(self.generator)",
    "a lambda": "(lambda: CALLS.append(1))()",
    "a comprehension": "[CALLS.append(each) for each in (1, 2)]",
    "a generator expression": "any(CALLS.append(each) for each in (1, 2))",
    "a key": "sorted((1, 2), key=CALLS.append)",
    "a call for each": "list(map(CALLS.append, (1, 2)))",
    "a draw": "random.random()",
    "a draw of numpy": "numpy.random.rand()",
    "an array's own operation": "numpy.add(self.array, 1, out=self.array)",
    "an array's method": "self.array.fill(2.0)",
    "a tensor in place": "self.tensor.add_(1)",
    "a buffer in place": "self.steps.add_(1)",
    "a buffer's data": "self.steps.data.fill_(3)",
    "an output given": "torch.add(self.tensor, 1, out=self.tensor)",
    "a hook": "self.up.register_forward_hook(print)",
    "a mode": "self.up.eval()",
    "a parameter": "nn.init.zeros_(self.up.weight)",
    "a switch of torch": "torch.set_grad_enabled(True)",
    "a seed": "torch.manual_seed(0)",
    "a Function": "Noting.apply(x)",
}
"""What a forward does first, beside what it computes."""


def with_effect(effect):
    """An MLP whose forward has the effect first."""
    found = {}
    exec(f"def body(self, x):\n    {EFFECTS[effect]}", globals(), found)
    body = found["body"]

    def forward(self, x):
        body(self, x)
        return self.down(self.act(self.up(x)))

    return type("Kind", (Module,), {"forward": forward})()


def state_of(module):
    """All that an effect could change, as text."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    module_state = [values, module.state_dict(), vars(module.meter), module.iterator.__reduce__()]
    module_state += [inspect.getgeneratorstate(module.generator), module.up._forward_hooks, module.up.training]
    ours = [CALLS, COUNTS, CALLED, FILE.closed or FILE.tell(), scale_for.cache_info()]
    draws = [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return repr([module_state, ours, hash(repr(draws))])


@pytest.fixture(autouse=True)
def _as_at_first():
    global FILE
    FILE = io.StringIO()
    yield
    CALLS.clear()
    scale_for.cache_clear()


@pytest.mark.parametrize("effect", one_in(6, list(EFFECTS)))
def test_nobody_can_tell_by_an_effect_that_a_policy_was_applied(effect):
    torch.manual_seed(0)
    module = with_effect(effect)
    module.dict["first"] = 1
    model = nn.Sequential(module, nn.Linear(8, 8))
    before = state_of(module)
    for via in ("auto", "kernel"):
        recompute.apply(model, rules(rule("Kind", "recompute", via=via))).remove()
    assert state_of(module) == before
