"""Calculates a step of a model with many layers from two steps with the first few of them.

A layer's bytes depend on its kind and on its neighbours' kinds. They come on top of the bytes that earlier layers hold
and of the gradients that later layers have left. The longer step shows each such kind. The shorter one must be as
calculated from it, or all layers run. It may be off by a tensor that layers share, such as angles of rotary embeddings:
backward frees it in the first layer that reads it, which need not be the first of all.

Two steps also show which layers' bytes add up in a moment outside of the lists. Under the next policy one step is then
enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from recompute.errors import ModelError
from recompute.estimation.layer_stacks import LayerStack, Neighbourhood, shortened
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
Kind = tuple[str, Neighbourhood]
"""A layer's list and neighbourhood, which layers share that take the same."""


def extrapolated_step(
    stacks: Sequence[LayerStack],
    governed: Callable[..., AbstractContextManager[Callable[[], SimulatedStep]]],
    known: dict[Any, Growth],
) -> SimulatedStep | None:
    """A step of all layers, from two steps with few of them; None where these do not agree.

    governed: puts the policy on the model's layers, and runs first steps. It yields a function that runs a step with
        the layers that there are then.
    known: the growth of moments outside of the layers under other policies. With it, the longer step is enough.
    """
    if not stacks:
        return None
    key = tuple([(stack.path, *stack[2:]) for stack in stacks])
    try:
        with shortened(stacks, "few"), governed() as simulate:
            few = _Few(stacks, simulate())
            if key in known:
                with suppress(_NotAlike):  # other moments than under that policy
                    return few.continued("whole", known[key], is_own=False)
            with shortened(stacks, "fewer"):
                less = simulate()
        growth = few.growth_from(less)
        if not few.continued("fewer", growth).is_like(less, few.tolerance):
            return None
        found = few.continued("whole", growth)
    except (ModelError, _NotAlike):  # a ModelError: the model has the number of its layers elsewhere, too
        return None
    known[key] = known.get(key, {}) | growth
    return found


class _NotAlike(Exception):
    """Layers of one kind differ in their bytes, or moments do not correspond."""


class _Layer(NamedTuple):
    """The bytes and the seconds of a layer by itself."""

    held: dict[str, int]
    """By the path inside of it."""
    gradients: int
    seconds: float
    host: int


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
    """A step with the first few layers of each list, and the costs of each kind of layer in it."""

    def __init__(self, stacks: Sequence[LayerStack], step: SimulatedStep):
        self._step = step
        self._moments = {moment.name: moment.alive for moment in step.moments}
        order = {name: number for number, name in enumerate(self._moments)}
        self._stacks = sorted(stacks, key=lambda stack: order.get(_FORWARD + stack.named(0), len(order)))
        self.tolerance = int(_SHARED * max(nbytes for alive in self._moments.values() for nbytes in alive.values()))
        self._layers: dict[Kind, _Layer] = {}
        self._returned: dict[tuple[str, int], int] = {}
        """By list and kind: a layer's bytes alive in backward of later ones, beside those that it holds.

        Where a layer's input comes back from the layer before it, the inputs of all layers are there from the start.
        """
        self._alive: dict[tuple[str, Kind], Alive] = {}
        for path, key in self._rows("few"):
            held = {name[len(path) :]: n for name, n in sorted(step.held.items()) if f"{name}.".startswith(f"{path}.")}
            added = step.seconds.get(path, 0.0), step.host.get(path, 0)
            layer = _Layer(held, step.gradients.get(path, 0), *added)
            if self._layers.get(key, layer)[:2] != layer[:2]:
                raise _NotAlike
            self._layers[key] = layer
        self._learn_what_returns(self._sums("few").beside)
        beside = self._sums("few").beside
        for path, key in self._rows("few"):
            for phase in (_FORWARD, _BACKWARD):
                if (name := phase + path) in self._moments:
                    alive = _shifted(self._moments[name], beside[name], -1)
                    self._alive[phase, key] = self._most(self._alive.get((phase, key), alive), alive)

    def _learn_what_returns(self, beside: Mapping[str, tuple[int, int]]) -> None:
        """From layers with one neighbourhood: the bytes beside held ones that backward has before the later one."""
        for stack in self._stacks:
            latest: dict[Neighbourhood, tuple[int, int]] = {}
            kinds = sorted(set(stack.kinds))
            between, found = [], []
            for index, around in enumerate(stack.neighbourhoods("few")):
                name = _BACKWARD + stack.named(index)
                if name not in self._moments:
                    continue
                nbytes = max(self._moments[name].values()) - beside[name][1]
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

    def _rows(self, which: str) -> Iterator[tuple[str, Kind]]:
        """The path of each layer, and its kind. which: as ``shortened`` takes it."""
        for stack in self._stacks:
            for index, around in enumerate(stack.neighbourhoods(which)):
                yield stack.named(index), (stack.path, around)

    def _sums(self, which: str) -> _Sums:
        rows = list(self._rows(which))
        paths = [path for path, _ in rows]
        held = [sum(self._layers[key].held.values()) for _, key in rows]
        returned = [self._returned.get((path, around[1]), 0) for _, (path, around) in rows]
        forward = [0, *accumulate(held)]
        backward = [0, *accumulate(map(sum, zip(held, returned, strict=True)))]
        left = [0, *accumulate(self._layers[key].gradients for _, key in reversed(rows))][::-1]
        beside = {_FORWARD + path: (0, nbytes) for path, nbytes in zip(paths, forward, strict=False)}
        rest = zip(left[1:], backward, strict=False)
        beside |= {_BACKWARD + path: both for path, both in zip(paths, rest, strict=True)}
        borders = [0, *accumulate(getattr(stack, which) for stack in self._stacks)]
        alive = [each[border] for each in (forward, backward) for border in borders]
        return _Sums(beside, [left[border] for border in borders], alive)

    def growth_from(self, less: SimulatedStep) -> Growth:
        """By which sums moments outside of the lists grow from the shorter step to this one."""
        before = {moment.name: sorted(moment.alive.items()) for moment in less.moments}
        fewer, few = self._sums("fewer"), self._sums("few")
        found: Growth = {}
        for name, alive in self._moments.items():
            if self._of_layer(name) is not None:
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
        moments: dict[str, MomentMemory] = {}
        for name, alive in self._moments.items():
            if (of := self._of_layer(name)) is not None:
                moments |= {each.name: each for each in self._of_list(*of, which, wanted)}
                continue
            if (name, len(alive)) not in growth:
                raise _NotAlike
            grown = {
                gradients + _grown(of_left, few.left, wanted.left, is_own): (
                    nbytes + _grown(of_alive, few.alive, wanted.alive, is_own)
                )
                for (gradients, nbytes), (of_left, of_alive) in zip(
                    sorted(alive.items()), growth[name, len(alive)], strict=True
                )
            }
            moments[name] = MomentMemory(name, grown)
        held, gradients, seconds, host = map(self._elsewhere, ("held", "gradients", "seconds", "host"))
        for path, key in self._rows(which):
            layer = self._layers[key]
            held |= {path + inside: nbytes for inside, nbytes in layer.held.items()}
            if layer.gradients:
                gradients[path] = layer.gradients
            seconds[path], host[path] = layer.seconds, layer.host
        tables: dict[str, Any] = {"held": held, "gradients": gradients, "seconds": seconds, "host": host}
        return replace(self._step, moments=tuple(moments.values()), **tables)

    def _of_layer(self, name: str) -> tuple[str, str] | None:
        """The phase and the list of a moment's layer; None for a moment outside of the lists."""
        both = ((phase, stack.path) for phase in (_FORWARD, _BACKWARD) for stack in self._stacks)
        return next(((phase, path) for phase, path in both if name.startswith(f"{phase}{path}.")), None)

    def _of_list(self, phase: str, path: str, which: str, sums: _Sums) -> Iterator[MomentMemory]:
        layers = [(phase + layer, (phase, key)) for layer, key in self._rows(which) if key[0] == path]
        for name, key in layers if phase == _FORWARD else reversed(layers):
            if key in self._alive:  # a frozen layer has no backward
                yield MomentMemory(name, dict(_shifted(dict(self._alive[key]), sums.beside[name], 1)))

    def _elsewhere(self, table: str) -> dict[str, Any]:
        """A table's entries of paths outside of the lists."""
        lists = tuple([f"{stack.path}." for stack in self._stacks])
        return {path: number for path, number in getattr(self._step, table).items() if not path.startswith(lists)}


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
