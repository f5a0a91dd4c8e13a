"""The softmax of written-out attention, ``aten._safe_softmax``, for the time of a softmax.

It gives zeros where all scores of a row are minus infinity, as all of its keys are masked. ATen compares all scores
with minus infinity for that, and copies the probabilities. Only a row whose first probability is not a number can be
such a row: this looks at the scores of no others, and gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.compiled.calls import Call
from recompute.compiled.generated.pointwise_ops import FLOATS
from recompute.compiled.recording import Recording
from recompute.kernels.launch import jit, run, tl

_ATEN = torch.ops.aten
ROWS_AT_ONCE, COLUMNS_AT_ONCE = 64, 64


@jit
def _zeros_where_masked(
    scores, probabilities, rows, width, ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    first = tl.load(probabilities + row * width, row < rows, 0.0).to(tl.float32)
    is_masked = first != first
    if tl.max(is_masked.to(tl.int32), 0) > 0:
        columns, stop = row[:, None] * width + tl.arange(0, COLUMNS_AT_ONCE)[None, :], (row[:, None] + 1) * width
        start = 0
        while start < width:
            inside = is_masked[:, None] & (start + columns < stop)
            found = tl.load(scores + start + columns, inside, float("-inf")).to(tl.float32)
            is_masked = is_masked & (tl.min((found == float("-inf")).to(tl.int32), 1) > 0)
            start += COLUMNS_AT_ONCE
        start = 0
        while start < width:
            tl.store(probabilities + start + columns, 0.0, is_masked[:, None] & (start + columns < stop))
            start += COLUMNS_AT_ONCE


def is_safe_softmax(call: Call, recording: Recording) -> bool:
    """Whether ``safe_softmax`` takes the arguments of a call."""
    if call.op is not _ATEN._safe_softmax.default or len(call.args) != 2 or call.kwargs or call.results[0] is None:
        return False
    (scores, dim), made = call.args, recording.buffers[call.results[0]]
    shape = scores.layout.shape
    return (
        len(shape) > 0
        and dim % len(shape) == len(shape) - 1
        and shape.numel() > 0
        and scores.layout.is_contiguous
        and made.layout.is_contiguous
        and scores.layout.dtype in FLOATS
        and made.device == recording.device
    )


def safe_softmax(scores: Tensor, dim: int) -> Tensor:
    """``aten._safe_softmax(scores, dim)``. scores: contiguous, of rows along the last dimension."""
    probabilities = torch._softmax(scores, dim, False)
    width = scores.shape[-1]
    rows = scores.numel() // width
    settings = {"ROWS_AT_ONCE": ROWS_AT_ONCE, "COLUMNS_AT_ONCE": COLUMNS_AT_ONCE, "num_warps": 4}
    run(_zeros_where_masked, -(-rows // ROWS_AT_ONCE), scores, probabilities, rows, width, **settings)
    return probabilities
