"""Finds the lists of layers in a model, and how few of the layers stand for all of a list."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn

from recompute.attach.module_entries import module_entries
from recompute.engine.reachable_objects import base_of
from recompute.engine.thread_state import swapped
from recompute.policy.matching import assign
from recompute.policy.rules import Policy

_LEAST = 4  # layers: the two in the middle must be alike

Neighbourhood = tuple[int | None, int, int | None, bool]
"""The kinds of the layer before, of a layer and of the one after it, and whether it is the first of its kind.

Backward frees in the first of a kind what those of the kind share, as a mask.
"""


class LayerStack(NamedTuple):
    """A list of layers, each with a number that equal layers share, and how many of the first ones stand for all."""

    path: str
    layers: nn.Module
    kinds: tuple[int, ...]
    fewer: int
    few: int
    tells_first: bool
    """Whether the first layer of each kind counts as one by itself."""

    @property
    def whole(self) -> int:
        return len(self.kinds)

    def stand_ins(self, which: str) -> list[int]:
        """For each of so many layers, the last of the few that has its neighbourhood. which: as for ``shortened``."""
        few, around = (_neighbourhoods(self.kinds[: getattr(self, each)], self.tells_first) for each in ("few", which))
        known = {each: index for index, each in enumerate(few)}
        return [known[each] for each in around]

    def rows(self, which: str) -> list[tuple[str, str]]:
        """The path of each of so many layers, and that of its stand-in."""
        return [(self.named(index), self.named(stand_in)) for index, stand_in in enumerate(self.stand_ins(which))]

    def named(self, index: int) -> str:
        return f"{self.path}.{index}"


def find_stacks(model: nn.Module, policy: Policy | None, *, tells_first: bool = False) -> list[LayerStack]:
    """The outermost lists of layers where a few stand for all, under the policy's rules.

    tells_first: whether the first layer of each kind counts as one by itself, which may take more layers.
    """
    rules = _rules_by_path(model, policy)
    found: list[LayerStack] = []
    outer: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or not path:
            continue
        if any(path.startswith(f"{each}.") for each in outer):
            continue
        numbers: dict[Any, int] = {}
        keys = [(structure_of(layer), _rules_in(rules, f"{path}.{name}")) for name, layer in module.named_children()]
        kinds = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        counts = _few(kinds, tells_first)
        if counts is not None or isinstance(module, nn.ModuleList):  # a sequence of others is no list of layers
            outer.append(path)
        if counts is not None:
            found.append(LayerStack(path, module, kinds, *counts, tells_first))
    with shortened(found, "few"):
        few = _rules_by_path(model, policy)
    return found if all(rules.get(path) == rule for path, rule in few.items()) else []


def _rules_by_path(model: nn.Module, policy: Policy | None) -> dict[str, Any]:
    if policy is None:
        return {}
    return dict(assign(policy, module_entries(model, type(model).__name__)[0]))


def _rules_in(rules: Mapping[str, Any], layer: str) -> tuple[Any, ...]:
    return tuple([(path[len(layer) :], rule) for path, rule in rules.items() if f"{path}.".startswith(f"{layer}.")])


def _few(kinds: Sequence[int], tells_first: bool) -> tuple[int, int] | None:
    """How many of the first layers show every neighbourhood, the usual one twice; and fewer that show no other."""

    def shown(count: int) -> Counter[Neighbourhood]:
        return Counter(_neighbourhoods(kinds[:count], tells_first))

    every = shown(len(kinds))
    if not kinds:
        return None
    usual, times = every.most_common(1)[0]
    for count in range(_LEAST, len(kinds)):
        if shown(count).keys() == every.keys() and shown(count)[usual] >= min(2, times):
            fewer = next((n for n in range(count - 1, 0, -1) if shown(n).keys() <= every.keys()), 0)
            return (fewer, count) if fewer and fewer + count < len(kinds) else None
    return None


def _neighbourhoods(kinds: Sequence[int], tells_first: bool) -> list[Neighbourhood]:
    ends, first = (None, *kinds, None), {kind: kinds.index(kind) for kind in set(kinds) if tells_first}
    around = zip(ends, kinds, ends[2:], strict=False)
    return [(before, kind, after, first.get(kind) == index) for index, (before, kind, after) in enumerate(around)]


def structure_of(module: nn.Module, *, numbers_count: bool = True) -> Any:
    """A value that is equal for modules that run the same ops on tensors of the same shapes, as far as can be seen.

    numbers_count: whether numbers among attributes have to be equal. If not, only their types, and whether a float is
        0: the index of a layer may have any name.
    """

    def compared(value: Any) -> Any:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value if numbers_count or not is_number else (type(value), isinstance(value, float) and bool(value))

    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, compared(value))
        for name, value in vars(module).items()
        if isinstance(value, plain) and not re.search(r"idx|index|layer_id", name)
    ]
    tensors = [
        (name, None if each is None else (each.shape, each.dtype, each.requires_grad))
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is None or isinstance(each, Tensor)
    ]
    children = [
        (name, None if child is None else structure_of(child, numbers_count=numbers_count))
        for name, child in module._modules.items()
    ]
    return base_of(module), tuple(attributes), tuple(tensors), tuple(children)


@contextmanager
def shortened(stacks: Sequence[LayerStack], which: str) -> Iterator[None]:
    """Inside, each list has its first layers alone, as many as its attribute ``which``."""
    with ExitStack() as stack:
        for each in stacks:
            first = dict(islice(each.layers._modules.items(), getattr(each, which)))
            stack.enter_context(swapped(each.layers, "_modules", first))
        yield
