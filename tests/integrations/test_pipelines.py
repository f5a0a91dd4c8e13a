"""Pipelines of two processes: gradients under every schedule of torch, plans of stages, microbatches in flight."""

import functools
from types import SimpleNamespace

import pytest
import torch
from engine_testing import (
    SETTINGS,
    bits,
    clean_thread,  # noqa: F401  # around every test here
    governing,
)
from tiers import slow
from two_stages import MICROBATCHES, ONE_STAGE, SCHEDULES, planned, train

from recompute.errors import PlanError
from recompute.integrations.distributed import microbatches_in_flight

ZERO_BUBBLE = ["interleaved zero bubble", "ZBV zero bubble"]
RULES = {
    **{name: governing(setting, "layers.*") for name, setting in SETTINGS.items()},
    "parts": governing({"action": "recompute", "via": "hook"}, "**.norm*", "**.mlp"),
    "offload": governing({"action": "offload", "min_bytes": 0}, "layers.*"),
    "hooks that offload": governing(
        {"action": "recompute", "via": "hook", "offload": True, "min_bytes": 0}, "layers.*"
    ),
}
ONCE = [("1F1B", "recompute")]
CASES = [
    (schedule, name)
    for schedule in SCHEDULES
    for name in (RULES if schedule in ONE_STAGE else ("checkpoint", "recompute", "hooks that offload"))
]
"""Where a process has one stage, all rules; of the other schedules, one way of each kind to hold less."""


@functools.cache
def trained(processes, schedule, name):
    return processes.run(train, schedule, None if name is None else RULES[name])


@pytest.mark.parametrize(("schedule", "name"), [*ONCE, *slow(*(case for case in CASES if case not in ONCE))])
def test_losses_gradients_weights_and_random_numbers_are_as_without(two_processes, schedule, name):
    """With several graphs alive at once, and with backward for inputs and for weights apart."""
    plain = trained(two_processes, schedule, None)
    for found, expected in zip(trained(two_processes, schedule, name), plain, strict=True):
        assert len(found.values) > 80
        assert list(map(bits, found.values)) == list(map(bits, expected.values))
        assert found.random == expected.random
        assert (found.dropped_nbytes > 0) == (name != "offload")


@pytest.mark.parametrize("schedule", ["1F1B", *slow(*ZERO_BUBBLE)])
def test_layers_are_captured_unless_backward_is_in_two_parts(two_processes, schedule):
    whole = 0
    for found in trained(two_processes, schedule, "recompute"):
        whole += sum("2 of 2 run as captured code" in line for line in found.captured)
        assert all("2 of 2" in line or "gives no gradient to some" in line for line in found.captured)
    assert whole == (1 if schedule in ZERO_BUBBLE else 2)  # a first stage's backward is in one part


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", *ZERO_BUBBLE])
def test_kernels_train_as_without(two_processes, schedule):
    found = two_processes.run(train, schedule, governing({"action": "recompute", "via": "kernel"}, "layers.*"))
    for under, plain in zip(found, trained(two_processes, schedule, None), strict=True):
        assert under.dropped_nbytes > 0
        torch.testing.assert_close(under.values, plain.values, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "share"), [("1F1B", 0.0), ("1F1B", 0.5), ("GPipe", 0.3)])
def test_the_peak_of_a_planned_stage_is_what_was_predicted(two_processes, schedule, share):
    """At most 2% above, and at most 6% below, since gradients of regions are counted together (and twice in GPipe)."""
    first, second = two_processes.run(planned, schedule, share)
    assert (first.in_flight, second.in_flight) == ((2, 1) if schedule == "1F1B" else (MICROBATCHES, MICROBATCHES))
    for found in (first, second):
        assert any(name != "keep" for name in found.choices)
        assert found.predicted_nbytes <= found.budget_nbytes
        assert 0.94 * found.predicted_nbytes <= found.measured_nbytes <= 1.02 * found.predicted_nbytes


def action(kind, stage=0, parts=None):
    return SimpleNamespace(computation_type=SimpleNamespace(name=kind), stage_index=stage, sub_actions=parts)


def schedule_of(name, **fields):
    kind = type(name, (type("PipelineScheduleMulti", (), {}),) if "pipeline_order" in fields else (), fields)
    return kind()


@pytest.mark.parametrize(("stage", "microbatches", "expected"), [(0, 8, 4), (1, 8, 3), (3, 8, 1), (0, 4, 4), (0, 2, 2)])
def test_a_stage_of_1f1b_has_as_many_in_flight_as_stages_come_after_it(stage, microbatches, expected):
    fields = {"_stage": SimpleNamespace(stage_index=stage, num_stages=4), "_n_microbatches": microbatches}
    assert microbatches_in_flight(schedule_of("Schedule1F1B", **fields)) == {stage: expected}
    assert microbatches_in_flight(schedule_of("ScheduleGPipe", **fields)) == {stage: microbatches}


def test_a_microbatch_lands_when_its_backward_for_weights_has_run():
    forward, inputs, weights = action("FORWARD"), action("BACKWARD_INPUT"), action("BACKWARD_WEIGHT")
    other = action("FORWARD", 2), action("FULL_BACKWARD", 2)
    both = action("OVERLAP_F_B", parts=(forward, other[1]))
    order = [None, forward, inputs, forward, weights, other[0], both, inputs, weights, inputs, weights, *other]
    schedule = schedule_of("AnyOther", rank=1, pipeline_order={0: [], 1: order})
    assert microbatches_in_flight(schedule) == {0: 2, 2: 1}


def test_a_schedule_whose_order_is_not_known_is_refused():
    with pytest.raises(PlanError, match="found SimpleNamespace"):
        microbatches_in_flight(SimpleNamespace())
