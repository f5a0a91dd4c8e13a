"""Calculates a step of a model with many layers from two steps with the first few of them.

A layer's bytes depend on its kind and on those of its neighbours, and come on top of what the layers before it hold and
of the gradients that the layers after it have left. The longer of the two steps shows each such kind. The shorter one
must be what that says it is, or all layers run. It may be off by a tensor that layers share, such as angles of rotary
embeddings: backward frees it in the first layer that reads it, which need not be the first of all.

Two steps also show which layers a moment outside of the lists adds up. Under the next policy one step is then enough.

Two steps also show which layers a moment outside of the layers adds up. That is so under any policy, so that one step
is enough under the next one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from recompute.attach.module_entries import module_entries
from recompute.engine.reachable_objects import base_of
from recompute.errors import ModelError
from recompute.estimation.simulation import MomentMemory, SimulatedStep
from recompute.policy.matching import assign
from recompute.policy.rules import Policy

_LEAST = 4  # layers, of which the two in the middle must be alike
_WORTH_IT = 2  # times as many layers as run
_SHARED = 1e-3  # of the peak: by so much a shared tensor may move a moment


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
    def to_learn(self) -> int:
        """How many of the first layers show every kind, and one more: the first one's input comes from elsewhere."""
        return max(map(self.kinds.index, self.kinds)) + 2

    def neighbourhoods(self, count: int) -> list[Neighbourhood]:
        """Those of the layers in a list of the first ``count``."""
        return _neighbourhoods(self.kinds[:count], self.tells_first)

    def named(self, index: int) -> str:
        return f"{self.path}.{index}"


def find_stacks(model: nn.Module, policy: Policy | None, *, tells_first: bool = False) -> list[LayerStack]:
    """The outermost lists of layers of which a few stand for all, under the policy's rules.

    tells_first: whether the first layer of each kind counts as one by itself, which may take more layers.
    """
    rules = _rules_by_path(model, policy)
    found: list[LayerStack] = []
    outer: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not path or any(path.startswith(f"{each}.") for each in outer):
            continue
        outer.append(path)
        numbers: dict[Any, int] = {}
        keys = [(structure_of(layer), _rules_in(rules, f"{path}.{name}")) for name, layer in module.named_children()]
        kinds = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        counts = _few(kinds, tells_first)
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
    for count in range(_LEAST, len(kinds) // _WORTH_IT):
        if shown(count).keys() == every.keys() and shown(count)[usual] >= min(2, times):
            fewer = next((n for n in range(count - 1, 0, -1) if shown(n).keys() <= every.keys()), 0)
            return (fewer, count) if fewer and fewer + count < len(kinds) else None
    return None


def _neighbourhoods(kinds: Sequence[int], tells_first: bool) -> list[Neighbourhood]:
    ends, first = (None, *kinds, None), {kind: kinds.index(kind) for kind in set(kinds) if tells_first}
    around = zip(ends, kinds, ends[2:], strict=False)
    return [(before, kind, after, first.get(kind) == index) for index, (before, kind, after) in enumerate(around)]


def structure_of(module: nn.Module) -> Any:
    """A value that is equal for modules that run the same ops on tensors of the same shapes, as far as can be seen."""
    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, plain) and not re.search(r"idx|index|layer_id", name)
    ]
    tensors = [
        (name, None if each is None else (each.shape, each.dtype, each.requires_grad))
        for name, each in (*module._parameters.items(), *module._buffers.items())
        if each is None or isinstance(each, Tensor)
    ]
    children = [(name, None if child is None else structure_of(child)) for name, child in module._modules.items()]
    return base_of(module), tuple(attributes), tuple(tensors), tuple(children)


@contextmanager
def shortened_list(layers: nn.Module, count: int) -> Iterator[None]:
    """Inside, the list has its first ``count`` layers alone."""
    whole = layers._modules
    layers._modules = dict(list(whole.items())[:count])
    try:
        yield
    finally:
        layers._modules = whole


@contextmanager
def shortened(stacks: Sequence[LayerStack], which: str) -> Iterator[None]:
    with ExitStack() as stack:
        for each in stacks:
            stack.enter_context(shortened_list(each.layers, getattr(each, which)))
        yield


Growth = dict[tuple[str, int], list[tuple[frozenset[int], frozenset[int]]]]
"""By which sums over lists a moment outside of them grows: for each entry of what is alive then.

By the moment's name and the number of entries. The sums are indices of ``_Sums.left_by``, for gradients, and of
``_Sums.alive``, for other bytes.
"""


def extrapolated_step(
    stacks: Sequence[LayerStack],
    governed: Callable[..., AbstractContextManager[Callable[[], SimulatedStep]]],
    known: dict[Any, Growth],
) -> SimulatedStep | None:
    """What a step of all layers takes, from two steps with few of them; None where these do not agree.

    governed: puts the policy on the layers that there are, and runs first forwards inside of what it is given; what it
        yields runs a step with the layers that there are then.
    known: what moments outside of the layers grow by under other policies. With it, the longer step is enough.
    """
    if not stacks:
        return None
    key, whole = tuple([stack._replace(layers=None) for stack in stacks]), [len(stack.kinds) for stack in stacks]
    try:
        with shortened(stacks, "few"), governed(partial(shortened, stacks, "to_learn")) as simulate:
            rows = _Extrapolation(stacks, simulate())
            if key in known:
                try:
                    return rows.of(whole, known[key])
                except _NotAlike:  # other moments than under that policy
                    pass
            with shortened(stacks, "fewer"):
                less = simulate()
        growth = rows.growth_from(less)
        if not rows.of([stack.fewer for stack in stacks], growth).is_like(less, rows.tolerance):
            return None
        found = rows.of(whole, growth)
    except (ModelError, _NotAlike):  # a ModelError: the model has the number of its layers elsewhere, too
        return None
    known[key] = known.get(key, {}) | growth
    return found


class _NotAlike(Exception):
    """Layers of one kind differ in what they take, or moments do not correspond."""


Alive = tuple[tuple[int, int], ...]
"""``MomentMemory.alive`` in order: bytes of gradients, and the most bytes alive beside them."""


@dataclass
class _Sums:
    """For a number of layers in each list: what is alive before each layer, and the gradients from after it.

    Lists are in the order in which forward runs them. Behind the layers comes what is alive, or left, by whole lists.
    """

    before: dict[str, dict[str, int]]
    """By phase: in forward what earlier layers hold, in backward also what came back of them."""
    left: dict[str, int]
    alive: list[int]
    left_by: list[int]


class _Extrapolation:
    def __init__(self, stacks: Sequence[LayerStack], more: SimulatedStep):
        order = [moment.name for moment in more.moments]
        self._given = stacks
        self._stacks = sorted(stacks, key=lambda stack: _place(order, f"forward of {stack.named(0)}"))
        self._more = more
        self.tolerance = int(_SHARED * max(nbytes for moment in more.moments for nbytes in moment.alive.values()))
        self._held: dict[Any, tuple[tuple[str, int], ...]] = {}
        self._alive: dict[Any, Alive] = {}
        self._returned: dict[tuple[str, int], int] = {}
        """By list and kind: what is alive of a layer in backward of later ones beside what it holds.

        Where a layer's input comes back from the layer before it, those of all layers are there from the start on.
        """
        self._gradients: dict[Any, int] = {}
        self._is_own = False
        """Whether moments outside of the lists grow as they do under this policy, and not under another one."""
        self._learn()

    def _learn(self) -> None:
        counts = {id(stack): stack.few for stack in self._stacks}
        for stack, index, key in self._layers(counts):
            inside = re.compile(rf"{re.escape(stack.named(index))}(\..*)?")
            held = [(match[1] or "", n) for path, n in self._more.held.items() if (match := inside.fullmatch(path))]
            gradient = self._more.gradients.get(stack.named(index), 0)
            seen = tuple(sorted(held)), gradient
            if (self._held.setdefault(key, seen[0]), self._gradients.setdefault(key, gradient)) != seen:
                raise _NotAlike
        moments = {moment.name: moment for moment in self._more.moments}
        self._learn_what_returns(self._sums(counts), moments)
        sums = self._sums(counts)
        for stack, index, key in self._layers(counts):
            path = stack.named(index)
            for phase in _PHASES:
                moment = moments.get(phase + path)
                if moment is not None:
                    alive = _shifted(moment, -sums.before[phase][path], -_left(sums, phase, path))
                    self._alive[phase, key] = self._most(self._alive.get((phase, key), alive), alive)

    def _learn_what_returns(self, sums: _Sums, moments: Mapping[str, MomentMemory]) -> None:
        """From layers with one neighbourhood: by how much more than is held does backward have before the later one?"""
        for stack in self._stacks:
            latest: dict[Neighbourhood, tuple[int, int]] = {}
            kinds = sorted(set(stack.kinds))
            between, found = [], []
            for index, around in enumerate(stack.neighbourhoods(stack.few)):
                path = stack.named(index)
                moment = moments.get(_PHASES[1] + path)
                if moment is None:
                    continue
                nbytes = max(moment.alive.values()) - sums.before[_PHASES[1]][path]
                if around in latest:
                    start, before = latest[around]
                    between.append([stack.kinds[start:index].count(kind) for kind in kinds])
                    found.append(nbytes - before)
                latest[around] = index, nbytes
            if any(abs(nbytes) > self.tolerance for nbytes in found):
                returned = np.linalg.lstsq(np.array(between), np.array(found), rcond=None)[0]
                self._returned |= {(stack.path, kind): round(n) for kind, n in zip(kinds, returned, strict=True)}

    def _most(self, first: Alive, second: Alive) -> Alive:
        """The more of the two at each number of bytes of gradients."""
        if [g for g, _ in first] != [g for g, _ in second]:
            raise _NotAlike
        if any(abs(a - b) > self.tolerance for (_, a), (_, b) in zip(first, second, strict=True)):
            raise _NotAlike
        return tuple([max(pair) for pair in zip(first, second, strict=True)])

    def _layers(self, counts: Mapping[int, int]) -> Iterator[tuple[LayerStack, int, Any]]:
        for stack in self._stacks:
            for index, around in enumerate(stack.neighbourhoods(counts[id(stack)])):
                yield stack, index, (stack.path, around)

    def _sums(self, counts: Mapping[int, int]) -> _Sums:
        rows = list(self._layers(counts))
        held = [sum(nbytes for _, nbytes in self._held[key]) for _, _, key in rows]
        returned = [self._returned.get((stack.path, stack.kinds[index]), 0) for stack, index, _ in rows]
        left = [self._gradients[key] for _, _, key in rows]
        paths = [stack.named(index) for stack, index, _ in rows]
        alive = {_PHASES[0]: held, _PHASES[1]: [sum(pair) for pair in zip(held, returned, strict=True)]}
        before = {phase: [0, *accumulate(each)] for phase, each in alive.items()}
        after = [0, *accumulate(reversed(left))][::-1]
        borders = [0, *accumulate(counts[id(stack)] for stack in self._stacks)]
        return _Sums(
            {phase: dict(zip(paths, each, strict=False)) for phase, each in before.items()},
            dict(zip(paths, after[1:], strict=True)),
            [before[phase][border] for phase in _PHASES for border in borders],
            [after[border] for border in borders],
        )

    def _outside(self) -> Iterator[MomentMemory]:
        return (moment for moment in self._more.moments if self._of_layer(moment.name)[1] is None)

    def growth_from(self, less: SimulatedStep) -> Growth:
        """By which sums moments outside of the lists grow from the shorter step to the longer one."""
        same = ("held", "gradients")
        if less.logits_peak_nbytes != self._more.logits_peak_nbytes:
            raise _NotAlike
        if any(self._elsewhere(less, table) != self._elsewhere(self._more, table) for table in same):
            raise _NotAlike
        before = {moment.name: sorted(moment.alive.items()) for moment in less.moments}
        few, more = (self._sums({id(stack): getattr(stack, n) for stack in self._stacks}) for n in ("fewer", "few"))
        found: Growth = {}
        self._is_own = True
        for moment in self._outside():
            rows = list(zip(before.get(moment.name, ()), sorted(moment.alive.items()), strict=False))
            if not len(rows) == len(before.get(moment.name, ())) == len(moment.alive):
                raise _NotAlike
            found[moment.name, len(rows)] = [
                (
                    _sources(new[0] - old[0], few.left_by, more.left_by),
                    _sources(new[1] - old[1], few.alive, more.alive, self.tolerance),
                )
                for old, new in rows
            ]
        return found

    def of(self, counts_given: Sequence[int], growth: Growth) -> SimulatedStep:
        """The step with so many layers in each list."""
        counts = {id(stack): count for stack, count in zip(self._given, counts_given, strict=True)}
        sums = self._sums(counts)
        more = self._sums({id(stack): stack.few for stack in self._stacks})
        moments: list[MomentMemory] = []
        done: set[str] = set()
        for moment in self._more.moments:
            phase, stack = self._of_layer(moment.name)
            if stack is None:
                rows = sorted(moment.alive.items())
                sources = growth.get((moment.name, len(rows)))
                if sources is None:
                    raise _NotAlike
                alive = {
                    gradients + self._grown(by[0], more.left_by, sums.left_by): (
                        nbytes + self._grown(by[1], more.alive, sums.alive)
                    )
                    for (gradients, nbytes), by in zip(rows, sources, strict=True)
                }
                moments.append(MomentMemory(moment.name, alive))
            elif phase + stack.path not in done:
                done.add(phase + stack.path)
                moments += self._of_stack(phase, stack, counts[id(stack)], sums)
        held, gradients = self._elsewhere(self._more, "held"), self._elsewhere(self._more, "gradients")
        for each, index, key in self._layers(counts):
            held |= {each.named(index) + inside: nbytes for inside, nbytes in self._held[key]}
            if self._gradients[key]:
                gradients[each.named(index)] = self._gradients[key]
        return replace(self._more, moments=tuple(moments), held=held, gradients=gradients)

    def _of_layer(self, name: str) -> tuple[str, LayerStack | None]:
        for phase in _PHASES:
            for stack in self._stacks:
                if name.startswith(f"{phase}{stack.path}."):
                    return phase, stack
        return "", None

    def _of_stack(self, phase: str, stack: LayerStack, count: int, sums: _Sums) -> Iterator[MomentMemory]:
        layers = list(enumerate(stack.neighbourhoods(count)))
        for index, around in layers if phase == _PHASES[0] else reversed(layers):
            path, key = stack.named(index), (phase, (stack.path, around))
            if key in self._alive:  # a frozen layer has no backward
                before, left = sums.before[phase][path], _left(sums, phase, path)
                yield MomentMemory(phase + path, {g + left: n + before for g, n in self._alive[key]})

    def _grown(self, sources: frozenset[int], more: Sequence[int], wanted: Sequence[int]) -> int:
        """By how much the sums grow from ``more`` to ``wanted``: under another policy all of them must agree."""
        found = {0 if index < 0 else wanted[index] - more[index] for index in sources}
        if len(found) > 1 and not self._is_own:
            raise _NotAlike
        return min(found)

    def _elsewhere(self, step: SimulatedStep, table: str) -> dict[str, int]:
        """The bytes by path outside of the lists."""
        lists = tuple([f"{stack.path}." for stack in self._stacks])
        return {path: nbytes for path, nbytes in getattr(step, table).items() if not path.startswith(lists)}


_PHASES = ("forward of ", "backward of ")


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _left(sums: _Sums, phase: str, path: str) -> int:
    return sums.left[path] if phase == _PHASES[1] else 0


def _shifted(moment: MomentMemory, held: int, left: int) -> Alive:
    return tuple(sorted((gradients + left, nbytes + held) for gradients, nbytes in moment.alive.items()))


def _sources(difference: int, less: Sequence[int], more: Sequence[int], tolerance: int = 0) -> frozenset[int]:
    """The sums that grow from ``less`` to ``more`` by about as much; -1 stands for no growth."""
    off = {index: abs(b - a - difference) for index, (a, b) in enumerate(zip(less, more, strict=True))}
    off[-1] = abs(difference)
    if min(off.values()) > tolerance:
        raise _NotAlike
    return frozenset([index for index, nbytes in off.items() if nbytes == min(off.values())])
