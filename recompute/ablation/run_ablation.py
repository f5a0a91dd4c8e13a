"""Trains every model of a configuration under every policy and peer, in turn, and keeps the results, row by row."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from recompute.ablation.ablation_config import AblationConfig, Comparison
from recompute.ablation.own_process import Work, run_apart
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import NAME, AblationRow, package_version, place, resumed, save
from recompute.ablation.subjects import experiment_of, load_text, model_source
from recompute.ablation.trials import Ask, Baseline, Progress, attempted, is_out_of_memory
from recompute.counters import describe_machine, host_seconds, resolve_device
from recompute.errors import AblationError, WriteError
from recompute.files import check_writable

TellLeft = Callable[[int, int, float | None], None]
"""Called with how many cells are done, how many there are, and the seconds that the rest may take (None: not known)."""

_PREFIX = "recompute-ablation-"


class RowRecorder:
    """The rows so far, and the file that holds them. Iterating over it trains.

    results: what the file holds beside the rows. The key ``rows`` is set, and ``complete``, which is false until all
        rows are there.
    out: the folder of the file; None to write none. Raises ``WriteError`` where it cannot be written to begin with.
    work: calls ``train`` and ``search``, and yields each row that has changed.
    total: how many cells there are. A cell is one training, or one search.
    resume: go on with the rows that the file has, if there is one, and measure again what failed. Raises
        ``AblationError`` where they are of another run.
    tell: called with a message if a row cannot be written. The training goes on.
    """

    def __init__(
        self,
        results: dict[str, Any],
        out: Path | None,
        work: Callable[[RowRecorder], Iterator[AblationRow]] = lambda recorder: iter(()),
        total: int = 0,
        *,
        resume: bool = False,
        tell: Callable[[str], None] = lambda line: None,
        tell_left: TellLeft = lambda done, total, seconds: None,
    ):
        self.results, self._out, self._work, self._total = results, out, work, total
        self._tell, self._tell_left = tell, tell_left
        self._rows: dict[tuple[Any, str], AblationRow] = {}
        if resume and out is not None and (out / NAME).exists():
            self.results, earlier = resumed(results, out / NAME)
            self._rows = {(place(vars(row)), row.policy): row for row in earlier}
        self._failed_before = {key for key, row in self._rows.items() if row.error is not None}
        self._done = 0
        self._spent: list[float] = []
        self.problem: WriteError | None = None
        """Why the file lacks the latest rows; None if it has all of them. They are written with the next row."""
        self._write(is_complete=False)

    def __iter__(self) -> Iterator[AblationRow]:
        yield from self._work(self)
        self._keep(is_complete=True)

    @property
    def rows(self) -> tuple[AblationRow, ...]:
        return tuple(self._rows.values())

    def train(
        self, ask: Ask, names: Sequence[str], facts: Mapping[str, Any], *, repeats: int = 1
    ) -> Iterator[AblationRow]:
        """Train under each name, the baseline first; then, for each further repeat, under each of them once more.

        What has a row without an error, and as many timings, is not trained again. Yields each row that has changed.
        """
        has_gradients = False  # of the baseline: the others are compared with these
        for repeat, name in product(range(repeats), names):
            key = place(facts), name
            row = None if key in self._failed_before else self._rows.get(key)
            if row is not None and (row.error is not None or len(row.timings) > repeat):
                self._done += 1
                continue
            with self._cell():
                if row is not None:
                    timings, error = ask("timings", name)
                    told = f"repeat {len(row.timings) + 1}: {error}"
                    row = row.timed([*row.timings, timings]) if timings else replace(row, error=told)
                else:
                    base = self._rows.get((place(facts), BASELINE))
                    if not has_gradients and name != BASELINE and base is not None and base.error is None:
                        ask("row", BASELINE)  # its row is of a run before, and stays
                    has_gradients = True
                    found, error = ask("row", name)
                    row = found or AblationRow(name, **facts, error=error)
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
            alike = {"policy": name, **facts, "sequence_length": None}.items()
            rows = [row for row in self.rows if alike <= {**vars(row), "sequence_length": None}.items()]
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
        key = place(vars(row)), row.policy
        self._rows[key] = row
        self._failed_before.discard(key)
        base = self._rows.get((key[0], BASELINE))
        for at, each in self._rows.items():
            if at[0] == key[0] and base is not None:
                spent, plain = each.backward_seconds, base.backward_seconds
                added = None if spent is None or plain is None else spent - plain
                self._rows[at] = replace(each, backward_added_seconds=added)
        self._keep(is_complete=False)
        return self._rows[key]

    def _keep(self, *, is_complete: bool) -> None:
        """Write the rows. Where that fails the training goes on, and its rows are still told."""
        try:
            self._write(is_complete=is_complete)
            self.problem = None
        except WriteError as error:
            if self.problem is None:
                self._tell(f"{error}. The training goes on")
            self.problem = error

    def _write(self, *, is_complete: bool) -> None:
        self.results |= {"complete": is_complete, "rows": [dict(vars(row)) for row in self.rows]}
        if self._out is not None:
            save(self.results, self._out)


def run(config: AblationConfig, out: Path, *, command: str, progress: Progress, **recording: Any) -> RowRecorder:
    """Train, as the rows are iterated over, under each policy in each comparison; ``out/results.json`` holds each row.

    A row is yielded again after each repeat. A policy that fails has an ``error`` in its row.

    recording: further options of the ``RowRecorder``.

    Raises before anything is trained: `AblationError` for a text or a device that cannot be used, and for results that
    are not to be resumed; ``ModelError`` for a model that there is not; ``WriteError`` for a full disk.
    """
    device = resolve_device(config.device)
    source, text = load_text(config.text)
    if len(text) < (longest := max(config.sequence_lengths)):
        raise AblationError(f"{source}: expected a text of at least {longest} bytes; found {len(text)}")
    search, names, comparisons = config.longest_sequence, config.treatments(), config.comparisons()
    budget = None if search is None else search.budget_nbytes(device)
    for comparison in comparisons:
        model_source(comparison)
    check_writable(out, error=AblationError, is_folder=True)
    head = {
        "command": command,
        "machine": _machine(config, device) | {"recompute": package_version()},
        "config": config.model_dump(mode="json"),
        "text": {"source": source, "nbytes": len(text)},
    }
    # Comparisons that differ in the sequence length alone share a search.
    of_search = {(each.model, each.batch_size, each.dtype): each for each in reversed(comparisons) if search}
    asked = partial(_asked, text=text, device=device, progress=progress)

    def train(recorder: RowRecorder) -> Iterator[AblationRow]:
        for comparison in comparisons:
            with asked(comparison) as ask:
                yield from recorder.train(ask, names, comparison.facts, repeats=config.repeats)
        for comparison in reversed(of_search.values()):
            longest = partial(_longest, comparison, asked, budget, len(text))
            yield from recorder.search(longest, names, comparison.facts)

    total = len(names) * (len(comparisons) * config.repeats + len(of_search))
    return RowRecorder(head, out, train, total, **recording)


def _longest(
    comparison: Comparison, asked: Any, budget_nbytes: int | None, most: int, policy: str
) -> tuple[int | None, str | None]:
    """The longest sequence whose step fits under a policy or peer, or why none is found. most: the text's length."""
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


def _asked(
    comparison: Comparison, text: bytes, device: torch.device, progress: Progress
) -> AbstractContextManager[Ask]:
    if comparison.config.isolate:
        return isolated(comparison, progress)
    experiment, error = attempted(lambda: experiment_of(comparison, text, device, progress))
    return nullcontext((lambda task, policy: (None, error)) if experiment is None else experiment.ask)


@contextmanager
def isolated(comparison: Comparison, progress: Progress) -> Iterator[Ask]:
    """Inside, what an ``Experiment`` is asked is answered by a process of its own, each time.

    The baseline's losses and gradients are handed on in a temporary folder, and so is the tolerance.
    """
    tolerance: tuple[float | None] | None = None
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as temporary:
        folder = Path(temporary)

        def ask(task: str, policy: str) -> tuple[Any, str | None]:
            nonlocal tolerance
            work = partial(_answer, comparison, task, policy, folder, tolerance, torch.get_num_threads())
            try:
                answer, error = run_apart(work, folder, progress, comparison.config.cell_timeout_seconds)
            except OSError as problem:  # the disk of temporary files is full, say: that is this row's error, too
                answer, error = None, f"{type(problem).__name__}: {folder}: {problem}"
            if error is None:
                answer, error, tolerance = answer
            return answer, error

        yield ask


def _answer(
    comparison: Comparison, task: str, policy: str, folder: Path, tolerance: Any, threads: int, progress: Progress
) -> tuple[Any, str | None, Any]:
    """An ``Experiment``'s answer, or an error; and the tolerance, once it has been sought."""
    torch.set_num_threads(threads)
    config, saved = comparison.config, folder / "baseline.pt"
    device = resolve_device(config.device)
    experiment, error = attempted(lambda: experiment_of(comparison, load_text(config.text)[1], device, progress))
    if experiment is None:
        return None, error, tolerance
    experiment.known_tolerance = tolerance
    experiment.baseline = Baseline(**torch.load(saved, mmap=True)) if saved.exists() else None
    answer, error = experiment.ask(task, policy)
    if (task, policy) == ("row", BASELINE) and experiment.baseline is not None:
        torch.save(vars(experiment.baseline), saved)
    return answer, error, experiment.known_tolerance


def _machine(config: AblationConfig, device: torch.device) -> dict[str, Any]:
    """With processes of their own, trainings have the whole device: this process does not even look at it."""
    if not (config.isolate and device.type == "cuda"):
        return describe_machine(device)
    work: Work = partial(_described, device)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        found, error = run_apart(work, Path(folder), lambda *_: None, config.cell_timeout_seconds)
    if found is None:
        raise AblationError(f"isolate: the process that queries the CUDA device failed: {error}")
    return found


def _described(device: torch.device, progress: Progress) -> dict[str, Any]:
    return describe_machine(device)
