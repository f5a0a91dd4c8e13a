"""The Triton kernels of cross-entropy, which read and write logits one block of columns at a time.

``cross_entropy`` has the formulas. In forward, ``observe`` reads each block of columns once and keeps a few numbers a
row. ``row_statistics.conclude`` computes the losses from these. In backward, ``differentiate`` reads a block of logits
once and writes its gradient, if need be over the logits. No block depends on another, so there may be one or many.
"""

from __future__ import annotations

from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl
from recompute.kernels.loss_settings import Targets
from recompute.kernels.row_statistics import Statistics, differentiate_reference, observe_reference
from recompute.kernels.scores import gap, score, unscore


@jit
def _of_row(numbers, row, count, other, TARGETS: tl.constexpr):
    """The row's number, or its ``count`` numbers in lanes. Lanes beyond them have ``other``."""
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
            total = tl.load(class_weight_sum) if class_weight_sum is not None else vocabulary * 1.0
            a = hot + share * total + 2.0 * z_loss * (m + tl.log(z))
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


# Measured on an H200 in bfloat16: a block of 8448 columns at 2380 and 3660 GB/s (statistics, gradient; in L2 for the
# most part), all of 128256 at 2910 and 3660.
NARROW_SETTINGS = {"BLOCK": 1024, "STAGES": 3, "num_warps": 2}
WIDE_SETTINGS = {"BLOCK": 2048, "STAGES": 3, "num_warps": 4}
WIDE = 16384


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
    (tokens, width), settings, weights = logits.shape, targets.settings, targets.class_weights
    total = weights.sum() if weights is not None and settings.label_smoothing > 0 else None
    scores = settings.scores
    launch.run(
        _gradient_kernel,
        tokens,
        *(logits, dlogits, targets.labels, weights, total, normalizers, dloss, dentropy),
        *(width, logits.stride(0), first, targets.vocabulary, settings.ignore_index),
        *(settings.label_smoothing, settings.z_loss, *scores[:3], targets.per_row),
        **{"FORM": scores.form, "TARGETS": _lanes(targets), **launch_settings(width)},
    )
