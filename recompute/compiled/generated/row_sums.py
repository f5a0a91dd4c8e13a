"""Adds up rows that go to the same place: the gradient of indexing, as where experts take their tokens.

ATen adds the rows of one place after each other, and rounds each sum. That takes long where many rows go to one place,
as for the biases of a few experts. This adds up blocks of rows in float32, in an order that is always the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.compiled.generated.pointwise_ops import FLOATS, arguments_of
from recompute.compiled.recording import Call, Recording, Use
from recompute.engine.tape.op_arguments import is_dense
from recompute.kernels.launch import jit, run, tl

ROWS_AT_ONCE, COLUMNS_AT_ONCE = 16, 256


@jit
def _sums(
    initial, order, starts, values, sums, width, ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS_AT_ONCE)
    place, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    columns = block * COLUMNS_AT_ONCE + tl.arange(0, COLUMNS_AT_ONCE)
    inside = columns < width
    total = tl.load(initial + place * width + columns, inside, 0.0).to(tl.float32)
    first, stop = tl.load(starts + place), tl.load(starts + place + 1)
    while first < stop:
        positions = first + tl.arange(0, ROWS_AT_ONCE)
        rows = tl.load(order + positions, positions < stop, 0)[:, None]
        wanted = (positions < stop)[:, None] & inside[None, :]
        total += tl.sum(tl.load(values + rows * width + columns[None, :], wanted, 0.0).to(tl.float32), 0)
        first += ROWS_AT_ONCE
    tl.store(sums + place * width + columns, total, inside)


def can_add_rows(call: Call, recording: Recording) -> bool:
    """Whether ``index_put_rows`` does what a call does, but for the order of sums."""
    if call.op is not torch.ops.aten.index_put.default:
        return False
    values = arguments_of(call)
    initial, rows, indices = values["self"], values["values"], values["indices"]
    if not values["accumulate"] or len(indices) != 1 or type(indices[0]) is not Use:
        return False
    (index,) = indices
    uses = [initial, rows, index]
    return (
        len(index.layout.shape) == 1
        and index.layout.dtype is torch.int64
        and initial.layout.dtype is rows.layout.dtype
        and initial.layout.dtype in FLOATS
        and rows.layout.shape == (*index.layout.shape, *initial.layout.shape[1:])
        and initial.layout.shape.numel() * rows.layout.shape.numel() > 0
        and all(use.layout == recording.buffers[use.buffer].layout for use in uses)
        and all(is_dense(use.layout, recording.buffers[use.buffer].nbytes) for use in uses)
        and all(recording.buffers[use.buffer].device == recording.device for use in uses)
    )


def index_put_rows(initial: Tensor, indices: list[Tensor], values: Tensor, accumulate: bool) -> Tensor:
    """``initial.index_put(indices, values, accumulate=True)`` with one index of rows.

    initial: (places, ...); indices: one int64 tensor, (rows,); values: (rows, ...); all of them contiguous.
    """
    count = len(initial)
    places, order = indices[0].remainder(count).sort()
    starts = torch.searchsorted(places, torch.arange(count + 1, device=places.device))
    sums, width = torch.empty_like(initial), initial[0].numel()
    settings = {"ROWS_AT_ONCE": ROWS_AT_ONCE, "COLUMNS_AT_ONCE": COLUMNS_AT_ONCE, "num_warps": 4}
    programs = count * -(-width // COLUMNS_AT_ONCE)
    run(_sums, programs, initial, order, starts, values, sums, width, **settings)
    return sums
