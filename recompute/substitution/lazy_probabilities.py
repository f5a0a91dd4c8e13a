"""Log-probabilities and entropies that somebody writes on a head's logits, computed without the logits.

``log_softmax(logits)``, ``softmax(logits)`` and their product are lazy as the logits are. A ``gather`` of the first,
and the sum of the last, are computed by ``kernels.linear_log_probs`` from the head's input and weight:

    log_softmax(logits, -1).gather(-1, index)                    the log-probability of each index
    -(softmax(logits, -1) * log_softmax(logits, -1)).sum(-1)     the entropy

Whatever else reads them gets their values, and so makes the logits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.substitution.lazy_tensors import PRODUCTS, ROWS, LazyTensor, rows_of


class Quantity(Enum):
    LOG_PROBS = "log_probs"
    PROBS = "probs"
    PRODUCTS = "products"
    """Of probabilities and log-probabilities."""


SOFTMAXES: dict[Any, Quantity] = {
    **dict.fromkeys(
        [F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax], Quantity.LOG_PROBS
    ),
    **dict.fromkeys([F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax], Quantity.PROBS),
}
"""What each function makes of logits."""
SHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.__getitem__})
_GATHERS = frozenset({Tensor.gather, torch.gather})
_EXPONENTIALS = frozenset({Tensor.exp, torch.exp})
_NEGATIONS = frozenset({Tensor.neg, Tensor.__neg__, torch.neg, torch.negative})
_SUMS = frozenset({Tensor.sum, torch.sum})
_NO_WORD = -(2**62)
"""No index is ignored: PyTorch's ``gather`` refuses what is out of bounds."""


class LazyProbabilities(LazyTensor):
    """``factor`` times log-probabilities, probabilities, or the products of both, of lazy logits."""

    _logits: Any
    """``LazyLogits``, which import this file."""
    _quantity: Quantity
    _factor: float

    @staticmethod
    def of(
        logits: Any, quantity: Quantity, compute: Callable[[], Tensor], dtype: torch.dtype, factor: float = 1.0
    ) -> LazyProbabilities:
        made = LazyProbabilities(tuple(logits.shape), logits.operands, compute, dtype, logits._sources)
        made._logits, made._quantity, made._factor = logits, quantity, factor
        logits._family.append(weakref.ref(made))
        return made

    @staticmethod
    def of_softmax(logits: Any, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(logits, *args, **kwargs)``, one of ``SOFTMAXES``; or NotImplemented."""
        named = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
        dtype = named.pop("dtype", None)
        if not _is_last(logits, args, named) or dtype not in (None, logits.dtype, torch.float32):
            return NotImplemented
        if logits.score_settings() is None or torch.is_grad_enabled() is not logits._mode[0]:
            return NotImplemented
        one = torch.empty(1, dtype=logits.dtype, device=logits.device)
        dtype = function(one, -1, dtype=dtype).dtype  # that of autocast, where it is on
        return LazyProbabilities.of(
            logits, SOFTMAXES[function], lambda: function(logits.value(), *args, **kwargs), dtype
        )

    def pass_by(self) -> None:
        self._logits.pass_by()

    def before_change(self) -> None:
        self._logits.before_change()  # others are made of this, and have to keep the values from before the change

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._logits.is_lazy:  # they are there, so use them
            return NotImplemented
        if function in PRODUCTS and len(args) == 2 and not kwargs:
            return self._product(function, *args)
        if not args or args[0] is not self:
            return NotImplemented
        if function in _GATHERS and self._quantity is Quantity.LOG_PROBS:
            return self._gathered(*args[1:], **kwargs)
        if function in SHAPES:
            moved = self._logits.fused(function, (self._logits, *args[1:]), kwargs)
            return NotImplemented if moved is NotImplemented else self._then(function, args[1:], kwargs, logits=moved)
        if function in ROWS:
            return rows_of(self, function, args[1:], kwargs)
        if function in _EXPONENTIALS and len(args) == 1 and not kwargs:
            is_log = self._quantity is Quantity.LOG_PROBS and self._factor == 1.0
            return self._then(function, (), {}, quantity=Quantity.PROBS) if is_log else NotImplemented
        if function in _NEGATIONS and len(args) == 1 and not kwargs:
            return self._then(function, (), {}, factor=-self._factor)
        if function in _SUMS and self._quantity is Quantity.PRODUCTS and _is_last(self, args[1:], kwargs):
            target = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
            return self._logits.log_probs(target, entropy=True)[1].mul(-self._factor).to(self.dtype)
        return NotImplemented

    def _then(
        self,
        function: Any,
        rest: tuple,
        kwargs: dict[str, Any],
        *,
        logits: Any = None,
        quantity: Quantity | None = None,
        factor: float | None = None,
    ) -> LazyProbabilities:
        """``function(self, *rest, **kwargs)``, still lazy."""
        factor = self._factor if factor is None else factor
        logits = self._logits if logits is None else logits
        compute = lambda: function(self.value(), *rest, **kwargs)  # noqa: E731
        return LazyProbabilities.of(logits, quantity or self._quantity, compute, self.dtype, factor)

    def _product(self, function: Any, one: Any, other: Any) -> Any:
        if not (
            isinstance(one, LazyProbabilities) and isinstance(other, LazyProbabilities) and one._logits is other._logits
        ):
            return NotImplemented
        if {one._quantity, other._quantity} != {Quantity.PROBS, Quantity.LOG_PROBS}:
            return NotImplemented
        dtype, factor = torch.promote_types(one.dtype, other.dtype), one._factor * other._factor
        compute = lambda: function(one.value(), other.value())  # noqa: E731
        return LazyProbabilities.of(self._logits, Quantity.PRODUCTS, compute, dtype, factor)

    def _gathered(self, dim: Any = None, index: Any = None, **kwargs: Any) -> Any:
        fits = isinstance(index, Tensor) and index.dtype is torch.int64 and index.shape[:-1] == self.shape[:-1]
        if kwargs or dim not in (-1, self.dim() - 1) or not fits or index.shape[-1] == 0:
            return NotImplemented
        return self._logits.log_probs(index, ignore_index=_NO_WORD)[0].mul(self._factor).to(self.dtype)


def _is_last(tensor: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments of a function over the last dimension alone."""
    dims = [*args, *([kwargs["dim"]] if "dim" in kwargs else [])]
    return len(args) + len(kwargs) == len(dims) == 1 and dims[0] in (-1, tensor.dim() - 1)
