"""A call that gives what an earlier one has given does not run, unless somebody could tell."""

from functools import reduce

import pytest
import torch
from capture_testing import Around, Twins, body, linear, tokens, train
from engine_testing import function_of
from generated_testing import written

from recompute.compiled.earlier_calls import MAX_DISTANCE

ATEN = torch.ops.aten
FAR = range(MAX_DISTANCE + 1)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        pytest.param(lambda x: x.sin() * 2 + x.sin() * 2, 3, id="the same twice"),
        pytest.param(lambda x: x.sin() * 2 + x.sin() * 2.0, 4, id="a number of another kind"),
        pytest.param(lambda x: x.to(torch.bfloat16).float() + x.to(torch.bfloat16).float(), 3, id="casts"),
        pytest.param(lambda x: x.bernoulli(0.5) + x.bernoulli(0.5), 3, id="random numbers"),
        pytest.param(lambda x: x.new_empty(4).zero_() + x.new_empty(4).zero_(), 5, id="memory to write to"),
        pytest.param(lambda x: x.sin().mul_(2) + x.sin(), 4, id="one is overwritten"),
        pytest.param(lambda x: reduce(lambda y, _: y.cos(), FAR, x.sin()) + x.sin(), len(FAR) + 3, id="long after"),
    ],
)
def test_it_runs_once_if_nobody_can_tell(function, runs):
    code, _ = written(function, torch.rand(4))
    assert sum(statement.call is not None for statement in code.statements) == runs


def test_outputs_have_memory_of_their_own():
    twins = Twins(Around(body(lambda self, x: (x.sin(), x.sin()))))
    twins.settle(train(x := tokens()))
    one, other = twins.under(x)
    assert one.data_ptr() != other.data_ptr()


WritesWhatItKeeps = function_of(
    lambda x: torch.ones(x.shape), lambda gradient, x: x.mul_(gradient), saves=lambda result, x: (x,), hides=True
)


def test_what_a_function_is_given_has_memory_of_its_own():
    def forward(self, x):
        one, other = self.linear(x), self.linear(x)
        return one.sin() * one + WritesWhatItKeeps.apply(other)

    Twins(Around(body(forward, linear=linear()))).settle(train(tokens()))


@pytest.mark.parametrize(
    "largest",
    [lambda x: x.abs().max(), lambda x: ATEN.amax(x.abs(), [0], True), lambda x: x.t().abs().max()],
    ids=["of all", "of columns", "of a transposed one"],
)
@pytest.mark.parametrize("special", [0.0, -7.0, torch.nan, -torch.inf])
def test_the_largest_absolute_value_is_a_norm(largest, special):
    x = torch.randn(64, 48).bfloat16()
    x[3, 5] = special
    code, (number,) = written(largest, x)
    assert "linalg_vector_norm" in code.statements[-1].text
    run = code.compiled(["def run(t0):"], f"t{number}", [f"t{number}"])
    assert torch.equal(run(x).nan_to_num(-1.0), largest(x).nan_to_num(-1.0))
