"""Profiles a model with many equal layers from steps with only a few of them.

The cost of a step is a sum over layers, so of layers that cost the same it is enough to run a few.

Which layers are alike is read off their structure. Whether they also cost the same, two steps without a policy check.
The first runs the few layers, the second one period of layers more. The second must have every part of the first, with
exactly the same bytes and seconds, and the added layers must cost what those before them cost. Where that does not
hold, the whole model runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from recompute.errors import ModelError
from recompute.estimation.layer_stacks import shortened_list, structure_of
from recompute.profiling.cost_table import Place
from recompute.profiling.dry_run import DryRun
from recompute.profiling.regions import find_regions
from recompute.profiling.step_trace import StepPart

_WORTH_IT = 2 / 3  # of the layers, or fewer


class RepeatedLayers(NamedTuple):
    """A list of layers in which a sequence of kinds repeats up to the end, and how few of the layers need to run.

    ``period`` is the length of that sequence: 1 where all layers are alike, 2 where two kinds alternate. The first
    ``few`` layers run. Of these, the last period stands for the last period of all ``total`` layers, and the period
    before it stands for every other period that does not run.
    """

    path: str
    layers: nn.ModuleList | nn.Sequential
    total: int
    few: int
    period: int

    def of(self, index: int) -> int:
        """The index of the layer that stands for the one at ``index``."""
        cut = self.few - self.period
        if index < cut:
            return index
        if index >= self.total - self.period:
            return index - (self.total - self.few)
        return cut - self.period + (index - cut) % self.period


def find_repeated(model: nn.Module) -> list[RepeatedLayers]:
    """The outermost lists of layers that a part can stand for."""
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
            if few < _WORTH_IT * len(kinds):
                found.append(RepeatedLayers(path, module, len(kinds), few, period))
    return found


def _few(kinds: Sequence[int]) -> Callable[[int], tuple[int, int]]:
    """A function of a period: how few layers need to run if ``kinds`` repeat with it up to the end; and the period.

    Three periods have to run: the first and the last differ from those between them, as the first layer of all does.
    Where a period is one layer, there are two between them, as layers are measured in pairs that run in the same way.
    """

    def few(period: int) -> tuple[int, int]:
        start = len(kinds) - period
        while start > 0 and kinds[start - 1] == kinds[start - 1 + period]:
            start -= 1
        return start + max(3 * period, 4) + (len(kinds) - start) % period, period

    return few


@contextmanager
def shortened(repeated: Iterable[RepeatedLayers], *, periods: int = 0) -> Iterator[None]:
    """Cut the lists inside down to their few layers and ``periods`` periods more."""
    with ExitStack() as stack:
        for each in repeated:
            stack.enter_context(shortened_list(each.layers, each.few + periods * each.period))
        yield


def representative(run: DryRun, match: str | Sequence[str] | None) -> list[RepeatedLayers]:
    """The lists of layers of which a few can stand for all in the steps of ``run``; none where a check fails.

    match: which modules are regions, as ``recompute.profile`` takes it.
    """
    repeated = find_repeated(run.model)
    whole = list(find_regions(run.model, match))
    try:
        with shortened(repeated):
            few = list(find_regions(run.model, match))
        if not repeated or [path for path, _ in _continued(few, repeated)] != whole:
            return []
    except (ModelError, _Irregular):  # where ``match`` names single layers, the shortened model lacks some of them
        return []

    def step() -> Sequence[StepPart]:
        run.forward()  # the first one makes the gradients that outputs get, and the steps to compare make none
        return run.step(find_regions(run.model, match), memory=run.memory_trace(), clock=run.clock()).parts

    return repeated if _is_linear(repeated, step) else []


def _is_linear(repeated: Sequence[RepeatedLayers], step: Callable[[], Sequence[StepPart]]) -> bool:
    """Whether a step with one period of layers more costs more by those layers alone.

    step: runs the model with the layers that it then has, and returns the parts of the step.
    """
    try:
        with shortened(repeated):
            few = step()
        with shortened(repeated, periods=1):
            more = step()
        longer = [each._replace(total=each.few + each.period) for each in repeated]
        rows = _continued([part.path for part in few], longer)
    except Exception:
        # A shortened model may raise anything, as where it also has the number of its layers elsewhere. The whole model
        # runs next: if the error has another reason, it comes up there again.
        return False
    return [replace(few[index], path=path) for path, index in rows] == list(more)


def continued(
    places: Sequence[Place], repeated: Sequence[RepeatedLayers], layers: Mapping[str, int | None]
) -> list[Place]:
    """The places of all layers, from those of the few that ran.

    layers: by the path of a module, the index of the layer that it is in.

    Raises ``ValueError`` where the layers did not run in their order.
    """
    found = []
    for path, index in _continued([place.path for place in places], repeated):
        found.append(places[index].model_copy(update={"path": path, "layer": layers.get(path)}))
    return found


class _Irregular(ValueError):
    """The layers of a list do not run one after the other."""


def _continued(paths: Sequence[str], repeated: Sequence[RepeatedLayers]) -> list[tuple[str, int]]:
    """The paths of a whole model's parts, in the order in which they run, from ``paths``, those of the shortened one.

    With each comes the index in ``paths`` of the part that stands for it.
    """
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
