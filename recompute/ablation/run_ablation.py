"""Runs a configuration: every model, size and dtype under every policy and peer, in turn, as often as it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recompute import counters
from recompute.ablation import results_file
from recompute.ablation.ablation_config import AblationConfig, Comparison, HuggingFaceFields
from recompute.ablation.cell_process import IsolatedExperiment
from recompute.ablation.longest_sequence import budget_nbytes, find_longest, is_out_of_memory
from recompute.ablation.row_recorder import AblationRun, RowRecorder, TellLeft, Trainer
from recompute.ablation.subjects import experiment_of, hugging_face_source, load_text
from recompute.ablation.trials import AblationRow, Progress, attempted
from recompute.counters import resolve_device
from recompute.errors import AblationError
from recompute.estimation.check_paths import names_factory
from recompute.estimation.factories import load_factory
from recompute.files import check_writable


def run(
    config: AblationConfig,
    out: Path,
    *,
    command: str,
    progress: Progress,
    resume: bool = False,
    tell_left: TellLeft = lambda done, total, seconds: None,
) -> AblationRun:
    """Train, as the rows are iterated over, under each policy in each comparison; ``out/results.json`` holds each row.

    A row is yielded again after each repeat. Beside ``rows`` that file has ``machine``, ``config``, ``text`` and the
    `command` that led to it. It is replaced as a whole each time, so an interrupted run leaves the rows until then,
    with ``complete`` false.

    resume: go on with the rows of an earlier run of the same configuration in ``out``. Rows that failed are measured
        again. Where there are no results yet, it starts from the beginning.

    Raises before anything is trained: `AblationError` for a text or a device that cannot be used, and for results that
    are not to be resumed; ``ModelError`` for a model that there is not; ``WriteError`` for a full disk. A policy that
    fails has an ``error`` in its row.
    """
    device = resolve_device(config.device)
    source, text = load_text(config.text)
    if len(text) < (longest := max(config.sequence_lengths)):
        raise AblationError(f"{source}: expected a text of at least {longest} bytes; found {len(text)}")
    if config.longest_sequence is not None:
        budget_nbytes(config.longest_sequence, device)
    for comparison in config.comparisons():
        _check_model(comparison)
    check_writable(out, error=AblationError, is_folder=True)
    results: dict[str, Any] = {
        "command": command,
        "complete": False,
        "machine": _machine(config, device) | {"recompute": results_file.package_version()},
        "config": config.model_dump(mode="json"),
        "text": {"source": source, "nbytes": len(text)},
    }
    earlier: list[AblationRow] = []
    if resume and (out / results_file.NAME).exists():
        found = results_file.load(out)
        earlier = results_file.rows_to_resume(found, results, out / results_file.NAME)
        results = {**found, "complete": False, "resumed": [*found.get("resumed", ()), results["machine"]["date"]]}
    names, asked = config.treatments(), config.longest_sequence
    searches = len(_without_lengths(config.comparisons())) * len(names) if asked else 0
    total = len(config.comparisons()) * len(names) * config.repeats + searches
    recorder = RowRecorder(results, out, earlier, total=total, tell_left=tell_left)
    return AblationRun(recorder, _train(config, text, device, progress, recorder))


def _train(
    config: AblationConfig, text: bytes, device: torch.device, progress: Progress, recorder: RowRecorder
) -> Iterator[AblationRow]:
    names = config.treatments()
    for comparison in config.comparisons():
        with _trainer(comparison, text, device, progress) as trainer:
            yield from recorder.train(trainer, names, comparison.facts, repeats=config.repeats)
    for comparison in _without_lengths(config.comparisons()) if config.longest_sequence else ():
        search = _Search(comparison, text, device, progress)
        yield from recorder.search(search.longest, names, comparison.facts)
    recorder.finish()


def _machine(config: AblationConfig, device: torch.device) -> dict[str, Any]:
    """With processes of their own, trainings have the whole device: this process does not even look at it."""
    if not (config.isolate and device.type == "cuda"):
        return dict(counters.describe_machine(device))
    with IsolatedExperiment(config.comparisons()[0], lambda what, done, total: None) as isolated:
        return isolated.machine()


def _check_model(comparison: Comparison) -> None:
    """Raise ``ModelError`` where there is no such model, before anything is trained."""
    source = comparison.source
    if isinstance(source, str) and names_factory(source):
        load_factory(source)
    elif isinstance(source, (str, HuggingFaceFields)):
        hugging_face_source(comparison)


def _without_lengths(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The first of those that differ in the sequence length alone."""
    found: dict[tuple[Any, ...], Comparison] = {}
    for each in comparisons:
        found.setdefault((each.model, each.batch_size, each.dtype), each)
    return list(found.values())


@contextmanager
def _trainer(comparison: Comparison, text: bytes, device: torch.device, progress: Progress) -> Iterator[Trainer]:
    if comparison.config.isolate:
        with IsolatedExperiment(comparison, progress) as isolated:
            yield isolated
    else:
        experiment, error = attempted(lambda: experiment_of(comparison, text, device, progress))
        yield experiment or _Failed(comparison, error)


@dataclass(frozen=True)
class _Failed:
    """Stands for an experiment whose model cannot be made: each row says why."""

    comparison: Comparison
    error: str | None
    has_baseline: bool = True

    def row(self, policy: str) -> AblationRow:
        return AblationRow(policy, **self.comparison.facts, error=self.error)

    def timings(self, policy: str) -> tuple[None, str | None]:
        return None, self.error


@dataclass(frozen=True)
class _Search:
    """The search for the longest sequence of a model at one batch size and dtype."""

    comparison: Comparison
    text: bytes
    device: torch.device
    progress: Progress

    def longest(self, policy: str) -> tuple[int | None, str | None]:
        """The longest sequence that fits under a policy or peer, or why none can be found."""
        asked = self.comparison.config.longest_sequence
        assert asked is not None, "nothing is searched for that is not asked for"
        budget = budget_nbytes(asked, self.device)
        failures = []

        def fits(length: int) -> bool:
            peak, error = self._peak(policy, length)
            if error is not None and not is_out_of_memory(error):
                failures.append(error)
            return peak is not None and (budget is None or peak <= budget)

        reachable = asked.model_copy(update={"most": min(asked.most, len(self.text))})
        found = find_longest(fits, reachable)
        return (None, failures[0]) if failures else (found, None)

    def _peak(self, policy: str, length: int) -> tuple[int | None, str | None]:
        if self.comparison.config.isolate:
            with IsolatedExperiment(self.comparison, self.progress) as isolated:
                return isolated.step_peak(policy, length)
        comparison = replace(self.comparison, sequence_length=length)
        experiment, error = attempted(lambda: experiment_of(comparison, self.text, self.device, self.progress))
        return experiment.step_peak(policy) if experiment else (None, error)
