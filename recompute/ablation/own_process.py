"""Runs a function in a process of its own, so that whatever ends the process is told, and ends nothing else."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_LOG, _LAST_LINES = "log.txt", 3
"""The file that a process prints to, and how many of its last lines an error shows."""

Work = Callable[[Callable[..., None]], Any]
"""Called with a function whose arguments go to ``progress``. It is pickled, and so is what it returns."""


def run_apart(
    work: Work, folder: Path, progress: Callable[..., None], timeout_seconds: float | None = None
) -> tuple[Any, str | None]:
    """The result of ``work`` in a new process, or the reason why the process ended without one.

    folder: takes a log of what is printed. The new process removes it once this one is gone.
    """
    log = folder / _LOG
    log.write_text("", encoding="utf-8")  # without what an earlier process has printed
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(there, work, log))
    last_second = time.monotonic() + (timeout_seconds or 0)
    try:
        process.start()
        there.close()
        while here.poll(max(0.0, last_second - time.monotonic()) if timeout_seconds else None):
            is_answer, value = here.recv()
            if is_answer:
                return value, None
            progress(*value)
        return None, f"TimeoutError: it took longer than cell_timeout_seconds: {timeout_seconds:g}"
    except EOFError:  # it has ended
        process.join()
        return None, f"ProcessEnded: {_ending(process.exitcode or 0, log)}"
    finally:
        here.close()
        if process.is_alive():
            with suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(process.pid or 0, signal.SIGKILL)  # with whatever it started
            process.kill()
            process.join()


def _ending(code: int, log: Path) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = [line for line in lines if line.strip()][-_LAST_LINES:]
    return f"{how}; it printed last: {' | '.join(last)}" if last else how


def _run(channel: Connection, work: Work, log: Path) -> None:
    os.setsid()  # its own children, such as compilers, end with it
    threading.Thread(target=_end_with_parent, args=(log.parent,), daemon=True).start()
    written = os.open(log, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(written, stream)
    channel.send((True, work(lambda *step: channel.send((False, step)))))


def _end_with_parent(folder: Path) -> None:
    """Once the parent is gone, remove the folder in its place, and end."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process has been started by another"
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
