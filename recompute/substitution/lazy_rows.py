"""What people write on a head's logits, computed without them: softmaxes, what is made of these, and their sums.

``log_softmax(logits)``, ``softmax(logits)`` and elementwise functions of both are lazy as the logits are. What gives a
few numbers a row is computed from the heads' inputs and weights. There are kernels for

    log_softmax(logits, -1).gather(-1, index)                    the log-probability of each index
    -(softmax(logits, -1) * log_softmax(logits, -1)).sum(-1)     the entropy
    kl_div(log_softmax(a, -1), softmax(b, -1), ...).sum(-1)      a divergence of two heads, one of which trains

All else is computed from logits of a few rows at a time, which backward makes again. Functions that are not in these
tables get the values, and so make the logits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.substitution.lazy_tensors import PRODUCTS, ROWS, LazyTensor, rows_of


class Quantity(Enum):
    """What kernels know."""

    LOG_PROBS = "log_probs"
    PROBS = "probs"
    PRODUCTS = "products"
    """Of probabilities and log-probabilities."""
    DIFFERENCES = "differences"
    """Of log-probabilities of two heads."""
    DIVERGENCES = "divergences"
    """Products of these and the probabilities of the first."""


SOFTMAXES: dict[Any, Quantity] = {
    **dict.fromkeys(
        [F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax], Quantity.LOG_PROBS
    ),
    **dict.fromkeys([F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax], Quantity.PROBS),
}
"""What each function makes of logits."""
SHAPES = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.__getitem__})
GATHERS = frozenset({Tensor.gather, torch.gather})
LOGSUMEXPS = frozenset({Tensor.logsumexp, torch.logsumexp})
TOPKS = frozenset({Tensor.topk, torch.topk, Tensor.max, torch.max})
_EXPONENTIALS = frozenset({Tensor.exp, torch.exp})
_NEGATIONS = frozenset({Tensor.neg, Tensor.__neg__, torch.neg, torch.negative})
_SUMS = frozenset({Tensor.sum, torch.sum})
_DIFFERENCES = frozenset({Tensor.sub, Tensor.__sub__, torch.sub, torch.subtract})
_ELEMENTWISE = frozenset(
    {
        *(PRODUCTS | _EXPONENTIALS | _NEGATIONS | _DIFFERENCES),
        *(Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add, Tensor.__rsub__, Tensor.log, torch.log),
        *(Tensor.div, Tensor.__truediv__, torch.div, Tensor.square, torch.square, torch.logaddexp, F.kl_div),
    }
)
TOTALS = frozenset({Tensor.sum, torch.sum, Tensor.mean, torch.mean})
REDUCTIONS = TOTALS | LOGSUMEXPS | {Tensor.argmax, torch.argmax, Tensor.amax, torch.amax}
"""Functions that make one number of a row."""
MOST_WORDS = 64
"""A gather of more than these, or a ``topk``, has whole logits."""
_NO_WORD = -(2**62)
"""No index is ignored: PyTorch's ``gather`` refuses what is out of bounds."""

OfRows = Callable[[Sequence[Tensor]], Tensor]
"""Makes rows of what is lazy, (rows, V), from rows of the logits of each head, in float32 (float64 of float64)."""


class LazyRows(LazyTensor):
    """An elementwise function of softmaxes of lazy logits."""

    _logits: tuple[Any, ...]
    """``LazyLogits``, which import this file: of one shape."""
    _make: OfRows
    _quantity: Quantity | None
    _factor: float
    """What the quantity is multiplied by."""

    @staticmethod
    def of(
        logits: Sequence[Any],
        make: OfRows,
        compute: Callable[[], Tensor],
        dtype: torch.dtype,
        quantity: Quantity | None = None,
        factor: float = 1.0,
    ) -> LazyRows:
        operands = [tensor for each in logits for tensor in each.operands]
        sources = [tensor for each in logits if each.requires_grad for tensor in each._sources]
        made = LazyRows(tuple(logits[0].shape), operands, compute, dtype, sources)
        made._logits, made._make, made._quantity, made._factor = tuple(logits), make, quantity, factor
        for each in logits:
            each._family.append(weakref.ref(made))
        return made

    @staticmethod
    def of_softmax(logits: Any, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(logits, *args, **kwargs)``, one of ``SOFTMAXES``; or NotImplemented."""
        named = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
        dtype = named.pop("dtype", None)
        if not is_last(logits, args, named) or dtype not in (None, logits.dtype, torch.float32):
            return NotImplemented
        if logits.score_settings() is None:
            return NotImplemented
        one = torch.empty(1, dtype=logits.dtype, device=logits.device)
        dtype = function(one, -1, dtype=dtype).dtype  # that of autocast, where it is on
        return LazyRows.of(
            *((logits,), lambda rows: function(rows[0], -1), lambda: function(logits.value(), *args, **kwargs)),
            *(dtype, SOFTMAXES[function]),
        )

    def pass_by(self) -> None:
        for each in self._logits:
            each.pass_by()

    def before_change(self) -> None:
        for each in self._logits:  # others are made of these, and have to keep the values from before the change
            each.before_change()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not all(each.is_lazy for each in self._logits):  # they are there, so use them
            return NotImplemented
        if function in _ELEMENTWISE:
            return self._elementwise(function, args, kwargs)
        if not args or args[0] is not self:
            return NotImplemented
        if function in SHAPES:
            return self._moved(function, args[1:], kwargs)
        if function in ROWS:
            return rows_of(self, function, args[1:], kwargs)
        if function in GATHERS:
            return self._gathered(gathered_words(self, *args[1:], **kwargs))
        if function in TOPKS:
            return highest_of(self, function, args[1:], kwargs)
        if function in TOTALS and len(args) == 1 and not kwargs:
            rows = self.fused(torch.sum, (self, -1), {})
            return rows.sum() if function in _SUMS else rows.sum() / self.numel()
        return self._reduced(function, args[1:], kwargs) if function in REDUCTIONS else NotImplemented

    def _moved(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        moved = [each.fused(function, (each, *rest), kwargs) for each in self._logits]
        if any(each is NotImplemented for each in moved):
            return NotImplemented
        rest = tuple(fixed(each) for each in rest)
        compute = lambda: function(self.value(), *rest, **kwargs)  # noqa: E731
        return LazyRows.of(moved, self._make, compute, self.dtype, self._quantity, self._factor)

    def _elementwise(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is F.kl_div:
            return self._divergence(*args, **kwargs)
        return NotImplemented if kwargs else _combined(function, args, _known(function, args))

    def _divergence(
        self,
        input: Any,
        target: Any,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        log_target: bool = False,
    ) -> Any:
        """``kl_div``: ``target * (log(target) - input)``, and what the reduction makes of it."""
        if not (isinstance(input, LazyRows) and isinstance(target, LazyRows)) or (size_average, reduce) != (None, None):
            return NotImplemented
        pair = (target._quantity, target._factor, input._quantity, input._factor)
        expected = Quantity.LOG_PROBS if log_target else Quantity.PROBS
        logits = (*target._logits, *input._logits)
        is_known = pair == (expected, 1.0, Quantity.LOG_PROBS, 1.0) and logits[0] is not logits[1]
        function = functools.partial(F.kl_div, reduction="none", log_target=log_target)
        made = _combined(function, (input, target), (Quantity.DIVERGENCES, 1.0, logits) if is_known else None)
        if made is NotImplemented or reduction == "none":
            return made
        total = made.fused(torch.sum, (made,), {})
        return total / {"batchmean": len(self), "mean": self.numel()}.get(reduction, 1)

    def _gathered(self, index: Tensor | None) -> Any:
        if index is None:
            return NotImplemented
        if self._quantity is Quantity.LOG_PROBS:
            found = self._logits[0].log_probs(index, ignore_index=_NO_WORD)[0].mul(self._factor)
        else:
            found = by_rows(self._logits, lambda rows, own: self._make(rows).gather(-1, own), index)
        return found.to(self.dtype)

    def _reduced(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        keepdim = kwargs.pop("keepdim", False) if "dim" in kwargs or rest else False
        if not is_last(self, rest, kwargs):
            return NotImplemented
        found: Any = NotImplemented
        if function in _SUMS and self._quantity is Quantity.PRODUCTS:
            target = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
            found = self._logits[0].log_probs(target, entropy=True)[1].mul(-self._factor)
        elif function in _SUMS and self._quantity is Quantity.DIVERGENCES:
            found = self._logits[0].divergence(self._logits[1])
            found = found if found is NotImplemented else found.mul(self._factor)
        if found is NotImplemented:
            found = by_rows(self._logits, lambda rows: function(self._make(rows), -1))
        found = found.to(self.dtype) if found.is_floating_point() else found
        return found.unsqueeze(-1) if keepdim else found


_Known = tuple[Quantity, float, tuple[Any, ...]]
"""A quantity, what it is multiplied by, and the logits that it is of, in their order."""


def _combined(function: Any, args: tuple, known: _Known | None) -> Any:
    """``function(*args)``, elementwise, of what is lazy and of numbers, still lazy; or NotImplemented."""
    lazies = [each for each in args if isinstance(each, LazyRows)]
    fits = all(each.shape == lazies[0].shape and all(one.is_lazy for one in each._logits) for each in lazies)
    if not fits or not all(isinstance(each, (LazyRows, int, float)) for each in args):
        return NotImplemented
    quantity, factor, logits = known or (None, 1.0, {id(one): one for each in lazies for one in each._logits}.values())
    places = {id(one): place for place, one in enumerate(logits)}

    def part(argument: Any) -> Callable[[Sequence[Tensor]], Any]:
        if not isinstance(argument, LazyRows):
            return lambda rows: argument
        make, at = argument._make, [places[id(one)] for one in argument._logits]
        return lambda rows: make([rows[place] for place in at])

    parts = [part(each) for each in args]
    like = [torch.empty(1, dtype=each.dtype) if isinstance(each, LazyRows) else each for each in args]
    compute = lambda: function(*[each.value() if isinstance(each, LazyRows) else each for each in args])  # noqa: E731
    make = lambda rows: function(*[make(rows) for make in parts])  # noqa: E731
    return LazyRows.of(tuple(logits), make, compute, function(*like).dtype, quantity, factor)


def _known(function: Any, args: tuple) -> _Known | None:
    """Which quantity an elementwise function gives, times what, and of which logits; None for what no kernel knows."""
    one, other = (*args, None)[:2]
    if not isinstance(one, LazyRows):
        one, other = other, one
        if function not in PRODUCTS or not isinstance(one, LazyRows):
            return None
    if one._quantity is None:
        return None
    if other is None:
        if function in _NEGATIONS:
            return one._quantity, -one._factor, one._logits
        is_log = function in _EXPONENTIALS and one._quantity is Quantity.LOG_PROBS and one._factor == 1.0
        return (Quantity.PROBS, 1.0, one._logits) if is_log else None
    if not isinstance(other, LazyRows):
        return (one._quantity, one._factor * other, one._logits) if function in PRODUCTS else None
    pair, factor = (one._quantity, other._quantity), one._factor * other._factor
    if function in _DIFFERENCES and pair == (Quantity.LOG_PROBS,) * 2 and one._factor == other._factor == 1.0:
        logits = (*one._logits, *other._logits)
        return None if logits[0] is logits[1] else (Quantity.DIFFERENCES, 1.0, logits)
    if function not in PRODUCTS:
        return None
    if set(pair) == {Quantity.PROBS, Quantity.LOG_PROBS} and one._logits[0] is other._logits[0]:
        return Quantity.PRODUCTS, factor, one._logits
    if set(pair) == {Quantity.PROBS, Quantity.DIFFERENCES} and one._logits[0] is other._logits[0]:
        return Quantity.DIVERGENCES, factor, max(one._logits, other._logits, key=len)
    return None


def is_last(tensor: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether these are the arguments of a function over the last dimension alone."""
    dims = [*args, *([kwargs["dim"]] if "dim" in kwargs else [])]
    return len(args) + len(kwargs) == len(dims) == 1 and dims[0] in (-1, tensor.dim() - 1, (-1,), [-1])


def gathered_words(tensor: Tensor, dim: Any = None, index: Any = None, **others: Any) -> Tensor | None:
    """The index of a gather with these arguments, if that is of a few words for each row."""
    fits = isinstance(index, Tensor) and index.dtype is torch.int64 and index.shape[:-1] == tensor.shape[:-1]
    fits = fits and dim in (-1, tensor.dim() - 1) and not others
    return index if fits and 0 < index.shape[-1] <= MOST_WORDS else None


def fixed(index: Any) -> Any:
    """An index that stays what it is, whatever becomes of the tensors that it was made of."""
    if isinstance(index, tuple):
        return tuple(fixed(each) for each in index)
    return index.clone() if isinstance(index, Tensor) else index


def highest_of(tensor: Any, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
    """``topk(k)`` or ``max(dim)`` of a lazy tensor: where they are, and then a gather; or NotImplemented."""
    if function in (Tensor.max, torch.max):
        if not is_last(tensor, rest, kwargs):
            return NotImplemented
        with torch.no_grad():
            index = tensor.fused(torch.argmax, (tensor, -1), {})
        values = tensor.fused(torch.gather, (tensor, -1, index[..., None]), {}).squeeze(-1)
        return torch.return_types.max((values, index))
    named = dict(zip(("k", "dim", "largest", "sorted"), rest, strict=False)) | kwargs
    k, dim = named.pop("k", 0), named.pop("dim", -1)
    if dim not in (-1, tensor.dim() - 1) or not 0 < k <= min(MOST_WORDS, tensor.shape[-1]):
        return NotImplemented
    logits, make = (tensor._logits, tensor._make) if isinstance(tensor, LazyRows) else ((tensor,), lambda rows: rows[0])
    with torch.no_grad():
        index = by_rows(logits, lambda rows: make(rows).topk(k, -1, **named).indices)
    return torch.return_types.topk((tensor.fused(torch.gather, (tensor, -1, index), {}), index))


def by_rows(logits: Sequence[Any], function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """``function(logits of each, *others)`` of a few rows at a time: it gives (rows,) or (rows, K).

    others: (..., K), without gradients; their rows are given beside those of the logits.
    """
    first = logits[0]
    flat = [(each.shape[:-1].numel(), each.shape[-1]) for each in (*logits, *others)]
    rows = [each.reshape(shape) for each, shape in zip(others, flat[len(logits) :], strict=True)]
    heads = [each.head_of_rows() for each in logits]
    with first.autocast_as_made():
        found = _ByRows.apply(_Call(function, heads, rows), *[tensor for head in heads for tensor in head.tensors])
    return found.reshape(*first.shape[:-1], *found.shape[1:])


class _Call:
    """A function of rows of heads' logits."""

    def __init__(self, function: Callable[..., Tensor], heads: Sequence[Any], others: Sequence[Tensor]):
        self.function, self.heads, self.others = function, heads, others
        from recompute.kernels.linears import autocast_dtype
        from recompute.kernels.logit_blocks import WIDTH

        self.narrow = autocast_dtype(heads[0].hidden.device.type)
        """What autocast has matrix products computed in, in forward and again in backward."""
        tokens, vocabulary = heads[0].tensors[0].shape[0], len(heads[0].tensors[1])
        room = heads[0].logits_bytes or tokens * WIDTH * heads[0].tensors[0].dtype.itemsize
        rows = max(int(room / (vocabulary * heads[0].tensors[0].dtype.itemsize)), 256)
        self.spans = [slice(start, start + rows) for start in range(0, max(tokens, 1), rows)]

    def of(self, span: slice, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the tensors of all heads, five each, what these rows are computed from."""
        return [t if t is None or index % 5 not in (0, 3) else t[span] for index, t in enumerate(tensors)]

    def run(self, span: slice, tensors: Sequence[Tensor | None]) -> Tensor:
        from recompute.kernels.linears import cast, without_autocast
        from recompute.kernels.logit_blocks import Head

        narrowed = [cast(tensors[first : first + 5], self.narrow) for first in range(0, len(tensors), 5)]
        with without_autocast(self.heads[0].hidden.device.type):
            rows = [head.scored(Head(*each).logits()) for head, each in zip(self.heads, narrowed, strict=True)]
            return self.function(rows, *[each[span] for each in self.others])


class _ByRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.call = call
        found = torch.cat([call.run(span, call.of(span, tensors)) for span in call.spans])
        if not found.is_floating_point():
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from recompute.kernels.launch import differentiable_gradients
        from recompute.kernels.loss_settings import wide_dtype

        call, tensors, needed = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            whole = lambda *given: call.run(slice(None), given)  # noqa: E731
            return None, *differentiable_gradients(whole, tensors, needed, gradient)
        sums = [
            torch.zeros_like(t, dtype=wide_dtype(t)) if need else None for t, need in zip(tensors, needed, strict=True)
        ]
        for span in call.spans:
            given = [
                None if each is None else each.detach().requires_grad_(need)
                for each, need in zip(call.of(span, tensors), needed, strict=True)
            ]
            with torch.enable_grad():
                found = call.run(span, given)
            wanted = [each for each in given if each is not None and each.requires_grad]
            totals = [each for each in call.of(span, sums) if each is not None]
            parts = torch.autograd.grad(found, wanted, gradient[span], allow_unused=True)
            for total, part in zip(totals, parts, strict=True):
                if part is not None:
                    total += part
        return None, *[s if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]
