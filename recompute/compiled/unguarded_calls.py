"""Calls on tensors without values, as an estimate makes them: the graph of a call is the call itself.

Nobody changes the model meanwhile, so no guard looks at Python's state. Calls of one function are alike if their
tensors, and those of the module, are of the same kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from recompute.compiled.guards import MISSED
from recompute.compiled.recording import NotCapturable
from recompute.engine.cut.layout import Layout
from recompute.engine.tape.op_arguments import is_constant


def modules_in(function: Callable[..., Any], args: tuple) -> Iterable[nn.Module]:
    """The module whose forward ``function`` is, or which it is given, and those inside of it."""
    module = next((m for m in (getattr(function, "__self__", None), *args[:1]) if isinstance(m, nn.Module)), None)
    return () if module is None else module.modules()


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
        own = [each for m in modules for each in (*m._parameters.values(), *m._buffers.values(), *vars(m).values())]
        tensors = list({id(each): each for each in (*given, *own) if isinstance(each, Tensor)}.values())
        kinds = [each if each is None or type(each) is bool else type(each) for each in given]
        kind = tuple(kinds), tuple(map(kind_of, tensors)), len(modules)
        return _Call(lambda: function(*args, **kwargs), tensors, modules, kind)


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
    """The graph of calls of one kind: tensors, and then modules, are its inputs, and tensors are its outputs."""

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
        return tree_unflatten([values[e.number] if type(e) is _Place else e for e in self._leaves], self._spec)

    def forward(self, *_: Any) -> Sequence[Tensor]:
        assert self._call is not None, "a backward that needs another forward has no place in an estimate"
        leaves, self._spec = tree_flatten(self._call.run())
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
