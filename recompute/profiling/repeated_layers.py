"""Profiles a model with many equal layers from steps with only a few of them.

The cost of a step is a sum over layers, so of layers that cost the same it is enough to run a few.

``layer_stacks`` reads off the layers' structure which are alike, and between which neighbours. Whether they also cost
the same, two steps without a policy check: one of the few layers, and one of fewer. Each part of the second must cost
exactly what the part of the first costs that stands for it. Where that does not hold, the whole model runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from recompute.estimation.layer_stacks import LayerStack, find_stacks, shortened
from recompute.profiling.cost_table import Place
from recompute.profiling.dry_run import DryRun
from recompute.profiling.regions import find_regions
from recompute.profiling.step_trace import StepPart


def representative(run: DryRun, match: str | Sequence[str] | None) -> list[LayerStack]:
    """The lists of layers of which a few can stand for all in the steps of ``run``; none where a check fails.

    match: which modules are regions, as ``recompute.profile`` takes it.
    """
    stacks, whole = find_stacks(run.model, None), find_regions(run.model, match)

    def step(which: str) -> Sequence[StepPart]:
        with shortened(stacks, which):
            regions = find_regions(run.model, match)
            run.forward()  # the first one makes the gradients that outputs get, and the steps to compare make none
            return run.step(regions, counted=True, timed=True).parts

    try:
        few, fewer = (step(which) if stacks else () for which in ("few", "fewer"))
        paths = [part.path for part in few]
        expected = [replace(few[index], path=path) for path, index in _continued(paths, stacks, "fewer")]
        is_whole = {path for path, _ in _continued(paths, stacks, "whole")} == {"", *whole}
    except Exception:
        # A shortened model may raise anything, as where it also has the number of its layers elsewhere, or lacks some
        # that ``match`` names. The whole model runs next: if the error has another reason, it comes up there again.
        return []
    return stacks if is_whole and expected == list(fewer) else []


def continued(places: Sequence[Place], stacks: Sequence[LayerStack], layers: Mapping[str, int | None]) -> list[Place]:
    """The places of all layers, from those of the few that ran.

    layers: by the path of a module, the index of the layer that it is in.

    Raises ``ValueError`` where the layers did not run in their order.
    """
    rows = _continued([place.path for place in places], stacks, "whole")
    return [places[index].model_copy(update={"path": path, "layer": layers.get(path)}) for path, index in rows]


def _continued(paths: Sequence[str], stacks: Sequence[LayerStack], which: str) -> list[tuple[str, int]]:
    """The paths of a model's parts with so many layers in each list, in the order in which they run.

    paths: those of the parts with the few layers. Each path found comes with the index of the one that stands for it.
    """
    rows = list(zip(paths, range(len(paths)), strict=True))
    for stack in stacks:
        inside = re.compile(rf"{re.escape(stack.path)}\.(\d+)(.*)")
        found = [(position, match) for position, (path, _) in enumerate(rows) if (match := inside.fullmatch(path))]
        if not found:
            continue
        first, last = found[0][0], found[-1][0] + 1
        numbers = [int(match[1]) for _, match in found]
        if len(found) != last - first or numbers != sorted(numbers) or set(numbers) != set(range(stack.few)):
            raise ValueError(f"{stack.path}: expected layers that run one after the other")
        rows[first:last] = [
            (f"{stack.path}.{index}{match[2]}", rows[position][1])
            for index, stand_in in enumerate(stack.stand_ins(which))
            for position, match in found
            if int(match[1]) == stand_in
        ]
    return rows
