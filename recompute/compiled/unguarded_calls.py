"""Calls on tensors without values, as an estimate makes them: the graph of a call is the call itself.

Nobody changes the model meanwhile, so no guard looks at Python's state. Calls of one module are alike if their
tensors, and those of the module, are of the same kinds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from recompute.compiled.frontend import ASKS, TORCHS, may_ask
from recompute.compiled.guards import MISSED
from recompute.compiled.recording import NotCapturable
from recompute.engine.cut.layout import Layout
from recompute.engine.tape.op_arguments import is_constant
from recompute.engine.thread_state import swapped
from recompute.source_files import OURS, lies_in


def modules_in(function: Callable[..., Any], args: tuple) -> Iterable[nn.Module]:
    """The module whose forward ``function`` is, or which it is given, and those inside of it."""
    module = next((m for m in (getattr(function, "__self__", None), *args[:1]) if isinstance(m, nn.Module)), None)
    return () if module is None else module.modules()


def tensors_on(modules: Iterable[nn.Module]) -> dict[tuple[int, str], Tensor]:
    """The tensors that modules have as attributes, by the number of the module and the name."""
    tables = [(n, {**vars(m), **m._parameters, **m._buffers}) for n, m in enumerate(modules)]
    return {(n, name): each for n, table in tables for name, each in table.items() if isinstance(each, Tensor)}


def kind_of(value: Tensor) -> Hashable:
    """Code that was made for a tensor depends on this."""
    layout = Layout.of(value)
    return layout, value.device, value.requires_grad, isinstance(value, nn.Parameter)


class _Call(NamedTuple):
    run: Callable[[], Any]
    tensors: Sequence[Tensor]
    modules: Sequence[nn.Module]
    """Custom Functions may be given these."""
    kind: Hashable
    """Equal for calls that are alike."""

    @staticmethod
    def of(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> _Call:
        modules = list(modules_in(function, args))
        given = tree_leaves((args, kwargs))
        own = tensors_on(modules).values()
        tensors = list({id(each): each for each in (*given, *own) if isinstance(each, Tensor)}.values())
        kinds = [each if each is None or type(each) is bool else type(each) for each in given]
        kind = tuple(kinds), tuple(map(kind_of, tensors)), tuple(map(id, modules))
        return _Call(lambda: function(*args, **kwargs), tensors, modules, kind)


def _is_compiling() -> bool:
    """The answer that a model's own code gets while torch's frontend traces it."""
    frame = sys._getframe(1)
    if not may_ask(frame):
        raise NotCapturable(ASKS)
    return not lies_in(frame.f_code.co_filename, *OURS, TORCHS)


class _Place(NamedTuple):
    """Stands for a tensor in the result of a call."""

    number: int
    """Among the call's tensors and, after these, the graph's outputs."""


class UnguardedCalls:
    """Stands in the place of ``GuardedCalls``. For each kind of call ``backend`` gets a graph."""

    are_current = True

    def __init__(self, backend: Callable[[_CallGraph, Sequence[int]], Callable[..., Any]]):
        """backend: ``(graph, positions of the inputs that are modules) -> function``, as that of ``GuardedCalls``."""
        self._backend = backend
        self._graphs: dict[Hashable, _CallGraph] = {}

    def trace(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], *_: Any) -> Any:
        call = _Call.of(function, args, kwargs)
        if call.kind not in self._graphs:
            self._graphs[call.kind] = graph = _CallGraph()
            count = len(call.tensors)
            graph.run = self._backend(graph, range(count, count + len(call.modules)))
        return self._graphs[call.kind].result_of(call)

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The call by a graph that was taken before. If it returns ``MISSED``, nothing has run."""
        call = _Call.of(function, args, kwargs)
        graph = self._graphs.get(call.kind)
        return MISSED if graph is None else graph.result_of(call)


class _CallGraph:
    """The graph of calls of one kind: tensors, and then modules, are its inputs, and tensors are its outputs.

    The tensors that the call has put on modules are outputs, too.
    """

    code = ""
    """The tape tells such graphs apart."""
    run: Callable[..., Any]

    def __init__(self) -> None:
        self._call: _Call | None = None
        self._leaves: Sequence[Any] = ()
        self._spec: TreeSpec | None = None

    def result_of(self, call: _Call) -> Any:
        self._call = call
        try:
            values = *call.tensors, *self.run(*call.tensors, *call.modules)
        finally:
            self._call = None
        assert self._spec is not None
        leaves = [values[e.number] if type(e) is _Place else e for e in self._leaves]
        result, attributes = tree_unflatten(leaves, self._spec)
        for (number, name), value in attributes.items():
            setattr(call.modules[number], name, value)
        return result

    def forward(self, *_: Any) -> Sequence[Tensor]:
        assert self._call is not None, "a backward that needs another forward has no place in an estimate"
        before = tensors_on(self._call.modules)
        with swapped(torch.compiler, "is_compiling", _is_compiling):
            result = self._call.run()
        after = tensors_on(self._call.modules).items()
        leaves, self._spec = tree_flatten((result, {key: each for key, each in after if before.get(key) is not each}))
        places = {id(tensor): _Place(index) for index, tensor in enumerate(self._call.tensors)}
        outputs: list[Tensor] = []
        for each in leaves:
            if not isinstance(each, Tensor) and not is_constant(each):
                raise NotCapturable(f"it returns a {type(each).__name__}")
            if isinstance(each, Tensor) and id(each) not in places:
                places[id(each)] = _Place(len(self._call.tensors) + len(outputs))
                outputs.append(each)
        self._leaves = [places[id(each)] if isinstance(each, Tensor) else each for each in leaves]
        return outputs
