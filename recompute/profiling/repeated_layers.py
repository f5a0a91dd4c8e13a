"""Profiles a model with many equal layers from steps with only a few of them.

The cost of a step is a sum over layers, so a few of the layers with equal costs are enough.

``layer_stacks`` reads off the layers' structure which of them are alike, and between which neighbours. Two steps
without a policy check that they also cost the same: one of the few layers, and one of fewer. Each part of the second
must cost exactly as much as its stand-in in the first. Where that does not hold, the whole model runs.
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
    """The lists of layers where a few can stand for all in the steps of ``run``; none where a check fails.

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
        # A shortened model may raise anything: it may have the number of its layers elsewhere, too, or lack some that
        # ``match`` names. The whole model runs next, and any other error comes up there again.
        return []
    return stacks if is_whole and expected == list(fewer) else []


def continued(places: Sequence[Place], stacks: Sequence[LayerStack], layers: Mapping[str, int | None]) -> list[Place]:
    """The places of all layers, from those of the few that ran.

    layers: by a module's path, the index of its layer.

    Raises ``ValueError`` where the layers did not run in their order.
    """
    rows = _continued([place.path for place in places], stacks, "whole")
    return [places[index].model_copy(update={"path": path, "layer": layers.get(path)}) for path, index in rows]


def _continued(paths: Sequence[str], stacks: Sequence[LayerStack], which: str) -> list[tuple[str, int]]:
    """The paths of a model's parts with so many layers in each list, in the order of forward.

    paths: the parts with the few layers. Each path found comes with the index of its stand-in among them.
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
