"""The Triton kernels of cross-entropy, which read and write logits one block of columns at a time.

``cross_entropy`` has the formulas. In forward, ``observe`` reads each block of columns once and keeps a few numbers a
row; ``conclude`` computes the losses from those numbers. In backward, ``differentiate`` reads a block of logits once
and writes its gradient, if need be over the logits. No block depends on another, so there may be one or many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl
from recompute.kernels.loss_settings import LossSettings, Targets, wide_dtype


@jit
def _tanh(x):
    """tanh as (1 - e) / (1 + e) for e = exp(-2|x|), with the sign of x; near 0, where that cancels, its series."""
    magnitude = tl.abs(x)
    e = tl.exp(-2.0 * magnitude)
    far = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(magnitude < 0.25, near, tl.where(x < 0.0, -far, far))


@jit
def _statistics_kernel(
    logits, target, class_weights, maxima, sums, weighted_sums, indices, target_logits,
    width, stride, first, slot, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program r reads row r of the columns from ``first`` on; ``slot`` is where in its outputs those of row 0 go.

    Every lane keeps the statistics of its own columns, with one exponential for each. At the end they are combined.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    m = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)  # finite: of -inf - -inf comes nan
    z = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        columns = start + lanes
        mask = columns < width
        s = tl.load(logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
        if SOFTCAP:
            s = tl.where(mask, softcap * _tanh(s / softcap), float("-inf"))
        if weighted_sums is not None:
            term = tl.where(mask, s, 0.0)
            if class_weights is not None:
                term *= tl.load(class_weights + first + columns, mask=mask, other=0.0)
            weighted += term
        difference = s - m
        e = tl.exp(-tl.abs(difference))
        z = tl.where(difference > 0.0, z * e + 1.0, z + e)
        if indices is not None:
            index = tl.where(difference > 0.0, columns, index)
        m = tl.maximum(m, s)
    highest = tl.max(m, axis=0)
    tl.store(maxima + slot + row, highest)
    tl.store(sums + slot + row, tl.sum(z * tl.exp(m - highest), axis=0))
    if weighted_sums is not None:
        tl.store(weighted_sums + slot + row, tl.sum(weighted, axis=0))
    if indices is not None:
        tl.store(indices + slot + row, first + tl.min(tl.where(m == highest, index, width - 1), axis=0))
    column = tl.load(target + row) - first
    here = (column >= 0) & (column < width)
    s = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
    if SOFTCAP:
        s = softcap * _tanh(s / softcap)
    tl.store(target_logits + row, s, mask=here)


@jit
def _loss_kernel(
    target, class_weights, class_weight_sum, maxima, sums, weighted_sums, indices, target_logits,
    loss, normalizers, weights, max_logit, argmax, in_bounds,
    M, slots, slot_stride, vocabulary, ignore_index, label_smoothing, z_loss,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every lane computes the loss of one row, from the statistics of the row's blocks."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < M
    m = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    offsets = rows
    for _ in range(slots):
        block_m = tl.load(maxima + offsets, mask=mask, other=0.0)
        block_z = tl.load(sums + offsets, mask=mask, other=1.0)
        if indices is not None:
            index = tl.where(block_m > m, tl.load(indices + offsets, mask=mask, other=0), index)
        highest = tl.maximum(m, block_m)
        z = z * tl.exp(m - highest) + block_z * tl.exp(block_m - highest)
        m = highest
        if weighted_sums is not None:
            weighted += tl.load(weighted_sums + offsets, mask=mask, other=0.0)
        offsets += slot_stride
    lse = m + tl.log(z)
    y = tl.load(target + rows, mask=mask, other=0)
    counts, in_range = y != ignore_index, (y >= 0) & (y < vocabulary)
    tl.store(in_bounds + 0 * rows, 0, mask=mask & counts & ~in_range)
    s = tl.load(target_logits + rows, mask=mask & in_range, other=float("nan"))
    s = tl.where(in_range, s, float("nan"))
    weight = tl.where(in_range, 1.0, float("nan"))
    if class_weights is not None:
        weight *= tl.load(class_weights + y, mask=mask & in_range, other=0.0)
    value = (1.0 - label_smoothing) * weight * (lse - s) + z_loss * lse * lse
    if weighted_sums is not None:
        value += label_smoothing / vocabulary * (_weight_sum(class_weight_sum, vocabulary) * lse - weighted)
    tl.store(loss + rows, tl.where(counts, value, 0.0), mask=mask)
    tl.store(normalizers + 2 * rows, m, mask=mask)
    tl.store(normalizers + 2 * rows + 1, z, mask=mask)
    tl.store(weights + rows, tl.where(counts, weight, 0.0), mask=mask)
    if max_logit is not None:
        tl.store(max_logit + rows, m, mask=mask)
    if argmax is not None:
        tl.store(argmax + rows, index.to(tl.int64), mask=mask)


@jit
def _gradient_kernel(
    logits, dlogits, target, class_weights, class_weight_sum, normalizers, dloss,
    width, stride, first, vocabulary, ignore_index, label_smoothing, z_loss, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program r writes row r of the columns from ``first`` on; ``dlogits`` may be ``logits``."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    dlogits += row * stride
    lanes = tl.arange(0, BLOCK)
    y = tl.load(target + row)
    if y == ignore_index:
        for start in range(0, width, BLOCK):
            columns = start + lanes
            zeros = tl.zeros((BLOCK,), dlogits.dtype.element_ty)
            tl.store(dlogits + columns, zeros, mask=columns < width)
    else:
        m = tl.load(normalizers + 2 * row)
        z = tl.load(normalizers + 2 * row + 1)
        scale = tl.load(dloss + row)
        in_range = (y >= 0) & (y < vocabulary)
        weight = tl.where(in_range, 1.0, float("nan"))
        if class_weights is not None:
            weight *= tl.load(class_weights + y, mask=in_range, other=0.0)
        share = label_smoothing / vocabulary
        hot = (1.0 - label_smoothing) * weight
        a = hot + share * _weight_sum(class_weight_sum, vocabulary) + 2.0 * z_loss * (m + tl.log(z))
        a /= z
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + lanes
            mask = columns < width
            s = tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32)
            if SOFTCAP:
                tanh = _tanh(s / softcap)
                s = softcap * tanh
            d = a * tl.exp(s - m) - tl.where(first + columns == y, hot, 0.0)
            if class_weight_sum is not None:
                d -= share * tl.load(class_weights + first + columns, mask=mask, other=0.0)
            else:
                d -= share
            d *= scale
            if SOFTCAP:
                d *= 1.0 - tanh * tanh
            tl.store(dlogits + columns, d.to(dlogits.dtype.element_ty), mask=mask)


@jit
def _weight_sum(class_weight_sum, vocabulary):
    return tl.load(class_weight_sum) if class_weight_sum is not None else vocabulary * 1.0


# Measured on an H200 in bfloat16: a block of 8448 columns at 2380 and 3660 GB/s (statistics, gradient; in L2 for the
# most part), all of 128256 at 2910 and 3660.
NARROW_SETTINGS = {"BLOCK": 1024, "STAGES": 3, "num_warps": 2}
WIDE_SETTINGS = {"BLOCK": 2048, "STAGES": 3, "num_warps": 4}
WIDE = 16384
LOSS_SETTINGS = {"BLOCK": 128, "num_warps": 4}


def _launch_settings(width: int) -> dict[str, int]:
    return NARROW_SETTINGS if width <= WIDE else WIDE_SETTINGS


class Statistics(NamedTuple):
    """What ``observe`` has found: (blocks, M) for each block of columns of each row, and (M,) for each row's target."""

    maxima: Tensor
    sums: Tensor
    """Sums of exp(s - maximum)."""
    weighted_sums: Tensor | None
    """Sums of c · s, for label smoothing."""
    indices: Tensor | None
    """The first column with the maximum."""
    target_logits: Tensor


class Losses(NamedTuple):
    loss: Tensor
    """(M,), as all others but ``normalizers``; 0 where the target is ignored."""
    normalizers: Tensor
    """(M, 2): the maximum, and the sum of exp(s - maximum). They are kept apart because lse, which combines them, would
    be rounded, and so give a whole row of p the same error."""
    weights: Tensor
    """The weight of the target's class; 0 where it is ignored."""
    max_logit: Tensor | None
    argmax: Tensor | None


def new_statistics(logits: Tensor, tokens: int, blocks: int, settings: LossSettings) -> Statistics:
    """Room for the statistics of ``blocks`` blocks of rows like those of ``logits``."""
    dtype, smoothing = wide_dtype(logits), settings.label_smoothing > 0
    padded = -(-tokens // 16) * 16  # every block starts at a multiple of 16, so that one compilation serves all
    table = logits.new_empty((2 + smoothing, blocks, padded), dtype=dtype)[..., :tokens]
    indices = logits.new_empty((blocks, padded), dtype=torch.int32)[:, :tokens] if settings.with_argmax else None
    target_logits = logits.new_empty(tokens, dtype=dtype)
    return Statistics(table[0], table[1], table[2] if smoothing else None, indices, target_logits)


def observe(statistics: Statistics, block: int, first: int, logits: Tensor, targets: Targets) -> None:
    """Read the logits of block number ``block``, whose first column is column ``first``, into ``statistics``."""
    if not launch.uses_triton(logits):
        _observe_reference(statistics, block, first, logits, targets)
        return
    (tokens, width), softcap = logits.shape, targets.settings.softcap
    launch.run(
        _statistics_kernel,
        tokens,
        *(logits, targets.labels, targets.class_weights, *statistics),
        *(width, logits.stride(0), first, block * statistics.maxima.stride(0), softcap, softcap > 0),
        **_launch_settings(width),
    )


def conclude(statistics: Statistics, targets: Targets) -> Losses:
    """The loss of every row whose blocks were all observed.

    Raises ``IndexError`` on the CPU for a target that is neither a class nor ignored, as PyTorch does; on CUDA, where
    nothing waits for the device, an assertion there fails.
    """
    blocks, tokens = statistics.maxima.shape
    labels, class_weights, vocabulary, settings = targets
    new = statistics.target_logits.new_empty
    losses = Losses(
        *(new(tokens), new(tokens, 2), new(tokens), new(tokens) if settings.with_max else None),
        new(tokens, dtype=torch.int64) if settings.with_argmax else None,
    )
    if not launch.uses_triton(losses.loss):
        _refuse_unless(targets.are_in_bounds().all(), targets)
        return _conclude_reference(statistics, targets)
    in_bounds = labels.new_ones(())
    launch.run(
        _loss_kernel,
        -(-tokens // LOSS_SETTINGS["BLOCK"]),
        *(labels, class_weights, targets.weight_sum(), *statistics, *losses, in_bounds),
        *(tokens, blocks, statistics.maxima.stride(0), vocabulary),
        *(settings.ignore_index, settings.label_smoothing, settings.z_loss),
        **LOSS_SETTINGS,
    )
    _refuse_unless(in_bounds, targets)
    return losses


def _refuse_unless(in_bounds: Tensor, targets: Targets) -> None:
    """Raise for a target that is no class, where ``in_bounds``, 0-dimensional, is 0."""
    if type(in_bounds) is not Tensor:  # a fake tensor, which has no value
        return
    if in_bounds.device.type != "cpu":
        torch._assert_async(in_bounds, "cross_entropy: a target is out of bounds: neither a class nor ignore_index")
    elif not in_bounds:
        wrong = targets.labels[~targets.are_in_bounds()][0].item()
        raise IndexError(f"Target {wrong} is out of bounds.")


def differentiate(
    logits: Tensor, dlogits: Tensor, first: int, targets: Targets, normalizers: Tensor, dloss: Tensor
) -> None:
    """Write the gradient of a block of the logits into ``dlogits``, of the same strides: it may be ``logits``."""
    if not launch.uses_triton(logits):
        _differentiate_reference(logits, dlogits, first, targets, normalizers, dloss)
        return
    (tokens, width), settings = logits.shape, targets.settings
    launch.run(
        _gradient_kernel,
        tokens,
        *(logits, dlogits, targets.labels, targets.class_weights, targets.weight_sum(), normalizers, dloss),
        *(width, logits.stride(0), first, targets.vocabulary, settings.ignore_index),
        *(settings.label_smoothing, settings.z_loss, settings.softcap, settings.softcap > 0),
        **_launch_settings(width),
    )


def capped(logits: Tensor, settings: LossSettings) -> Tensor:
    """Logits after ``softcap``, in the dtype that the references compute in."""
    logits = launch.widen(logits)
    return settings.softcap * torch.tanh(logits / settings.softcap) if settings.softcap > 0 else logits


def _observe_reference(statistics: Statistics, block: int, first: int, logits: Tensor, targets: Targets) -> None:
    s, width, class_weights = capped(logits, targets.settings), logits.shape[1], targets.class_weights
    maxima = s.amax(1).clamp_min(torch.finfo(s.dtype).min)  # finite: of -inf - -inf comes nan
    statistics.maxima[block] = maxima
    statistics.sums[block] = torch.exp(s - maxima[:, None]).sum(1)
    if statistics.weighted_sums is not None:
        weighted = s if class_weights is None else s * class_weights[first : first + width]
        statistics.weighted_sums[block] = weighted.sum(1)
    if statistics.indices is not None:
        statistics.indices[block] = s.argmax(1) + first
    columns = targets.labels - first
    here = (columns >= 0) & (columns < width)
    found = s.gather(1, columns.clamp(0, width - 1)[:, None])[:, 0]
    statistics.target_logits.copy_(torch.where(here, found, statistics.target_logits))


def _conclude_reference(statistics: Statistics, targets: Targets) -> Losses:
    _, class_weights, vocabulary, settings = targets
    highest, blocks = statistics.maxima.max(0)
    sums = (statistics.sums * torch.exp(statistics.maxima - highest)).sum(0)
    lse = highest + sums.log()
    counts, weights = targets.weights(lse)
    loss = (1.0 - settings.label_smoothing) * weights * (lse - statistics.target_logits)
    loss += settings.z_loss * lse.square()
    if statistics.weighted_sums is not None:
        total = vocabulary if class_weights is None else class_weights.sum()
        loss += settings.label_smoothing / vocabulary * (total * lse - statistics.weighted_sums.sum(0))
    return Losses(
        torch.where(counts, loss, 0.0),
        torch.stack((highest, sums), 1),
        torch.where(counts, weights, 0.0),
        highest if settings.with_max else None,
        statistics.indices.gather(0, blocks[None])[0].long() if statistics.indices is not None else None,
    )


def _differentiate_reference(
    logits: Tensor, dlogits: Tensor, first: int, targets: Targets, normalizers: Tensor, dloss: Tensor
) -> None:
    labels, class_weights, vocabulary, settings = targets
    width, s = logits.shape[1], launch.widen(logits)
    if settings.softcap > 0:
        tanh = torch.tanh(s / settings.softcap)
        s = settings.softcap * tanh
    maxima, sums = normalizers[:, :1], normalizers[:, 1:]
    counts, weights = targets.weights(dloss)
    columns = torch.arange(first, first + width, device=logits.device)
    share = settings.label_smoothing / vocabulary
    total = vocabulary if class_weights is None else class_weights.sum()
    hot = ((1.0 - settings.label_smoothing) * weights)[:, None]
    a = hot + share * total + 2.0 * settings.z_loss * (maxima + sums.log())
    ds = a / sums * torch.exp(s - maxima)
    ds -= hot * (columns == labels[:, None])
    ds -= share if class_weights is None else share * class_weights[first : first + width]
    ds *= dloss[:, None]
    if settings.softcap > 0:
        ds *= 1.0 - tanh.square()
    dlogits.copy_(torch.where(counts[:, None], ds, 0.0))
