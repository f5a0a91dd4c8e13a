"""A training in a process of its own: whatever ends the process is an error, and nothing of it is left behind."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recompute.ablation import run_ablation
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.cell_process import IsolatedExperiment
from recompute.ablation.own_process import run_apart
from recompute.estimation.llama import ModelShape

FAILURES = [
    ("os.kill(os.getpid(), signal.SIGSEGV)", r"ProcessEnded: signal SIGSEGV$"),
    ("os.kill(os.getpid(), signal.SIGKILL)", r"ProcessEnded: signal SIGKILL$"),
    ("sys.exit(3)", r"ProcessEnded: exit code 3$"),
    ("raise MemoryError('no room')", r"exit code 1; it printed last: .*MemoryError: no room$"),
    ("os._exit(0)", r"ProcessEnded: exit code 0$"),
]
WORK = """
import os, signal, subprocess, sys, time

def run(code, progress):
    found = {"progress": progress, **globals()}
    exec(code, found)
    return found.get("answer")
"""


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs code in a process of its own, which imports next to nothing, and returns its ``answer``, or an error."""
    (tmp_path / "the_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("the_work").run

    def apart(code: str, progress: Callable[..., None] = lambda *_: None, timeout: float | None = None) -> Any:
        return run_apart(partial(work, code), tmp_path, progress, timeout)

    yield apart
    del sys.modules["the_work"]


@pytest.mark.parametrize(("code", "error"), FAILURES, ids=lambda text: str(text)[-12:])
def test_what_ends_a_process_is_told(apart: Any, code: str, error: str) -> None:
    answer, told = apart(code)
    assert answer is None
    assert re.search(error, told or "")


def test_an_answer_counts_whatever_comes_after_it(apart: Any) -> None:
    assert apart("import atexit; atexit.register(os._exit, 3); answer = [1, 2]") == ([1, 2], None)


def test_a_process_that_takes_too_long_is_ended_with_its_children(apart: Any, tmp_path: Path) -> None:
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    told = apart(f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(3600)", timeout=2.5)
    assert told == (None, "TimeoutError: it took longer than cell_timeout_seconds: 2.5")
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_progress_comes_through_the_pipe(apart: Any) -> None:
    seen: list[Any] = []
    apart("progress('none', 1, 2); progress('none', 2, 2)", lambda *step: seen.append(step))
    assert seen == [("none", 1, 2), ("none", 2, 2)]


def test_ctrl_c_ends_the_process(apart: Any) -> None:
    pids: list[int] = []

    def interrupt(pid: int) -> None:
        pids.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart("progress(os.getpid()); time.sleep(3600)", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


CONFIG = AblationConfig(
    model=ModelShape(hidden_size=32, intermediate_size=48, layers=1, heads=2, kv_heads=1),
    policies=("elementwise", "kernel"), peers=(), sequence_lengths=(16,), batch_size=1, steps=2, device="cpu",
)  # fmt: skip


def test_what_is_handed_on_is_removed_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted() -> None:
        with IsolatedExperiment(CONFIG.comparisons()[0], lambda *_: None):
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def run(config: AblationConfig, out: Path) -> dict[Any, Any]:
    rows = run_ablation.run(config, out, command="recompute ablate", progress=lambda *_: None)
    return {(row.model, row.policy): row for row in rows}


@pytest.mark.slow
def test_rows_of_processes_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    together = run(CONFIG, tmp_path)
    apart = run(CONFIG.model_copy(update={"isolate": True, "repeats": 2}), tmp_path)
    assert list(apart) == list(together)
    for key, row in apart.items():
        assert row.error is None
        for name in ("losses", "grads_match", "grad_error", "grad_error_last", "activation_bytes_held", "peak_bytes"):
            assert getattr(row, name) == getattr(together[key], name), (key, name)
        assert len(row.timings) == 2
    assert apart["llama", "kernel"].grad_tolerance == together["llama", "kernel"].grad_tolerance
    assert list((tmp_path / "temporary").iterdir()) == []


CRASHING = """
import os, signal, time, torch
from torch import nn

def fine():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)

def crashing():
    os.kill(os.getpid(), signal.SIGSEGV)

def hanging():
    time.sleep(3600)
"""


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "a_crashing_model.py").write_text(CRASHING, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("a_crashing_model", None)


@pytest.mark.slow
def test_a_crash_is_a_row_and_the_others_go_on(crashing: Path) -> None:
    models = {name: f"a_crashing_model:{name}" for name in ("crashing", "fine")}
    rows = run(CONFIG.model_copy(update={"models": models, "isolate": True, "policies": ()}), crashing / "out")
    assert rows["crashing", "none"].error.startswith("ProcessEnded: signal SIGSEGV")
    assert rows["fine", "none"].error is None
    saved = json.loads((crashing / "out" / "results.json").read_text(encoding="utf-8"))
    assert saved["complete"]
    assert [row["model"] for row in saved["rows"]] == ["crashing", "fine"]


@pytest.mark.slow
def test_what_takes_too_long_is_a_row(crashing: Path) -> None:
    models = {"hanging": "a_crashing_model:hanging"}
    changes = {"models": models, "isolate": True, "cell_timeout_seconds": 8.0, "policies": ()}
    (row,) = run(CONFIG.model_copy(update=changes), crashing / "out").values()
    assert row.error == "TimeoutError: it took longer than cell_timeout_seconds: 8"


ABANDONED = """
import sys
from pathlib import Path
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.cell_process import IsolatedExperiment

config = AblationConfig(models={"hanging": "a_crashing_model:hanging"}, isolate=True, device="cpu")
with IsolatedExperiment(config.comparisons()[0], lambda *_: None) as isolated:
    print(isolated._folder, flush=True)
    isolated.row("none")
"""


@pytest.mark.slow
def test_a_process_whose_parent_is_killed_removes_what_was_handed_on_and_ends(
    crashing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    parent = subprocess.Popen([sys.executable, "-c", ABANDONED], stdout=subprocess.PIPE, text=True, cwd=crashing)
    assert parent.stdout is not None
    folder = Path(parent.stdout.readline().strip())
    wait_until((folder / "log.txt").exists)  # the child has been started
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not folder.exists())


def wait_until(happens: Callable[[], bool]) -> None:
    for _ in range(2400):
        if happens():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen within two minutes")


@pytest.mark.gpu
def test_on_cuda_processes_measure_what_one_process_does(tmp_path: Path) -> None:
    together = run(CONFIG.model_copy(update={"device": "cuda"}), tmp_path)
    apart = run(CONFIG.model_copy(update={"device": "cuda", "isolate": True}), tmp_path)
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["machine"]["gpu"]
    for key, row in apart.items():
        assert row.error is None
        assert row.losses == together[key].losses
        assert row.grads_match
        assert row.activation_bytes_held == together[key].activation_bytes_held
        assert None not in (row.forward_seconds, row.backward_seconds, row.optimizer_seconds, row.forward_cpu_seconds)
