"""What forward does besides computing: captured code does it too, or the region stays on the tape and says why."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from capture_testing import SIZE, Around, Step, Twins, body, fresh, tokens, train
from engine_testing import loss_of
from torch import Tensor, nn

import recompute

logger = logging.getLogger(__name__)
calls = 0


def linear() -> nn.Module:
    return nn.Linear(SIZE, SIZE)


def sets_an_attribute(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    self.last = y.detach().mean()
    return F.gelu(y)


def appends(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    self.seen.append(y.detach())
    return F.gelu(y)


def changes_a_global(self: Any, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return F.gelu(self.lin(x))


def fills_a_dictionary(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    self.cache["key"] = y.detach() * 2
    return F.gelu(y)


EFFECTS = {each.__name__: each for each in (sets_an_attribute, appends, changes_a_global, fills_a_dictionary)}


@pytest.mark.parametrize("forward", EFFECTS.values(), ids=EFFECTS)
def test_side_effects_that_code_has_too(forward: Callable[..., Any]) -> None:
    x = tokens()
    twins = Twins(Around(body(forward, lin=linear(), seen=[], cache={}, last=None)))

    def step(module: nn.Module) -> dict[str, Any]:
        global calls
        calls = 0
        found = train(x)(module)
        part = module.inside
        state = [part.last, len(part.seen), *part.seen[-1:], part.cache.get("key"), calls]
        return found | {f"state {index}": value for index, value in enumerate(state)}

    for _ in range(10):
        twins.step(step)
    if forward is not changes_a_global:  # whose guard each test run meets anew
        assert twins.is_captured, twins.why_not


class Cache:
    """As generation has them: keys of all calls."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        return torch.cat(self.keys)


def test_a_cache_that_grows_with_tensors_that_take_gradients() -> None:
    x = tokens()

    def forward(self: Any, x: Tensor, cache: Cache) -> Tensor:
        keys = cache.update(self.lin(x))
        return F.gelu(x @ keys.t())

    def step(module: nn.Module) -> list[Any]:
        cache, given = Cache(), fresh(x)
        found = [module(given * factor, cache) for factor in (1, 2)]
        (loss_of(found) + loss_of(cache.keys)).backward()
        return [*found, *cache.keys, given.grad]

    twins = Twins(Around(body(forward, lin=linear())))
    for _ in range(10):
        twins.step(step)


def prints(self: Any, x: Tensor) -> Tensor:
    print("hello")
    return self.lin(x)


def warns(self: Any, x: Tensor) -> Tensor:
    warnings.warn("careful", stacklevel=1)
    return self.lin(x)


def logs(self: Any, x: Tensor) -> Tensor:
    logger.warning("careful")
    return self.lin(x)


def reads_a_value(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * (2 if x.sum().item() > self.bound else 3)


def branches_on_a_value(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) if x.sum() > self.bound else self.lin(x) * 2


def scales_by_a_value(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * x.detach().sum().item()


def reads_an_array(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * torch.from_numpy(np.tanh(x.detach().numpy()))


def selects_by_values(self: Any, x: Tensor) -> Tensor:
    y = self.lin(x)
    return y[y.detach()[:, 0] > self.bound]


def computes_otherwise_if_compiled(self: Any, x: Tensor) -> Tensor:
    return self.lin(x) * (2 if torch.compiler.is_compiling() else 3)


def returns_otherwise_if_compiled(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = F.gelu(self.lin(x)), torch.tanh(self.lin(x))
    return (a, b) if torch.compiler.is_compiling() else (b, a)


def counts_if_not_compiled(self: Any, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        self.seen.append(1)
    return F.gelu(self.lin(x))


ON_THE_TAPE = {
    each.__name__: each
    for each in (
        prints,
        warns,
        logs,
        reads_a_value,
        branches_on_a_value,
        scales_by_a_value,
        reads_an_array,
        selects_by_values,
        computes_otherwise_if_compiled,
        returns_otherwise_if_compiled,
        counts_if_not_compiled,
    )
}


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.mark.parametrize("forward", ON_THE_TAPE.values(), ids=ON_THE_TAPE)
def test_what_code_cannot_do_stays_on_the_tape(forward: Callable[..., Any]) -> None:
    batches = [tokens(), -tokens()]
    twins = Twins(Around(body(forward, lin=linear(), seen=[], bound=0.0)))

    def on(x: Tensor) -> Step:
        def step(module: nn.Module) -> dict[str, Any]:
            text, handler = io.StringIO(), Collect()
            logger.addHandler(handler)
            with contextlib.redirect_stdout(text), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = train(x)(module)
            logger.removeHandler(handler)
            said = [str(each.message) for each in caught if "careful" in str(each.message)]
            effects = {"text": text.getvalue(), "warnings": len(said), "log": len(handler.messages)}
            return found | effects | {"seen": len(module.inside.seen)}

        return step

    for index in range(12):
        twins.step(on(batches[index % 2] if index > 8 else batches[0]))
    assert not twins.is_captured
    assert twins.why_not
    assert twins.why_not.split(";")[0] in twins.handle.explain(wide=True)


def test_the_reason_names_the_question() -> None:
    twins = Twins(Around(body(counts_if_not_compiled, lin=linear(), seen=[])))
    twins.settle(train(tokens()), captured=False)
    assert "whether it is compiled" in twins.why_not


@pytest.mark.parametrize("package", [torch, recompute], ids=["torch", "recompute"])
def test_code_in_a_folder_beside_torch_or_this_package_is_a_users(package: Any) -> None:
    """The ops that torch and this package choose by the question are compared. What other code does is not."""
    folder = os.path.dirname(package.__file__)  # site-packages/torch, beside site-packages/torchvision
    code = counts_if_not_compiled.__code__.replace(co_filename=f"{folder}vision/model.py")
    twins = Twins(Around(body(FunctionType(code, globals()), lin=linear(), seen=[])))
    twins.settle(train(tokens()), captured=False)
    assert "whether it is compiled" in twins.why_not


RETURNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "nested": lambda self, x: (self.lin(x), None, {"a": [3, x.shape[0]], "b": F.gelu(self.lin(x))}),
    "twice the same": lambda self, x: (lambda y: (y, y))(F.gelu(self.lin(x))),
    "its input too": lambda self, x: (x, self.lin(x)),
    "one without gradient": lambda self, x: (F.gelu(self.lin(x)).detach(), self.lin(x)),
    "views": lambda self, x: (self.lin(x).view(2, -1), self.lin(x)[1:]),
    "integers": lambda self, x: (self.lin(x), x.argmax(-1), x > 0),
    "expanded": lambda self, x: self.lin(x)[:1].expand(3, SIZE),
}


@pytest.mark.parametrize("forward", RETURNS.values(), ids=RETURNS)
def test_what_is_returned(forward: Callable[..., Any]) -> None:
    Twins(Around(body(forward, lin=linear()))).settle(train(tokens()))
