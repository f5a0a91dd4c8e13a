"""Calls that are replaced by others: kernels can compute those, or ATen computes them faster.

A call that writes in place becomes one that gives a new tensor, so that a kernel can compute it together with others.
A recording numbers the contents of a storage anew after each write. So whoever reads the memory after the write reads
the new tensor, and whoever reads it before reads the old one. The kernel then writes into the old one's memory again,
where nobody reads that any more.

A GEMM is slow on rows that are not aligned, as those of a slice often are. So it reads a copy of the slice. Where a
generated kernel makes the wider tensor, and nobody else reads it, that kernel writes the slice alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import elementwise_dtypes

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.groupable import can_be_generated
from recompute.compiled.generated.pointwise_ops import FLOATS, ROWS, arguments_of
from recompute.compiled.recording import Recording
from recompute.engine.cut.layout import Layout, is_dense

_ATEN = torch.ops.aten
READERS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.sum.dim_IntList)
"""Ops whose output lies in memory in the same way, however their operands do."""


def largest_size(call: Call, recording: Recording, has: Callable[[int], bool]) -> Call:
    """A norm in the place of the greatest absolute value: ATen reads each number once, in any order of memory.

    has: whether a buffer can be read now.
    """
    if call.op not in (_ATEN.max.default, _ATEN.amax.default) or can_be_generated(call, recording):
        return call
    (use,) = call.uses()
    sizes, whole = recording.maker(use), recording.buffers[use.buffer].layout
    if sizes is None or sizes.op is not _ATEN.abs.default or use.layout != whole:
        return call
    (source,) = sizes.uses()
    if source.layout.dtype not in FLOATS or source.is_conjugate or not has(source.buffer):
        return call
    args = source, math.inf, *(call.args[1:] or (None,))
    return call._replace(op=_ATEN.linalg_vector_norm.default, args=args)


def out_of_place(call: Call, recording: Recording) -> list[Call]:
    """The calls that return a new tensor where ``call`` writes in place; none if no generated kernel computes them.

    Where an operand has a wider dtype than the target, the second call casts what the first one has computed.
    """
    target = call.args[0] if call.args else None
    if len(call.written) != 1 or type(target) is not Use or not isinstance(call.op, torch._ops.OpOverload):
        return []
    ((before, after),) = call.written
    buffer = recording.buffers[before]
    whole = buffer.layout
    if target.buffer != before or target.is_conjugate or not is_dense(whole, buffer.nbytes):
        return []
    dtype = whole.dtype
    if call.op is _ATEN.copy_.default:
        op, args = _ATEN.as_strided_scatter.default, _part_replaced(Use(before, whole), target, call.args[1])
    else:
        op, dtype = _functional(call, dtype)
        args = call.args if target.layout == whole else None
    if op is None or args is None:
        return []
    kwargs, number, calls = call.kwargs if op in ROWS else {}, after, []
    if not whole.is_contiguous and op(*map(_empty, args), **kwargs).stride() != whole.stride:
        return []
    if dtype is not whole.dtype:
        wide = whole._replace(offset=0, dtype=dtype)
        number = recording.number_unseen(wide, buffer.device)
        cast = {"dtype": whole.dtype}
        calls = [Call(_ATEN._to_copy.default, (Use(number, wide),), cast, (after,), (), is_sequence=False)]
    calls.insert(0, Call(op, args, kwargs, (number,), (), is_sequence=False))
    return calls if all(can_be_generated(each, recording) for each in calls) else []


def _empty(value: Any) -> Any:
    return value.layout.empty() if type(value) is Use else value


def _part_replaced(whole: Use, target: Use, source: Any) -> tuple[Any, ...] | None:
    """The arguments of ``as_strided_scatter``, where ``source`` has the shape of the part that it goes to."""
    shape, stride, offset, _ = target.layout
    if type(source) is not Use or source.layout.shape != shape:
        return None
    return whole, source, list(shape), list(stride), offset - whole.layout.offset


def _functional(call: Call, dtype: torch.dtype) -> tuple[Any, torch.dtype]:
    """The op that returns the numbers which an op writes into a tensor of ``dtype``; and the dtype that it returns."""
    name = call.op._schema.name.partition("::")[2]
    packet = getattr(_ATEN, name[:-1], None) if name.endswith("_") else None
    op = getattr(packet, call.op._overloadname, None)
    row = ROWS.get(op)
    if row is None or row.promotion is None:
        return op if row is not None else None, dtype
    values = arguments_of(call)
    operands = [_empty(values.get(name)) for name in row.operands]
    return op, elementwise_dtypes(*operands, type_promotion_kind=row.promotion)[1]


def part_of_rows(use: Use, recording: Recording) -> tuple[Use, Layout] | None:
    """The part of each row that ``use`` reads, as a matrix; and the layout of ``use`` in a dense copy of that.

    None if it reads another part of the buffer, or if no generated kernel makes that.
    """
    buffer, (shape, strides, offset, dtype) = recording.buffers[use.buffer], use.layout
    maker, whole = recording.maker(use), buffer.layout
    if (
        maker is None
        or use.is_conjugate
        or dtype is not whole.dtype
        or 1 not in strides
        or not whole.shape
        or not is_dense(whole, buffer.nbytes)
    ):
        return None
    width, count = whole.shape[-1], shape[strides.index(1)]
    start = offset - whole.offset
    if whole.stride[-1] != 1 or not 1 < count < width or start + count > width:
        return None
    if any(stride % width for stride in strides if stride != 1):
        return None
    if not can_be_generated(maker, recording):
        return None
    moved = Layout(shape, tuple([1 if stride == 1 else stride // width * count for stride in strides]), 0, dtype)
    rows = whole.shape.numel() // width
    if not is_dense(moved, rows * count * dtype.itemsize):
        return None
    return Use(use.buffer, Layout(torch.Size((rows, count)), (width, 1), offset, dtype)), moved
