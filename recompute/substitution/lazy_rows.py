"""Computes what people write on a head's logits without the logits: softmaxes, functions of these, and their sums.

``log_softmax(logits)``, ``softmax(logits)`` and elementwise functions of both are lazy as the logits are. Functions
that return a few numbers a row are computed from the heads' inputs and weights. There are kernels for

    log_softmax(logits, -1).gather(-1, index)                    the log-probability of each index
    -(softmax(logits, -1) * log_softmax(logits, -1)).sum(-1)     the entropy
    kl_div(log_softmax(a, -1), softmax(b, -1), ...).sum(-1)      a divergence of two heads, one of which trains
    beta * KL(q, m) + (1 - beta) * KL(p, m)                      theirs from a mixture m, however it is written
    (p - q).abs().sum(-1)                                        their total variation

All else is computed from logits of a few rows at a time, which backward makes again. Other tensors, as a teacher's
logits, may take part. Functions that are not in the tables below get the values, and so make the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.substitution import known_functions as torchs
from recompute.substitution.by_rows import beside_rows, by_rows, one_like
from recompute.substitution.class_loss import class_loss
from recompute.substitution.lazy_moved import as_constant, permuted, rows_of
from recompute.substitution.lazy_tensors import (
    MOST_WORDS,
    LazyTensor,
    cast_dtype,
    fixed,
    gathered_words,
    is_last,
    values_of,
)
from recompute.substitution.word_terms import (
    ELEMENTWISE,
    Terms,
    combined,
    divergence,
    is_half_of_known,
    known_sum,
    log_of_sum,
    number,
    of_softmax,
    renamed,
)

_NO_WORD = -(2**62)
"""No index is ignored: PyTorch's ``gather`` refuses what is out of bounds."""

OfRows = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Makes rows of a lazy tensor, (rows, V), from rows of each head's logits, in float32 (float64 for float64), and from
rows of each other tensor."""


class LazyRows(LazyTensor):
    """An elementwise function of softmaxes of lazy logits, and of other tensors."""

    _logits: tuple[Any, ...]
    """``LazyLogits``, which import this file: of one shape."""
    _others: tuple[Tensor, ...]
    """(..., V) or (..., 1), without gradients."""
    _make: OfRows
    operands: list[Any]
    _terms: Terms | None
    """The elements as a sum of terms, by the logits; None if they are no such sum."""

    @staticmethod
    def of(
        logits: Sequence[Any],
        make: OfRows,
        compute: Callable[[], Tensor],
        dtype: torch.dtype,
        terms: Terms | None = None,
        others: Sequence[Tensor] = (),
    ) -> LazyRows:
        if not torch.is_grad_enabled():
            constants = [each.constant() for each in logits]
            names = {id(old): id(new) for old, new in zip(logits, constants, strict=True)}
            logits, terms = constants, renamed(terms, names)
        sources = [tensor for each in logits if each.requires_grad for tensor in each._sources]
        operands = [*(tensor for each in logits for tensor in each.operands), *others]
        made = LazyRows(tuple(logits[0].shape), operands, compute, dtype, sources, logits)
        made._logits, made._make, made._terms, made._others = tuple(logits), make, terms, tuple(others)
        made.operands = operands
        return made

    @staticmethod
    def of_softmax(logits: Any, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """``function(logits, *args, **kwargs)``, one of ``SOFTMAXES``; or NotImplemented."""
        named = {key: value for key, value in kwargs.items() if key != "_stacklevel"}
        dtype = named.pop("dtype", None)
        if not is_last(logits, args, named) or dtype not in (None, logits.dtype, torch.float32):
            return NotImplemented
        one = torch.empty(1, dtype=logits.dtype, device=logits.device)
        dtype = function(one, -1, dtype=dtype).dtype  # that of autocast, where it is on
        return LazyRows.of(
            *((logits,), lambda rows, _: function(rows[0], -1), lambda: function(logits.value(), *args, **kwargs)),
            *(dtype, of_softmax(function, id(logits))),
        )

    def before_change(self) -> None:
        for each in self._logits:  # others are made of these, and have to keep the values from before the change
            each.before_change()

    def _elementwise(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return NotImplemented if kwargs else _combined(function, args)

    def _cast(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        dtype = cast_dtype(function, rest, kwargs)
        return NotImplemented if dtype is None else _combined(lambda rows: rows.to(dtype), (self,), self._terms)

    def loss(self, function: Any, rest: tuple, kwargs: dict[str, Any], dim: int | None = None) -> Any:
        """``nll_loss`` of log-probabilities. dim: that of the words to PyTorch; None: the last."""
        if function is not F.nll_loss or self._terms != of_softmax(F.log_softmax, id(self._logits[0])):
            return NotImplemented
        return class_loss(self._logits[0], dim, self.dtype, *rest, **kwargs)

    def of_leading(self, order: list[int]) -> Any:
        """The same with its leading dimensions in another order."""
        return self._moved(Tensor.permute, (*order, len(order)), {})

    def _moved(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        moved = []
        for each in self._logits:
            with torch.set_grad_enabled(torch.is_grad_enabled() and each.requires_grad):
                moved.append(each.fused(function, (each, *rest), kwargs))
        if any(each is NotImplemented for each in moved):
            return NotImplemented
        rest = tuple(fixed(each) for each in rest)
        leading = moved[0].shape[:-1]
        others = [
            each.reshape(*leading, each.shape[-1]) if function in torchs.RESHAPES else function(each, *rest, **kwargs)
            for each in self._others
        ]
        compute = lambda: function(self.value(), *rest, **kwargs)  # noqa: E731
        names = {id(old): id(new) for old, new in zip(self._logits, moved, strict=True)}
        return LazyRows.of(moved, self._make, compute, self.dtype, renamed(self._terms, names), others)

    def _gathered(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        index = gathered_words(self, *rest, **kwargs)
        if index is None:
            return NotImplemented
        terms, name = self._terms or {}, id(self._logits[0])
        if (0, name) in terms and terms.keys() <= {(0, name), (0, 0)}:
            found = self._logits[0].log_probs(index, ignore_index=_NO_WORD)
            found = found.mul(terms[0, name]).add(terms.get((0, 0), 0.0))
        else:
            of_words = lambda rows, own, *others: self._make(rows, others).gather(-1, own)  # noqa: E731
            found = by_rows(self._logits, of_words, index, *self._others)
        return found.to(self.dtype)

    def _reduced(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        if function in torchs.TOTALS and not rest and not kwargs:
            return self.added_up(True) / (1 if function in torchs.SUMS else self.numel())
        keepdim = kwargs.pop("keepdim", False) if "dim" in kwargs or rest else False
        if not is_last(self, rest, kwargs):
            return NotImplemented
        if function in torchs.SUMS:
            found = self.added_up(False)
        else:
            found = by_rows(self._logits, lambda rows, *others: function(self._make(rows, others), -1), *self._others)
            found = found.to(self.dtype) if found.is_floating_point() else found
        return found.unsqueeze(-1) if keepdim else found

    def added_up(self, is_total: bool) -> Tensor:
        """The sum over words, (...), or over all there is; lazy where another such sum may make a divergence of it."""
        if not self._others and is_half_of_known(self._terms):
            return LazySum.of(self, is_total)
        return self.sums(is_total)

    def sums(self, is_total: bool) -> Tensor:
        found = self._known_sums()
        if found is NotImplemented:
            found = by_rows(self._logits, lambda rows, *others: self._make(rows, others).sum(-1), *self._others)
        return (found.sum() if is_total else found).to(self.dtype)

    def _known_sums(self) -> Any:
        """The sums over words, if a kernel computes them; or NotImplemented."""
        known = known_sum(self._terms, self.shape[-1], 4 * torch.finfo(self.dtype).eps)
        if known is None:
            return NotImplemented
        p, *others = ({id(each): each for each in self._logits}[name] for name in known.of)
        if others:
            found = p.divergence(others[0], known.kind, known.beta)
            return found if found is NotImplemented else found.mul(known.factor).add(known.offset)
        return p.entropies().mul(-known.factor).add(known.offset)

    survives_among: ClassVar[torchs.Rules] = {
        ELEMENTWISE: _elementwise,
        F.kl_div: lambda _, __, args, kwargs: _divergence(*args, **kwargs),
        torch.stack: lambda _, __, args, kwargs: NotImplemented if kwargs else LazyStack.of(*args),
    }
    survives: ClassVar[torchs.Rules] = {
        F.nll_loss: loss,
        torchs.MOVES: _moved,
        torchs.PERMUTATIONS: permuted,
        torchs.CASTS: _cast,
        torchs.ROWS: rows_of,
        torchs.GATHERS: _gathered,
        torchs.TOPKS: lambda *call: highest_of(*call),
        torchs.REDUCTIONS: _reduced,
    }


class LazySum(LazyTensor):
    """The sum over words of what may be half of a Jensen-Shannon divergence, until it meets the other half."""

    _rows: LazyRows
    _is_total: bool

    @staticmethod
    def of(rows: LazyRows, is_total: bool) -> LazySum:
        rows = as_constant(rows)
        shape = () if is_total else tuple(rows.shape[:-1])
        made = LazySum(shape, rows.operands, lambda: rows.sums(is_total), rows.dtype, rows._sources, (rows,))
        made._rows, made._is_total = rows, is_total
        made.pass_by()
        return made

    def _total(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        rows: Any = self._rows if function in torchs.SUMS else self._rows / self.numel()
        return NotImplemented if rest or kwargs else rows.added_up(True)

    def _linear(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function in torchs.ADDITIONS and any(type(each) is int and each == 0 for each in args):
            return self  # as Python's ``sum`` begins
        sums = [each for each in args if isinstance(each, LazySum)]
        fits = len(sums) == len(args) or function in torchs.PRODUCTS | torchs.DIVISIONS
        if kwargs or not fits or any(each._is_total is not self._is_total for each in sums):
            return NotImplemented
        made = _combined(function, tuple([each._rows if isinstance(each, LazySum) else each for each in args]))
        return made if made is NotImplemented or made._terms is None else made.added_up(self._is_total)

    survives_among: ClassVar[torchs.Rules] = {torchs.LINEAR: _linear}
    survives: ClassVar[torchs.Rules] = {torchs.TOTALS: _total}


class LazyStack(LazyTensor):
    """A stack of lazy tensors, for a ``logsumexp`` over it."""

    _parts: tuple[Tensor, ...]
    """Some of them are ``LazyRows``."""

    @staticmethod
    def of(parts: Any, dim: Any = 0) -> Any:
        rows = [each for each in parts if isinstance(each, LazyRows)]
        are_alike = all((each.shape, each.dtype) == (rows[0].shape, rows[0].dtype) for each in parts)
        if dim != 0 or not are_alike or not all(isinstance(each, LazyRows) or type(each) is Tensor for each in parts):
            return NotImplemented
        parts, rows = ([as_constant(each) for each in group] for group in (parts, rows))
        operands, sources = ([one for each in rows for one in (each.operands, each._sources)[n]] for n in range(2))
        compute = lambda: torch.stack([values_of(each) for each in parts])  # noqa: E731
        made = LazyStack((len(parts), *rows[0].shape), operands, compute, rows[0].dtype, sources, rows)
        made._parts = tuple(parts)
        return made

    def _logsumexp(self, _: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        if (*rest, *kwargs.items()) not in ((0,), (("dim", 0),)):
            return NotImplemented
        terms = log_of_sum(*[getattr(each, "_terms", None) for each in self._parts])
        return _combined(lambda *rows: torch.stack(rows).logsumexp(0), self._parts, terms)

    survives: ClassVar[torchs.Rules] = {torchs.LOGSUMEXPS: _logsumexp}


def _combined(function: Any, args: tuple, terms: Terms | None = None) -> Any:
    """``function(*args)``, elementwise, on lazy tensors, numbers and tensors, still lazy; or NotImplemented."""
    lazies = [each for each in args if isinstance(each, LazyRows)]
    if not all(each.shape == lazies[0].shape and all(one.is_lazy for one in each._logits) for each in lazies):
        return NotImplemented
    beside = {place: beside_rows(each, lazies[0]) for place, each in enumerate(args) if type(each) is Tensor}
    if not all(isinstance(each, (LazyRows, int, float)) or beside.get(at) is not None for at, each in enumerate(args)):
        return NotImplemented
    logits = tuple({id(one): one for each in lazies for one in each._logits}.values())
    others: list[Any] = [*(one for each in lazies for one in each._others), *beside.values()]
    places = {id(one): place for group in (logits, others) for place, one in enumerate(group)}

    def part(place: int, argument: Any) -> Callable[..., Any]:
        if place in beside:
            return lambda _, others: others[places[id(beside[place])]]
        if not isinstance(argument, LazyRows):
            return lambda *_: argument
        make, (own, at) = argument._make, ([places[id(one)] for one in g] for g in (argument._logits, argument._others))
        return lambda rows, others: make([rows[place] for place in own], [others[place] for place in at])

    parts = [part(place, each) for place, each in enumerate(args)]
    if terms is None:
        terms = combined(function, *[each._terms if isinstance(each, LazyRows) else _number(each) for each in args])
    compute = lambda: function(*[each.value() if isinstance(each, LazyRows) else each for each in args])  # noqa: E731
    make = lambda rows, others: function(*[part(rows, others) for part in parts])  # noqa: E731
    return LazyRows.of(logits, make, compute, function(*map(one_like, args)).dtype, terms, others)


def _divergence(
    input: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    """``kl_div``: ``target * (log(target) - input)``, and its reduction."""
    if (size_average, reduce) != (None, None):
        return NotImplemented
    of_input, of_target = (each._terms if isinstance(each, LazyRows) else None for each in (input, target))
    function = functools.partial(F.kl_div, reduction="none", log_target=log_target)
    made = _combined(function, (input, target), divergence(of_input, of_target, log_target))
    if made is NotImplemented or reduction == "none":
        return made
    return made.added_up(True) / {"batchmean": len(made), "mean": made.numel()}.get(reduction, 1)


def _number(argument: Any) -> Terms | None:
    """The terms of a number, or of a tensor with one element. This waits for its value."""
    if not isinstance(argument, Tensor):
        return number(argument)
    cannot_wait = argument.is_cuda and torch.cuda.is_current_stream_capturing()
    return None if argument.dim() or cannot_wait else number(argument.item())


def highest_of(tensor: Any, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
    """``topk(k)`` or ``max(dim)`` of a lazy tensor: first the indices, then a gather at these; or NotImplemented."""
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
    make = tensor._make if isinstance(tensor, LazyRows) else lambda rows, _: rows[0]
    logits, others = (tensor._logits, tensor._others) if isinstance(tensor, LazyRows) else ((tensor,), ())
    with torch.no_grad():
        index = by_rows(logits, lambda rows, *others: make(rows, others).topk(k, -1, **named).indices, *others)
    return torch.return_types.topk((tensor.fused(torch.gather, (tensor, -1, index), {}), index))
