"""Measures the costs of each way to run each region of a model, in whole training steps of the real model."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from recompute.attach.apply import apply
from recompute.attach.module_entries import module_entries
from recompute.errors import ModelError, RecomputeError, warn
from recompute.estimation.layer_stacks import shortened
from recompute.profiling.candidates import Candidate
from recompute.profiling.dry_run import DryRun
from recompute.profiling.offloaded_choices import offloading_rule
from recompute.profiling.regions import (
    RegionKind,
    StepLayout,
    discover_layout,
    policy_from_rules,
    storages_that_may_travel,
)
from recompute.profiling.repeated_layers import continued, representative
from recompute.profiling.step_log import StepLog
from recompute.profiling.step_trace import StepTrace

Progress = Callable[[str, int, int], None]
"""Called with the name of a task, how many of its parts are done, and how many there are; 0 where that is not known."""

SLOW_SECONDS = 1.0
"""If the step whose bytes are counted takes longer, one is timed. So long a step varies little, and marks are cheap.

On CUDA the bytes of the same step are counted: the device's work hides the host's.
"""


def measure_regions(
    run: DryRun,
    match: str | Sequence[str] | None,
    kernels: bool,
    steps: int,
    progress: Progress | None,
    may_offload: bool = False,
    compress: bool = False,
) -> dict[str, Any]:
    """The fields of a profile that steps of ``run`` measure. Where these are calculated, of equal layers a few run.

    may_offload: find out, too, which tensors each way holds that may leave the device.
    """
    report = progress or (lambda what, done, total: None)
    stacks = []
    if run.is_calculated:
        report("looking for layers that are alike", 0, 0)
        stacks = representative(run, match)
    with shortened(stacks, "few"):
        report("looking at what runs", 0, 0)
        with _complains_of_memory(run.model):
            layout = discover_layout(run, match, kernels=kernels, compress=compress)
        found = StepLog(layout)
        measuring = _RegionMeasurer(run, layout, steps, report, may_offload, found)
        static_nbytes = measuring.run_base()
        measuring.run_all()
    layers = {entry.path: entry.layer for entry in module_entries(run.model, "")[0]}
    of_microbatches = {"microbatch_nbytes": run.microbatch_nbytes, "output_nbytes": run.output_nbytes}
    table = {"static_nbytes": static_nbytes, **of_microbatches, **found.table()}
    return {**table, "places": tuple(continued(table["places"], stacks, layers))}


@contextmanager
def _complains_of_memory(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{type(model).__name__}: a training step does not fit the device, even under the leanest policy "
            f"({error}). Use a smaller batch, a shorter sequence, or a smaller optimizer. recompute.estimate prints "
            "what takes the memory"
        ) from None


class _Placement(NamedTuple):
    """A candidate, and the places that run by it in one step. It is measured at the last of them.

    The place before runs by it as well, because a region may hold its input, and that depends on how it was made.
    """

    candidate: Candidate
    places: tuple[int, ...]


@dataclass
class _RegionMeasurer:
    """Runs training steps whose regions run in different ways, and gathers each way's costs."""

    run: DryRun
    layout: StepLayout
    steps: int
    report: Progress
    may_offload: bool
    found: StepLog
    is_slow: bool = False
    """Whether steps take longer than ``SLOW_SECONDS``."""
    fillers: dict[RegionKind, Candidate] = field(default_factory=dict)
    """By kind, the way of its places that are not being measured: the one that holds least."""

    def run_base(self) -> int:
        """Measure a step in which each region runs in the way that holds least; if that fails, the way after it.

        Returns the bytes that are alive between steps.
        """
        ranked = {kind: sorted(kind.candidates, key=lambda one: one.predicted_nbytes) for kind in self.layout.kinds}
        tries = max(map(len, ranked.values()))
        for rank in range(tries):
            self.fillers = {kind: ways[min(rank, len(ways) - 1)] for kind, ways in ranked.items()}
            failure = self._try([])
            if failure is None:
                return self.run.static_nbytes
            if rank == tries - 1 or not isinstance(failure, RecomputeError):
                with _complains_of_memory(self.run.model):
                    raise failure
        raise AssertionError("a model has at least one way to run")

    def run_all(self) -> None:
        """Measure every candidate that has not been measured yet."""
        jobs, done = self._jobs(), 0
        while jobs:
            self.report("ways to run the regions", done, done + len(jobs))
            job = jobs.pop(0)
            failure = self._try(job)
            done += 1
            if failure is None:
                continue
            if len(job) > 1:
                half = len(job) // 2
                jobs[:0] = [job[:half], job[half:]]
            else:
                name = self.layout.kinds[job[0].places[-1]].name
                warn(f"profile: for {name}, {job[0].candidate.name} is left out, because it failed: {failure}")

    def _jobs(self) -> list[list[_Placement]]:
        """Placements, packed into few jobs. A job is an assignment, and no place has two placements there."""
        jobs: list[list[_Placement]] = []
        for kind in dict.fromkeys(self.layout.kinds):
            targets = self._targets(kind)
            for candidate in kind.candidates:
                if (kind, candidate.name) in self.found.seconds_of:
                    continue
                for job in (*jobs, []):
                    taken = {place for other in job for place in other.places}
                    places = next((places for places in targets if taken.isdisjoint(places)), None)
                    if places is not None:
                        if not job:
                            jobs.append(job)
                        job.append(_Placement(candidate, places))
                        break
        return jobs

    def _targets(self, kind: RegionKind) -> list[tuple[int, ...]]:
        """The places where a kind may be measured, each with the one before it, preferably one of the same kind."""
        kinds = self.layout.kinds
        places = [place for place, other in enumerate(kinds) if other is kind]
        alike: list[tuple[int, ...]] = []
        others: list[tuple[int, ...]] = []
        for place in places:
            if 1 < place < len(kinds) - 1:
                (alike if kinds[place - 1] is kind else others).append((place - 1, place))
        return alike or others or [(place,) for place in places]

    def _chosen(self, job: Sequence[_Placement]) -> list[Candidate]:
        """The candidate of each place in this job."""
        kinds = self.layout.kinds
        chosen = [self.fillers[kind] for kind in kinds]
        for placement in job:
            for place in placement.places:
                namesake = (one for one in kinds[place].candidates if one.name == placement.candidate.name)
                chosen[place] = placement.candidate if place == placement.places[-1] else next(namesake, chosen[place])
        return chosen

    def _try(self, job: Sequence[_Placement]) -> Exception | None:
        """Measure a job. Returns the error if it runs out of memory or a way cannot be used here; else None."""
        try:
            self._measure(job)
        except (torch.OutOfMemoryError, RecomputeError) as error:
            failure = error.with_traceback(None)  # the traceback would hold the tensors of the step
        else:
            return None
        gc.collect()
        if self.run.device.type == "cuda":
            torch.cuda.empty_cache()
        return failure

    def _measure(self, job: Sequence[_Placement]) -> None:
        chosen, regions = self._chosen(job), self.layout.regions
        with apply(self.run.model, policy_from_rules(self.layout.rules(chosen))) as handle:
            first = self.run.settle(handle, regions)
            counted = self.run.step(regions, counted=True, timed=True)
            self.is_slow = counted.seconds > SLOW_SECONDS
            at_once = self.run.is_calculated or (self.is_slow and self.run.device.type == "cuda")
            timed = [counted] if at_once else []
            whole: list[StepTrace] = []
            while len(timed) < (1 if self.is_slow else self.steps):
                timed.append(self.run.step(regions, timed=True))
                if not self.is_slow:
                    whole.append(self.run.step(None, timed=True))
        self.found.add(chosen, counted, timed, whole, first)
        if self.may_offload:
            self._look_at_storages(chosen)

    def _look_at_storages(self, chosen: Sequence[Candidate]) -> None:
        """See which storages of each place could travel, by rules that let next to nothing travel."""
        regions, rules = self.layout.regions, self.layout.rules(chosen)
        ways = zip(self.layout.paths, self.layout.kinds, chosen, strict=True)
        keys = {path: (kind, candidate.name) for path, kind, candidate in ways if path in regions}
        if self.found.storages_of.keys() >= set(keys.values()):
            return  # each was seen in an earlier job
        for path, candidate in zip(self.layout.paths, chosen, strict=True):
            if path in regions:
                rules[path] = offloading_rule(candidate.rule, sys.float_info.min)
        with apply(self.run.model, policy_from_rules(rules)) as handle:
            self.run.settle(handle)
            found = dict(storages_that_may_travel(handle))
        for path, key in keys.items():  # the last of the places that run alike counts: it has usual neighbours
            self.found.storages_of[key] = found[path]
