"""Trains a model under one policy after another, and compares memory, time, losses and gradients.

Each training starts from the same weights and sees the same batches and random numbers.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from recompute import counters
from recompute.ablation.peers import BASELINE, COMPILED, is_peer, under
from recompute.attach.apply import PolicyLike
from recompute.diagnostics.comparing_runs import (
    COMPRESSION_TOLERANCE,
    Widened,
    deterministic,
    relative_error,
    same_bits,
)
from recompute.policy.loading import load_policy
from recompute.policy.meaning import Meaning, meaning_of

Progress = Callable[[str, int, int], None]
"""Called after each training step with what is running, the steps done and the steps in all."""


@dataclass(frozen=True)
class AblationRow:
    """What training under one policy, or peer, took and gave. If it failed, ``error`` says how.

    What was not measured is None. ``sequence_length`` is None for a model of the caller's own.

    ``step_seconds`` is the median of forward, backward and optimizer together. ``forward_cpu_seconds`` is the median of
    the time that launching forward takes the CPU; it is None where the model itself runs on the CPU.

    The other fields compare with the baseline, and are None where the baseline failed. ``loss_error`` is the largest
    relative error of a step's loss. The error of a gradient g is ‖g - r‖ / ‖r‖, with the baseline's gradient r, over
    all parameters together. ``grad_error`` is that of the first step, in which the weights are still equal, and
    ``grad_error_last`` that of the last step.

    ``grads_match`` means one of two things. An ``exact`` policy promises the baseline's bits: then it says whether the
    gradients of the first and of the last step have them. Any other policy rounds in its own way: then it says whether
    ``grad_error`` is at most ``grad_tolerance``. That is twice the error of the baseline's own gradient, as compared
    with the same model's in float64 (float32 for a bfloat16 model), because the policy may be that far from it in one
    direction and the baseline in the other. Of a policy that compresses it is ``COMPRESSION_TOLERANCE``, if that is
    more.
    """

    policy: str
    sequence_length: int | None
    exact: bool | None = None
    activation_bytes_held: int | None = None
    peak_bytes: int | None = None
    bytes_per_token_layer_hidden: float | None = None
    step_seconds: float | None = None
    forward_cpu_seconds: float | None = None
    losses: tuple[float, ...] | None = None
    losses_match: bool | None = None
    loss_error: float | None = None
    grads_match: bool | None = None
    grad_error: float | None = None
    grad_error_last: float | None = None
    grad_tolerance: float | None = None
    error: str | None = None


def _write(results: dict[str, Any], path: Path) -> None:
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


@dataclass(frozen=True)
class Training:
    losses: tuple[float, ...]
    step_seconds: float
    forward_cpu_seconds: float
    first_gradient: tuple[Tensor, ...]
    last_gradient: tuple[Tensor, ...]


@dataclass
class Experiment:
    """What the trainings under all policies have in common, and the baseline's training once it has run.

    make: makes the model in training mode, on ``device``, with the same weights each time it is called.
    loss: computes a scalar from a model and a batch.
    batches: one for each step; tensors of floats in them have the model's dtype.
    optimizer: makes one of the parameters.
    """

    make: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    batches: Sequence[Any]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    device: torch.device
    progress: Progress
    wider: torch.dtype
    """A dtype in which gradients are exact enough to judge the model's own by."""
    warmup: int = 0
    """How many of the first steps are not timed."""
    updates: bool = True
    """Whether the optimizer takes its step."""
    seed: int = 0
    """The seed of the random numbers that training draws."""
    policies: Mapping[str, PolicyLike] = field(default_factory=dict)
    """Policies by names of their own. Other names are those of peers, presets or files."""
    layers: str | Sequence[str] | None = None
    """Globs over the paths of the modules that peers take for layers; None: by the names of their classes."""
    sequence_length: int | None = None
    token_elements: int | None = None
    """Tokens times layers times the hidden size of a step, for bytes by these."""
    baseline: Training | None = None

    @cached_property
    def grad_tolerance(self) -> float:
        """Twice the relative error of the baseline's first gradient, as compared with that in a wider dtype."""
        assert self.baseline is not None, "a tolerance is earned by the baseline's error"
        wider = self.wider
        model = self.make()
        nn.Module.to(model, wider)
        batch = tree_map_only(
            Tensor, lambda each: each.to(wider) if each.is_floating_point() else each, self.batches[0]
        )
        with Widened(wider), seeded(self.seed, self.device):
            self.loss(model, batch).backward()
        return 2 * relative_error(self.baseline.first_gradient, _gradient(model))

    def rows(self, names: Iterable[str]) -> Iterator[AblationRow]:
        """Train under each policy or peer. The first has to be the baseline, which the others are compared with."""
        for name in names:
            gc.collect()  # Hugging Face modules form reference cycles, and no model may outlive its row
            yield _row(self, name)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers of torch, Python and NumPy inside; afterwards put back the states of before."""
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def recorded(results: dict[str, Any], rows: Iterable[AblationRow], out: Path | None) -> Iterator[AblationRow]:
    """Add each row to ``results``, write that to ``results.json`` in the folder ``out``, if given, and yield the row.

    The file is replaced as a whole each time. So an interrupted run leaves a good file with the rows until then, whose
    ``complete`` is false.
    """
    results |= {"complete": False, "rows": []}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        _write(results, out / "results.json")
    for row in rows:
        results["rows"].append(asdict(row))
        if out is not None:
            _write(results, out / "results.json")
        yield row
    results["complete"] = True
    if out is not None:
        _write(results, out / "results.json")


def _row(experiment: Experiment, policy: str) -> AblationRow:
    try:
        return _measure(experiment, policy)
    except Exception as error:
        # What fails may be the user's policy file, our code, Triton or memory. Whatever it is belongs in this
        # row, because the other policies still deserve theirs. Ctrl-C is not an Exception: it ends the run.
        return AblationRow(policy, experiment.sequence_length, error=f"{type(error).__name__}: {error}")


def _measure(experiment: Experiment, policy: str) -> AblationRow:
    device = experiment.device
    exact = _is_exact(policy, experiment.policies)
    tolerance = 0.0 if exact else experiment.grad_tolerance if experiment.baseline else None
    if tolerance is not None and _compresses(policy, experiment.policies):
        tolerance = max(tolerance, COMPRESSION_TOLERANCE)
    model = experiment.make()
    with under(policy, model, experiment.policies, experiment.layers):
        optimizer = experiment.optimizer(model.parameters())
        with deterministic(device.type == "cuda"):
            trained = _train(experiment, model, optimizer, policy)
        timed = _train(experiment, model, optimizer, policy) if device.type == "cuda" else trained
        with seeded(experiment.seed, device):
            memory = counters.step_memory(partial(experiment.loss, model, experiment.batches[-1]), device)
    if policy == BASELINE:
        experiment.baseline = trained
    held, elements = memory.activation_bytes_held, experiment.token_elements
    row = AblationRow(
        policy,
        experiment.sequence_length,
        exact=exact,
        activation_bytes_held=held,
        peak_bytes=memory.peak_bytes,
        bytes_per_token_layer_hidden=None if elements is None else held / elements,
        step_seconds=timed.step_seconds,
        forward_cpu_seconds=timed.forward_cpu_seconds if device.type == "cuda" else None,
        losses=trained.losses,
    )
    return _compared(row, trained, experiment.baseline, tolerance) if experiment.baseline else row


def _compared(row: AblationRow, trained: Training, baseline: Training, tolerance: float | None) -> AblationRow:
    first_matches, first_error = _compare(trained.first_gradient, baseline.first_gradient)
    last_matches, last_error = _compare(trained.last_gradient, baseline.last_gradient)
    if not row.exact:
        first_matches, last_matches = tolerance is not None and first_error <= tolerance, True
    return replace(
        row,
        losses_match=trained.losses == baseline.losses,
        loss_error=max(abs(a - b) / (abs(b) or 1.0) for a, b in zip(trained.losses, baseline.losses, strict=True)),
        grads_match=first_matches and last_matches,
        grad_error=first_error,
        grad_error_last=last_error,
        grad_tolerance=tolerance,
    )


def _train(experiment: Experiment, model: nn.Module, optimizer: Optimizer, policy: str) -> Training:
    device, steps = experiment.device, len(experiment.batches)
    losses, seconds, forward_seconds, gradients = [], [], [], []
    length = experiment.sequence_length
    what = policy if length is None else f"{policy}, sequence {length}"
    with seeded(experiment.seed, device):
        for step, batch in enumerate(experiment.batches):
            optimizer.zero_grad()
            start, cpu_start = counters.wall_seconds(device), counters.thread_seconds()
            loss = experiment.loss(model, batch)
            forward_seconds.append(counters.thread_seconds() - cpu_start)
            loss.backward()
            if experiment.updates:
                optimizer.step()
            seconds.append(counters.wall_seconds(device) - start)
            losses.append(loss.item())
            if step in (0, steps - 1):
                gradients.append(_gradient(model))
            experiment.progress(what, step + 1, steps)
    warmup = min(experiment.warmup, steps - 1)
    return Training(
        losses=tuple(losses),
        step_seconds=statistics.median(seconds[warmup:]),
        forward_cpu_seconds=statistics.median(forward_seconds[warmup:]),
        first_gradient=gradients[0],
        last_gradient=gradients[-1],
    )


def _is_exact(policy: str, policies: Mapping[str, PolicyLike]) -> bool:
    """Whether the policy promises the baseline's bits. Kernels that stand in, and compilers, round in other ways."""
    if policy.endswith(COMPILED):
        return False
    if policy not in policies and is_peer(policy):
        return policy in ("torch-checkpoint", "torch-selective", "torch-save-on-cpu")
    return all(meaning.is_exact for meaning in _meanings(policy, policies))


def _compresses(policy: str, policies: Mapping[str, PolicyLike]) -> bool:
    return any(meaning.compresses for meaning in _meanings(policy.removesuffix(COMPILED), policies))


def _meanings(policy: str, policies: Mapping[str, PolicyLike]) -> list[Meaning]:
    """Those of the policy's rules; a peer has none."""
    if policy not in policies and is_peer(policy):
        return []
    return [meaning_of(rule) for rule in load_policy(policies.get(policy, policy)).rules]


def _gradient(model: nn.Module) -> tuple[Tensor, ...]:
    """A flat copy of each parameter's gradient, on the host; zeros where a policy left none."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return tuple(gradient.flatten().to("cpu", copy=True) for gradient in gradients)


def _compare(gradient: Sequence[Tensor], reference: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether all bits are the same, and the relative error."""
    if all(map(same_bits, gradient, reference)):
        return True, 0.0
    return False, relative_error(gradient, reference)
