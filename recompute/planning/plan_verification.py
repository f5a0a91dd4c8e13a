"""Runs a plan to see whether it holds.

If its peak is not as predicted, it is planned again. If a uniform policy runs faster, that is the plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from recompute.attach.apply import apply
from recompute.counters import allocated_nbytes, start_peak
from recompute.estimation.optimizer_step import OptimizerFactory
from recompute.planning import solver
from recompute.planning.allowed_ways import ways_of
from recompute.planning.plan import Plan, VerificationRound, plan_from_solution, solve_plan
from recompute.planning.prediction import Assignment, choices_of, leaving_before, predict
from recompute.planning.solver import Uniform
from recompute.policy.rules import Policy
from recompute.profiling.cost_table import Choice, Profile
from recompute.profiling.dry_run import DryRun, dry_run
from recompute.profiling.model_run import Loss
from recompute.profiling.step_trace import StepPart
from recompute.units import humanize

_MOST_ROUNDS = 3
_TOLERANCE = 0.02  # of the peak
# A prediction may be too slow by this factor where the host sets the pace (measured: 1.2, Gemma 2 on an H200).
_UNCERTAIN = 1.25


class MeasuredStep(NamedTuple):
    """The bytes and the seconds of a training step that ran."""

    peak_nbytes: int
    """Static bytes included."""
    step_seconds: float
    places: tuple[StepPart, ...] = ()
    """One for each place of the profile, or () where they could not be told apart."""
    first_steps_peak_nbytes: int = 0
    """The peak of the steps before, in which layers are captured; 0 where nobody counts, as on the CPU."""


def verify_plan(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    steps: int = 5,
    replan: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    agree: Callable[[MeasuredStep], MeasuredStep] | None = None,
) -> Plan:
    """Run the plan's policy, and plan again as long as its peak is over the budget or off by more than 2%.

    Then run the uniform policies that fit and may be as fast. If one of them is faster, it is the plan.

    Returns the plan with ``rounds``, one for each policy that ran. If the plan is not within the budget after three of
    them, it has a note. The model is afterwards as before.

    model, batch, loss, optimizer: those that the plan's profile was made with.
    steps: how many steps of each policy are timed.
    replan: False to leave the plan as it is if its peak is off.
    agree: is given the numbers that each policy took here, and returns those to use, such as the most of all ranks.

    Raises ``BudgetError`` where the measured profile leaves no plan.
    """
    several = plan.profile.microbatches, plan.profile.microbatches_in_flight
    with dry_run(model, batch, *several, loss=loss, optimizer=optimizer) as run:

        def measure(policy: Policy) -> MeasuredStep:
            if progress is not None:
                progress(f"verifying: {policy.name}", 0, 0)
            measured = _measure(run, plan.profile, policy, steps)
            return measured if agree is None else agree(measured)

        return or_faster_uniform(run_and_replan(plan, measure, replan=replan), measure)


def or_faster_uniform(plan: Plan, measure: Callable[[Policy], MeasuredStep]) -> Plan:
    """The plan, which has been run; or a uniform policy that fits the budget and is faster than two runs of it.

    A profile's seconds add up over regions. Where the host sets the pace, that sum is off by a fifth, and differently
    for tapes and for checkpoints. So for each way to run a region the fastest uniform policy by prediction is tried,
    unless its prediction is slower than the plan by more than that error.
    """
    for uniform in _fastest_of_each_way(plan):
        slowest = max(plan.rounds[-1].measured_step_seconds, plan.predicted_step_seconds)
        is_slow = uniform.solution.prediction.step_seconds > _UNCERTAIN * slowest
        if uniform.solution.assignment == plan.assignment or is_slow:
            continue
        other = plan_from_solution(plan.profile, plan.budget_nbytes, uniform.solution)
        measured = measure(other.policy)
        if _is_better(plan, measured):  # the host may have been slow for a moment: run the plan once more
            *before, last = plan.rounds
            seconds = min(last.measured_step_seconds, measure(plan.policy).step_seconds)
            plan = replace(plan, rounds=(*before, last._replace(measured_step_seconds=seconds)))
        if _is_better(plan, measured):
            note = (
                f"measured, no mixed plan was faster than a uniform policy, so all regions run alike: {uniform.choice}"
            )
            plan = replace(other, rounds=(*plan.rounds, _round(other, measured)), note=note)
    return plan


def _fastest_of_each_way(plan: Plan) -> Iterable[Uniform]:
    """For each way to run a region, the fastest uniform policy that should fit."""
    ways = {choice.name: ways_of(choice) for region in plan.profile.regions for choice in region.choices}
    found: dict[frozenset[str], Uniform] = {}
    for uniform in solver.uniforms(plan.profile, plan.budget_nbytes):
        found.setdefault(ways[uniform.choice], uniform)
    return found.values()


def _round(plan: Plan, measured: MeasuredStep) -> VerificationRound:
    predicted = plan.predicted_peak_bytes, plan.predicted_step_seconds
    return VerificationRound(
        predicted[0], measured.peak_nbytes, predicted[1], measured.step_seconds, measured.first_steps_peak_nbytes
    )


def _is_better(plan: Plan, measured: MeasuredStep) -> bool:
    """Whether a policy that took ``measured`` is faster than the plan was, or the first one to fit the budget."""
    last = plan.rounds[-1]
    if measured.peak_nbytes > plan.budget_nbytes:
        return False
    return last.measured_peak_nbytes > plan.budget_nbytes or measured.step_seconds < last.measured_step_seconds


def run_and_replan(plan: Plan, measure: Callable[[Policy], MeasuredStep], *, replan: bool = True) -> Plan:
    """The plan that holds when ``measure`` runs it, with its ``rounds``; after the last round, the best one so far."""
    rounds: list[VerificationRound] = []
    tried: list[tuple[bool, float, Plan]] = []
    for _ in range(_MOST_ROUNDS):
        measured = measure(plan.policy)
        rounds.append(_round(plan, measured))
        fits = measured.peak_nbytes <= plan.budget_nbytes
        if not replan:
            return replace(plan, rounds=tuple(rounds))
        if fits and abs(measured.peak_nbytes - plan.predicted_peak_bytes) <= _TOLERANCE * measured.peak_nbytes:
            return replace(plan, rounds=tuple(rounds))
        tried.append((not fits, measured.step_seconds if fits else measured.peak_nbytes, plan))
        again = solve_plan(corrected(plan.profile, plan.assignment, measured), plan.budget_nbytes)
        if again.assignment == plan.assignment:  # its corrected profile predicts what was measured
            return replace(again, rounds=tuple(rounds))
        plan = again
    index = min(range(len(tried)), key=lambda i: tried[i][:2])
    best = tried[index][2]
    misses, found = tried[index][0], rounds.pop(index)
    problem = "is over the budget" if misses else "is not the predicted one"
    note = f"after {_MOST_ROUNDS} rounds, the measured peak of {humanize(found.measured_peak_nbytes)} {problem}"
    return replace(best, rounds=(*rounds, found), note="; ".join(filter(None, (note, best.note))))


def corrected(profile: Profile, assignment: Assignment, measured: MeasuredStep) -> Profile:
    """The profile, changed so that it predicts for ``assignment`` the peak and the seconds that were measured.

    For each choice in use, the measured bytes replace those of the profile: the mean of its places' held bytes, and the
    highest of their peaks. When forward of an offloading place has ended, the offloaded bytes of the one before it have
    just left the device: they are added to the place's held bytes. The error of the peak that remains goes to static
    bytes. All seconds change by one factor.
    """
    seen: dict[tuple[int, int], list[StepPart]] = {}
    choices = choices_of(profile, assignment)
    for i, found in enumerate(measured.places):
        left = leaving_before(choices)[i] if choices[i].moved_nbytes else 0
        whole = replace(found, held_nbytes=found.held_nbytes + left)
        seen.setdefault((profile.places[i].region, assignment[i]), []).append(whole)
    before = predict(profile, assignment).step_seconds
    factor = measured.step_seconds / before if before else 1.0

    def of(choice: Choice, found: Sequence[StepPart]) -> Choice:
        changes: dict[str, Any] = {
            "forward_seconds": choice.forward_seconds * factor,
            "backward_seconds": choice.backward_seconds * factor,
        }
        if found:
            held = sum(part.held_nbytes for part in found)
            changes |= {
                "held_nbytes": max(-(-held // len(found)), choice.moved_nbytes),
                "forward_peak_nbytes": max(part.forward_peak_nbytes for part in found),
                "backward_peak_nbytes": max(part.backward_peak_nbytes for part in found),
            }
        return choice.model_copy(update=changes)

    regions = [
        region.model_copy(update={"choices": tuple(of(c, seen.get((i, j), ())) for j, c in enumerate(region.choices))})
        for i, region in enumerate(profile.regions)
    ]
    changes: dict[str, Any] = {"regions": tuple(regions), "optimizer_seconds": profile.optimizer_seconds * factor}
    changed = profile.model_copy(update=changes)
    missing = measured.peak_nbytes - predict(changed, assignment).peak_nbytes
    return changed.model_copy(update={"static_nbytes": max(0, changed.static_nbytes + missing)})


def _measure(run: DryRun, profile: Profile, policy: Policy, steps: int) -> MeasuredStep:
    """Run steps until the policy has settled, one that counts bytes, and some that are timed."""
    regions = _regions(run.model, profile)
    with apply(run.model, policy) as handle:
        start_peak(run.device)
        run.settle(handle)
        static_nbytes = run.static_nbytes
        first_steps = 0 if (alive := allocated_nbytes(run.device)) is None else static_nbytes + alive[1] - alive[0]
        trace = run.step(regions, counted=True)
        # Steps are timed without marks at regions, which would slow them down where the host sets the pace.
        timed = [run.step(None, timed=True) for _ in range(steps)]
    seconds = [run.microbatches * (one.seconds - one.optimizer_seconds) + one.optimizer_seconds for one in timed]
    return MeasuredStep(
        static_nbytes + trace.peak_nbytes,
        statistics.median(seconds),
        trace.parts if len(trace.parts) == len(profile.places) else (),
        first_steps,
    )


def _regions(model: nn.Module, profile: Profile) -> Mapping[str, nn.Module]:
    """The modules of the profile's places, by path, without the parts before and after all regions."""
    paths = [place.path for place in profile.places]
    inner = paths[1:-1] if len(paths) > 2 and not paths[0] else [path for path in paths if path]
    return {path: model.get_submodule(path) for path in inner}
