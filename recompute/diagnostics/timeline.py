"""Shows which tensors live when in a training step, as a Chrome trace and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor, nn

from recompute.counters import host_seconds
from recompute.engine.thread_state import in_backward, local
from recompute.estimation.module_tracker import ModuleTracker, unit_of
from recompute.estimation.storage_tracker import BLOCK_NBYTES, StorageTrace
from recompute.files import write_file
from recompute.policy.matching import pattern_of
from recompute.units import humanize

Phase = Literal["forward", "backward", "regeneration", "compression", "offloading"]

_MADE: dict[Phase, str] = {
    "forward": "made in forward",
    "backward": "made in backward",
    "regeneration": "regenerated",
    "compression": "compressed, or decompressed",
    "offloading": "brought back",
}
_SMALL = 4096  # a trace leaves out tensors that are less than one part in so many of the peak
_OTHERS = "other modules"
_COLORS = {
    _OTHERS: "0.8",
    _MADE["backward"]: "0.5",
    _MADE["regeneration"]: "crimson",
    _MADE["compression"]: "gold",
    _MADE["offloading"]: "black",
}
_DISTINCT = (0, 1, 2, 4, 5, 6, 8, 9)  # of matplotlib's ten: neither red nor grey


@dataclass(slots=True)
class TensorLifetime:
    """A tensor's memory, from when an op makes it until it is freed."""

    path: str
    """The path of the module whose forward, or whose part of backward, made it; "" outside of all modules."""
    phase: Phase
    """The phase that made it. Codes that a kernel makes count as made in forward."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    made: float
    """Seconds since the block began."""
    freed: float | None = None
    """None if it outlives the block."""


class Span(NamedTuple):
    """A module's forward, or a row of ops of its backward or of the policy's work for it."""

    path: str
    phase: Phase
    start: float
    """Seconds since the block began."""
    end: float


class Timeline(AbstractContextManager["Timeline"]):
    """Records the tensors that ops make in a ``with`` block, and which module makes them.

        with Timeline(model) as timeline:
            model(**batch).loss.backward()
        timeline.save("step.json")  # for ui.perfetto.dev or chrome://tracing
        timeline.plot().savefig("step.png")

    Tensors from before the block do not count, nor does freeing them, nor does memory that an op takes and gives back
    while it runs. Seconds are those of the host, which allocates memory when it launches an op and not when the device
    runs it. Each op is seen from Python, which slows the host down. Captured code runs op by op again. Use it for eager
    code: of compiled code it sees inputs and outputs alone. Fake tensors work, too.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors: list[TensorLifetime] = []
        """In the order in which they were made."""
        self.spans: list[Span] = []
        self.backward: float | None = None
        """Seconds from the block's beginning to its first backward; None if there was none."""
        self.seconds = 0.0
        """How long the block took."""
        on_cuda = any(parameter.is_cuda for parameter in model.parameters())
        self._trace = StorageTrace(BLOCK_NBYTES if on_cuda else 1)
        self._tracker = ModuleTracker()
        self._began = self._latest = 0.0
        self._calls: list[float] = []
        self._ops: tuple[Phase, str, float] | None = None
        self._stack = ExitStack()

    @property
    def peak_nbytes(self) -> int:
        """The most that was alive at once."""
        return self._trace.peak_nbytes

    def __enter__(self) -> Timeline:
        self._tracker.entered, self._tracker.left = self._entered, self._left
        self._trace.label, self._trace.on_freed, self._trace.on_grown = self._made, self._freed, self._ran
        self._stack.enter_context(self._tracker.following(self.model))
        self._stack.enter_context(self._trace)
        self._began = host_seconds()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds = self._now()
        self._end_ops()
        self._stack.__exit__(*error)
        self._trace.on_freed = lambda label, nbytes: None

    def _now(self) -> float:
        return host_seconds() - self._began

    def _where(self) -> tuple[Phase, str]:
        path = self._tracker.path
        if not in_backward():
            return local.work or ("regeneration" if local.regenerating else "forward"), path
        if self.backward is None:
            self.backward = self._latest
        if local.work is not None:
            return local.work, path or self._tracker.in_backward()
        # We regenerate, or one of torch's checkpoints does, in whose backward modules run again.
        if local.regenerating or path:
            return "regeneration", path or self._tracker.in_backward()
        return "backward", self._tracker.in_backward()

    def _made(self, tensor: Tensor, nbytes: int) -> TensorLifetime:
        phase, path = self._where()
        held = TensorLifetime(path, phase, tuple(tensor.shape), tensor.dtype, nbytes, self._now())
        self.tensors.append(held)
        return held

    def _freed(self, held: TensorLifetime, nbytes: int) -> None:
        held.freed = self._now()

    def _ran(self, alive_nbytes: int) -> None:
        """After each op."""
        phase, path = self._where()
        if self._ops is None or self._ops[:2] != (phase, path):
            self._end_ops()
            self._ops = None if phase == "forward" else (phase, path, self._latest)
        self._latest = self._now()

    def _end_ops(self) -> None:
        if self._ops is not None:
            phase, path, start = self._ops
            self.spans.append(Span(path, phase, start, self._latest))
            self._ops = None

    def _entered(self, path: str) -> None:
        self._latest = self._now()
        self._calls.append(self._latest)

    def _left(self) -> None:
        self._latest = self._now()
        start = self._calls.pop()
        if not in_backward():
            self.spans.append(Span(self._tracker.path, "forward", start, self._latest))

    def save(self, path: str | PathLike[str]) -> None:
        """Write a Chrome trace (Trace Event Format): modules as slices, tensors by layer, and the bytes alive."""
        events = [*self._slices(), *self._asynchronous(), *self._counters()]
        events.sort(key=lambda event: event["ts"])
        names = [("process_name", 0, type(self.model).__name__)]
        names += [("thread_name", number, name) for name, number in _TRACKS.items()]
        about = [{"ph": "M", "pid": 0, "tid": tid, "name": kind, "args": {"name": name}} for kind, tid, name in names]
        whole = {"traceEvents": [*about, *events], "displayTimeUnit": "ms"}
        write_file(path, json.dumps(whole))

    def _slices(self) -> Iterator[dict[str, Any]]:
        for span in self.spans:
            phase = "" if span.phase == "forward" else f" ({span.phase})"
            yield {
                "ph": "X",
                "pid": 0,
                "tid": _TRACKS["modules" if span.phase in ("forward", "backward") else "what the policy adds"],
                "cat": span.phase,
                "name": f"{span.path or type(self.model).__name__}{phase}",
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
            }

    def _asynchronous(self) -> Iterator[dict[str, Any]]:
        """One slice for each tensor, stacked with those of its layer."""
        for number, held in enumerate(self.tensors):
            if held.nbytes * _SMALL < self.peak_nbytes:
                continue
            same = {"pid": 0, "tid": 0, "cat": _MADE[held.phase], "id": number}
            same["name"] = f"{unit_of(held.path)}: {_MADE[held.phase]}"
            args = {
                "module": held.path,
                "shape": "x".join(map(str, held.shape)),
                "dtype": str(held.dtype).removeprefix("torch."),
                "bytes": held.nbytes,
            }
            yield {"ph": "b", "ts": 1e6 * held.made, "args": args, **same}
            yield {"ph": "e", "ts": 1e6 * (self.seconds if held.freed is None else held.freed), **same}

    def _counters(self) -> Iterator[dict[str, Any]]:
        times, rows = self._alive(
            {name: [held for held in self.tensors if held.phase == phase] for phase, name in _MADE.items()}
        )
        for index, seconds in enumerate(times.tolist()):
            args = {name: int(row[index]) for name, row in rows.items()}
            yield {"ph": "C", "pid": 0, "tid": 0, "name": "bytes alive", "ts": 1e6 * seconds, "args": args}

    def _alive(
        self, groups: dict[str, list[TensorLifetime]]
    ) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
        """The times at which something changes, in seconds, and the bytes of each group alive from each of them on."""
        changes = [
            (name, seconds, sign * held.nbytes)
            for name, members in groups.items()
            for held in members
            for seconds, sign in ((held.made, 1), (held.freed, -1))
            if seconds is not None
        ]
        times = np.unique([0.0, *(seconds for _, seconds, _ in changes), self.seconds])
        rows = {name: np.zeros(len(times), np.int64) for name in groups}
        for name, seconds, nbytes in changes:
            rows[name][np.searchsorted(times, seconds)] += nbytes
        return times, {name: row.cumsum() for name, row in rows.items()}

    def _byte_seconds(self, held: TensorLifetime) -> float:
        return held.nbytes * ((self.seconds if held.freed is None else held.freed) - held.made)

    def plot(self) -> Figure:
        """Bytes alive over time: those of forward, by module; of backward; and those that the policy brought back."""
        made: dict[str, list[TensorLifetime]] = {}
        for held in self.tensors:
            name = _MADE[held.phase] if held.phase != "forward" else pattern_of(held.path) or "outside of all modules"
            made.setdefault(name, []).append(held)
        largest = sorted(made, key=lambda name: -sum(self._byte_seconds(held) for held in made[name]))
        last = [name for name in _MADE.values() if name in made]
        shown = [name for name in largest if name not in last][: len(_DISTINCT)]
        rest = [held for name in made if name not in (*shown, *last) for held in made[name]]
        groups = {name: made[name] for name in shown} | {_OTHERS: rest} | {name: made[name] for name in last}
        times, rows = self._alive({name: members for name, members in groups.items() if members})
        figure = Figure(figsize=(9, 4.5), layout="constrained")
        axes = figure.add_subplot()
        colors = [_COLORS.get(name) or f"C{_DISTINCT[shown.index(name)]}" for name in rows]
        bands = [row / 2**20 for row in rows.values()]
        axes.stackplot(times * 1e3, *bands, labels=list(rows), colors=colors, step="post")
        if self.backward is not None:
            axes.axvline(self.backward * 1e3, color="black", linestyle="--", linewidth=1)
            axes.annotate("backward", (self.backward * 1e3, 0), (3, 3), textcoords="offset points")
        axes.set_xlabel("ms, on the host")
        axes.set_ylabel("MiB alive")
        axes.set_title(f"{type(self.model).__name__}: {humanize(self.peak_nbytes)} at the peak")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
        return figure


_TRACKS = {"modules": 1, "what the policy adds": 2}
