"""Changes to torch.compile's frontend while it traces a region: see ``guards``. Other traces are as ever.

The graph of a region must make the calls that the region has made. That is compared, so the frontend may also trace
code that a compiler should leave alone. And it takes each custom ``autograd.Function`` whole.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject

from recompute.compiled.called_methods import CalledMethods
from recompute.compiled.calls import FunctionResult, ObjectUse, Use
from recompute.compiled.function_calls import graph_call, takes_gradient
from recompute.compiled.recording import NotCapturable, Recording
from recompute.engine.tape.functions import FunctionOp, function_op, is_seen, make_whole
from recompute.engine.tape.op_arguments import LISTS
from recompute.engine.thread_state import local
from recompute.source_files import OURS, lies_in


class _LastTrace(threading.local):
    """The trace that goes on in this thread, or the last one."""

    asks = False
    """Whether the user's code asked if it is compiled: otherwise it may do something else."""
    meets = False
    """Whether it has a custom ``autograd.Function`` that no tape has looked into so far."""
    called: CalledMethods | None = None
    """Where to note the methods that the traced code calls."""


last_trace = _LastTrace()
ASKS = "its forward asks whether torch.compile traces it"


def has_effects() -> bool:
    """Whether the code that is traced changes anything that was there before. A graph does not tell."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # it takes a second to load
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks or effects.save_for_backward:
        return True
    changed = filter(effects.is_modified, effects.id_to_variable.values())
    return any(not isinstance(each.mutation_type, (AttributeMutationNew, ValueMutationNew)) for each in changed)


def depends_on_sizes() -> bool:
    """Whether the code that is traced branches on a size that is not fixed."""
    mode: Any = TracingContext.get().fake_mode
    return bool(mode.shape_env.guards)


def names_read() -> frozenset[str]:
    """The names in the guards of the code that is traced. They lead to all that it has read in Python."""
    guards = TracingContext.get().guards_context.dynamo_guards
    return frozenset(word for guard in guards for word in re.findall(r"\w+", guard.name))


TORCHS = os.path.dirname(torch.__file__)


def may_ask(frame: Any) -> bool:
    """Whether a frame may ask if it is compiled, because it only chooses among ops that do the same.

    Those ops are compared with the recorded ones. transformers asks so in its own code. Its function
    ``is_torchdynamo_compiling`` may have other callers, so the code that calls it is looked at, too.
    """
    if lies_in(frame.f_code.co_filename, *OURS, TORCHS):
        return True
    theirs = getattr(sys.modules.get("transformers"), "__file__", None)
    folders = (*OURS, TORCHS, *([] if theirs is None else [os.path.dirname(theirs)]))
    asking = [each for each in (frame, getattr(frame, "parent", None)) if each is not None]
    return all(lies_in(each.f_code.co_filename, *folders) for each in asking)


def _replacing(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """A decorator: while a region is traced, its function runs in the place of a method, which it takes first."""
    method = getattr(owner, name)

    def put(replacement: Callable[..., Any]) -> None:
        @functools.wraps(method)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(method, *args, **kwargs) if local.is_tracing else method(*args, **kwargs)

        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if is_static else replaced)

    return put


@functools.cache
def prepare_frontend() -> None:
    """Put all of this in place, for traces of regions."""
    _notice_questions_and_calls()
    _take_functions_whole()
    _look_into_disabled()
    _name_torchs_classes()
    _pass_locks()
    _guard_identities()
    if hasattr(torch.compiler, "_compile_session_context"):
        # Since torch 2.13 ``torch.compiler.is_compiling()`` is true in all threads while one of them traces.
        _replacing(torch.compiler, "_compile_session_context")(lambda _: nullcontext())


def _notice_questions_and_calls() -> None:
    """Have torch's frontend tell when code asks if it is compiled, and which methods it calls."""
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator, InstructionTranslatorBase

    @_replacing(InstructionTranslatorBase, "mark_inconsistent_side_effects")
    def noticed(mark: Callable[..., None], self: Any) -> None:
        last_trace.asks = last_trace.asks or not may_ask(self)
        mark(self)

    @_replacing(InliningInstructionTranslator, "build_inline_tracer")
    def noting(begin: Callable[..., Any], parent: Any, function: Any, args: Any, *others: Any, **options: Any) -> Any:
        own = getattr(function, "fn", None)
        function = _enabled(parent, function, own) or _traced_as(parent, own) or function
        if last_trace.called is not None and args:
            last_trace.called.note(getattr(function, "fn", None), _value_of(args[0]))
        return begin(parent, function, args, *others, **options)


def _take_functions_whole() -> None:
    """Have torch's frontend make each custom ``autograd.Function`` one call of the graph, and not trace its Python."""
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    @_replacing(AutogradFunctionVariable, "call_method")
    def whole(call: Callable[..., Any], self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "apply" and (other := _traced_as(translator, self.fn_cls)) is not None:
            return other.call_function(translator, args, kwargs)
        if name != "apply" or is_seen(self.fn_cls):
            return call(self, translator, name, args, kwargs)
        last_trace.meets = make_whole(self.fn_cls) or last_trace.meets
        target = graph_call(function_op(self.fn_cls))
        proxies = tuple([_proxy_of(translator, each) for each in args])
        named = {key: _proxy_of(translator, each) for key, each in kwargs.items()}
        node = translator.output.create_proxy("call_function", target, proxies, named)
        return wrap_fx_proxy(tx=translator, proxy=node)


def _proxy_of(translator: Any, variable: Any) -> Any:
    """The node of the graph for an argument of a custom Function."""
    try:
        return variable.as_proxy()
    except (NotImplementedError, torch._dynamo.exc.Unsupported):
        return _object_input(translator, variable.realize())


_OBJECT = "recompute.object"


def _object_input(translator: Any, variable: Any) -> Any:
    """The node of a graph's input that is an object, which torch's frontend would not pass to a graph.

    The frontend changes objects, as Python has done, only after the graph has run. So this one must be as it was.
    """
    from torch._dynamo.variables.builder import GraphArg

    value = getattr(variable, "value", None)
    if value is None or variable.source is None or translator.output.side_effects.is_modified(variable):
        return variable.as_proxy()
    inputs = translator.output.root_tracer
    known = next((n for n in inputs.graph.nodes if n.op == "placeholder" and n.meta.get(_OBJECT) is value), None)
    if known is not None:
        return inputs.proxy(known)
    proxy = inputs.create_graph_input("an_object", type(value), None, source=variable.source)
    proxy.node.meta |= {"grapharg": GraphArg(variable.source, None, False, None, is_tensor=False), _OBJECT: value}
    return proxy


def objects_of(graph: torch.fx.Graph) -> list[int]:
    """The positions of a graph's inputs that are objects."""
    inputs = [node.meta for node in graph.nodes if node.op == "placeholder"]
    opaque = FakeScriptObject  # a process group, to the frontend of torch 2.14
    return [n for n, meta in enumerate(inputs) if _OBJECT in meta or isinstance(meta.get("example_value"), opaque)]


def stand_in_for(recording: Recording) -> Callable[..., Any]:
    """``(op, args, kwargs) -> outputs``: tensors like those that Functions gave, while a graph is traced."""

    def stand_in(op: FunctionOp, args: tuple, kwargs: dict[str, Any]) -> Any:
        for index, (results, *_) in recording.functions.items():
            call = recording.calls[index]
            if call.op is op and not kwargs and _are_alike(call.args, args):
                takes = torch.is_grad_enabled() and any(map(takes_gradient, args))
                outputs = tuple([_made_like(result, takes=takes) for result in results])
                return outputs if call.is_sequence else outputs[0]
        raise NotCapturable(f"{op} gets other arguments in the graph than in eager code")

    return stand_in


def _are_alike(recorded: Any, given: Any) -> bool:
    if isinstance(given, Tensor):
        return type(recorded) is Use and recorded.layout[0] == given.shape and recorded.layout.dtype is given.dtype
    if type(recorded) in LISTS and isinstance(given, (list, tuple)):  # torch.fx has a list of its own
        return len(recorded) == len(given) and all(map(_are_alike, recorded, given))
    return type(recorded) is ObjectUse or (type(recorded) is type(given) and bool(recorded == given))


def _made_like(result: Any, *, takes: bool) -> Any:
    if type(result) is not FunctionResult:
        return result
    made = result.layout.empty(result.device)
    return made.requires_grad_(takes and (made.is_floating_point() or made.is_complex()))


def _enabled(translator: Any, variable: Any, function: Any) -> Any:
    """The frontend's variable for the function in ``torch.compiler.disable(function)`` in a traced region, else None.

    Its author keeps it from compilers. Here nothing is compiled: the calls of a graph are compared with those that ran.
    """
    own = getattr(function, "_torchdynamo_orig_callable", None)
    if own is None or not inspect.getattr_static(function, "_torchdynamo_disable", False):
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
        if enabled is None:
            return call(self, translator, args, kwargs)
        return enabled.call_function(translator, args, kwargs)


def _name_torchs_classes() -> None:
    """Have torch's frontend know the names of torch's classes: PEFT calls methods of ``type(parameter).__module__``."""
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import GetAttrVariable

    @_replacing(GetAttrVariable, "call_method")
    def named(call: Callable[..., Any], self: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
        owner = getattr(self.obj, "value", None)
        if isinstance(owner, type) and self.name in ("__module__", "__name__", "__qualname__"):
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
        if type(value) not in locks:
            return wrap(self, value)
        self.install_guards(GuardBuilder.TYPE_MATCH)
        return NullContextVariable()


def _guard_identities() -> None:
    """Have torch's frontend guard objects that code compares by identity: it takes the answer for a constant."""
    from torch._dynamo import variables
    from torch._dynamo.variables.builtin import BuiltinVariable

    compared = operator.is_, operator.is_not, operator.eq, operator.ne

    @_replacing(BuiltinVariable, "call_function")
    def comparing(call: Callable[..., Any], self: Any, translator: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in compared and len(args) == 2:
            _guard_compared(*args, by_identity=self.fn in compared[:2])
        return call(self, translator, args, kwargs)

    protocol = getattr(variables, "object_protocol", None)
    if protocol is not None:  # since torch 2.12 containers compare what is in them by it

        @_replacing(protocol, "vt_identity_compare")
        def identifying(compare: Callable[..., Any], left: Any, right: Any) -> Any:
            _guard_compared(left, right, by_identity=False)
            return compare(left, right)


def _guard_compared(*compared: Any, by_identity: bool) -> None:
    """by_identity: whatever methods they have. Else only objects without an ``__eq__`` are compared by identity."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables import ConstDictVariable, ListVariable, UserDefinedObjectVariable

    compared = tuple([each.realize() for each in compared])
    kinds = (UserDefinedObjectVariable, ConstDictVariable, ListVariable) if by_identity else UserDefinedObjectVariable
    if not all(isinstance(each, kinds) for each in compared):
        return
    types = {each.python_type() for each in compared}
    if len(types) > 1 or not (by_identity or types.pop().__eq__ is object.__eq__):
        return  # objects of two types are never the same one
    sources = [each.source for each in compared if each.source is not None]
    install_guard(*[source.make_guard(GuardBuilder.ID_MATCH) for source in sources])


def _traced_as(translator: Any, function: Any) -> Any:
    """The stand-in for a function, or for the ``apply`` of an ``autograd.Function``, in a traced region; else None.

    A graph could not have some functions of libraries as they are. A stand-in makes the calls that its function makes
    where a region runs alike.
    """
    other = None if function is None else _unwaited(translator, function) or _settled(function)
    if other is None:
        return None
    from torch._dynamo.variables.base import VariableTracker  # it takes a second to load

    return VariableTracker.build(translator, other)


def _unwaited(translator: Any, function: Any) -> Any:
    """For the wrapper of a collective's result: compilers get a result that was waited for.

    Eager code waits for it where it is read. Where another dimension than the first is gathered, it waits at once.
    """
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    wraps = [getattr(collectives, name, None) for name in ("_maybe_wrap_tensor", "_FromTorchTensor")]
    if not any(each is function for each in wraps):
        return None
    dim = translator.symbolic_locals.get("gather_dim")
    return collectives.wait_tensor if dim is not None and _value_of(dim) != 0 else _wrapped


def _wrapped(result: Tensor) -> Any:
    return torch.ops._c10d_functional._wrap_tensor_autograd(result)


def _settled(function: Any) -> Any:
    """For the forward of bitsandbytes' Linear of 8 bits, which moves its codes about in each call."""
    kind = getattr(sys.modules.get("bitsandbytes.nn.modules"), "Linear8bitLt", None)
    return _of_codes if kind is not None and function is kind.forward else None


def _of_codes(self: Any, x: Tensor) -> Any:
    from bitsandbytes import matmul

    state = self.state
    has_moved = self.weight.CB is None and state.CB is not None and not state.has_fp16_weights
    is_cast = self.bias is None or self.bias.dtype == x.dtype
    if not has_moved or not is_cast or state.is_training != self.training:
        raise NotImplementedError("the first call of bitsandbytes' Linear8bitLt moves its weight")
    return matmul(x, self.weight, bias=self.bias, state=state)


def _value_of(variable: Any) -> Any:
    """The object or the class that a variable of torch's frontend stands for; None for a tensor, say.

    To look at it must not guard it: the code that is traced may never do so.
    """
    return vars(variable.realize()).get("value") if variable.is_realized() else variable.peek_value()
