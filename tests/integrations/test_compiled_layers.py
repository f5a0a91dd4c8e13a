"""Compiled layers under a policy, shared out by two processes: values, memory, and collectives."""

import functools

import pytest
import torch
from two_compiled import POLICIES, WAYS, train


@functools.cache
def seen(processes, way, name, compiled):
    return processes.run(train, way, name, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_compiled_layers_that_are_shared_out(two_processes, way, name):
    cases = ("none", True), (name, False), (name, True)  # the first one that shares tensors compiles each layer anew
    for plain, eager, found in zip(*(seen(two_processes, way, *case) for case in cases), strict=True):
        torch.testing.assert_close(found.values, eager.values)
        torch.testing.assert_close(found.values, plain.values)
        assert 0.9 * eager.held_nbytes <= found.held_nbytes <= eager.held_nbytes
        assert found.held_nbytes < plain.held_nbytes
        assert len(found.collectives) == 2  # graphs, of all layers
        assert set(found.collectives) == set(plain.collectives)  # none runs again
        assert ("tensor" in way) == (sum(plain.collectives) > 0)
