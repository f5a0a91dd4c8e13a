"""The only clock and the only memory counters of this package, and what machine they read."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function


def wall_seconds(device: torch.device) -> float:
    """Seconds on a monotonic clock, read once everything queued on `device` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def thread_seconds() -> float:
    """CPU seconds that the calling thread has used: on CUDA, what launching work costs, not running it."""
    return time.thread_time()


@dataclass
class MemoryTrace(AbstractContextManager["MemoryTrace"]):
    """Bytes of tensor memory above what was allocated when the ``with`` block began.

    `held_nbytes` maps each mark to the bytes alive when it was set; `peak_nbytes` is the most alive at once.
    Both are complete only after the block has ended, and empty if it ended with an exception.
    """

    held_nbytes: dict[str, int] = field(default_factory=dict)
    peak_nbytes: int = 0

    @abstractmethod
    def mark(self, name: str) -> None:
        """Note how many bytes are alive now, under `name`."""


class _CudaTrace(MemoryTrace):
    """Counters of the caching allocator, which counts in blocks of 512 bytes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> MemoryTrace:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before_nbytes = torch.cuda.memory_allocated(self._device)
        return self

    def mark(self, name: str) -> None:
        self.held_nbytes[name] = torch.cuda.memory_allocated(self._device) - self._before_nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.peak_nbytes = torch.cuda.max_memory_allocated(self._device) - self._before_nbytes
        else:
            self.held_nbytes.clear()


class _CpuTrace(MemoryTrace):
    """Allocator events as the profiler records them: exact bytes, on one time line with the marks."""

    _MARK = "recompute.memory_trace: "

    def __enter__(self) -> MemoryTrace:
        self._profile = profile(profile_memory=True)
        self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        with record_function(self._MARK + name):
            pass

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._profile.__exit__(kind, *rest)
        if kind is not None:
            return
        results = self._profile.kineto_results
        assert results is not None, "a profile that ended without an exception has results"
        alive = 0
        for event in sorted(results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                alive += event.nbytes()  # type: ignore[attr-defined]  # torch's stub leaves it out
                self.peak_nbytes = max(self.peak_nbytes, alive)
            elif event.name().startswith(self._MARK):
                self.held_nbytes[event.name().removeprefix(self._MARK)] = alive


def memory_trace(device: torch.device) -> MemoryTrace:
    """Count the tensor memory of `device` (a CUDA device or the CPU) during a ``with`` block.

    On the CPU it profiles, which slows what runs inside and does not nest; and freeing a tensor from before
    the block is counted only if another trace saw it made: the profiler does not know its size otherwise.
    """
    return _CudaTrace(device) if device.type == "cuda" else _CpuTrace()


@dataclass(frozen=True)
class StepMemory:
    """Memory of one training step, in bytes above its static memory."""

    activation_bytes_held: int
    """Activation memory: alive when forward has returned and backward has not begun."""
    peak_bytes: int
    """Peak memory: the most alive at once during forward and backward."""


def step_memory(forward: Callable[[], torch.Tensor], device: torch.device) -> StepMemory:
    """Run `forward` (which returns the loss) and its backward, and count what they hold above static memory.

    Static memory is what is allocated before: parameters, optimizer state, the batch, and the gradients. So
    call it when every parameter has a gradient to accumulate into: one made inside counts towards the peak.
    """
    with memory_trace(device) as trace:
        loss = forward()
        trace.mark("forward")
        loss.backward()
    return StepMemory(activation_bytes_held=trace.held_nbytes["forward"], peak_bytes=trace.peak_nbytes)


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """What a measurement on `device` must be quoted next to: hardware, versions and date."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton") if importlib.util.find_spec("triton") else None,
        "transformers": version("transformers"),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
