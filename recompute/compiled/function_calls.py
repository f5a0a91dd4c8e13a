"""Custom ``autograd.Function``s inside of captured code: each is one call, whose ctx and backward are eager code's.

A Function holds the tensors that it saves by itself, with the hooks in force. If the region has made such a tensor,
and the Function only reads it, the program holds it, or brings it back, for all who want it. A Function's backward is
one call of the program's backward: autograd runs the Function's node, and no other, as it would in eager code.

A graph has the numbers and tensors that code finds in Python when a call begins. A Function may change attributes of
objects that it is given or knows, and items of containers. No code that reads these may run as a graph.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from recompute.compiled.recording import Departure
from recompute.engine.cut.layout import Layout
from recompute.engine.reachable_objects import Walk, dict_of
from recompute.engine.saved_tensors import PackedTensor, pack_through, seen_as, top_hooks, unpack_saved, version_of
from recompute.engine.tape.functions import FunctionOp, is_seen, make_whole
from recompute.engine.tape.op_arguments import LISTS, is_plain
from recompute.engine.thread_state import local
from recompute.errors import UnsupportedError

keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward


Around = Callable[[], AbstractContextManager[Any]]
_TRUSTED = "torch.", "transformers.", "recompute."
"""Whose registered backwards of custom ops only call ops that the dispatcher sees."""


class _Enter(torch.autograd.Function):
    """The tensors that a Function is given, apart from their graphs. Its node holds none of them."""

    seen_by_dispatcher = True

    @staticmethod
    def forward(ctx: Any, source: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise AssertionError("gradients are taken where they leave the Function")


@functools.cache
def _source() -> Tensor:
    """A tensor that takes a gradient, so that the tensors that a Function is given do."""
    return torch.empty(0, requires_grad=True)


class FunctionBackward:
    """The backward of a Function's call in a program: ``(after, *gradients) -> those of the inputs that take one``."""

    tags: tuple[Any, ...] = ()

    def __init__(self, op: FunctionOp, call: int, outputs: int, results: Sequence[Layout | None], around: Around):
        """call: its forward's, among the recorded ones. outputs: how many that has.

        results: the layouts that its gradients had; None for none. around: the span of the autocast that it runs under.
        """
        self.op = op
        self.call = call
        self._outputs = outputs
        self._results = results
        self._around = around

    def __repr__(self) -> str:
        return f"{self.op}'s backward"

    def __call__(self, after: _After, *given: Tensor | None) -> Sequence[Tensor | None]:
        """given: the gradients of the outputs, and the arguments that the Function has saved."""
        node = after.node.next_functions[0][0]
        gradients, after.values = given[: self._outputs], given[self._outputs :]
        roots = [GradientEdge(node, slot) for slot, gradient in enumerate(gradients) if gradient is not None]
        inputs = [GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None]
        come = tuple([gradient for gradient in gradients if gradient is not None])
        try:
            with self._around():
                found = _run_backward(tuple(roots), come, keeps_graph(), False, tuple(inputs), allow_unreachable=True)
        finally:
            after.values = ()
        return [self._as_recorded(*each) for each in zip(found, self._results, strict=True)]

    def _as_recorded(self, gradient: Tensor | None, layout: Layout | None) -> Tensor | None:
        """A gradient in the layout that the code around was written for."""
        if gradient is None or layout is None:
            if gradient is not layout:
                raise UnsupportedError(_OTHER_GRADIENTS.format(self.op))
            return None
        if Layout.of(gradient)[:2] == layout[:2]:
            return gradient
        return layout.empty(gradient.device).copy_(gradient)


_OTHER_GRADIENTS = (
    "the backward of {} returns gradients for other arguments than when its module was captured. Add `capture: false` "
    "to the module's rule."
)


class _After:
    """The backward of a Function's call takes this."""

    __slots__ = ("node", "values")

    def __init__(self) -> None:
        self.node: Any = None
        """A node behind the Function's, which lives as long as it: nothing in Python keeps a Function's own."""
        self.values: Sequence[Tensor | None] = ()
        """While the backward runs, those arguments that the Function has saved. Else the program has them."""


class FunctionCall:
    """A call of a Function in a program: ``(*args) -> (*outputs, after)``."""

    def __init__(
        self,
        op: FunctionOp,
        args: Sequence[Any],
        outputs: Sequence[Any],
        around: Around,
        *,
        made: Sequence[int],
        saves: Sequence[int],
        takes_gradients: bool,
        names: frozenset[str],
    ):
        """args, outputs: of the call that was recorded. around: the span of the autocast that it runs under.

        made: the positions of the arguments that the region has made. saves: of those that it saves and leaves as they
        are. takes_gradients: whether the call ran with gradients on. names: those that it might change in Python and
        that the code around it reads.
        """
        self.op = op
        self.saves = saves
        self._made = made
        self._names = names
        self._takes = [takes_gradients and takes_gradient(value) for value in args]
        self._is_differentiated = any(self._takes)
        self._results = list(map(_described, outputs))
        self._around = around

    def __call__(self, *args: Any) -> Sequence[Any]:
        torch._C._set_grad_enabled(self._is_differentiated)
        try:
            with self._around():
                return self._run(args)
        finally:
            torch._C._set_grad_enabled(False)

    def _run(self, args: Sequence[Any]) -> Sequence[Any]:
        if self._is_differentiated:
            # In the place of a tensor that it was given detached stands the tensor with its graph.
            given = [
                value.detach() if takes_gradient(value) and not takes else value
                for value, takes in zip(args, self._takes, strict=True)
            ]
            enters = [takes and not _has_attributes(value) for value, takes in zip(given, self._takes, strict=True)]
            entered = iter(_Enter.apply(_source(), *itertools.compress(given, enters)))
            args = [next(entered) if is_entered else value for value, is_entered in zip(given, enters, strict=True)]
        versions = [version_of(args[position]) for position in self._made]
        found = found_by(self.op, args, self._names) if self._names else {}
        after = _After()
        with self._saving(args, after) if self.saves else nullcontext():
            output = self.op.function.apply(*args)
        after.values = ()
        if versions != [version_of(args[position]) for position in self._made]:
            raise Departure(f"{self.op} writes to an argument in some calls and not in others")
        if self._names and changed(found, found_by(self.op, args, self._names)):
            raise Departure(CHANGES.format(self.op))
        outputs = output if type(output) in LISTS else (output,)
        if list(map(_described, outputs)) != self._results:
            raise Departure(f"{self.op} does not return the same kind of outputs in each call")
        first = next(filter(takes_gradient, outputs), None)
        after.node = None if first is None else first.view_as(first).grad_fn
        return *[each.detach() if isinstance(each, Tensor) else each for each in outputs], after

    def _saving(self, args: Sequence[Any], after: _After) -> saved_tensors_hooks:
        """Inside, autograd saves no memory of the arguments in ``saves``, but how they view it."""
        hooks, name = top_hooks(), str(self.op)
        slots = {args[position].untyped_storage()._cdata: slot for slot, position in enumerate(self.saves)}
        after.values = [args[position].detach() for position in self.saves]

        def pack(tensor: Tensor) -> PackedTensor | tuple[int, Layout]:
            slot = slots.get(tensor.untyped_storage()._cdata) if is_plain(tensor) else None
            if slot is None:
                return pack_through(hooks, tensor if tensor.is_leaf else tensor.detach(), name)
            return slot, Layout.of(tensor)

        def unpack(packed: PackedTensor | tuple[int, Layout]) -> Tensor:
            if isinstance(packed, PackedTensor):
                return unpack_saved(packed)
            slot, layout = packed
            value = after.values[slot]
            assert value is not None
            return seen_as(value, layout)

        return saved_tensors_hooks(pack, unpack)


def _described(output: Any) -> Any:
    if not isinstance(output, Tensor):
        return type(output), repr(output) if isinstance(output, float) else output
    return output.shape, output.stride(), output.storage_offset(), output.dtype, output.requires_grad


def _has_attributes(value: Tensor) -> bool:
    """Whether a Function may look for attributes of a parameter, as Megatron's does for ``main_grad``.

    Then it is given the parameter itself. Hooks of that would see the gradient twice, so none may have any.
    """
    return value.is_leaf and value.requires_grad and bool(vars(value)) and not value._backward_hooks


def as_autograd_does(gradient: Tensor, layout: Layout) -> Tensor:
    """A gradient of a tensor of ``layout``, as autograd passes it on: of the tensor's shape and dtype."""
    if gradient.shape != layout.shape:
        gradient = gradient.sum_to_size(layout.shape)
    return gradient.to(layout.dtype)


def unseen(node: Any) -> str:
    """Why a tape does not see all that a node of a custom Function or a custom op does; "" if it does, or ops are all.

    A tape will see the Function's next call.
    """
    function = getattr(type(node), "_forward_cls", None)
    if function is None:
        return ""
    if function.__module__ == "torch._library.autograd":
        formula = _registered(function.backward)
        if not is_seen(formula) and not formula.__module__.startswith(_TRUSTED):
            return f"the backward formula that {formula.__module__} registers for a custom op may do more than call ops"
        return ""
    if not is_seen(function) and make_whole(function):
        return "a custom autograd.Function inside of another op called no op, so nothing could be recorded"
    return ""


def _registered(backward: Any) -> Any:
    """The formula that the backward of a custom op's Function calls; ``backward`` itself if it calls none."""
    inside = [cell.cell_contents for cell in backward.__closure__ or ()]
    formulas = [each._backward_fn for each in inside if getattr(each, "_backward_fn", None) is not None]
    wrapped = [_registered(each) for each in inside if isinstance(each, FunctionType)]
    return next(iter((*formulas, *wrapped)), backward)


def takes_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@functools.cache
def graph_call(op: FunctionOp) -> Callable[..., Any]:
    """A graph calls this for a Function. It shows the outputs, with their graphs, to the tape of the graph."""

    def call_function(*args: Any, **kwargs: Any) -> Any:
        if local.function_stand_in is not None:
            return local.function_stand_in(op, args, kwargs)
        end = getattr(local.active_frames[-1], "end_function", None) if local.active_frames else None
        if end is None:
            return op.function.apply(*args, **kwargs)
        end()
        output = op.function.apply(*args, **kwargs)
        end(output)
        return output

    return call_function


_MANY = 100
CHANGES = "{} changes Python objects that the code around it reads"

Found = dict[str, list[Any]]
"""Objects by the names that led to them."""


@functools.cache
def _code_of(op: FunctionOp) -> tuple[frozenset[str], Sequence[tuple[dict[str, Any], str]]]:
    """The names in the code of a Function, and its globals but modules and functions."""
    walk = Walk((op.function,))
    values = [(space, name) for space, name in walk.globals.values()]
    kept = [(space, name) for space, name in values if not isinstance(space.get(name), (ModuleType, FunctionType))]
    return frozenset(walk.names | walk.assigned), kept


def shared_names(op: FunctionOp, read: frozenset[str]) -> frozenset[str]:
    """The names that are read and that the code of a Function has, too."""
    return _code_of(op)[0] & read


def found_by(op: FunctionOp, args: Iterable[Any], names: frozenset[str] | None = None) -> Found:
    """The objects in a Function's arguments and globals. names: those to look for, if not all in its code."""
    own, entries = _code_of(op)
    names = own if names is None else names
    found: Found = {}
    objects = list(args)
    for space, name in entries:
        objects.append(value := space.get(name))
        if name in names:
            _add(found, name, value)
    for value in objects:
        spaces = [dict_of(value)]
        spaces += [value._buffers, value._parameters] if isinstance(value, nn.Module) else []
        for each in spaces:
            for name in names & each.keys():
                _add(found, name, each[name])
    return found


def _add(found: Found, name: str, value: Any) -> None:
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    found.setdefault(name, []).extend((value, *items) if len(items) <= _MANY else (value,))


def changed(before: Found, after: Found) -> frozenset[str]:
    """The names that lead to something else afterwards."""
    then, now = ({name: [*map(id, values)] for name, values in found.items()} for found in (before, after))
    return frozenset([name for name in then.keys() | now.keys() if then.get(name) != now.get(name)])
