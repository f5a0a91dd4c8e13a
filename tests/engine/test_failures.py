"""What goes wrong goes wrong as in plain eager, or earlier and by name; and it leaves nothing behind."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    RMSNorm,
    assert_as_without,
    bits,
    every_tape,
    holding,
    policed,
    tokens,
)
from torch import Tensor, nn

from recompute.errors import RegenerationError

# What does not run the same way twice


def changing(forward):
    """A region whose ``forward`` is told how often it has run, by something that no engine can know of."""
    runs = itertools.count(1)  # its state is in C
    return policed(holding(lambda self, x: forward(x, next(runs))))


def test_a_refused_regeneration_leaves_nothing_behind_and_the_next_model_step_works():
    model, x = changing(lambda x, run: F.dropout(x[: 3 if run in (2, 3) else 5], 0.5).exp().sum()), tokens()
    result = model(x)
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError):
        result.backward()
    assert bits(torch.get_rng_state()) == before
    model(x).backward()


def _one_more(x, run):
    if run == 2:
        (x * 2).exp()
    return (x * 3).exp().sin().sum()


DRIFTS = {
    "shape": (lambda x, run: x[: 5 if run == 1 else 3].exp().sum(), r"\(5, 8\).*\(3, 8\).*exp"),
    "dtype": (lambda x, run: x.to(torch.float64 if run == 1 else x.dtype).exp().sum(), r"float64.*float32.*exp"),
    "other tensor": (lambda x, run: (x if run == 1 else x * 1).cos().exp().sin().sum(), r"tensor 0 .*\(6, 8\).*cos"),
    "fewer": (lambda x, run: _repeat(torch.cos, 3 if run == 1 else 2, x.exp()).sum(), r"4 tensors in forward, 3 "),
    "one more ahead of the others, of the same shape": (_one_more, ""),
    "another op": (lambda x, run: (x * 3 if run == 1 else x[:, :1].exp() * x).exp().sum(), r"\(6, 8\).*\(6, 1\).*exp"),
}


def _repeat(function, times, x):
    for _ in range(times):
        x = function(x)
    return x


@pytest.mark.parametrize("kind", DRIFTS)
def test_checkpoint_refuses_a_region_that_saves_something_else_and_shows_both(kind):
    forward, message = DRIFTS[kind]
    model = changing(forward)
    result = model(tokens())
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError, match=rf"(?s)inside.*{message}"):
        result.backward()
    assert bits(torch.get_rng_state()) == before


@torch.library.custom_op("recompute_tests::unsteady", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def unsteady(x: Tensor) -> Tensor:
    """Never the same twice, and no generator of torch's knows why."""
    return x * SOURCE.random()


SOURCE = random.Random(0)


unsteady.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0] / ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[0]),
)


def _unseen(x):
    """Memory that something other than an op fills, with other numbers each time."""
    noise = torch.empty(x.shape)
    noise.numpy()[:] = SOURCE.random()
    return noise


UNSTEADY = {
    "an op that is not deterministic": lambda self, x: unsteady(self.linear(self.norm(x))).exp().sin(),
    "a number from Python": lambda self, x: (self.linear(self.norm(x)) * SOURCE.random()).exp().sin(),
    "memory filled unseen": lambda self, x: (self.linear(self.norm(x)) * _unseen(x)).exp().sin(),
    "another shape": lambda self, x: self.linear(self.norm(x))[: SOURCE.randrange(1, 6)].exp().sin(),
    "another path": lambda self, x: _repeat(torch.sin, SOURCE.randrange(2, 6), self.linear(self.norm(x))),
}


@every_tape
@pytest.mark.parametrize("kind", UNSTEADY)
def test_the_tape_keeps_what_would_not_come_out_the_same(rules, kind):
    model = holding(UNSTEADY[kind], linear=nn.Linear(HIDDEN, HIDDEN), norm=RMSNorm())
    x = tokens()

    def run(model):
        SOURCE.seed(3)
        result = model(x)
        drawn = SOURCE.getstate()
        grads = [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]
        assert SOURCE.getstate() == drawn, "no Python runs again"
        return result, grads

    assert_as_without(model, rules, run)
