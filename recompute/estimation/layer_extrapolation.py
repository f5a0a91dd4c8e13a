"""Calculates a step of a model with many layers from two steps with the first few of them.

A layer's bytes depend on its kind and on its neighbours' kinds. They come on top of the bytes that earlier layers hold
and of the gradients that later layers have left. The longer step shows each such kind. The shorter one must be as
calculated from it, or all layers run. It may be off by a tensor that layers share, such as angles of rotary embeddings:
backward frees it in the first layer that reads it, which need not be the first of all.

Two steps also show which layers' bytes add up in a moment outside of the lists. Under the next policy one step is then
enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from recompute.errors import ModelError
from recompute.estimation.layer_stacks import LayerStack, shortened
from recompute.estimation.simulation import MomentMemory, SimulatedStep

_SHARED = 1e-3  # of the peak: by so much a shared tensor may move a moment
_FORWARD, _BACKWARD = "forward of ", "backward of "

Growth = dict[tuple[str, int], list[tuple[frozenset[int], frozenset[int]]]]
"""For each entry of a moment outside of the lists, the sums over lists that it grows by.

The keys are the moment's name and the number of its entries. The sums are indices of ``_Sums.left``, for gradients, and
of ``_Sums.alive``, for other bytes.
"""
Alive = tuple[tuple[int, int], ...]
"""``MomentMemory.alive`` in order: bytes of gradients, and the most bytes alive beside them."""


def extrapolated_step(
    stacks: Sequence[LayerStack],
    governed: Callable[..., AbstractContextManager[Callable[[], Sequence[SimulatedStep]]]],
    known: dict[Any, Growth],
) -> list[SimulatedStep] | None:
    """Steps of all layers, each from two steps with few of them; None where these do not agree.

    governed: puts the policy on the model's layers, and runs first steps. It yields a function that runs steps with
        the layers that there are then.
    known: the growth of moments outside of the layers under other policies. With it, the longer step is enough.
    """
    if not stacks:
        return None
    key = tuple([(stack.path, *stack[2:]) for stack in stacks])
    try:
        with shortened(stacks, "few"), governed() as simulate:
            steps = [_Few(stacks, step) for step in simulate()]
            if key in known:
                with suppress(_NotAlike):  # other moments than under that policy
                    return [few.continued("whole", known[key], is_own=False) for few in steps]
            with shortened(stacks, "fewer"):
                shorter = simulate()
        found: list[SimulatedStep] = []
        growth: dict[tuple[str, int], Any] = {}
        for few, less in zip(steps, shorter, strict=True):
            grown = few.growth_from(less)
            if not few.continued("fewer", grown).is_like(less, few.tolerance):
                return None
            found.append(few.continued("whole", grown))
            growth |= grown
    except (ModelError, _NotAlike):  # a ModelError: the model has the number of its layers elsewhere, too
        return None
    known[key] = known.get(key, {}) | growth
    return found


class _NotAlike(Exception):
    """Layers of one kind differ in their bytes, or moments do not correspond."""


class _Sums(NamedTuple):
    """For a number of layers in each list: the bytes that other layers add to the moments of each.

    Lists are in the order in which forward runs them.
    """

    beside: dict[str, tuple[int, int]]
    """By a moment's name: the gradients of later layers, and the bytes that earlier layers have alive.

    In forward these are their held bytes, in backward also bytes that came back.
    """
    left: list[int]
    """The gradients of all lists from each one on."""
    alive: list[int]
    """The bytes alive of all lists before each one, in forward and then in backward."""


class _Few:
    """A step with the first few layers of each list, some of which stand for all others."""

    def __init__(self, stacks: Sequence[LayerStack], step: SimulatedStep):
        self._step = step
        self._moments = {moment.name: moment.alive for moment in step.moments}
        order = {name: number for number, name in enumerate(self._moments)}
        self._stacks = sorted(stacks, key=lambda stack: order.get(_FORWARD + stack.named(0), len(order)))
        self.tolerance = int(_SHARED * max(nbytes for alive in self._moments.values() for nbytes in alive.values()))
        rows = self._rows("few")
        self._own = {path: tuple([_inside(table, path) for table in (step.held, step.gradients)]) for path, _ in rows}
        if any(self._own[path] != self._own[stand_in] for path, stand_in in rows):
            raise _NotAlike
        self._returned: dict[str, int] = {}
        """By layer: its bytes alive in backward of later ones, beside those that it holds.

        Where a layer's input comes back from the layer before it, the inputs of all layers are there from the start.
        """
        self._learn_what_returns(self._sums("few").beside)
        beside = self._sums("few").beside
        self._alive: dict[str, Alive] = {}
        """By the moment of a layer that stands for others: the most bytes alive that are those of one such layer."""
        for path, stand_in in rows:
            for phase in (_FORWARD, _BACKWARD):
                if (name := phase + path) in self._moments:
                    alive = _shifted(self._moments[name], beside[name], -1)
                    self._alive[phase + stand_in] = self._most(self._alive.get(phase + stand_in, alive), alive)

    def _learn_what_returns(self, beside: Mapping[str, tuple[int, int]]) -> None:
        """From layers with one stand-in: the bytes beside held ones that backward has before the later one."""
        for stack in self._stacks:
            latest: dict[int, tuple[int, int]] = {}
            between, found = [], []
            for index, stand_in in enumerate(stack.stand_ins("few")):
                name = _BACKWARD + stack.named(index)
                if name not in self._moments:
                    continue
                nbytes = max(self._moments[name].values()) - beside[name][1]
                if stand_in in latest:
                    start, before = latest[stand_in]
                    between.append([stack.kinds[start:index].count(kind) for kind in range(max(stack.kinds) + 1)])
                    found.append(nbytes - before)
                latest[stand_in] = index, nbytes
            if any(abs(nbytes) > self.tolerance for nbytes in found):
                of_kinds = np.linalg.lstsq(np.array(between), np.array(found), rcond=None)[0]
                few = enumerate(stack.kinds[: stack.few])
                self._returned |= {stack.named(index): round(of_kinds[kind]) for index, kind in few}

    def _most(self, first: Alive, second: Alive) -> Alive:
        """The more of the two at each number of bytes of gradients."""
        pairs = list(zip(first, second, strict=False))
        if len(first) != len(second) or any(a[0] != b[0] or abs(a[1] - b[1]) > self.tolerance for a, b in pairs):
            raise _NotAlike
        return tuple(map(max, pairs))

    def _rows(self, which: str) -> list[tuple[str, str]]:
        """The path of each layer, and that of the one that stands for it. which: as ``shortened`` takes it."""
        return [row for stack in self._stacks for row in stack.rows(which)]

    def _sums(self, which: str) -> _Sums:
        rows = self._rows(which)
        held = [sum(self._own[stand_in][0].values()) for _, stand_in in rows]
        returned = [self._returned.get(stand_in, 0) for _, stand_in in rows]
        forward = [0, *accumulate(held)]
        backward = [0, *accumulate(map(sum, zip(held, returned, strict=True)))]
        left = [0, *accumulate(sum(self._own[stand_in][1].values()) for _, stand_in in reversed(rows))][::-1]
        beside: dict[str, tuple[int, int]] = {}
        for number, (path, _) in enumerate(rows):
            beside[_FORWARD + path] = 0, forward[number]
            beside[_BACKWARD + path] = left[number + 1], backward[number]
        borders = [0, *accumulate(getattr(stack, which) for stack in self._stacks)]
        alive = [each[border] for each in (forward, backward) for border in borders]
        return _Sums(beside, [left[border] for border in borders], alive)

    def growth_from(self, less: SimulatedStep) -> Growth:
        """By which sums moments outside of the lists grow from the shorter step to this one."""
        before = {moment.name: sorted(moment.alive.items()) for moment in less.moments}
        fewer, few = self._sums("fewer"), self._sums("few")
        found: Growth = {}
        for name, alive in self._moments.items():
            if self._list_of(name) is not None:
                continue
            if len(before.get(name, ())) != len(alive):
                raise _NotAlike
            found[name, len(alive)] = [
                (
                    _sources(new[0] - old[0], fewer.left, few.left),
                    _sources(new[1] - old[1], fewer.alive, few.alive, self.tolerance),
                )
                for old, new in zip(before[name], sorted(alive.items()), strict=True)
            ]
        return found

    def continued(self, which: str, growth: Growth, *, is_own: bool = True) -> SimulatedStep:
        """The step with so many layers. is_own: whether the growth was seen under the policy of this step."""
        few, wanted = self._sums("few"), self._sums(which)
        moments: dict[str, dict[int, int]] = {}
        for name, alive in self._moments.items():
            if (stack := self._list_of(name)) is not None:
                phase, rows = (_FORWARD if name.startswith(_FORWARD) else _BACKWARD), stack.rows(which)
                for path, stand_in in rows if phase == _FORWARD else reversed(rows):
                    if phase + stand_in in self._alive:  # a frozen layer has no backward
                        shifted = _shifted(dict(self._alive[phase + stand_in]), wanted.beside[phase + path], 1)
                        moments[phase + path] = dict(shifted)
                continue
            if (name, len(alive)) not in growth:
                raise _NotAlike
            moments[name] = {
                gradients + _grown(of_left, few.left, wanted.left, is_own): (
                    nbytes + _grown(of_alive, few.alive, wanted.alive, is_own)
                )
                for (gradients, nbytes), (of_left, of_alive) in zip(
                    sorted(alive.items()), growth[name, len(alive)], strict=True
                )
            }
        tables: dict[str, Any] = {name: self._table(name, which) for name in ("held", "gradients", "seconds", "host")}
        return replace(self._step, moments=tuple([MomentMemory(*each) for each in moments.items()]), **tables)

    def _list_of(self, name: str) -> LayerStack | None:
        """The list of a moment's layer; None for a moment outside of the lists."""
        path = name.removeprefix(_FORWARD).removeprefix(_BACKWARD)
        return next((stack for stack in self._stacks if path.startswith(f"{stack.path}.")), None)

    def _table(self, name: str, which: str) -> dict[str, Any]:
        """One of the step's tables by path, with so many layers."""
        table = getattr(self._step, name)
        lists = tuple([f"{stack.path}." for stack in self._stacks])
        found = {path: number for path, number in table.items() if not path.startswith(lists)}
        for path, stand_in in self._rows(which):
            found |= {path + inside: number for inside, number in _inside(table, stand_in).items()}
        return found


def _inside(table: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """The entries of a layer and of what is in it, by the path inside of it."""
    return {path[len(layer) :]: table[path] for path in sorted(table) if f"{path}.".startswith(f"{layer}.")}


def _shifted(alive: Mapping[int, int], by: tuple[int, int], sign: int) -> Alive:
    return tuple(sorted((gradients + sign * by[0], nbytes + sign * by[1]) for gradients, nbytes in alive.items()))


def _sources(difference: int, less: Sequence[int], more: Sequence[int], tolerance: int = 0) -> frozenset[int]:
    """The sums that grow by about ``difference`` from ``less`` to ``more``. The sum over no list never grows."""
    off = [abs(b - a - difference) for a, b in zip(less, more, strict=True)]
    if min(off) > tolerance:
        raise _NotAlike
    return frozenset([index for index, nbytes in enumerate(off) if nbytes == min(off)])


def _grown(sources: frozenset[int], few: Sequence[int], wanted: Sequence[int], is_own: bool) -> int:
    """The growth of the sums from ``few`` to ``wanted``. Under another policy all of them must agree."""
    found = {wanted[index] - few[index] for index in sources}
    if len(found) > 1 and not is_own:
        raise _NotAlike
    return min(found)
