"""Trains in processes of their own, whose end is an error in a row."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recompute.ablation.ablation_config import AblationConfig, Comparison
from recompute.ablation.own_process import run_apart
from recompute.ablation.peers import BASELINE
from recompute.ablation.subjects import experiment_of, load_text
from recompute.ablation.trials import Ask, Baseline, Experiment, Progress, attempted
from recompute.counters import describe_machine, resolve_device
from recompute.errors import AblationError

_BASELINE, _PREFIX = "baseline.pt", "recompute-ablation-"

Tolerance = tuple[float | None] | None


@contextmanager
def isolated(comparison: Comparison, progress: Progress) -> Iterator[Ask]:
    """Inside, what an ``Experiment`` is asked is answered by a process of its own, each time.

    The baseline's losses and gradients are handed on in a temporary folder, and so is the tolerance.
    """
    tolerance: Tolerance = None
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as temporary:
        folder = Path(temporary)

        def ask(task: str, policy: str) -> tuple[Any, str | None]:
            nonlocal tolerance
            work = partial(_do, comparison, task, policy, folder, tolerance, torch.get_num_threads())
            try:
                answer, error = run_apart(work, folder, progress, comparison.config.cell_timeout_seconds)
            except OSError as problem:  # the disk of temporary files is full, say: that is this row's error, too
                return None, f"{type(problem).__name__}: {folder}: {problem}"
            if error is not None:
                return None, error
            result, failure, tolerance = answer
            return result, failure

        yield ask


def machine_of(config: AblationConfig, device: torch.device) -> dict[str, Any]:
    """With processes of their own, trainings have the whole device: this process does not even look at it."""
    if not (config.isolate and device.type == "cuda"):
        return dict(describe_machine(device))
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        found, error = run_apart(partial(_describe, device), Path(folder), lambda *_: None, config.cell_timeout_seconds)
    if found is None:
        raise AblationError(f"isolate: a process of its own cannot look at the device: {error}")
    return found


def _describe(device: torch.device, progress: Progress) -> dict[str, Any]:
    return dict(describe_machine(device))


def _do(
    comparison: Comparison, task: str, policy: str, folder: Path, tolerance: Tolerance, threads: int, progress: Progress
) -> tuple[Any, str | None, Tolerance]:
    """What an ``Experiment`` answers, or an error; and the tolerance, once it has been sought."""
    torch.set_num_threads(threads)
    experiment, error = attempted(lambda: _prepared(comparison, folder / _BASELINE, tolerance, progress))
    if experiment is None:
        return None, error, tolerance
    answer, error = experiment.ask(task, policy)
    if (task, policy) == ("row", BASELINE) and experiment.baseline is not None:
        torch.save(vars(experiment.baseline), folder / _BASELINE)
    return answer, error, experiment.known_tolerance


def _prepared(comparison: Comparison, saved: Path, tolerance: Tolerance, progress: Progress) -> Experiment:
    config = comparison.config
    experiment = experiment_of(comparison, load_text(config.text)[1], resolve_device(config.device), progress)
    baseline = Baseline(**torch.load(saved, mmap=True)) if saved.exists() else None
    return replace(experiment, baseline=baseline, known_tolerance=tolerance)
