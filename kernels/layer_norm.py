"""LayerNorm: every row less its mean, divided by its standard deviation, then scaled and shifted.

With x, dy: (M, H) and weight, bias: (H,), each of which may be missing, and means over H:

    mean = mean(x)                               (M,)
    rstd = 1 / sqrt(mean((x - mean)²) + eps)     (M,)
    h    = (x - mean) · rstd                     (M, H)
    y    = h · weight + bias                     (M, H)

    dweight = sum(dy · h, over M)                (H,)
    dbias   = sum(dy, over M)                    (H,)
    g       = dy · weight                        (M, H)
    dx      = rstd · (g - mean(g) - h · mean(g · h)) + dresidual

A sum of many numbers errs in float32, and with it a mean, which matters where it is large beside the deviation. So the
mean of x - mean, which would be 0, is taken along with that of its square: the mean is corrected by it, and the square.

Backward regenerates h from x, mean and rstd, so x is saved and not y, from which h could not be computed where a weight
is 0. dresidual is a gradient of x from elsewhere: that of the residual stream that the norm reads.

Forward moves 2MH elements, backward 3MH (and MH more for dresidual). Rows wider than a program's registers are read
three times in forward, the second and third time from L2, and twice in backward, which then moves 5MH.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.norm_kernels import launch_backward, launch_forward
from recompute.kernels.norm_layout import in_memory_order

_CASTING = "none"  # as the kernels name it: everything in float32, rounded once


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Subtract from every row of ``x`` its mean, divide it by its standard deviation, and apply weight and bias.

    As ``torch.nn.LayerNorm`` and Hugging Face's CohereLayerNorm do, all of it is computed in float32 (in float64 for
    float64 input) and rounded once, to ``x.dtype``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides. Rows that are contiguous, with leading
            dimensions in any order, are read in place.
        weight: (H,), of any of these dtypes; None does not scale.
        bias: (H,), of any of these dtypes; None does not shift.
        eps: added to the variance.

    Returns:
        (..., H), dense, of the dtype of ``x``, in the order in memory that ``rms_norm`` describes. For backward ``x``,
        weight, bias and two float32 for each row are saved.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.
    """
    check_layer_norm("layer_norm", x, weight, bias)
    y = _LayerNorm.apply(x, weight, bias, eps)
    record(y, layer_norm_output, x, weight, bias, eps)
    return y


def check_layer_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    launch.check(op, x=x, weight=weight, bias=bias)
    if x.dim() == 0:
        raise KernelError(f"{op}: x has no dimension to normalize over; expected shape (..., H).")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[-1:]:
            raise KernelError(
                f"{op}: {name} has shape {tuple(value.shape)}; expected ({x.shape[-1]},) for x of shape "
                f"{tuple(x.shape)}."
            )


class _LayerNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        y, mean, rstd = layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return launch.differentiable_gradients(layer_norm_reference, (x, weight, bias, ctx.eps), needed, dy)
        return *layer_norm_backward(dy, x, weight, bias, mean, rstd, *needed[:3]), None


@in_memory_order(0)
def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if not launch.uses_triton(x, weight, bias):
        return layer_norm_forward_reference(x.contiguous(), weight, bias, eps)
    y, mean, rstd = layer_norm_forward_outputs(x, weight, bias, eps)
    launch_forward(x, None, weight, bias, None, y, mean, rstd, eps, _CASTING)
    return y, mean, rstd


@in_memory_order(0)
def _regenerated(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    if not launch.uses_triton(x, weight, bias):
        return _scaled(_normalized(x.contiguous(), mean, rstd), x.dtype, weight, bias)
    y = _regenerated_outputs(x, weight, bias, mean, rstd)
    launch_forward(x, None, weight, bias, None, y, launch.dense(mean), launch.dense(rstd), None, _CASTING)
    return y


# These arguments stand three times because torch.library calls an op, and what allocates its outputs, with the flat
# arguments of the schema: see rms_norm.py.
@in_memory_order(1)
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    arguments = (dy, x, weight, bias, mean, rstd, needs_dx, needs_dweight, needs_dbias, dresidual)
    if not launch.uses_triton(x, weight, bias):
        return layer_norm_backward_reference(*arguments)
    dx, dweight, dbias = _backward_outputs(*arguments)
    launch_backward(dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias, None, _CASTING)
    return dx, dweight, dbias


def layer_norm_output(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return layer_norm_forward(x, weight, bias, eps)[0]


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``layer_norm`` in plain PyTorch, differentiable any number of times."""
    return layer_norm_forward_reference(x, weight, bias, eps)[0]


def layer_norm_forward_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = launch.widen(x)
    mean = wide.mean(-1)
    centered = wide - mean.unsqueeze(-1)
    error = centered.mean(-1)
    mean, rstd = mean + error, torch.rsqrt(centered.square().mean(-1) - error.square() + eps)
    return _scaled(_normalized(x, mean, rstd), x.dtype, weight, bias), mean, rstd


def _normalized(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (launch.widen(x) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def _scaled(normalized: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = normalized if weight is None else normalized * launch.widen(weight)
    return (y if bias is None else y + launch.widen(bias)).to(dtype)


def layer_norm_backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    dresidual: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    h = _normalized(x.contiguous(), mean, rstd)
    g = launch.widen(dy.contiguous())
    dx = dweight = dbias = None
    shape = rstd.numel(), x.shape[-1]
    if needs_dweight and weight is not None:
        dweight = (g * h).reshape(shape).sum(0).to(weight.dtype)
    if needs_dbias and bias is not None:
        dbias = g.reshape(shape).sum(0).to(bias.dtype)
    if needs_dx:
        if weight is not None:
            g = g * launch.widen(weight)
        dx = rstd.unsqueeze(-1) * (g - g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True))
        dx = (dx if dresidual is None else dx + dresidual).to(x.dtype)
    return dx, dweight, dbias


@in_memory_order(0)
def layer_norm_forward_outputs(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=dtype) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@in_memory_order(0)
def _regenerated_outputs(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@in_memory_order(1)
def _backward_outputs(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = x.new_empty(x.shape) if needs_dx else None
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else None
    dbias = bias.new_empty(bias.shape) if needs_dbias and bias is not None else None
    return dx, dweight, dbias


layer_norm_forward = launch.register(
    "layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor mean, Tensor rstd)",
    _forward,
    layer_norm_forward_outputs,
)
layer_norm_backward = launch.register(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, bool needs_dx,"
    " bool needs_dweight, bool needs_dbias, Tensor? dresidual=None)"
    " -> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
    _backward,
    _backward_outputs,
)
layer_norm_regenerate = launch.register(
    "layer_norm_regenerate(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd) -> Tensor y",
    _regenerated,
    _regenerated_outputs,
)
