"""Two LayerNorms of the same rows, as a layer has that computes attention and its MLP side by side.

With x, y, other_y, dy, other_dy, dstream: (M, H), both norms with one eps, and all else as ``layer_norm`` has it:

    h       = (x - mean) · rstd                  (M, H)
    y       = h · weight + bias                  (M, H)
    other_y = h · other_weight + other_bias      (M, H)

    dx = the gradient of both norms + dstream, rounded once

Forward moves 3MH elements and has one mean and rstd a row, where two norms move 4MH. Backward moves 5MH in one pass, in
the place of 8MH in two.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.kernels import launch
from recompute.kernels.layer_norm import (
    check_layer_norm,
    layer_norm_backward,
    layer_norm_backward_reference,
    layer_norm_forward_outputs,
    layer_norm_forward_reference,
    layer_norm_reference,
    layer_norm_regenerate,
)
from recompute.kernels.norm_kernels import launch_backward, launch_forward


def twin_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor, Tensor]:
    """``layer_norm(x, weight, bias, eps)``, ``layer_norm(x, other_weight, other_bias, eps)``, and ``x``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        weight, bias, other_weight, other_bias: (H,), of any of these dtypes; None does not scale, or shift.
        eps: added to the variance.

    Returns:
        Both norms' outputs, (..., H) and contiguous, and a view of ``x`` for the residual stream, whose gradient is
        added in the pass that computes the norms'. It must not be changed in place. Saved for backward are ``x``, the
        parameters, and two float32 a row.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.
    """
    for parameters in ((weight, bias), (other_weight, other_bias)):
        check_layer_norm("twin_layer_norm", x, *parameters)
    y, other_y, stream, mean, rstd = _TwinLayerNorm.apply(x, weight, bias, other_weight, other_bias, eps)
    record(y, layer_norm_regenerate, stream, weight, bias, mean, rstd)
    record(other_y, layer_norm_regenerate, stream, other_weight, other_bias, mean, rstd)
    return y, other_y, stream


class _TwinLayerNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, ...]:
        y, other_y, mean, rstd = twin_layer_norm_forward(x, weight, bias, other_weight, other_bias, eps)
        ctx.save_for_backward(x, weight, bias, other_weight, other_bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(mean, rstd) if ctx.needs_input_grad[0] else (mean, rstd, x))
        ctx.eps = eps
        return y, other_y, x, mean, rstd  # autograd returns a view of x, whose gradient comes to this node

    @staticmethod
    def backward(
        ctx: Any, dy: Tensor | None, other_dy: Tensor | None, dstream: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, *parameters, mean, rstd = ctx.saved_tensors
        needs_dx, *trained, _ = ctx.needs_input_grad
        if dy is None and other_dy is None:
            return dstream, None, None, None, None, None
        if torch.is_grad_enabled():
            reached = [dy is not None, other_dy is not None]
            needed = (needs_dx, *[trains and reached[place // 2] for place, trains in enumerate(trained)], False, False)
            given: Any = tuple(each for each in (dy, other_dy) if each is not None)
            inputs = (x, *parameters, ctx.eps, tuple(reached))
            dx, *others = launch.differentiable_gradients(_reached_reference, inputs, needed, given)
            dx = dstream if dx is None else dx if dstream is None else dx + dstream
            return dx, *others[:4], None
        dstream = dstream if needs_dx else None
        if dy is not None and other_dy is not None:
            arguments = (dy, other_dy, x, *parameters, mean, rstd, needs_dx, *trained, dstream)
            return *twin_layer_norm_backward(*arguments), None
        first, own = (0, dy) if dy is not None else (2, other_dy)
        pair, needed = parameters[first : first + 2], trained[first : first + 2]
        dx, *found = layer_norm_backward(own, x, *pair, mean, rstd, needs_dx, *needed, dstream)
        return (dx, *found, None, None, None) if first == 0 else (dx, None, None, *found, None)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not launch.uses_triton(x, weight, bias, other_weight, other_bias):
        y, mean, rstd = layer_norm_forward_reference(x.contiguous(), weight, bias, eps)
        other_y, _, _ = layer_norm_forward_reference(x.contiguous(), other_weight, other_bias, eps)
        return y, other_y, mean, rstd
    y, other_y, mean, rstd = _forward_outputs(x, weight, bias, other_weight, other_bias, eps)
    launch_forward(x, None, weight, bias, None, y, mean, rstd, eps, "none", (other_weight, other_bias, other_y))
    return y, other_y, mean, rstd


def _backward(
    dy: Tensor,
    other_dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    needs_other_dweight: bool,
    needs_other_dbias: bool,
    dstream: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if not launch.uses_triton(x, weight, bias, other_weight, other_bias):
        wide = None if dstream is None else launch.widen(dstream)
        needs, other_needs = (needs_dweight, needs_dbias), (needs_other_dweight, needs_other_dbias)
        first, dweight, dbias = layer_norm_backward_reference(
            dy, launch.widen(x), weight, bias, mean, rstd, needs_dx, *needs, wide
        )
        dx, other_dweight, other_dbias = layer_norm_backward_reference(
            other_dy, launch.widen(x), other_weight, other_bias, mean, rstd, needs_dx, *other_needs, first
        )
        return None if dx is None else dx.to(x.dtype), dweight, dbias, other_dweight, other_dbias
    needed = (needs_dx, needs_dweight, needs_dbias, needs_other_dweight, needs_other_dbias)
    outputs = _backward_outputs(dy, other_dy, x, weight, bias, other_weight, other_bias, mean, rstd, *needed, dstream)
    dx, dweight, dbias, *others = outputs
    other = (other_dy, other_weight, *others)
    launch_backward(dy, x, weight, mean, rstd, dstream, dx, dweight, dbias, None, "none", other)  # type: ignore[arg-type]
    return outputs


def twin_layer_norm_reference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Both outputs in plain PyTorch, differentiable any number of times."""
    return layer_norm_reference(x, weight, bias, eps), layer_norm_reference(x, other_weight, other_bias, eps)


def _reached_reference(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Those outputs that are ``reached`` by a gradient."""
    *others, reached = arguments
    return tuple(itertools.compress(twin_layer_norm_reference(x, *others), reached))


def _forward_outputs(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd = layer_norm_forward_outputs(x.new_empty(x.shape), weight, bias, eps)
    return y, y.new_empty(y.shape), mean, rstd


def _backward_outputs(
    dy: Tensor,
    other_dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    other_weight: Tensor | None,
    other_bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    needs_other_dweight: bool,
    needs_other_dbias: bool,
    dstream: Tensor | None,
) -> tuple[Tensor | None, ...]:
    parameters = (weight, bias, other_weight, other_bias)
    needed = (needs_dweight, needs_dbias, needs_other_dweight, needs_other_dbias)
    gradients = [
        each.new_empty(each.shape) if each is not None and needs else None
        for each, needs in zip(parameters, needed, strict=True)
    ]
    return x.new_empty(x.shape) if needs_dx else None, *gradients


_PARAMETERS = "Tensor? weight, Tensor? bias, Tensor? other_weight, Tensor? other_bias"
twin_layer_norm_forward = launch.register(
    f"twin_layer_norm_forward(Tensor x, {_PARAMETERS}, float eps)"
    " -> (Tensor y, Tensor other_y, Tensor mean, Tensor rstd)",
    _forward,
    _forward_outputs,
)
twin_layer_norm_backward = launch.register(
    f"twin_layer_norm_backward(Tensor dy, Tensor other_dy, Tensor x, {_PARAMETERS}, Tensor mean, Tensor rstd,"
    " bool needs_dx, bool needs_dweight, bool needs_dbias, bool needs_other_dweight, bool needs_other_dbias,"
    " Tensor? dstream) -> (Tensor? dx, Tensor? dweight, Tensor? dbias, Tensor? other_dweight, Tensor? other_dbias)",
    _backward,
    _backward_outputs,
)
