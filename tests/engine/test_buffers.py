"""Tensors that change between a region's forward and its backward, wherever they live; bodies.buffers has others."""

import copy

import pytest
import torch
from bodies import BODIES
from corpus import FEW_STEPS, assert_as_plain
from engine_testing import HIDDEN, SETTINGS, Census, bits, governing, holding, module_of, tokens
from torch import nn

import recompute
from recompute.engine.bit_comparison import verifying
from recompute.engine.cut.save_plan import LARGEST_COPY
from recompute.errors import MutationError


@pytest.mark.parametrize("name", [name for name in BODIES if name.startswith("buffer: of ")])
def test_a_buffer_of_any_dtype_that_is_a_view_of_others_memory_verifies(name):
    with verifying():
        assert_as_plain(BODIES[name], SETTINGS["recompute"], FEW_STEPS)


def _gradients(model, result, **options):
    return [bits(grad) for grad in torch.autograd.grad(result.sum(), list(model.parameters()), **options)]


def test_one_buffer_of_two_regions_and_of_what_is_between_them():
    buffer = torch.zeros(HIDDEN)

    def forward(self, x):
        buffer.lerp_(x.detach().mean(0), 0.5)
        z = (self.linear(x) - buffer).exp()
        return z.sin() * z.tanh()

    def step(model):
        buffer.zero_()
        total = torch.stack([model(x).sum() for x in inputs])
        return _gradients(model, total)

    def between_forward(self, x):
        buffer.mul_(0.5)
        return x + buffer

    parts = [module_of(forward, linear=nn.Linear(HIDDEN, HIDDEN)) for _ in range(2)]
    plain = nn.Sequential(parts[0], module_of(between_forward), parts[1])
    model, inputs = copy.deepcopy(plain), [tokens() for _ in range(3)]
    expected = step(plain)
    recompute.apply(model, governing(SETTINGS["recompute"], "0", "2"))
    assert step(model) == expected
    assert step(model) == expected


def test_a_tensor_that_is_too_large_to_copy_is_refused_if_it_changes_and_held_without_a_copy():
    def forward(self, x):
        y = self.linear(x)
        return y.sin() + ((y - self.table).exp() + (y + self.table).exp()).tanh()

    plain = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    most = LARGEST_COPY // (HIDDEN * 4)
    for rows in (most, most + 1):
        plain.inside.register_buffer("table", torch.rand(rows, HIDDEN))
        model, x = copy.deepcopy(plain), tokens(rows, HIDDEN)
        expected = _gradients(plain, plain(x))
        recompute.apply(model, governing(SETTINGS["recompute"]))
        with Census() as census:
            result = model(x)
        fits = rows == most
        assert census.alive_nbytes() == (3 if fits else 2) * x.nbytes, (
            "the projection, the result, and a copy if it fits"
        )
        model.inside.table.mul_(2.0)
        if fits:
            assert _gradients(model, result) == expected
        else:
            with pytest.raises(MutationError, match=rf"^in .*\({rows}, 8\).*modified in place after it was saved"):
                _gradients(model, result)


def test_what_autograd_saved_is_refused_though_a_copy_is_held_for_what_runs_again():
    def forward(self, x):
        z = (self.linear(x) - self.average).exp()
        return z.sin() * z.tanh() + x * self.average

    def step(model):
        x = tokens()
        result = model(x)
        model.inside.average.add_(1.0)
        found = _gradients(model, result, retain_graph=True)  # for which the average is not needed
        with pytest.raises(RuntimeError, match=r"modified"):
            torch.autograd.grad(result.sum(), x)
        return found

    plain = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    plain.inside.register_buffer("average", torch.rand(HIDDEN))
    model = copy.deepcopy(plain)
    recompute.apply(model, governing(SETTINGS["recompute"]))
    for _ in range(2):
        state = torch.get_rng_state()
        expected = step(plain)
        torch.set_rng_state(state)
        assert step(model) == expected
