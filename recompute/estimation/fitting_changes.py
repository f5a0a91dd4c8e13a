"""Finds the fewest changes that make a training step fit a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.model_estimator import ADVISED, ModelEstimator
from recompute.policy.loading import load_policy
from recompute.policy.rules import Policy

_MOST_DEVICES = 1024
_LEAST_TOKENS = 256


class Sizes(NamedTuple):
    """The sizes of a batch that is made for a model."""

    batch_size: int
    seq_len: int


class FittingChanges(NamedTuple):
    """Changes that make a step fit, and its peak."""

    changes: tuple[str, ...]
    peak_nbytes: int


class Combination(NamedTuple):
    """Changes of options, and their names."""

    told: tuple[str, ...]
    options: EstimateOptions
    policy: Policy | None
    sizes: Sizes | None
    """None: the batch as it is."""
    smallest: Sizes | None
    """If not even these fit, neither do others in which as much is changed."""


def fewest_changes(
    estimator: ModelEstimator,
    options: EstimateOptions,
    policy: Policy | None,
    capacity: int,
    *,
    given: Sizes | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> FittingChanges | None:
    """The fewest changes that make the step fit ``capacity``; None if no tried ones do.

    given: the batch's sizes, which may be halved again and again; None: they are the model's own.

    Of equally few the fewest devices win, then the largest batch, then the least time: a loss without logits, a policy,
    a fused optimizer, one with 8-bit states.
    """

    @functools.cache
    def sized(sizes: Sizes | None) -> ModelEstimator:
        return estimator if sizes is None else estimator.of_sizes(*sizes)

    tried = sorted(combinations(estimator, options, policy, given), key=lambda each: len(each.told))
    for done, found in enumerate(tried):
        progress("looking for changes that fit", done, len(tried))
        asked = found.options, found.policy, capacity
        if estimator.static_nbytes(found.options) > capacity or sized(found.smallest).fitting_peak(*asked) is None:
            continue
        if (nbytes := sized(found.sizes).fitting_peak(*asked)) is not None:
            return FittingChanges(found.told, nbytes)
    return None


def _smaller(given: Sizes | None) -> Iterator[tuple[Sizes | None, Sizes | None]]:
    """Sizes to try, from the largest, each with the smallest of its kind: batches, sequences, one sequence."""
    yield None, None
    if given is None:
        return
    batches = [given.batch_size >> by for by in range(1, given.batch_size.bit_length())]
    lengths = [
        given.seq_len >> by for by in range(1, given.seq_len.bit_length()) if given.seq_len >> by >= _LEAST_TOKENS
    ]
    yield from ((Sizes(batch, given.seq_len), Sizes(1, given.seq_len)) for batch in batches)
    for batch in dict.fromkeys((given.batch_size, 1)):
        yield from ((Sizes(batch, length), Sizes(batch, lengths[-1])) for length in lengths)


def combinations(
    estimator: ModelEstimator,
    options: EstimateOptions,
    policy: Policy | None,
    given: Sizes | None,
    presets: Sequence[str] = ADVISED,
) -> Iterator[Combination]:
    """All combinations to try, from the options as they are to the most devices.

    given: as ``fewest_changes`` takes it. presets: the policies to try.
    """
    sharding = "fsdp2" if options.sharding in ("none", "ddp") else options.sharding
    devices = [options.devices]
    while 2 * devices[-1] <= _MOST_DEVICES:
        devices.append(2 * devices[-1])
    losses = [options.loss, *(["chunked"] if options.loss == "full" and estimator.head() is not None else [])]
    others = ["adamw-fused", "adamw-8bit"] if options.optimizer in ("adamw", "adamw-loop") else ["adamw-8bit"]
    optimizers = [options.optimizer, *(others if options.optimizer.startswith("adamw") else [])]
    policies = [policy, *(load_policy(name) for name in presets if policy is None or policy.name != name)]
    ways = product(devices, _smaller(given), dict.fromkeys(optimizers), policies, losses)
    for count, (sizes, smallest), optimizer, under, loss in ways:
        if loss != options.loss and under is not None and under.name == "auto":
            continue  # it makes no logits anyway
        changed = options._replace(optimizer=optimizer, loss=loss)
        told = []
        if sizes is not None and given is not None:
            names = ("batch size", "sequence length")
            told += [f"{name} {now:,}" for name, now, was in zip(names, sizes, given, strict=True) if now != was]
        if loss != options.loss:
            told.append("a chunked cross-entropy")
        if under is not policy and under is not None:
            told.append(f"policy {under.name}")
        if optimizer != options.optimizer:
            told.append(f"optimizer {optimizer}")
        if count != options.devices:
            told.append(f"{sharding} over {count} devices")
            changed = changed._replace(sharding=sharding, devices=count)
        yield Combination(tuple(told), changed, under, sizes, smallest)
