"""Trains under policies and peers in turn, and keeps what they gave: in ``results.json``, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from recompute import counters
from recompute.ablation import results_file
from recompute.ablation.peers import BASELINE
from recompute.ablation.row_places import place
from recompute.ablation.trials import AblationRow, Timings
from recompute.errors import WriteError

TellLeft = Callable[[int, int, float | None], None]
"""Called with how many cells are done, how many there are, and the seconds that the rest may take (None: not known)."""


class Trainer(Protocol):
    """Trains the model of one comparison: an ``Experiment``, or one whose trainings have processes of their own."""

    @property
    def has_baseline(self) -> bool:
        """Whether the baseline has been trained, so that others can be compared with it."""

    def row(self, policy: str) -> AblationRow: ...

    def timings(self, policy: str) -> tuple[Timings | None, str | None]: ...


class RowRecorder:
    """The rows so far, by what they are of, and the file that holds them.

    results: what the file holds beside the rows. The key ``rows`` is set, and ``complete``, which is false until all
        rows are there.
    out: the folder of the file; None to write none. Raises ``WriteError`` where it cannot be written to begin with.
    earlier: rows that are there before anything runs.
    total: how many cells there are. A cell is one training, or one search.
    """

    def __init__(
        self,
        results: dict[str, Any],
        out: Path | None,
        earlier: Iterable[AblationRow] = (),
        *,
        total: int = 0,
        tell_left: TellLeft = lambda done, total, seconds: None,
    ):
        self.results, self._out, self._tell_left = results, out, tell_left
        self._rows = {self._key(asdict(row), row.policy): row for row in earlier}
        self._done, self._total = 0, total
        self._spent: list[float] = []
        self.problem: WriteError | None = None
        """Why the file lacks the latest rows; None if it has all of them. They are written with the next row."""
        self._write()
        if self.problem is not None:  # nothing was trained yet
            raise self.problem

    def train(
        self, trainer: Trainer, names: Sequence[str], facts: Mapping[str, Any], *, repeats: int = 1
    ) -> Iterator[AblationRow]:
        """Train under each name, the baseline first; then, for each further repeat, under each of them once more.

        What has a row without an error, and as many timings, is not trained again. Yields each row that has changed.
        """
        failed_now: set[str] = set()
        for repeat in range(repeats):
            for name in names:
                row = self._rows.get(self._key(facts, name))
                is_new = row is None or (row.error is not None and name not in failed_now)
                if row is not None and not is_new and (row.error is not None or len(row.timings) > repeat):
                    self._done += 1
                    continue
                with self._cell():
                    row = self._first(trainer, name, facts) if is_new or row is None else self._again(trainer, row)
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
            keys = [self._key({**facts, "sequence_length": row.sequence_length}, name) for row in self._rows.values()]
            rows = [self._rows[key] for key in dict.fromkeys(keys) if key in self._rows]
            if all(row.longest_sequence is not None for row in rows):
                self._done += 1
                continue
            with self._cell():
                length, error = longest(name)
            for row in rows:
                yield self._put(replace(row, longest_sequence=length, error=row.error or error))

    def finish(self) -> None:
        self.results["complete"] = True
        self._write()

    @property
    def rows(self) -> tuple[AblationRow, ...]:
        return tuple(self._rows.values())

    def _first(self, trainer: Trainer, name: str, facts: Mapping[str, Any]) -> AblationRow:
        baseline = self._rows.get(self._key(facts, BASELINE))
        if name != BASELINE and not trainer.has_baseline and baseline is not None and baseline.error is None:
            trainer.row(BASELINE)  # of a run before: its row stays, but its gradients are gone
        return trainer.row(name)

    def _again(self, trainer: Trainer, row: AblationRow) -> AblationRow:
        timings, error = trainer.timings(row.policy)
        if timings is None:
            return replace(row, error=f"repeat {len(row.timings) + 1}: {error}")
        return row.timed([*row.timings, timings])

    @contextmanager
    def _cell(self) -> Iterator[None]:
        if not self._spent:
            self._tell_left(self._done, self._total, None)
        start = counters.host_seconds()
        yield
        self._spent.append(counters.host_seconds() - start)
        self._done += 1
        mean = sum(self._spent) / len(self._spent)
        self._tell_left(self._done, self._total, mean * (self._total - self._done))

    def _put(self, row: AblationRow) -> AblationRow:
        key = self._key(asdict(row), row.policy)
        self._rows[key] = row
        base = self._rows.get((key[0], BASELINE))
        for at, each in self._rows.items():
            if at[0] == key[0] and base is not None:
                self._rows[at] = replace(each, backward_added_seconds=_difference(each, base))
        self._write()
        return self._rows[key]

    def _key(self, facts: Mapping[str, Any], policy: str) -> tuple[tuple[Any, ...], str]:
        return place(facts), policy

    def _write(self) -> None:
        self.results |= {"complete": self.results.get("complete", False), "rows": [*map(asdict, self._rows.values())]}
        if self._out is None:
            return
        try:
            results_file.save(self.results, self._out)
            self.problem = None
        except WriteError as error:  # training goes on: its rows are still told
            self.problem = error


@dataclass(frozen=True)
class AblationRun:
    """An ablation that has been checked. To iterate over it is to train: it yields each row that has changed."""

    recorder: RowRecorder
    rows: Iterator[AblationRow]

    def __iter__(self) -> Iterator[AblationRow]:
        return self.rows


def _difference(row: AblationRow, baseline: AblationRow) -> float | None:
    if row.backward_seconds is None or baseline.backward_seconds is None:
        return None
    return row.backward_seconds - baseline.backward_seconds
