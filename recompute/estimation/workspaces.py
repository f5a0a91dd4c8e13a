"""What CUDA's ops allocate beside their outputs and free before they return, which fake tensors do not show.

Each formula is taken from the torch sources named there (torch 2.11). What takes few bytes a token, such as sums and
sorts of indices, is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def workspace_nbytes(op: Any, args: Any, output: Any) -> int:
    """Bytes that ``output = op(*args)`` takes on CUDA beside its inputs and outputs."""
    formula = _FORMULAS.get(op)
    return formula(args, output) if formula is not None else 0


def _flash_backward(args: Any, output: Any) -> int:
    """A float32 sum of the query's gradient, and a float32 for each row; both padded.

    ``mha_bwd`` in ATen/native/transformers/cuda/flash_attn/flash_api.cpp. Tensors are (batch, heads, tokens, size).
    """
    batch, heads, tokens, size = args[1].shape
    rows = batch * heads * _up(tokens, 128)
    return rows * _up(size, 32 if size <= 128 else 64) * 4 + rows * 4 + _of_query_heads(args)


def _cudnn_backward(args: Any, output: Any) -> int:
    """A float32 sum of the query's gradient, and a float32 for each row (measured: cuDNN 9.19, H100)."""
    batch, heads, tokens, size = args[1].shape
    return batch * heads * tokens * (size + 1) * 4 + _of_query_heads(args)


def _of_query_heads(args: Any) -> int:
    """Where there are fewer heads of keys than of queries: gradients of keys and values for each head of queries."""
    query, key, value = args[1:4]
    if key.shape[1] == query.shape[1]:
        return 0
    return query.shape[0] * query.shape[1] * key.shape[2] * (key.shape[3] + value.shape[3]) * key.element_size()


def _efficient_forward(args: Any, output: Any) -> int:
    """A float32 sum of an output of 16 bits, whose heads are wider than the registers of a block hold."""
    query, value = args[0], args[2]
    is_wide = max(query.shape[-1], value.shape[-1]) > 128
    return 4 * output[0].numel() if is_wide and query.element_size() == 2 else 0


def _efficient_backward(args: Any, output: Any) -> int:
    """A float32 for each row, and in 16 bits float32 sums of gradients, by blocks of rows.

    ``workspace_size`` in ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h, and the splits of keys in
    ``_efficient_attention_backward`` of attention_backward.cu. In float32 it is the product of which rows are summed.
    """
    query, key, value = args[1:4]
    batch, heads, tokens, size = query.shape
    delta = batch * heads * tokens * 4
    if query.element_size() == 4:
        return 4 * output[0].numel() + 2 * delta
    widest = max(size, value.shape[-1])
    block, columns = (64, 64) if widest <= 64 else (128, 128) if widest <= 128 else (128, 64)
    sums = -(-tokens // block) * -(-size // columns) * (block * columns + 4)
    if widest > 128:
        splits = max(1, min(-(-key.shape[2] // 64), 200 // (batch * heads)))
        sums += splits * 64 * (_up(size, block) + _up(value.shape[-1], block))
    return delta + 4 * batch * heads * sums + _of_query_heads(args)


def _softmax_backward(args: Any, output: Any) -> int:
    """The product of the gradient and the output, which is summed along rows.

    ``softmax_backward_cuda_out`` in ATen/native/cuda/SoftMax.cu.
    """
    return args[0].numel() * args[0].element_size()


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
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient_forward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
}


def cublas_nbytes(capability: tuple[int, int]) -> int:
    """The bytes of cuBLAS's workspaces, from its first product on.

    Each thread that calls cuBLAS has one, so that there is one for forward and one for backward
    (``getChosenWorkspaceSize`` in ATen/cuda/CublasHandlePool.cpp).
    """
    return 2 * (32 * 2**20 if capability[0] in (9, 10) else 8320 * 2**10)
