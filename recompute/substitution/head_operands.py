"""The operands of a language model's head, and the operations on its logits before a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recompute.kernels.logit_blocks import Head
from recompute.kernels.scores import Scores

LossCounter = Callable[[Tensor, Tensor, int], None]
"""Called after each loss with the Linear's input, its weight, and the bytes that the loss did not need to hold."""

LossObserver = Callable[[Tensor | None, Tensor, int], None]
"""Called with the arg-max of each token, (tokens,), its target, (tokens,), and ``ignore_index``.

The arg-max is None if the loss was no cross-entropy."""


@dataclass(frozen=True)
class HeadOperands:
    """The operands of logits: those of a Linear, the scale of its output, and a cap on that, if any."""

    own: Head
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
    """The divisor of capped logits."""

    def moved(self, move: Callable[[Tensor], Tensor]) -> HeadOperands:
        """The same head on the rows that ``move`` returns, (..., any)."""
        return replace(self, own=self.own.moved(move))

    def settled(self) -> HeadOperands:
        """The same head. A divisor that might have become a cap is now part of the scale."""
        if self.cap_steps != 1 or self.cap is None:
            return self
        return replace(self, cap_steps=0, cap=None, scale=self.scale / self.cap)

    def plus(self, bias: Tensor) -> HeadOperands:
        """The same head with a vector added to the logits."""
        added = (bias.reshape(-1) if self.scale == 1 else bias.reshape(-1) / self.scale).to(self.own.weight.dtype)
        return replace(self, own=self.own._replace(bias=added if self.own.bias is None else self.own.bias + added))

    def adapted(self, other: HeadOperands) -> HeadOperands:
        """The same head with the logits of another one added. The other's input is thinner."""
        ratio = other.scale / self.scale
        own, added = self.own, other.own
        thin = (added.hidden if ratio == 1 else added.hidden * ratio).to(own.hidden.dtype)
        up = added.weight.to(own.weight.dtype)
        if own.thin is not None and own.up is not None:
            thin, up = torch.cat([own.thin, thin], -1), torch.cat([own.up, up], -1)
        head = replace(self, own=own._replace(thin=thin, up=up))
        return head if added.bias is None else head.plus(added.bias * other.scale)

    @property
    def scores(self) -> Scores:
        """The scores that a softmax takes of the logits."""
        head = self.settled()
        return Scores.of(head.scale, head.cap or 0.0, head.temperature)
