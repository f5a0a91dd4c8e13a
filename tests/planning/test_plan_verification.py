"""What a run teaches: a plan that holds stays, one that misses is planned again with what was measured."""

from itertools import product

import pytest
import tables
from tiny import decoder, token_ids

import recompute
from recompute.errors import BudgetError
from recompute.planning import solver
from recompute.planning.make_plan import plan
from recompute.planning.plan import policy_of
from recompute.planning.plan_verification import MeasuredStep, corrected, or_faster_uniform, run_and_replan
from recompute.planning.prediction import choices_of, predict

PROFILE = tables.transformer(4, optimizer_seconds=0.5)


def scaled(profile, peaks, static=0):
    """A truth that differs from what the profile says: backward's peaks by a factor, static memory by some bytes."""

    def of(choice):
        return choice.model_copy(update={"backward_peak_nbytes": int(choice.backward_peak_nbytes * peaks)})

    return profile.with_choices(lambda region: map(of, region.choices), static_nbytes=profile.static_nbytes + static)


class Machine:
    """Measures policies by a table of its own."""

    first_steps_peak_nbytes = 0

    def __init__(self, truth, *, tells_places_apart=True):
        self.truth = truth
        self.tells_places_apart = tells_places_apart
        self.ran = []
        numbers = [range(len(truth.regions[place.region].choices)) for place in truth.places]
        self.by_rules = {policy_of(truth, assignment).rules: assignment for assignment in product(*numbers)}

    def __call__(self, policy):
        self.ran.append(policy)
        assignment = self.by_rules[policy.rules]
        prediction = predict(self.truth, assignment)
        places = tuple(
            tables.part(choice.held_nbytes, choice.forward_peak_nbytes, choice.backward_peak_nbytes)
            for choice in choices_of(self.truth, assignment)
        )
        places = places if self.tells_places_apart else ()
        return MeasuredStep(prediction.peak_nbytes, prediction.step_seconds, places, self.first_steps_peak_nbytes)


def test_a_plan_that_holds_stays_and_tells_what_its_first_steps_take_more():
    machine = Machine(PROFILE)
    machine.first_steps_peak_nbytes = 2048
    before = plan(PROFILE, budget=1500)
    after = run_and_replan(before, machine)
    assert (after.policy, after.profile, len(machine.ran)) == (before.policy, before.profile, 1)
    (found,) = after.rounds
    assert found.measured_peak_nbytes == found.predicted_peak_nbytes == before.predicted_peak_bytes
    assert ", +0.0%)" in str(found)
    assert "measured: peak 1.5 KiB (predicted 1.5 KiB, " in str(after)
    assert ", +0.0%); the first steps, which capture layers, took 2.0 KiB" in str(after)


@pytest.mark.gpu
def test_the_first_steps_of_a_plan_are_measured():
    model, ids = decoder(layers=3).cuda(), token_ids().cuda()
    (found, *_) = plan(model, ids, budget="1GiB", loss=lambda logits: logits.square().mean()).rounds
    assert found.first_steps_peak_nbytes == pytest.approx(found.measured_peak_nbytes, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("microbatches", "in_flight"), [(1, 1), (4, 1), (4, 3)])
def test_a_plan_for_several_microbatches_runs_with_as_many(microbatches, in_flight):
    model, ids = decoder(layers=3), token_ids()
    training = {"loss": lambda logits: logits.square().mean()}
    profile = recompute.profile(model, ids, steps=1, **training)
    several = {"microbatches": microbatches, "microbatches_in_flight": in_flight}
    several["allowed"] = ["checkpoint"]
    most = plan(profile, budget="1GiB", **several)
    least = solver.floor(most.profile).prediction.peak_nbytes
    found = plan(model, ids, profile=profile, budget=least, **several, **training)
    for ran in found.rounds:
        assert ran.measured_peak_nbytes == pytest.approx(ran.predicted_peak_nbytes, rel=0.02)


@pytest.mark.parametrize("tells_places_apart", [True, False])
@pytest.mark.parametrize(("peaks", "static"), [(1.3, 0), (1.0, 60), (1.2, 30)])
def test_a_plan_over_the_budget_is_made_again_until_it_is_not(peaks, static, tells_places_apart):
    truth = scaled(PROFILE, peaks, static)
    machine = Machine(truth, tells_places_apart=tells_places_apart)
    after = run_and_replan(plan(PROFILE, budget=1490), machine)
    assert after.rounds[0].measured_peak_nbytes > 1490
    assert after.rounds[-1].measured_peak_nbytes <= 1490
    assert after.policy.rules == machine.ran[-1].rules
    assert 2 <= len(after.rounds) <= 3


def test_a_plan_that_takes_less_than_predicted_is_made_again_and_faster():
    truth = PROFILE.model_copy(update={"static_nbytes": 900})
    before = plan(PROFILE, budget=1450)
    after = run_and_replan(before, Machine(truth))
    assert after.predicted_step_seconds < before.predicted_step_seconds
    assert after.predicted_peak_bytes == after.rounds[-1].measured_peak_nbytes <= 1450


def test_three_rounds_and_no_more():
    ran = []

    def worse_each_time(policy):
        ran.append(policy)
        return MeasuredStep(1501 + len(ran), 10.0)

    after = run_and_replan(plan(PROFILE, budget=1500), worse_each_time)
    assert len(ran) == len(after.rounds) == 3
    assert after.note.startswith("after 3 rounds, the measured peak of 1.5 KiB is over the budget")
    assert after.policy.rules == ran[0].rules  # the least over
    assert after.rounds[-1].measured_peak_nbytes == 1502


def test_what_no_plan_can_mend_is_an_error():
    with pytest.raises(BudgetError, match="cannot be met"):
        run_and_replan(plan(PROFILE, budget=1500), Machine(scaled(PROFILE, 1.0, 450)))


@pytest.mark.parametrize("assignment", [(0, 0, 0, 0, 0, 0), (0, 3, 3, 1, 0, 1), (0, 2, 1, 3, 2, 0)])
def test_the_corrected_profile_predicts_what_was_measured(assignment):
    before = predict(PROFILE, assignment)
    for nbytes in (-70, 0, 45):
        measured = MeasuredStep(before.peak_nbytes + nbytes, before.step_seconds * 1.5)
        after = predict(corrected(PROFILE, assignment, measured), assignment)
        assert after.peak_nbytes == measured.peak_nbytes
        assert after.step_seconds == pytest.approx(measured.step_seconds)


def test_the_correction_of_a_choice_is_what_its_places_took():
    assignment = (0, 3, 3, 0, 0, 1)
    places = (
        tables.part(11, 12, 25),
        tables.part(10, 60, 140),
        tables.part(13, 70, 135),  # 11.5 a place, and never less than was held
        tables.part(100, 110, 120),
        tables.part(100, 110, 120),
        tables.part(20, 60, 80),
    )
    after = corrected(PROFILE, assignment, MeasuredStep(1400, predict(PROFILE, assignment).step_seconds, places))
    keep, hook, kernel, checkpoint = after.regions[1].choices
    assert (checkpoint.held_nbytes, checkpoint.forward_peak_nbytes, checkpoint.backward_peak_nbytes) == (12, 70, 140)
    assert after.regions[0].choices[0].held_nbytes == 11
    assert (keep.held_nbytes, hook, kernel) == (100, *PROFILE.regions[1].choices[1:3])  # not seen to differ, not seen
    backward_of_the_head = 11 + 2 * 12 + 2 * 100 + 80
    assert after.static_nbytes == 1400 - backward_of_the_head
    assert predict(after, assignment).peak_nbytes == 1400


BUDGET = 1490


def checkpointed(found):
    """The uniform policy by which each layer is checkpointed."""
    (uniform,) = [one for one in solver.uniforms(found.profile, BUDGET) if one.choice == "checkpoint"]
    return policy_of(found.profile, uniform.solution.assignment)


def slowed(policy, factor):
    """A machine on which all but ``policy`` takes ``factor`` times what was predicted, as where the host is slow."""

    class Slowed(Machine):
        def __call__(self, other):
            measured = super().__call__(other)
            if other.rules == policy.rules:
                return measured
            return measured._replace(step_seconds=measured.step_seconds * factor)

    return Slowed(PROFILE)


def test_a_uniform_policy_that_runs_faster_is_the_plan():
    before = plan(PROFILE, budget=BUDGET)
    uniform = checkpointed(before)
    machine = slowed(uniform, 2.0)
    after = or_faster_uniform(run_and_replan(before, machine), machine)
    assert after.policy.rules == uniform.rules
    assert after.rounds[-1].measured_step_seconds == after.predicted_step_seconds < 2 * before.predicted_step_seconds
    assert after.rounds[0].measured_step_seconds == pytest.approx(2 * before.predicted_step_seconds)
    assert "all regions run alike: checkpoint" in after.note


def test_a_plan_that_is_not_outrun_stays_and_little_is_run():
    before = plan(PROFILE, budget=BUDGET)
    machine = Machine(PROFILE)
    after = or_faster_uniform(run_and_replan(before, machine), machine)
    assert (after.policy, after.note, len(after.rounds)) == (before.policy, before.note, 1)
    assert len(machine.ran) <= 5  # itself, and by each way to run a region one uniform policy


def test_a_uniform_policy_over_the_budget_is_no_plan():
    before = plan(PROFILE, budget=BUDGET)
    uniform = checkpointed(before)

    def measure(policy):
        return MeasuredStep(BUDGET + 1, 0.1) if policy.rules == uniform.rules else MeasuredStep(BUDGET, 99.0)

    after = or_faster_uniform(run_and_replan(before, measure, replan=False), measure)
    assert after.rounds[-1].measured_peak_nbytes <= BUDGET
    assert after.policy.rules != uniform.rules


def test_a_plan_that_was_slow_for_a_moment_stays():
    before = plan(PROFILE, budget=BUDGET)
    machine = Machine(PROFILE)

    def measure(policy):
        measured = machine(policy)
        return measured._replace(step_seconds=99.0) if len(machine.ran) == 1 else measured

    after = or_faster_uniform(run_and_replan(before, measure), measure)
    assert after.policy == before.policy
    assert after.rounds[-1].measured_step_seconds == pytest.approx(before.predicted_step_seconds)


def test_a_plan_that_misses_is_left_as_it_is_unless_it_is_to_be_made_again():
    machine = Machine(scaled(PROFILE, 1.3))
    after = run_and_replan(plan(PROFILE, budget=BUDGET), machine, replan=False)
    assert (len(machine.ran), len(after.rounds)) == (1, 1)
    assert after.rounds[0].measured_peak_nbytes > BUDGET
