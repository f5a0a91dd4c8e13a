"""One call of an op as a tape sees it: how to run it again, and the tensors that it made."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.engine.cut.filled_memory import ALLOCATE
from recompute.engine.cut.layout import Layout, is_dense
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import FACTORY, Kind, OpFacts, tensors_in
from recompute.engine.cut.save_plan import ValueRef
from recompute.engine.recipes import RecordedCall
from recompute.engine.rng import WatchedDraws
from recompute.engine.tape.frame_values import FrameValues
from recompute.engine.tape.op_arguments import (
    LISTS,
    PLAIN,
    NotRegenerable,
    at,
    capture,
    is_plain,
    parameter_of,
    watch,
    without,
)

_new = tuple.__new__

MadeTensor = tuple[int | None, Tensor, Layout]
"""A tensor that a step wrote: the number of the output, the tensor, and the layout that sees all of it.

The number is None if the step does not give it back when it runs again.
"""


class OpCall(NamedTuple):
    """A call of an op that a tape sees, and the facts of it."""

    op: Any
    known: OpFacts
    reason: str
    """Why it cannot run again; "" if it may."""
    args: tuple
    kwargs: dict[str, Any]
    unobserved: bool
    """Whether it runs where not all that happens is seen."""
    op_policy: OpPolicy
    """The one in force."""
    function: Callable[..., Any] | None = None
    """Runs in the place of ``op``, if it is given. It adds to ``args`` the tensors that it reaches."""

    def run(self) -> Any:
        """Run it. Writes to lists of tensors, as ``_foreach_add_``'s, are counted: under a mode torch does not."""
        output = self.op(*self.args, **self.kwargs) if self.function is None else self.function()
        if self.known.writes:
            for value in at(self.known.writes, self.args, self.kwargs):
                if type(value) in LISTS:
                    torch.autograd.graph.increment_version(value)
        return output


def as_drawn(recorded: RecordedCall, known: OpFacts) -> RecordedCall | None:
    """A call that has run, and will draw the same again; None if its op says that it draws, and has not."""
    if recorded.rng is None:
        return recorded
    if not known.is_foreign:
        return recorded if recorded.rng.drawn() is not None else None
    drawn = WatchedDraws(recorded.rng)
    return None if drawn.are_none and known.kind is Kind.RANDOM else recorded._replace(rng=drawn)


def record_call(
    values: FrameValues, call: OpCall, foreseen: tuple[int, ...] = ()
) -> tuple[RecordedCall | None, tuple[int, ...]]:
    """How to run a step again, or None if it may not, and the numbers of the values that it reads.

    In the call there is a ``ValueRef`` in the place of each tensor. foreseen: the numbers that the plan expects.
    """
    op, known, reason, args, kwargs, *_ = call
    if known.running_statistics:  # in backward they have been collected, and the outputs do not depend on them
        if values.plan is None:
            _with_refs(values, at(known.running_statistics, args, kwargs), [], ())
        args, reason = tuple(without(known.running_statistics, args)), ""
    inputs: list[int] = []
    template = _with_refs(values, args, inputs, foreseen)
    keywords = kwargs
    if kwargs:
        keywords = dict(zip(kwargs, _with_refs(values, kwargs.values(), inputs, foreseen), strict=True))
    if reason and not (op in ALLOCATE and reason == FACTORY):  # copies may fill it
        return None, tuple(inputs)
    if not values.numerics.bear_on(is_costly=values.plan is None or known.family is not None):
        raise NotRegenerable("torch's settings were others when the module's forward began")
    writes = _read_whole(values, known, template) if known.kind is Kind.IN_PLACE else None
    rng = None
    if known.is_foreign:
        rng = watch(op, (*args, *kwargs.values()), values.name)
    elif known.kind is Kind.RANDOM:
        rng = capture(args, kwargs, values.name)
    return _new(RecordedCall, (op, template, keywords, rng, writes)), tuple(inputs)


def _with_refs(
    values: FrameValues, arguments: Iterable[Any], inputs: list[int], foreseen: tuple[int, ...]
) -> list[Any]:
    """``arguments`` with a ``ValueRef`` in the place of each tensor. The numbers are added to ``inputs``."""
    found: list[Any] = []
    for value in arguments:
        kind = type(value)
        if kind in PLAIN or isinstance(value, Tensor):
            number, _ = values.number_of(value, foreseen[len(inputs)] if len(inputs) < len(foreseen) else None)
            inputs.append(number)
            value = _new(ValueRef, (number, Layout.of(value)))
        elif kind in LISTS:
            value = _with_refs(values, value, inputs, foreseen)
        found.append(value)
    return found


def _read_whole(values: FrameValues, known: OpFacts, template: list[Any]) -> dict[int | str, Layout]:
    """Have a step that changes an argument read the whole value, so that it can run again on a copy of that.

    Returns the argument's place, and the layout through which the step sees it.
    """
    (place,) = known.writes
    ref = template[place]  # type: ignore[index]
    if not isinstance(ref, ValueRef):
        raise NotRegenerable("it changes several tensors in place at once")
    value = values.facts[ref.value]
    if not is_dense(value.layout, value.nbytes):
        raise NotRegenerable("it changes a tensor in place that is a part of a larger storage")
    template[place] = ValueRef(ref.value, value.layout)  # type: ignore[index]
    return {place: ref.layout}


def made_by(
    values: FrameValues, call: OpCall, output: Any, foreseen: tuple[Layout, ...] = ()
) -> list[MadeTensor] | None:
    """The tensors that a step has made; None if an output has the memory of another tensor."""
    known = call.known
    if known.kind is Kind.IN_PLACE and not call.reason:
        tensor = call.args[known.writes[0]]  # type: ignore[index]
        if (number := values.current.of(tensor)) is not None:  # ``tensor`` may be a part of it
            return [(0, tensor, values.facts[number].layout)]
        is_as_foreseen = foreseen and is_dense(foreseen[0], tensor.untyped_storage().nbytes())
        return [(0, tensor, foreseen[0] if is_as_foreseen else Layout.of(tensor))]
    if not known.writes and not call.unobserved:
        return _outputs_in_new_memory(output, values.current)
    written = writable(values, call)
    others = {*values.current, *(tensor.untyped_storage()._cdata for tensor in written)}
    changed: list[MadeTensor] = [(None, tensor, Layout.of(tensor)) for tensor in written]
    if call.unobserved:  # it may return its arguments, beside the tensors that it made
        output = [each if _is_new(each, others) else None for each in (output if type(output) in LISTS else (output,))]
    return changed + (_outputs_in_new_memory(output, others) or [])


def _is_new(value: Any, others: Container[int]) -> bool:
    return isinstance(value, Tensor) and is_plain(value) and value.untyped_storage()._cdata not in others


def writable(values: FrameValues, call: OpCall) -> list[Tensor]:
    """One tensor for each storage that a step may write to. An unobserved kernel may write to all tensors it reaches.

    Parameters are left out: one is known as an object, whatever value it has.
    """
    every = (call.args, call.kwargs)
    reach = tensors_in(every if call.unobserved else at(call.known.writes, *every))
    found = {
        key: tensor
        for tensor in values.plain_parts(reach)
        if parameter_of(tensor) is None and (key := tensor.untyped_storage()._cdata) not in values.sharded_parameters
    }
    return list(found.values())


def _outputs_in_new_memory(output: Any, others: Container[int]) -> list[MadeTensor] | None:
    """The tensors that an op returned; None if one has the memory of another tensor, or is no plain tensor."""
    if type(output) is Tensor and is_plain(output) and output.untyped_storage()._cdata not in others:
        return [(0, output, Layout.of(output))]
    made: list[MadeTensor] = []
    keys: set[int] = set()
    for slot, tensor in enumerate(output if type(output) in LISTS else (output,)):
        if isinstance(tensor, Tensor):
            if not is_plain(tensor):
                return None
            key = tensor.untyped_storage()._cdata
            if key in others or key in keys:
                return None
            keys.add(key)
            made.append((slot, tensor, Layout.of(tensor)))
    return made
