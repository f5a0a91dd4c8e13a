"""Traces a module's forward by ``torch.fx``, and refuses what a trace would not tell.

A trace has the ops that a forward calls on its arguments, and nothing of the Python around them. So it ends with an
error where forward asks what type an argument has, changes one in place by an operator, or runs a part of itself under
other settings of torch, as in a ``no_grad`` block. It also ends where forward is about to change anything that stays,
as a list of activations: see ``careful_calls``.
"""

from __future__ import annotations

import dis
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from recompute.compiled.autocast_settings import Autocast
from recompute.engine.modes import dispatch_modes, function_modes, under
from recompute.engine.numerics import Numerics
from recompute.engine.saved_tensors import top_hooks
from recompute.substitution.careful_calls import ask, careful


class _Proxy(fx.Proxy):
    """Stands for a tensor. Refuses what a trace of it would hide."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """``isinstance`` asks for this. A forward would take the branch for what is no tensor, without a trace."""
        asking = sys._getframe(1).f_code
        if asking in _QUESTIONS and self.tracer.is_tracing:  # type: ignore[attr-defined]
            raise fx.proxy.TraceError("a question about an argument's type")
        return _Proxy  # an op of torch asks as well, when it is called

    def __iter__(self) -> Iterator[Any]:
        """Items, where they are assigned to that many names. fx's own would keep the frame of forward alive."""
        asking = sys._getframe(1)
        instruction = next(each for each in dis.get_instructions(asking.f_code) if each.offset == asking.f_lasti)
        if instruction.opname != "UNPACK_SEQUENCE":
            raise fx.proxy.TraceError("a loop over a value")
        create, count = self.tracer.create_proxy, instruction.argval
        return iter([create("call_function", operator.getitem, (self, index), {}) for index in range(count)])

    def _in_place(self, other: Any) -> Any:
        """A trace cannot tell an operator that changes its left side from one that makes a new value."""
        raise fx.proxy.TraceError("an operation in place")

    def __iadd__(self, other: Any) -> Any:
        """Something may be added in place. A formula says more of it: see ``_FormulaBuilder``."""
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = __ifloordiv__ = __imod__ = _in_place


_QUESTIONS = (ask.__code__, torch.is_tensor.__code__)


class _Surroundings:
    """The settings of torch that decide, beside an op's arguments, what it computes and what gradient it has."""

    def __init__(self) -> None:
        self._numerics = Numerics()
        self._others = _other_settings()

    def are_in_force(self) -> bool:
        return self._numerics.are_in_force() and self._others == _other_settings()


def _other_settings() -> tuple[Any, ...]:
    gradients = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return gradients, Autocast(), top_hooks(), function_modes(), dispatch_modes()


class Tracer(fx.Tracer):
    """Traces a module's own forward, in which submodules are calls. Those that do nothing are passed over.

    An autograd Function is a call of its class, whose backward no trace of its forward would tell.
    """

    proxy_buffer_attributes = True
    takes_one_argument = True
    """Whether it is for forwards with one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dropouts: list[str] = []
        """The names of dropouts that were passed over."""
        self._surroundings: _Surroundings | None = None
        """The settings with which forward began."""
        self.is_tracing = False

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        _, args = super().create_args_for_root(root_fn, is_module, concrete_args)
        return careful(root_fn), args

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        self.is_tracing = True
        try:
            # A mode around, as ``torch.device`` is one, is not in force while it looks at an op. So none is here.
            with _functions_as_calls(), under(dispatch_modes(), ()):
                return super().trace(root, concrete_args)
        finally:
            self.is_tracing = False

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if self._surroundings is None:
            self._surroundings = _Surroundings()
        elif kind != "output" and not self._surroundings.are_in_force():
            raise fx.proxy.TraceError("an op under other settings of torch")
        return super().create_node(kind, *args, **kwargs)

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if type(m) is nn.Dropout and drops_nothing(m) and not kwargs:
            self.dropouts.append(self.path_of_module(m))
            return args[0]
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class TracerInDtype(Tracer):
    """Traces a run in which the input and all parameters have one dtype, for a forward that asks which, as T5's norm.

    Other forwards end with an error where they branch on an answer.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def to_bool(self, obj: fx.Proxy) -> bool:
        node = obj.node
        if node.op == "call_function" and node.target in COMPARISONS:
            dtypes = [each if isinstance(each, torch.dtype) else self._asked_for(each) for each in node.args]
            if None not in dtypes:
                return COMPARISONS[node.target](*dtypes)
        return super().to_bool(obj)

    def _asked_for(self, question: Any) -> torch.dtype | None:
        """The dtype that a node asks for; None if it asks for none, or for one that is not known."""
        if not isinstance(question, fx.Node) or question.target is not getattr or question.args[1] != "dtype":
            return None
        of: Any = question.args[0]
        is_parameter = of.op == "get_attr" and str(of.target) in dict(self.root.named_parameters())
        return self._dtype if of.op == "placeholder" or is_parameter else None


COMPARISONS: dict[Any, Callable[[Any, Any], bool]] = {each: each for each in (operator.eq, operator.ne)}


def drops_nothing(dropout: Any) -> bool:
    """Whether a dropout is passed over in traces: a module whose probability is 0, or that probability itself."""
    return dropout.p == 0 if type(dropout) is nn.Dropout else type(dropout) in (float, int) and dropout == 0


_patching = threading.RLock()


@contextmanager
def _functions_as_calls() -> Iterator[None]:
    """Inside, to apply an autograd Function to a proxy is to make a proxy."""
    patched: Any = Function
    with _patching:
        original = vars(Function)["apply"]

        def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
            proxy = next((each for each in tree_leaves((args, kwargs)) if type(each) is _Proxy), None)
            if proxy is None:  # on another thread, for one
                return original.__get__(None, cls)(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", cls, args, kwargs)

        patched.apply = classmethod(apply)
        try:
            yield
        finally:
            patched.apply = original
