"""Trains every model of a configuration under every policy and peer, in turn, and keeps what they gave, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from recompute.ablation import results
from recompute.ablation.ablation_config import AblationConfig, Comparison, HuggingFaceFields
from recompute.ablation.cell_process import isolated, machine_of
from recompute.ablation.longest_sequence import is_out_of_memory
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AblationRow, place
from recompute.ablation.subjects import experiment_of, hugging_face_source, load_text
from recompute.ablation.trials import Ask, Progress, attempted
from recompute.counters import host_seconds, resolve_device
from recompute.errors import AblationError, WriteError
from recompute.estimation.check_paths import names_factory
from recompute.estimation.factories import load_factory
from recompute.files import check_writable

TellLeft = Callable[[int, int, float | None], None]
"""Called with how many cells are done, how many there are, and the seconds that the rest may take (None: not known)."""


class RowRecorder:
    """The rows so far, by what they are of, and the file that holds them. To iterate over it is to train.

    results: what the file holds beside the rows. The key ``rows`` is set, and ``complete``, which is false until all
        rows are there.
    out: the folder of the file; None to write none. Raises ``WriteError`` where it cannot be written to begin with.
    earlier: rows that are there before anything runs.
    work: calls ``train`` and ``search``, and yields each row that has changed.
    total: how many cells there are. A cell is one training, or one search.
    """

    def __init__(
        self,
        results: dict[str, Any],
        out: Path | None,
        earlier: Iterable[AblationRow] = (),
        *,
        work: Callable[[RowRecorder], Iterator[AblationRow]] = lambda recorder: iter(()),
        total: int = 0,
        tell_left: TellLeft = lambda done, total, seconds: None,
    ):
        self.results, self._out, self._work, self._tell_left = results, out, work, tell_left
        self._rows = {self._key(vars(row), row.policy): row for row in earlier}
        self._done, self._total = 0, total
        self._spent: list[float] = []
        self.problem: WriteError | None = None
        """Why the file lacks the latest rows; None if it has all of them. They are written with the next row."""
        self._write(is_complete=False)
        if self.problem is not None:  # nothing was trained yet
            raise self.problem

    def __iter__(self) -> Iterator[AblationRow]:
        yield from self._work(self)
        self._write(is_complete=True)

    @property
    def rows(self) -> tuple[AblationRow, ...]:
        return tuple(self._rows.values())

    def train(
        self, ask: Ask, names: Sequence[str], facts: Mapping[str, Any], *, repeats: int = 1
    ) -> Iterator[AblationRow]:
        """Train under each name, the baseline first; then, for each further repeat, under each of them once more.

        What has a row without an error, and as many timings, is not trained again. Yields each row that has changed.
        """
        failed_now: set[str] = set()
        has_trained = False
        for repeat in range(repeats):
            for name in names:
                row = self._rows.get(self._key(facts, name))
                is_new = row is None or (row.error is not None and name not in failed_now)
                if row is not None and not is_new and (row.error is not None or len(row.timings) > repeat):
                    self._done += 1
                    continue
                with self._cell():
                    if row is not None and not is_new:
                        timings, error = ask("timings", name)
                        told = f"repeat {len(row.timings) + 1}: {error}"
                        row = row.timed([*row.timings, timings]) if timings else replace(row, error=told)
                    else:
                        base = self._rows.get(self._key(facts, BASELINE))
                        if not has_trained and name != BASELINE and base is not None and base.error is None:
                            ask("row", BASELINE)  # of a run before: its row stays, but its gradients are gone
                        has_trained = True
                        found, error = ask("row", name)
                        row = found or AblationRow(name, **facts, error=error)
                if row.error is not None:
                    failed_now.add(name)
                yield self._put(row)

    def search(
        self,
        longest: Callable[[str], tuple[int | None, str | None]],
        names: Sequence[str],
        facts: Mapping[str, Any],
    ) -> Iterator[AblationRow]:
        """Find the longest sequence under each name, and write it into the rows of all lengths.

        longest: returns it, or an error. facts: of any of these rows.
        """
        for name in names:
            lengths = dict.fromkeys(row.sequence_length for row in self.rows)
            keys = [self._key({**facts, "sequence_length": length}, name) for length in lengths]
            rows = [self._rows[key] for key in keys if key in self._rows]
            if all(row.longest_sequence is not None for row in rows):
                self._done += 1
                continue
            with self._cell():
                length, error = longest(name)
            for row in rows:
                yield self._put(replace(row, longest_sequence=length, error=row.error or error))

    @contextmanager
    def _cell(self) -> Iterator[None]:
        if not self._spent:
            self._tell_left(self._done, self._total, None)
        start = host_seconds()
        yield
        self._spent.append(host_seconds() - start)
        self._done += 1
        mean = sum(self._spent) / len(self._spent)
        self._tell_left(self._done, self._total, mean * (self._total - self._done))

    def _put(self, row: AblationRow) -> AblationRow:
        key = self._key(vars(row), row.policy)
        self._rows[key] = row
        base = self._rows.get((key[0], BASELINE))
        for at, each in self._rows.items():
            if at[0] == key[0] and base is not None:
                self._rows[at] = replace(each, backward_added_seconds=_difference(each, base))
        self._write(is_complete=False)
        return self._rows[key]

    def _key(self, facts: Mapping[str, Any], policy: str) -> tuple[tuple[Any, ...], str]:
        return place(facts), policy

    def _write(self, *, is_complete: bool) -> None:
        self.results |= {"complete": is_complete, "rows": [dict(vars(row)) for row in self.rows]}
        if self._out is None:
            return
        try:
            results.save(self.results, self._out)
            self.problem = None
        except WriteError as error:  # training goes on: its rows are still told
            self.problem = error


def _difference(row: AblationRow, baseline: AblationRow) -> float | None:
    if row.backward_seconds is None or baseline.backward_seconds is None:
        return None
    return row.backward_seconds - baseline.backward_seconds


def run(
    config: AblationConfig,
    out: Path,
    *,
    command: str,
    progress: Progress,
    resume: bool = False,
    tell_left: TellLeft = lambda done, total, seconds: None,
) -> RowRecorder:
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
    search = config.longest_sequence
    budget = None if search is None else search.budget_nbytes(device)
    for comparison in config.comparisons():
        _check_model(comparison)
    check_writable(out, error=AblationError, is_folder=True)
    found: dict[str, Any] = {
        "command": command,
        "complete": False,
        "machine": machine_of(config, device) | {"recompute": results.package_version()},
        "config": config.model_dump(mode="json"),
        "text": {"source": source, "nbytes": len(text)},
    }
    earlier: list[AblationRow] = []
    if resume and (out / results.NAME).exists():
        before = results.load(out)
        earlier = results.rows_to_resume(before, found, out / results.NAME)
        found = {**before, "complete": False, "resumed": [*before.get("resumed", ()), found["machine"]["date"]]}
    names, comparisons = config.treatments(), config.comparisons()
    searched = _without_lengths(comparisons) if search else []
    asked = partial(_asked, text=text, device=device, progress=progress)

    def train(recorder: RowRecorder) -> Iterator[AblationRow]:
        for comparison in comparisons:
            with asked(comparison) as ask:
                yield from recorder.train(ask, names, comparison.facts, repeats=config.repeats)
        for comparison in searched:
            longest = partial(_longest, comparison, asked, budget, len(text))
            yield from recorder.search(longest, names, comparison.facts)

    total = len(names) * (len(comparisons) * config.repeats + len(searched))
    return RowRecorder(found, out, earlier, work=train, total=total, tell_left=tell_left)


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
def _asked(comparison: Comparison, text: bytes, device: torch.device, progress: Progress) -> Iterator[Ask]:
    if comparison.config.isolate:
        with isolated(comparison, progress) as ask:
            yield ask
    else:
        experiment, error = attempted(lambda: experiment_of(comparison, text, device, progress))
        yield (lambda task, policy: (None, error)) if experiment is None else experiment.ask


def _longest(
    comparison: Comparison, asked: Any, budget_nbytes: int | None, most: int, policy: str
) -> tuple[int | None, str | None]:
    """The longest sequence whose step fits under a policy or peer, or why none can be found. most: of the text."""
    search = comparison.config.longest_sequence
    assert search is not None, "nothing is searched for that is not asked for"
    failures = []

    def fits(length: int) -> bool:
        with asked(replace(comparison, sequence_length=length)) as ask:
            peak, error = ask("step_peak", policy)
        if error is not None and not is_out_of_memory(error):
            failures.append(error)
        return peak is not None and (budget_nbytes is None or peak <= budget_nbytes)

    found = search.longest(fits, most)
    return (None, failures[0]) if failures else (found, None)
