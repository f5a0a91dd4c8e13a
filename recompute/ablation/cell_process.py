"""Does what an ``Experiment`` does, each time in a process of its own, whose end is an error in a row."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recompute.ablation.ablation_config import AblationConfig, Comparison
from recompute.ablation.own_process import run_apart
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AblationRow, Timings
from recompute.ablation.subjects import experiment_of, load_text
from recompute.ablation.trials import Baseline, Experiment, Progress, attempted
from recompute.counters import describe_machine, resolve_device
from recompute.errors import AblationError

_BASELINE = "baseline.pt"

Tolerance = tuple[float | None] | None


class IsolatedExperiment(AbstractContextManager["IsolatedExperiment"]):
    """It is used in a ``with`` block, at whose end what the processes handed on is removed.

    That is the baseline's losses and gradients, in a temporary folder, and the tolerance.
    """

    def __init__(self, comparison: Comparison, progress: Progress):
        self._comparison, self._progress = comparison, progress
        self._temporary = tempfile.TemporaryDirectory(prefix="recompute-ablation-")
        self._folder = Path(self._temporary.name)
        self._tolerance: Tolerance = None

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    @property
    def has_baseline(self) -> bool:
        return (self._folder / _BASELINE).exists()

    def row(self, policy: str) -> AblationRow:
        found, error = self._answer("row", policy)
        return found or AblationRow(policy, **self._comparison.facts, error=error)

    def timings(self, policy: str) -> tuple[Timings | None, str | None]:
        return self._answer("timings", policy)

    def step_peak(self, policy: str) -> tuple[int | None, str | None]:
        return self._answer("step_peak", policy)

    def _answer(self, task: str, policy: str) -> tuple[Any, str | None]:
        work = partial(_do, self._comparison, task, policy, self._folder, self._tolerance, torch.get_num_threads())
        try:
            answer, error = run_apart(work, self._folder, self._progress, self._comparison.config.cell_timeout_seconds)
        except OSError as problem:  # the disk of temporary files is full, say: that is this row's error, too
            return None, f"{type(problem).__name__}: {self._folder}: {problem}"
        if error is not None:
            return None, error
        result, failure, self._tolerance = answer
        return result, failure


def machine_of(config: AblationConfig, device: torch.device) -> dict[str, Any]:
    """With processes of their own, trainings have the whole device: this process does not even look at it."""
    if not (config.isolate and device.type == "cuda"):
        return dict(describe_machine(device))
    with tempfile.TemporaryDirectory(prefix="recompute-ablation-") as folder:
        found, error = run_apart(partial(_describe, device), Path(folder), lambda *_: None, config.cell_timeout_seconds)
    if found is None:
        raise AblationError(f"isolate: a process of its own cannot look at the device: {error}")
    return found


def _describe(device: torch.device, progress: Progress) -> dict[str, Any]:
    return dict(describe_machine(device))


def _do(
    comparison: Comparison, task: str, policy: str, folder: Path, tolerance: Tolerance, threads: int, progress: Progress
) -> tuple[Any, str | None, Tolerance]:
    """What the method of an ``Experiment`` returns, or an error; and the tolerance, once it has been sought."""
    torch.set_num_threads(threads)
    experiment, error = attempted(lambda: _prepared(comparison, folder / _BASELINE, tolerance, progress))
    if experiment is None:
        return None, error, tolerance
    if task != "row":
        return *getattr(experiment, task)(policy), tolerance
    row = experiment.row(policy)
    if policy == BASELINE and experiment.baseline is not None:
        torch.save(vars(experiment.baseline), folder / _BASELINE)
    return row, None, experiment.known_tolerance


def _prepared(comparison: Comparison, saved: Path, tolerance: Tolerance, progress: Progress) -> Experiment:
    config = comparison.config
    experiment = experiment_of(comparison, load_text(config.text)[1], resolve_device(config.device), progress)
    baseline = Baseline(**torch.load(saved, mmap=True)) if saved.exists() else None
    return replace(experiment, baseline=baseline, known_tolerance=tolerance)
