"""Stands for the frozen Linears of bitsandbytes and torchao: with their bytes, and with what they hold and allocate.

Products have the right shapes, and no values of use: an estimate asks for none.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_BLOCK, _BLOCK_OF_SCALES = 64, 256
"""The weights that share a scale in ``bitsandbytes.nn.Linear4bit``, and the scales that share one of their own."""


class QuantizedLinear(nn.Linear):
    """A Linear whose weight is codes, with their scales as buffers.

    base: one of ``adapters.BASES``.
    compute_dtype: of the product, and of the weight that is made for it.
    """

    scales: Tensor

    def __init__(
        self, features: tuple[int, int], bias: nn.Parameter | None, base: str, compute_dtype: torch.dtype, device: Any
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = features
        self.base, self.compute_dtype = base, compute_dtype
        count = math.prod(features)
        shape, dtype = {
            "int8": (features[::-1], torch.int8),
            "float8": (features[::-1], torch.float8_e4m3fn),
        }.get(base, ((-(-count // 2), 1), torch.uint8))
        with torch.device(device):
            self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            for name, buffer in _scales(base, count, self.out_features).items():
                self.register_buffer(name, buffer, persistent=False)
        self.bias = bias  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x if self.base == "int8" else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.base == "float8":
            # torchao leaves this to autograd, which holds the weight that was made.
            return F.linear(x, self.weight.to(x.dtype) * self.scales.to(x.dtype), bias).to(given)
        product = _Int8Product if self.base == "int8" else _Nf4Product
        return product.apply(x, self, bias).to(given)

    def made(self) -> Tensor:
        """The weight of nf4, as its products make it."""
        if self.base == "nf4-double":
            self.scales.float()
        pairs = self.weight.expand(-1, 2).to(self.compute_dtype)
        return pairs.flatten()[: self.in_features * self.out_features].view(self.out_features, self.in_features)


def standing_for(module: Any) -> QuantizedLinear | None:
    """What stands on fake tensors for a Linear of bitsandbytes that has been loaded; None for any other module."""
    kind = type(module)
    if not kind.__module__.startswith("bitsandbytes") or kind.__name__ not in ("Linear8bitLt", "Linear4bit"):
        return None
    base, compute_dtype = "int8", torch.bfloat16
    if kind.__name__ == "Linear4bit":
        state = module.weight.quant_state
        base, compute_dtype = "nf4-double" if state.nested else "nf4", module.compute_dtype or state.dtype
    return QuantizedLinear((module.in_features, module.out_features), module.bias, base, compute_dtype, "cpu")


def packed_numbers(model: nn.Module) -> int:
    """How many more numbers the model's weights are than elements: codes of 4 bits are two in an element."""
    linears = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    return sum(each.in_features * each.out_features - each.weight.numel() for each in linears)


def _scales(base: str, count: int, rows: int) -> dict[str, Tensor]:
    if base in ("int8", "float8"):
        return {"scales": torch.empty(rows, 1)}
    blocks, codes = -(-count // _BLOCK), {"codes": torch.empty(16)}
    if base == "nf4":
        return {"scales": torch.empty(blocks), **codes}
    of_scales = {"scales_of_scales": torch.empty(-(-blocks // _BLOCK_OF_SCALES)), "codes_of_scales": torch.empty(256)}
    return {"scales": torch.empty(blocks, dtype=torch.uint8), **codes, **of_scales, "offset": torch.empty(())}


class _Nf4Product(torch.autograd.Function):
    """``MatMul4Bit`` of bitsandbytes (0.50): it makes the weight in forward and again in backward, and holds none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear, bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        return F.linear(x, linear.made(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.linear.made().to(gradient.dtype), None, _of_bias(ctx, gradient)


class _Int8Product(torch.autograd.Function):
    """``MatMul8bitLt`` of bitsandbytes (0.50) without outliers: codes of the input, a sum of int32, and it holds x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.linear, ctx.rows = linear, rows
        codes = rows.half().to(torch.int8)
        sums = torch._int_mm(codes, linear.weight.t())
        product = sums.half().to(x.dtype)  # codes and sums live until then
        return product.view(*x.shape[:-1], linear.out_features)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight = ctx.linear.weight.to(gradient.dtype)
        return gradient @ weight.mul_(ctx.linear.scales), None, _of_bias(ctx, gradient)


def _of_bias(ctx: Any, gradient: Tensor) -> Tensor | None:
    return gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
