"""The codec of what is compressed: blocks of 8-bit codes, by Triton on CUDA and by plain PyTorch elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor

from recompute.engine.compression import Codes
from recompute.kernels.blockwise_8bit import dequantize_blockwise, quantize_blockwise_with_error


class Blockwise8Bit:
    """``kernels.blockwise_8bit``: fp8 where the device has it, else int8, with one scale for 128 elements."""

    def encode(self, tensor: Tensor) -> Codes:
        return Codes(*quantize_blockwise_with_error(tensor))

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_blockwise(codes, scales, dtype)
