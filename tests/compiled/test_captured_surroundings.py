"""Captured regions inside of what others do around them, and with it inside of them."""

import copy
import pickle

import pytest
import torch
from capture_testing import (
    SIZE,
    Around,
    DroppingBlock,
    Twins,
    captured_twins,
    fresh,
    observed,
    rule,
    train,
)
from engine_testing import assert_same, in_threads, loss_of
from torch import nn
from torch.autograd import grad


@pytest.fixture(scope="module")
def twins(x):
    return captured_twins(DroppingBlock(), x)


def test_copies(twins, x):
    """A copy starts by the tape, and is captured in its turn."""
    for duplicate in (copy.deepcopy(twins.under), copy.deepcopy(twins.under)):
        for _ in range(7):
            duplicate.zero_grad()
            twins.plain.zero_grad()
            assert_same(observed(duplicate, train(x)), observed(twins.plain, train(x)))
    assert twins.runs_code(train(x)) == 1


def test_pickle(x):
    module = Around(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU()))
    twins = Twins(module).settle(train(x))
    loaded = pickle.loads(pickle.dumps(twins.under))
    twins.plain.zero_grad()
    assert_same(observed(loaded, train(x)), observed(twins.plain, train(x)))


def test_torch_compile_of_the_model_afterwards(x):
    twins = captured_twins(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)), x)
    twins.both(lambda module: module.zero_grad())
    compiled = [torch.compile(module, backend="aot_eager") for module in (twins.under, twins.plain)]
    found, expected = (observed(module, train(x)) for module in compiled)
    assert_same(found, expected)
    assert twins.runs_code(train(x)) == 1


def test_the_policy_is_removed_while_graphs_are_alive(x):
    twins = captured_twins(DroppingBlock(), x)

    def step(module):
        loss = loss_of(module(x))
        twins.handle.remove()
        loss.backward()
        return [loss]

    twins.step(lambda module: (torch.manual_seed(0), step(module))[1])
    twins.step(train(x))


def test_a_rule_of_another_price_inside_of_it(x):
    """Its times are measured, so what it runs again differs from step to step, but no bit of a result does."""
    rules = {"rules": [{"match": "inside.up", "action": "recompute", "via": "hook", "price": 1e3}, *rule()["rules"]]}
    twins = Twins(Around(DroppingBlock()), rules)
    twins.steps(train(x), 10)
    assert twins.handle.stats().dropped_nbytes > 0


def test_threads_that_run_one_region_from_the_start(x):
    """While one of them traces, the others are not told that they are compiled."""
    twins = Twins(Around(DroppingBlock()))
    same = []

    def work():
        for _ in range(25):
            given = fresh(x)
            outcomes = []
            for module in (twins.under, twins.plain):
                module.inside.dropout.p = 0.0  # all threads draw from one generator
                y = module(given)
                outcomes.append((y, *grad(loss_of(y), (given, *module.parameters()))))
            same.append(all(map(torch.equal, *outcomes)))

    in_threads(*[work] * 4)
    assert same == [True] * 100
