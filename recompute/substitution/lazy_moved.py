"""A head's output, or a function of it, with its words in another dimension than the last."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.substitution.lazy_tensors import PRODUCTS, LazyTensor, outline
from recompute.substitution.word_terms import DIVISIONS, SOFTMAXES

_TRANSPOSES: Any = Tensor.mT, Tensor.T
PERMUTATIONS = frozenset(
    getattr(space, name)
    for name in ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis")
    for space in (Tensor, torch)
    if hasattr(space, name)
) | {each.__get__ for each in _TRANSPOSES}
_UNBINDS = frozenset({Tensor.unbind, torch.unbind})  # which iterating over a tensor calls
_CHUNKS = frozenset({Tensor.chunk, torch.chunk})
ROWS = _UNBINDS | _CHUNKS | {Tensor.split, torch.split}
_LOSSES = frozenset({F.cross_entropy, F.nll_loss})
_SAME_SHAPE = (
    PRODUCTS | DIVISIONS | {Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach, Tensor.tanh, torch.tanh}
)


class LazyMoved(LazyTensor):
    """Logits of several dimensions as a cross-entropy takes them, with the classes in the second one."""

    _rows: Any
    """``LazyLogits`` or ``LazyRows``, which import this file: the words are in their last dimension."""
    _dim: int
    """The dimension of the words here."""

    @staticmethod
    def of(rows: Any, dim: int) -> Any:
        rows = as_constant(rows)
        if dim == rows.dim() - 1:
            return rows
        shape = (*rows.shape[:dim], rows.shape[-1], *rows.shape[dim:-1])
        compute = lambda: rows.value().movedim(-1, dim)  # noqa: E731
        made = LazyMoved(shape, rows.operands, compute, rows.dtype, rows._sources, (rows,))
        made._rows, made._dim = rows, dim
        return made

    def before_change(self) -> None:
        self._rows.before_change()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not args or args[0] is not self or not self._rows.is_lazy:
            return NotImplemented
        rows, dim, rest = self._rows, self._dim, args[1:]
        if function in PERMUTATIONS:
            own = [*range(dim), rows.dim() - 1, *range(dim, rows.dim() - 1)]
            return _in_order(rows, [own[each] for each in _order(function, rows.dim(), rest, kwargs)])
        if function in _LOSSES:
            return rows.loss(function, dim, *rest, **kwargs)
        if function in SOFTMAXES and (rest[0] if rest else kwargs.get("dim")) in (dim, dim - rows.dim()):
            found = rows.fused(function, (rows, -1, *rest[1:]), {key: kwargs[key] for key in kwargs if key != "dim"})
        elif function in _SAME_SHAPE and not any(isinstance(each, Tensor) for each in rest):
            found = rows.fused(function, (rows, *rest), kwargs)
        else:
            return NotImplemented
        return found if found is NotImplemented else LazyMoved.of(found, dim)


def as_constant(rows: Any) -> Any:
    """``rows`` as code without gradients sees it: without one, wherever the result is used."""
    trains = isinstance(rows, LazyTensor) and rows.requires_grad
    return rows if torch.is_grad_enabled() or not trains else rows.fused(Tensor.detach, (rows,), {})


def permuted(rows: Any, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
    """``function(rows, *rest, **kwargs)``, one of ``PERMUTATIONS``."""
    return _in_order(rows, _order(function, rows.dim(), rest, kwargs))


def rows_of(tensor: Tensor, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``function(tensor, *args, **kwargs)``, one of ``ROWS``, by indexing; or NotImplemented."""
    size, *dims = (1, *args) if function in _UNBINDS else args or (None,)
    if tensor.dim() < 2 or not isinstance(size, int) or size < 1 or [*dims, *kwargs.values()] not in ([], [0]):
        return NotImplemented
    if function in _CHUNKS:
        size = -(-len(tensor) // size) or 1
    if function in _UNBINDS:
        return tuple([tensor[row] for row in range(len(tensor))])
    return tuple([tensor[first : first + size] for first in range(0, max(len(tensor), 1), size)])


def _order(function: Any, dims: int, rest: tuple, kwargs: dict[str, Any]) -> list[int]:
    """The dimension that comes in each place."""
    return [size - 1 for size in outline(function, range(1, dims + 1), rest, kwargs).shape]


def _in_order(rows: Any, order: list[int]) -> Any:
    words = rows.dim() - 1
    return LazyMoved.of(rows.of_leading([each for each in order if each != words]), order.index(words))
