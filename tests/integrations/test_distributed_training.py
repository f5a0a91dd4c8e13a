"""Gradients through accumulation, replicas, DDP and FSDP2, of whole models and of adapters on frozen ones."""

import pytest
from engine_testing import (
    SETTINGS,
    assert_as_without,
    clean_thread,  # noqa: F401  # around every test here
    every_rule,
    governing,
    loss_of,
    tokens,
)
from tiers import by_default, slow
from two_parts import kernels_train_as_without
from two_processes import adapted, trains_as_without

each_policy_in_processes = pytest.mark.parametrize(
    "rules", by_default({name: governing(setting) for name, setting in SETTINGS.items()}, "recompute")
)

# Accumulation, replicas, processes


def assert_trains_as_without(processes, *arguments):
    for same, count, dropped_nbytes in processes.run(trains_as_without, *arguments):
        assert same
        assert count > 10
        assert dropped_nbytes > 0


@each_policy_in_processes
@pytest.mark.parametrize("first", ["policy", *slow("wrapper")])
@pytest.mark.parametrize("how", ["ddp", *slow("ddp, static graph", "ddp, unused parameters")])
def test_ddp_with_gradient_accumulation_and_no_sync(two_processes, rules, how, first):
    assert_trains_as_without(two_processes, "full", how, rules, first)


@each_policy_in_processes
@pytest.mark.parametrize("first", ["wrapper", *slow("policy")])
@pytest.mark.parametrize("how", ["fsdp", *slow("fsdp, weights stay gathered", "fsdp, mixed precision")])
def test_fsdp_with_gradient_accumulation_without_synchronization(two_processes, rules, how, first):
    assert_trains_as_without(two_processes, "full", how, rules, first)


@pytest.mark.parametrize("first", ["policy", *slow("wrapper")])
@pytest.mark.parametrize(
    "how", ["fsdp", *slow("ddp", "ddp, static graph", "ddp, unused parameters", "fsdp, weights stay gathered")]
)
def test_kernels_in_the_place_of_layers_under_ddp_and_fsdp(two_processes, how, first):
    for difference in two_processes.run(kernels_train_as_without, how, first):
        assert difference < 1e-5


# Frozen weights and adapters


@every_rule
def test_frozen_weights_and_adapters(rules):
    def run(model):
        loss_of(model(tokens(grad=False))).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert_as_without(adapted(), rules, run)


@each_policy_in_processes
@pytest.mark.parametrize("how", ["ddp", *slow("fsdp", "fsdp, weights stay gathered", "fsdp, mixed precision")])
def test_frozen_weights_and_adapters_under_ddp_and_fsdp(two_processes, rules, how):
    assert_trains_as_without(two_processes, "adapted", how, rules, "policy")
