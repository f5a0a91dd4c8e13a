"""Two processes that share a sequence, or experts, out: gradients and collectives, with a policy and without."""

import functools

import engine_testing
import pytest
import torch
import two_collectives
import two_contexts
import two_experts
from engine_testing import SETTINGS, bits, governing
from tiers import by_default, slow

clean_thread = engine_testing.clean_thread  # around every test here

POLICIES = {
    **{name: governing(setting, "layers.*") for name, setting in SETTINGS.items()},
    "recompute with attention": governing(
        {"action": "recompute", "via": "hook", "rerun": ["gemm", "attention"], "price": 0}, "layers.*"
    ),
    "offload": governing({"action": "offload", "min_bytes": 0}, "layers.*"),
}
OF_EXPERTS = {
    **POLICIES,
    **{name: name for name in ("elementwise", "hook", "full")},
    "experts alone": governing({"action": "recompute", "via": "hook"}, "layers.*.mlp"),
    "experts alone, again": governing({"action": "checkpoint"}, "layers.*.mlp"),
}
AGAIN = ("checkpoint", "full", "experts alone, again")
"""Policies that run Python again, and so exchange once more what their modules exchange in forward."""


@functools.cache
def trained(processes, parts, name):
    return processes.run(parts.train, OF_EXPERTS.get(name))


def assert_as_without(name, found, plain):
    assert len(found.values) > 100
    assert found.random == plain.random
    assert list(map(bits, found.values)) == list(map(bits, plain.values))
    assert (found.dropped_nbytes > 0) == (name != "offload")
    assert sum(plain.collectives[0].values()) > 0
    assert found.collectives[0] == plain.collectives[0]
    if name in AGAIN:
        again = found.collectives[1] - plain.collectives[1]
        assert 0 < sum(again.values()) <= sum(plain.collectives[0].values())
    else:
        assert found.collectives[1] == plain.collectives[1]


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_the_whole_sequence(two_processes):
    """The ring of attention does on the CPU what it should, without a policy."""
    first, second = trained(two_processes, two_contexts, None)
    expected = two_contexts.gradients_of_whole_sequence()
    parts = [values.values[1 : 1 + len(expected)] for values in (first, second)]
    torch.testing.assert_close([a + b for a, b in zip(*parts, strict=True)], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", by_default(list(POLICIES), "recompute"))
def test_gradients_of_a_shared_sequence_are_as_without(two_processes, name):
    for found, plain in zip(*(trained(two_processes, two_contexts, each) for each in (name, None)), strict=True):
        assert_as_without(name, found, plain)


@pytest.mark.parametrize("name", by_default(list(OF_EXPERTS), "elementwise"))
def test_gradients_and_routing_of_shared_experts_are_as_without(two_processes, name):
    """The router is noisy. If it chose otherwise when it runs again, gradients would differ, or the exchange fail."""
    for found, plain in zip(*(trained(two_processes, two_experts, each) for each in (name, None)), strict=True):
        assert_as_without(name, found, plain)


@pytest.mark.parametrize("name", ["elementwise", *slow("full", "auto")])
def test_layers_that_call_functional_collectives_are_captured(two_processes, name):
    """Outputs and gradients are those without, and no collective runs again but in a checkpoint."""
    found, plain = (two_processes.run(two_collectives.train, each) for each in (name, None))
    for one, other in zip(found, plain, strict=True):
        assert_as_without(name, one, other)
        assert "2 of 2 run as captured code" in one.explained
