"""The Triton kernels of cross-entropy, which read and write logits one block of columns at a time.

``cross_entropy`` has the formulas. In forward, ``observe`` reads each block of columns once and keeps a few numbers a
row; ``conclude`` computes the losses from those numbers. In backward, ``differentiate`` reads a block of logits once
and writes its gradient, if need be over the logits. No block depends on another, so there may be one or many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl
from recompute.kernels.loss_settings import Targets
from recompute.kernels.row_statistics import (
    Losses,
    Statistics,
    conclude_reference,
    differentiate_reference,
    observe_reference,
)
from recompute.kernels.scores import gap, score, unscore


@jit
def _of_row(numbers, row, count, other, TARGETS: tl.constexpr):
    """The row's number, or its ``count`` numbers in lanes, of which those beyond have ``other``."""
    if TARGETS == 1:
        found = tl.load(numbers + row)
    else:
        order = tl.arange(0, TARGETS)
        found = tl.load(numbers + row * count + order, mask=order < count, other=other)
    return found


@jit
def _statistics_kernel(
    logits, target, class_weights, maxima, sums, weighted_sums, moments, indices, target_logits,
    width, stride, first, slot, outer, inner, count,
    FORM: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
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
    moment = tl.zeros((BLOCK,), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        columns = start + lanes
        mask = columns < width
        s = tl.load(logits + columns, mask=mask, other=float("-inf")).to(tl.float32)
        if FORM != 0:
            s = tl.where(mask, score(s, outer, inner, FORM)[0], float("-inf"))
        if weighted_sums is not None:
            term = tl.where(mask, s, 0.0)
            if class_weights is not None:
                term *= tl.load(class_weights + first + columns, mask=mask, other=0.0)
            weighted += term
        difference = s - m
        e = tl.exp(-tl.abs(difference))
        if moments is not None:
            moment = tl.where(difference > 0.0, e * (moment - gap(s, m) * z), moment + e * gap(s, m))
        z = tl.where(difference > 0.0, z * e + 1.0, z + e)
        if indices is not None:
            index = tl.where(difference > 0.0, columns, index)
        m = tl.maximum(m, s)
    highest = tl.max(m, axis=0)
    tl.store(maxima + slot + row, highest)
    tl.store(sums + slot + row, tl.sum(z * tl.exp(m - highest), axis=0))
    if weighted_sums is not None:
        tl.store(weighted_sums + slot + row, tl.sum(weighted, axis=0))
    if moments is not None:
        moment = tl.exp(m - highest) * (moment + z * gap(m, highest))
        tl.store(moments + slot + row, tl.sum(moment, axis=0))
    if indices is not None:
        tl.store(indices + slot + row, first + tl.min(tl.where(m == highest, index, width - 1), axis=0))
    if TARGETS > 0:
        column = _of_row(target, row, count, -1, TARGETS) - first
        here = (column >= 0) & (column < width)
        s = tl.load(logits + column, mask=here, other=0.0).to(tl.float32)
        place = row * count + (0 if TARGETS == 1 else tl.arange(0, TARGETS))
        tl.store(target_logits + place, score(s, outer, inner, FORM)[0], mask=here)


@jit
def _loss_kernel(
    target, class_weights, class_weight_sum, maxima, sums, weighted_sums, moments, indices, target_logits,
    loss, normalizers, weights, max_logit, argmax, entropy, in_bounds,
    losses, slots, slot_stride, vocabulary, ignore_index, label_smoothing, z_loss, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every lane computes the loss of one target, from the statistics of the row's blocks."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < losses
    rows = places // count
    m = tl.full((BLOCK,), -3.4028234663852886e38, tl.float32)
    z = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    offsets = rows
    for _ in range(slots):
        block_m = tl.load(maxima + offsets, mask=mask, other=0.0)
        block_z = tl.load(sums + offsets, mask=mask, other=1.0)
        if indices is not None:
            index = tl.where(block_m > m, tl.load(indices + offsets, mask=mask, other=0), index)
        highest = tl.maximum(m, block_m)
        if moments is not None:
            block_moment = tl.load(moments + offsets, mask=mask, other=0.0) + block_z * gap(block_m, highest)
            moment = tl.exp(m - highest) * (moment + z * gap(m, highest)) + tl.exp(block_m - highest) * block_moment
        z = z * tl.exp(m - highest) + block_z * tl.exp(block_m - highest)
        m = highest
        if weighted_sums is not None:
            weighted += tl.load(weighted_sums + offsets, mask=mask, other=0.0)
        offsets += slot_stride
    lse = m + tl.log(z)
    y = tl.load(target + places, mask=mask, other=0)
    counts, in_range = y != ignore_index, (y >= 0) & (y < vocabulary)
    tl.store(in_bounds + 0 * places, 0, mask=mask & counts & ~in_range)
    s = tl.load(target_logits + places, mask=mask & in_range, other=float("nan"))
    s = tl.where(in_range, s, float("nan"))
    weight = tl.where(in_range, 1.0, float("nan"))
    if class_weights is not None:
        weight *= tl.load(class_weights + y, mask=mask & in_range, other=0.0)
    value = (1.0 - label_smoothing) * weight * (lse - s) + z_loss * lse * lse
    if weighted_sums is not None:
        value += label_smoothing / vocabulary * (_weight_sum(class_weight_sum, vocabulary) * lse - weighted)
    tl.store(loss + places, tl.where(counts, value, 0.0), mask=mask)
    width = 2 if moments is None else 3
    tl.store(normalizers + width * rows, m, mask=mask)
    tl.store(normalizers + width * rows + 1, z, mask=mask)
    tl.store(weights + places, tl.where(counts, weight, 0.0), mask=mask)
    if max_logit is not None:
        tl.store(max_logit + rows, m, mask=mask)
    if argmax is not None:
        tl.store(argmax + rows, index.to(tl.int64), mask=mask)
    if entropy is not None:
        any_counts = counts
        for other in range(count):
            any_counts |= tl.load(target + rows * count + other, mask=mask, other=ignore_index) != ignore_index
        tl.store(normalizers + width * rows + 2, moment / z, mask=mask)
        tl.store(entropy + rows, tl.where(any_counts, tl.log(z) - moment / z, 0.0), mask=mask)


@jit
def _gradient_kernel(
    logits, dlogits, target, class_weights, class_weight_sum, normalizers, dloss, dentropy,
    width, stride, first, vocabulary, ignore_index, label_smoothing, z_loss, outer, inner, slope, count,
    FORM: tl.constexpr, TARGETS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program r writes row r of the columns from ``first`` on; ``dlogits`` may be ``logits``."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    dlogits += row * stride
    lanes = tl.arange(0, BLOCK)
    y = _of_row(target, row, count, ignore_index, TARGETS)
    counts = y != ignore_index
    if TARGETS > 1:
        counts = tl.max(counts.to(tl.int32), axis=0) != 0
    if not counts:
        for start in range(0, width, BLOCK):
            columns = start + lanes
            zeros = tl.zeros((BLOCK,), dlogits.dtype.element_ty)
            tl.store(dlogits + columns, zeros, mask=columns < width)
    else:
        normalizers += row * (2 if dentropy is None else 3)
        m = tl.load(normalizers)
        z = tl.load(normalizers + 1)
        in_range = (y >= 0) & (y < vocabulary)
        scale = _of_row(dloss, row, count, 0.0, TARGETS)
        share = label_smoothing / vocabulary
        if TARGETS == 1:
            weight = tl.where(in_range, 1.0, float("nan"))
            if class_weights is not None:
                weight *= tl.load(class_weights + y, mask=in_range, other=0.0)
            hot = (1.0 - label_smoothing) * weight
            a = hot + share * _weight_sum(class_weight_sum, vocabulary) + 2.0 * z_loss * (m + tl.log(z))
            a /= z
        else:  # the columns of the targets are written afterwards
            scale = tl.where(y == ignore_index, 0.0, tl.where(in_range, scale, float("nan")))
            a = tl.sum(scale, axis=0) / z
            here = in_range & (y >= first) & (y < first + width)
            of_targets = tl.load(logits + y - first, mask=here, other=0.0).to(tl.float32)
            tl.debug_barrier()  # no warp may write over them before all have read them
        if dentropy is not None:
            spread = tl.load(dentropy + row) / z
            mean = tl.load(normalizers + 2)
        for start in tl.range(0, width, BLOCK, num_stages=STAGES):
            columns = start + lanes
            mask = columns < width
            s, tanh = score(tl.load(logits + columns, mask=mask, other=0.0).to(tl.float32), outer, inner, FORM)
            if TARGETS == 1:
                d = a * tl.exp(s - m) - tl.where(first + columns == y, hot, 0.0)
                if class_weight_sum is not None:
                    d -= share * tl.load(class_weights + first + columns, mask=mask, other=0.0)
                else:
                    d -= share
                d *= scale
            else:
                d = a * tl.exp(s - m)
            if dentropy is not None:
                d -= spread * tl.exp(s - m) * (gap(s, m) - mean)
            tl.store(dlogits + columns, unscore(d, tanh, slope, FORM).to(dlogits.dtype.element_ty), mask=mask)
        if TARGETS > 1:
            s, tanh = score(of_targets, outer, inner, FORM)
            d = a * tl.exp(s - m)
            if dentropy is not None:
                d -= spread * tl.exp(s - m) * (gap(s, m) - mean)
            for other in range(count):  # a class may be there more than once
                same = y == tl.load(target + row * count + other)
                d -= tl.where(same, tl.load(dloss + row * count + other), 0.0)
            tl.debug_barrier()  # what the loop has written there is written over
            tl.store(dlogits + y - first, unscore(d, tanh, slope, FORM).to(dlogits.dtype.element_ty), mask=here)


@jit
def _weight_sum(class_weight_sum, vocabulary):
    return tl.load(class_weight_sum) if class_weight_sum is not None else vocabulary * 1.0


# Measured on an H200 in bfloat16: a block of 8448 columns at 2380 and 3660 GB/s (statistics, gradient; in L2 for the
# most part), all of 128256 at 2910 and 3660.
NARROW_SETTINGS = {"BLOCK": 1024, "STAGES": 3, "num_warps": 2}
WIDE_SETTINGS = {"BLOCK": 2048, "STAGES": 3, "num_warps": 4}
WIDE = 16384
LOSS_SETTINGS = {"BLOCK": 128, "num_warps": 4}


def launch_settings(width: int) -> dict[str, int]:
    return NARROW_SETTINGS if width <= WIDE else WIDE_SETTINGS


def observe(statistics: Statistics, block: int, first: int, logits: Tensor, targets: Targets) -> None:
    """Read the logits of block number ``block``, whose first column is column ``first``, into ``statistics``."""
    if not launch.uses_triton(logits):
        observe_reference(statistics, block, first, logits, targets)
        return
    (tokens, width), scores = logits.shape, targets.settings.scores
    launch.run(
        _statistics_kernel,
        tokens,
        *(logits, targets.labels, targets.class_weights, *statistics),
        *(width, logits.stride(0), first, block * statistics.maxima.stride(0), *scores[:2], targets.per_row),
        **{"FORM": scores.form, "TARGETS": _lanes(targets), **launch_settings(width)},
    )


def _lanes(targets: Targets) -> int:
    return 1 << (targets.per_row - 1).bit_length() if targets.per_row else 0


def conclude(statistics: Statistics, targets: Targets) -> Losses:
    """The loss of every row whose blocks were all observed.

    Raises ``IndexError`` on the CPU for a target that is neither a class nor ignored, as PyTorch does; on CUDA, where
    nothing waits for the device, an assertion there fails.
    """
    blocks, tokens = statistics.maxima.shape
    labels, count, class_weights, vocabulary, settings = targets
    new = statistics.target_logits.new_empty
    losses = Losses(
        *(new(tokens * count), new(tokens, 2 + settings.with_entropy), new(tokens * count)),
        new(tokens) if settings.with_max else None,
        new(tokens, dtype=torch.int64) if settings.with_argmax else None,
        new(tokens) if settings.with_entropy else None,
    )
    if not launch.uses_triton(losses.loss):
        _refuse_unless(targets.are_in_bounds().all(), targets)
        return conclude_reference(statistics, targets)
    in_bounds = labels.new_ones(())
    launch.run(
        _loss_kernel,
        -(-tokens * count // LOSS_SETTINGS["BLOCK"]),
        *(labels, class_weights, targets.weight_sum(), *statistics, *losses, in_bounds),
        *(tokens * count, blocks, statistics.maxima.stride(0), vocabulary),
        *(settings.ignore_index, settings.label_smoothing, settings.z_loss, count),
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
    logits: Tensor,
    dlogits: Tensor,
    first: int,
    targets: Targets,
    normalizers: Tensor,
    dloss: Tensor,
    dentropy: Tensor | None = None,
) -> None:
    """Write the gradient of a block of the logits into ``dlogits``, of the same strides: it may be ``logits``."""
    if not launch.uses_triton(logits):
        differentiate_reference(logits, dlogits, first, targets, normalizers, dloss, dentropy)
        return
    (tokens, width), settings = logits.shape, targets.settings
    scores = settings.scores
    launch.run(
        _gradient_kernel,
        tokens,
        *(logits, dlogits, targets.labels, targets.class_weights, targets.weight_sum(), normalizers, dloss, dentropy),
        *(width, logits.stride(0), first, targets.vocabulary, settings.ignore_index),
        *(settings.label_smoothing, settings.z_loss, *scores[:3], targets.per_row),
        **{"FORM": scores.form, "TARGETS": _lanes(targets), **launch_settings(width)},
    )
