"""What a GEMM reads of each row of a wider tensor, as a tensor of its own.

A GEMM is slow on rows that are not aligned, as those of a slice often are. And where a generated kernel makes the wider
tensor, and nobody else reads it, that kernel writes the slice alone.
"""

from __future__ import annotations

import torch

from recompute.compiled.generated.groupable import can_be_generated
from recompute.compiled.recording import Recording, Use
from recompute.engine.cut.layout import Layout
from recompute.engine.tape.op_arguments import is_dense

_ATEN = torch.ops.aten
READERS = (_ATEN.mm.default, _ATEN.bmm.default, _ATEN.addmm.default, _ATEN.baddbmm.default, _ATEN.sum.dim_IntList)
"""Ops whose output lies in memory in the same way, however their operands do."""


def part_of_rows(use: Use, recording: Recording) -> tuple[Use, Layout] | None:
    """The part of each row that ``use`` reads, as a matrix; and the layout of ``use`` in a dense copy of that.

    None if it reads another part of the buffer, or if no generated kernel makes that.
    """
    buffer, (shape, strides, offset, dtype) = recording.buffers[use.buffer], use.layout
    whole = buffer.layout
    if (
        use.is_conjugate
        or buffer.call is None
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
    if not can_be_generated(recording.calls[buffer.call], recording):
        return None
    moved = Layout(shape, tuple([1 if stride == 1 else stride // width * count for stride in strides]), 0, dtype)
    rows = whole.shape.numel() // width
    if not is_dense(moved, rows * count * dtype.itemsize):
        return None
    return Use(use.buffer, Layout(torch.Size((rows, count)), (width, 1), offset, dtype)), moved
