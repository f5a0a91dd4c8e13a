"""What a language model's head computes logits from, and what is done to these before a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recompute.kernels.scores import Scores, scored

LossCounter = Callable[[Tensor, Tensor, int], None]
"""Called after each loss with the Linear's input, its weight, and the bytes that the loss did not need to hold."""

LossObserver = Callable[[Tensor | None, Tensor, int], None]
"""Called with the arg-max of each token, (tokens,), its target, (tokens,), and ``ignore_index``.

Where it is no cross-entropy that was computed, the arg-max is None."""


@dataclass(frozen=True)
class HeadOperands:
    """What logits are computed from: a Linear's operands, the scale of its output, and a cap on that, if any."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    thin: Tensor | None = None
    up: Tensor | None = None
    """What an adapter on the head adds the product of, as ``linear_cross_entropy`` takes it."""
    observe: LossObserver | None = None
    count: LossCounter | None = None
    logits_bytes: int | None = None
    scale: float = 1.0
    cap: float | None = None
    cap_steps: int = 0
    """How many of the three steps of ``cap * tanh(logits / cap)`` were taken: the division, the tanh, the product."""
    tanh_nbytes: int = 0
    """The bytes that the tanh would hold for backward."""
    temperature: float = 1.0
    """What capped logits are divided by."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.bias, self.thin, self.up

    def moved(self, move: Callable[[Tensor], Tensor]) -> HeadOperands:
        """Of the rows that ``move`` makes of these, (..., any)."""
        return replace(self, hidden=move(self.hidden), thin=None if self.thin is None else move(self.thin))

    def settled(self) -> HeadOperands:
        """With a divisor, which might have become a cap, in the scale."""
        if self.cap_steps != 1 or self.cap is None:
            return self
        return replace(self, cap_steps=0, cap=None, scale=self.scale / self.cap)

    def plus(self, bias: Tensor) -> HeadOperands:
        """With a vector added to the logits."""
        added = (bias.reshape(-1) if self.scale == 1 else bias.reshape(-1) / self.scale).to(self.weight.dtype)
        return replace(self, bias=added if self.bias is None else self.bias + added)

    def adapted(self, other: HeadOperands) -> HeadOperands:
        """With the logits of another head added, whose input is thinner."""
        ratio = other.scale / self.scale
        thin = (other.hidden if ratio == 1 else other.hidden * ratio).to(self.hidden.dtype)
        up = other.weight.to(self.weight.dtype)
        if self.thin is not None and self.up is not None:
            thin, up = torch.cat([self.thin, thin], -1), torch.cat([self.up, up], -1)
        head = replace(self, thin=thin, up=up)
        return head if other.bias is None else head.plus(other.bias * other.scale)

    def scored(self, logits: Tensor) -> Tensor:
        """What a softmax is taken of, in float32 (float64 of float64)."""
        head = self.settled()
        return scored(logits, Scores.of(head.scale, head.cap or 0.0, head.temperature))
