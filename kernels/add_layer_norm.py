"""Residual addition and LayerNorm: what a pre-norm layer does between one sublayer and the next.

With x, residual, h, y, dy, dh: (M, H), where h is rounded to its dtype before it is normalized:

    h = x + residual
    y = layer_norm(h)

    dx = dresidual = layer_norm's gradient for h + dh
    dweight, dbias = layer_norm's

Forward moves 4MH elements. It saves h, which is an output anyway, and two float32 for each row. Backward moves 4MH,
too: in one pass it computes the norm's gradient and adds dh, rounding once. Without a residual the stream is x itself,
which then needs no copy, and dh is still added in that pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.layer_norm import (
    check_layer_norm,
    layer_norm_backward,
    layer_norm_forward,
    layer_norm_forward_outputs,
    layer_norm_forward_reference,
    layer_norm_reference,
    layer_norm_regenerate,
)
from recompute.kernels.norm_kernels import launch_forward


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalize that: ``h = x + residual; y = layer_norm(h, weight, bias, eps)``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        residual: of the same shape, of any of these dtypes and any strides; None where ``x`` is the stream already.
        weight: (H,), of any of these dtypes; None does not scale.
        bias: (H,), of any of these dtypes; None does not shift.
        eps: added to the variance.

    Returns:
        y: (..., H), as ``layer_norm(h)`` returns it.
        h: (..., H), contiguous, of the promoted dtype of ``x`` and ``residual``; without a residual a view of ``x``.
            For backward ``h``, weight, bias and two float32 a row are saved. It must not be changed in place.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.
    """
    check_layer_norm("add_layer_norm", x, weight, bias)
    if residual is not None:
        launch.check("add_layer_norm", x=x, residual=residual)
        if residual.shape != x.shape:
            raise KernelError(
                f"add_layer_norm: x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; "
                "expected the same shape."
            )
    y, h, mean, rstd = _AddLayerNorm.apply(x, residual, weight, bias, eps)
    record(y, layer_norm_regenerate, h, weight, bias, mean, rstd)
    return y, h


class _AddLayerNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if residual is None:
            h = x  # autograd returns a view of it, whose gradient comes to this node
            y, mean, rstd = layer_norm_forward(x, weight, bias, eps)
        else:
            y, h, mean, rstd = add_layer_norm_forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(h, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        trains_stream = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(*(mean, rstd) if trains_stream else (mean, rstd, h))
        ctx.eps = eps
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y, h, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needs_stream = needs_x or needs_residual
        dstream, dweight, dbias = dh, None, None
        if dy is not None:
            h, weight, bias, mean, rstd = ctx.saved_tensors
            needed = (needs_stream, needs_weight, needs_bias)
            if torch.is_grad_enabled():
                inputs = (h, weight, bias, ctx.eps)
                found = launch.differentiable_gradients(layer_norm_reference, inputs, (*needed, False), dy)
                dstream, dweight, dbias = found[:3]
                dstream = dstream if dstream is None or dh is None else dstream + dh
            else:
                arguments = (dy, h, weight, bias, mean, rstd, *needed)
                dstream, dweight, dbias = layer_norm_backward(*arguments, dh if needs_stream else None)
        dx, dresidual = (
            dstream.to(dtype) if needed and dstream is not None else None
            for needed, dtype in zip((needs_x, needs_residual), ctx.dtypes, strict=True)
        )
        return dx, dresidual, dweight, dbias, None


def _forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launch.uses_triton(x, residual, weight, bias):
        h = x.contiguous() + residual.contiguous()
        y, mean, rstd = layer_norm_forward_reference(h, weight, bias, eps)
        return y, h, mean, rstd
    y, h, mean, rstd = _forward_outputs(x, residual, weight, bias, eps)
    launch_forward(x, launch.dense(residual), weight, bias, h, y, mean, rstd, eps, "none")
    return y, h, mean, rstd


def add_layer_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """``add_layer_norm`` in plain PyTorch, differentiable any number of times."""
    h = x if residual is None else x + residual
    return layer_norm_reference(h, weight, bias, eps), h


def _forward_outputs(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, mean, rstd = layer_norm_forward_outputs(h, weight, bias, eps)
    return y, h, mean, rstd


add_layer_norm_forward = launch.register(
    "add_layer_norm_forward(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    _forward,
    _forward_outputs,
)
