"""Random numbers: drawn from whatever source, by whatever way, they are the same ones when an op runs again."""

import contextlib
import functools
import operator
import random
import types
from random import random as drawn_by_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpus import OWN_LEGACY, OWN_NUMPY, OWN_PYTHON, OWN_TORCH, TRACKER, Body, both
from engine_testing import HIDDEN, RMSNorm, function_of, holding
from numpy.random import rand as numpy_by_name
from torch import nn

# What draws


def half_uniform(x):
    noise = torch.ones_like(x)
    noise[1:4].uniform_()
    return noise


def forked(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        noise = torch.rand_like(x)
    return F.dropout(x, 0.5) * noise


def tracked(x, tracker=TRACKER):
    x = F.dropout(x, 0.5)
    with tracker.fork():
        x = F.dropout(x, 0.5).exp()
    return F.dropout(x, 0.5).sin()


def reseeded(x):
    """Its second run ends where it began, as if nothing had been drawn."""
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    return x * (random.random() + float(np.random.rand()) + torch.rand(()))


def attention(x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0]


TORCHS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "uniform in place": lambda x: x * torch.empty(HIDDEN).uniform_(),
    "permutation": lambda x: x[torch.randperm(len(x))] * x,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x) * x,
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "thrice": lambda x: F.dropout(F.dropout(x, 0.3).exp() * torch.rand(()), 0.3),
}
"""What captured code draws, too."""
OTHERS = {
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.5, inplace=True),
    "feature dropout": lambda x: F.dropout1d(x[None], 0.5)[0],
    "normal in place": lambda x: x * torch.empty_like(x).normal_(),
    "uniform in place on a view": lambda x: x * half_uniform(x),
    "multinomial": lambda x: x[torch.multinomial(torch.ones(len(x)), 3)],
    "attention with dropout": attention,
    "seeded inside": lambda x: (torch.manual_seed(3), x * torch.rand_like(x))[1],
    "all seeded inside": reseeded,
    "forked inside": forked,
    "drawn and thrown away": lambda x: (torch.rand(5), F.dropout(x, 0.5))[1],
}


def drawing(function, captured=None):
    return Body(
        lambda self, x: self.linear(function(self.norm(x).sin()).exp().sin()),
        both,
        captured=captured,
        drops=function is not attention,
    )


def once(draw):
    """A forward whose gradient depends on what is drawn."""
    return lambda self, x: (x.sin() * draw()).exp().sin()


class FilledLate(torch.autograd.Function):
    """Saves memory that it fills only when all ops have run."""

    @staticmethod
    def forward(ctx, x):
        noise, result = torch.empty(x.shape), x.exp()
        ctx.save_for_backward(noise, result)
        noise.uniform_()
        noise[:2].numpy()[:] = 2.0
        return result

    @staticmethod
    def backward(ctx, grad):
        noise, result = ctx.saved_tensors
        return grad * noise * result


def fills_unseen(x, scratch):
    """As a kernel of one's own does it: no op tells that it writes into the results of others, and into an argument."""
    result = x * 0.0
    result.numpy()[:] = x.exp().numpy()
    scratch.numpy()[:] = 2.0
    return result


FilledUnseen = function_of(
    fills_unseen,
    lambda gradient, result, scratch: (gradient * result * scratch, None),
    saves=lambda result, x, scratch: (result, scratch),
)
LATE = {
    "rrelu": lambda self, x: F.rrelu(x, training=True),
    "rrelu in place": lambda self, x: F.rrelu_(x * 1.0, training=True),
    "rrelu twice": lambda self, x: self.act(self.act(x).sin()),
    "rrelu of positive numbers, which draws none": lambda self, x: F.rrelu(x.exp(), training=True),
    "rrelu in eval": lambda self, x: F.rrelu(x, training=False).exp(),
    "custom function": lambda self, x: FilledLate.apply(x),
    "custom kernel": lambda self, x: FilledUnseen.apply(x, x.detach().abs()),
    "batch norm": lambda self, x: self.batch(x).exp(),
}


def filled_late(name, last):
    """An op that fills what autograd has saved when it has run, in the middle of a region or at its end."""

    def forward(self, x):
        x = LATE[name](self, self.norm(x))
        return x if last else x.sin()

    return Body(forward, lambda: {"norm": RMSNorm(), "act": nn.RReLU(), "batch": nn.BatchNorm1d(HIDDEN)})


def in_some_runs(self, x):
    """A schedule that raises a dropout's probability from nothing, say."""
    return torch.sigmoid(F.dropout(x, 0.5) if self.step else x).exp().sin()


def in_later_runs(draw):
    return Body(lambda self, x: (x.sin() * (draw() if self.step else 1.0)).exp().sin())


def nested():
    return {
        "a": holding(lambda self, x: F.dropout(x.exp(), 0.5).sin()).inside,
        "b": holding(lambda self, x: F.dropout(x.sin(), 0.5) * torch.rand(())).inside,
    }


@torch.library.custom_op("recompute_tests::unsteady", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def unsteady(x: torch.Tensor) -> torch.Tensor:
    """Never the same twice, and no generator of torch's knows why."""
    return x * SOURCE.random()


SOURCE = random.Random(0)


unsteady.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0] / ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[0]),
)


def filled_unseen(x):
    """Memory that something other than an op fills, with other numbers each time."""
    noise = torch.empty(x.shape)
    noise.numpy()[:] = SOURCE.random()
    return noise


UNSTEADY = {
    "an op that is not deterministic": unsteady,
    "a number from Python": lambda y: y * SOURCE.random(),
    "memory filled unseen": lambda y: y * filled_unseen(y),
    "another shape": lambda y: y[: SOURCE.randrange(1, 6)],
    "another path": lambda y: functools.reduce(lambda y, _: y.sin(), range(SOURCE.randrange(2, 6)), y),
}
"""What would not come out the same: a tape keeps it, and runs no Python again."""


def kept(draw):
    return Body(
        lambda self, x: draw(self.linear(self.norm(x))).exp().sin(),
        both,
        start=lambda module: SOURCE.seed(3),
        state=lambda module: SOURCE.getstate(),
        ways=("recompute",),
    )


DRAWS = {
    **{f"unsteady, {name}": kept(draw) for name, draw in UNSTEADY.items()},
    **{name: drawing(each, captured=True) for name, each in TORCHS.items()},
    **{name: drawing(each) for name, each in OTHERS.items()},
    **{f"{op}, {'last' if last else 'in the middle'}": filled_late(op, last) for op in LATE for last in (False, True)},
    "Python's": Body(once(random.random), captured=False),
    "NumPy's": Body(lambda self, x: (x.sin() * torch.from_numpy(np.random.rand(*x.shape)).float()).exp().sin()),
    "NumPy's, a number": Body(once(lambda: float(np.random.rand())), captured=False),
    "in later steps": Body(in_some_runs),
    "in a later step, from Python": in_later_runs(random.random),
    "in a later step, from NumPy": in_later_runs(lambda: float(np.random.randn())),
    "in several parts": Body(lambda self, x: F.dropout(self.a(F.dropout(x, 0.5)), 0.5) + self.b(x), nested),
    "in training alone": Body(lambda self, x: (x + torch.rand_like(x) if self.training else x).exp().sin()),
}

# How a region gets at what it draws from


def masked(x, generator=OWN_TORCH):
    return (x * torch.rand(x.shape, generator=generator)).exp().sin()


class Deep(nn.Module):
    def forward(self, x):
        return self.draw(x)

    def draw(self, x):
        return masked(x, OWN_TORCH)


def get_tracker():
    return TRACKER


def of_an_attribute(**parts):
    return lambda: dict(parts)


HELD = SimpleNamespace(generator=OWN_TORCH)
WAYS = {
    "argument": Body(lambda self, x, g: masked(x, g), given=lambda x: (x, OWN_TORCH)),
    "keyword": Body(lambda self, x, g: masked(x, g), given=lambda x: {"x": x, "g": OWN_TORCH}),
    "in a list": Body(lambda self, x, gs: masked(x, gs[0]["g"]), given=lambda x: (x, [{"g": OWN_TORCH}])),
    "in an object": Body(lambda self, x, held: masked(x, held.generator), given=lambda x: (x, HELD)),
    "attribute": Body(lambda self, x: masked(x, self.generator), of_an_attribute(generator=OWN_TORCH)),
    "attribute, as captured code": Body(
        lambda self, x: x * torch.rand(HIDDEN, generator=self.g), of_an_attribute(g=OWN_TORCH), captured=False
    ),
    "attribute of a submodule": Body(
        lambda self, x: self.sub(x),
        lambda: {"sub": holding(lambda self, x: masked(x, self.generator), generator=OWN_TORCH).inside},
    ),
    "attribute that comes later": Body(
        lambda self, x: masked(x, self.generator),
        of_an_attribute(generator=None),
        start=lambda module: setattr(module, "generator", OWN_TORCH),
    ),
    "in a list attribute": Body(lambda self, x: masked(x, self.all[0]), of_an_attribute(all=[OWN_TORCH])),
    "in an object attribute": Body(lambda self, x: masked(x, self.held.generator), of_an_attribute(held=HELD)),
    "closure": Body((lambda g: lambda self, x: masked(x, g))(OWN_TORCH)),
    "default": Body(lambda self, x, drawn_from=OWN_TORCH: masked(x, drawn_from)),
    "global": Body(lambda self, x: masked(x, OWN_TORCH)),
    "global in a helper": Body(lambda self, x: masked(x)),
    "global in a method": Body(lambda self, x: self.deep(x), lambda: {"deep": Deep()}),
    "several": Body(
        lambda self, x, g: F.dropout(masked(masked(x, g)), 0.5), given=lambda x: (x, torch.default_generator)
    ),
    "a tracker in an argument": Body(lambda self, x, t: tracked(x, t), given=lambda x: (x, TRACKER)),
    "a tracker in an attribute": Body(lambda self, x: tracked(x, self.tracker), of_an_attribute(tracker=TRACKER)),
    "a tracker in a closure": Body((lambda t: lambda self, x: tracked(x, t))(TRACKER)),
    "a tracker by an accessor": Body(lambda self, x: tracked(x, get_tracker())),
}


def python_in_a_helper():
    return random.random()


class Sampler:
    """Generators that it owns, and others that it does not own."""

    own = OWN_PYTHON

    def draw(self):
        return random.gauss(0, 1)

    def draw_own(self):
        return self.own.random()

    @property
    def drawn(self):
        return self.own.random()

    def __call__(self):
        return self.draw_own()

    def scaled(self, factor):
        return self.own.random() * factor

    doubled = functools.partialmethod(scaled, 2.0)


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("own",)

    def __init__(self):
        self.own = OWN_NUMPY

    def draw(self):
        return float(self.own.random())


SAMPLER, SLOTTED = Sampler(), Slotted()
FUNCTIONS = {"uniform": lambda: random.uniform(0, 1), "own": lambda: OWN_PYTHON.random()}
LIBRARY = types.ModuleType("a_library_of_somebody")
LIBRARY.own = OWN_PYTHON
exec("import random\ndef draw():\n    return random.betavariate(2, 3)\nclass Inside:\n    rng = own", vars(LIBRARY))


@functools.cache
def cached_sampler():
    return SAMPLER


@contextlib.contextmanager
def noisy():
    yield OWN_LEGACY.randn()


def with_context():
    with noisy() as drawn:
        return drawn


HELPERS = {
    "a helper": python_in_a_helper,
    "a helper's helper": lambda: python_in_a_helper(),
    "a name": lambda: drawn_by_name(),
    "NumPy by name": lambda: float(numpy_by_name()),
    "NumPy two calls deep": lambda: (lambda: float(np.random.rand()))(),
    "a lambda in a dict": lambda: FUNCTIONS["uniform"](),
    "another object's method": lambda: SAMPLER.draw(),
    "a library's function": lambda: LIBRARY.draw(),
    "a module imported inside": lambda: float(__import__("numpy").random.standard_normal()),
    "getattr": lambda: getattr(random, "ran" + "dom")(),
    "a shuffle": lambda: random.sample(range(100), 3)[0] / 100,
    "both": lambda: random.random() + float(np.random.rand()),
    "every second normal number of NumPy": lambda: float(np.random.randn()),
    "every second normal number of Python": lambda: random.gauss(0, 1),
    "a generator of Python": lambda: OWN_PYTHON.random(),
    "a generator of NumPy": lambda: float(OWN_NUMPY.random()),
    "a generator of NumPy of old, every second": lambda: float(OWN_LEGACY.randn()),
    "a generator of torch": lambda: float(torch.rand((), generator=OWN_TORCH)),
    "an object's generator": lambda: SAMPLER.draw_own(),
    "an object's generator, when it is called": lambda: SAMPLER(),
    "an object's generator, by a property": lambda: SAMPLER.drawn,
    "an object's generator, in a slot": lambda: SLOTTED.draw(),
    "a generator in a dict of functions": lambda: FUNCTIONS["own"](),
    "a library's generator": lambda: LIBRARY.Inside.rng.random(),
    "a generator behind a cache": lambda: cached_sampler().draw_own(),
    "a generator behind a context manager": with_context,
    "a generator behind a partial": functools.partial(lambda sampler: sampler.draw_own(), SAMPLER),
    "a generator behind a partial method": lambda: SAMPLER.doubled(),
    "a generator behind a method made of a partial": types.MethodType(
        functools.partial(lambda factor, sampler: sampler.scaled(factor), 2.0), SAMPLER
    ),
}


MOVES = {
    "integers": lambda: torch.randint(7, (1,)),
    "normal numbers of float64": lambda: torch.randn(2, dtype=torch.float64),
    "a state of torch's": lambda: torch.set_rng_state(torch.Generator().manual_seed(5).get_state()),
    "Python's bits": lambda: random.getrandbits(8),
    "Python's seed": lambda: random.seed(3),
    "Python's state": lambda: random.setstate(random.Random(4).getstate()),
    "NumPy's seed": lambda: np.random.seed(3),
    "NumPy's state": lambda: np.random.set_state(np.random.RandomState(4).get_state()),
    "624 words": lambda: np.random.bytes(624 * 4),
    "a binomial number": lambda: np.random.binomial(10, 0.5),
}


def moved(move):
    """Also what a generator holds back is as it was: every second normal number, which the first one draws."""

    def forward(self, x):
        before = random.gauss(0, 1) + np.random.randn()
        move()
        return (F.dropout(x, 0.5) * (before + random.gauss(0, 1) + np.random.randn())).exp().sin()

    return Body(forward)


def passed(given):
    """What a generator draws that is passed in one way or another."""
    if isinstance(given, (list, dict)):
        return passed(next(iter(given.values() if isinstance(given, dict) else given)))
    if isinstance(given, Sampler):
        return given.draw_own()
    return given() if callable(given) else float(given.random())


PASSED = {
    "Python's": lambda: OWN_PYTHON, "NumPy's": lambda: OWN_NUMPY, "an object": lambda: SAMPLER,
    "a list of objects": lambda: [SAMPLER], "a dict": lambda: {"rng": OWN_PYTHON},
    "a method": lambda: OWN_PYTHON.random, "a function": lambda: FUNCTIONS["own"],
}  # fmt: skip


class Untouched:
    """Counts how often its states are put back."""

    sets = 0

    def get_states(self):
        return {"a": torch.zeros(1)}

    def set_states(self, states):
        self.sets += 1


class HalfATracker:
    def get_states(self):
        pytest.fail("it has no states to put back")


CALLABLES = {
    "function_in_c": len,
    "op": torch.sin,
    "bound_function_in_c": [].append,
    "partial_of_a_function_in_c": functools.partial(len, ()),
    "method_made_of_a_function_in_c": types.MethodType(len, ()),
    "method_made_of_a_method": types.MethodType(types.MethodType(max, 1), 2),
    "method_made_of_a_partial": types.MethodType(functools.partial(print, "int8"), 1),
    "method_made_of_an_object": types.MethodType(SAMPLER, 1),
    "a_class": Sampler,
    "an_object": operator.itemgetter(0),
    "ufunc": np.sin,
    "cached_function": functools.cache(len),
    "generic_function": functools.singledispatch(len),
    "op_of_the_dispatcher": torch.ops.aten.sin.default,
}


@contextlib.contextmanager
def permuted():
    """Another bit generator in the place of NumPy's own."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        yield
    finally:
        np.random.set_bit_generator(before)


def with_a_hook():
    linear = nn.Linear(HIDDEN, HIDDEN)
    linear.register_forward_hook(lambda module, args, result: result * SAMPLER.draw_own())
    return {"linear": linear}


REACHED = {
    **WAYS,
    **{f"moved by {name}": moved(move) for name, move in MOVES.items()},
    **{f"by {name}": Body(once(lambda draw=draw: draw())) for name, draw in HELPERS.items()},
    **{
        f"given {name}": Body(
            lambda self, x, given: (x.sin() * passed(given)).exp().sin(), given=lambda x, make=make: (x, make())
        )
        for name, make in PASSED.items()
    },
    "by another bit generator of NumPy's": Body(once(np.random.rand), around=permuted, around_backward=permuted),
    "by a hook alone": Body(lambda self, x: self.linear(x).exp().sin(), with_a_hook),
    "by a part's method": Body(
        lambda self, x: self.sampler[0].scaled(2.0) * x.sin().exp(), of_an_attribute(sampler=[SAMPLER])
    ),
    "none, beside whatever can be called": Body(lambda self, x: x.sin().exp().sin(), lambda: dict(CALLABLES)),
    "none, beside a generator that has no state": Body(
        lambda self, x: (x * 2.0).exp().sin(), lambda: {"secure": random.SystemRandom(), "half": HalfATracker()}
    ),
    "none of a tracker that is left alone": Body(
        lambda self, x: F.dropout(x, 0.5).exp().sin(),
        lambda: {"tracker": Untouched()},
        state=lambda module: module.tracker.sets,
    ),
    "a generator that takes the place of another": Body(
        lambda self, x: (x.sin() * self.sampler.random()).exp().sin(),
        lambda: {"sampler": random.Random(4)},
        start=lambda module: setattr(module, "sampler", random.Random(4)),
        state=lambda module: module.sampler.getstate(),
    ),
    "a generator of NumPy that does": Body(
        lambda self, x: (x.sin() * self.sampler.random()).exp().sin(),
        lambda: {"sampler": np.random.default_rng(4)},
        start=lambda module: setattr(module, "sampler", np.random.default_rng(4)),
        state=lambda module: module.sampler.bit_generator.state,
    ),
}
