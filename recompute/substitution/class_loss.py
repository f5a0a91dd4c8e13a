"""The losses that PyTorch's functions compute from a head's logits and classes, computed without the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.substitution.by_rows import by_rows
from recompute.substitution.lazy_tensors import LazyTensor


def class_loss(
    logits: Any,
    dim: int | None,
    dtype: torch.dtype,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The loss of rows of logits, by ``linear_cross_entropy``, in ``dtype``. dim: the words' dimension to PyTorch."""
    settings = logits.score_settings()
    if settings is None or size_average is not None or reduce is not None or not isinstance(target, Tensor):
        return NotImplemented
    dim = logits.dim() - 1 if dim is None else dim
    if dim != min(1, logits.dim() - 1) or (weight is not None and weight.requires_grad):
        return NotImplemented
    if target.is_floating_point():
        return _soft_loss(logits, dim, dtype, target, weight, reduction, label_smoothing)
    if target.shape != logits.shape[:-1] or target.dtype is not torch.int64:
        return NotImplemented  # PyTorch has an error to raise
    head, observe = logits.operands, logits._head.observe
    with logits.autocast_as_made():
        loss = linear_cross_entropy(
            *(head.hidden, head.weight, target, head.bias),
            **settings,
            adapter=head.adapter,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            class_weights=weight,
            reduction=reduction,
            return_argmax=observe is not None,
            logits_bytes=logits._head.logits_bytes,
        )
    if not isinstance(loss, Tensor):
        if observe is not None and loss.argmax is not None:
            observe(loss.argmax.flatten(), target.flatten(), ignore_index)
        loss = loss.loss
    logits.count(head.hidden, dtype)
    return loss.to(dtype)


def _soft_loss(
    logits: Any, dim: int, dtype: torch.dtype, target: Tensor, weight: Tensor | None, reduction: str, smoothing: float
) -> Any:
    """The loss where targets are probabilities of the classes."""
    if target.requires_grad or isinstance(target, LazyTensor) or target.dim() != logits.dim():
        return NotImplemented
    target = target.movedim(dim, -1)
    if target.shape != logits.shape:
        return NotImplemented

    def losses(rows: Sequence[Tensor], wanted: Tensor) -> Tensor:
        weights = None if weight is None else weight.to(rows[0].dtype)
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
        return F.cross_entropy(rows[0], wanted.to(rows[0].dtype), weights, **options)

    found = by_rows((logits,), losses, target)
    found = found if reduction == "none" else found.sum() / (found.numel() if reduction == "mean" else 1)
    return found.to(torch.promote_types(dtype, target.dtype))
