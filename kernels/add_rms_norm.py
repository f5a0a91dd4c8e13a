"""Residual addition and RMSNorm: what a decoder layer does between one sublayer and the next.

With x, residual, h, y, dy, dh: (M, H), where h is rounded to its dtype before it is normalized:

    h = x + residual
    y = rms_norm(h)

    dx = dresidual = rms_norm's gradient for h + dh
    dweight        = rms_norm's

Forward moves 4MH elements. It saves h, which is an output anyway, and a float32 for each row. Backward moves 4MH, too:
in one pass it computes the norm's gradient and adds dh, rounding once. Without a residual the stream is x itself, which
then needs no copy, and dh is still added in that pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.norm_kernels import launch_forward
from recompute.kernels.rms_norm import (
    check_rms_norm,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_forward_outputs,
    rms_norm_forward_reference,
    rms_norm_reference,
    rms_norm_regenerate,
)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, eps: float = 1e-6, casting: str = "llama"
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalize that: ``h = x + residual; y = rms_norm(h, weight, eps, casting)``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        residual: of the same shape, of any of these dtypes and any strides; None where ``x`` is the stream already.
        weight: (H,), of any of these dtypes; None normalizes only.
        eps: added to the mean square.
        casting: as for ``rms_norm``.

    Returns:
        y: (..., H), as ``rms_norm(h)`` returns it.
        h: (..., H), contiguous, of the promoted dtype of ``x`` and ``residual``; without a residual a view of ``x``.
            For backward ``h``, ``weight`` and a float32 a row are saved. It must not be changed in place.

    Raises:
        KernelError: for other dtypes, shapes or castings, or tensors on several devices.
    """
    check_rms_norm("add_rms_norm", x, weight, casting)
    if residual is not None:
        launch.check("add_rms_norm", x=x, residual=residual)
        if residual.shape != x.shape:
            raise KernelError(
                f"add_rms_norm: x has shape {tuple(x.shape)} and residual {tuple(residual.shape)}; "
                "expected the same shape."
            )
    y, h, rstd = _AddRMSNorm.apply(x, residual, weight, eps, casting)
    record(y, rms_norm_regenerate, h, weight, rstd, casting)
    return y, h


class _AddRMSNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, casting: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        if residual is None:
            h = x  # autograd returns a view of it, whose gradient comes to this node
            y, rstd = rms_norm_forward(x, weight, eps, casting)
        else:
            y, h, rstd = add_rms_norm_forward(x, residual, weight, eps, casting)
        ctx.save_for_backward(h, weight, rstd)
        ctx.set_materialize_grads(False)
        trains_stream = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        ctx.mark_non_differentiable(*(rstd,) if trains_stream else (rstd, h))
        ctx.eps, ctx.casting = eps, casting
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return y, h, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
        needs_stream = needs_x or needs_residual
        dstream, dweight = dh, None
        if dy is not None:
            h, weight, rstd = ctx.saved_tensors
            if torch.is_grad_enabled():
                inputs, needed = (h, weight, ctx.eps, ctx.casting), (needs_stream, needs_weight, False, False)
                dstream, dweight = launch.differentiable_gradients(rms_norm_reference, inputs, needed, dy)[:2]
                dstream = dstream if dstream is None or dh is None else dstream + dh
            else:
                arguments = (dy, h, weight, rstd, ctx.casting, needs_stream, needs_weight)
                dstream, dweight, _ = rms_norm_backward(*arguments, dh if needs_stream else None)
        dx, dresidual = (
            dstream.to(dtype) if needed and dstream is not None else None
            for needed, dtype in zip((needs_x, needs_residual), ctx.dtypes, strict=True)
        )
        return dx, dresidual, dweight, None, None


def _forward(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    if not launch.uses_triton(x, residual, weight):
        h = x.contiguous() + residual.contiguous()
        y, rstd = rms_norm_forward_reference(h, weight, eps, casting)
        return y, h, rstd
    y, h, rstd = _forward_outputs(x, residual, weight, eps, casting)
    launch_forward(x, launch.dense(residual), weight, None, h, y, None, rstd, eps, casting)
    return y, h, rstd


def add_rms_norm_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, casting: str
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm`` in plain PyTorch, differentiable any number of times."""
    h = x if residual is None else x + residual
    return rms_norm_reference(h, weight, eps, casting), h


def _forward_outputs(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = rms_norm_forward_outputs(h, weight, eps, casting)
    return y, h, rstd


add_rms_norm_forward = launch.register(
    "add_rms_norm_forward(Tensor x, Tensor residual, Tensor? weight, float eps, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)",
    _forward,
    _forward_outputs,
)
