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
    stepping,
    train,
)
from engine_testing import assert_same, in_threads, loss_of
from torch import nn
from torch.autograd import forward_ad, grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.bit_comparison import verifying


@pytest.fixture(scope="module")
def twins(x):
    return captured_twins(DroppingBlock(), x)


class PlusOne(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **(kwargs or {}))
        return output + 1 if op is torch.ops.aten.mul.Tensor else output


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 2 if getattr(function, "__name__", "") == "gelu" else output


OTHERS = {
    "a dispatch mode": PlusOne,
    "a function mode": Doubled,
    "on the CPU": torch.autograd.graph.save_on_cpu,
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor * 1),
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", OTHERS.values(), ids=OTHERS)
def test_code_does_not_run_where_others_change_what_forward_does_and_runs_under_them_in_backward(twins, x, around):
    assert twins.runs_code(stepping(x, forward=around)) == 0
    assert twins.runs_code(stepping(x)) == 1
    assert twins.runs_code(stepping(x, backward=around)) == 1


def test_forward_mode(twins, x):
    def step(module):
        torch.manual_seed(0)
        with forward_ad.dual_level():
            return list(forward_ad.unpack_dual(module(forward_ad.make_dual(x.detach(), torch.ones_like(x)))))

    assert twins.runs_code(step) == 0


def test_verifying_watches_the_tape(twins, x):
    assert twins.runs_code(stepping(x, forward=verifying)) == 0
    assert twins.runs_code(stepping(x)) == 1


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
