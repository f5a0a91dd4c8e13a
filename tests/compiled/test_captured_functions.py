"""Custom ``autograd.Function``s in captured regions: each is one call, which runs as in eager code."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_testing import ROWS, SIZE, Around, Twins, body, captured_twins, fresh, rule, tokens, train
from engine_testing import loss_of
from torch import Tensor, nn
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

CALLS: list[str] = []
"""What the Functions below ran, so that nothing may run twice."""


class Scale(Function):
    """Saves what it is given. Nothing may trace it: it asks for values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        CALLS.append("forward")
        assert x.data_ptr() != 0
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        CALLS.append("backward")
        x, w = ctx.saved_tensors
        wants_x, wants_w = ctx.needs_input_grad
        return gradient * w if wants_x else None, (gradient * x).sum(0) if wants_w else None


class Exp(Function):
    """Saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Split(Function):
    """Several outputs, of which one takes no gradient, and which save nothing but a number."""

    @staticmethod
    def forward(x: Tensor, factor: float, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        return x * factor + parts[0], x.argmax(-1), x.sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor, ctx.width = inputs[1], inputs[0].shape[-1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, _: Any, last: Tensor | None) -> Any:
        assert first is not None
        gradient = first * ctx.factor
        return gradient if last is None else gradient + last.unsqueeze(-1).expand(-1, ctx.width), None, None


class Reverse(Function):
    """Gives back what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Same(Function):
    """Runs no op at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class InMemory(Function):
    """As Triton kernels do it: backward writes its gradients over what was saved, unseen."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        first, second = gradient * b, gradient * a
        a.numpy()[:], b.numpy()[:] = first.numpy(), second.numpy()
        return a, b


class Dropped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mask = torch.rand_like(x) > 0.25
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.mask


class Widened(Function):
    """Gradients of another dtype and another shape than what they belong to, which autograd makes fit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return (gradient * w).double(), gradient * x


class UnderAutocast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Nested(Function):
    """Runs another Function, and autograd, inside of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            ctx.graph = given, Exp.apply(given).sin()
        return ctx.graph[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        given, result = ctx.graph
        return torch.autograd.grad(result, given, gradient, retain_graph=True)[0]


class Configured(Function):
    """Takes an object that no graph knows, with a tensor in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Options, others: list[Any]) -> Tensor:
        ctx.options = options
        return x * options.factor + len(others)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.options.factor, None, None


class Options:
    def __init__(self) -> None:
        self.factor = torch.rand(SIZE)


class Packed(nn.Parameter):
    """A frozen parameter of a class of its own, as those of 4 bits are."""


class Transposed(Function):
    """Tensors that are not contiguous, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.t().contiguous().t()


bound_early = Scale.apply


def splits(self: Any, h: Tensor) -> Tensor:
    first, best, total = Split.apply(h, 0.5, (self.weight.detach(),))
    return first.sigmoid() * total.unsqueeze(-1) + best.unsqueeze(-1)


def splits_one(self: Any, h: Tensor) -> Tensor:
    return Split.apply(h, 0.5, (self.weight.detach(),))[0].sigmoid()


def without_gradients(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = Scale.apply(h, self.weight)
    return h.sigmoid() * scale


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "saves its inputs": lambda self, h: Scale.apply(h, self.weight).sigmoid() * h.tanh(),
    "a frozen weight": lambda self, h: Scale.apply(h, self.frozen).sigmoid(),
    "frozen values": lambda self, h: Scale.apply(self.frozen.tanh().expand(h.shape), self.weight).sigmoid() * h,
    "bound to another name": lambda self, h: bound_early(h, self.weight).sigmoid(),
    "saves its output": lambda self, h: Exp.apply(h).sigmoid() * 2,
    "several outputs": splits,
    "an output that nobody reads": splits_one,
    "gives back a view": lambda self, h: Reverse.apply(h).sigmoid() * h,
    "gives back what it is given": lambda self, h: Same.apply(h).sigmoid() * h,
    "gives back its gradient": lambda self, h: (h + Same.apply(h.tanh())).sigmoid(),
    "writes over what it saved": lambda self, h: InMemory.apply(self.lin(h), self.lin(h).sigmoid()).tanh(),
    "draws": lambda self, h: F.dropout(Dropped.apply(h), 0.5).sigmoid(),
    "gradients that do not fit": lambda self, h: Widened.apply(h, self.weight).sigmoid(),
    "others inside of it": lambda self, h: Nested.apply(h).sigmoid(),
    "other layouts": lambda self, h: self.lin(Transposed.apply(h.sigmoid())).tanh(),
    "one tensor twice": lambda self, h: InMemory.apply(h, h.clone()) + InMemory.apply(h.tanh(), h.tanh()),
    "one after the other": lambda self, h: Scale.apply(Exp.apply(Scale.apply(h, self.weight)), self.weight).tanh(),
    "without gradients": without_gradients,
    "autocast": lambda self, h: UnderAutocast.apply(h, self.lin.weight).sigmoid(),
    "objects": lambda self, h: Configured.apply(h, self.options, [h]).sigmoid() + Configured.apply(h, self.options, []),
    "a parameter of a class of its own": lambda self, h: Scale.apply(h, self.packed.view(-1)).sigmoid(),
    "first and last": lambda self, h: Scale.apply(h, self.weight),
}


def forward(self: Any, x: Tensor) -> Tensor:
    return x + self.lin(self.inside(self, self.lin(x).tanh()))


def block(kind: str) -> nn.Module:
    parts = {"weight": nn.Parameter(torch.rand(SIZE)), "frozen": nn.Parameter(torch.rand(SIZE), requires_grad=False)}
    packed = Packed(torch.rand(1, SIZE), requires_grad=False)
    return body(forward, inside=FORWARDS[kind], lin=nn.Linear(SIZE, SIZE), options=Options(), packed=packed, **parts)


@pytest.fixture(scope="module")
def x() -> Tensor:
    torch.manual_seed(1)
    return tokens()


@pytest.mark.parametrize("kind", FORWARDS)
def test_a_function_is_a_part_of_captured_code(x: Tensor, kind: str) -> None:
    twins = Twins(Around(block(kind)))
    for _ in range(3):  # a tape is told of a Function that runs no op once the graph is taken
        twins.step(train(x))
    twins.settle(train(x))


@pytest.fixture(scope="module")
def twins(x: Tensor) -> Twins:
    return captured_twins(block("saves its inputs"), x)


def test_a_function_runs_once_a_step(twins: Twins, x: Tensor) -> None:
    CALLS.clear()
    train(x)(twins.under)
    assert CALLS == ["forward", "backward"]


def test_the_reports_say_so(twins: Twins, x: Tensor) -> None:
    """The Function's input is held as it is, and what comes after it is brought back."""
    assert "inside: 1 of 1 run as captured code" in str(twins.handle.explain())
    before = twins.handle.stats()
    train(x)(twins.under)
    after = twins.handle.stats()
    assert after.dropped_nbytes - before.dropped_nbytes > 0
    assert after.kept_nbytes - before.kept_nbytes == before.kept_nbytes / before.frames


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
    return [gradient, *grad(gradient.sum(), [given, module.inside.lin.weight], allow_unused=True)]


def under_autocast(module: nn.Module, given: Tensor) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        y = module(given)
    return [y, *grad(loss_of(y), (given, *module.inside.lin.parameters()), allow_unused=True)]


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


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_function_that_changes_what_it_is_given_stays_on_the_tape(x: Tensor) -> None:
    twins = Twins(Around(body(lambda self, x: InPlace.apply(self.lin(x)).sin(), lin=nn.Linear(SIZE, SIZE))))
    for _ in range(10):
        twins.step(train(x))
    assert twins.why_not == "InPlace changes what it is given"


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
    layer = block("saves its inputs")
    twins = Twins(Around(nn.Sequential(layer, copy.deepcopy(layer))), rule("inside.*")).settle(train(x))
    programs = [graph.program(region) for region in twins.regions for graph in region._graphs()]
    assert len(set(programs)) == 1


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
    inside = {"inside": lambda self, h: IntoMainGrad.apply(h, self.weight).sigmoid(), "lin": nn.Linear(SIZE, SIZE)}
    twins = Twins(Around(body(forward, weight=nn.Parameter(torch.rand(SIZE)), **inside)))
    weights: list[Any] = [each.inside.weight for each in (twins.under, twins.plain)]
    for weight in weights:
        weight.main_grad = torch.zeros(SIZE)
    twins.settle(train(x))
    for weight in weights:
        weight.was_added = False
    twins.step(train(x))
    assert [weight.was_added for weight in weights] == [True, True]
    assert torch.equal(*[weight.main_grad for weight in weights])
