"""Norms of tensors whose leading dimensions lie in memory in another order, as transposed heads do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor


def in_memory_order(position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a function whose ``position``-th argument is x see leading dimensions in the order they have in memory."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def ordered(*arguments: Any) -> Any:
            order = _memory_order(arguments[position])
            if order is None:
                return function(*arguments)
            results = function(*(_permuted(argument, order) for argument in arguments))
            back = sorted(order, key=order.__getitem__)
            if isinstance(results, Tensor):
                return _permuted(results, back)
            return tuple(_permuted(result, back) for result in results)

        return ordered

    return decorate


def _memory_order(x: Tensor) -> list[int] | None:
    """The dimensions of x in the order they have in memory; None if that is their own order, or rows have gaps."""
    if x.dim() < 3 or x.is_contiguous() or x.stride(-1) != 1:
        return None
    leading = range(x.dim() - 1)
    if any(x.stride(dim) == 0 for dim in leading):  # expanded dimensions have no order in memory
        return None
    order = sorted(leading, key=x.stride, reverse=True)
    return None if order == list(leading) else [*order, x.dim() - 1]


def _permuted(value: Any, order: list[int]) -> Any:
    """x, a tensor like it, or a number a row, with dimensions permuted. What has one dimension stays as it is."""
    if isinstance(value, Tensor) and value.dim() > 1:
        return value.permute(order[: value.dim()])
    return value
