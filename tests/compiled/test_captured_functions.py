"""Custom ``autograd.Function``s in captured regions: each is one call, which runs as in eager code."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bodies.autograd import FUNCTIONS, IS_TOLD_LATE, RAN, Scale, composite
from capture_testing import ROWS, SIZE, Around, Twins, body, captured_twins, fresh, rule, tokens, train
from engine_testing import loss_of
from torch import Tensor, nn
from torch.autograd import Function, grad
from torch.multiprocessing.reductions import StorageWeakRef


def block(kind: str) -> nn.Module:
    """A body of the table."""
    return body(FUNCTIONS[kind].forward, **FUNCTIONS[kind].parts())


@pytest.mark.parametrize("kind", IS_TOLD_LATE)
def test_a_function_that_runs_no_op_is_captured_after_a_few_more_steps(x: Tensor, kind: str) -> None:
    twins = Twins(Around(block(kind)))
    for _ in range(3):
        twins.step(train(x))
    twins.settle(train(x))


class Factor(Function):
    """Runs no op in forward. Its backward is Python that may do something else every time."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Factor.factor


@composite
def by_a_factor(x: Tensor, w: Tensor) -> Tensor:
    return Factor.apply(x.sin()) * w


def test_no_functions_backward_is_taken_for_the_ops_that_it_ran_once(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = Twins(Around(body(lambda self, x: by_a_factor(self.lin(x), self.lin.bias), lin=nn.Linear(SIZE, SIZE))))
    for number in range(8):
        monkeypatch.setattr(Factor, "factor", number)
        twins.step(train(x))


@pytest.fixture(scope="module")
def x() -> Tensor:
    torch.manual_seed(1)
    return tokens()


@pytest.fixture(scope="module")
def twins(x: Tensor) -> Twins:
    return captured_twins(block("saves its inputs"), x)


def test_a_function_runs_once_a_step(twins: Twins, x: Tensor) -> None:
    RAN.clear()
    train(x)(twins.under)
    assert RAN == ["forward", "backward"]


def test_the_reports_say_so(twins: Twins, x: Tensor) -> None:
    """The Function's input, which it only reads, is held once for all; and what comes after it is brought back."""
    assert "inside: 1 of 1 run as captured code" in str(twins.handle.explain())
    before = twins.handle.stats()
    train(x)(twins.under)
    step = twins.handle.stats() - before
    made = ROWS * SIZE * 4
    assert step.dropped_nbytes == 3 * made
    assert step.kept_nbytes == 4 * made


def test_a_step_that_never_runs_backward_leaves_nothing(x: Tensor) -> None:
    twins = captured_twins(body(lambda self, x: self.lin(Holds.apply(x + 1)), lin=nn.Linear(SIZE, SIZE)), x)
    gc.collect()
    gc.disable()
    try:
        y = twins.under(fresh(x))
        assert not Holds.saved.expired()
        del y
        assert Holds.saved.expired()
    finally:
        gc.enable()


def twice(module: nn.Module, given: Tensor) -> list[Any]:
    loss = loss_of(module(given))
    return [grad(loss, given, retain_graph=True), grad(loss, given)]


def in_its_turn(module: nn.Module, given: Tensor) -> list[Any]:
    (gradient,) = grad(loss_of(module(given)), given, create_graph=True)
    return [gradient, *grad(gradient.sum(), [given, module.inside.linear.weight], allow_unused=True)]


def under_autocast(module: nn.Module, given: Tensor) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        y = module(given)
    return [y, *grad(loss_of(y), (given, *module.inside.linear.parameters()), allow_unused=True)]


def of_another_layout(module: nn.Module, given: Tensor) -> list[Any]:
    y = module.inside(given)
    return [y, *grad(y, given, torch.rand(SIZE, ROWS, generator=torch.Generator().manual_seed(0)).t())]


def saved_elsewhere(module: nn.Module, given: Tensor) -> list[Any]:
    with torch.autograd.graph.save_on_cpu():
        y = module(given)
    return [y, *grad(loss_of(y), given)]


@pytest.mark.parametrize("step", [twice, under_autocast, of_another_layout, saved_elsewhere, in_its_turn])
@pytest.mark.filterwarnings("ignore:.*gradients are differentiated in their turn")
def test_ways_to_run_it(x: Tensor, step: Callable[[nn.Module, Tensor], list[Any]]) -> None:
    twins = captured_twins(block("one after the other"), x)
    for _ in range(6):
        twins.step(lambda module: step(module, fresh(x)))


def test_code_runs_a_function_under_the_autocast_around_it(x: Tensor) -> None:
    twins = Twins(Around(block("autocast")))
    step: Any = lambda module: under_autocast(module, fresh(x))  # noqa: E731
    twins.settle(step)


class Keeps(Function):
    """Saves nothing, and looks whether what it is given lives."""

    given: StorageWeakRef

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Keeps.given = StorageWeakRef(x.untyped_storage())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_what_a_function_does_not_save_is_not_held(x: Tensor) -> None:
    twins = captured_twins(body(lambda self, x: self.lin(Keeps.apply(x + 1)), lin=nn.Linear(SIZE, SIZE)), x)
    y = twins.under(fresh(x))
    assert Keeps.given.expired()
    loss_of(y).backward()


class Holds(Function):
    """Saves what it makes inside."""

    saved: StorageWeakRef

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        inside = x * 2
        Holds.saved = StorageWeakRef(inside.untyped_storage())
        ctx.save_for_backward(inside)
        return inside.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0].cos() * 2


class Varies(Function):
    """Gives another layout than at first, once ``rows`` says so."""

    rows = ROWS

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x[: Varies.rows] * torch.rand(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return F.pad(gradient, (0, 0, 0, ctx.shape[0] - gradient.shape[0]))


def test_a_function_that_gives_something_else_sends_the_module_back_to_the_tape(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = captured_twins(body(lambda self, x: Varies.apply(self.lin(x)).sin(), lin=nn.Linear(SIZE, SIZE)), x)
    monkeypatch.setattr(Varies, "rows", 2)
    for _ in range(3):
        twins.step(train(x))
    assert twins.why_not == "Varies gives something else from time to time"


def test_what_a_function_saved_may_not_change(x: Tensor) -> None:
    twins = captured_twins(body(lambda self, x: self.lin(Scale.apply(x, self.lin.bias)), lin=nn.Linear(SIZE, SIZE)), x)
    for module in (twins.plain, twins.under):
        h = module.before(fresh(x)).clone()
        y = module.inside(h)
        with torch.no_grad():
            h.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
            loss_of(y).backward()


def test_layers_share_code_with_functions(x: Tensor) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.lin(Scale.apply(self.lin(x).tanh(), self.weight).sigmoid())

    layer = body(forward, lin=nn.Linear(SIZE, SIZE), weight=nn.Parameter(torch.rand(SIZE)))
    twins = Twins(Around(nn.Sequential(layer, copy.deepcopy(layer))), rule("inside.*")).settle(train(x))
    assert len({program for region in twins.regions for program in region.programs}) == 1


class IntoMainGrad(Function):
    """As Megatron's and Transformer Engine's Linears, which add to an attribute of their weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = w  # under hooks, what is saved has no attributes
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,), w = ctx.saved_tensors, ctx.weight
        dw = (gradient * x).sum(0)
        w.main_grad.add_(dw)
        w.was_added = True
        return gradient * w, dw


def test_a_function_finds_and_sets_attributes_of_its_parameters(x: Tensor) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.lin(IntoMainGrad.apply(self.lin(x).tanh(), self.weight).sigmoid())

    twins = Twins(Around(body(forward, weight=nn.Parameter(torch.rand(SIZE)), lin=nn.Linear(SIZE, SIZE))))
    weights: list[Any] = [each.inside.weight for each in (twins.under, twins.plain)]
    for weight in weights:
        weight.main_grad = torch.zeros(SIZE)
    twins.settle(train(x))
    for weight in weights:
        weight.was_added = False
    twins.step(train(x))
    assert [weight.was_added for weight in weights] == [True, True]
    assert torch.equal(*[weight.main_grad for weight in weights])


GROUPS: list[Any] = []


class SumOverRanks(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, total = group, x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return SumOverRanks.apply(gradient, ctx.group), None


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    yield
    GROUPS.clear()
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_function_is_given_a_process_group(x: Tensor) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + self.lin(SumOverRanks.apply(self.lin(x).tanh(), GROUPS[0]).sigmoid())

    Twins(Around(body(forward, lin=nn.Linear(SIZE, SIZE)))).settle(train(x))
