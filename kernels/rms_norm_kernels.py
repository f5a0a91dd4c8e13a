"""The Triton kernels of RMSNorm, with a residual or without, and how they are launched; rms_norm.py has the formulas.

Rows up to some width are held in registers; narrow rows share a tile. Persistent programs take tile after tile, and
load the next ones while they compute. In backward each program sums a part of the weight's gradient in registers, and a
second kernel adds up the parts, always in the same order. Wider rows are read twice, in blocks of columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl


@jit
def _forward_kernel(
    x,
    residual,
    weight,
    h,
    y,
    rstd,
    M,
    H,
    inner,
    outer_stride,
    inner_stride,
    eps,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows as wide as BLOCK_H: program p of P takes the tiles p, p + P, p + 2P, … of them.

    h is what is normalized: x itself, or if there is a residual, the tensor that x + residual is written to.
    """
    columns = tl.arange(0, BLOCK_H)[None, :]
    gain = _gain(weight, columns, H, CASTING)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (columns < H)
        offsets = rows.to(tl.int64)[:, None] * H + columns
        starts = _starts(rows, inner, outer_stride, inner_stride)[:, None]
        values = _stream(x, residual, h, starts + columns, offsets, mask)
        if residual is not None:
            tl.store(h + offsets, values.to(h.dtype.element_ty), mask=mask)
        if eps is None:
            r = tl.load(rstd + rows, mask=rows < M, other=0.0)
        else:
            r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=1) / H + eps))
            tl.store(rstd + rows, r, mask=rows < M)
        normalized = _rounded(values * r[:, None], h.dtype.element_ty, CASTING)
        tl.store(y + offsets, (normalized * gain).to(y.dtype.element_ty), mask=mask)


@jit
def _wide_forward_kernel(
    x,
    residual,
    weight,
    h,
    y,
    rstd,
    M,
    H,
    inner,
    outer_stride,
    inner_stride,
    eps,
    CASTING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of any width, one a program, in two passes over its columns: the second finds them in L2."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * H
    start = _starts(row, inner, outer_stride, inner_stride)
    if eps is None:
        r = tl.load(rstd + row)
    else:
        squares = tl.zeros((BLOCK_H,), tl.float32)
        for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
            columns = first + tl.arange(0, BLOCK_H)
            values = _stream(x, residual, h, start + columns, offset + columns, columns < H)
            squares += values * values
        r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, axis=0) / H + eps))
        tl.store(rstd + row, r)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_H)
        mask = columns < H
        values = _stream(x, residual, h, start + columns, offset + columns, mask)
        if residual is not None:
            tl.store(h + offset + columns, values.to(h.dtype.element_ty), mask=mask)
        normalized = _rounded(values * r, h.dtype.element_ty, CASTING)
        scaled = normalized * _gain(weight, columns, H, CASTING)
        tl.store(y + offset + columns, scaled.to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dy,
    x,
    weight,
    rstd,
    means,
    dresidual,
    dx,
    y,
    partials,
    M,
    H,
    inner,
    outer_stride,
    inner_stride,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program p of P takes the tiles p, p + P, p + 2P, … of rows, and sums their dy · h in registers.

    A tile has BLOCK_H columns: the whole row, or if ``means`` are given, one of several blocks, with P programs each.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    program = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    if STAGES > 1:
        gain = _gain(weight, columns, H, CASTING)
    sums = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (columns < H)
        offsets = rows.to(tl.int64)[:, None] * H + columns
        starts = _starts(rows, inner, outer_stride, inner_stride)[:, None]
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        h = tl.load(x + starts + columns, mask=mask, other=0.0).to(tl.float32) * r
        if STAGES == 1:  # the widest rows: in registers for all tiles it would leave too few
            gain = _gain(weight, columns, H, CASTING)
        if y is not None:
            tl.store(y + offsets, (_rounded(h, x.dtype.element_ty, CASTING) * gain).to(y.dtype.element_ty), mask=mask)
        g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        if partials is not None:
            sums += g * h
        if dx is not None:
            g *= gain
            mean = tl.sum(g * h, axis=1) / H if means is None else tl.load(means + rows, mask=rows < M, other=0.0)
            g = r * (g - h * mean[:, None])
            if dresidual is not None:
                g += tl.load(dresidual + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=mask)
    if partials is not None:
        total = tl.sum(sums, axis=0)[None, :]
        tl.store(partials + program.to(tl.int64) * H + columns, total, mask=columns < H)


@jit
def _means_kernel(
    dy,
    x,
    weight,
    rstd,
    means,
    H,
    inner,
    outer_stride,
    inner_stride,
    CASTING: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):
    """mean(dy · gain · h, over H) of rows of any width, one a program."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * H
    start = _starts(row, inner, outer_stride, inner_stride)
    r = tl.load(rstd + row)
    sums = tl.zeros((BLOCK_H,), tl.float32)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_H)
        mask = columns < H
        h = tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32) * r
        g = tl.load(dy + offset + columns, mask=mask, other=0.0).to(tl.float32)
        sums += g * _gain(weight, columns, H, CASTING) * h
    tl.store(means + row, tl.sum(sums, axis=0) / H)


@jit
def _sum_kernel(total, partials, P, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total[h] = sum over p of partials[p, h]: the second stage of the weight's gradient."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < P)[:, None] & (columns < H)[None, :]
        sums += tl.load(partials + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(total + columns, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=columns < H)


@jit
def _starts(rows, inner, outer_stride, inner_stride):
    """Where the rows of x start. Its leading dimensions may be two with a gap in between, as heads in a slice are."""
    return (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride


@jit
def _stream(x, residual, h, at_x, at, mask):
    """x, or x + residual rounded to what h holds."""
    values = tl.load(x + at_x, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        values = values.to(h.dtype.element_ty).to(tl.float32)
    return values


@jit
def _gain(weight, columns, H, CASTING: tl.constexpr):
    gain = 1.0
    if weight is not None:
        gain = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
        if CASTING == "gemma":
            gain += 1.0
    return gain


@jit
def _rounded(normalized, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    return normalized.to(DTYPE).to(tl.float32) if CASTING == "llama" else normalized


class TileSettings(NamedTuple):
    """How a kernel is launched for rows up to some width."""

    rows: int
    """How many rows make a tile, which a program computes at once."""
    warps: int
    """How many warps a program has."""
    stages: int
    """Depth of the pipeline: one tile is computed while ``stages - 1`` are loaded, if shared memory has room."""
    programs: int
    """How many programs each multiprocessor runs, each of which takes tile after tile; 0: one program for each tile."""


WIDE = -1
WIDE_BLOCK = 8192
"""Columns of a tile of rows that are wider than the widest of the table."""

# Measured on an H200 in bfloat16, for rows at most so wide.
FORWARD = {
    64: TileSettings(64, 4, 1, 0),
    128: TileSettings(16, 2, 1, 0),
    256: TileSettings(8, 2, 1, 0),
    512: TileSettings(4, 4, 1, 0),
    1024: TileSettings(2, 4, 1, 0),
    2048: TileSettings(1, 4, 1, 0),
    4096: TileSettings(1, 4, 1, 0),
    6144: TileSettings(1, 4, 1, 0),
    8192: TileSettings(1, 8, 1, 0),
    16384: TileSettings(1, 8, 1, 0),
    32768: TileSettings(1, 16, 1, 0),
    WIDE: TileSettings(1, 4, 3, 0),
}
BACKWARD = {
    64: TileSettings(32, 4, 3, 3),
    128: TileSettings(64, 8, 3, 1),
    256: TileSettings(8, 4, 3, 3),
    512: TileSettings(4, 4, 4, 2),
    1024: TileSettings(2, 4, 4, 2),
    2048: TileSettings(1, 4, 4, 2),
    4096: TileSettings(2, 8, 3, 1),
    6144: TileSettings(1, 8, 4, 1),
    8192: TileSettings(1, 8, 3, 1),
    16384: TileSettings(1, 16, 1, 1),
    WIDE: TileSettings(1, 8, 3, 1),
}
SUM = {"ROWS": 512, "COLUMNS": 16, "num_warps": 8}


class _Tiles(NamedTuple):
    """``TileSettings`` for one width of rows on one device."""

    wide: bool
    rows: int
    columns: int
    resident: int
    """The most programs that there may be; 0: as many as there are tiles."""
    constants: dict[str, int]

    def programs(self, M: int, H: int) -> tuple[int, int]:
        """How many programs there are for each block of columns, and in all."""
        tiles, blocks = -(-M // self.rows), -(-H // self.columns)
        each = min(tiles, max(1, self.resident // blocks)) if self.resident else tiles
        return each, each * blocks


@functools.cache
def _tiles(is_forward: bool, hidden: int, nbytes: int, device: torch.device) -> _Tiles:
    """How to launch a kernel that loads ``nbytes`` for each of the ``hidden`` columns of a row."""
    table = FORWARD if is_forward else BACKWARD
    width = next((width for width in table if hidden <= width), WIDE)
    rows, warps, stages, programs = table[width]
    columns = WIDE_BLOCK if width == WIDE else max(64, 1 << max(hidden - 1, 0).bit_length())
    room = _shared_memory(device) // max(programs, 1) - 4096  # beside the tiles: a few numbers a row, what CUDA takes
    stages = min(stages, 1 + room // (rows * columns * nbytes))
    constants = {"BLOCK_H": columns, "STAGES": stages, "num_warps": warps}
    return _Tiles(width == WIDE, rows, columns, programs * launch.multiprocessors(device), constants)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that each multiprocessor has."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 2**20


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    h: Tensor | None,
    y: Tensor,
    rstd: Tensor,
    eps: float | None,
    casting: str,
) -> None:
    """Write y and rstd, and if there is a residual, x + residual to h. If eps is None, rstd is read and not written.

    x may have any strides, and the weight and rstd any alignment. All others are dense.
    """
    hidden, M = x.shape[-1], rstd.numel()
    if hidden == 0:
        return
    x, *strides = _rows(x)
    weight = None if weight is None else launch.dense(weight)
    nbytes = x.element_size() + (0 if residual is None else residual.element_size())
    tiles = _tiles(True, hidden, nbytes, x.device)
    arguments = (x, residual, weight, x if h is None else h, y, rstd, M, hidden, *strides, eps)
    if tiles.wide:
        launch.run(_wide_forward_kernel, M, *arguments, CASTING=casting, **tiles.constants)
    else:
        programs, _ = tiles.programs(M, hidden)
        launch.run(_forward_kernel, programs, *arguments, CASTING=casting, ROWS=tiles.rows, **tiles.constants)


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    y: Tensor | None,
    casting: str,
) -> None:
    """Write those of dx, dweight and y that are not None. dx is the norm's gradient + dresidual, rounded once.

    x may have any strides, and the inputs any alignment. dx, dweight and y are dense.
    """
    hidden, M = x.shape[-1], rstd.numel()
    if hidden == 0:
        return
    x, *strides = _rows(x)
    dy, rstd = launch.dense(dy), launch.dense(rstd)
    weight = None if weight is None else launch.dense(weight)
    dresidual = None if dresidual is None else launch.dense(dresidual)
    nbytes = x.element_size() + dy.element_size() + (0 if dresidual is None else dresidual.element_size())
    tiles = _tiles(False, hidden, nbytes, x.device)
    means = None
    if tiles.wide and dx is not None:
        means = torch.empty_like(rstd)
        arguments = (dy, x, weight, rstd, means, hidden, *strides)
        launch.run(_means_kernel, M, *arguments, CASTING=casting, **tiles.constants)
    each, programs = tiles.programs(max(M, 1), hidden)  # at least one program: without rows it writes a sum of zeros
    partials = None if dweight is None else rstd.new_empty(each, hidden)
    arguments = (dy, x, weight, rstd, means, dresidual, dx, y, partials, M, hidden, *strides)
    launch.run(_backward_kernel, programs, *arguments, CASTING=casting, ROWS=tiles.rows, **tiles.constants)
    if dweight is not None:
        launch.run(_sum_kernel, -(-hidden // SUM["COLUMNS"]), dweight, partials, each, hidden, **SUM)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, or a dense copy of it, and the three numbers by which ``_starts`` finds its rows."""
    hidden = x.shape[-1]
    if not x.is_contiguous() and x.stride(-1) == 1 and hidden % 16 == 0 and launch.is_aligned(x):
        sides: list[tuple[int, int]] = []  # size and stride of leading dimensions, merged where they are one
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
            if sides and sides[-1][1] == size * stride:
                sides[-1] = sides[-1][0] * size, stride
            elif size != 1:
                sides.append((size, stride))
        if len(sides) <= 2 and all(stride % 16 == 0 for _, stride in sides):  # as aligned as a copy, for the same bits
            (_, outer_stride), (inner, inner_stride) = sides if len(sides) == 2 else (*sides, (1, 0))
            return x, inner, outer_stride, inner_stride
    return launch.dense(x), 1, hidden, 0
