"""A sweep over what is to be trained: a process for each row, a record that a later run goes on from, a report."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import multiprocessing
import os
import resource
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # so that there are no threads when this process forks
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms on CUDA need

import networkx  # noqa: F401
import torch
import torch._dynamo  # which apply and transformers load late: each process is a fork, and has it from here
import torch.fx.experimental.symbolic_shapes
from comparison import Outcome, is_wrong
from sweep_report import report, summary

from recompute.counters import describe_machine

MEMORY_NBYTES = 24 * 2**30
"""What one item may take of the host's memory, where it computes on the CPU."""
PATIENCE = 4
"""How many times its limit of processor seconds an item may take in all, as it may have to wait for others."""


@dataclass(frozen=True)
class Item:
    """What a row is of: its name, what the row says from the start, and what ``Series.examine`` is given."""

    name: str
    row: dict[str, Any]
    subject: Any


@dataclass(frozen=True)
class Series:
    """What a sweep goes through, and what its report says of it.

    examine: yields a row as it grows: without a policy, then under each preset.
    columns: the report's headers for keys of a row.
    about: how what is compared was trained.
    packages: the distributions beside torch whose versions the record tells.
    groups: the key of a row by whose values the report counts, if any.
    prepare: loads what these items need, so that each process, which is a fork, has it from the start.
    """

    what: str
    items: dict[str, Item]
    examine: Callable[..., Iterator[dict[str, Any]]]
    presets: Sequence[str]
    steps: int
    columns: dict[str, str]
    about: str
    packages: Sequence[str] = field(default=("transformers",))
    groups: str = ""
    prepare: Callable[[list[Item]], None] = lambda items: None


def sweep(series: Series, description: str | None) -> int:
    """Go through what the command line asks for. Returns the exit status: 1 if anything is wrong."""
    options = parse(series, description)
    torch.set_num_threads(1)
    known = series.items
    wanted = [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in options.only)]
    if options.debug:
        return max((show(series, known[name], options) for name in wanted), default=0)
    record = load(series, options)
    rows: dict[str, dict[str, Any]] = record["rows"]
    todo = [name for name in wanted if options.fresh or not is_done(rows.get(name), options.presets)]
    print(f"{len(known)} {series.what}, {len(wanted)} of them wanted, {len(todo)} yet to try")
    series.prepare([known[name] for name in todo])
    began = time.monotonic()
    for count, (name, row) in enumerate(tried(series, [known[name] for name in todo], options), start=1):
        rows[name] = row
        save(record, options.out)
        left = (time.monotonic() - began) / count * (len(todo) - count)
        print(f"{count}/{len(todo)}, {left / 60:.1f} min left: {name}: {in_short(row)}", flush=True)
    save(record, options.out)
    print(summary(record))
    return int(any(is_wrong(row) for row in rows.values()))


def parse(series: Series, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results") / series.what, help="folder for results.json, .md")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of rows, with * and ?")
    parser.add_argument("--presets", nargs="+", default=list(series.presets), help="or paths of policy files")
    parser.add_argument("--workers", "--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--seconds", type=float, default=900.0, help="of a processor, for one row")
    parser.add_argument("--fresh", action="store_true", help="try again what is wanted and in results.json")
    parser.add_argument("--debug", action="store_true", help="in this process, with tracebacks; writes nothing")
    return parser.parse_args()


def load(series: Series, options: argparse.Namespace) -> dict[str, Any]:
    """The record so far, under the head of this run."""
    head = {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "machine": start(machine, options.device)[0].recv(),  # in a fork: CUDA must not begin in this process
        "device": options.device,
        "dtype": options.dtype,
        "presets": options.presets,
        "steps": series.steps,
        "what": series.what,
        "about": series.about,
        "columns": series.columns,
        "groups": series.groups,
        "packages": dict(_versions(series.packages)),
    }
    path = options.out / "results.json"
    if not path.exists():
        return {**head, "rows": {}}
    before = json.loads(path.read_text(encoding="utf-8"))
    now, then = ({**each["machine"], **each.get("packages", {})} for each in (head, before))
    for name in ("torch", *series.packages):
        if now.get(name) != then.get(name):
            raise SystemExit(f"{path} is of {name} {then.get(name)}, this is {now.get(name)}: use another --out")
    for name in ("device", "dtype", "steps"):
        if head[name] != before.get(name, 2):  # records of before there was a number of steps have two
            raise SystemExit(f"{path} is of {name} {before.get(name, 2)}, not {head[name]}: use another --out")
    return {**head, "rows": before["rows"]}


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)


def save(record: dict[str, Any], folder: Path) -> None:
    record = {**record, "rows": dict(sorted(record["rows"].items()))}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "results.md").write_text(report(record), encoding="utf-8")


def is_done(row: dict[str, Any] | None, presets: Sequence[str]) -> bool:
    return row is not None and ("outcomes" not in row or set(presets) <= row["outcomes"].keys())


def in_short(row: dict[str, Any]) -> str:
    if "outcomes" not in row:
        return ", ".join(f"{name}: {row[name]}" for name in ("not built", "differs without a policy") if name in row)
    return ", ".join(
        f"{preset} {each['verdict']}" + f" ({each['detail']})" * bool(each["detail"])
        for preset, each in row["outcomes"].items()
    )


def show(series: Series, item: Item, options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    *_, row = series.examine(item.subject, options.presets, device, dtype_of(options), on_error=print_traceback)
    print(json.dumps({item.name: row}, indent=1), flush=True)
    return int(is_wrong(row))


def print_traceback(error: Exception) -> None:
    traceback.print_exception(error)


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, options.dtype)
    return dtype


@dataclass
class Trial:
    """A process at work, and its row so far."""

    item: Item
    process: BaseProcess
    began: float
    row: dict[str, Any] | None = None


def tried(series: Series, waiting: list[Item], options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The row of each item, in the order in which they end."""
    pending = waiting[::-1]
    running: dict[Connection, Trial] = {}
    while pending or running:
        while pending and len(running) < options.workers:
            item = pending.pop()
            results, process = start(examine_in_silence, series, item, options)
            running[results] = Trial(item, process, time.monotonic())
        limit = PATIENCE * options.seconds
        soonest = min(trial.began for trial in running.values()) + limit - time.monotonic()
        ready = connection.wait(list(running), timeout=max(soonest, 0.0))
        for results, trial in list(running.items()):
            seconds = time.monotonic() - trial.began
            reason = None
            if results in ready:
                try:
                    trial.row = results.recv()
                    continue  # there may be more to come
                except EOFError:
                    trial.process.join()
                    reason = ended_by(trial.process.exitcode)
            elif seconds > limit:
                trial.process.kill()
                trial.process.join()
                reason = f"no end within {limit:g} s"
            else:
                continue
            del running[results]
            row = trial.row if reason is None else cut_short(trial, reason, options.presets)
            yield trial.item.name, {**(row or {}), "seconds": round(seconds, 1)}


def start(function: Callable[..., Iterator[Any]], *arguments: Any) -> tuple[Connection, BaseProcess]:
    """A fork that sends what ``function`` yields."""
    fork = multiprocessing.get_context("fork")
    results, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=send, args=(sending, function, *arguments), daemon=True)
    process.start()
    sending.close()  # ours: the end of the process is then the end of what can be received
    return results, process


def send(sending: Connection, function: Callable[..., Iterator[Any]], *arguments: Any) -> None:
    for each in function(*arguments):
        sending.send(each)


def examine_in_silence(series: Series, item: Item, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    device = torch.device(options.device)
    processor_seconds = max(1, round(options.seconds))
    resource.setrlimit(resource.RLIMIT_CPU, (processor_seconds, processor_seconds + 1))
    if device.type == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, MEMORY_NBYTES))
    yield from series.examine(item.subject, options.presets, device, dtype_of(options))


def machine(device: str) -> Iterator[dict[str, Any]]:
    yield describe_machine(torch.device(device))


def ended_by(code: int | None) -> str | None:
    """Why a process ended, unless it came to its end."""
    if not code:
        return None
    if -code == signal.SIGXCPU:
        return "no end within the seconds of a processor that it has"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def cut_short(trial: Trial, reason: str, presets: Sequence[str]) -> dict[str, Any]:
    """The row of a process that did not come to its end: what it was at did that."""
    row = trial.row or trial.item.row
    if "outcomes" not in row:
        return {**row, "not built": reason}
    at = next(preset for preset in presets if preset not in row["outcomes"])
    return {**row, "outcomes": {**row["outcomes"], at: vars(Outcome("wrong", reason))}}
