"""``apply`` runs nobody's Python: what a model has and reads is afterwards what it was."""

from __future__ import annotations

import collections
import functools
import inspect
import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from tiny import assert_same, rule, rules
from torch import Tensor, nn

import recompute

CALLS: list[Any] = []
COUNTS = {"calls": 0}
FILE = io.StringIO()
CALLED = 0


@functools.lru_cache
def scale_for(width: int) -> float:
    CALLS.append(width)
    return 1.0 / width


def note(x: Tensor) -> Tensor:
    CALLS.append(x.shape)
    return x


class Meter:
    def __init__(self) -> None:
        self.count = 0

    def update(self) -> None:
        self.count += 1

    def __mul__(self, other: Any) -> Any:
        self.count += 1
        return other * 2

    __rmul__ = __mul__


class Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CALLS.append(1)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Module(nn.Module):
    """An MLP, or a norm, of which ``effect`` is a part. It has state of many kinds."""

    def __init__(self, effect: str) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.SiLU()
        self.register_buffer("steps", torch.zeros(()))
        self.past: collections.deque[Any] = collections.deque(maxlen=3)
        self.list: list[Any] = []
        self.dict: dict[str, Any] = {}
        self.set: set[Any] = set()
        self.array, self.tensor, self.count = numpy.ones(8, dtype=numpy.float32), torch.ones(8), 0
        self.meter, self.iterator = Meter(), iter(range(1000))
        self.default: Any = collections.defaultdict(int)
        self.generator = (each for each in range(1000))

    @property
    def counted(self) -> int:
        self.count += 1
        return self.count

    @functools.cached_property
    def cached(self) -> int:
        return 1

    def _count(self) -> None:
        self.count += 1


def _with(body: Callable[[Any, Tensor], Any]) -> type[Module]:
    """A class whose forward has an effect first."""

    class Kind(Module):
        def forward(self, x: Tensor) -> Tensor:
            body(self, x)
            return self.down(self.act(self.up(x)))

    return Kind


def _store(self: Any, x: Tensor) -> None:
    self.last = x


def _add(self: Any, x: Tensor) -> None:
    self.count += 1


def _add_in_place(self: Any, x: Tensor) -> None:
    self.array += 0.1


def _add_to_another_name(self: Any, x: Tensor) -> None:
    array, tensor = self.array, self.tensor
    array += 0.1
    tensor += 1


def _set_item(self: Any, x: Tensor) -> None:
    self.dict["last"] = x


def _delete(self: Any, x: Tensor) -> None:
    del self.dict["first"]


def _change_a_global(self: Any, x: Tensor) -> None:
    global CALLED
    CALLED += 1


def _hide(self: Any, x: Tensor) -> None:
    try:
        self.list.append(x)
    except Exception:
        return


def _loop(self: Any, x: Tensor) -> None:
    for _ in self.iterator:
        break


def _unpack(self: Any, x: Tensor) -> None:
    _, *_ = self.generator


def _multiply(self: Any, x: Tensor) -> None:
    self.meter * 2


def _open_a_block(self: Any, x: Tensor) -> None:
    with torch.no_grad(), FILE:
        pass


def _assign_in_a_block(self: Any, x: Tensor) -> None:
    for self.count in (1, 2):
        pass


def _import(self: Any, x: Tensor) -> None:
    import this  # noqa: F401


EFFECTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "an attribute": _store,
    "a count": _add,
    "an array": _add_in_place,
    "an array by another name": _add_to_another_name,
    "an item": _set_item,
    "a deleted item": _delete,
    "a global": _change_a_global,
    "one that it would hide": _hide,
    "a step of an iterator": _loop,
    "steps of a generator": _unpack,
    "an operator in Python": _multiply,
    "a block": _open_a_block,
    "a target of a loop": _assign_in_a_block,
    "an import": _import,
    "a deque of past values": lambda self, x: self.past.append(x.detach().mean()),
    "a list": lambda self, x: self.list.append(x),
    "a list of a global": lambda self, x: CALLS.append(1),
    "a dict of a global": lambda self, x: COUNTS.update(calls=COUNTS["calls"] + 1),
    "a set": lambda self, x: self.set.add(x.shape[-1]),
    "a default": lambda self, x: self.default["x"],
    "a helper": lambda self, x: note(x),
    "a partial": lambda self, x: functools.partial(note, x)(),
    "a cached helper": lambda self, x: scale_for(8),
    "a property": lambda self, x: self.counted,
    "a cached property": lambda self, x: self.cached,
    "getattr": lambda self, x: getattr(self, "counted"),  # noqa: B009
    "setattr": lambda self, x: setattr(self, "count", 1),
    "vars": lambda self, x: vars(self).update(count=1),
    "a method": lambda self, x: self._count(),
    "a method of an object": lambda self, x: self.meter.update(),
    "a method of a class": lambda self, x: list.append(self.list, x),
    "print": lambda self, x: print(x, file=FILE),
    "a file": lambda self, x: FILE.write("x"),
    "next": lambda self, x: next(self.iterator),
    "a list of what is left": lambda self, x: list(self.iterator),
    "a generator given to a function": lambda self, x: sum(self.generator),
    "a lambda": lambda self, x: (lambda: CALLS.append(1))(),
    "a comprehension": lambda self, x: [CALLS.append(each) for each in (1, 2)],
    "a generator expression": lambda self, x: any(CALLS.append(each) for each in (1, 2)),
    "a key": lambda self, x: sorted((1, 2), key=CALLS.append),
    "a call for each": lambda self, x: list(map(CALLS.append, (1, 2))),
    "a draw": lambda self, x: random.random(),
    "a draw of numpy": lambda self, x: numpy.random.rand(),
    "an array's own operation": lambda self, x: numpy.add(self.array, 1, out=self.array),
    "an array's method": lambda self, x: self.array.fill(2.0),
    "a tensor in place": lambda self, x: self.tensor.add_(1),
    "a buffer in place": lambda self, x: self.steps.add_(1),
    "a buffer's data": lambda self, x: self.steps.data.fill_(3),
    "an output given": lambda self, x: torch.add(self.tensor, 1, out=self.tensor),
    "a hook": lambda self, x: self.up.register_forward_hook(print),
    "a mode": lambda self, x: self.up.eval(),
    "a parameter": lambda self, x: nn.init.zeros_(self.up.weight),
    "a switch of torch": lambda self, x: torch.set_grad_enabled(True),
    "a seed": lambda self, x: torch.manual_seed(0),
    "a Function": lambda self, x: Noting.apply(x),
}


def state_of(module: Module) -> str:
    """All that an effect could change, as text."""
    values = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    module_state = [values, module.state_dict(), vars(module.meter), module.iterator.__reduce__()]
    module_state += [inspect.getgeneratorstate(module.generator), module.up._forward_hooks, module.up.training]
    ours = [CALLS, COUNTS, CALLED, FILE.closed or FILE.tell(), scale_for.cache_info()]
    draws = [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return repr([module_state, ours, hash(repr(draws))])


@pytest.fixture(autouse=True)
def _as_at_first() -> Iterator[None]:
    global FILE
    FILE = io.StringIO()
    yield
    CALLS.clear()
    scale_for.cache_clear()


@pytest.mark.parametrize("effect", EFFECTS)
def test_nobody_can_tell_by_an_effect_that_a_policy_was_applied(effect: str) -> None:
    kind = _with(EFFECTS[effect])
    torch.manual_seed(0)
    module = kind(effect)
    module.dict["first"] = 1
    model = nn.Sequential(module, nn.Linear(8, 8))
    before = state_of(module)
    for via in ("auto", "kernel"):
        recompute.apply(model, rules(rule("Kind", "recompute", via=via))).remove()
    assert state_of(module) == before


STAYING = ("an attribute", "a count", "an array", "an item", "a global", "a deque of past values", "a list of a global")


@pytest.mark.parametrize("effect", STAYING)
def test_later_steps_have_each_effect_once(effect: str) -> None:
    outcomes = []
    for governed in (False, True):
        torch.manual_seed(0)
        CALLS.clear()
        module = _with(EFFECTS[effect])(effect)
        model, x = nn.Sequential(module, nn.Linear(8, 8)), torch.randn(4, 8)
        if governed:
            recompute.apply(model, rules(rule("Kind", "recompute")))
        gradients = []
        for _ in range(3):
            model.zero_grad()
            model(x).sum().backward()
            gradients += [parameter.grad for parameter in model.parameters()]
        values = [CALLS, module.past, module.dict, module.array, module.count]
        outcomes.append((gradients, repr(values)))
    assert_same(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]
