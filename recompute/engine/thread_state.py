"""The engine's state on this thread: the scopes and frames that are open, and the recipes that run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeVar

import torch

from recompute.engine.region_statistics import RegionStatistics, Stopwatch

EngineWork = Literal["compression", "offloading"]
T = TypeVar("T")


class _ThreadState(threading.local):
    """The scopes, frames and recipes that this thread is inside of."""

    def __init__(self) -> None:
        self.books: list[Any] = []
        """The ``RecipeBook`` of each scope that is open, the innermost last. None: nothing is recorded there."""
        self.statistics = RegionStatistics("an op outside of any region")
        """The recipes of ``recipe_book.record`` are counted for this region."""
        self.active_frames: list[Any] = []
        """The tapes, checkpoint frames and replays that are running, the innermost last."""
        self.regenerating = 0
        """How many recipes are running, one inside of the other. Tapes take no op for a step then."""
        self.work: EngineWork | None = None
        """The engine's own work on tensors that is in progress, if any: it is no part of the model."""
        self.offloaded: weakref.ref[Any] | None = None
        """The ``OffloadFrame`` that ended last and has copied something."""
        self.hidden_modes: list[Any] = []
        """The foreign modes that ``hidden_from_modes`` hides here."""
        self.sharing: set[Any] | None = None
        """The ``RecipeGroup`` of each recipe that has run inside of ``sharing_values``; None outside of it."""
        self.packing_for_recipe = False
        """Whether a tensor is packed for a recipe, and not because autograd saves it."""
        self.function_stand_in: Any = None
        """``(op, args, kwargs) -> outputs``: runs in the place of the custom Functions of a graph being traced."""
        self.is_tracing = False
        self.is_settling = False
        """Whether steps run that are all alike, so that one is enough to know what a region does."""
        self.on_simulated_launch: Callable[..., Any] | None = None
        """Called with the arguments of each launch on tensors without values, which launches nothing."""
        self.until_captured: Literal["tapes", "ATen"] | None = None
        """How regions run on tensors without values, to see a first step: on tapes, or as code with ATen's kernels."""
        self.simulates_cuda = False
        """Whether fake CPU tensors stand for CUDA's, because backward of fake CUDA tensors needs a GPU."""


local = _ThreadState()


def is_tracing() -> bool:
    """Whether torch's frontend is tracing for a captured region, and not for a user's ``torch.compile``."""
    return local.is_tracing


is_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


@contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[Any]:
    """Inside, an attribute has another value. Gives that value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        setattr(owner, name, before)


@contextmanager
def sharing_values() -> Iterator[None]:
    """Inside, all who ask for a value outside of a backward share it, as in a backward.

    Outside of such a span, each time that somebody asks is a span of its own.
    """
    sharing: set[Any] = set()
    try:
        with swapped(local, "sharing", sharing):
            yield
    finally:
        for group in sharing:
            group.release()


class _Unseen:
    def __enter__(self) -> None:
        local.regenerating += 1

    def __exit__(self, *error: object) -> None:
        local.regenerating -= 1


unseen_by_tapes = _Unseen()
"""Inside, no tape takes an op for a step."""


@contextmanager
def working(work: EngineWork) -> Iterator[None]:
    """Inside, the engine compresses, decompresses, or copies off the device and back.

    Ops in it are no ops of the model: no tape takes them for a step.
    """
    with swapped(local, "work", work), unseen_by_tapes:
        yield


def packing_for_recipe() -> AbstractContextManager[Any]:
    """Inside, tensors are packed for recipes. Autograd may not have saved them, so they are no savings."""
    return swapped(local, "packing_for_recipe", True)


def stopwatch_of(statistics: RegionStatistics) -> Stopwatch | None:
    """The stopwatch for a regeneration that begins now. None if nobody asked for it, or inside of another regeneration.

    None, too, while a CUDA graph is being captured: events measure no time there.
    """
    stopwatch = statistics.regenerated.stopwatch
    return None if stopwatch is None or local.regenerating or is_in_cuda_graph() else stopwatch


def alive(references: Iterable[weakref.ref[T]]) -> Iterator[T]:
    """The objects that these refer to, and that are alive when their turns come."""
    for reference in references:
        if (value := reference()) is not None:
            yield value


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def is_fake() -> bool:
    """Whether tensors have no values here, nor random numbers."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_in_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured of this thread's launches."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
