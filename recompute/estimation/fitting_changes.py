"""Finds the fewest changes with which a training step fits a device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from recompute.errors import NoEffectError
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.model_estimator import ModelEstimator
from recompute.policy.loading import load_policy
from recompute.policy.rules import Policy

_POLICIES = ("elementwise", "auto", "full")
_MOST_DEVICES = 1024


class FittingChanges(NamedTuple):
    """Changes with which a step fits, and its peak."""

    changes: tuple[str, ...]
    peak_nbytes: int


def fewest_changes(
    estimator: ModelEstimator, options: EstimateOptions, policy: Policy | None, capacity: int
) -> FittingChanges | None:
    """The fewest changes with which the step fits ``capacity``; None if none of those that are tried does.

    Of as few, those with the fewest devices, and then those that cost the least time: a loss without logits, a policy,
    an optimizer with states of 8 bits.
    """
    for changes, changed, under in sorted(_combinations(estimator, options, policy), key=lambda each: len(each[0])):
        if estimator.static_nbytes(changed) > capacity:
            continue
        try:
            peak = estimator.estimate(changed, under).peak_bytes
        except NoEffectError:  # nothing for that preset to govern
            continue
        if peak <= capacity:
            return FittingChanges(changes, peak)
    return None


def _combinations(
    estimator: ModelEstimator, options: EstimateOptions, policy: Policy | None
) -> Iterator[tuple[tuple[str, ...], EstimateOptions, Policy | None]]:
    sharding = "fsdp2" if options.sharding in ("none", "ddp") else options.sharding
    devices = [options.devices]
    while 2 * devices[-1] <= _MOST_DEVICES:
        devices.append(2 * devices[-1])
    losses = [options.loss, *(["chunked"] if options.loss == "full" and estimator.head() is not None else [])]
    optimizers = [options.optimizer, *(["adamw-8bit"] if options.optimizer.startswith("adamw") else [])]
    policies = [policy, *(load_policy(name) for name in _POLICIES if policy is None or policy.name != name)]
    for count, optimizer, under, loss in product(devices, dict.fromkeys(optimizers), policies, losses):
        changed = options._replace(optimizer=optimizer, loss=loss)
        told = ["a chunked cross-entropy"] if loss != options.loss else []
        if under is not policy and under is not None:
            told.append(f"policy {under.name}")
        if optimizer != options.optimizer:
            told.append(f"optimizer {optimizer}")
        if count != options.devices:
            told.append(f"{sharding} over {count} devices")
            changed = changed._replace(sharding=sharding, devices=count)
        yield tuple(told), changed, under
