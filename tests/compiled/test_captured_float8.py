"""torchao's float8 in captured regions: the ops of its custom Function, also those on wrapped tensors, are calls."""

import dataclasses

import pytest
import torch
from capture_testing import Around, Twins, tokens, train
from tiers import slow
from torch import nn

from recompute.engine.tape.functions import FunctionOp

float8 = pytest.importorskip("torchao.float8")


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.gate(x.sin())) * self.up(x.sin()))


def twins(recipe, action):
    torch.manual_seed(0)
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    module = float8.convert_to_float8_training(Around(Mlp().bfloat16()), config=config)
    return Twins(module, {"rules": [{"match": "inside", "action": action}]}).settle(
        train(tokens(4, 32, dtype=torch.bfloat16))
    )


@pytest.mark.parametrize("action", ["recompute", "checkpoint"])
@pytest.mark.parametrize("recipe", ["tensorwise", *slow("rowwise", "rowwise_with_gw_hp")])
def test_its_casts_are_calls_of_the_program(recipe, action):
    found = twins(recipe, action)
    (region,) = found.regions
    plan = region.tape.statistics.plan
    assert plan is not None
    ops = [step.op for step in plan.steps]
    assert not any(isinstance(op, FunctionOp) for op in ops)
    assert ops.count(torch.ops.aten.clamp.default) == 6 * 2  # casts, each with a clamp of a scale and one of numbers


def test_equal_casts_run_once():
    (region,) = twins("tensorwise", "recompute").regions
    (program,) = [program for graph in region.state.graphs.all if (program := graph.program(region)) is not None]
    assert program.forward.source.count("aten_clamp") == 5 * 2  # two Linears read the same
    assert program.backward.source.count("aten_clamp") == 8 * 2  # and two GEMMs the same gradient
