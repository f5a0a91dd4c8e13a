"""Measures how fast a device copies to its host's memory and back."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from recompute.engine.host.host_memory import HostPool, default_limit
from recompute.errors import HostMemoryError
from recompute.profiling.cost_table import HostLink

_NBYTES = 1 << 28  # of a copy
_COPIES = 4  # one after the other, so that copies in both directions overlap nearly all the time
_TIMES = 5


def measure_link(device: torch.device) -> HostLink | None:
    """The link between ``device`` and its host; None where offloading gains nothing, as on a CPU.

    Each direction is measured alone and while the other one is busy, with pinned memory as offloading uses it. The
    lower rate of the two counts: where forward turns into backward copies go both ways, and other devices of the host
    may copy at any time. The room on the host is the default limit of a rule that offloads.
    """
    if device.type != "cuda":
        return None
    limit = default_limit()
    pool = HostPool()
    try:
        buffers = [pool.buffer(_NBYTES, limit, pin=True, who="recompute.profile") for _ in range(2)]
    except HostMemoryError:
        return None
    there = [torch.empty(_NBYTES, dtype=torch.uint8, device=device) for _ in buffers]
    out = _Direction(source=there[0], target=buffers[0].memory, device=device)
    back = _Direction(source=buffers[1].memory, target=there[1], device=device)
    out_bandwidth = min(_bandwidth(out), _bandwidth(out, beside=back))
    back_bandwidth = min(_bandwidth(back), _bandwidth(back, beside=out))
    del buffers, out, back
    pool.free_unused()
    return HostLink(out_bandwidth=out_bandwidth, back_bandwidth=back_bandwidth, host_nbytes=limit)


class _Direction:
    """Copies from one place to another, on a stream of their own."""

    def __init__(self, *, source: Tensor, target: Tensor, device: torch.device) -> None:
        self._source, self._target = source, target
        self._stream = torch.cuda.Stream(device)
        self._first, self._last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def start(self) -> None:
        with torch.cuda.stream(self._stream):
            self._first.record(self._stream)
            for _ in range(_COPIES):
                self._target.copy_(self._source, non_blocking=True)
            self._last.record(self._stream)

    def wait(self) -> None:
        """Wait until all copies that were started are done."""
        self._stream.synchronize()

    def bandwidth(self) -> float:
        """Bytes a second of the last copies, which are done."""
        return _COPIES * _NBYTES / (self._first.elapsed_time(self._last) / 1e3)


def _bandwidth(measured: _Direction, beside: _Direction | None = None) -> float:
    running = [measured] if beside is None else [beside, measured]
    found = []
    for _ in range(_TIMES):
        for each in running:
            each.start()
        for each in running:
            each.wait()
        found.append(measured.bandwidth())
    return statistics.median(found)
