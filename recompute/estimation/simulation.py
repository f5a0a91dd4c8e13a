"""Runs a training step on fake tensors, and notes the bytes alive at each moment, and the modules that made them."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recompute.engine.fake_mode import asks_for_address, refused_address
from recompute.errors import ModelError, RecomputeError
from recompute.estimation.attention_choice import Platform
from recompute.estimation.cuda_semantics import as_on_cuda
from recompute.estimation.module_tracker import LOSS, ModuleTracker, unit_of
from recompute.estimation.storage_tracker import BLOCK_NBYTES, OpClock, StorageTrace, gradients_apart


@dataclass(frozen=True)
class MomentMemory:
    """The bytes alive during one part of the step: the forward or the backward of one module."""

    name: str
    """ "forward of model.layers.3", "the loss", "backward of the loss" …"""
    alive: dict[int, int]
    """The most other bytes alive beside each number of bytes of gradients.

    Gradients are counted apart because sharding divides nothing else here.
    """

    def peak_nbytes(self, share: Callable[[int], int]) -> int:
        """The most bytes alive, with gradients. share: as ``static_memory.share_of`` returns it."""
        return max(nbytes + share(gradients) for gradients, nbytes in self.alive.items())


@dataclass(frozen=True)
class SimulatedStep:
    """The bytes of a training step beside static ones."""

    moments: tuple[MomentMemory, ...]
    """In the order in which they began."""
    held: dict[str, int]
    """Bytes held after forward, by the path of the module that made them."""
    logits_peak_nbytes: int
    """The most that logits, their copies and their gradients take at once, returned ones included."""
    attention: tuple[str, ...] = ()
    """The kernels of ``scaled_dot_product_attention`` that ran."""
    gradients: dict[str, int] = field(default_factory=dict)
    """The bytes of parameters' gradients, by layer, or by module outside of layers."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds of forward and backward, by the same; {} where nobody times ops."""
    host: dict[str, int] = field(default_factory=dict)
    """The bytes that travel to the host, by the same."""

    def is_like(self, other: SimulatedStep, tolerance: int) -> bool:
        """Whether the other one holds the same, and each moment has as many bytes, but for ``tolerance``."""
        mine, theirs = (
            sorted((moment.name, *entry) for moment in step.moments for entry in moment.alive.items())
            for step in (self, other)
        )
        numbers = [(step.held, step.gradients, step.logits_peak_nbytes) for step in (self, other)]
        return (
            numbers[0] == numbers[1]
            and len(mine) == len(theirs)
            and all(a[:2] == b[:2] and abs(a[2] - b[2]) <= tolerance for a, b in zip(mine, theirs, strict=True))
        )

    def beside_others(self, in_flight: int) -> SimulatedStep:
        """The step of the last of so many microbatches in flight, beside all gradients."""
        gradients = max(max(moment.alive) for moment in self.moments)
        others = (in_flight - 1) * sum(self.held.values())
        moments = [
            MomentMemory(moment.name, {gradients: others + max(moment.alive.values())}) for moment in self.moments
        ]
        held = {path: in_flight * nbytes for path, nbytes in self.held.items()}
        return replace(self, moments=tuple(moments), held=held)


class Surroundings(NamedTuple):
    """The device and the autocast of a step."""

    platform: Platform | None = None
    """The device to count as; None: to the byte, as the CPU runs it."""
    autocast: torch.dtype | None = None
    """The dtype of the autocast of forward and loss."""

    @contextmanager
    def entered(self) -> Iterator[tuple[Callable[[], Any], set[str]]]:
        """The modes of a step. Yields a function for those of forward alone, and the names of attention's kernels."""
        dtype = self.autocast
        if self.platform is not None:
            with as_on_cuda(self.platform) as attention:
                yield lambda: as_on_cuda(autocast=dtype), attention
        else:
            yield lambda: torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), set()


AS_ON_THE_CPU = Surroundings()


def run_step(
    model: nn.Module, run: Callable[[], tuple[Tensor, Any]], surroundings: Surroundings, backward: bool
) -> None:
    """Run a forward, for a policy to learn, or a backward, too. Leaves no gradients. run: as ``simulate`` takes it."""
    tracker = ModuleTracker()
    with surroundings.entered() as (forward_only, _):
        with forward_only(), _following(model, tracker):
            loss = run()[0]
        if backward:
            with _naming(model, tracker.in_backward):
                torch.autograd.backward(loss)
            model.zero_grad()


def simulate(
    model: nn.Module,
    run: Callable[[], tuple[Tensor, Any]],
    surroundings: Surroundings = AS_ON_THE_CPU,
    *,
    tokens: int = 0,
    classes: int | None = None,
    timed: OpClock | None = None,
) -> SimulatedStep:
    """Trace one forward and backward of a model on fake tensors, under their mode. Leaves no gradients.

    run: runs forward; returns the loss and the model's output.
    tokens, classes: the shape of logits, (..., classes) for so many tokens; None where there are none.
    timed: None where nobody asks for seconds.
    """
    units: dict[Tensor, str] = {parameter: unit_of(path) for path, parameter in model.named_parameters()}
    trace = StorageTrace(1 if surroundings.platform is None else BLOCK_NBYTES, timed)
    recorder = _MemoryRecorder(classes, tokens, units, trace)
    try:
        with (
            _without_garbage_collection(),
            gradients_apart(units, trace, recorder.took_gradient),
            surroundings.entered() as (forward_only, attention),
            trace,
        ):
            with forward_only(), _following(model, recorder.tracker):
                loss, output = run()
            recorder.returned_logits_nbytes = _logits_nbytes(output, classes)
            del output
            held = Counter[str]()
            for (path, _), nbytes in trace.alive():
                held[path] += nbytes
            recorder.is_backward = True
            with _naming(model, recorder.tracker.in_backward):
                torch.autograd.backward(loss)  # function modes are not active in what ``loss.backward()`` calls
            del loss
    finally:
        model.zero_grad()
    moments = tuple(MomentMemory(name, alive) for name, alive in recorder.moments.items())
    by_unit = dict(recorder.gradients), dict(recorder.seconds)
    return SimulatedStep(moments, dict(held), recorder.logits_peak_nbytes, tuple(sorted(attention)), *by_unit)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Inside, no garbage is collected: on fake tensors that would free reference cycles earlier than in a real step."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _logits_nbytes(output: Any, classes: int | None) -> int:
    logits: Any = getattr(output, "logits", None)
    is_made = isinstance(logits, Tensor) and not getattr(logits, "is_lazy", False)
    return logits.nbytes if is_made and logits.shape[-1] == classes else 0


@dataclass
class _MemoryRecorder:
    """Notes the bytes alive as each module runs, in forward and in backward."""

    classes: int | None
    tokens: int
    units: Mapping[Tensor, str]
    """For each parameter, the layer or module that it is in."""
    trace: StorageTrace
    tracker: ModuleTracker = field(default_factory=ModuleTracker)
    is_backward: bool = False
    gradient_nbytes: int = 0
    logits_nbytes: int = 0
    logits_peak_nbytes: int = 0
    returned_logits_nbytes: int = 0
    """The bytes of the logits that the model returned, which the caller may still hold in backward."""
    gradients: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moments: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        self.trace.on_grown, self.trace.label, self.trace.on_freed = self._grown, self._label, self._freed
        self.trace.on_timed = self._add_seconds

    def took_gradient(self, parameter: Tensor, nbytes: int) -> None:
        self.gradient_nbytes += nbytes
        self.gradients[self.units[parameter]] += nbytes
        self._grown(self.trace.alive_nbytes)

    def _add_seconds(self, seconds: float) -> None:
        self.seconds[unit_of(self._where())] += seconds

    def _where(self) -> str:
        return self.tracker.in_backward() if self.is_backward else self.tracker.path

    def _grown(self, nbytes: int) -> None:
        unit = unit_of(self._where())
        forward = unit if unit == LOSS else f"forward of {unit}"
        name = f"backward of {unit}" if self.is_backward else forward
        alive = self.moments[name]
        alive[self.gradient_nbytes] = max(alive.get(self.gradient_nbytes, 0), nbytes)

    def _label(self, tensor: Tensor, nbytes: int) -> tuple[str, bool]:
        where = self._where()
        is_logits = self.classes is not None and self._is_of_logits(tensor, where)
        if is_logits:
            self.logits_nbytes += nbytes
            returned = self.returned_logits_nbytes if self.is_backward else 0
            self.logits_peak_nbytes = max(self.logits_peak_nbytes, self.logits_nbytes + returned)
        return where, is_logits

    def _is_of_logits(self, tensor: Tensor, where: str) -> bool:
        """Whether it has the shape of logits, or is a block of their columns, which a loss without logits makes."""
        if tensor.dim() == 1:
            return unit_of(where) == LOSS and tensor.numel() >= self.tokens * 256
        return tensor.shape[-1:] == (self.classes,)

    def _freed(self, label: tuple[str, bool], nbytes: int) -> None:
        if label[1]:
            self.logits_nbytes -= nbytes


@contextmanager
def _following(model: nn.Module, tracker: ModuleTracker) -> Iterator[None]:
    with _naming(model, lambda: tracker.failed), tracker.following(model):
        yield


@contextmanager
def _naming(model: nn.Module, failed: Callable[[], str]) -> Iterator[None]:
    """Turn any error into a ``ModelError`` that names the module at the path of ``failed()``."""
    try:
        yield
    except RecomputeError:
        raise
    except Exception as error:  # whatever a model raises: tensors without values fail in many ways
        path = failed()
        module = type(model.get_submodule(path)).__name__
        where = f"module {path!r} ({module})" if path else f"the model ({module})"
        if asks_for_address(error):
            raise refused_address(error, where) from error
        raise ModelError(
            f"{where} cannot run on fake tensors, which have no values: {type(error).__name__}: {error}. Measure the "
            "model on a real device instead, with recompute.profile."
        ) from error
