"""Trains under one policy in a process of its own, so that whatever ends the process is an error in a row.

The parent writes a job to a temporary folder and starts ``python -m recompute.ablation.cell_process FOLDER``. The child
writes its answer there, and progress to its standard output. What else it prints goes to a log in the folder. The
baseline's losses and gradients lie in the same folder, which the parent removes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from recompute import counters
from recompute.ablation.ablation_config import AblationConfig, Comparison
from recompute.ablation.peers import BASELINE
from recompute.ablation.results_file import row_from
from recompute.ablation.subjects import experiment_of, load_text
from recompute.ablation.trials import AblationRow, Baseline, Experiment, Progress, Timings, attempted
from recompute.errors import AblationError
from recompute.policy.document import validate

_JOB, _ANSWER, _LOG, _BASELINE, _TOLERANCE = "job.json", "answer.json", "log.txt", "baseline.pt", "tolerance.json"
_LAST_LINES = 3  # of what a process printed before it ended


class IsolatedExperiment(AbstractContextManager["IsolatedExperiment"]):
    """Does what an ``Experiment`` does, each time in a process of its own, one after the other.

    It is used in a ``with`` block, at whose end what the processes handed on is removed.
    """

    def __init__(self, comparison: Comparison, progress: Progress):
        self._comparison = comparison
        self._progress = progress
        self._temporary = tempfile.TemporaryDirectory(prefix="recompute-ablation-")
        self._folder = Path(self._temporary.name)

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    @property
    def has_baseline(self) -> bool:
        return (self._folder / _BASELINE).exists()

    def row(self, policy: str) -> AblationRow:
        found, error = self._answer("row", policy)
        return AblationRow(policy, **self._comparison.facts, error=error) if found is None else row_from(found)

    def timings(self, policy: str) -> tuple[Timings | None, str | None]:
        return self._answer("timings", policy)

    def step_peak(self, policy: str, length: int) -> tuple[int | None, str | None]:
        return self._answer("step_peak", policy, length)

    def machine(self) -> dict[str, Any]:
        """The description of the machine, without making a context on the device in this process."""
        found, error = self._answer("machine", BASELINE)
        if found is None:
            raise AblationError(f"isolate: a process of its own cannot look at the device: {error}")
        return found

    def _answer(self, task: str, policy: str, length: int | None = None) -> tuple[Any, str | None]:
        try:
            return self._asked(task, policy, length)
        except OSError as error:  # the disk of temporary files is full, say: that is this row's error, too
            return None, f"{type(error).__name__}: {self._folder}: {error}"

    def _asked(self, task: str, policy: str, length: int | None) -> tuple[Any, str | None]:
        config = self._comparison.config
        job = {
            "config": config.as_given(),
            "comparison": config.comparisons().index(self._comparison),
            "task": task,
            "policy": policy,
            "length": length,
            "threads": torch.get_num_threads(),
        }
        (self._folder / _ANSWER).unlink(missing_ok=True)
        (self._folder / _JOB).write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(self._folder)]
        error = run_job(command, self._folder, self._progress, config.cell_timeout_seconds)
        if error is not None:
            return None, error
        answer = json.loads((self._folder / _ANSWER).read_text(encoding="utf-8"))
        return answer["result"], answer["error"]


def run_job(
    command: Sequence[str], folder: Path, progress: Progress, timeout_seconds: float | None = None
) -> str | None:
    """Run the command, which is to answer the job in the folder. Returns None if it did, else what ended it."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # a factory may be on a path of the parent's own
    is_late = threading.Event()
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # which ends when this process does, however that comes about
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # its own children, such as compilers, end with it
        )

        def end_late() -> None:
            is_late.set()
            _end(process)

        timer = threading.Timer(timeout_seconds, end_late) if timeout_seconds else None
        try:
            if timer:
                timer.start()
            assert process.stdout is not None, "its output is a pipe"
            for line in process.stdout:
                progress(*json.loads(line))
            code = process.wait()
        finally:
            if timer:
                timer.cancel()
            _end(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    if (folder / _ANSWER).exists():
        return None
    if is_late.is_set():
        return f"TimeoutError: it took longer than cell_timeout_seconds: {timeout_seconds:g}"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = [line for line in (folder / _LOG).read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = "; it printed last: " + " | ".join(last[-_LAST_LINES:]) if last else ""
    return f"ProcessEnded: {how}{said}"


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, if it still runs, and whatever it started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it has ended by now
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_with_parent(folder: Path) -> None:
    """Once the parent is gone, remove the folder in its place, and end."""
    sys.stdin.read()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _main(folder: Path) -> None:
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever is printed goes to the log
    job = json.loads((folder / _JOB).read_text(encoding="utf-8"))
    torch.set_num_threads(job["threads"])
    answer, failure = attempted(lambda: _do(job, folder, channel))
    result, error = answer or (None, failure)
    unfinished = folder / f"{_ANSWER}.part"
    unfinished.write_text(json.dumps({"result": result, "error": error}), encoding="utf-8")
    os.replace(unfinished, folder / _ANSWER)


def _do(job: Mapping[str, Any], folder: Path, channel: TextIO) -> tuple[Any, str | None]:
    """The result as JSON can hold it, or an error."""
    config = validate(AblationConfig, job["config"], label="configuration")
    device = counters.resolve_device(config.device)
    if job["task"] == "machine":
        return counters.describe_machine(device), None
    comparison = config.comparisons()[job["comparison"]]
    if job["length"] is not None:
        comparison = replace(comparison, sequence_length=job["length"])

    def progress(what: str, done: int, total: int) -> None:
        print(json.dumps([what, done, total]), file=channel, flush=True)

    experiment = experiment_of(comparison, load_text(config.text)[1], device, progress)
    if job["task"] != "row":
        return getattr(experiment, job["task"])(job["policy"])
    _load_baseline(experiment, folder)
    row = experiment.row(job["policy"])
    _save_baseline(experiment, folder, is_new=job["policy"] == BASELINE)
    return asdict(row), None


def _load_baseline(experiment: Experiment, folder: Path) -> None:
    if (folder / _BASELINE).exists():
        found = torch.load(folder / _BASELINE, mmap=True)
        experiment.baseline = Baseline(**found)
    if (folder / _TOLERANCE).exists():
        experiment.known_tolerance = json.loads((folder / _TOLERANCE).read_text(encoding="utf-8"))
        experiment.has_sought_tolerance = True


def _save_baseline(experiment: Experiment, folder: Path, *, is_new: bool) -> None:
    if is_new and (baseline := experiment.baseline) is not None:
        torch.save(vars(baseline), folder / _BASELINE)
    if experiment.has_sought_tolerance:
        (folder / _TOLERANCE).write_text(json.dumps(experiment.known_tolerance), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
