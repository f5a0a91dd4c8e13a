"""Captured regions among what others do, and what trials of many architectures have found."""

import copy

import pytest
import torch
from capture_testing import SIZE, STEPS_TO_SETTLE, Around, DroppingBlock, Twins, body, observed, rule, tokens, train
from engine_testing import assert_same, fresh, in_threads, loss_of
from tiers import slow
from torch import nn
from torch.autograd import grad
from torch.nn import functional as F

from recompute.compiled.captured_function import CapturedFrame
from recompute.compiled.captured_region import MAX_GRAPHS


def test_copies(x):
    """A copy starts by the tape, and is captured in its turn."""
    twins = Twins.captured(DroppingBlock(), x)
    for duplicate in (copy.deepcopy(twins.under), copy.deepcopy(twins.under)):
        for _ in range(7):
            duplicate.zero_grad()
            twins.plain.zero_grad()
            assert_same(observed(duplicate, train(x)), observed(twins.plain, train(x)))
    assert twins.runs_code(train(x)) == 1


def test_torch_compile_of_the_model_afterwards(x):
    twins = Twins.captured(nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE)), x)
    twins.both(lambda module: module.zero_grad())
    compiled = [torch.compile(module, backend="aot_eager") for module in (twins.under, twins.plain)]
    found, expected = (observed(module, train(x)) for module in compiled)
    assert_same(found, expected)
    assert twins.runs_code(train(x)) == 1


def test_the_policy_is_removed_while_graphs_are_alive(x):
    twins = Twins.captured(DroppingBlock(), x)

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


def affine():
    """Its weight is read through a view, and its output's gradient has the strides of what comes after it."""
    return body(lambda self, x: F.gelu(self.linear(x)).sigmoid(), linear=nn.Linear(SIZE, SIZE))


def steps_of(twins, run, count=STEPS_TO_SETTLE):
    for _ in range(count):
        given = tokens()
        twins.step(lambda module, given=given: [run(module, x := fresh(given)), x.grad])


def backward(module, x):
    module(x).square().sum().backward()


def transposed(module, x):
    y = module(x)
    (y.t().contiguous() * torch.arange(float(y.numel())).view(y.t().shape)).sum().backward()


@pytest.mark.parametrize("first", [[0], *slow([1], [0, 1])], ids=str)
@pytest.mark.parametrize("then", [*slow([0]), [1], [0, 1]], ids=str)
def test_outputs_that_were_of_no_use_before_take_gradients(first, then):
    parts = {"one": nn.Linear(SIZE, SIZE), "other": nn.Linear(SIZE, SIZE)}
    twins = Twins(Around(body(lambda self, x: (self.one(x).sin().exp(), self.other(x).sin().exp()), **parts)))
    for chosen in (first, then, first):
        steps_of(twins, lambda module, x: sum(module(x.sin())[at].square().sum() for at in chosen).backward())  # noqa: B023


def test_gradients_of_some_tensors_alone_do_not_limit_what_comes_after():
    twins = Twins(Around(affine(), before=nn.Linear(SIZE, SIZE)))
    steps_of(twins, lambda module, x: torch.autograd.grad(module(x).square().sum(), x))
    steps_of(twins, backward)


def test_a_layer_that_is_dropped_now_and_then_is_captured():
    def forward(self, x):
        return x + 1 if self.is_dropped else F.gelu(self.linear(x)).sigmoid()

    twins = Twins(Around(body(forward, linear=nn.Linear(SIZE, SIZE))))
    for number in range(15):
        twins.both(lambda module: setattr(module.inside, "is_dropped", number % 3 == 2))  # noqa: B023
        steps_of(twins, backward, 1)
    assert twins.is_captured


def test_a_layer_whose_gradient_has_other_strides_than_those_of_its_like_gets_code_of_its_own(monkeypatch):
    runs = []
    replay = CapturedFrame._replay
    monkeypatch.setattr(
        CapturedFrame, "_replay", lambda self, *given: runs.append(self.statistics.name) or replay(self, *given)
    )
    layers = [affine()]
    layers += [copy.deepcopy(layers[0]) for _ in range(MAX_GRAPHS)]
    twins = Twins(Around(nn.Sequential(*layers)), rule("inside.*"))
    steps_of(twins, transposed, 16)
    assert twins.is_captured
    assert not runs


@pytest.mark.parametrize(
    "bounded",
    [
        lambda self, y: torch.clamp(y, -self.bound, self.bound),
        lambda self, y: torch.maximum(y, -self.bound),
        lambda self, y: y.masked_fill(y > 0.5, self.fill),
        lambda self, y: y * y.sigmoid().prod(1, keepdim=True),
    ],
    ids=["clamp", "maximum", "masked_fill", "prod"],
)
def test_formulas_that_compute_in_another_way_under_a_mode(bounded):
    """Autograd chooses formulas by whether a dispatch mode watches: what is seen is not what runs without one.

    The strides of a gradient decide in which order the norm's backward adds up.
    """

    def forward(self, x):
        y = x.transpose(1, 2).contiguous().transpose(1, 2)
        return self.linear(bounded(self, y * y.square().mean(-1, keepdim=True).rsqrt()))

    module = body(forward, linear=nn.Linear(64, 64), fill=nn.Parameter(torch.tensor(0.3)))
    module.register_buffer("bound", torch.tensor(2.0))
    twins = Twins(Around(module, before=nn.Linear(64, 64)))
    twins.steps(train(tokens(2, 32, 64)), STEPS_TO_SETTLE)
