"""The totals of a region since its policy was applied: bytes dropped and held, and ops run again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan

_MANY = 1024


class Stopwatch:
    """Times regeneration, from ``start()`` to ``stop()``: on the CPU, or on CUDA by events, without waiting."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Any:
        return self._event() if self._on_cuda else time.perf_counter()

    def stop(self, started: Any) -> None:
        """started: the result of ``start()``."""
        if not self._on_cuda:
            self._seconds += time.perf_counter() - started
            return
        self._spans.append((started, self._event()))
        if len(self._spans) % _MANY == 0:
            self._add_up([span for span in self._spans if span[1].query()])

    def seconds(self) -> float:
        """On CUDA this waits until the timed work has run."""
        for _, end in self._spans:
            end.synchronize()
        self._add_up(list(self._spans))
        return self._seconds

    def _add_up(self, spans: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
        self._seconds += sum(start.elapsed_time(end) for start, end in spans) / 1e3
        done = set(map(id, spans))
        self._spans = [span for span in self._spans if id(span) not in done]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Regenerations:
    """How often backward ran something again, the bytes that came back, and the stopwatch for it."""

    count: int = 0
    """Times that an op ran again, or a whole region."""
    nbytes: int = 0
    """Bytes that came back, also of values that were needed for others alone."""
    stopwatch: Stopwatch | None = None
    """None unless times were asked for."""
    for_differentiated_gradients: bool = False
    """Whether any of it came back for gradients that are differentiated in their turn."""


@dataclass(kw_only=True)
class Totals:
    """A policy's effects on one region, or on several. Parameters and the inputs of a checkpoint live anyway, and count
    nowhere.
    """

    frames: int = 0
    """Forward runs of modules under a rule that keeps, drops or has kernels compute something."""
    eager_nbytes: int = 0
    """Bytes that these runs would hold for backward without the policy. They hold ``kept_nbytes`` with it."""
    dropped_tensors: int = 0
    """Saved tensors that were dropped, each storage counted once a run."""
    dropped_nbytes: int = 0
    """Bytes of these. Tensors that kernels do not save in the first place are not among them."""
    kept_nbytes: int = 0
    """Bytes held for backward: saved tensors that are not dropped, recipes' inputs, and tensors that kernels save."""
    offloaded_tensors: int = 0
    """Storages that were copied off the device."""
    offloaded_nbytes: int = 0
    """Bytes of these. They are among those kept, except for the inputs of a checkpoint."""
    compressed_tensors: int = 0
    """Tensors that are held as codes of 8 bits."""
    compressed_nbytes: int = 0
    """Bytes that these had."""
    codes_nbytes: int = 0
    """Bytes of their codes and scales. They are among those kept."""


@dataclass
class RegionStatistics(Totals):
    """The name of a region, for messages, and its totals since the policy was applied."""

    name: str
    regenerated: Regenerations = field(default_factory=Regenerations)
    """Backward's regenerations. The tape that a region is captured by counts them for the region, too."""
    worst_code_error: Tensor | None = None
    """The largest error of a number that was held as a code, relative to the largest one of its block. On its
    device."""
    plan: SavePlan | None = None
    """The plan of its last frame."""
    dropped_outputs: list[DroppedOutput] = field(default_factory=list)
    """The outputs of its last frame that were dropped too."""

    @property
    def regenerations(self) -> int:
        return self.regenerated.count

    @property
    def regenerated_nbytes(self) -> int:
        return self.regenerated.nbytes


class DroppedOutput(NamedTuple):
    """An output of a frame that autograd saved for another module's backward, and that was dropped."""

    made_by: str
    layout: Layout
    nbytes: int
