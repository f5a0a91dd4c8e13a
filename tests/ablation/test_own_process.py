"""A training in a process of its own: whatever ends the process is an error, and nothing of it is left behind."""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from functools import partial

import pytest
from ablation_testing import LEAST, by_policy, matching, quiet, run, saved

from recompute.ablation.own_process import run_apart
from recompute.ablation.run_ablation import isolated

WORK = """
import atexit, os, signal, subprocess, sys, time

def run(code, progress):
    found = {"progress": progress, **globals()}
    exec(code, found)
    return found.get("answer")
"""


@pytest.fixture
def apart(tmp_path, monkeypatch):
    """Runs code in a process of its own, which imports next to nothing, and returns its ``answer``, or an error."""
    (tmp_path / "the_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    work = importlib.import_module("the_work").run

    def apart(code, progress=quiet, timeout=None):
        return run_apart(partial(work, code), tmp_path, progress, timeout)

    yield apart
    del sys.modules["the_work"]


@pytest.mark.parametrize(
    ("code", "answer", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", None, r"ProcessEnded: signal SIGSEGV$"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, r"ProcessEnded: signal SIGKILL$"),
        ("sys.exit(3)", None, r"ProcessEnded: exit code 3$"),
        ("os._exit(0)", None, r"ProcessEnded: exit code 0$"),
        ("raise MemoryError('no room')", None, r"exit code 1; it printed last: .*MemoryError: no room$"),
        ("atexit.register(os._exit, 3); answer = [1, 2]", [1, 2], "^$"),  # it counts whatever comes after it
    ],
)  # fmt: skip
def test_what_a_process_answers_or_what_ends_it_is_told(apart, code, answer, error):
    found, told = apart(code)
    assert found == answer
    assert re.search(error, told or "")


def test_a_process_that_takes_too_long_is_ended_with_its_children(apart, tmp_path):
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    told = apart(f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(3600)", timeout=2.5)
    assert told == (None, "TimeoutError: it took longer than cell_timeout_seconds: 2.5")
    time.sleep(2)
    assert not (tmp_path / "alive").exists()


def test_progress_comes_through_the_pipe_and_ctrl_c_ends_the_process(apart):
    seen = []

    def interrupt(what, pid):
        seen.append((what, pid))
        if what == "last":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apart("progress('first', os.getpid()); progress('last', os.getpid()); time.sleep(3600)", interrupt)
    assert [what for what, _ in seen] == ["first", "last"]
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0][1], 0)


def test_what_is_handed_on_is_removed_whatever_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def interrupted():
        with isolated(LEAST.comparisons()[0], quiet):
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


SAME = ("losses", "grads_match", "grad_error", "grad_error_last", "activation_bytes_held", "peak_bytes")


@pytest.mark.slow
def test_rows_of_processes_are_those_of_one_process(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    policies = ("elementwise", "kernel")
    together = by_policy(run(tmp_path, LEAST, policies=policies))
    apart = matching(run(tmp_path, LEAST, policies=policies, isolate=True, repeats=2))
    assert list(apart) == list(together)
    for policy, row in apart.items():
        assert [getattr(row, name) for name in SAME] == [getattr(together[policy], name) for name in SAME]
        assert len(row.timings) == 2
    assert apart["kernel"].grad_tolerance == together["kernel"].grad_tolerance
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_a_crash_or_what_takes_too_long_is_a_row_and_the_others_go_on(own):
    models = {name: f"its_own_model:{name}" for name in ("crashing", "make")}
    crashing, fine = run(own / "out", LEAST, models=models, isolate=True)
    assert crashing.error.startswith("ProcessEnded: signal SIGSEGV")
    assert fine.error is None
    assert saved(own / "out")["complete"]
    assert [row["model"] for row in saved(own / "out")["rows"]] == ["crashing", "make"]
    models = {"hanging": "its_own_model:hanging"}
    (late,) = run(own / "late", LEAST, models=models, isolate=True, cell_timeout_seconds=8.0)
    assert late.error == "TimeoutError: it took longer than cell_timeout_seconds: 8"


ABANDONED = """
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.run_ablation import isolated
config = AblationConfig(models={"hanging": "its_own_model:hanging"}, isolate=True, device="cpu")
with isolated(config.comparisons()[0], lambda *_: None) as ask:
    ask("row", "none")
"""


@pytest.mark.slow
def test_a_process_whose_parent_is_killed_removes_what_was_handed_on_and_ends(own, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(each for each in sys.path if each))
    temporary = own / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    parent = subprocess.Popen([sys.executable, "-c", ABANDONED], cwd=own)
    wait_until((own / "it hangs").exists)
    parent.kill()
    parent.wait()
    wait_until(lambda: not list(temporary.glob("recompute-ablation-*")))


def wait_until(happens):
    for _ in range(2400):
        if happens():
            return
        time.sleep(0.05)
    pytest.fail("it did not happen within two minutes")


@pytest.mark.gpu
def test_on_cuda_processes_measure_what_one_process_does(tmp_path):
    options = {"device": "cuda", "policies": ("elementwise", "kernel")}
    together = by_policy(run(tmp_path, LEAST, **options))
    apart = matching(run(tmp_path, LEAST, isolate=True, **options))
    assert saved(tmp_path)["machine"]["gpu"]
    for policy, row in apart.items():
        assert row.losses == together[policy].losses
        assert row.activation_bytes_held == together[policy].activation_bytes_held
        assert None not in (row.forward_seconds, row.backward_seconds, row.optimizer_seconds, row.forward_cpu_seconds)
