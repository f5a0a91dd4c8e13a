"""What ``stats()`` says of the time that captured code takes to regenerate, and of what runs again in each step."""

import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from capture_testing import STEPS_TO_SETTLE, Around, Layers, Norm, Twins, linear, rule, tokens, train
from engine_testing import set_by
from torch import nn

import recompute
from recompute.compiled.codegen import Code
from recompute.engine import region_statistics


@pytest.fixture
def ticks(monkeypatch):
    """A clock on which each op of captured code takes a second."""
    now, function_of, ticking = [0], Code._function, set()

    def timed(function):
        def run(*args, **kwargs):
            now[0] += 1
            return function(*args, **kwargs)

        ticking.add(run)
        return run

    def name_of(code, op):
        name = function_of(code, op)
        if code.names[name] not in ticking:
            code.names[name] = timed(code.names[name])
        return name

    monkeypatch.setattr(Code, "_function", name_of)
    monkeypatch.setattr(region_statistics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


otherwise = functools.partial(set_by, torch.use_deterministic_algorithms, True, False)
"""The span of another setting of torch than that of forward."""


def norms():
    """Two norms, whose outputs others save."""
    return nn.Sequential(*(Around(Norm(), after=linear()) for _ in range(2)))


@pytest.mark.parametrize("around_backward", [nullcontext, otherwise], ids=["", "otherwise"])
@pytest.mark.parametrize(
    ("make", "policy"), [(Layers, rule("layers.*")), (norms, rule("*.inside"))], ids=["layers", "outputs of others"]
)
def test_what_captured_code_runs_again_is_timed_and_nothing_else(ticks, make, policy, around_backward):
    twins, x = Twins(make(), policy), tokens()
    twins.settle(train(x))
    twins.handle.time_regeneration()

    def step(module):
        loss = module(x).square().sum()
        with around_backward():
            loss.backward()
        return loss

    began, before = ticks[0], twins.handle.stats()
    twins.step(step)
    of_step = twins.handle.stats() - before
    assert of_step.regenerations > 0
    assert of_step.regenerating_seconds == of_step.regenerations < ticks[0] - began


def test_backward_that_is_not_as_recorded_is_timed_as_a_checkpoint_that_runs_again():
    twins, x = Twins(Layers(), rule("layers.*")), tokens()
    twins.settle(train(x))
    twins.handle.time_regeneration()
    before = twins.handle.stats()
    gradient = torch.ones(x.shape[1], x.shape[0]).t()  # of other strides than those that came before
    for layer in (twins.under.layers[0], twins.plain.layers[0]):
        layer(x).backward(gradient)
    of_step = twins.handle.stats() - before
    assert of_step.regenerations == 1
    assert of_step.regenerated_nbytes > 0
    assert of_step.regenerating_seconds > 0


@pytest.mark.parametrize("options", [{}, {"action": "checkpoint"}], ids=["recompute", "checkpoint"])
def test_every_step_counts_and_times_what_runs_again_also_those_that_capture(options):
    model, x = Layers(), tokens()
    rules = {"rules": [{"match": "layers.*", "action": "recompute", **options}]}
    handle = recompute.apply(model, rules)
    handle.time_regeneration()
    seen = []
    for _ in range(STEPS_TO_SETTLE + 1):
        before = handle.stats()
        train(x)(model)
        seen.append(handle.stats() - before)
    assert all(step.regenerations > 0 and step.regenerating_seconds > 0 for step in seen), seen
    assert min(step.regenerated_nbytes for step in seen) >= seen[0].dropped_nbytes
