"""Modules that are alike are looked at once while a policy is applied, and others by themselves."""

import models
import pytest
import torch
from tiers import by_default
from torch import nn

import recompute
from recompute.substitution import formulas
from recompute.substitution.formulas import Conditions, looking_once


class Scale(nn.Module):
    """Reads settings of several kinds."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_parameter("bias", None)
        self.factor = 2.0
        self.in_float = False
        self.options = {"negative": [False]}
        self.function = torch.sigmoid

    def forward(self, x):
        x = x.float() if self.in_float else x
        y = self.function(x) * self.weight * self.factor
        y = y if self.bias is None else y + self.bias
        y = self.after(y) if hasattr(self, "after") else y
        return -y if self.options["negative"][0] else y


@pytest.fixture
def traces(monkeypatch):
    """The modules that are looked at."""
    found = []
    real = formulas._formula_of

    def counted(module, conditions):
        found.append(module)
        return real(module, conditions)

    monkeypatch.setattr(formulas, "_formula_of", counted)
    return found


def formula_of(module):
    return formulas.formula_of(module, Conditions())


def test_modules_that_are_alike_are_looked_at_once(traces):
    with looking_once():
        found = [formula_of(Scale()) for _ in range(3)]
    assert len(traces) == 1
    assert found[0] is not None
    assert found == [formula_of(Scale())] * 3


CHANGES = {
    "a number": lambda module: setattr(module, "factor", 3.0),
    "a sign of zero": lambda module: setattr(module, "factor", -0.0),
    "a flag": lambda module: setattr(module, "in_float", True),
    "a flag in a list": lambda module: module.options.update(negative=[True]),
    "a function": lambda module: setattr(module, "function", torch.tanh),
    "a parameter": lambda module: setattr(module, "bias", nn.Parameter(torch.ones(4))),
    "a dtype": lambda module: module.to(torch.bfloat16),
    "a part": lambda module: module.add_module("after", nn.Sigmoid()),
}
DEFAULT = ("a sign of zero", "a flag in a list", "a function", "a parameter", "a part")


@pytest.mark.parametrize("change", by_default(CHANGES, *DEFAULT))
def test_another_setting_is_looked_at_apart(change, traces):
    module = Scale()
    with looking_once():
        formula_of(Scale())
        change(module)
        found = formula_of(module)
    assert len(traces) == 2
    assert found == formula_of(module)


def test_nothing_is_remembered_afterwards(traces):
    module = Scale()
    with looking_once(), looking_once():
        before = formula_of(module)
    module.factor = 3.0
    assert formula_of(module) != before
    with looking_once():
        assert formula_of(module) != before


def test_a_deeper_models_norms_and_mlps_are_looked_at_no_more_often(traces):
    def count(layers):
        traces.clear()
        recompute.apply(models.make("llama", num_hidden_layers=layers), "kernel").remove()
        return len(traces)

    assert count(6) == count(2) > 0
