"""Functions of a head's logits that return a few numbers a row, computed from the logits of a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recompute.kernels.launch import differentiable_gradients, widen
from recompute.kernels.linears import autocast_dtype, cast, without_autocast
from recompute.kernels.logit_blocks import WIDTH, Head
from recompute.kernels.loss_settings import wide_dtype
from recompute.kernels.scores import Scores, scored


def by_rows(logits: Sequence[Any], function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """``function(logits of each head, *others)``, of a few rows at a time. It returns (rows,) or (rows, K).

    others: (..., K), without gradients; the function gets their rows beside those of the logits. If there are so few
    rows that all are made at once, and nothing trains, the logits stay for other readers.
    """
    first = logits[0]
    rows = [each.reshape(each.shape[:-1].numel(), each.shape[-1]) for each in others]
    heads = [each.operands.of_rows() for each in logits]
    with first.autocast_as_made():
        call = _Call(function, [each._head.scores for each in logits], heads[0], first._head.logits_bytes)
        if len(call.spans) == 1 and not any(each.family_trains for each in logits):
            found = function([widen(each.value().reshape(-1, each.shape[-1])) for each in logits], *rows)
            return found.reshape(*first.shape[:-1], *found.shape[1:])
        found = _ByRows.apply(call, len(rows), *rows, *[tensor for head in heads for tensor in head])
    return found.reshape(*first.shape[:-1], *found.shape[1:])


def beside_rows(tensor: Tensor, rows: Tensor) -> Tensor | None:
    """``tensor`` expanded to the leading dimensions of ``rows``: (..., V) or (..., 1); None if it does not fit."""
    leading, words = tuple(rows.shape[:-1]), tensor.shape[-1] if tensor.dim() else 1
    shape = (1,) * (rows.dim() - tensor.dim()) + tuple(tensor.shape)
    fits = len(shape) == rows.dim() and words in (1, rows.shape[-1]) and not tensor.requires_grad
    fits = fits and all(size in (1, other) for size, other in zip(shape, leading, strict=False))
    if words > 1 and shape[:-1] not in (leading, (1,) * len(leading)):
        fits = False  # it would have to be copied
    if not fits or (tensor.device != rows.device and tensor.dim()):
        return None
    return tensor.to(rows.device).expand(*leading, words)


def one_like(argument: Any) -> Any:
    """A tensor of one element that promotes others as this does."""
    if not isinstance(argument, Tensor):
        return argument
    return torch.ones((1,) * min(argument.dim(), 1), dtype=argument.dtype)


class _Call:
    """A function of rows of heads' logits, which it holds no tensor of."""

    def __init__(self, function: Callable[..., Tensor], scores: list[Scores], first: Head, logits_bytes: int | None):
        self.function, self.scores = function, scores
        hidden, weight, *_ = first
        self.device, self.narrow = hidden.device.type, autocast_dtype(hidden.device.type)
        """``narrow``: autocast computes matrix products in this dtype, in forward and again in backward."""
        tokens, vocabulary, itemsize = len(hidden), len(weight), hidden.dtype.itemsize
        room = logits_bytes or tokens * WIDTH * itemsize
        rows = max(int(room / (vocabulary * itemsize)), 256)
        self.spans = [slice(start, start + rows) for start in range(0, max(tokens, 1), rows)]

    def of(self, span: slice, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The parts of the heads' tensors, five a head, that these rows are computed from."""
        return [t if t is None or index % 5 not in (0, 3) else t[span] for index, t in enumerate(tensors)]

    def run(self, span: slice, others: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        narrowed = [cast(tensors[first : first + 5], self.narrow) for first in range(0, len(tensors), 5)]
        with without_autocast(self.device):
            rows = [scored(Head(*head).logits(), scores) for head, scores in zip(narrowed, self.scores, strict=True)]
            return self.function(rows, *[each[span] for each in others])


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *given: Any) -> Tensor:
        """given: ``count`` tensors with rows beside those of the logits, and then the heads' tensors."""
        ctx.save_for_backward(*given)
        ctx.call, ctx.count = call, count
        others, tensors = given[:count], given[count:]
        found = torch.cat([call.run(span, others, call.of(span, tensors)) for span in call.spans])
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, count, needed = ctx.call, ctx.count, ctx.needs_input_grad[2 + ctx.count :]
        others, tensors = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        before = (None,) * (2 + count)
        if torch.is_grad_enabled():
            whole = lambda *given: call.run(slice(None), others, given)  # noqa: E731
            return *before, *differentiable_gradients(whole, tensors, needed, gradient)
        sums = [
            torch.zeros_like(t, dtype=wide_dtype(t)) if need else None for t, need in zip(tensors, needed, strict=True)
        ]
        for span in call.spans:
            given = [
                None if each is None else each.detach().requires_grad_(need)
                for each, need in zip(call.of(span, tensors), needed, strict=True)
            ]
            with torch.enable_grad():
                found = call.run(span, others, given)
            wanted = [each for each in given if each is not None and each.requires_grad]
            totals = [each for each in call.of(span, sums) if each is not None]
            parts = torch.autograd.grad(found, wanted, gradient[span], allow_unused=True)
            for total, part in zip(totals, parts, strict=True):
                if part is not None:
                    total += part
        return *before, *[s if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]
