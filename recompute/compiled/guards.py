"""torch.compile's frontend. It takes the graph of a call, and its guards tell what in Python the graph depends on.

A call that the guards accept runs what was made of the graph. ``torch.compile`` would compile any other call anew. Here
the caller is told instead, and runs the call in another way.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch._guards import TracingContext

from recompute.compiled.called_methods import CalledMethods
from recompute.compiled.function_calls import graph_call, object_input, stand_in_for
from recompute.compiled.recording import NotCapturable, Recording
from recompute.compiled.traced_stand_ins import traced_as, value_of
from recompute.engine.tape.functions import function_op, is_seen, make_whole
from recompute.engine.thread_state import local, swapped
from recompute.source_files import OURS, lies_in


class _Local(threading.local):
    asks = False
    meets = False
    called: CalledMethods | None = None
    """Where to note the methods that the code being traced calls."""


_local = _Local()


def asks_about_tracing() -> bool:
    """Whether the user's code in the last traced call asked if it is compiled: otherwise it may do something else."""
    return _local.asks


def has_effects() -> bool:
    """Whether what is being traced changes anything that was there before. A graph does not tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # it takes a second to load
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks or effects.save_for_backward:
        return True
    new = (AttributeMutationNew, ValueMutationNew)
    changed = filter(effects.is_modified, effects.id_to_variable.values())
    return any(not isinstance(each.mutation_type, new) for each in changed)


def depends_on_sizes() -> bool:
    """Whether what is being traced branches on a size that is not fixed."""
    mode: Any = TracingContext.get().fake_mode
    return bool(mode.shape_env.guards)


_WORD = re.compile(r"\w+")


def names_read() -> frozenset[str]:
    """The names in the guards of what is being traced, which lead to all that it has read in Python."""
    guards = TracingContext.get().guards_context.dynamo_guards
    return frozenset(word for guard in guards for word in _WORD.findall(guard.name))


def meets_function() -> bool:
    """Whether the last traced call has a custom ``autograd.Function`` in which no tape has seen an op so far."""
    return _local.meets


_TORCHS = os.path.dirname(torch.__file__)


def _may_ask(frame: Any) -> bool:
    """Whether a frame may ask if it is compiled, because it only chooses by which ops it does the same.

    Those ops are compared with the recorded ones. transformers asks so in its own code. Its function
    ``is_torchdynamo_compiling`` may have other callers, so the code that calls it is looked at, too.
    """
    if lies_in(frame.f_code.co_filename, *OURS, _TORCHS):
        return True
    theirs = getattr(sys.modules.get("transformers"), "__file__", None)
    folders = (*OURS, _TORCHS) if theirs is None else (*OURS, _TORCHS, os.path.dirname(theirs))
    parent = getattr(frame, "parent", None)
    asking = [frame] if parent is None else [frame, parent]
    return all(lies_in(each.f_code.co_filename, *folders) for each in asking)


@functools.cache
def _load_frontend() -> None:
    """Load it, which takes a second, on another thread: torch.fx leaves cycles that hold the frames around it.

    Those of a forward hold its tensors, and only the garbage collector would free them.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


@functools.cache
def _prepare_frontend() -> None:
    """Have torch's frontend tell which methods code calls and when it asks if it is compiled.

    And have it not tell other threads that they are compiled.
    """
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase

    @_replacing(InstructionTranslatorBase, "mark_inconsistent_side_effects")
    def noticed(mark: Callable[..., None], self: Any) -> None:
        if local.is_tracing and not _may_ask(self):
            _local.asks = True
        mark(self)

    @_replacing(InliningInstructionTranslator, "build_inline_tracer")
    def noting(begin: Callable[..., Any], parent: Any, function: Any, args: Any, *others: Any, **options: Any) -> Any:
        own = getattr(function, "fn", None)
        function = _enabled(parent, function, own) or traced_as(parent, own) or function
        if local.is_tracing and _local.called is not None and args:
            _local.called.note(getattr(function, "fn", None), value_of(args[0]))
        return begin(parent, function, args, *others, **options)

    _take_functions_whole()
    _look_into_disabled()
    _name_torchs_classes()
    _pass_locks()

    # Since torch 2.13 ``torch.compiler.is_compiling()`` is true in all threads while one of them traces.
    session = getattr(torch.compiler, "_compile_session_context", None)
    if session is not None:

        def context() -> AbstractContextManager[None]:
            return nullcontext() if local.is_tracing else session()

        torch.compiler._compile_session_context = context  # type: ignore[assignment]


def _proxy_of(translator: Any, variable: Any) -> Any:
    """What stands in the graph for an argument of a custom Function."""
    try:
        return variable.as_proxy()
    except (NotImplementedError, torch._dynamo.exc.Unsupported):
        return object_input(translator, variable.realize())


def _replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Puts what it decorates in the place of a method of torch's frontend. It is given the method first."""
    method = getattr(owner, name)

    def put(replacement: Callable[..., Any]) -> None:
        @functools.wraps(method)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(method, *args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if is_static else replaced)

    return put


def _take_functions_whole() -> None:
    """Have torch's frontend make each custom ``autograd.Function`` one call of the graph, and not trace its Python."""
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    @_replacing(AutogradFunctionVariable, "call_method")
    def whole(call: Callable[..., Any], self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "apply" and (other := traced_as(translator, self.fn_cls)) is not None:
            return other.call_function(translator, args, kwargs)
        if not local.is_tracing or name != "apply" or is_seen(self.fn_cls):
            return call(self, translator, name, args, kwargs)
        _local.meets = make_whole(self.fn_cls) or _local.meets
        target = graph_call(function_op(self.fn_cls))
        proxies = tuple([_proxy_of(translator, each) for each in args])
        named = {key: _proxy_of(translator, each) for key, each in kwargs.items()}
        node = translator.output.create_proxy("call_function", target, proxies, named)
        return wrap_fx_proxy(tx=translator, proxy=node)


def _enabled(translator: Any, variable: Any, function: Any) -> Any:
    """What stands for the function in ``torch.compiler.disable(function)`` while a region is traced, else None.

    Its author keeps it from compilers. Here nothing is compiled: what a graph calls is compared with what has run.
    """
    own = getattr(function, "_torchdynamo_orig_callable", None)
    if not local.is_tracing or own is None or not inspect.getattr_static(function, "_torchdynamo_disable", False):
        return None
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source = variable.source and AttrSource(variable.source, "_torchdynamo_orig_callable")
    return VariableTracker.build(translator, own, source)


def _look_into_disabled() -> None:
    """Have torch's frontend trace functions under ``torch.compiler.disable``."""
    from torch._dynamo.variables.functions import SkipFunctionVariable

    @_replacing(SkipFunctionVariable, "call_function")
    def looking(call: Callable[..., Any], self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        enabled = _enabled(translator, self, self.value)
        return (
            call(self, translator, args, kwargs) if enabled is None else enabled.call_function(translator, args, kwargs)
        )


def _name_torchs_classes() -> None:
    """Have torch's frontend know the names of torch's classes: PEFT calls methods of ``type(parameter).__module__``."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import GetAttrVariable

    @_replacing(GetAttrVariable, "call_method")
    def named(call: Callable[..., Any], self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        owner = getattr(self.obj, "value", None)
        if local.is_tracing and isinstance(owner, type) and self.name in ("__module__", "__name__", "__qualname__"):
            self = VariableTracker.build(translator, getattr(owner, self.name))
            return self.call_method(translator, name, args, kwargs)
        return call(self, translator, name, args, kwargs)


def _pass_locks() -> None:
    """Have torch's frontend take a lock for a context that does nothing: a graph has nothing to lock."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.ctx_manager import NullContextVariable

    locks = type(threading.Lock()), type(threading.RLock())

    @_replacing(VariableBuilder, "_wrap")
    def passing(wrap: Callable[..., Any], self: Any, value: Any) -> Any:
        if not local.is_tracing or type(value) not in locks:
            return wrap(self, value)
        self.install_guards(GuardBuilder.TYPE_MATCH)
        return NullContextVariable()


MISSED = object()
"""Is returned in the place of a result: no graph is known for this call."""


@contextmanager
def _our_functions_as_calls() -> Iterator[None]:
    """The span in which the frontend does not trace into Functions that a tape looks into, but torch's own."""
    import torch._dynamo.trace_rules as rules

    allowed = rules._allowed_callable_ids
    kinds = torch.autograd.Function.__subclasses__()
    ours = [kind for kind in kinds if is_seen(kind) and not kind.__module__.startswith("torch.")]
    added = [id(function) for function in ours if id(function) not in allowed]
    for number in added:
        allowed.add(number)
    try:
        yield
    finally:
        for number in added:
            allowed.remove(number)


def _untimed_guards() -> AbstractContextManager[Any]:
    """The span in which the frontend does not measure how long guards take: it empties the caches, in 20 ms a graph."""
    import torch._dynamo.guards as guards

    return swapped(guards, "profile_guard_manager", lambda *given: 0.0)


class _Miss(Exception):
    """No graph is known for a call."""


def _call(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


class GuardedCalls:
    """Calls of functions that are alike. For each kind of call there is a graph, which ``backend`` gets.

    backend: ``(graph, example inputs) -> what runs in its place``, which takes the same inputs.
    Raises ``NotCapturable`` where torch's frontend is switched off.
    """

    def __init__(self, backend: Callable[..., Callable[..., Any]]):
        _load_frontend()
        import torch._dynamo.eval_frame as frames
        from torch._dynamo.types import ConvertFrameReturn

        _prepare_frontend()
        weak: Any = weakref.WeakMethod(backend)  # torch holds a backend for good, and guards hold objects of models
        context: Any = torch._dynamo.optimize(backend=lambda *given: weak()(*given), nopython=True, dynamic=False)
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
            return untouched  # what the function calls runs as it is

        def trace(frame: Any, *state: Any) -> Any:
            if frame.f_code is not code:
                return untouched
            with _tracing(self._methods, self._recording):
                traced = context.callback(frame, *state)
            if traced.guarded_code is None:  # torch would run the call as it is
                raise NotCapturable("torch.compile passes it by")
            return traced

        for callback in (miss, trace):  # by this torch knows whose guards to check
            callback._torchdynamo_orig_backend = context.callback  # type: ignore[attr-defined]
        self._miss, self._trace = miss, trace
        self._recording = Recording()
        self._methods = CalledMethods()

    @property
    def are_current(self) -> bool:
        """Whether the methods that the traced calls called are what they were. The guards do not tell that."""
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

        recording: of a call like this, which tells what custom Functions give.
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
    """The span in which the frontend traces a region, and notes the methods that it calls."""
    before, local.is_tracing = local.is_tracing, True
    _local.asks, _local.meets, _local.called = False, False, methods
    local.books.append(None)  # what runs on tensors without values makes no recipes
    local.function_stand_in = stand_in_for(recording)
    try:
        with (
            _our_functions_as_calls(),
            _untimed_guards(),
            torch._dynamo.config.patch(
                assume_static_by_default=True,
                automatic_dynamic_shapes=False,
                optimize_ddp=False,  # it would cut the graph into DDP's buckets
                record_runtime_overhead=False,  # else each call tells profilers where its graph begins
                skip_nnmodule_hook_guards=False,  # modules may get hooks later, or lose some
                skip_tensor_guards_with_matching_dict_tags=False,  # a parameter may change and stay the same object
            ),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # if it cannot trace something, ``explain`` says so
            yield
    finally:
        local.books.pop()
        local.function_stand_in = None
        local.is_tracing, _local.called = before, None
