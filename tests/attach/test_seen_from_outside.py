"""Models under a policy as others see, copy and store them: as without."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from engine_testing import (
    Stack,
    assert_same,
    bits,
    clean_thread,  # noqa: F401  # around every test here
    every_rule,
    loss_of,
    outcome,
    tokens,
)
from torch import nn

import recompute


@every_rule
def test_names_and_state_are_as_without_the_policy(rules: dict[str, Any]) -> None:
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


@every_rule
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_of_the_model_without_the_policy(rules: dict[str, Any], how: str) -> None:
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


@every_rule
def test_a_model_under_a_policy_loads_a_state_dict(rules: dict[str, Any]) -> None:
    source, x = Stack(), tokens()
    under = Stack()
    recompute.apply(under, rules)
    outcome(under, x)
    under.load_state_dict(source.state_dict())
    assert_same(outcome(under, x), outcome(source, x))
