"""Mixtures of experts, whose routing must not change, and models under a policy as others see, copy and store them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviour_testing import (
    CHECKPOINT,
    RECOMPUTE,
    RERUN_AND_KEEP_ARE_BUILT,
    assert_as_without,
    assert_step_as_without,
    collector_off,
    every_policy,
    every_tape,
    governing,
)
from engine_testing import HIDDEN, GatedMLP, RMSNorm, Stack, assert_same, bits, holding, loss_of, outcome, tokens, weak
from tiny import counted_ops
from torch import Tensor, nn

import recompute
from recompute.errors import RegenerationError

# 20. Mixtures of experts

EXPERTS, CHOSEN = 4, 2


class Mixture(nn.Module):
    """Each token goes to the two experts that a router prefers."""

    def __init__(self, jitter: Callable[[Tensor], Tensor], keeps: bool):
        super().__init__()
        self.norm, self.router = RMSNorm(), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(GatedMLP() for _ in range(EXPERTS))
        self.jitter, self.keeps = jitter, keeps
        self.routes: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        logits = self.jitter(self.router(x))
        if self.keeps:
            logits = recompute.keep(logits)
        weights, chosen = logits.softmax(-1).topk(CHOSEN)
        ROUTES.append(chosen.tolist())
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen == index).nonzero(as_tuple=True)
            result = result.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return result


ROUTES: list[Any] = []
"""Where tokens went, run by run."""


class Unsteady:
    """Turns the router's preferences around in every second run, which no engine can know of."""

    def __init__(self) -> None:
        self.sign = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        self.sign = -self.sign
        return logits * 1.0 + self.sign * torch.linspace(-5.0, 5.0, EXPERTS)


def _randomly(logits: Tensor) -> Tensor:
    return logits * (0.5 + torch.rand_like(logits))


def _mixture(jitter: Callable[[Tensor], Tensor], keeps: bool = False) -> nn.Module:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Mixture(jitter, keeps)])

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.layers[0](x)).sin()

    return Holds()


@every_policy
def test_20_a_router_with_random_jitter_decides_the_same_again(rules: dict[str, Any]) -> None:
    assert_step_as_without(_mixture(_randomly), rules, tokens())


def _run_unsteady(x: Tensor) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        model.layers[0].jitter.sign = 1.0
        ROUTES.clear()
        result = model(x)
        grads = [torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True) for _ in range(2)]
        assert all(route == ROUTES[0] for route in ROUTES), "whoever runs forward again finds the same routes"
        return result, grads

    return run


@every_policy
def test_20_routing_that_the_user_keeps_is_not_decided_differently(rules: dict[str, Any]) -> None:
    assert_as_without(_mixture(Unsteady(), keeps=True), rules, _run_unsteady(tokens()))


def test_20_routing_that_nobody_keeps_is_decided_differently_where_python_runs_again() -> None:
    """What the test above guards against does happen."""
    model, x = _mixture(Unsteady()), tokens()
    recompute.apply(model, governing(CHECKPOINT))
    ROUTES.clear()
    result = model(x)
    with pytest.raises(RegenerationError):
        result.sum().backward()
    assert ROUTES[0] != ROUTES[1]


@every_tape
def test_20_the_tape_decides_no_routing_again(rules: dict[str, Any]) -> None:
    assert_as_without(_mixture(Unsteady()), rules, _run_unsteady(tokens()))
    assert len(ROUTES) == 1


def test_20_recompute_runs_neither_router_nor_experts_again() -> None:
    model, x = _mixture(_randomly), tokens()

    def products() -> int:
        torch.manual_seed(1)
        loss = loss_of(model(x))
        with counted_ops() as ops:
            loss.backward()
        return sum(count for name, count in ops.items() if name.endswith("mm"))

    expected = products()
    with recompute.apply(model, governing(RECOMPUTE)) as handle:
        assert products() == expected
        assert handle.stats().dropped_nbytes > 0


@every_policy
def test_20_what_the_user_keeps_stays_alive_until_the_graph_is_gone(rules: dict[str, Any]) -> None:
    kept: list[Any] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        logits = recompute.keep(self.norm(x).cos())
        kept.append(weak(logits))
        return (logits.sin() * x).sin()

    model = holding(forward, norm=RMSNorm())
    recompute.apply(model, rules)
    kept.clear()
    with collector_off():
        result = model(tokens())
        assert not kept[0].expired()
        result.sum().backward()
        del result
        assert all(reference.expired() for reference in kept)


if RERUN_AND_KEEP_ARE_BUILT:

    @pytest.mark.parametrize("listed", [False, True])
    @pytest.mark.parametrize("setting", [CHECKPOINT, RECOMPUTE], ids=["checkpoint", "recompute"])
    def test_20_a_name_is_kept_where_the_rule_lists_it(setting: dict[str, Any], listed: bool) -> None:
        named: list[Any] = []

        def forward(self: Any, x: Tensor) -> Tensor:
            logits = recompute.keep(self.norm(x).cos(), "router_logits")
            named.append(weak(logits))
            return (logits.sin() * x).sin()

        model, x = holding(forward, norm=RMSNorm()), tokens()
        names = ["router_logits"] if listed else ["another"]
        assert_step_as_without(model, governing({**setting, "keep": names}), x)
        recompute.apply(model, governing({**setting, "keep": names}))
        named.clear()
        result = model(x)
        assert named[0].expired() is not listed
        result.sum().backward()


# 24. What others see of a model under a policy


@every_policy
def test_24_names_and_state_are_as_without_the_policy(rules: dict[str, Any]) -> None:
    def seen(model: nn.Module) -> list[Any]:
        return [
            [(name, id(parameter)) for name, parameter in model.named_parameters()],
            [(name, id(buffer)) for name, buffer in model.named_buffers()],
            [name for name, _ in model.named_modules()],
            [name for name, _ in model.named_children()],
            [(type(module).__module__, type(module).__qualname__) for module in model.modules()],
            [(name, bits(value)) for name, value in model.state_dict().items()],
            [isinstance(layer, type(plain)) for layer, plain in zip(model.modules(), Stack().modules(), strict=True)],
            repr(model),
        ]

    model = Stack()
    before = seen(model)
    with recompute.apply(model, rules):
        loss = loss_of(model(tokens()))
        assert seen(model) == before
        loss.backward()
        assert seen(model) == before
    assert seen(model) == before


def _through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _through_state_dict(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = Stack()
    loaded.load_state_dict(torch.load(buffer, weights_only=True))
    return loaded


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": _through_pickle,
    "torch.save": _through_torch_save,
    "state dict": _through_state_dict,
}


@every_policy
@pytest.mark.parametrize("how", COPIES)
def test_24_copies_are_of_the_model_without_the_policy(rules: dict[str, Any], how: str) -> None:
    plain, x = Stack(), tokens()
    under = copy.deepcopy(plain)
    expected = outcome(plain, x)
    handle = recompute.apply(under, rules)
    assert_same(outcome(under, x), expected)
    loss = loss_of(under(x))  # copied while a graph is alive
    frames = handle.stats().frames
    copied = COPIES[how](under)
    for module, original in zip(copied.modules(), plain.modules(), strict=True):
        assert type(module) is type(original)
        assert vars(module).keys() == vars(original).keys()
    assert_same(outcome(copied, x), expected)
    assert handle.stats().frames == frames, "the copy has no policy"
    recompute.apply(copied, rules)
    assert_same(outcome(copied, x), expected)
    assert_same(outcome(under, x), expected)
    loss.backward()


@every_policy
def test_24_a_model_under_a_policy_loads_a_state_dict(rules: dict[str, Any]) -> None:
    source, x = Stack(), tokens()
    under = Stack()
    recompute.apply(under, rules)
    outcome(under, x)
    under.load_state_dict(source.state_dict())
    assert_same(outcome(under, x), outcome(source, x))
