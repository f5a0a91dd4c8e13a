"""torch.compile's frontend, which says what of the Python world the graph of a call depends on.

A call that its guards accept goes straight to what was made of the graph. Any other is not compiled anew, as
``torch.compile`` would: its caller is told, and runs it in another way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

_GUARD_ALL = {
    "skip_nnmodule_hook_guards": False,  # hooks that modules get later, or lose
    "skip_tensor_guards_with_matching_dict_tags": False,  # what changes of a parameter that stays the same object
}
"""Settings of torch's frontend by which it leaves out no guard for the sake of speed."""


class _Local(threading.local):
    is_tracing = False
    asks = False


_local = _Local()


def is_tracing() -> bool:
    """Whether it is for a captured region that torch's frontend traces, and not for a user's ``torch.compile``."""
    return _local.is_tracing


is_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def asks_about_tracing() -> bool:
    """Whether the user's code has asked, of the call that is traced, if it is: it may do something else otherwise."""
    return _local.asks


_OURS = str(Path(__file__).parents[1])
_TORCHS = str(Path(torch.__file__).parent)


@functools.cache
def _prepare_frontend() -> None:
    """Have torch's frontend tell when user code asks whether it is compiled; and not claim that to other threads."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    mark = InstructionTranslatorBase.mark_inconsistent_side_effects

    @functools.wraps(mark)
    def noticed(self: Any) -> None:
        if _local.is_tracing and not self.f_code.co_filename.startswith((_OURS, _TORCHS)):
            _local.asks = True
        mark(self)

    InstructionTranslatorBase.mark_inconsistent_side_effects = noticed  # type: ignore[method-assign]

    # Since torch 2.13 ``torch.compiler.is_compiling()`` is true in all threads while one of them traces.
    session = getattr(torch.compiler, "_compile_session_context", None)
    if session is not None:

        def context() -> AbstractContextManager[None]:
            return nullcontext() if _local.is_tracing else session()

        torch.compiler._compile_session_context = context  # type: ignore[assignment]


MISSED = object()
"""In the place of a result: no graph is known for this call."""


class _Miss(Exception):
    """No graph is known for a call."""


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class GuardedCalls:
    """Calls of functions that are alike, each kind of which ``backend`` is given the graph of.

    backend: ``(graph, example inputs) -> what runs in its place``, which is given the same inputs.
    """

    def __init__(self, backend: Callable[..., Callable[..., Any]]):
        import torch._dynamo.eval_frame as frames  # which takes a second to load
        from torch._dynamo.types import ConvertFrameReturn

        self._set: Any = frames.set_eval_frame
        # Guards are found by code objects: with one of its own nobody else's are looked at.
        self._call = FunctionType(_call.__code__.replace(co_name="captured_call"), globals(), "captured_call")
        context: Any = torch._dynamo.optimize(backend=backend, nopython=True, dynamic=False)
        self._trace = context(self._call)

        code = self._call.__code__

        def miss(frame: Any, *_: Any) -> Any:
            if frame.f_code is code:
                raise _Miss
            return ConvertFrameReturn()  # what is called inside runs as it is

        miss._torchdynamo_orig_backend = context.callback  # type: ignore[attr-defined]  # whose guards it is about
        self._miss = miss

    def trace(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, whose graph is taken first."""
        _prepare_frontend()
        before, _local.is_tracing = _local.is_tracing, True
        _local.asks = False
        try:
            with torch._dynamo.config.patch(_GUARD_ALL):
                return self._trace(function, args, kwargs)
        finally:
            _local.is_tracing = before

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` by a graph that was taken before, or ``MISSED``, and nothing has run."""
        before = self._set(self._miss)
        try:
            return self._call(function, args, kwargs)
        except _Miss:
            return MISSED
        finally:
            self._set(before)
