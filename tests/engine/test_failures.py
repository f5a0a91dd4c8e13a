"""What goes wrong goes wrong as in plain eager, or earlier and by name; and it leaves nothing behind."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    bits,
    holding,
    policed,
    tokens,
)

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
