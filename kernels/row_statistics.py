"""The numbers that are kept of each row of logits, and the kernels of ``cross_entropy_rows`` in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recompute.kernels.loss_settings import LossSettings, Targets, wide_dtype
from recompute.kernels.scores import finite_gap, scored, unscored


class Statistics(NamedTuple):
    """The results of ``observe``: (blocks, M) for each block of columns of each row, and (M,) for each row's target."""

    maxima: Tensor
    sums: Tensor
    """Sums of exp(s - maximum)."""
    weighted_sums: Tensor | None
    """Sums of c · s, for label smoothing."""
    moments: Tensor | None
    """Sums of exp(s - maximum) · (s - maximum), for the entropy."""
    indices: Tensor | None
    """The first column with the maximum."""
    target_logits: Tensor

    def of_rows(self) -> Statistics:
        """The same statistics, as if one block had whole rows."""
        highest, blocks = self.maxima.max(0, keepdim=True)
        sums, moments = self.scaled_to(highest)
        return Statistics(
            *(highest, sums.sum(0, keepdim=True)),
            None if self.weighted_sums is None else self.weighted_sums.sum(0, keepdim=True),
            None if moments is None else moments.sum(0, keepdim=True),
            *(None if self.indices is None else self.indices.gather(0, blocks), self.target_logits),
        )

    def scaled_to(self, highest: Tensor) -> tuple[Tensor, Tensor | None]:
        """Sums and moments as if each block's maximum were ``highest``."""
        factors, moments = torch.exp(self.maxima - highest), self.moments
        if moments is not None:
            moments = factors * (moments + self.sums * finite_gap(self.maxima, highest))
        return self.sums * factors, moments


class Losses(NamedTuple):
    loss: Tensor
    """(M · K,): the loss of each target; 0 where it is ignored."""
    normalizers: Tensor
    """(M, 2): the maximum, and the sum of exp(s - maximum). They are kept apart because lse, which combines them, would
    be rounded, and so give a whole row of p the same error. For the entropy, (M, 3): the mean of s - maximum, too."""
    weights: Tensor
    """(M · K,): the weight of the target's class; 0 where it is ignored."""
    max_logit: Tensor | None
    """(M,), as what follows."""
    argmax: Tensor | None
    entropy: Tensor | None
    """0 where all of a row's targets are ignored."""


def new_statistics(logits: Tensor, tokens: int, blocks: int, settings: LossSettings, count: int = 1) -> Statistics:
    """Room for the statistics of ``blocks`` blocks of rows like those of ``logits``, with ``count`` targets a row."""
    dtype, smoothing, entropy = wide_dtype(logits), settings.label_smoothing > 0, settings.with_entropy
    padded = -(-tokens // 16) * 16  # every block starts at a multiple of 16, so that one compilation serves all
    table = logits.new_empty((2 + smoothing + entropy, blocks, padded), dtype=dtype)[..., :tokens]
    indices = logits.new_empty((blocks, padded), dtype=torch.int32)[:, :tokens] if settings.with_argmax else None
    target_logits = logits.new_empty(tokens * count, dtype=dtype)
    sums_for_options = table[2] if smoothing else None, table[-1] if entropy else None
    return Statistics(table[0], table[1], *sums_for_options, indices, target_logits)


def observe_reference(statistics: Statistics, block: int, first: int, logits: Tensor, targets: Targets) -> None:
    labels, count, class_weights, _, settings = targets
    s, width = scored(logits, settings.scores), logits.shape[1]
    maxima = s.amax(1).clamp_min(torch.finfo(s.dtype).min)  # finite: of -inf - -inf comes nan
    statistics.maxima[block] = maxima
    e = torch.exp(s - maxima[:, None])
    statistics.sums[block] = e.sum(1)
    if statistics.weighted_sums is not None:
        weighted = s if class_weights is None else s * class_weights[first : first + width]
        statistics.weighted_sums[block] = weighted.sum(1)
    if statistics.moments is not None:
        statistics.moments[block] = (e * finite_gap(s, maxima[:, None])).sum(1)
    if statistics.indices is not None:
        statistics.indices[block] = s.argmax(1) + first
    if count == 0:
        return
    columns = labels.view(-1, count) - first
    here = (columns >= 0) & (columns < width)
    found, before = s.gather(1, columns.clamp(0, width - 1)), statistics.target_logits.view(-1, count)
    before.copy_(torch.where(here, found, before))


def conclude(statistics: Statistics, targets: Targets) -> Losses:
    """The loss of every row whose blocks were all observed, in plain PyTorch on the few numbers of each.

    Raises ``IndexError`` on the CPU for a target that is neither a class nor ignored, as PyTorch does; on CUDA, where
    nothing waits for the device, an assertion there fails.
    """
    _refuse_unless(targets.are_in_bounds().all(), targets)
    _, count, class_weights, vocabulary, settings = targets
    statistics = statistics.of_rows()
    highest, sums = statistics.maxima[0], statistics.sums[0]
    lse = (highest + sums.log()).repeat_interleave(count)
    counts, weights = targets.weights(lse)
    loss = (1.0 - settings.label_smoothing) * weights * (lse - statistics.target_logits)
    loss += settings.z_loss * lse.square()
    if statistics.weighted_sums is not None:
        total = vocabulary if class_weights is None else class_weights.sum()
        loss += settings.label_smoothing / vocabulary * (total * lse - statistics.weighted_sums[0])
    entropy, normalizers = None, [highest, sums]
    if statistics.moments is not None:
        mean = statistics.moments[0] / sums
        entropy = torch.where(counts.view(-1, count).any(1), sums.log() - mean, 0.0)
        normalizers.append(mean)
    return Losses(
        torch.where(counts, loss, 0.0),
        torch.stack(normalizers, 1),
        torch.where(counts, weights, 0.0),
        highest if settings.with_max else None,
        None if statistics.indices is None else statistics.indices[0].long(),
        entropy,
    )


def _refuse_unless(in_bounds: Tensor, targets: Targets) -> None:
    """Raise for a target that is no class, where ``in_bounds``, 0-dimensional, is False."""
    if type(in_bounds) is not Tensor:  # a fake tensor, which has no value
        return
    if in_bounds.device.type != "cpu":
        torch._assert_async(in_bounds, "cross_entropy: a target is out of bounds: neither a class nor ignore_index")
    elif not in_bounds:
        wrong = targets.labels[~targets.are_in_bounds()][0].item()
        raise IndexError(f"Target {wrong} is out of bounds.")


def differentiate_reference(
    logits: Tensor,
    dlogits: Tensor,
    first: int,
    targets: Targets,
    normalizers: Tensor,
    dloss: Tensor,
    dentropy: Tensor | None,
) -> None:
    labels, count, class_weights, vocabulary, settings = targets
    width, s = logits.shape[1], scored(logits, settings.scores)
    maxima, sums = normalizers[:, :1], normalizers[:, 1:2]
    counts, weights = (each.view(-1, count) for each in targets.weights(dloss))
    columns = labels.view(-1, count) - first
    e, share = torch.exp(s - maxima), settings.label_smoothing / vocabulary
    total = vocabulary if class_weights is None else class_weights.sum()
    hot = (1.0 - settings.label_smoothing) * weights
    a = hot + share * total + 2.0 * settings.z_loss * (maxima + sums.log())
    scales = torch.where(counts, dloss.view(-1, count) if count > 1 else 1.0, 0.0)
    ds = torch.where(counts, a * scales, 0.0).sum(1, keepdim=True) / sums * e
    of_targets = torch.where((columns >= 0) & (columns < width), hot * scales, 0.0)
    ds.scatter_add_(1, columns.clamp(0, width - 1), -of_targets)
    if share > 0:
        ds -= share if class_weights is None else share * class_weights[first : first + width]
    if count == 1:
        ds *= dloss[:, None]
    if dentropy is not None:
        ds -= dentropy[:, None] / sums * e * (finite_gap(s, maxima) - normalizers[:, 2:])
    dlogits.copy_(torch.where(counts.any(1, keepdim=True), unscored(ds, logits, settings.scores), 0.0))
