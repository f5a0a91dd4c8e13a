"""Attention whose queries share one head of keys, as Falcon's do, by torch's fused kernels.

``scaled_dot_product_attention`` takes one head of keys and values for all queries, by broadcasting. No fused kernel of
CUDA does: torch then writes the scores of all heads to memory, and multiplies in float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recompute.kernels.launch import is_on_cuda

_attention = F.scaled_dot_product_attention


class WholeHeads(TorchFunctionMode):
    """Gives each head of the queries a copy of the keys and the values that it shares with the others."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (_by_whole_heads if function is _attention else function)(*args, **kwargs)


def _by_whole_heads(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _attention(query, *whole_heads(query, key, value), *args, **kwargs)


def whole_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """``key`` and ``value`` with as many heads as ``query``, where these have one, on CUDA in 16 bits.

    query: (batch, heads, tokens, width); key and value: (batch, 1, tokens, width).
    """
    shares = query.dim() == key.dim() == value.dim() == 4 and key.shape[1] == value.shape[1] == 1 < query.shape[1]
    if shares and is_on_cuda(query) and query.dtype.itemsize == 2:
        heads = query.shape[1]
        return tuple(each.expand(-1, heads, -1, -1).contiguous() for each in (key, value))  # type: ignore[return-value]
    return key, value
