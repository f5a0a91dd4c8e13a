"""Profiles of models with many equal layers, from steps with few of them.

What a step costs is a sum over layers, so layers that run alike need to run once. Two plain steps check that they do:
one with the few layers, and one with as many more as repeat. Every part of the first has to come back in the second, to
the byte and the second, and the added layers have to cost what those before them cost. A model that does not pass runs
whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from recompute.errors import ModelError
from recompute.estimation.layer_extrapolation import shortened_list, structure_of
from recompute.profiling.cost_table import Place
from recompute.profiling.dry_run import DryRun
from recompute.profiling.regions import find_regions
from recompute.profiling.step_trace import StepPart


class RepeatedLayers(NamedTuple):
    """A list of layers of which the kinds repeat, and how few of them show all that there is to see.

    The first ``few`` layers run. The last period of them stands for the last one of all, and the period before that
    for every other one that does not run.
    """

    path: str
    layers: nn.ModuleList | nn.Sequential
    total: int
    few: int
    period: int

    def of(self, index: int) -> int:
        """The layer that runs in the place of this one."""
        cut = self.few - self.period
        if index < cut:
            return index
        if index >= self.total - self.period:
            return index - (self.total - self.few)
        return cut - self.period + (index - cut) % self.period


def find_repeated(model: nn.Module) -> list[RepeatedLayers]:
    """The lists of layers, none inside of another, of which less than half need to run."""
    found: list[RepeatedLayers] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{each}.") for each in lists):
            continue
        lists.append(path)
        numbers: dict[object, int] = {}
        kinds = [numbers.setdefault(structure_of(layer), len(numbers)) for layer in module]
        if path and kinds:
            few, period = min(map(_few(kinds), range(1, len(kinds) + 1)))
            if 2 * few < len(kinds):
                found.append(RepeatedLayers(path, module, len(kinds), few, period))
    return found


def _few(kinds: Sequence[int]) -> Callable[[int], tuple[int, int]]:
    """How few layers show all, if their kinds repeat with some period up to the end; and the period.

    Layers are measured in pairs of neighbours that run in one way, so that two periods are needed at least.
    """

    def few(period: int) -> tuple[int, int]:
        start = len(kinds) - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        return start + (2 + 2 // period) * period + (len(kinds) - start) % period, period

    return few


@contextmanager
def shortened(repeated: Iterable[RepeatedLayers], *, periods: int = 0) -> Iterator[None]:
    """With the few layers alone, and so many periods more."""
    with ExitStack() as stack:
        for each in repeated:
            stack.enter_context(shortened_list(each.layers, each.few + periods * each.period))
        yield


def representative(run: DryRun, match: str | Sequence[str] | None) -> list[RepeatedLayers]:
    """The lists of layers of which a few stand for all in the steps of ``run``; none where that cannot be shown.

    match: which modules are regions, as ``recompute.profile`` takes it.
    """
    repeated = find_repeated(run.model)
    whole = list(find_regions(run.model, match))
    try:
        with shortened(repeated):
            few = list(find_regions(run.model, match))
        if not repeated or [path for path, _ in _continued(few, repeated)] != whole:
            return []
    except (ModelError, _Irregular):  # it is single layers that match
        return []

    def step() -> Sequence[StepPart]:
        return run.step(find_regions(run.model, match), memory=run.memory_trace(), clock=run.clock()).parts

    return repeated if _is_linear(repeated, step) else []


def _is_linear(repeated: Sequence[RepeatedLayers], step: Callable[[], Sequence[StepPart]]) -> bool:
    """Whether a step with a period more costs those layers more, and nothing else.

    step: runs the model as it then is, and returns the parts of the step.
    """
    try:
        with shortened(repeated):
            few = step()
        with shortened(repeated, periods=1):
            more = step()
        longer = [each._replace(total=each.few + each.period) for each in repeated]
        rows = _continued([part.path for part in few], longer)
    except Exception:
        # A model that counts its layers in another way may raise anything. If that is not why, it does so again.
        return False
    return [replace(few[index], path=path) for path, index in rows] == list(more)


def continued(
    places: Sequence[Place], repeated: Sequence[RepeatedLayers], layers: Mapping[str, int | None]
) -> list[Place]:
    """The places of all layers, from those of the few. layers: the index of each module's layer, by path.

    Raises ``ValueError`` where the layers did not run in their order.
    """
    found = []
    for path, index in _continued([place.path for place in places], repeated):
        found.append(places[index].model_copy(update={"path": path, "layer": layers.get(path)}))
    return found


class _Irregular(ValueError):
    """Layers do not run one after the other."""


def _continued(paths: Sequence[str], repeated: Sequence[RepeatedLayers]) -> list[tuple[str, int]]:
    """The paths for all layers in the order in which they run, each with the index of the one that stands for it."""
    rows = list(zip(paths, range(len(paths)), strict=True))
    for each in repeated:
        inside = re.compile(rf"{re.escape(each.path)}\.(\d+)(.*)")
        matches = [inside.fullmatch(path) for path, _ in rows]
        positions = [position for position, match in enumerate(matches) if match is not None]
        if not positions:
            continue
        first, last = positions[0], positions[-1] + 1
        numbers = [int(match[1]) for match in matches if match is not None]
        if len(positions) != last - first or numbers != sorted(numbers) or set(numbers) != set(range(each.few)):
            raise _Irregular(f"{each.path}: expected layers that run one after the other")
        of_layer: dict[int, list[tuple[str, int]]] = {}
        for number, position in zip(numbers, positions, strict=True):
            match = matches[position]
            assert match is not None, "it has a position because it matched"
            of_layer.setdefault(number, []).append((match[2], rows[position][1]))
        middle = [
            (f"{each.path}.{index}{rest}", source)
            for index in range(each.total)
            for rest, source in of_layer[each.of(index)]
        ]
        rows[first:last] = middle
    return rows
