"""What CUDA's ops allocate beside their outputs and free before they return, which fake tensors do not show.

Each formula is taken from the torch sources named there (torch 2.11). What takes few bytes a token, such as sums and
sorts of indices, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def workspace_nbytes(op: Any, args: Any, output: Any) -> int:
    """Bytes that ``output = op(*args)`` takes on CUDA beside its inputs and outputs."""
    formula = _FORMULAS.get(op)
    return formula(args, output) if formula is not None else 0


def _flash_backward(args: Any, output: Any) -> int:
    """A float32 sum of the query's gradient, and a float32 for each row.

    Where there are fewer key heads than query heads, also the gradients of keys and values for each query head.

    ``mha_bwd`` in ATen/native/transformers/cuda/flash_attn/flash_api.cpp. Tensors are (batch, heads, tokens, size).
    """
    query, key = args[1], args[2]
    batch, heads, tokens, size = query.shape
    rows = batch * heads * _up(tokens, 128)
    nbytes = rows * _up(size, 32 if size <= 128 else 64) * 4 + rows * 4
    if key.shape[1] != heads:
        nbytes += 2 * batch * heads * key.shape[2] * size * key.element_size()
    return nbytes


def _efficient_backward(args: Any, output: Any) -> int:
    """A float32 for each row, and where gradients have 16 bits, a float32 sum of each.

    ``_efficient_attention_backward`` in ATen/native/transformers/cuda/attention_backward.cu.
    """
    query, key = args[1], args[2]
    delta = math.prod(query.shape[:3]) * 4
    if query.element_size() == 4:
        return delta
    return delta + 4 * (query.numel() + 2 * key.numel())


def _embedding_backward(args: Any, output: Any) -> int:
    """Where there are many indices, float32 sums of up to ten rows of the gradient each, and six numbers an index.

    ``embedding_backward_cuda_kernel`` in ATen/native/cuda/EmbeddingBackwardKernel.cu.
    """
    gradient, indices, rows = args[:3]
    tokens = indices.numel()
    if tokens <= 3072:
        return 0
    segments = tokens // 10 + min(tokens, rows)
    return segments * _up(gradient.shape[-1], 32) * max(4, gradient.element_size()) + 6 * 8 * tokens


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_FORMULAS: dict[Any, Callable[[Any, Any], int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
}

WORKSPACE_NBYTES = 2 * 32 * 2**20
"""The bytes of cuBLAS's workspaces on Hopper, from its first product on. Each thread that calls cuBLAS has one, so that
there is one for forward and one for backward. On other devices each has 8.1 MiB (``getChosenWorkspaceSize`` in
ATen/cuda/CublasHandlePool.cpp)."""
