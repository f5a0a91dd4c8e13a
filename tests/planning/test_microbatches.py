"""Plans for several microbatches a step: against steps that are acted out, and against every assignment there is."""

import pytest
import tables
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from test_solver import assert_none_is_better, every, peak_by_running, profiles

from recompute.errors import BudgetError, PlanError
from recompute.planning import solver
from recompute.planning.make_plan import plan
from recompute.planning.microbatches import with_microbatches
from recompute.planning.prediction import choices_of, predict
from recompute.profiling.cost_table import Place, Profile

SEVERAL = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted).map(tuple)
"""How many are in flight, and how many a step has."""


@st.composite
def of_one_microbatch(draw):
    """What the solver's tests draw, without ways that offload, and with bytes of a microbatch's own."""
    found, nbytes = draw(profiles(5)), st.integers(0, 12)
    own = {"microbatch_nbytes": draw(nbytes), "output_nbytes": draw(nbytes)}
    return found.with_choices(
        lambda region: [choice.model_copy(update={"moved_nbytes": 0}) for choice in region.choices], **own
    )


@given(of_one_microbatch(), SEVERAL, st.data())
def test_the_prediction_is_what_a_step_acted_out_takes(profile, several, data):
    in_flight, microbatches = several
    assignment = data.draw(st.sampled_from(every(profile)))
    prediction = predict(with_microbatches(profile, microbatches, in_flight), assignment)
    assert prediction.peak_nbytes == peak_by_running(profile, assignment, in_flight, microbatches)
    ways = choices_of(profile, assignment)
    assert prediction.held_nbytes == in_flight * sum(way.held_nbytes for way in ways)
    seconds = sum(way.forward_seconds + way.backward_seconds for way in ways)
    assert prediction.step_seconds == pytest.approx(0.5 + microbatches * seconds)


@given(of_one_microbatch(), SEVERAL, st.integers(0, 400))
def test_no_assignment_is_better_than_the_solution(profile, several, budget):
    table = with_microbatches(profile, several[1], several[0])
    all_of_them = [predict(table, assignment) for assignment in every(table)]
    assert solver.floor(table).prediction.peak_nbytes == min(other.peak_nbytes for other in all_of_them)
    assert_none_is_better(table, budget)


def test_the_more_are_in_flight_the_less_a_stage_keeps():
    """Within one budget, of a pipeline of four stages that are alike."""
    table = tables.transformer(6, static=1000)
    held = []
    for in_flight in (1, 2, 3, 4):
        found = plan(table, budget=2600, microbatches=8, microbatches_in_flight=in_flight)
        assert found.predicted_peak_bytes <= 2600
        held.append(found.profile.microbatches_in_flight * sum(
            choice.held_nbytes for choice in choices_of(found.profile, found.assignment)
        ))  # fmt: skip
    of_each = [nbytes / in_flight for in_flight, nbytes in enumerate(held, 1)]
    assert of_each == sorted(of_each, reverse=True)
    assert of_each[0] > of_each[-1]


def test_a_plan_says_how_many_microbatches_it_is_for():
    found = plan(tables.transformer(), budget=5000, microbatches=8, microbatches_in_flight=4)
    assert "ms a step of 8 microbatches, 4 in flight" in str(found)
    assert "of 8 microbatches, 4 in flight" in found.policy.description
    assert '"microbatches_in_flight": 4' in found.to_json()
    assert "microbatches" not in str(plan(tables.transformer(), budget=5000))
    accumulated = plan(tables.transformer(), budget=5000, microbatches=8)
    assert "of 8 microbatches" in str(accumulated)
    assert "in flight" not in str(accumulated)
    with pytest.raises(BudgetError, match="fewer microbatches in flight"):
        plan(tables.transformer(), budget=1300, microbatches=8, microbatches_in_flight=4)


def test_nothing_is_offloaded_where_several_are_in_flight():
    layer = tables.region(
        "Layer", tables.choice("keep", None, 1.0, 100, 110, 120, storages=(50, 50)), tables.LAYER.choices[-1]
    )
    table = tables.profile([layer], [Place(path="layers.0", region=0)], link=tables.link())
    for in_flight in (1, 2):
        found = plan(table, budget=1000, microbatches=2, microbatches_in_flight=in_flight)
        offloads = any(choice.moved_nbytes for region in found.profile.regions for choice in region.choices)
        assert offloads == (in_flight == 1)
    moving = plan(table, budget=1000).profile
    assert plan(moving, budget=1000, microbatches=2, microbatches_in_flight=2).offloaded_bytes == 0
    only = moving.with_choices(lambda region: region.choices[-1:])
    with pytest.raises(PlanError, match="Layer: with several microbatches in flight nothing is offloaded"):
        plan(only, budget=1000, microbatches=2, microbatches_in_flight=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches_in_flight": 2}, "at most the 1 microbatches"),
        ({"microbatches": 2, "microbatches_in_flight": 3}, "at most the 2 microbatches"),
        ({"microbatches": 0}, "microbatches: expected a whole number, at least 1; found 0"),
        ({"microbatches": 4, "microbatches_in_flight": 1.5}, "microbatches_in_flight: expected a whole number"),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        plan(tables.transformer(), budget=5000, **options)


def test_a_profile_is_of_one_microbatch_and_a_plan_has_its_own():
    found = plan(tables.transformer(), budget=5000, microbatches=4, microbatches_in_flight=2).profile
    with pytest.raises(PlanError, match="found one for 4 microbatches"):
        plan(found, budget=5000, microbatches=4, microbatches_in_flight=2)
    assert plan(found, budget=5000).profile == found
    with pytest.raises(ValidationError, match="at most 4 microbatches in flight"):
        Profile(**{**found.model_dump(), "microbatches_in_flight": 5})
