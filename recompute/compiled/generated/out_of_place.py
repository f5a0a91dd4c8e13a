"""Calls that write in place, as calls that give new tensors. A kernel can compute those together with others.

A recording numbers what a storage holds anew after each write. So whoever reads the memory after the write reads the
new tensor, and whoever reads it before reads the old one. The kernel then writes into the old one's memory again, where
nobody reads that any more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import elementwise_dtypes

from recompute.compiled.generated.groupable import can_be_generated
from recompute.compiled.generated.pointwise_ops import ROWS, arguments_of, stand_in
from recompute.compiled.recording import Call, Recording, Use

_ATEN = torch.ops.aten


def out_of_place(call: Call, recording: Recording) -> Call | None:
    """The call that gives what ``call`` writes as a new tensor; None if no generated kernel computes that."""
    target = call.args[0] if call.args else None
    if len(call.written) != 1 or type(target) is not Use or not isinstance(call.op, torch._ops.OpOverload):
        return None
    ((before, after),) = call.written
    whole = recording.buffers[before].layout
    if target.buffer != before or target.is_conjugate or not whole.is_contiguous:
        return None
    if call.op is _ATEN.copy_.default:
        op, args = _ATEN.as_strided_scatter.default, _part_replaced(Use(before, whole), target, call.args[1])
    else:
        op, args = _functional(call), call.args if target.layout == whole else None
    if op is None or args is None:
        return None
    found = Call(op, args, call.kwargs if op in ROWS else {}, (after,), (), is_sequence=False)
    return found if can_be_generated(found, recording) else None


def _part_replaced(whole: Use, target: Use, source: Any) -> tuple[Any, ...] | None:
    """The arguments of ``as_strided_scatter``, where ``source`` has the shape of the part that it goes to."""
    shape, stride, offset, _ = target.layout
    if type(source) is not Use or source.layout.shape != shape:
        return None
    return whole, source, list(shape), list(stride), offset - whole.layout.offset


def _functional(call: Call) -> Any:
    """The op that computes what an op writes in place, if that has the dtype of what it writes to."""
    name = call.op._schema.name.partition("::")[2]
    packet = getattr(_ATEN, name[:-1], None) if name.endswith("_") else None
    op = getattr(packet, call.op._overloadname, None)
    row = ROWS.get(op)
    if row is None or row.promotion is None:
        return op if row is not None else None
    values = arguments_of(call)
    operands = [stand_in(values[each]) if type(values[each]) is Use else values[each] for each in row.operands]
    found = elementwise_dtypes(*operands, type_promotion_kind=row.promotion)[1]
    return op if found is values["self"].layout.dtype else None
