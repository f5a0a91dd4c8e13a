"""The sum over tokens, as the gradient of a bias is.

With x: (M, H):

    y = sum(x, over M)       (H,)

Each program sums the rows of a part of x in float32, in registers, for a block of columns. A second kernel adds up the
parts, always in the same order. Moved are M · H elements, and a float32 for each column of each part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl
from recompute.kernels.norm_kernels import launch_sum


@jit
def _parts_kernel(x, parts, M, H, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program p of P takes the tiles p, p + P, p + 2P, … of rows, for one block of columns."""
    blocks = tl.cdiv(H, COLUMNS)
    program = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0) // blocks):
        rows = (tile * ROWS + tl.arange(0, ROWS))[:, None]
        mask = (rows < M) & (columns < H)
        sums += tl.load(x + rows.to(tl.int64) * stride + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=0)[None, :]
    tl.store(parts + program.to(tl.int64) * H + columns, total, mask=columns < H)


ROWS, COLUMNS = 32, 128
PROGRAMS = 4
"""For each multiprocessor. None of these was measured."""
SETTINGS = {"num_warps": 4}


def _column_sum(x: Tensor, keepdim: bool) -> Tensor:
    if not launch.uses_triton(x):
        return x.sum(0, keepdim)
    y = _outputs(x, keepdim)
    M, H = x.shape
    if H == 0:
        return y
    has_gaps = x.stride(1) == 1 and x.stride(0) % 16 == 0 == H % 16 and launch.is_aligned(x)
    x = x if has_gaps else launch.dense(x)  # what is read in place is as aligned as a copy, for the same bits
    tiles, blocks = max(-(-M // ROWS), 1), -(-H // COLUMNS)  # without rows a program writes a sum of zeros
    each = min(tiles, max(1, PROGRAMS * launch.multiprocessors(x.device) // blocks))
    parts = x.new_empty(each, H, dtype=torch.float32)
    launch.run(_parts_kernel, each * blocks, x, parts, M, H, x.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, **SETTINGS)
    launch_sum(y, parts)
    return y


def _outputs(x: Tensor, keepdim: bool) -> Tensor:
    return x.new_empty((1, x.shape[1]) if keepdim else (x.shape[1],))


column_sum = launch.register("column_sum(Tensor x, bool keepdim) -> Tensor", _column_sum, _outputs)
"""``x.sum(0, keepdim)`` of a matrix: float16, bfloat16, float32 or float64, of any strides. Summed in float32 (float64
for float64), and rounded once."""
