"""The Triton kernels of RMSNorm and LayerNorm, with a residual or without, and how they are launched.

rms_norm.py and layer_norm.py have the formulas. A LayerNorm gives its kernels a tensor of means, and perhaps a bias; an
RMSNorm gives None for these, and Triton compiles its kernels without them.

Rows up to some width are held in registers; narrow rows share a tile. Persistent programs take tile after tile, and
load the next ones while they compute. In backward each program sums a part of the gradients of weight and bias in
registers, and a second kernel adds up the parts, always in the same order. Wider rows are read again for each quantity
that is taken of a whole row, in blocks of columns.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl
from recompute.kernels.norm_tiles import tiles_of


@jit
def _forward_kernel(
    x, residual, weight, bias, h, y, mean, rstd,
    M, H, inner, outer_stride, inner_stride, eps,
    CASTING: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows as wide as BLOCK_H: program p of P takes the tiles p, p + P, p + 2P, … of them.

    h is what is normalized: x itself, or if there is a residual, the tensor that x + residual is written to.
    """
    columns = tl.arange(0, BLOCK_H)[None, :]
    if mean is None:
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
            if mean is not None:
                values -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
        else:
            if mean is None:
                variance = tl.sum(values * values, axis=1) / H
            else:
                m = tl.sum(values, axis=1) / H
                centered = tl.where(mask, values - m[:, None], 0.0)
                error = tl.sum(centered, axis=1) / H
                variance = tl.sum(centered * centered, axis=1) / H - error * error
                m += error
                tl.store(mean + rows, m, mask=rows < M)
                values -= m[:, None]
            r = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
            tl.store(rstd + rows, r, mask=rows < M)
        if mean is not None:  # not earlier, beside two sums over a row: it would need more registers than an RMSNorm
            gain = _gain(weight, columns, H, CASTING)
        normalized = _rounded(values * r[:, None], h.dtype.element_ty, CASTING)
        tl.store(y + offsets, _scaled(normalized, gain, bias, columns, H).to(y.dtype.element_ty), mask=mask)


@jit
def _wide_forward_kernel(
    x, residual, weight, bias, h, y, mean, rstd,
    M, H, inner, outer_stride, inner_stride, eps,
    CASTING: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows of any width, one a program, in two passes over its columns, or three for a LayerNorm.

    All but the first find them in L2.
    """
    row = tl.program_id(0)
    offset = row.to(tl.int64) * H
    start = _starts(row, inner, outer_stride, inner_stride)
    m = 0.0
    if eps is None:
        r = tl.load(rstd + row)
        if mean is not None:
            m = tl.load(mean + row)
    else:
        if mean is not None:
            sums = tl.zeros((BLOCK_H,), tl.float32)
            for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
                columns = first + tl.arange(0, BLOCK_H)
                sums += _stream(x, residual, h, start + columns, offset + columns, columns < H)
            m = tl.sum(sums, axis=0) / H
        errors = tl.zeros((BLOCK_H,), tl.float32)
        squares = tl.zeros((BLOCK_H,), tl.float32)
        for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
            columns = first + tl.arange(0, BLOCK_H)
            values = _stream(x, residual, h, start + columns, offset + columns, columns < H)
            if mean is not None:
                values = tl.where(columns < H, values - m, 0.0)
                errors += values
            squares += values * values
        variance = tl.sum(squares, axis=0) / H
        if mean is not None:
            error = tl.sum(errors, axis=0) / H
            variance -= error * error
            m += error
            tl.store(mean + row, m)
        r = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
        tl.store(rstd + row, r)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_H)
        mask = columns < H
        values = _stream(x, residual, h, start + columns, offset + columns, mask)
        if residual is not None:
            tl.store(h + offset + columns, values.to(h.dtype.element_ty), mask=mask)
        if mean is not None:
            values -= m
        normalized = _rounded(values * r, h.dtype.element_ty, CASTING)
        scaled = _scaled(normalized, _gain(weight, columns, H, CASTING), bias, columns, H)
        tl.store(y + offset + columns, scaled.to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dy, x, weight, mean, rstd, dots, shifts, dresidual, dx, weight_parts, bias_parts,
    M, H, inner, outer_stride, inner_stride,
    CASTING: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program p of P takes the tiles p, p + P, p + 2P, … of rows, and sums their dy · h and dy in registers.

    A tile has BLOCK_H columns: the whole row, or one of several blocks, with P programs each. If there are several,
    ``dots`` and ``shifts`` are given, which _dots_kernel has computed.
    """
    blocks = tl.cdiv(H, BLOCK_H)
    program = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    if STAGES > 1:
        gain = _gain(weight, columns, H, CASTING)
    sums = tl.zeros((ROWS, BLOCK_H), tl.float32)
    bias_sums = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for tile in tl.range(program, tl.cdiv(M, ROWS), tl.num_programs(0) // blocks, num_stages=STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < M)[:, None] & (columns < H)
        offsets = rows.to(tl.int64)[:, None] * H + columns
        starts = _starts(rows, inner, outer_stride, inner_stride)[:, None]
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        h = tl.load(x + starts + columns, mask=mask, other=0.0).to(tl.float32)
        if mean is not None:
            h -= tl.load(mean + rows, mask=rows < M, other=0.0)[:, None]
        h *= r
        if STAGES == 1:  # the widest rows: in registers for all tiles it would leave too few
            gain = _gain(weight, columns, H, CASTING)
        g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        if weight_parts is not None:
            sums += g * h
        if bias_parts is not None:
            bias_sums += g
        if dx is not None:
            g *= gain
            dot = tl.sum(g * h, axis=1) / H if dots is None else tl.load(dots + rows, mask=rows < M, other=0.0)
            if mean is not None:
                shift = tl.sum(g, axis=1) / H if shifts is None else tl.load(shifts + rows, mask=rows < M, other=0.0)
                g -= shift[:, None]
            g = r * (g - h * dot[:, None])
            if dresidual is not None:
                g += tl.load(dresidual + offsets, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=mask)
    if weight_parts is not None:
        total = tl.sum(sums, axis=0)[None, :]
        tl.store(weight_parts + program.to(tl.int64) * H + columns, total, mask=columns < H)
    if bias_parts is not None:
        total = tl.sum(bias_sums, axis=0)[None, :]
        tl.store(bias_parts + program.to(tl.int64) * H + columns, total, mask=columns < H)


@jit
def _dots_kernel(
    dy, x, weight, mean, rstd, dots, shifts, H, inner, outer_stride, inner_stride,
    CASTING: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """mean(dy · gain · h, over H), and for a LayerNorm mean(dy · gain, over H), of rows of any width, one a program."""
    row = tl.program_id(0)
    offset = row.to(tl.int64) * H
    start = _starts(row, inner, outer_stride, inner_stride)
    r = tl.load(rstd + row)
    m = 0.0 if mean is None else tl.load(mean + row)
    sums = tl.zeros((BLOCK_H,), tl.float32)
    shift_sums = tl.zeros((BLOCK_H,), tl.float32)
    for first in tl.range(0, H, BLOCK_H, num_stages=STAGES):
        columns = first + tl.arange(0, BLOCK_H)
        mask = columns < H
        h = tl.load(x + start + columns, mask=mask, other=0.0).to(tl.float32)
        if mean is not None:
            h -= m
        h *= r
        g = tl.load(dy + offset + columns, mask=mask, other=0.0).to(tl.float32)
        g *= _gain(weight, columns, H, CASTING)
        sums += g * h
        if shifts is not None:
            shift_sums += g
    tl.store(dots + row, tl.sum(sums, axis=0) / H)
    if shifts is not None:
        tl.store(shifts + row, tl.sum(shift_sums, axis=0) / H)


@jit
def _sum_kernel(total, parts, other_total, other_parts, P, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total[h] = sum over p of parts[p, h]: the second stage of the gradient of weight or bias, or of both."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    _add_up(total, parts, columns, P, H, ROWS, COLUMNS)
    if other_total is not None:
        _add_up(other_total, other_parts, columns, P, H, ROWS, COLUMNS)


@jit
def _add_up(total, parts, columns, P, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < P)[:, None] & (columns < H)[None, :]
        sums += tl.load(parts + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(total + columns, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=columns < H)


@jit
def _starts(rows, inner, outer_stride, inner_stride):
    """Where the rows of x start. Its leading dimensions may be two with a gap in between, as heads in a slice are."""
    return (rows // inner).to(tl.int64) * outer_stride + (rows % inner).to(tl.int64) * inner_stride


@jit
def _stream(x, residual, h, at_x, at, mask):
    """x, or x + residual rounded to the dtype of h."""
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
def _scaled(normalized, gain, bias, columns, H):
    """normalized · gain + bias, rounded once, so that no compiler may choose between that and rounding twice."""
    if bias is None:
        scaled = normalized * gain
    else:
        scaled = tl.fma(normalized, gain, tl.load(bias + columns, mask=columns < H, other=0.0).to(tl.float32))
    return scaled


@jit
def _rounded(normalized, DTYPE: tl.constexpr, CASTING: tl.constexpr):
    return normalized.to(DTYPE).to(tl.float32) if CASTING == "llama" else normalized


SUM = {"ROWS": 512, "COLUMNS": 16, "num_warps": 8}


def launch_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    h: Tensor,
    y: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float | None,
    casting: str,
) -> None:
    """Write y and rstd, for a LayerNorm mean, and if there is a residual, x + residual to h, which else is x.

    mean: None for an RMSNorm.
    eps: if None, mean and rstd are read and not written.

    x may have any strides, and residual, weight and bias any alignment. All others are dense.
    """
    hidden, M = x.shape[-1], rstd.numel()
    if hidden == 0:
        return
    residual, weight, bias = map(_dense, (residual, weight, bias))
    x_rows, *strides = _rows(x)
    h = x_rows if residual is None else h
    nbytes = sum(each.element_size() for each in (x_rows, residual, weight, bias) if each is not None)
    tiles = tiles_of(True, hidden, nbytes, x.device)
    arguments = (x_rows, residual, weight, bias, h, y, mean, rstd, M, hidden, *strides, eps)
    if tiles.wide:
        launch.run(_wide_forward_kernel, M, *arguments, CASTING=casting, **tiles.constants)
    else:
        programs, _ = tiles.programs(M, hidden)
        launch.run(_forward_kernel, programs, *arguments, CASTING=casting, ROWS=tiles.rows, **tiles.constants)


def launch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dresidual: Tensor | None,
    dx: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    casting: str,
) -> None:
    """Write those of dx, dweight and dbias that are not None. dx is the norm's gradient + dresidual, rounded once.

    mean: None for an RMSNorm.

    x may have any strides, and the inputs any alignment. dx, dweight and dbias are dense.
    """
    hidden, M = x.shape[-1], rstd.numel()
    if hidden == 0:
        return
    x, *strides = _rows(x)
    dy, rstd = launch.dense(dy), launch.dense(rstd)
    mean, weight, dresidual = map(_dense, (mean, weight, dresidual))
    nbytes = sum(each.element_size() for each in (x, dy, dresidual) if each is not None)
    tiles = tiles_of(False, hidden, nbytes, x.device, mean is not None)
    dots = shifts = None
    if tiles.wide and dx is not None:
        dots, shifts = torch.empty_like(rstd), None if mean is None else torch.empty_like(rstd)
        arguments = (dy, x, weight, mean, rstd, dots, shifts, hidden, *strides)
        launch.run(_dots_kernel, M, *arguments, CASTING=casting, **tiles.constants)
    each, programs = tiles.programs(max(M, 1), hidden)  # at least one program: without rows it writes a sum of zeros
    totals = (dweight, dbias)
    parts = [None if total is None else rstd.new_empty(each, hidden) for total in totals]
    given = (dy, x, weight, mean, rstd, dots, shifts, dresidual, dx, *parts, M, hidden, *strides)
    launch.run(_backward_kernel, programs, *given, CASTING=casting, ROWS=tiles.rows, **tiles.constants)
    sums = [pair for pair in zip(totals, parts, strict=True) if pair[0] is not None]
    if sums:
        pairs = [*itertools.chain(*sums), None, None][:4]
        launch.run(_sum_kernel, -(-hidden // SUM["COLUMNS"]), *pairs, each, hidden, **SUM)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else launch.dense(tensor)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """x, or a dense copy of it, and the three numbers that ``_starts`` finds its rows by."""
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
