"""A plan: the policy that trains a model fastest within a budget, and the predicted memory and time of a step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from tabulate import tabulate

from recompute.errors import BudgetError
from recompute.files import write_file
from recompute.planning import solver
from recompute.planning.policy_of_plan import layer_spans, policy_of
from recompute.planning.prediction import Assignment, Prediction, choices_of, predict
from recompute.planning.solver import Solution
from recompute.policy.rules import Policy
from recompute.profiling.cost_table import Profile
from recompute.units import humanize

_FOR_TENSORS = 0.98
"""Of a device's memory. The rest goes to CUDA itself, and to gaps between tensors."""


class VerificationRound(NamedTuple):
    """The predicted peak and time of a policy, and those measured when it ran."""

    predicted_peak_nbytes: int
    measured_peak_nbytes: int
    predicted_step_seconds: float
    measured_step_seconds: float
    first_steps_peak_nbytes: int = 0
    """Of the steps in which layers are captured; 0 where nobody counts, as on the CPU."""

    def __str__(self) -> str:
        is_more = self.first_steps_peak_nbytes > self.measured_peak_nbytes
        more = f"; the first steps, which capture layers, took {humanize(self.first_steps_peak_nbytes)}" * is_more
        return (
            f"peak {humanize(self.measured_peak_nbytes)} (predicted {humanize(self.predicted_peak_nbytes)}, "
            f"{self.measured_peak_nbytes / max(self.predicted_peak_nbytes, 1) - 1:+.1%}), "
            f"{self.measured_step_seconds * 1e3:.1f} ms a step (predicted {self.predicted_step_seconds * 1e3:.1f}, "
            f"{self.measured_step_seconds / (self.predicted_step_seconds or 1) - 1:+.1%}){more}"
        )


@dataclass(frozen=True)
class Plan:
    """A policy for ``recompute.apply``, and the predicted training step. ``str`` shows it."""

    policy: Policy
    budget_nbytes: int
    profile: Profile
    """The profile that was planned with: it has the allowed choices alone."""
    solution: Solution
    note: str
    """A remark on the budget or on the profile; "" if there is none."""
    choice: str = ""
    """In a uniform plan, the way of every region that offers this way."""
    uniform: Plan | None = None
    """The fastest uniform plan within the budget; None where there is none."""
    frontier: tuple[Solution, ...] = ()
    """The best solutions for other budgets, from the fastest to the leanest; empty unless asked for."""
    rounds: tuple[VerificationRound, ...] = ()
    """One for each policy that was run to verify plans; the last one is of this plan's policy."""

    @property
    def predicted_peak_bytes(self) -> int:
        """The most alive at once, static bytes included."""
        return self.solution.prediction.peak_nbytes

    @property
    def most_bytes(self) -> int:
        """The most alive at once in any step. Until layers are captured it may be over the budget, not the device's."""
        return predict(self.profile.from_the_start(), self.assignment).peak_nbytes

    @property
    def predicted_step_seconds(self) -> float:
        """Of all its microbatches and the optimizer; without the time that a pipeline's stage waits for others."""
        return self.solution.prediction.step_seconds

    @property
    def peak_moment(self) -> str:
        """When the peak is: "backward of model.layers.3", "optimizer step" …"""
        return self.solution.prediction.peak_moment

    @property
    def offloaded_bytes(self) -> int:
        """The bytes that leave the device in a step, and come back."""
        return self.solution.prediction.moved_nbytes

    @property
    def assignment(self) -> Assignment:
        """For each place of the profile, the index of its choice."""
        return self.solution.assignment

    @property
    def is_over_budget(self) -> bool:
        """Whether its peak was above the budget when it ran; False for a plan that has not run."""
        return bool(self.rounds) and self.rounds[-1].measured_peak_nbytes > self.budget_nbytes

    def to_yaml(self) -> str:
        """The policy as the text of a policy file. Its description has the budget and the prediction."""
        return self.policy.to_yaml()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_yaml()`` to a file, for ``recompute.apply`` to read. Raises ``WriteError`` if that fails."""
        write_file(path, self.to_yaml())

    def to_json(self) -> str:
        """The plan as a JSON object. ``recompute.apply`` takes its ``policy`` as a mapping."""
        uniform = self.uniform
        document: dict[str, Any] = {
            "budget_bytes": self.budget_nbytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "most_bytes": self.most_bytes,
            "predicted_step_seconds": self.predicted_step_seconds,
            "peak_moment": self.peak_moment,
            "microbatches": self.profile.microbatches,
            "microbatches_in_flight": self.profile.microbatches_in_flight,
            "offloaded_bytes": self.offloaded_bytes,
            "note": self.note,
            "policy": _document(self.policy),
            "choices": [
                {
                    "path": place.path,
                    "region": self.profile.regions[place.region].name,
                    "choice": choice.name,
                    "offloaded_bytes": choice.moved_nbytes,
                }
                for place, choice in zip(self.profile.places, choices_of(self.profile, self.assignment), strict=True)
            ],
            "uniform": uniform
            and {
                "choice": uniform.choice,
                "predicted_peak_bytes": uniform.predicted_peak_bytes,
                "predicted_step_seconds": uniform.predicted_step_seconds,
                "policy": _document(uniform.policy),
            },
        }
        if self.frontier:
            document["frontier"] = [
                {
                    "peak_bytes": prediction.peak_nbytes,
                    "step_seconds": prediction.step_seconds,
                    "peak_moment": prediction.peak_moment,
                    "offloaded_bytes": prediction.moved_nbytes,
                    "choices": [choice.name for choice in choices_of(self.profile, assignment)],
                }
                for assignment, prediction in self.frontier
            ]
        if self.rounds:
            document["rounds"] = [found._asdict() for found in self.rounds]
        return json.dumps(document, indent=2)

    def __str__(self) -> str:
        lines = [
            self.profile.model,
            f"budget {humanize(self.budget_nbytes)}; predicted: peak {humanize(self.predicted_peak_bytes)} in the "
            f"{self.peak_moment}, {self.predicted_step_seconds * 1e3:.1f} ms a step{_of_microbatches(self.profile)}"
            f"{_offloaded(self.offloaded_bytes)}",
            *self._of_first_steps(),
            "",
            _table(self.profile, self.assignment),
            "",
        ]
        if self.uniform is None:
            lines.append("no uniform policy fits this budget")
        else:
            lines.append(
                f"best uniform policy: {self.uniform.choice}, peak {humanize(self.uniform.predicted_peak_bytes)}, "
                f"{self.uniform.predicted_step_seconds * 1e3:.1f} ms a step "
                f"({self.uniform.predicted_step_seconds / (self.predicted_step_seconds or 1):.2f}x)"
            )
        lines += [f"measured: {found}" for found in self.rounds]
        return "\n".join([*lines, *filter(None, self.note.split("; "))])

    def _of_first_steps(self) -> list[str]:
        peak = self.most_bytes
        if peak <= self.predicted_peak_bytes:
            return []
        return [f"the first steps, in which layers are captured, take up to {humanize(peak)}"]


def with_frontier(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> Plan:
    """The plan with its ``frontier``."""
    tell: dict[str, Any] = {} if progress is None else {"progress": partial(progress, "solving for other budgets")}
    return replace(plan, frontier=tuple(solver.frontier(plan.profile, **tell)))


def frontier_table(plan: Plan) -> str:
    """One line for each point of the frontier: peak, time, the peak's moment, how many regions run in which way."""
    fastest = min(point.prediction.step_seconds for point in plan.frontier) or 1.0
    rows = []
    for assignment, prediction in plan.frontier:
        choices = choices_of(plan.profile, assignment)
        ways = Counter(choice.name for choice in choices if choice.rule is not None)
        milliseconds = f"{prediction.step_seconds * 1e3:.1f} ({prediction.step_seconds / fastest:.2f}x)"
        ways_text = "; ".join(f"{count} x {name}" for name, count in ways.items()) or "none"
        rows.append((humanize(prediction.peak_nbytes), milliseconds, prediction.peak_moment, ways_text))
    headers = ("peak", "ms a step", "peak during", "regions under a rule")
    return tabulate(rows, headers, "github", colalign=("right", "right", "left", "left"), disable_numparse=True)


def solve_plan(profile: Profile, budget_nbytes: int) -> Plan:
    """The plan for a profile and a budget, whose first steps, too, fit the device. Raises ``BudgetError``."""
    plan = plan_from_solution(profile, budget_nbytes, solver.solve(profile, budget_nbytes))
    room = None if profile.capacity_nbytes is None else int(_FOR_TENSORS * profile.capacity_nbytes)
    if room is None or plan.most_bytes <= room:
        return plan
    try:
        for within in (room, min(room, budget_nbytes)):
            assignment = solver.solve(profile.from_the_start(), within).assignment
            found = Solution(assignment, predict(profile, assignment))
            if found.prediction.peak_nbytes <= budget_nbytes:
                break
    except BudgetError:
        raise BudgetError(
            f"a budget of {humanize(budget_nbytes)} can be met, but not from the start: the first steps, in which "
            f"layers are captured, take {humanize(plan.most_bytes)}, and the device has {humanize(room)} "
            "for tensors. What would help: a smaller batch or shorter sequences"
        ) from None
    return plan_from_solution(profile, budget_nbytes, found)


def plan_from_solution(profile: Profile, budget_nbytes: int, solution: Solution) -> Plan:
    """The plan of a solution."""

    def plan_of(of: Solution, name: str, **more: Any) -> Plan:
        description = _description(profile, of.prediction, budget_nbytes)
        policy = policy_of(profile, of.assignment, description, name)
        return Plan(policy, budget_nbytes, profile, of, _note(profile, of, budget_nbytes), **more)

    uniform = next(iter(solver.uniforms(profile, budget_nbytes)), None)
    other = None if uniform is None else plan_of(uniform.solution, "uniform", choice=uniform.choice)
    return plan_of(solution, "plan", uniform=other)


def _document(policy: Policy) -> dict[str, Any]:
    return policy.model_dump(mode="json", exclude_defaults=True) | {"version": policy.version}


def _description(profile: Profile, prediction: Prediction, budget_nbytes: int) -> str:
    return (
        f"planned for {profile.model}: budget {humanize(budget_nbytes)}, predicted peak "
        f"{humanize(prediction.peak_nbytes)} in the {prediction.peak_moment}, {prediction.step_seconds * 1e3:.1f} ms a "
        f"step{_of_microbatches(profile)}{_offloaded(prediction.moved_nbytes)}"
    )


def _of_microbatches(profile: Profile) -> str:
    if profile.microbatches == 1:
        return ""
    flying = f", {profile.microbatches_in_flight} in flight" if profile.microbatches_in_flight > 1 else ""
    return f" of {profile.microbatches} microbatches{flying}"


def _offloaded(nbytes: int) -> str:
    return f", {humanize(nbytes)} offloaded" if nbytes else ""


def _note(profile: Profile, solution: Solution, budget_nbytes: int) -> str:
    notes = []
    if solver.is_fastest(profile, solution):
        needed = humanize(solution.prediction.peak_nbytes)
        notes.append(
            f"no plan is faster, even with more memory: this one needs {needed} of the {humanize(budget_nbytes)}"
        )
    if profile.source == "roofline":
        shared = ", without communication between devices" if profile.machine.get("devices", 1) > 1 else ""
        notes.append(f"the profile was calculated, not measured{shared}: verify the plan on the device itself")
    return "; ".join(notes)


def _table(profile: Profile, assignment: Assignment) -> str:
    """A row for each region and choice in use, with their places, and, if any offloads, the bytes that a place does."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    for place, choice in zip(profile.places, choices_of(profile, assignment), strict=True):
        key = profile.regions[place.region].name, choice.name, choice.moved_nbytes
        groups.setdefault(key, []).append(place.path)
    rows: list[dict[str, Any]] = []
    for (name, way, nbytes), paths in groups.items():
        offloaded = {"offloaded": humanize(nbytes) if nbytes else ""} if any(n for *_, n in groups) else {}
        rows.append({"region": name, "choice": way, **offloaded, "count": len(paths), "where": _compact(paths)})
    return tabulate(rows, "keys", "github")


def _compact(paths: Sequence[str]) -> str:
    """The paths, with numbers drawn together: "model.layers.0-15"."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        parts = path.split(".")
        last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts))
        key = ".".join([*parts[:last], ""]), ".".join(["", *parts[last + 1 :]])
        numbers.setdefault(key if last < len(parts) else (path, ""), []).extend(map(int, parts[last : last + 1]))
    texts = [f"{head}{','.join(layer_spans(found))}{tail if found else ''}" for (head, tail), found in numbers.items()]
    return ", ".join(texts)
