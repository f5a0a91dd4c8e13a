"""Parameters whose memory a library gives them for each use: they are held by the object that they are."""

import pytest
import torch
from engine_testing import HIDDEN, bits, holding, policy, tokens
from torch import nn

import recompute
from recompute.engine.dtensors import is_managed_elsewhere, may_hold_memory


def _gradient(action, *, is_partitioned):
    """The gradient of the input where the weight gets other memory after forward, and the plain one."""
    model = holding(lambda self, x: torch.exp(x @ self.linear.weight.t()), linear=nn.Linear(HIDDEN, HIDDEN))
    weight, x = model.inside.linear.weight, tokens()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    recompute.apply(model, policy(("inside", action)))
    if is_partitioned:
        weight.ds_id = 0
    result = model(x).sum()
    before = weight.data
    weight.data = before.clone()
    before.zero_()
    (found,) = torch.autograd.grad(result, x)
    return found, expected


@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
def test_backward_reads_a_managed_parameter_where_its_memory_is_then(action):
    found, expected = _gradient(action, is_partitioned=True)
    assert bits(found) == bits(expected)


def test_backward_reads_any_other_parameter_where_its_memory_was():
    found, expected = _gradient("recompute", is_partitioned=False)
    assert bits(found) != bits(expected), "as in plain PyTorch, which holds the memory of a view"


def test_only_parameters_of_the_library_are_managed():
    plain, partitioned = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    partitioned.ds_id = 0
    assert not is_managed_elsewhere(plain)
    assert may_hold_memory(plain)
    assert is_managed_elsewhere(partitioned)
    assert not may_hold_memory(partitioned)
