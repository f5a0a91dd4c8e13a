"""Ops of other libraries: what they draw is drawn again, whether they say so or not, and their effects happen once."""

import copy
import random

import numpy as np
import pytest
import torch
from engine_testing import bits, both_actions, holding, policed, tokens
from tiers import one_in, slow
from torch import Tensor, nn
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

import recompute

STEPS = 9  # the first ones by the tape or as a checkpoint, the later ones as captured code
LATE = 7
"""The step from which on an op that draws late does draw."""
OWN_TORCH, OWN_PYTHON = torch.Generator(), random.Random(1)
RUNS = []
now = 0
"""The step that runs."""


def fresh():
    return torch.Generator().manual_seed(int(torch.randint(1000, ())))


DRAWS = {
    "torch": torch.rand_like,
    "python": lambda x: random.random(),
    "numpy": lambda x: np.random.randn(),
    "several": lambda x: torch.rand_like(x) * random.random() * np.random.rand(),
    "own": lambda x: torch.rand(x.shape, generator=OWN_TORCH),
    "own_of_python": lambda x: OWN_PYTHON.random(),
    "made_inside": lambda x: torch.rand(x.shape, generator=fresh()),
    "seeded": lambda x: (torch.manual_seed(3), torch.rand_like(x))[1],
    "late": lambda x: torch.rand_like(x) if now >= LATE else 1.5,
    "late_of_numpy": lambda x: np.random.rand() if now >= LATE else 1.5,
}


def library_op(name, function, result="Tensor", **options):
    op = torch.library.custom_op(
        f"library_ops_test::{name}", function, mutates_args=(), schema=f"(Tensor x) -> {result}", **options
    )
    op.register_fake(lambda x: torch.empty_like(x) if result == "Tensor" else 1 if result == "int" else None)
    if result == "Tensor":
        op.register_autograd(
            lambda ctx, grad: grad * ctx.saved_tensors[0],
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
        )
    return op


def drawing(draw):
    return lambda x: x * draw(x)


def noting(name, gives):
    return lambda x: (RUNS.append(name), gives(x))[1]


NOISE = {name: library_op(name, drawing(draw)) for name, draw in DRAWS.items()}
LIBRARY = torch.library.Library("library_ops_test", "FRAGMENT")
LIBRARY.define("implemented(Tensor x) -> Tensor")
LIBRARY.impl("implemented", drawing(DRAWS["several"]), "CompositeExplicitAutograd")
torch.library.register_autograd(
    "library_ops_test::implemented",
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
NOISE["implemented"] = torch.ops.library_ops_test.implemented
NOISE["tagged"] = library_op("tagged", drawing(DRAWS["several"]), tags=(torch.Tag.nondeterministic_seeded,))
EFFECTS = {
    "registered": library_op("registered", noting("registered", lambda x: x * 2)),
    "gives nothing": library_op("nothing", noting("gives nothing", lambda x: None), "()"),
    "gives a number": library_op("number", noting("gives a number", lambda x: 1), "int"),
}


@pytest.fixture(autouse=True)
def registered():
    handle = _register_effectful_op(torch.ops.library_ops_test.registered.default, _EffectType.ORDERED)
    yield
    handle.destroy()


def steps(model):
    """Training steps, each of two forwards in front of their backwards: gradients, streams, and what ran."""
    global now
    found = []
    for now in range(STEPS):
        torch.manual_seed(now)
        random.seed(now)
        np.random.seed(now)
        OWN_TORCH.manual_seed(now)
        OWN_PYTHON.seed(now)
        RUNS.clear()
        x = tokens()
        losses = [model(x).sum(), model(x).sum()]
        torch.rand(2)
        found += [bits(torch.autograd.grad(loss, x)[0]) for loss in losses]
        found += [list(RUNS), random.random(), np.random.randn(), OWN_PYTHON.random()]
        found += [bits(generator.get_state()) for generator in (torch.default_generator, OWN_TORCH)]
    return found


@both_actions
@pytest.mark.parametrize("name", one_in(2, list(NOISE)))
def test_what_an_op_draws_it_draws_again(name, action):
    model = holding(lambda self, x: (NOISE[name](x.sigmoid()).exp() * x).tanh())
    expected = steps(model)
    assert steps(policed(model, action)) == expected


def by_its_kind(self, x):
    h = x.sigmoid()
    result = EFFECTS[self.kind](h if self.kind == "registered" else h.detach())
    return ((result if isinstance(result, Tensor) else h).exp() * x).tanh()


def late(self, x):
    self.runs += 1
    return by_its_kind(self, x) if self.runs % 5 == 4 else (x.sigmoid().exp() * x).tanh()


# A checkpoint runs Python again. Of effects that are not registered it sees those of its first run.
HAPPENING = [(kind, forward, "recompute") for kind in EFFECTS for forward in (by_its_kind, late)]
HAPPENING += [("registered", by_its_kind, "checkpoint"), ("registered", late, "checkpoint")]
HAPPENING += [("gives nothing", by_its_kind, "checkpoint")]


@pytest.mark.parametrize(("kind", "forward", "action"), HAPPENING)
def test_an_effect_happens_once(kind, forward, action):
    model = holding(forward, kind=kind, runs=0)
    under = policed(copy.deepcopy(model), action)
    assert steps(under) == steps(model)


def test_a_checkpoint_around_an_effect_drops_what_is_around_it():
    model = holding(lambda self, x: EFFECTS["registered"](x.sigmoid().exp().sin()).exp().sin())
    with recompute.apply(model, {"rules": [{"match": "inside", "action": "checkpoint"}]}) as handle:
        x = tokens()
        for _ in range(2):
            model(x).sum().backward()
        assert handle.stats().dropped_tensors > 0
        assert handle.stats().regenerations > 0


def test_a_function_under_a_checkpoint_runs_an_effect_once():
    def function(x):
        return (EFFECTS["registered"](x.sigmoid()).exp() * x).tanh()

    expected = steps(function)
    assert steps(recompute.recompute(function, policy={"rules": [{"match": "**", "action": "checkpoint"}]})) == expected


class Layer(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.up, self.op = nn.Linear(8, 8), op

    def forward(self, x):
        h = self.up(x).sigmoid()
        return (COMPILED[self.op](h).exp() * h).tanh()


COMPILED = {"a draw": NOISE["torch"], "an effect": EFFECTS["registered"]}


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("op", COMPILED)
def test_in_compiled_code_no_op_of_a_library_runs_again(op, action):
    """Nobody sees there what it draws."""
    model = nn.Sequential(Layer(op), Layer(op))
    under = copy.deepcopy(model)
    rule = {"type": "Layer", "action": action, **({"via": "hook"} if action == "recompute" else {})}
    recompute.apply(under, {"rules": [rule]})
    found = []
    for each in (model, torch.compile(under, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(1)
        RUNS.clear()
        x = tokens(4, 8)
        each(x).sum().backward()
        found.append((bits(x.grad), len(RUNS)))
    assert found[0] == found[1]
