"""How long backward takes to regenerate. On CUDA, events measure it, and the CPU need not wait."""

from __future__ import annotations

import time
from typing import Any

import torch

_MANY = 1024


class Stopwatch:
    """Adds up the seconds between ``start()`` and ``stop()``: of the CPU, or of what the current CUDA stream runs."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> Any:
        return self._event() if self._on_cuda else time.perf_counter()

    def stop(self, started: Any) -> None:
        """started: what ``start()`` returned."""
        if not self._on_cuda:
            self._seconds += time.perf_counter() - started
            return
        self._spans.append((started, self._event()))
        if len(self._spans) % _MANY == 0:
            self._add_up([span for span in self._spans if span[1].query()])

    def seconds(self) -> float:
        """On CUDA this waits until what was timed has run."""
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
