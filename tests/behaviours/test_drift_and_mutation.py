"""What goes wrong: ops that come out differently, tensors changed in the meantime, errors while regenerating."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviour_testing import (
    CHECKPOINT,
    assert_as_without,
    assert_step_as_without,
    every_policy,
    every_tape,
    governing,
)
from engine_testing import HIDDEN, Holder, RMSNorm, Stack, bits, holding, loss_of, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import recompute
from recompute.errors import MutationError, RegenerationError

# 5. What does not run the same way twice

DRIFTS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "shape": (lambda x, run: x[: 5 if run == 1 else 3].exp().sum(), r"\(5, 8\).*\(3, 8\).*exp"),
    "dtype": (lambda x, run: x.to(torch.float64 if run == 1 else x.dtype).exp().sum(), r"float64.*float32.*exp"),
    "other tensor": (lambda x, run: (x if run == 1 else x * 1).cos().exp().sin().sum(), r"tensor 0 .*\(6, 8\).*cos"),
    "fewer": (lambda x, run: _repeat(torch.cos, 3 if run == 1 else 2, x.exp()).sum(), r"4 tensors in forward, 3 "),
    "another op": (lambda x, run: (x * 3 if run == 1 else x[:, :1].exp() * x).exp().sum(), r"\(6, 8\).*\(6, 1\).*exp"),
}


def _repeat(function: Callable[[Tensor], Tensor], times: int, x: Tensor) -> Tensor:
    for _ in range(times):
        x = function(x)
    return x


@pytest.mark.parametrize("kind", DRIFTS)
def test_05_checkpoint_refuses_a_region_that_saves_something_else_and_shows_both(kind: str) -> None:
    forward, message = DRIFTS[kind]
    runs: list[int] = []
    model = holding(lambda self, x: (runs.append(len(runs) + 1), forward(x, runs[-1]))[1])
    recompute.apply(model, governing(CHECKPOINT))
    runs.clear()
    result = model(tokens())
    before = bits(torch.get_rng_state())
    with pytest.raises(RegenerationError, match=rf"(?s)inside.*{message}"):
        result.backward()
    assert bits(torch.get_rng_state()) == before


@torch.library.custom_op("recompute_tests::unsteady", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def unsteady(x: Tensor) -> Tensor:
    """Never the same twice, and no generator of torch's knows why."""
    return x * SOURCE.random()


SOURCE = random.Random(0)
unsteady.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0] / ctx.saved_tensors[1],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, inputs[0]),
)


def _unseen(x: Tensor) -> Tensor:
    """Memory that something other than an op fills, with other numbers each time."""
    noise = torch.empty(x.shape)
    noise.numpy()[:] = SOURCE.random()
    return noise


UNSTEADY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an op that is not deterministic": lambda self, x: unsteady(self.linear(self.norm(x))).exp().sin(),
    "a number from Python": lambda self, x: (self.linear(self.norm(x)) * SOURCE.random()).exp().sin(),
    "memory filled unseen": lambda self, x: (self.linear(self.norm(x)) * _unseen(x)).exp().sin(),
    "another shape": lambda self, x: self.linear(self.norm(x))[: SOURCE.randrange(1, 6)].exp().sin(),
    "another path": lambda self, x: _repeat(torch.sin, SOURCE.randrange(2, 6), self.linear(self.norm(x))),
}


@every_tape
@pytest.mark.parametrize("kind", UNSTEADY)
def test_05_the_tape_keeps_what_would_not_come_out_the_same(rules: dict[str, Any], kind: str) -> None:
    model = holding(UNSTEADY[kind], linear=nn.Linear(HIDDEN, HIDDEN), norm=RMSNorm())
    x = tokens()

    def run(model: nn.Module) -> Any:
        SOURCE.seed(3)
        result = model(x)
        drawn = SOURCE.getstate()
        grads = [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]
        assert SOURCE.getstate() == drawn, "no Python runs again"
        return result, grads

    assert_as_without(model, rules, run)


@every_policy
@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[x > 0],
        lambda x: x[torch.nonzero(x[:, 0])].squeeze(1),
        lambda x: x.sum(-1) * torch.unique(x.round(), return_inverse=True)[1].sum(-1),
        lambda x: x.masked_select(x < 0.5),
    ],
    ids=["mask", "nonzero", "unique", "masked_select"],
)
def test_05_shapes_that_depend_on_data_come_back(rules: dict[str, Any], select: Callable[[Tensor], Tensor]) -> None:
    model = holding(lambda self, x: select(self.norm(x)).exp().sin(), norm=RMSNorm())
    assert_step_as_without(model, rules, tokens())


# 12. Mutated tensors that are needed as they were


@every_policy
def test_12_a_mutated_input_that_plain_eager_would_refuse_raises(rules: dict[str, Any]) -> None:
    model, x = holding(lambda self, x: (x.exp() * x).sin()), tokens()

    def mutated() -> Tensor:
        given = x * 1.0
        result = model(given)
        with torch.no_grad():
            given.add_(1.0)
        return result.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mutated().backward()
    recompute.apply(model, rules)
    with pytest.raises(MutationError, match=r"^in \S+.*\(6, 8\).*modified in place"):
        mutated().backward()


@every_policy
def test_12_a_mutated_tensor_that_the_user_keeps_raises(rules: dict[str, Any]) -> None:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = recompute.keep(self.norm(x))
        return kept, kept.exp() * kept

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, rules)
    kept, result = model(tokens())
    with torch.no_grad():
        kept.add_(1.0)
    with pytest.raises(RuntimeError, match=r"(?s)\[?6, 8\]?.*modified"):
        result.sum().backward()


@every_policy
def test_12_a_mutated_tensor_that_a_rule_keeps_raises(rules: dict[str, Any]) -> None:
    """As it does without a policy: what a rule keeps, autograd holds and checks itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = Stack(count=1).layers[0], nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.outside(self.inside(x))

    model = Model()
    recompute.apply(model, {"rules": [*rules["rules"], {"match": "outside", "action": "keep"}]})
    result = model(tokens())
    loss = result.sum()
    with torch.no_grad():
        result.add_(1.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*\[6, 8\]"):
        loss.backward()


# 15. Changes after the region has run

LATER: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "nobody saved it": (lambda self, x: self.norm(x) + x, lambda y: y.mul_(2.0)),
    "a slice of it": (lambda self, x: self.norm(x) + x, lambda y: y[1:].clamp_(max=0.5)),
    "a view of it": (lambda self, x: (self.norm(x) + x).t(), lambda y: y.add_(1.0)),
    "relu": (lambda self, x: self.norm(x) * 2, lambda y: y.relu_()),
}
REFUSED_LATER = {
    "its op saved it": (lambda self, x: self.norm(x).sigmoid(), lambda y: y.mul_(2.0)),
    "of which its op saved a view": (lambda self, x: self.norm(x).exp().t(), lambda y: y[0].zero_()),
}


@every_policy
@pytest.mark.parametrize("kind", LATER)
def test_15_a_region_output_mutated_afterwards_does_what_plain_eager_does(rules: dict[str, Any], kind: str) -> None:
    forward, mutate = LATER[kind]
    x = tokens()

    def run(model: nn.Module) -> Any:
        y = model(x)
        mutate(y)
        return y.detach(), torch.autograd.grad(y.sin().sum(), [x, *model.parameters()])

    assert_as_without(holding(forward, norm=RMSNorm()), rules, run)


def _after_use(self: Any, x: Tensor) -> Tensor:
    y = self.linear(self.norm(x))
    z = (y * 3).exp()
    y.add_(5.0)
    return z.sin() * y.sin()


def _slice_after_use(self: Any, x: Tensor) -> Tensor:
    y = self.linear(self.norm(x))
    z = (y[1:] * 3).exp()
    y[2:].mul_(2.0)
    return z.sin() * y[1:].sin()


def _sum_in_place(self: Any, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for _ in range(3):
        total.add_(self.norm(x + total).exp())
    return total.tanh_().sin()


INSIDE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a costly result after its use": _after_use,
    "a slice of it": _slice_after_use,
    "in a chain": lambda self, x: (self.norm(x) * 2).mul_(3.0).add_(1.0).exp_().sin(),
    "a sum": _sum_in_place,
}


@every_policy
@pytest.mark.parametrize("kind", INSIDE)
def test_15_a_tensor_mutated_inside_of_a_region_does_what_plain_eager_does(rules: dict[str, Any], kind: str) -> None:
    model = holding(INSIDE[kind], norm=RMSNorm(), linear=nn.Linear(HIDDEN, HIDDEN))
    assert_step_as_without(model, rules, tokens())


@every_policy
@pytest.mark.parametrize("kind", REFUSED_LATER)
def test_15_a_mutation_that_plain_eager_refuses_gives_no_wrong_gradient(rules: dict[str, Any], kind: str) -> None:
    """It is refused, or the gradient is that of the value which forward had: a dropped one comes back as it was."""
    forward, mutate = REFUSED_LATER[kind]
    model, x = holding(forward, norm=RMSNorm()), tokens()

    def grads(mutate: Callable[[Tensor], Any]) -> list[Any]:
        y = model(x)
        with torch.no_grad():
            mutate(y)
        return [bits(grad) for grad in torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]

    expected = grads(lambda y: None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(mutate)
    recompute.apply(model, rules)
    try:
        found = grads(mutate)
    except RuntimeError as error:
        assert "modified" in str(error)  # noqa: PT017
    else:
        assert found == expected


@every_policy
@pytest.mark.parametrize("updated", ["layers.0.mlp.down_proj.weight", "layers.1.norm1.weight", "layers.1.norm2.weight"])
def test_15_a_weight_updated_before_backward_is_refused_as_in_plain_eager(rules: dict[str, Any], updated: str) -> None:
    model, x = Stack(count=2), tokens()

    def update() -> Tensor:
        loss = loss_of(model(x))
        weight = model.get_parameter(updated)
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        update().backward()
    recompute.apply(model, rules)
    with pytest.raises(MutationError, match="modified in place"):
        update().backward()


@every_policy
@pytest.mark.parametrize("updated", ["bias", "weight"])
def test_15_an_update_that_plain_eager_allows_gives_no_wrong_gradient(rules: dict[str, Any], updated: str) -> None:
    """A region that runs again would need the old value: it is refused, or the gradient is right."""
    model = holding(lambda self, x: self.norm(self.linear(x)).sin(), linear=nn.Linear(HIDDEN, HIDDEN), norm=RMSNorm())
    x = tokens(grad=False)  # so that nothing needs the weight in backward

    def grads() -> list[Any]:
        with torch.no_grad():
            getattr(model.inside.linear, updated).copy_(torch.ones(()))
        loss = model(x).sum()
        with torch.no_grad():
            getattr(model.inside.linear, updated).mul_(3.0)
        return [bits(grad) for grad in torch.autograd.grad(loss, list(model.parameters()))]

    expected = grads()
    recompute.apply(model, rules)
    try:
        found = grads()
    except MutationError as error:
        assert "inside" in str(error)  # noqa: PT017
    else:
        assert found == expected


# 17. Errors while regenerating


class Boom(Exception):
    pass


class FailsAt(TorchDispatchMode):
    """Raises at one op, whoever runs it; -1: at none. Counts them."""

    def __init__(self, at: int):
        super().__init__()
        self.at, self.count = at, -1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise Boom(str(function))
        return function(*args, **(kwargs or {}))


class WithState(nn.Module):
    """Draws, counts its runs, keeps statistics and looks at its training flag."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch, self.runs = RMSNorm(), nn.BatchNorm1d(HIDDEN), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        x = F.dropout(self.batch(self.norm(x)), 0.5, self.training)
        return (x.exp() * torch.rand_like(x)).sin()


@every_policy
def test_17_an_exception_at_any_op_of_backward_leaves_all_as_it_was_and_a_retry_works(rules: dict[str, Any]) -> None:
    model, x = Holder(WithState()), tokens()

    def state() -> list[Any]:
        flags = [module.training for module in model.modules()]
        return [bits(torch.get_rng_state()), model.inside.runs, flags, *map(bits, model.state_dict().values())]

    def start() -> tuple[Tensor, list[Any]]:
        torch.manual_seed(5)
        model.inside.batch.reset_running_stats()
        model.inside.runs = 0
        result = model.train()(x)
        model.eval()
        return result, state()

    def backward(result: Tensor) -> list[Any]:
        return [bits(grad) for grad in torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True)]

    result, before = start()
    expected = backward(result)
    recompute.apply(model, rules)
    result, _ = start()
    with FailsAt(-1) as count:
        assert backward(result) == expected
    assert count.count > 20
    for at in range(count.count):
        result, now = start()
        assert now == before
        with pytest.raises(Boom), FailsAt(at):
            backward(result)
        assert state() == before
        assert backward(result) == expected, "a retry"
        assert state() == before


@every_policy
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_17_an_exception_in_a_users_hook_between_two_regions(rules: dict[str, Any], error: type[BaseException]) -> None:
    model, x = Stack(count=2), tokens()
    switch = {"fails": False}

    def fail(*_: Any) -> None:
        if switch["fails"]:
            raise error

    model.layers[0].register_full_backward_hook(fail)
    model.layers[1].attention.register_full_backward_pre_hook(fail)

    def run(model: nn.Module) -> Any:
        loss = loss_of(model(x))
        drawn = bits(torch.get_rng_state())
        switch["fails"] = True
        with pytest.raises(error):
            torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
        switch["fails"] = False
        assert bits(torch.get_rng_state()) == drawn
        return torch.autograd.grad(loss, [x, *model.parameters()])

    assert_as_without(model, rules, run)


@every_policy
def test_17_an_exception_while_forward_runs_leaves_nothing_behind_and_the_next_step_works(
    rules: dict[str, Any],
) -> None:
    model, x = Stack(count=2), tokens()

    def run(model: nn.Module) -> Any:
        for at in range(0, 60, 7):
            torch.manual_seed(at)
            with pytest.raises(Boom), FailsAt(at):
                model(x)
        torch.manual_seed(7)
        return torch.autograd.grad(loss_of(model(x)), [x, *model.parameters()])

    assert_as_without(model, rules, run)
