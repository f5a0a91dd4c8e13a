"""Graphs of calls by torch.compile's frontend, with guards on all that a graph depends on in Python.

A call that the guards accept runs the code that was made of the graph. ``torch.compile`` would compile any other call
anew. Here such a call returns ``MISSED``, and the caller runs it in another way.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch._guards import TracingContext

from recompute.compiled.called_methods import CalledMethods
from recompute.compiled.frontend import last_trace, prepare_frontend, stand_in_for
from recompute.compiled.recording import NotCapturable, Recording
from recompute.engine.tape.functions import is_seen
from recompute.engine.thread_state import local, swapped


@functools.cache
def _load_frontend() -> None:
    """Load it, which takes a second, on another thread: torch.fx leaves cycles that hold the frames around it.

    Those of a forward hold its tensors, and only the garbage collector would free them.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


MISSED = object()
"""The result of a call without a known graph."""


@contextmanager
def _our_functions_as_calls() -> Iterator[None]:
    """Inside, the frontend does not trace into Functions that a tape looks into, except for torch's own."""
    import torch._dynamo.trace_rules as rules

    allowed = rules._allowed_callable_ids
    kinds = [kind for kind in torch.autograd.Function.__subclasses__() if is_seen(kind)]
    added = [id(kind) for kind in kinds if id(kind) not in allowed and not kind.__module__.startswith("torch.")]
    for number in added:
        allowed.add(number)
    try:
        yield
    finally:
        for number in added:
            allowed.remove(number)


class _Miss(Exception):
    """No graph is known for a call."""


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class GuardedCalls:
    """Calls of functions that are alike. For each kind of call ``backend`` gets a graph.

    backend: ``(graph, example inputs) -> function``; the function runs in the graph's place, on the same inputs.
    Raises ``NotCapturable`` where torch's frontend is switched off.
    """

    def __init__(self, backend: Callable[..., Callable[..., Any]]):
        _load_frontend()
        import torch._dynamo.eval_frame as frames
        from torch._dynamo.types import ConvertFrameReturn

        prepare_frontend()
        self._backend = backend
        weak: Any = weakref.ref(self)  # torch holds a backend for good, and guards hold objects of models

        def taken(*given: Any) -> Any:
            for each in TracingContext.get().fake_mode.shape_env.tracked_fakes:  # type: ignore[union-attr]
                if isinstance(each.fake, torch.Tensor):
                    each.fake.grad = None  # it holds the mode, which holds the tensor: no collector sees this cycle
            return weak()._backend(*given)

        context: Any = torch._dynamo.optimize(backend=taken, nopython=True, dynamic=False)
        if getattr(context, "callback", None) is None:
            raise NotCapturable("torch.compile is switched off")
        self._set: Any = frames.set_eval_frame
        # Guards are found by code objects, so this has one of its own: nobody else's guards are looked at.
        # By the name ``torch`` the frontend takes it for code with tensors, whatever the call is given.
        code_of_its_own = _call.__code__.replace(co_name="captured_call", co_names=(*_call.__code__.co_names, "torch"))
        self._call = FunctionType(code_of_its_own, globals(), "captured_call")
        code, untouched = self._call.__code__, ConvertFrameReturn()

        def miss(frame: Any, *_: Any) -> Any:
            if frame.f_code is code:
                raise _Miss
            return untouched  # calls inside of the function run as they are

        def trace(frame: Any, *state: Any) -> Any:
            if frame.f_code is not code:
                return untouched
            with _tracing(self._methods, self._recording):
                traced = context.callback(frame, *state)
            if traced.guarded_code is None:  # torch would run the call as it is
                raise NotCapturable("torch.compile skips its forward")
            return traced

        for callback in (miss, trace):  # by this torch knows whose guards to check
            callback._torchdynamo_orig_backend = context.callback  # type: ignore[attr-defined]
        self._miss, self._trace = miss, trace
        self._recording = Recording()
        self._methods = CalledMethods()

    @property
    def are_current(self) -> bool:
        """Whether the methods that the traced calls called are the same. The guards do not look at them."""
        return self._methods.are_as_before()

    def trace(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        recording: Recording,
        reads: Iterable[Any] = (),
    ) -> Any:
        """``function(*args, **kwargs)`` by a graph, which is taken first if none is known.

        recording: of a call like this, with the results of custom Functions.
        reads: functions and modules that the call runs.
        """
        self._recording = recording
        self._methods.note_reads(reads)
        return self._under(self._trace, function, args, kwargs)

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` by a graph that was taken before. If it returns ``MISSED``, nothing has run."""
        try:
            return self._under(self._miss, function, args, kwargs)
        except _Miss:
            return MISSED

    def _under(self, callback: Any, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        before = self._set(callback)
        try:
            return self._call(function, args, kwargs)
        finally:
            self._set(before)


@contextmanager
def _tracing(methods: CalledMethods, recording: Recording) -> Iterator[None]:
    """Inside, the frontend traces a region, and notes the methods that it calls."""
    before, local.is_tracing = local.is_tracing, True
    last_trace.asks, last_trace.meets, last_trace.called = False, False, methods
    local.books.append(None)  # ops on tensors without values make no recipes
    local.function_stand_in = stand_in_for(recording)
    try:
        with (
            _our_functions_as_calls(),
            # It would measure how long guards take, and empties the caches for that: in 20 ms a graph.
            swapped(torch._dynamo.guards, "profile_guard_manager", lambda *given: 0.0),
            torch._dynamo.config.patch(
                assume_static_by_default=True,
                automatic_dynamic_shapes=False,
                skip_no_tensor_aliasing_guards_on_parameters=False,  # code may ask whether two are one
                optimize_ddp=False,  # it would cut the graph into DDP's buckets
                recompile_limit=1000,  # the callers of ``trace`` count their graphs
                record_runtime_overhead=False,  # else each call tells profilers where its graph begins
                skip_nnmodule_hook_guards=False,  # modules may get hooks later, or lose some
                skip_tensor_guards_with_matching_dict_tags=False,  # a parameter may change and stay the same object
                invalidate_compile_context_weakrefs=True,  # ``model.to`` swaps no parameter that has weak references
            ),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # if it cannot trace something, ``explain`` says so
            yield
    finally:
        local.books.pop()
        local.function_stand_in = None
        local.is_tracing, last_trace.called = before, None
