"""Tensor parallelism, FSDP2 and DDP: values, accumulation, collectives, memory, random numbers, plans of all ranks."""

import functools
import itertools
import json

import engine_testing
import pytest
import two_parts
from engine_testing import SETTINGS, bits, governing
from tiers import by_default, slow
from two_parts import disagreements, kept_nbytes, losses_under_deepspeed, plans_of_this_rank, refusals, train, verified

clean_thread = engine_testing.clean_thread  # around every test here

WAYS = ["ddp", "fsdp", "fsdp of parts", "tensor parallel", "sequence parallel", "tensor parallel, then fsdp"]
OF_WEIGHTS = [way for way in WAYS if "parallel" in way]

ONCE = [("fsdp", "recompute"), ("sequence parallel", "recompute"), ("tensor parallel", "checkpoint")]
"""Parameters that are shared out and layers that are, and each action."""
OFFLOADING = {"offload": {"action": "offload"}, "recompute": {"action": "recompute", "via": "hook", "offload": True}}


def each_way(*ways, names=SETTINGS):
    """Of ``ways`` and the policies in ``names``: those in ``ONCE`` by default, the others are slow."""
    cases = list(itertools.product(ways or WAYS, names))
    return pytest.mark.parametrize(("how", "name"), by_default(cases, *(case for case in cases if case in ONCE)))


def trained(processes, how, name, first="policy"):
    return _trained(processes, how, name, first)  # once, however its arguments are given


@functools.cache
def _trained(processes, how, name, first):
    rules = None if name is None else governing(SETTINGS[name], "model.layers.*")
    return processes.run(train, how, rules, first)


@each_way()
@pytest.mark.parametrize("first", ["policy", *slow("wrapper")])
def test_losses_gradients_weights_and_random_numbers_are_as_without(two_processes, how, name, first):
    for found, expected in zip(
        trained(two_processes, how, name, first), trained(two_processes, how, None), strict=True
    ):
        assert len(found.values) > 50
        assert found.values == expected.values
        assert found.random == expected.random
        assert found.dropped_nbytes > 0


BY_DATA = [
    *("ddp", "ddp, static graph", "ddp, unused parameters"),
    *("fsdp", "fsdp, weights stay gathered", "fsdp, mixed precision"),
]
ACCUMULATING = [
    *itertools.product(BY_DATA, SETTINGS, ["policy", "wrapper"], [False]),
    *itertools.product(BY_DATA, SETTINGS, ["policy"], [True]),
]
SOME_ACCUMULATING = [("fsdp", "recompute", "wrapper", False), ("ddp", "recompute", "policy", True)]


@functools.cache
def accumulated(processes, how, name, first, adapts):
    rules = None if name is None else governing(SETTINGS[name], "model.layers.*")
    return processes.run(train, how, rules, first, bits, 2, adapts)


@pytest.mark.parametrize(("how", "name", "first", "adapts"), by_default(ACCUMULATING, *SOME_ACCUMULATING))
def test_micro_batches_and_adapters_train_as_without(two_processes, how, name, first, adapts):
    plain = accumulated(two_processes, how, None, "policy", adapts)
    for found, expected in zip(accumulated(two_processes, how, name, first, adapts), plain, strict=True):
        assert len(found.values) > 20
        assert (found.values, found.random) == (expected.values, expected.random)
        assert found.dropped_nbytes > 0


@pytest.mark.parametrize("first", ["policy", *slow("wrapper")])
@pytest.mark.parametrize("how", by_default([how for how in BY_DATA if how != "fsdp, mixed precision"], "fsdp"))
def test_kernels_in_the_place_of_layers_under_ddp_and_fsdp(two_processes, how, first):
    for difference in two_processes.run(two_parts.kernels_train_as_without, how, first):
        assert difference < 1e-5


@pytest.mark.parametrize("setting", by_default(OFFLOADING, "recompute"))
@pytest.mark.parametrize("how", by_default(WAYS, "fsdp"))
def test_what_is_offloaded_comes_back_on_every_rank(two_processes, how, setting):
    rules = governing({**setting, "min_bytes": 0}, "model.layers.*")
    for found, expected in zip(two_processes.run(train, how, rules), trained(two_processes, how, None), strict=True):
        assert found.offloaded_nbytes > 0
        assert found.values == expected.values
        assert found.random == expected.random
        assert found.collectives == expected.collectives


@each_way()
def test_memory_is_saved(two_processes, how, name):
    for found, plain in zip(trained(two_processes, how, name), trained(two_processes, how, None), strict=True):
        assert found.held_nbytes < 0.8 * plain.held_nbytes
        assert found.peak_nbytes < plain.peak_nbytes


@each_way()
def test_collectives_run_as_often_as_without(two_processes, how, name):
    for found, plain in zip(trained(two_processes, how, name), trained(two_processes, how, None), strict=True):
        assert sum(plain.collectives[1].values()) > 0
        assert found.collectives[0] == plain.collectives[0]
        if name == "checkpoint" and how in OF_WEIGHTS:  # its rule is to run all of a layer's Python again
            assert found.collectives[1] > plain.collectives[1]
        else:
            assert found.collectives[1] == plain.collectives[1]


@each_way(*(way for way in WAYS if "fsdp" in way))
def test_gathered_weights_do_not_outlive_forward(two_processes, how, name):
    for first in ("policy", "wrapper"):
        assert [found.gathered_nbytes for found in trained(two_processes, how, name, first)] == [0, 0]


@each_way(*OF_WEIGHTS)
def test_ranks_that_have_parts_of_one_model_draw_alike(two_processes, how, name):
    for rules in (name, None):
        first, second = trained(two_processes, how, rules)
        assert first.random == second.random


@each_way(names=[name for name in SETTINGS if name != "checkpoint"])
def test_every_rank_has_the_same_plans(two_processes, how, name):
    first, second = trained(two_processes, how, name)
    assert first.plans.keys() == {"model.layers.0", "model.layers.1"}
    assert first.plans == second.plans


@pytest.mark.parametrize("action", [SETTINGS["recompute"], SETTINGS["checkpoint"]])
def test_what_changes_a_dtensor_between_forward_and_backward_is_refused(two_processes, action):
    for found in two_processes.run(refusals, action):
        assert found == ["MutationError"] * 3


def test_a_dtensor_can_be_pinned(two_processes):
    free, held = (two_processes.run(kept_nbytes, SETTINGS["recompute"], pins) for pins in (False, True))
    for (plain, same), (pinned, same_pinned) in zip(free, held, strict=True):
        assert same
        assert same_pinned
        assert pinned > plain


@pytest.mark.slow
def test_a_plan_of_an_agreed_profile_is_the_same_on_all_ranks_and_fits_each(two_processes):
    (policy, profile), (other_policy, other_profile) = two_processes.run(plans_of_this_rank, True)
    assert policy == other_policy
    assert profile == other_profile
    (_, first), (_, second) = two_processes.run(plans_of_this_rank, False)
    assert first != second
    held = [json.loads(each)["regions"][1]["choices"][0]["held_nbytes"] for each in (first, profile, second)]
    assert held[0] < held[1] == held[2]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_plan_that_misses_on_one_rank_is_corrected_on_all(two_processes, how):
    first, second = two_processes.run(verified, how)
    assert first.own_peaks[0] < first.budget_nbytes < second.own_peaks[0]  # alone, rank 0 would have been content
    assert first[:-1] == second[:-1]
    assert "action" in first.policy
    most = list(map(max, first.own_peaks, second.own_peaks))
    measured = {found.measured_peak_nbytes for found in first.rounds}
    assert most[0] in measured <= set(most)  # the first plan, and what came after; uniform policies ran, too
    assert len(most) == len(first.own_peaks) == len(second.own_peaks) >= len(first.rounds) >= 2


def test_ranks_with_other_models_or_plans_are_told_so(two_processes):
    for profiles, plans in two_processes.run(disagreements):
        assert "rank 1 of the group has another profile.regions[0].choices[0].name" in profiles
        assert "rank 1 of the group has a plan with another budget than rank 0" in plans


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stage", [3, 1, 2])
def test_losses_under_deepspeed_are_as_without(two_processes, stage, name):
    pytest.importorskip("deepspeed")
    expected = two_processes.run(losses_under_deepspeed, stage, None)
    found = two_processes.run(losses_under_deepspeed, stage, governing(SETTINGS[name], "model.layers.*"))
    for (values, dropped_nbytes), (plain, _) in zip(found, expected, strict=True):
        assert values == plain
        assert dropped_nbytes > 0
