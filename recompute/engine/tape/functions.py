"""Custom ``autograd.Function``s in a region: a tape takes a forward of one for a single step, which never runs again.

Its kernels may write to memory unseen, so what it makes is kept, and what it is given counts as overwritten. The tape is
set aside while it runs. A Function that says ``seen_by_dispatcher`` only calls ops that a tape sees, and is no step.

Nobody tells of a Function's call: ``apply`` is C++. So the first op by which a Function is met gives its class another
``forward``, which goes to the tape that is in force, if any. Until then ops are looked at one by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from recompute.engine.cut.ops import Kind, OpFacts
from recompute.engine.modes import count_dispatch_modes, dispatch_modes, function_modes, under
from recompute.engine.reachable_objects import taken_apart
from recompute.engine.thread_state import local

_SEEN = ("torch._library", "torch.distributed.tensor.", "torch.distributed._functional_collectives")
"""Modules whose custom Functions only call ops that the dispatcher sees."""


class FunctionOp:
    """A custom Function as the op of a step."""

    tags: tuple[Any, ...] = ()

    def __init__(self, function: Any):
        self.function = function
        self.facts = OpFacts(function.__name__, Kind.OPAQUE, reason="made inside a custom autograd.Function")

    def __repr__(self) -> str:
        return self.facts.name


function_op = functools.cache(FunctionOp)
"""The op of a Function. There is one of each, so that steps are compared by it."""


def is_seen(function: Any) -> bool:
    """Whether all that a custom Function does are ops that the dispatcher sees."""
    return getattr(function, "seen_by_dispatcher", False) or function.__module__.startswith(_SEEN)


def make_whole(function: Any) -> bool:
    """Have tapes told, from now on, of each forward of a custom Function. Returns whether they were not before."""
    owner = next(kind for kind in function.__mro__ if "forward" in vars(kind))
    forward = vars(owner)["forward"]
    if isinstance(forward, _WholeForward):
        return False
    owner.forward = _WholeForward(forward)
    return True


class _WholeForward:
    """The ``forward`` of a Function's class, which goes to the tape in force."""

    def __init__(self, forward: Any):
        self._forward = forward

    def __get__(self, instance: Any, function: Any = None) -> Any:
        forward = self._forward.__get__(instance, function)
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
        given = args
        forward = self._forward
        if args and isinstance(args[0], FunctionCtx):
            forward, given = functools.partial(forward, args[0]), args[1:]
        return self._run(self._op, forward, given, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)  # torch reads the signature from the code


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


@contextmanager
def set_aside(mode: Any) -> Iterator[None]:
    """The span in which a dispatch mode sees no ops."""
    if torch._C._get_dispatch_stack_at(count_dispatch_modes() - 1) is mode:
        torch._C._pop_torch_dispatch_stack(None)
        try:
            yield
        finally:
            torch._C._push_on_torch_dispatch_stack(mode)
        return
    with under([each for each in dispatch_modes() if each is not mode], function_modes()):
        yield
