"""Runs one training step, and says how many seconds and bytes each region of it takes.

It sets marks at the borders of regions, and sees nothing between them: so it measures captured code on a device at its
own speed. ``simulation`` sees each op. That tells which module holds which bytes, and only fake tensors can afford it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from recompute.counters import Clock, MemoryTrace
from recompute.errors import ModelError
from recompute.estimation.storage_tracker import StorageTrace

Forward = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor | None]]]
"""Runs forward; returns the tensors where backward starts, and the gradient that each starts with (None: 1)."""

StepClock = Clock | StorageTrace
"""Measures seconds, or calculates them and counts bytes as well."""


@dataclass(frozen=True)
class StepPart:
    """The costs of a region in one step. The parts before the first region and after the last one have the path "".

    In forward a part lasts until the next region begins. In backward it begins when the region after it has computed
    the gradient of its input. Bytes are as in ``cost_table``: ``held_nbytes`` counts the region's output, if that is
    held, and not its input.
    """

    path: str
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    held_nbytes: int = 0
    forward_peak_nbytes: int = 0
    backward_peak_nbytes: int = 0
    gradient_nbytes: int = 0
    """Bytes of the gradients that its backward leaves behind."""

    def slowed(self, factor: float) -> StepPart:
        """The same part, with its seconds times ``factor``."""
        return replace(
            self, forward_seconds=factor * self.forward_seconds, backward_seconds=factor * self.backward_seconds
        )


@dataclass(frozen=True)
class StepTrace:
    """One training step. Seconds and bytes that were not measured are 0."""

    parts: tuple[StepPart, ...]
    """In the order of forward: before the first region, the regions, after the last one."""
    optimizer_seconds: float
    optimizer_peak_nbytes: int
    """Above the gradients."""
    peak_nbytes: int
    """The most alive at once in the whole step, above the bytes allocated when it began."""

    @property
    def seconds(self) -> float:
        return sum(part.forward_seconds + part.backward_seconds for part in self.parts) + self.optimizer_seconds


def trace_step(
    forward: Forward,
    optimizer: Optimizer,
    regions: Mapping[str, nn.Module] | None,
    *,
    memory: MemoryTrace | None = None,
    clock: StepClock | None = None,
    earlier: Callable[[], Any] | None = None,
) -> StepTrace:
    """Run one training step: forward, backward, ``optimizer``'s step, and its gradients set to None.

    The optimizer is given gradients of zero: with a learning rate of 0 it changes no parameter, whatever the gradients
    were. Setting them to zero is not timed.

    regions: by path; each runs once in forward, and none inside of another. They may be under any policy. Ops that a
        checkpoint runs again in backward belong to the backward of its region. None: the step is one part, and no
        hooks slow it down.
    memory, clock: count and time the step, such as ``memory_trace(device)`` and ``Clock(device)``, or one that does
        both. They are not yet entered.
        Memory from before the step does not count, so there must be no gradients yet.
    earlier: runs first, such as microbatches before this one. Its result lives until backward has ended. The bytes of
        that and of its gradients count in the step's peak, and in no part.

    Raises ``ModelError`` if there are no regions, or one does not run exactly once or runs inside of another.
    """
    if regions is not None and not regions:
        raise ModelError("regions: expected at least one module of the model; found none")
    regions = regions or {}
    marks = _StepTracer(list(regions), memory, clock)
    with ExitStack() as stack:
        stack.callback(lambda: [handle.remove() for handle in marks.handles])
        for path, module in regions.items():
            begins, ends = partial(marks.begin_region, path), partial(marks.end_region, path)
            before = module.register_forward_pre_hook(begins, with_kwargs=True, prepend=True)
            marks.handles += [before, module.register_forward_hook(ends)]
        for meter in marks.meters:
            stack.enter_context(meter)
        others = None if earlier is None else earlier()
        marks.end("earlier")
        marks.in_forward = True
        roots, gradients = forward()
        marks.end_forward()
        torch.autograd.backward(roots, gradients)
        del roots, gradients
        marks.end("backward")
        del others
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
        marks.end("zeroing")
        # Graphs that the caller has built before may check the versions of these parameters.
        with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
            optimizer.step()
        marks.end("optimizer")
        optimizer.zero_grad(set_to_none=True)
    return marks.summary()


class _Span(NamedTuple):
    """The time from one mark to the next, in the part of this number, in the order of forward."""

    phase: str
    part: int
    handed_nbytes: int
    """Bytes of the gradient that this span hands on to the next one, less those of its tensor if that is freed."""


@dataclass
class _StepTracer:
    """The marks set so far, and whose turn it is."""

    paths: list[str]
    memory: MemoryTrace | None
    clock: StepClock | None
    spans: list[_Span] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """The regions that have begun."""
    part: int = 0
    inside: str | None = None
    in_forward: bool = False
    handles: list[Any] = field(default_factory=list)
    inputs: dict[int, tuple[StorageWeakRef, int]] = field(default_factory=dict)
    """The storages of the first and of the last region's inputs, and their bytes, by the numbers of the regions."""
    shed: dict[int, int] = field(default_factory=dict)
    """The bytes of those that were freed by the end of forward: then only the regions' caller held them."""

    @property
    def meters(self) -> list[MemoryTrace | Clock]:
        both = [self.memory] if self.memory is self.clock else [self.memory, self.clock]
        return [each for each in both if each is not None]

    @property
    def last(self) -> int:
        """The number of the last part; 0 if there are no regions, where the whole step is one part."""
        return len(self.order) + 1 if self.order else 0

    def end(self, phase: str, part: int = 0, handed_nbytes: int = 0) -> None:
        """End the span of the current part; ``part`` is next."""
        name = str(len(self.spans))
        for meter in self.meters:
            meter.mark(name)
        self.spans.append(_Span(phase, self.part, handed_nbytes))
        self.part = part

    def begin_region(self, path: str, module: nn.Module, *inputs: Any) -> None:
        if not self.in_forward:  # in backward, a checkpoint around the region runs it again
            return
        if self.inside is not None:
            raise ModelError(f"{path} runs inside of {self.inside}; expected regions that do not nest. Leave one out")
        if path in self.order:
            raise ModelError(f"{path} runs twice in a forward; expected a region that runs once. Leave it out")
        self.order.append(path)
        self.inside = path
        number = len(self.order)
        self.end("forward", number)
        tensors = list(_tensors(inputs))
        self._hook(tensors, number - 1)
        if number in (1, len(self.paths)) and tensors:
            storage = tensors[0].untyped_storage()
            self.inputs[number] = StorageWeakRef(storage), storage.nbytes()

    def end_region(self, path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.in_forward or path != self.inside:
            return
        self.inside = None
        if len(self.order) == len(self.paths):
            self.end("forward", len(self.order) + 1)
            self._hook(_tensors(output), len(self.order))

    def _hook(self, tensors: Iterator[Tensor] | list[Tensor], part: int) -> None:
        """End a span of backward when the first differentiable tensor has its gradient; ``part`` is next."""
        tensor = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if tensor is not None:
            storage = tensor.untyped_storage()
            reference, nbytes = StorageWeakRef(storage), storage.nbytes()

            def ended(gradient: Tensor) -> None:
                handed_nbytes = gradient.untyped_storage().nbytes() - (nbytes if reference.expired() else 0)
                self.end("backward", part, handed_nbytes)

            self.handles.append(tensor.register_hook(ended))

    def end_forward(self) -> None:
        if missing := [path for path in self.paths if path not in self.order]:
            raise ModelError(f"{missing[0]} does not run in this forward; expected a region that runs. Leave it out")
        self.shed = {number: nbytes for number, (storage, nbytes) in self.inputs.items() if storage.expired()}
        self.end("forward", self.last)
        self.in_forward = False

    def summary(self) -> StepTrace:
        count, seconds = self.last + 1, self._seconds()
        parts = []
        bytes_of, left = self._nbytes(count)
        for number, path in enumerate(["", *self.order, ""][:count]):
            parts.append(StepPart(path, seconds["forward", number], seconds["backward", number], *bytes_of[number]))
        step = max((peak for span, _, peak in self._alive() if span.phase == "optimizer"), default=0)
        peak = self.memory.peak_nbytes if self.memory is not None else 0
        return StepTrace(tuple(parts), seconds["optimizer", 0], max(0, step - left), peak)

    def _seconds(self) -> Mapping[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = defaultdict(float)
        if self.clock is not None:
            for index, span in enumerate(self.spans):
                found[span.phase, span.part] += self.clock.seconds[str(index)]
        return found

    def _alive(self) -> list[tuple[_Span, int, int]]:
        """Each span, the bytes alive at its end, and the most alive at once inside of it."""
        if self.memory is None:
            return []
        held, peaks = self.memory.held_nbytes, self.memory.span_peak_nbytes
        return [(span, held[str(i)], peaks[str(i)]) for i, span in enumerate(self.spans)]

    def _nbytes(self, count: int) -> tuple[list[tuple[int, int, int, int]], int]:
        """The bytes of each part (held, peak in forward, peak in backward, gradients), and those of all gradients."""
        if self.memory is None:
            return [(0, 0, 0, 0)] * count, 0
        ends = {span.part: alive for span, alive, _ in self._alive() if span.phase == "forward"}
        last = max(0, count - 2)
        ends[last] -= self.shed.pop(last, 0)
        for number in range(count - 1):
            ends[number] -= self.shed.get(1, 0)  # the caller held it until all regions had run
        before = next(alive for span, alive, _ in self._alive() if span.phase == "earlier")
        starts = [before, *(ends[number] for number in range(count - 1))]
        peaks: dict[tuple[str, int], int] = {}
        left: dict[int, int] = {}
        for span, alive, peak in self._alive():
            key = span.phase, span.part
            peaks[key] = max(peaks.get(key, 0), peak)
            if span.phase == "backward":
                left[span.part] = alive - span.handed_nbytes - starts[span.part]
                if span is self.spans[-3]:  # backward ends here, perhaps before the first part: only gradients are left
                    left[span.part] = alive - before
        found = []
        gradients = 0  # of the parts after this one
        for number in reversed(range(count)):
            backward_peak = max(0, peaks.get(("backward", number), 0) - starts[number] - gradients)
            own = max(0, left.get(number, 0) - gradients)
            held = max(0, ends[number] - starts[number])
            found.append((held, max(0, peaks["forward", number] - starts[number]), backward_peak, own))
            gradients += own
        return found[::-1], gradients


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
