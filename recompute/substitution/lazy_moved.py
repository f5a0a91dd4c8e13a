"""A head's output, or a function of it, with its words in another dimension than the last."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.substitution import known_functions as torchs
from recompute.substitution.lazy_tensors import LazyTensor, outline


def permuted(tensor: Any, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
    """``function(tensor, *rest, **kwargs)``, one of ``PERMUTATIONS``."""
    order = [size - 1 for size in outline(function, range(1, tensor.dim() + 1), rest, kwargs).shape]
    words = tensor.dim() - 1
    if isinstance(tensor, LazyMoved):
        own = [*range(tensor._dim), words, *range(tensor._dim, words)]
        tensor, order = tensor._rows, [own[each] for each in order]
    return LazyMoved.of(tensor.of_leading([each for each in order if each != words]), order.index(words))


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

    def _loss(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        return self._rows.loss(function, rest, kwargs, self._dim)

    def _softmax(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        if (rest[0] if rest else kwargs.get("dim")) not in (self._dim, self._dim - self.dim()):
            return NotImplemented
        return self._of_rows(function, (-1, *rest[1:]), {key: kwargs[key] for key in kwargs if key != "dim"})

    def _of_rows(self, function: Any, rest: tuple, kwargs: dict[str, Any]) -> Any:
        """``function`` of the rows, which leaves the words where they are."""
        if any(isinstance(each, Tensor) for each in rest):
            return NotImplemented
        found = self._rows.fused(function, (self._rows, *rest), kwargs)
        return found if found is NotImplemented else LazyMoved.of(found, self._dim)

    survives: ClassVar[torchs.Rules] = {
        torchs.PERMUTATIONS: permuted,
        frozenset({F.cross_entropy, F.nll_loss}): _loss,
        torchs.SOFTMAXES: _softmax,
        torchs.SCALINGS | torchs.CASTS | {Tensor.contiguous, Tensor.detach}: _of_rows,
    }


def as_constant(rows: Any) -> Any:
    """``rows`` as code without gradients sees it: without one, wherever the result is used."""
    trains = isinstance(rows, LazyTensor) and rows.requires_grad
    return rows if torch.is_grad_enabled() or not trains else rows.fused(Tensor.detach, (rows,), {})


def rows_of(tensor: Tensor, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``function(tensor, *args, **kwargs)``, one of ``ROWS``, by indexing; or NotImplemented."""
    size, *dims = (1, *args) if function in torchs.UNBINDS else args or (None,)
    if tensor.dim() < 2 or not isinstance(size, int) or size < 1 or [*dims, *kwargs.values()] not in ([], [0]):
        return NotImplemented
    if function in torchs.CHUNKS:
        size = -(-len(tensor) // size) or 1
    if function in torchs.UNBINDS:
        return tuple([tensor[row] for row in range(len(tensor))])
    return tuple([tensor[first : first + size] for first in range(0, max(len(tensor), 1), size)])
