"""Training without a policy and under one, compared: a recording of what either computed, held and took."""

from __future__ import annotations

import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recompute.counters import memory_trace, thread_seconds
from recompute.errors import NoEffectError, PolicyWarning, RecomputeError

NOISE = 0.02
NOTHING = "nothing governed"

Trace = dict[str, Tensor]
"""What training computed, by name: losses, gradients, and the parameters and buffers at the end."""


@dataclass
class Outcome:
    """How a preset did, and what there is to say of it.

    verdict: ``bitwise``; ``close``, where kernels round in their own way; ``idle``, where the preset governs no module;
        ``refused``, by an error of recompute's; or ``wrong``.
    """

    verdict: str
    detail: str = ""
    frames: int = 0
    dropped_nbytes: int = 0
    kept_nbytes: int = 0
    regenerations: int = 0
    regions: int = 0
    """How many regions ran often enough to be captured."""
    captured: int = 0
    """How many of them run as captured code."""
    held: float | None = None
    """Bytes held where backward begins, as a share of those without the policy."""
    time: float | None = None
    """CPU time of a settled step, as a multiple of that without the policy."""
    uncaptured: list[str] = field(default_factory=list)
    """Why the others do not."""
    warnings: list[str] = field(default_factory=list)


class Recording:
    """Watches steps of training from outside, whoever runs the loop. A step ends where the first optimizer's does.

    In the last of ``steps`` it counts memory, by the profiler; that step is not timed.
    """

    def __init__(self, model: nn.Module, steps: int):
        self.trace: Trace = {}
        self.seconds: list[float] = []
        """CPU seconds of each step, to the end of its last backward if it has one."""
        self.held_nbytes: int | None = None
        """Bytes alive where the last step's first backward begins; None if there was no such step, or no backward."""
        self._model, self._steps = model, steps
        self._optimizer: Optimizer | None = None
        self._step, self._backwards = 1, 0
        self._stack, self._counting = ExitStack(), ExitStack()

    def __enter__(self) -> Recording:
        hook = register_optimizer_step_post_hook(self._end_step)
        self._stack.callback(hook.remove)
        self._backward = torch.autograd.backward
        self._stack.enter_context(patch.object(torch.autograd, "backward", self._run_backward))
        self._device = next((each.device for each in self._model.parameters()), torch.device("cpu"))
        self._memory = memory_trace(self._device)
        self._began = self._ended = thread_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._counting.__exit__(kind, *rest)
        self._stack.__exit__(kind, *rest)
        if kind is None:
            self.note("after: ", self._model.named_parameters())
            self.note("after: ", self._model.named_buffers())
            self.held_nbytes = self._memory.held_nbytes.get("forward")

    def settled_seconds(self) -> float | None:
        """The faster of the last two steps that are timed: regions are captured by then."""
        return min(self.seconds[-2:], default=None)

    def _run_backward(self, tensors: Any, *arguments: Any, **options: Any) -> None:
        losses = [tensors] if isinstance(tensors, Tensor) else tensors
        self._backwards += 1
        name = f"step {self._step}: loss" + f" {self._backwards}" * (self._backwards > 1)
        self.note(name, (("", loss) for loss in losses))
        if self._step == self._steps and self._backwards == 1:
            self._memory.mark("forward")
        self._backward(tensors, *arguments, **options)
        self._ended = thread_seconds()

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        self._optimizer = self._optimizer or optimizer
        gradients = ((name, each.grad) for name, each in self._model.named_parameters() if each.grad is not None)
        self.note(f"step {self._step}: gradient of ", gradients)
        if optimizer is not self._optimizer:
            return
        if self._step == self._steps:
            self._counting.close()
            return
        self.seconds.append((self._ended if self._backwards else thread_seconds()) - self._began)
        self._step, self._backwards = self._step + 1, 0
        if self._step == self._steps:
            self._counting.enter_context(self._memory)
        self._began = self._ended = thread_seconds()

    def note(self, prefix: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add to what is compared."""
        for name, value in tensors:
            for path, part in plain_tensors(prefix + name, value):
                self.trace[path] = part.detach().clone()


def plain_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor, or those that it is made of."""
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for part in value.__tensor_flatten__()[0]:
            yield from plain_tensors(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Tensor):
        yield name, value


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def is_wrong(row: dict[str, Any]) -> bool:
    return any(outcome["verdict"] == "wrong" for outcome in row.get("outcomes", {}).values())


def unhide(parameters: Iterable[Tensor]) -> None:
    """Add noise to weights, so that none stays at a value that hides mistakes, as a gate of 0 does."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, parameters):
            noise = NOISE * torch.randn(parameter.shape, generator=generator)
            sound = parameter.isfinite() & (parameter.abs() < 1e3)  # some are memory that nothing initializes
            parameter.copy_(torch.where(sound, parameter, 0.0) + noise)


def said(error: Exception) -> str:
    """An exception in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def outcome_of(
    train: Callable[[], tuple[Recording, Any]],
    plain: Recording,
    on_error: Callable[[Exception], None],
    close: float = 0.0,
) -> Outcome:
    """How training under a policy does, which returns its recording and the policy's handle.

    close: how far gradients may be off.
    """
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            recording, handle = train()
        except NoEffectError:
            return Outcome("idle", NOTHING)
        except RecomputeError as error:
            on_error(error)
            return Outcome("refused", said(error))
        except Exception as error:  # without the policy it trained
            on_error(error)
            where = traceback.extract_tb(error.__traceback__)[-1]
            return Outcome("wrong", f"raises {said(error)} in {where.name}")
    stats = handle.stats()
    messages = sorted({str(each.message) for each in warned if issubclass(each.category, PolicyWarning)})
    outcome = Outcome(
        "bitwise",
        frames=stats.frames,
        dropped_nbytes=stats.dropped_nbytes,
        kept_nbytes=stats.kept_nbytes,
        regenerations=stats.regenerations,
        warnings=messages,
        held=_ratio(recording.held_nbytes, plain.held_nbytes),
        time=_ratio(recording.settled_seconds(), plain.settled_seconds()),
    )
    shares = re.findall(r"([\d,]+) of ([\d,]+) run as captured code(?:; (.*))?", handle.explain(wide=True))
    for captured, regions, reason in shares:
        outcome.captured += int(captured.replace(",", ""))
        outcome.regions += int(regions.replace(",", ""))
        outcome.uncaptured += [reason] * bool(reason)
    differing = differences(recording.trace, plain.trace)
    if differing:
        error = error_of(recording.trace, plain.trace)
        outcome.verdict = "close" if 0 < error <= close else "wrong"
        outcome.detail = f"error {error:.1e}; {len(differing)} of {len(plain.trace)} differ, first {differing[0]}"
    elif outcome.frames == 0:
        outcome.verdict, outcome.detail = "idle", NOTHING
    return outcome


def _ratio(one: float | None, other: float | None) -> float | None:
    return round(one / other, 3) if one is not None and other else None


def differences(found: Trace, expected: Trace) -> list[str]:
    """The names of what is not the same to the bit, with a measure of how far off it is."""
    odd = [f"{name}: only in one" for name in found.keys() ^ expected.keys()]
    return odd + [
        f"{name}: {relative([found[name]], [expected[name]]):.1e}"
        for name in expected
        if name in found and not same_bits(found[name], expected[name])
    ]


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def error_of(found: Trace, expected: Trace) -> float:
    """The largest relative error of any step, of all gradients as one vector and of its losses as another."""
    steps: dict[tuple[str, bool], list[str]] = {}
    for name in expected:
        step, _, what = name.partition(": ")
        if what.startswith(("gradient", "loss")) and name in found:
            steps.setdefault((step, what.startswith("loss")), []).append(name)
    return max(
        (relative([found[name] for name in names], [expected[name] for name in names]) for names in steps.values()),
        default=float("inf"),
    )


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference to that of what is expected; infinite where shapes differ."""
    if any(one.shape != other.shape for one, other in zip(found, expected, strict=True)):
        return float("inf")
    pairs = [(one.double(), other.double()) for one, other in zip(found, expected, strict=True)]
    apart = sum(_square(_difference(one, other)) for one, other in pairs)
    size = sum(_square(other) for _, other in pairs if other.isfinite().all())
    return (apart / size) ** 0.5 if size else float("inf") if apart else 0.0


def _difference(one: Tensor, other: Tensor) -> Tensor:
    """0 where both are NaN, or infinite alike."""
    return torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one - other)


def _square(value: Tensor) -> float:
    return float(value.square().sum())
