"""Cross-entropy of logits, without a float32 copy of them. Options that take eager further passes take none here.

With logits: (M, V), target y: (M,), class weights c: (V,), all 1 if not given, computed in float32 and p = softmax(s):

    s      = softcap · tanh(logits / softcap), or logits                                        (M, V)
    lse    = log(sum(exp(s), over V))                                                           (M,)
    loss   = (1 - smoothing) · c[y] · (lse - s[y])
             + smoothing / V · sum(c · (lse - s), over V) + z_loss · lse²                       (M,)

    ds      = dloss · (a · p - (1 - smoothing) · c[y] · onehot(y) - smoothing / V · c)          (M, V)
    a       = (1 - smoothing) · c[y] + smoothing / V · sum(c) + 2 · z_loss · lse                (M,)
    dlogits = ds · (1 - (s / softcap)²), or ds                                                  (M, V)

Forward reads the logits once: M · V elements; backward reads and writes them once: 2 · M · V. Both work on any block
of columns, which is how ``linear_cross_entropy`` does without the logits as a whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.cross_entropy_rows import differentiate, observe
from recompute.kernels.loss_settings import (
    LOSS_SCHEMA,
    LossSettings,
    Targets,
    check_target,
    checked_settings,
    wide_dtype,
)
from recompute.kernels.row_statistics import Losses, conclude, new_statistics
from recompute.kernels.scores import scored


class CrossEntropy(NamedTuple):
    """A loss, and the extras that were asked for; others are None. Only the loss has a gradient."""

    loss: Tensor
    """float32 (float64 of float64 logits): 0-dimensional, or of the target's shape under ``reduction="none"``."""
    token_accuracy: Tensor | None = None
    """Float32, 0-dimensional: how many of the targets that count are the arg-max; nan where none counts."""
    argmax: Tensor | None = None
    """Int64, of the target's shape: the first of the highest logits."""
    max_logit: Tensor | None = None
    """As the loss in dtype, of the target's shape: the highest logit, after ``softcap``."""
    logits: Tensor | None = None


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    class_weights: Tensor | None = None,
    reduction: str = "mean",
    return_token_accuracy: bool = False,
    return_argmax: bool = False,
    return_max_logit: bool = False,
) -> Tensor | CrossEntropy:
    """``torch.nn.functional.cross_entropy(logits.float(), target)`` without the float32 copies.

    Args:
        logits: (..., V), float16, bfloat16, float32 or float64, of any strides.
        target: (...), int64: classes, or ``ignore_index`` for tokens without a loss and a gradient.
        ignore_index, label_smoothing: as PyTorch's.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to the loss of every token that counts, before the reduction.
        softcap: logits are first capped to ``softcap * tanh(logits / softcap)``, as in Gemma's models.
        class_weights: (V,), as PyTorch's ``weight``: a mean divides by the sum of the targets' weights.
        reduction: ``mean``, ``sum`` or ``none``.
        return_token_accuracy, return_argmax, return_max_logit: what to return beside the loss.

    Returns:
        The loss, or a ``CrossEntropy`` where an extra was asked for.

    Raises:
        KernelError: for other dtypes, shapes or options, or tensors on several devices.
        IndexError: for a target that is neither a class nor ``ignore_index``, on the CPU. On CUDA an assertion on the
            device fails, as PyTorch's own does, which the next wait for the device reports.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))  # log(4)
    tensor(1.3863)
    """
    launch.check("cross_entropy", logits=logits, class_weights=class_weights)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise KernelError(f"cross_entropy: logits has shape {tuple(logits.shape)}; expected (..., V) with V > 0.")
    check_target("cross_entropy", target, class_weights, logits.shape[:-1], logits.shape[-1], logits.device)
    settings = checked_settings(
        *("cross_entropy", ignore_index, label_smoothing, z_loss, softcap, reduction),
        *(return_max_logit, return_argmax or return_token_accuracy),
    )
    results = losses_of(logits, target, class_weights, settings)
    return with_extras(*results, target, settings, return_token_accuracy, return_argmax)


def losses_of(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, settings: LossSettings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Loss, max logit and arg-max, of arguments that were checked."""
    return _CrossEntropy.apply(logits, target, class_weights, settings)


def with_extras(
    loss: Tensor,
    max_logit: Tensor | None,
    argmax: Tensor | None,
    target: Tensor,
    settings: LossSettings,
    return_token_accuracy: bool,
    return_argmax: bool,
    logits: Tensor | None = None,
) -> Tensor | CrossEntropy:
    """The op's result: the loss, or a ``CrossEntropy`` of the loss and the extras that were asked for."""
    accuracy = None
    if return_token_accuracy:
        counts = target != settings.ignore_index
        accuracy = ((argmax == target) & counts).sum(dtype=torch.float32) / counts.sum()
    if logits is None and not (settings.with_max or settings.with_argmax):
        return loss
    return CrossEntropy(loss, accuracy, argmax if return_argmax else None, max_logit, logits)


class _CrossEntropy(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, class_weights: Tensor | None, settings: LossSettings
    ) -> tuple[Tensor | None, ...]:
        loss, normalizers, total, max_logit, argmax = _forward_op(logits, target, class_weights, *settings)
        ctx.save_for_backward(logits, target, class_weights, normalizers, total)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(extra for extra in (max_logit, argmax) if extra is not None))
        ctx.settings = settings
        return loss, max_logit, argmax

    @staticmethod
    def backward(ctx: Any, dloss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return None, None, None, None
        logits, target, class_weights, normalizers, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            inputs, needed = (logits, target, class_weights, ctx.settings), ctx.needs_input_grad
            return launch.differentiable_gradients(cross_entropy_reference, inputs, needed, dloss)
        dlogits = _backward_op(dloss, logits, target, class_weights, normalizers, total, *ctx.settings)
        return dlogits, None, None, None


def _forward(logits: Tensor, target: Tensor, class_weights: Tensor | None, *flat: Any) -> tuple[Tensor | None, ...]:
    rows = launch.dense(logits).view(-1, logits.shape[-1])
    targets = Targets.of(target, class_weights, logits, rows.shape[1], flat)
    statistics = new_statistics(rows, len(rows), 1, targets.settings)
    observe(statistics, 0, 0, rows, targets)
    return reduced(conclude(statistics, targets), target.shape, target.shape, targets.settings.reduction)[:-1]


def _backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    class_weights: Tensor | None,
    normalizers: Tensor,
    total: Tensor | None,
    *flat: Any,
) -> Tensor:
    rows = launch.dense(logits).view(-1, logits.shape[-1])
    targets, dlogits = Targets.of(target, class_weights, logits, rows.shape[1], flat), torch.empty_like(rows)
    differentiate(rows, dlogits, 0, targets, normalizers, row_gradients(dloss, total, target.numel()))
    return dlogits.view(logits.shape)


def reduced(losses: Losses, shape: torch.Size, tokens: torch.Size, reduction: str) -> tuple[Tensor | None, ...]:
    """Forward's results: loss, normalizers, the divisor of a mean, max logit, arg-max, entropy.

    shape: the target's. tokens: the shape of one number a token.
    """
    total = losses.weights.sum() if reduction == "mean" else None
    loss = losses.loss.view(shape) if reduction == "none" else losses.loss.sum()
    if total is not None:
        loss = loss / total
    extras = (None if extra is None else extra.view(tokens) for extra in losses[3:])
    return loss, losses.normalizers, total, *extras


def row_gradients(dloss: Tensor, total: Tensor | None, targets: int) -> Tensor:
    """The gradient of every target's loss, from the gradient of the reduced loss."""
    dloss = dloss if total is None else dloss / total
    return launch.dense(dloss.reshape(-1).expand(targets))


def cross_entropy_reference(
    logits: Tensor, target: Tensor, class_weights: Tensor | None, settings: LossSettings
) -> Tensor | tuple[Tensor, Tensor]:
    """``cross_entropy`` in plain PyTorch, differentiable any number of times: the loss, and the entropy if asked."""
    if target.dim() == logits.dim() or settings.with_entropy:
        return _losses_and_entropy(scored(logits, settings.scores), target, settings)
    s = scored(logits.reshape(-1, logits.shape[-1]), settings.scores)
    labels = target.reshape(-1)
    counts = labels != settings.ignore_index
    weights = None if class_weights is None else class_weights.to(s.dtype)
    loss = F.cross_entropy(s, labels, weights, None, settings.ignore_index, None, "none", settings.label_smoothing)
    if settings.z_loss > 0:
        loss = loss + (settings.z_loss * torch.logsumexp(s, -1).square()).where(counts, 0.0)
    if settings.reduction == "none":
        return loss.view(target.shape)
    total = counts.to(s.dtype) if weights is None else weights[labels.where(counts, 0)] * counts
    return loss.sum() / total.sum() if settings.reduction == "mean" else loss.sum()


def _losses_and_entropy(s: Tensor, target: Tensor, settings: LossSettings) -> Tensor | tuple[Tensor, Tensor]:
    """The loss of each target, without options, and the entropy. A token may have several targets."""
    labels = target if target.dim() == s.dim() else target[..., None]
    counts, log_p = labels != settings.ignore_index, torch.log_softmax(s, -1)
    losses = -log_p.gather(-1, labels.where(counts, 0)).where(counts, 0.0).view(target.shape)
    if not settings.with_entropy:
        return losses
    return losses, -(log_p.exp() * log_p.clamp_min(-1e4)).sum(-1).where(counts.any(-1), 0.0)


def loss_outputs(like: Tensor, target: Tensor, settings: LossSettings) -> tuple[Tensor | None, ...]:
    """Empty tensors for the results of ``reduced``. ``like``: (..., any)."""
    dtype, tokens = wide_dtype(like), like.shape[:-1]
    loss = like.new_empty(target.shape if settings.reduction == "none" else (), dtype=dtype)
    total = like.new_empty((), dtype=dtype) if settings.reduction == "mean" else None
    max_logit = like.new_empty(tokens, dtype=dtype) if settings.with_max else None
    argmax = target.new_empty(tokens) if settings.with_argmax else None
    entropy = like.new_empty(tokens, dtype=dtype) if settings.with_entropy else None
    normalizers = like.new_empty((math.prod(tokens), 2 + settings.with_entropy), dtype=dtype)
    return loss, normalizers, total, max_logit, argmax, entropy


_forward_op = launch.register(
    f"cross_entropy_forward(Tensor logits, Tensor target, Tensor? class_weights, {LOSS_SCHEMA})"
    " -> (Tensor loss, Tensor normalizers, Tensor? total, Tensor? max_logit, Tensor? argmax)",
    _forward,
    lambda logits, target, _, *flat: loss_outputs(logits, target, LossSettings(*flat))[:-1],
)
_backward_op = launch.register(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? class_weights, Tensor normalizers,"
    f" Tensor? total, {LOSS_SCHEMA}) -> Tensor dlogits",
    _backward,
    lambda dloss, logits, *_: logits.new_empty(logits.shape),
)
