"""How the kernels are timed, and what is told of each."""

from __future__ import annotations

import gc
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from kernel_benchmark.cases import BENCHMARKS, DTYPE, Benchmark, Measure, Prepare, Size, Step, forward, step
from kernel_benchmark.ways import COMPILED, COPY, EAGER, WAYS, Tensors

from recompute import counters
from recompute.diagnostics.comparing_runs import relative_error

L2_SIZES = 5  # the inputs and outputs of all calls that take turns fill the L2 so many times
GRAPH_SECONDS = 3e-3  # a replay of a graph is to take about so long
MEASURE_SECONDS = 0.15  # all replays together are to take about so long

HOST = "host"
OPS = (*BENCHMARKS, HOST)


@dataclass(frozen=True)
class Row:
    """What one way did. Figures that were not measured are None, and all of them if it failed, as `failure` says.

    `of_copy` is its bandwidth as a share of a copy's. `extra_peak_nbytes` is its peak memory beside inputs, outputs
    and gradients, and `held_bytes_per_token` what it holds for backward beside inputs and outputs. An error that is
    not finite is None. `in_graph` tells whether replays of a CUDA graph were timed; on the CPU it is None.
    """

    op: str
    measure: str
    size: str
    way: str
    seconds: float | None = None
    gb_per_second: float | None = None
    of_copy: float | None = None
    tflop_per_second: float | None = None
    extra_peak_nbytes: int | None = None
    held_bytes_per_token: float | None = None
    errors: dict[str, float | None] = field(default_factory=dict)
    in_graph: bool | None = None
    failure: str | None = None


def attempt(row: Row, measure: Callable[[], dict[str, Any]]) -> Row:
    try:
        return replace(row, **measure())
    except Exception as error:  # a peer's compiler or the memory may fail in any way: the others still get their rows
        return replace(row, failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Clock:
    """Times calls on a device; if `quick`, once or a few times only."""

    device: torch.device
    quick: bool
    sizes_alone: Collection[str] = ()
    """Sizes, as a row has them, of which alone ops are measured; all if there are none."""
    copies: dict[tuple[str, Size], float] = field(default_factory=dict)
    """Bytes a second of the fastest copy, by op and size. Copies of some byte counts are slow, even large ones."""

    @property
    def small(self) -> bool:
        """Whether the tensors are to be small."""
        return self.quick or self.device.type != "cuda"

    @property
    def _repeats(self) -> int:
        return 3 if self.quick else 20

    def seconds(self, calls: Sequence[Callable[[], Any]]) -> tuple[float, bool | None]:
        """Median seconds of a call, of several that are made in turn; and whether a CUDA graph made them."""
        if self.device.type != "cuda":
            return self._wall_seconds(calls), None
        self._once(calls)  # compiles
        seconds = self._once(calls)
        if waits_for_the_gpu(calls[0]):
            return self._events(partial(run_all, calls), seconds) / len(calls), False
        rounds = min(max(round(GRAPH_SECONDS / seconds), 1), 16)
        graph = torch.cuda.CUDAGraph()
        kept: deque[Any] = deque(maxlen=len(calls))  # so that no call writes to the memory of the last one, in the L2
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for call in [*calls] * rounds:
                kept.append(call())
        return self._events(graph.replay, rounds * seconds) / (rounds * len(calls)), True

    def host_seconds(self, call: Callable[[], Any]) -> float:
        """Median seconds of a call, of many in a row that do not wait for the device."""
        gc.disable()
        try:
            return self._wall_seconds([call] * (1 if self.quick else 50))
        finally:
            gc.enable()

    def _wall_seconds(self, calls: Sequence[Callable[[], Any]]) -> float:
        self._once(calls)
        return statistics.median(self._once(calls) for _ in range(self._repeats)) / len(calls)

    def _once(self, calls: Sequence[Callable[[], Any]]) -> float:
        start = counters.wall_seconds(self.device)
        run_all(calls)
        return counters.wall_seconds(self.device) - start

    def _events(self, run: Callable[[], Any], expected_seconds: float) -> float:
        run()
        taken = []
        for _ in range(min(max(round(MEASURE_SECONDS / expected_seconds), 5), self._repeats)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        return statistics.median(taken)

    def sets(self, nbytes: int) -> int:
        """How many sets of inputs and outputs, of this many bytes each, overflow the L2."""
        if self.device.type != "cuda" or not nbytes:
            return 1
        l2_nbytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        return min(math.ceil(L2_SIZES * l2_nbytes / nbytes), 16)

    def copy_seconds(self, nbytes: int) -> float:
        """Of a copy that reads and writes this many bytes together."""
        sources, targets = torch.randn(2, self.sets(nbytes), nbytes // 4, device=self.device).to(torch.bfloat16)
        calls = [partial(target.copy_, source) for target, source in zip(targets, sources, strict=True)]
        return self.seconds(calls)[0]


def run_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def waits_for_the_gpu(call: Callable[[], Any]) -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


@dataclass(frozen=True)
class Case:
    """A measure of an op at a size, which each way takes in turn."""

    op: str
    measure: Measure
    size: Size
    clock: Clock

    def rows(self, ways: Collection[str]) -> Iterator[Row]:
        blank = Row(self.op, self.measure.name, told(self.size), COPY)
        if self.moved_nbytes:
            blank = attempt(blank, self._copy)
            yield blank
        if COMPILED in ways:
            torch.compiler.reset()  # else it gives up at the ninth size
        for way in ways:
            yield attempt(Row(blank.op, blank.measure, blank.size, way), partial(self._way, way))

    @property
    def moved_nbytes(self) -> int:
        return self.measure.elements(*self.size) * DTYPE.itemsize if self.measure.elements else 0

    def _copy(self) -> dict[str, Any]:
        seconds = self.clock.copy_seconds(self.moved_nbytes)
        speed, key = self.moved_nbytes / seconds, (self.op, self.size)
        self.clock.copies[key] = max(speed, self.clock.copies.get(key, 0.0))
        return {"seconds": seconds, "gb_per_second": speed / 1e9, "of_copy": speed / self.clock.copies[key]}

    def _way(self, way: str) -> dict[str, Any]:
        prepare, nbytes = self.measure.ways[way], self.moved_nbytes
        call = prepare(self._inputs(0))
        figures: dict[str, Any] = {"errors": self._errors(call())}
        if isinstance(call, Step):
            figures |= self._memory(call)
        calls = [call, *(prepare(self._inputs(seed)) for seed in range(1, self.clock.sets(nbytes)))]
        figures["seconds"], figures["in_graph"] = seconds, _ = self.clock.seconds(calls)
        if nbytes:
            figures["gb_per_second"] = nbytes / seconds / 1e9
            copy = self.clock.copies.get((self.op, self.size))
            figures["of_copy"] = nbytes / seconds / copy if copy else None
        if self.measure.flops:
            figures["tflop_per_second"] = self.measure.flops(*self.size) / seconds / 1e12
        return figures

    def _inputs(self, seed: int) -> Tensors:
        return BENCHMARKS[self.op].inputs(self.clock.device, self.size, seed)

    def _errors(self, results: Tensors) -> dict[str, float | None]:
        pairs = zip(self.measure.results, results, self._reference, strict=True)
        errors = {name: relative_error([result], [reference]) for name, result, reference in pairs}
        return {name: error if math.isfinite(error) else None for name, error in errors.items()}

    @cached_property
    def _reference(self) -> Tensors:
        wide = (
            tensor.detach().float().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
            for tensor in self._inputs(0)
        )
        results = self.measure.ways[EAGER](tuple(wide))()
        return tuple(result.detach() for result in results)

    def _memory(self, call: Step) -> dict[str, Any]:
        """Once more, since what a first call allocates for good is no part of a step."""
        outputs: Tensors = ()

        def between(found: Tensors) -> None:
            nonlocal outputs
            outputs = found
            trace.mark("forward")

        with counters.memory_trace(self.clock.device) as trace:
            results = call(between)
        figures: dict[str, Any] = {"extra_peak_nbytes": trace.peak_nbytes - nbytes_beside(call.inputs, results)}
        if self.measure.holds:
            held_nbytes = trace.held_nbytes["forward"] - nbytes_beside(call.inputs, outputs)
            figures["held_bytes_per_token"] = held_nbytes / call.inputs[0].shape[0]
        return figures


def nbytes_beside(inputs: Tensors, tensors: Tensors) -> int:
    """The memory of `tensors`, less what is that of `inputs`."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage().data_ptr() not in known)


def rows(op: str, clock: Clock) -> Iterator[Row]:
    """The rows of one of `OPS`, as they are measured."""
    yield from _host_rows(clock) if op == HOST else _device_rows(op, clock)


def _device_rows(op: str, clock: Clock) -> Iterator[Row]:
    benchmark = BENCHMARKS[op]
    for measure in benchmark.measures:
        for size in sizes_of(benchmark, clock):
            with_compiled = not clock.quick and (clock.small or size in benchmark.compiled)
            ways = [way for way in measure.ways if way != COMPILED or with_compiled]
            yield from Case(op, measure, size, clock).rows(ways)


def sizes_of(benchmark: Benchmark, clock: Clock) -> Sequence[Size]:
    if clock.small:
        return (benchmark.small,)
    return [size for size in benchmark.sizes if not clock.sizes_alone or told(size) in clock.sizes_alone]


def told(size: Size) -> str:
    return "x".join(map(str, size))


def _host_rows(clock: Clock) -> Iterator[Row]:
    """What a call costs the host, on tensors so small that launching is all that takes a GPU's time."""
    for op, benchmark in BENCHMARKS.items():
        inputs = benchmark.inputs(clock.device, benchmark.small, seed=0)
        trains = any(each.requires_grad for each in inputs)
        for name, direction in (("forward", forward), *[("forward + backward", step)] * trains):
            for way, load in WAYS[op].items():
                if way != COMPILED:
                    yield attempt(Row(HOST, name, op, way), partial(_host_figures, direction(load), inputs, clock))


def _host_figures(prepare: Prepare, inputs: Tensors, clock: Clock) -> dict[str, Any]:
    return {"seconds": clock.host_seconds(prepare(inputs))}
