"""Custom ``autograd.Function``s in captured regions: each is one call, which runs as in eager code."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bodies.autograd import FUNCTIONS, IS_TOLD_LATE, Scale, composite
from capture_testing import ROWS, SIZE, Around, Twins, body, fresh, linear, rule, train
from engine_testing import function_of, loss_of, no_garbage_collection, no_tensors, weak
from tiers import by_default
from tiny import of_one_more
from torch import nn
from torch.autograd import grad

from recompute.engine.cut.reviewed_ops import is_effect_registered


def block(kind):
    """A body of the table."""
    return body(FUNCTIONS[kind].forward, **FUNCTIONS[kind].parts())


@pytest.mark.parametrize("kind", IS_TOLD_LATE)
def test_a_function_that_runs_no_op_is_captured_after_a_few_more_steps(x, kind):
    twins = Twins(Around(block(kind)))
    twins.steps(train(x), 3)
    twins.settle(train(x))


FACTOR = [1.0]
Factor = function_of(lambda x: x, lambda gradient: gradient * FACTOR[0], saves=no_tensors)
"""Runs no op in forward. Its backward is Python that may do something else every time."""


@composite
def by_a_factor(x, w):
    return Factor.apply(x.sin()) * w


def test_no_functions_backward_is_taken_for_the_ops_that_it_ran_once(x):
    twins = Twins(Around(body(lambda self, x: by_a_factor(self.lin(x), self.lin.bias), lin=linear())))
    for number in range(8):
        FACTOR[:] = [number]
        twins.step(train(x))


def test_the_reports_say_so(x):
    """The Function's input, which it only reads, is held once for all; and what comes after it is brought back."""
    twins = Twins.captured(block("saves its inputs"), x)
    assert "inside: 1 of 1 run as captured code" in str(twins.handle.explain())
    step = of_one_more(lambda: train(x)(twins.under), twins.handle)
    made = ROWS * SIZE * 4
    assert step.dropped_nbytes == 3 * made
    assert step.kept_nbytes == 4 * made


def in_its_turn(module, given):
    (gradient,) = grad(loss_of(module(given)), given, create_graph=True)
    return [gradient, *grad(gradient.sum(), [given, module.inside.linear.weight], allow_unused=True)]


def under_autocast(module, given):
    with torch.autocast("cpu", torch.bfloat16):
        y = module(given)
    return [y, *grad(loss_of(y), (given, *module.inside.linear.parameters()), allow_unused=True)]


def of_another_layout(module, given):
    y = module.inside(given)
    return [y, *grad(y, given, torch.rand(SIZE, ROWS, generator=torch.Generator().manual_seed(0)).t())]


def saved_elsewhere(module, given):
    with torch.autograd.graph.save_on_cpu():
        y = module(given)
    return [y, *grad(loss_of(y), given)]


@pytest.mark.parametrize("step", [under_autocast, of_another_layout, saved_elsewhere, in_its_turn])
@pytest.mark.filterwarnings("ignore:.*a gradient is differentiated")
def test_ways_to_run_it(x, step):
    twins = Twins.captured(block("one after the other"), x)
    twins.steps(lambda module: step(module, fresh(x)), 6)


def test_code_runs_a_function_under_the_autocast_around_it(x):
    twins = Twins(Around(block("autocast")))
    step = lambda module: under_autocast(module, fresh(x))  # noqa: E731
    twins.settle(step)


SEEN = []
"""The memory that a Function saw last."""


def seen(x):
    SEEN[:] = [weak(x)]
    return x


KEEPS = function_of(lambda x: seen(x) * 2, lambda gradient: gradient * 2, saves=no_tensors)
HOLDS = function_of(lambda x: (x * 2).sin(), lambda g, x: g * x.cos() * 2, saves=lambda _, x: (seen(x * 2),))


@pytest.mark.parametrize(("function", "is_held"), [(KEEPS, False), (HOLDS, True)])
def test_what_a_function_saves_is_held_until_the_graph_is_gone_and_nothing_else(x, function, is_held):
    twins = Twins.captured(body(lambda self, x: self.lin(function.apply(x + 1)), lin=linear()), x)
    loss_of(twins.under(fresh(x))).backward()
    with no_garbage_collection():
        y = twins.under(fresh(x))
        assert SEEN[0].expired() is not is_held
        del y  # without a backward
        assert SEEN[0].expired()


Varies = function_of(
    lambda x: x[: KEPT.rows] * torch.rand(()),
    lambda gradient, shape: F.pad(gradient, (0, 0, 0, shape[0] - gradient.shape[0])),
    saves=lambda result, x: (x.shape,),
    name="Varies",
    hides=True,
)
KEPT = SimpleNamespace(rows=ROWS)


def test_a_function_that_gives_something_else_sends_the_module_back_to_the_tape(x, monkeypatch):
    twins = Twins.captured(body(lambda self, x: Varies.apply(self.lin(x)).sin(), lin=linear()), x)
    monkeypatch.setattr(KEPT, "rows", 2)
    twins.steps(train(x), 3)
    assert twins.why_not == "Varies does not return the same kind of outputs in each call"


Numbered = function_of(lambda x: (x * FACTOR[0], FACTOR[0]), lambda gradient, _: gradient, saves=no_tensors)
"""Gives a number, which the code around may read."""


def gives_a_number(self, x):
    y, number = Numbered.apply(self.lin(x))
    return y.sin() * number


def set_number(x, store):
    store.scale = FACTOR[0]
    return x * 2


def set_item(x, store):
    store.scales["last"] = FACTOR[0]
    return x * 2


def set_tensor(x, store):
    store.scale = x.detach().abs().amax() * FACTOR[0]
    return x * 2


def setting(sets, read):
    function = function_of(sets, lambda gradient: (gradient * 2, None), saves=no_tensors)
    return lambda self, x: function.apply(self.lin(x), self.store).sin() * read(self.store)


TOLD = {
    "gives a number": gives_a_number,
    "sets a number": setting(set_number, lambda store: store.scale),
    "sets an item": setting(set_item, lambda store: store.scales["last"]),
    "sets a tensor": setting(set_tensor, lambda store: store.scale),
}
"""What code around a Function reads of it, which is another number at any step."""


@pytest.mark.parametrize("forward", by_default(TOLD, "gives a number", "sets a tensor"))
def test_code_reads_what_a_function_gives_or_has_set(x, forward):
    for steps in range(7, 1, -1):
        store = SimpleNamespace(scale=1.0, scales={"last": 1.0})
        twins = Twins(Around(body(forward, lin=linear(), store=store)))
        for number, count in ((1.0, steps), (2.0, 2)):
            FACTOR[:] = [number]
            twins.steps(train(x), count)


def test_what_a_function_saved_may_not_change(x):
    twins = Twins.captured(body(lambda self, x: self.lin(Scale.apply(x, self.lin.bias)), lin=linear()), x)
    for module in (twins.plain, twins.under):
        h = module.before(fresh(x)).clone()
        y = module.inside(h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified in place"):
            loss_of(y).backward()


def test_layers_share_code_with_functions(x):
    def forward(self, x):
        return x + self.lin(Scale.apply(self.lin(x).tanh(), self.weight).sigmoid())

    layer = body(forward, lin=linear(), weight=nn.Parameter(torch.rand(SIZE)))
    twins = Twins(Around(nn.Sequential(layer, copy.deepcopy(layer))), rule("inside.*")).settle(train(x))
    assert len({program for region in twins.regions for program in region.programs}) == 1


GROUPS = []


def sum_over_ranks(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


SumOverRanks = function_of(
    sum_over_ranks,
    lambda gradient, group: (SumOverRanks.apply(gradient, group), None),
    saves=lambda total, x, group: (group,),
    hides=True,
)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    yield
    GROUPS.clear()
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_function_is_given_a_process_group(x):
    def forward(self, x):
        return x + self.lin(SumOverRanks.apply(self.lin(x).tanh(), GROUPS[0]).sigmoid())

    Twins(Around(body(forward, lin=linear()))).settle(train(x))
    assert not is_effect_registered(), "torch takes a collective for an op with an effect, and every frame would look"
