"""Calculates a step of a model with many layers from two steps with the first few of them.

A layer's bytes depend on its kind and on those of its neighbours, and come on top of what the layers before it hold and
of the gradients that the layers after it have left. The longer of the two steps shows each such kind. The shorter one
must be what that says it is, or all layers run. It may be off by a tensor that layers share, such as angles of rotary
embeddings: backward frees it in the first layer that reads it, which need not be the first of all.

Two steps also show which layers a moment outside of the lists adds up. Under the next policy one step is then enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from recompute.errors import ModelError
from recompute.estimation.layer_stacks import LayerStack, Neighbourhood, shortened
from recompute.estimation.simulation import MomentMemory, SimulatedStep

_SHARED = 1e-3  # of the peak: by so much a shared tensor may move a moment


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
    key = tuple([(stack.path, *stack[2:]) for stack in stacks])
    whole = [len(stack.kinds) for stack in stacks]
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
        self._added: dict[Any, tuple[float, int]] = {}
        """Seconds, and bytes on the host."""
        self._is_own = False
        """Whether moments outside of the lists grow as they do under this policy, and not under another one."""
        self._learn()

    def _learn(self) -> None:
        counts = {id(stack): stack.few for stack in self._stacks}
        for stack, index, key in self._layers(counts):
            inside = re.compile(rf"{re.escape(stack.named(index))}(\..*)?")
            held = [(match[1] or "", n) for path, n in self._more.held.items() if (match := inside.fullmatch(path))]
            gradient = self._more.gradients.get(stack.named(index), 0)
            name = stack.named(index)
            self._added[key] = self._more.seconds.get(name, 0.0), self._more.host.get(name, 0)
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
        tables = ("held", "gradients", "seconds", "host")
        held, gradients, seconds, host = (self._elsewhere(self._more, each) for each in tables)
        for each, index, key in self._layers(counts):
            held |= {each.named(index) + inside: nbytes for inside, nbytes in self._held[key]}
            if self._gradients[key]:
                gradients[each.named(index)] = self._gradients[key]
            seconds[each.named(index)], host[each.named(index)] = self._added[key]
        by_layer: dict[str, Any] = {"gradients": gradients, "seconds": seconds, "host": host}
        return replace(self._more, moments=tuple(moments), held=held, **by_layer)

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

    def _elsewhere(self, step: SimulatedStep, table: str) -> dict[str, Any]:
        """What a table has by path, of paths outside of the lists."""
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
