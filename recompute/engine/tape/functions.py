"""Custom ``autograd.Function``s in a region: a tape takes a forward of one for a single step, which never runs again.

Its kernels may write to memory unseen. So its outputs are kept, and all memory that its kernels reach counts as
overwritten, unless it was seen to be left as it is (``function_writes.py``). A Function that says
``seen_by_dispatcher`` only calls ops that a tape sees, and is no step.

``apply`` is C++, so no one announces the call of a Function. The first op of a Function that a tape sees gives the
Function's class another ``forward``, which goes to the tape in force, if any. Until then its ops are seen one by one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from recompute.engine.cut.ops import IN_FUNCTION, Kind, OpFacts
from recompute.engine.reachable_objects import taken_apart
from recompute.engine.tape.function_writes import LearnedWrites
from recompute.engine.thread_state import local

_peek_transform = torch._C._functorch.peek_interpreter_stack
_SEEN = (
    "torch._library", "torch.distributed.tensor.", "torch.distributed._functional_collectives",
    "torchao.float8.", "torchao.quantization.",
)  # fmt: skip
"""Modules whose custom Functions, forward and backward, only call ops that the dispatcher sees."""


class FunctionOp:
    """A custom Function as the op of a step."""

    tags: tuple[Any, ...] = ()

    def __init__(self, function: Any):
        self._function = weakref.ref(function)
        self.facts = OpFacts(function.__name__, Kind.OPAQUE, reason=IN_FUNCTION)
        self.writes: dict[Any, LearnedWrites] = {}
        """The findings of its runs, by their kinds."""

    @property
    def function(self) -> Any:
        return self._function()

    def __repr__(self) -> str:
        return self.facts.name


_ops: weakref.WeakKeyDictionary[Any, FunctionOp] = weakref.WeakKeyDictionary()


def function_op(function: Any) -> FunctionOp:
    """The op of a Function. There is one of each, so that steps are compared by it."""
    op = _ops.get(function)
    return _ops.setdefault(function, FunctionOp(function)) if op is None else op


def is_seen(function: Any) -> bool:
    """Whether all that a custom Function does are ops that the dispatcher sees."""
    return getattr(function, "seen_by_dispatcher", False) or function.__module__.startswith(_SEEN)


def make_whole(function: Any) -> bool:
    """From now on, tapes run each forward of a custom Function as one step. Returns whether that is new."""
    owner = next(kind for kind in function.__mro__ if "forward" in vars(kind))
    forward = vars(owner)["forward"]
    if isinstance(forward, _WholeForward):
        return False
    owner.forward = _WholeForward(forward)
    return True


class _WholeForward:
    """The ``forward`` of a Function's class, which goes to the tape in force, or to its stand-in."""

    def __init__(self, forward: Any):
        self.__wrapped__ = forward  # by this name walks through code find it

    def __get__(self, instance: Any, function: Any = None) -> Any:
        forward = self.__wrapped__.__get__(instance, function)
        if (stand_in := local.function_stand_in) is not None:  # another op of a graph runs on tensors without values
            return _OnTape(forward, lambda op, _, *call: stand_in(op, *call), function_op(function))
        if not local.active_frames or local.regenerating:
            return forward
        runs = (getattr(frame, "run_function", None) for frame in reversed(local.active_frames))
        run = next(filter(None, runs), None)
        return forward if run is None else _OnTape(forward, run, function_op(function))


class _OnTape:
    """A Function's forward, as a tape runs it."""

    def __init__(self, forward: Callable[..., Any], run: Callable[..., Any], op: FunctionOp):
        self._forward, self._run, self._op = forward, run, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _peek_transform() is not None:  # it is given tensors without storages, and its ops are seen one by one
            return self._forward(*args, **kwargs)
        given = args
        forward = self._forward
        if args and isinstance(args[0], FunctionCtx):
            forward, given = functools.partial(forward, args[0]), args[1:]
        return self._run(self._op, forward, given, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)  # torch reads the signature from the code


def context_of(forward: Callable[..., Any]) -> Any:
    """The ctx of a forward that a tape runs; None if it has none."""
    return forward.args[0] if isinstance(forward, functools.partial) else None


def caller_of_function() -> tuple[FrameType, int]:
    """The frame that calls the custom Function whose forward a tape is about to run, and where in its code it does."""
    frame: Any = sys._getframe(1)
    while frame.f_code is not _OnTape.__call__.__code__:
        frame = frame.f_back
    return frame.f_back, frame.f_back.f_lasti


def is_in_function(outermost: CodeType) -> bool:
    """Whether a custom Function is running, whose kernels may write to memory unseen.

    outermost: the code of the caller at which the search for such a Function ends.
    """
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not outermost:
        if (function := _function_of(frame.f_code)) is not None:
            return not is_seen(function)
        frame = frame.f_back  # type: ignore[assignment]
    return False


@functools.lru_cache(4096)
def _function_of(code: CodeType) -> Any:
    """The custom ``autograd.Function`` whose forward has this code; None for any other code."""
    if code.co_filename == __file__:
        return None
    pending = [torch.autograd.Function]
    while pending:
        kind = pending.pop()
        if any(function.__code__ is code for function in taken_apart(kind.forward)[0]):
            if not is_seen(kind):
                make_whole(kind)
            return kind
        pending += kind.__subclasses__()
    return None


class Reached:
    """The tensors that were there before a Function ran and that its ops or kernels have reached, one of a storage."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._keys: set[int] = set()
        self._made: set[int] = set()
        self.handed_out: set[int] = set()
        """The storages that were handed out as arrays."""

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key not in self._keys and key not in self._made:
                self._keys.add(key)
                self.tensors.append(tensor)

    def make(self, tensors: Iterable[Tensor]) -> None:
        """An op of the Function has made these."""
        self._made.update(key for tensor in tensors if (key := tensor.untyped_storage()._cdata) not in self._keys)
