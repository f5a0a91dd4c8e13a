"""Makes the table of a profile from the training steps that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from recompute.profiling.candidates import Candidate
from recompute.profiling.cost_table import Choice, FirstSteps, Place, RegionCosts
from recompute.profiling.regions import RegionKind, StepLayout
from recompute.profiling.step_trace import StepPart, StepTrace

_ALIKE = 1.1
"""Peaks that differ by no more than this factor are one: at the border of two parts, bytes may count for either."""


_Counted = list[tuple[Sequence[Candidate], StepTrace]]


@dataclass
class StepLog:
    """Steps whose regions ran in different ways, and the costs of each way."""

    layout: StepLayout
    counted: _Counted = field(default_factory=list)
    """For each step whose bytes were counted, the candidate of each place and the trace."""
    first: _Counted = field(default_factory=list)
    """The same for the first steps, in which nothing is captured yet."""
    seconds_of: dict[tuple[RegionKind, str], list[StepPart]] = field(default_factory=dict)
    """Timed parts, by a kind and the name of a candidate."""
    storages_of: dict[tuple[RegionKind, str], tuple[int, ...]] = field(default_factory=dict)
    """The bytes of each storage that may leave the device, by the same."""
    optimizer_seconds: list[float] = field(default_factory=list)

    def add(
        self,
        chosen: Sequence[Candidate],
        counted: StepTrace,
        timed: Sequence[StepTrace],
        whole: Sequence[StepTrace],
        first: Sequence[StepTrace] = (),
    ) -> None:
        """Note the steps of one assignment. Parts are scaled by the time of whole steps: marks slow the host down."""
        self.counted.append((chosen, counted))
        self.first += [(chosen, trace) for trace in first]
        seconds_of_whole, seconds_of_timed = ([one.seconds for one in traces] for traces in (whole, timed))
        factor = statistics.median(seconds_of_whole) / statistics.median(seconds_of_timed) if whole else 1.0
        self.optimizer_seconds += [factor * one.optimizer_seconds for one in timed]
        for place, (kind, candidate) in enumerate(zip(self.layout.kinds, chosen, strict=True)):
            found = [one.parts[place].slowed(factor) for one in timed]
            self.seconds_of.setdefault((kind, candidate.name), []).extend(found)

    def table(self) -> dict[str, Any]:
        """The fields of a profile that are measured by steps, all of which have run."""
        kinds = list(dict.fromkeys(self.layout.kinds))
        ways = zip(self.layout.paths, self.layout.kinds, strict=True)
        places = [Place(path=path, region=kinds.index(kind)) for path, kind in ways]
        places[-1] = places[-1].model_copy(update={"also": self.layout.also})
        regions = [self._costs(kind) for kind in kinds]
        optimizer_peaks = [trace.optimizer_peak_nbytes + _gradients_above(trace, -1) for _, trace in self.counted]
        usual = regions[kinds.index(self.layout.kinds[1])]
        first, last = self._with_first_input(regions[0], usual), self._with_end_of_backward(regions[-1])
        return {
            "regions": (first, *regions[1:-1], last),
            "places": tuple(places),
            "optimizer_seconds": statistics.median(self.optimizer_seconds),
            "optimizer_peak_nbytes": max(0, max(optimizer_peaks) - self._gradients_after(-1)),
        }

    @cached_property
    def _gradients(self) -> dict[RegionKind, int]:
        """The gradients' bytes of each kind of region: a median, as bytes at a border may count for either region."""
        found: dict[RegionKind, list[int]] = {}
        for _, trace in self.counted:
            for kind, part in zip(self.layout.kinds, trace.parts, strict=True):
                found.setdefault(kind, []).append(part.gradient_nbytes)
        return {kind: statistics.median_low(nbytes) for kind, nbytes in found.items()}

    def _gradients_after(self, place: int) -> int:
        return sum(self._gradients[kind] for kind in self.layout.kinds[place + 1 :])

    def _costs(self, kind: RegionKind) -> RegionCosts:
        choices = [self._choice(kind, one) for one in kind.candidates if (kind, one.name) in self.seconds_of]
        return RegionCosts(name=kind.name, choices=tuple(choices), gradient_nbytes=self._gradients[kind])

    def _choice(self, kind: RegionKind, candidate: Candidate) -> Choice:
        timed = self.seconds_of[kind, candidate.name]
        first = None if candidate.rule is None else self._most(kind, candidate, self.first)
        return Choice(
            name=candidate.name,
            rule=None if candidate.rule is None else dict(candidate.rule),
            forward_seconds=statistics.median(part.forward_seconds for part in timed),
            backward_seconds=statistics.median(part.backward_seconds for part in timed),
            **self._most(kind, candidate, self.counted),
            storages=self.storages_of.get((kind, candidate.name), ()),
            first_steps=FirstSteps(**first) if first else None,
        )

    def _most(self, kind: RegionKind, candidate: Candidate, steps: _Counted) -> dict[str, int]:
        """The held bytes and the peaks of a kind that runs in that way; {} where it never did."""
        seen = list(self._bytes(kind, candidate, steps))
        samples = [part for part, is_settled in seen if is_settled] or [part for part, _ in seen]
        names = "held_nbytes", "forward_peak_nbytes", "backward_peak_nbytes"
        return {name: max(getattr(part, name) for part in samples) for name in names} if samples else {}

    def _bytes(self, kind: RegionKind, candidate: Candidate, steps: _Counted) -> Iterator[tuple[StepPart, bool]]:
        """The parts of ``steps`` where the kind ran in that way, and whether the region before ran in the same way.

        If it did not, bytes at their border may count for either way.
        """
        kinds = self.layout.kinds
        for chosen, trace in steps:
            for place, part in enumerate(trace.parts):
                if kinds[place] is kind and chosen[place] is candidate:
                    more = _gradients_above(trace, place) - self._gradients_after(place)
                    peak = max(0, part.backward_peak_nbytes + more)
                    is_settled = place > 1 and chosen[place - 1].name == candidate.name
                    yield replace(part, backward_peak_nbytes=peak), is_settled

    def _with_first_input(self, before: RegionCosts, usual: RegionCosts) -> RegionCosts:
        """The costs of the part before the first region, whose kind has the ``usual`` costs.

        They include the bytes that the first region holds more than others of its kind, such as its input.
        """
        held = {choice.name: choice.held_nbytes for choice in usual.choices}
        more = max(trace.parts[1].held_nbytes - held[chosen[1].name] for chosen, trace in self.counted)
        (choice,) = before.choices
        costs = {"held_nbytes": choice.held_nbytes + max(0, more), "backward_peak_nbytes": self._usual_end()}
        return before.model_copy(update={"choices": (choice.model_copy(update=costs),)})

    def _with_end_of_backward(self, head: RegionCosts) -> RegionCosts:
        """The costs of the last region. They include memory that the first part's backward needs because of it.

        Tied embeddings share their weight with the head. Autograd adds up its two gradients, and may need room for the
        sum beside them: that depends on how the head has run. Then the head's peak is at least that of the first part.
        The first part's own costs are those beside the leanest way of the head.
        """
        peaks, usual, above = self._first_backward_peaks(), self._usual_end(), self._gradients_after(0)

        def counted(choice: Choice) -> Choice:
            peak = peaks.get(choice.name, usual)
            if peak <= usual:
                return choice
            return choice.model_copy(update={"backward_peak_nbytes": max(choice.backward_peak_nbytes, above + peak)})

        return head.model_copy(update={"choices": tuple(map(counted, head.choices))})

    def _usual_end(self) -> int:
        """The peak of the first part in backward, beside the leanest ways of the head."""
        peaks = self._first_backward_peaks().values()
        return max(peak for peak in peaks if peak <= _ALIKE * min(peaks))

    def _first_backward_peaks(self) -> dict[str, int]:
        """The peak of the first part in backward, by the name of the last part's way."""
        (candidate,) = self.layout.kinds[0].candidates
        found: dict[str, int] = {}
        samples = self._bytes(self.layout.kinds[0], candidate, self.counted)
        for (chosen, _), (part, _) in zip(self.counted, samples, strict=True):
            name = chosen[-1].name
            found[name] = max(found.get(name, 0), part.backward_peak_nbytes)
        return found


def _gradients_above(trace: StepTrace, place: int) -> int:
    return sum(part.gradient_nbytes for part in trace.parts[place + 1 :])
