"""Measures what each way to run each region of a model costs, in whole training steps of the real model."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from recompute.attach.apply import apply
from recompute.attach.module_entries import module_entries
from recompute.compiled.captured_region import WARMUP_FRAMES
from recompute.errors import ModelError, RecomputeError, warn
from recompute.profiling.candidates import Candidate
from recompute.profiling.cost_table import Choice, Place, RegionCosts
from recompute.profiling.dry_run import DryRun
from recompute.profiling.offloaded_choices import offloading_rule
from recompute.profiling.regions import (
    RegionKind,
    StepLayout,
    discover_layout,
    policy_for,
    storages_that_may_travel,
)
from recompute.profiling.step_trace import StepPart, StepTrace

Progress = Callable[[str, int, int], None]
"""Called with what is running, the training steps done, and the steps in all, as far as is known."""


_WARMUP = 2
"""Steps before anything is measured. The first makes plans and compiles kernels, the second uses what these learned.

Where steps are slow, a forward takes the place of the first.
"""

_STEPS_UNTIL_CAPTURED = WARMUP_FRAMES
"""More steps before any is timed, where steps are short. There the host's time tells: that of captured code, mostly."""

_ALIKE = 1.1
"""Peaks that differ by no more than this factor are one: at the border of two parts, bytes may count for either."""

SLOW_SECONDS = 1.0
"""If the last step of a warm-up takes longer, one step is timed, as so long a step varies little.

The marks and hooks in it take no time that tells. On CUDA it is the one whose bytes are counted: what counting takes
the host is hidden behind the device's work.
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
    """The fields of a profile that steps of ``run`` measure.

    may_offload: find out, too, which tensors each way holds that may leave the device.
    """
    report = progress or (lambda what, done, total: None)
    report("looking at what runs", 0, 0)
    with _complains_of_memory(run.model):
        layout = discover_layout(run, match, kernels=kernels, compress=compress)
    measuring = _RegionMeasurer(run, layout, steps, report, may_offload)
    static_nbytes = measuring.run_base()
    measuring.run_all()
    of_microbatches = {"microbatch_nbytes": run.microbatch_nbytes, "output_nbytes": run.output_nbytes}
    return {"static_nbytes": static_nbytes, **of_microbatches, **measuring.table()}


@contextmanager
def _complains_of_memory(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{type(model).__name__}: a training step does not fit the device even under what holds least ({error}). "
            "Use a smaller batch, a shorter sequence, or an optimizer that holds less; recompute.estimate tells what "
            "takes how much"
        ) from None


class _Placement(NamedTuple):
    """A candidate, and the places that run by it in one step. It is measured at the last of them.

    The place before that runs by it as well, because what a region holds depends on how its input was made.
    """

    candidate: Candidate
    places: tuple[int, ...]


@dataclass
class _RegionMeasurer:
    """Runs training steps in which regions run in different ways, and gathers what each way costs."""

    run: DryRun
    layout: StepLayout
    steps: int
    report: Progress
    may_offload: bool
    done: int = 0
    began: int = 0
    """The steps that were done when the present job began."""
    warmup_of_this_job: int = _WARMUP
    """The steps that the present job runs before it measures any."""
    jobs_ahead: int = 0
    """Jobs that are still to come after it."""
    counted: list[tuple[list[Candidate], StepTrace]] = field(default_factory=list)
    """For each step whose bytes were counted, the candidate of each place and what the step took."""
    seconds_of: dict[tuple[int, str], list[StepPart]] = field(default_factory=dict)
    """What was timed, by the ``id`` of a kind and the name of a candidate."""
    storages_of: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """Which storages may leave the device, in bytes, by the ``id`` of a kind and the name of a candidate."""
    optimizer_seconds: list[float] = field(default_factory=list)
    is_slow: bool = False
    """Whether steps take longer than ``SLOW_SECONDS``."""
    fillers: dict[int, Candidate] = field(default_factory=dict)
    """By the ``id`` of a kind, how its places run that are not being measured: in the way that holds least."""

    def run_base(self) -> int:
        """Measure a step in which each region runs in the way that holds least; if that fails, the way after it.

        Returns the bytes that are alive between steps.
        """
        ranked = {id(kind): sorted(kind.candidates, key=lambda one: one.predicted_nbytes) for kind in self.layout.kinds}
        tries = max(map(len, ranked.values()))
        for rank in range(tries):
            self.fillers = {key: ways[min(rank, len(ways) - 1)] for key, ways in ranked.items()}
            failure = self._try([])
            if failure is None:
                return self.run.static_nbytes
            if rank == tries - 1 or not isinstance(failure, RecomputeError):
                with _complains_of_memory(self.run.model):
                    raise failure
        raise AssertionError("a model has at least one way to run")

    def run_all(self) -> None:
        """Measure every candidate that has not been measured yet."""
        jobs = self._jobs()
        while jobs:
            job = jobs.pop(0)
            self.jobs_ahead = len(jobs)
            failure = self._try(job)
            if failure is None:
                continue
            if len(job) > 1:
                half = len(job) // 2
                jobs[:0] = [job[:half], job[half:]]
            else:
                name = self.layout.kinds[job[0].places[-1]].name
                warn(f"profile: {job[0].candidate.name} is left out for {name}: {failure}")

    @property
    def _warmup_steps(self) -> int:
        return 1 if self.is_slow else _WARMUP

    @property
    def _measured_steps(self) -> int:
        """The steps of a job after its warm-up."""
        if self._is_timed_as_counted:
            return self._timed_steps
        return 2 if self.is_slow else 1 + _STEPS_UNTIL_CAPTURED + 2 * self._timed_steps

    @property
    def _timed_steps(self) -> int:
        return 1 if self.is_slow else self.steps

    @property
    def _is_timed_as_counted(self) -> bool:
        """Whether the step whose bytes are counted is timed, too."""
        return self.run.is_calculated or (self.is_slow and self.run.device.type == "cuda")

    def _jobs(self) -> list[list[_Placement]]:
        """Placements, packed into few jobs. Each job is one assignment, in which no place has two placements."""
        kinds = self.layout.kinds
        jobs: list[list[_Placement]] = []
        taken: list[set[int]] = []
        for kind in {id(kind): kind for kind in kinds}.values():
            targets = self._targets(kind)
            for candidate in kind.candidates:
                if (id(kind), candidate.name) in self.seconds_of:
                    continue
                for number in range(len(jobs) + 1):
                    if number == len(jobs):
                        jobs.append([])
                        taken.append(set())
                    places = next((places for places in targets if taken[number].isdisjoint(places)), None)
                    if places is not None:
                        jobs[number].append(_Placement(candidate, places))
                        taken[number].update(places)
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
        chosen = [self.fillers[id(kind)] for kind in kinds]
        for placement in job:
            for place in placement.places:
                namesake = (one for one in kinds[place].candidates if one.name == placement.candidate.name)
                chosen[place] = placement.candidate if place == placement.places[-1] else next(namesake, chosen[place])
        return chosen

    def _try(self, job: Sequence[_Placement]) -> Exception | None:
        """Measure a job. Returns the error if it runs out of memory or a way cannot be used here; else None."""
        self.began = self.done
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
        kinds, regions = self.layout.kinds, self.layout.regions
        chosen = self._chosen(job)
        rules = self.layout.rules(chosen)
        with apply(self.run.model, policy_for(self.run, rules)):
            if self.is_slow:
                self.run.forward()
            self.warmup_of_this_job = self._warmup_steps
            for _ in range(self.warmup_of_this_job):
                seconds = self._warm_up()
            self.is_slow = seconds > SLOW_SECONDS
            at_once = self._is_timed_as_counted
            clock = self.run.clock() if at_once else None
            counted = self.run.step(regions, memory=self.run.memory_trace(), clock=clock)
            self._tell()
            for _ in range(0 if at_once or self.is_slow else _STEPS_UNTIL_CAPTURED):
                self._warm_up()
            timed = [counted] if at_once else []
            whole: list[StepTrace] = []
            while len(timed) < self._timed_steps:
                timed.append(self._time(regions))
                if not self.is_slow:
                    whole.append(self._time(None))
        self.counted.append((chosen, counted))
        # Where the host sets the pace, marks and hooks slow a step down: scale by the time of whole steps without them.
        seconds_of_whole, seconds_of_timed = ([one.seconds for one in traces] for traces in (whole, timed))
        factor = statistics.median(seconds_of_whole) / statistics.median(seconds_of_timed) if whole else 1.0
        self.optimizer_seconds += [factor * one.optimizer_seconds for one in timed]
        for place, (kind, candidate) in enumerate(zip(kinds, chosen, strict=True)):
            found = [one.parts[place].slowed(factor) for one in timed]
            self.seconds_of.setdefault((id(kind), candidate.name), []).extend(found)
        if self.may_offload:
            self._look_at_storages(chosen)

    def _warm_up(self) -> float:
        """Run a step, and return the seconds that it took."""
        seconds = self.run.warm_up(self.layout.regions)
        self._tell()
        return seconds

    def _time(self, regions: Mapping[str, nn.Module] | None) -> StepTrace:
        """Run a step and time its parts, or the whole of it where ``regions`` is None."""
        found = self.run.step(regions, clock=self.run.clock())
        self._tell()
        return found

    def _look_at_storages(self, chosen: Sequence[Candidate]) -> None:
        """See which storages the places hold that could travel, by rules under which next to nothing does."""
        regions, rules = self.layout.regions, self.layout.rules(chosen)
        ways = zip(self.layout.paths, self.layout.kinds, chosen, strict=True)
        keys = {path: (id(kind), candidate.name) for path, kind, candidate in ways if path in regions}
        if self.storages_of.keys() >= set(keys.values()):
            return  # each was seen in an earlier job
        for path, candidate in zip(self.layout.paths, chosen, strict=True):
            if path in regions:
                rules[path] = offloading_rule(candidate.rule, sys.float_info.min)
        with apply(self.run.model, policy_for(self.run, rules)) as handle:
            for _ in range(_WARMUP):
                self.run.forward()
            found = dict(storages_that_may_travel(handle))
        for path, key in keys.items():  # of places that run alike the last counts, which has usual neighbours
            self.storages_of[key] = found[path]

    def _tell(self) -> None:
        """Report a step, and how many there are as far as is known: each job sees anew whether steps are slow."""
        self.done += 1
        this, next_one = self.warmup_of_this_job + self._measured_steps, self._warmup_steps + self._measured_steps
        self.report("training steps", self.done, self.began + this + self.jobs_ahead * next_one)

    def table(self) -> dict[str, Any]:
        """The fields of a profile that are measured by steps."""
        kinds = list({id(kind): kind for kind in self.layout.kinds}.values())
        numbers = {id(kind): number for number, kind in enumerate(kinds)}
        layers = {entry.path: entry.layer for entry in module_entries(self.run.model, "")[0]}
        places = [
            Place(path=path, region=numbers[id(kind)], layer=layers.get(path))
            for path, kind in zip(self.layout.paths, self.layout.kinds, strict=True)
        ]
        places[-1] = places[-1].model_copy(update={"also": self.layout.also})
        gradients = self._gradients()
        regions = [self._costs(kind, gradients) for kind in kinds]
        above = sum(gradients[id(kind)] for kind in self.layout.kinds)
        optimizer_peaks = [trace.optimizer_peak_nbytes + _gradients_above(trace, -1) for _, trace in self.counted]
        return {
            "regions": (
                self._with_first_input(regions, numbers),
                *regions[1:-1],
                self._with_end_of_backward(regions[-1]),
            ),
            "places": tuple(places),
            "optimizer_seconds": statistics.median(self.optimizer_seconds),
            "optimizer_peak_nbytes": max(0, max(optimizer_peaks) - above),
        }

    def _gradients(self) -> dict[int, int]:
        """The bytes of gradients that a region of each kind leaves behind.

        This is a median, because at the border of two regions bytes may count for either.
        """
        found: dict[int, list[int]] = {}
        for _, trace in self.counted:
            for kind, part in zip(self.layout.kinds, trace.parts, strict=True):
                found.setdefault(id(kind), []).append(part.gradient_nbytes)
        return {key: statistics.median_low(nbytes) for key, nbytes in found.items()}

    def _costs(self, kind: RegionKind, gradients: dict[int, int]) -> RegionCosts:
        usable = [one for one in kind.candidates if (id(kind), one.name) in self.seconds_of]
        return RegionCosts(
            name=kind.name,
            choices=tuple([self._choice(kind, candidate, gradients) for candidate in usable]),
            gradient_nbytes=gradients[id(kind)],
        )

    def _choice(self, kind: RegionKind, candidate: Candidate, gradients: dict[int, int]) -> Choice:
        seen = list(self._bytes(kind, candidate, gradients))
        samples = [part for part, is_settled in seen if is_settled] or [part for part, _ in seen]
        timed = self.seconds_of[id(kind), candidate.name]
        return Choice(
            name=candidate.name,
            rule=None if candidate.rule is None else dict(candidate.rule),
            forward_seconds=statistics.median(part.forward_seconds for part in timed),
            backward_seconds=statistics.median(part.backward_seconds for part in timed),
            held_nbytes=max(part.held_nbytes for part in samples),
            forward_peak_nbytes=max(part.forward_peak_nbytes for part in samples),
            backward_peak_nbytes=max(part.backward_peak_nbytes for part in samples),
            storages=self.storages_of.get((id(kind), candidate.name), ()),
        )

    def _bytes(
        self, kind: RegionKind, candidate: Candidate, gradients: dict[int, int]
    ) -> Iterator[tuple[StepPart, bool]]:
        """The part of each step, at each place, where the kind ran in that way.

        With it comes whether the region before it ran in the same way. At a border, bytes may count for either.
        """
        kinds = self.layout.kinds
        for chosen, trace in self.counted:
            for place, part in enumerate(trace.parts):
                if kinds[place] is kind and chosen[place] is candidate:
                    above = sum(gradients[id(other)] for other in kinds[place + 1 :])
                    peak = max(0, part.backward_peak_nbytes + _gradients_above(trace, place) - above)
                    is_settled = place > 1 and chosen[place - 1].name == candidate.name
                    yield replace(part, backward_peak_nbytes=peak), is_settled

    def _with_first_input(self, regions: list[RegionCosts], numbers: dict[int, int]) -> RegionCosts:
        """The costs of what runs before the first region.

        They include what the first region holds more than others of its kind do, such as its input.
        """
        number = numbers[id(self.layout.kinds[1])]
        usual = {choice.name: choice.held_nbytes for choice in regions[number].choices}
        more = max(trace.parts[1].held_nbytes - usual[chosen[1].name] for chosen, trace in self.counted)
        (choice,) = regions[0].choices
        costs = {"held_nbytes": choice.held_nbytes + max(0, more), "backward_peak_nbytes": self._usual_end()}
        return regions[0].model_copy(update={"choices": (choice.model_copy(update=costs),)})

    def _with_end_of_backward(self, head: RegionCosts) -> RegionCosts:
        """The costs of the last region, which count what the first part needs in backward because of it.

        Tied embeddings have one weight there and in the head. Where autograd adds up both gradients of it, it may need
        room for the sum beside them: that depends on how the head has run. So where it does, the head's peak is at
        least as high as that of the first part, whose own costs are those beside the head that asks for the least.
        """
        peaks, usual = self._first_backward_peaks(), self._usual_end()
        gradients = self._gradients()
        above = sum(gradients[id(kind)] for kind in self.layout.kinds[1:])

        def counted(choice: Choice) -> Choice:
            peak = peaks.get(choice.name, usual)
            if peak <= usual:
                return choice
            return choice.model_copy(update={"backward_peak_nbytes": max(choice.backward_peak_nbytes, above + peak)})

        return head.model_copy(update={"choices": tuple(map(counted, head.choices))})

    def _usual_end(self) -> int:
        """The peak of the first part in backward, beside the ways of the head that ask for about the least."""
        peaks = self._first_backward_peaks().values()
        return max(peak for peak in peaks if peak <= _ALIKE * min(peaks))

    def _first_backward_peaks(self) -> dict[str, int]:
        """The peak of the first part in backward, by the name of the way in which the last one runs."""
        (candidate,) = self.layout.kinds[0].candidates
        found: dict[str, int] = {}
        samples = self._bytes(self.layout.kinds[0], candidate, self._gradients())
        for (chosen, _), (part, _) in zip(self.counted, samples, strict=True):
            name = chosen[-1].name
            found[name] = max(found.get(name, 0), part.backward_peak_nbytes)
        return found


def _gradients_above(trace: StepTrace, place: int) -> int:
    return sum(part.gradient_nbytes for part in trace.parts[place + 1 :])
