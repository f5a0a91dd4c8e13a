"""The scores that a softmax takes. Every loss computes them in float32 as it reads logits.

With tanh = tanh(scale · logits / softcap):

    s       = softcap · tanh / temperature, or scale · logits / temperature
    dlogits = ds · scale / temperature · (1 - tanh²), or ds · scale / temperature
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

PLAIN, SCALED, CAPPED = range(3)


class Scores(NamedTuple):
    """A softmax takes these scores: ``outer · tanh(logits / inner)``, ``outer · logits``, or the logits themselves."""

    outer: float
    inner: float
    slope: float
    """How much steeper it is at 0 than the logits."""
    form: int
    """``CAPPED``, ``SCALED`` or ``PLAIN``."""

    @classmethod
    def of(cls, scale: float, softcap: float, temperature: float) -> Scores:
        """``softcap · tanh(scale · logits / softcap) / temperature``; a softcap of 0 is none."""
        if softcap > 0:
            return cls(softcap / temperature, softcap / scale, scale / temperature, CAPPED)
        return cls(scale / temperature, 1.0, scale / temperature, PLAIN if scale == temperature else SCALED)


def check_scores(op: str, **numbers: float | None) -> None:
    """Refuse a scale, a temperature or a softcap that is not above 0. Only a softcap may be None."""
    for name, number in numbers.items():
        is_none = number is None and name.endswith("softcap")
        if not is_none and (number is None or not 0.0 < number < float("inf")):
            expected = "None or a number above 0" if name.endswith("softcap") else "a number above 0"
            raise KernelError(f"{op}: {name} is {number}; expected {expected}.")


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
def score(x, outer, inner, FORM: tl.constexpr):
    """The scores of logits x, and the tanh in them."""
    tanh = x
    if FORM == 2:
        tanh = _tanh(x / inner)
    if FORM != 0:
        x = tl.fma(outer, tanh, 0.0)  # rounded here: a product could be fused with the subtraction of the maximum
    return x, tanh


@jit
def unscore(d, tanh, slope, FORM: tl.constexpr):
    """The gradient of logits, from the gradient of their scores."""
    if FORM == 2:
        d *= (1.0 - tanh * tanh) * slope
    if FORM == 1:
        d *= slope
    return d


@jit
def gap(a, b):
    """a - b, but finite: its product with exp(a - b) is 0 where that is."""
    return tl.minimum(tl.maximum(a - b, -1e4), 1e4)


def scored(logits: Tensor, scores: Scores) -> Tensor:
    """The scores that a softmax takes, in the dtype that the references compute in."""
    logits = launch.widen(logits)
    if scores.form == CAPPED:
        return scores.outer * torch.tanh(logits / scores.inner)
    return logits if scores.form == PLAIN else scores.outer * logits


def unscored(ds: Tensor, logits: Tensor, scores: Scores) -> Tensor:
    """The gradient of logits, from the gradient of what ``scored`` returned."""
    if scores.form == CAPPED:
        return ds * (1.0 - torch.tanh(launch.widen(logits) / scores.inner).square()) * scores.slope
    return ds if scores.form == PLAIN else ds * scores.slope


def finite_gap(a: Tensor, b: Tensor) -> Tensor:
    """``a - b``, but finite: its product with ``exp(a - b)`` is 0 where that is."""
    return (a - b).clamp(-1e4, 1e4)
