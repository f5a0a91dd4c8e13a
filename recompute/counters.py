"""The only clock and the only memory counters of this package, and a description of the machine."""

from __future__ import annotations

import importlib.util
import itertools
import os
import platform
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function

from recompute.errors import AblationError


def wall_seconds(device: torch.device) -> float:
    """Seconds on a monotonic clock, read once everything queued on `device` has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return host_seconds()


def host_seconds() -> float:
    """Seconds on the same clock, read at once: work that is queued on a device may not have begun."""
    return time.perf_counter()


def thread_seconds() -> float:
    """CPU seconds that the calling thread has used. On CUDA that is the time to launch work, not to run it."""
    return time.thread_time()


def start_peak(device: torch.device) -> None:
    """Start counting the peak that ``allocated_nbytes`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocated_nbytes(device: torch.device) -> tuple[int, int] | None:
    """Bytes of tensors alive on `device`, now and at the peak; None where nobody counts them, as on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


@dataclass
class MemoryTrace(AbstractContextManager["MemoryTrace"]):
    """Bytes of tensor memory above what was allocated when the ``with`` block began.

    A mark ends a span, which began at the mark before it or with the block. `held_nbytes` maps each mark to the bytes
    alive when it was set, `span_peak_nbytes` to the most alive at once in the span that it ends; `peak_nbytes` is the
    most alive at once in the block. All are complete only after the block has ended, and empty if it ended with an
    exception. Marks have different names.
    """

    held_nbytes: dict[str, int] = field(default_factory=dict)
    span_peak_nbytes: dict[str, int] = field(default_factory=dict)
    peak_nbytes: int = 0

    @abstractmethod
    def mark(self, name: str) -> None:
        """Note how many bytes are alive now, and how many were since the mark before, under `name`."""


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
        allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        self.held_nbytes[name] = allocated["current"] - self._before_nbytes
        self.span_peak_nbytes[name] = allocated["peak"] - self._before_nbytes

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            last_nbytes = torch.cuda.max_memory_allocated(self._device) - self._before_nbytes
            self.peak_nbytes = max(last_nbytes, *self.span_peak_nbytes.values(), 0)
        else:
            self.held_nbytes.clear()
            self.span_peak_nbytes.clear()


class _CpuTrace(MemoryTrace):
    """Allocator events as the profiler records them: exact bytes, on one time line with the marks."""

    _MARK = "recompute.memory_trace: "

    def __enter__(self) -> MemoryTrace:
        # The profiler prints its starts and stops. It reads this once, when it first starts.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
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
        alive = span_peak = 0
        sizes: dict[int, int] = {}
        for event in sorted(_flat(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
            fields = event.extra_fields
            if event.tag == _EventType.Allocation and fields.device.type == "cpu":
                # Memory that was allocated in an earlier trace may be freed in this one, as by the garbage collector.
                before = sizes.pop(fields.ptr, 0)
                if fields.alloc_size > 0:
                    sizes[fields.ptr] = fields.alloc_size
                alive += sizes.get(fields.ptr, 0) - before
                span_peak = max(span_peak, alive)
                self.peak_nbytes = max(self.peak_nbytes, alive)
            elif event.name.startswith(self._MARK):
                name = event.name.removeprefix(self._MARK)
                self.held_nbytes[name], self.span_peak_nbytes[name] = alive, span_peak
                span_peak = alive


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    """The events and all that are inside of them."""
    for event in events:
        yield event
        yield from _flat(event.children)


def memory_trace(device: torch.device) -> MemoryTrace:
    """Count the tensor memory of `device` (a CUDA device or the CPU) during a ``with`` block.

    On the CPU this runs the profiler, which slows what runs inside and does not nest. Freeing a tensor from before the
    block does not count there, and memory that another thread frees counts until it is used again.
    """
    return _CudaTrace(device) if device.type == "cuda" else _CpuTrace()


class Clock(AbstractContextManager["Clock"]):
    """Seconds from mark to mark of a ``with`` block, by the name of the mark that ends each span.

    The first span begins with the block. The seconds are complete only after the block has ended. Marks have different
    names. On CUDA they are events on the current stream, which the device records when it reaches them: setting one
    does not wait for the device, and seconds are the device's, with the time that it was idle.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._on_cuda = device.type == "cuda"

    def __enter__(self) -> Clock:
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        self._marks = [("", self._now())]
        return self

    def mark(self, name: str) -> None:
        """End a span here."""
        self._marks.append((name, self._now()))

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            if self._on_cuda:
                torch.cuda.synchronize(self._device)
            for (_, first), (name, last) in itertools.pairwise(self._marks):
                self.seconds[name] = first.elapsed_time(last) / 1e3 if self._on_cuda else last - first


@dataclass(frozen=True)
class StepMemory:
    """Memory of one training step, in bytes above its static memory."""

    activation_bytes_held: int
    """Activation memory: alive when forward has returned and backward has not begun."""
    peak_bytes: int
    """Peak memory: the most alive at once during forward and backward."""
    bytes_held_after_inner: int | None = None
    """Activation memory: alive at the first end of the inner module's forward; None if there was none."""


def step_memory(
    forward: Callable[[], torch.Tensor], device: torch.device, inner: torch.nn.Module | None = None
) -> StepMemory:
    """Run `forward` (which returns the loss) and its backward, and count what they hold above static memory.

    Static memory is what is allocated before: parameters, optimizer state, the batch, and the gradients. So
    call it when every parameter has a gradient to accumulate into: one made inside counts towards the peak.

    inner: a module that `forward` runs, such as the decoder below a head, at whose first end to count, too.
    """
    with memory_trace(device) as trace:
        with _marked_end(inner, trace) if inner is not None else nullcontext():
            loss = forward()
        trace.mark("forward")
        loss.backward()
    return StepMemory(trace.held_nbytes["forward"], trace.peak_nbytes, trace.held_nbytes.get("inner"))


@contextmanager
def _marked_end(module: torch.nn.Module, trace: MemoryTrace) -> Iterator[None]:
    """Set a mark where the module's first forward ends."""
    ends = itertools.count()
    hook = module.register_forward_hook(lambda *_: None if next(ends) else trace.mark("inner"))
    try:
        yield
    finally:
        hook.remove()


def resolve_device(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here. Raises `AblationError` where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        why = "finds no CUDA device" if torch.version.cuda else "was built for the CPU alone"
        raise AblationError(
            f"device is cuda, but torch {torch.__version__} {why}; use cpu, or auto, which takes what there is"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """What a measurement on `device` must be published with: hardware, versions and date."""
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
