"""The ungated MLP of GPT-like models, encoders and vision transformers.

With x: (M, H), up_weight: (I, H), down_weight: (O, I), where O is H in those models:

    up     = x @ up_weightᵀ             (M, I)
    active = activation(up)             (M, I)
    y      = active @ down_weightᵀ      (M, O)

    dactive        = dy @ down_weight                     (M, I)
    dup            = the activation's, and active again   (M, I)
    d(down_weight) = dyᵀ @ active                         (O, I)
    dx             = dup @ up_weight                      (M, H)
    d(up_weight)   = dupᵀ @ x                             (I, H)

and the biases' gradients are dup and dy summed over M.

Of forward's (M, I) tensors only up is saved, where eager also saves active. The kernel that computes dup also
regenerates active, and writes it over dactive, which nobody else holds. So at most three such tensors are alive, and
two once up has been read. The matrix products are PyTorch's, and as many as eager runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.activation import (
    ACTIVATIONS,
    activation_backward,
    activation_backward_,
    activation_forward,
    activation_reference,
)
from recompute.kernels.argument_layouts import once_by_layouts
from recompute.kernels.blockwise_8bit import BLOCK, dequantize_op
from recompute.kernels.gated_mlp import check_activation, codes_of
from recompute.kernels.linears import (
    autocast_dtype,
    cast,
    cast_if_made,
    check_dtypes,
    in_dtype,
    in_dtypes_of,
    linear_gradients,
    rows,
    shaped,
    sum_of_products,
    without_autocast,
)
from recompute.kernels.tiled_mlp import TiledMLPFunction


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "gelu",
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    compress: bool = False,
    tile: int | None = None,
) -> Tensor:
    """``down(activation(up(x)))``, holding only ``up(x)`` for backward.

    Under autocast the matrix products run in its dtype, as those of ``torch.nn.Linear`` do. Inputs and parameters that
    require no gradient cost no matrix product in backward.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        up_weight: (I, H), of the dtype of ``x`` (any of these under autocast), as the other weight and the biases. For
            the weight of Hugging Face's Conv1D, which is (H, I), give its transpose: it is read in place, and so is the
            gradient written.
        down_weight: (O, I).
        activation: ``silu``, ``gelu``, ``gelu_tanh``, which approximates it, ``quick_gelu`` (x · sigmoid(1.702 · x)),
            ``relu`` or ``relu2``, its square.
        up_bias: (I,).
        down_bias: (O,).
        compress: whether ``up(x)`` is held as codes of 8 bits (``blockwise_8bit``), which backward reads. Then the
            gradients are those of a slightly different ``up(x)``. That of float64 is held as it is.
        tile: compute so many tokens at a time, and hold ``x`` alone: backward runs the tiles again (``tiled_mlp``).
            None: all at once.

    Returns:
        (..., O). Saved for backward are ``x``, weights and biases, and ``up(x)``: I elements a token.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.
    """
    parameters = (up_weight, down_weight, up_bias, down_bias)
    narrow = autocast_dtype(x.device.type)
    _check(x, activation, narrow, *parameters)
    operands = cast_if_made(parameters, narrow)
    if tile is None or torch.compiler.is_compiling():
        return MLPFunction.apply(x, *operands, activation, narrow, compress, True)
    if tile < 1:
        raise KernelError(f"mlp: tile is {tile}; expected at least 1 token, or None.")
    width = down_weight.shape[0]
    return TiledMLPFunction.apply(x, _of_a_tile, mlp_reference, activation, narrow, tile, width, *operands)


def _of_a_tile(x: Tensor, *arguments: Any, with_output: bool) -> Tensor:
    return MLPFunction.apply(x, *arguments, None, False, with_output)


@once_by_layouts
def _check(x: Tensor, activation: str, narrow: torch.dtype | None, *parameters: Tensor | None) -> None:
    named = dict(zip(("up_weight", "down_weight", "up_bias", "down_bias"), parameters, strict=True))
    operands = {"x": x, **named}
    launch.check("mlp", **operands)
    check_activation("mlp", activation, ACTIVATIONS)
    found = {name: tuple(tensor.shape) for name, tensor in operands.items() if tensor is not None}
    hidden, down = found["x"][-1:], found["down_weight"]
    fit = {"up_weight": down[1:] + hidden, "up_bias": down[1:], "down_bias": down[:1]}
    if not hidden or len(down) != 2 or any(found[name] != shape for name, shape in fit.items() if name in found):
        listed = ", ".join(f"{name} {shape}" for name, shape in found.items())
        raise KernelError(
            "mlp: expected x (..., H), up_weight (I, H), down_weight (O, I), and biases as long as their weights; "
            f"found {listed}."
        )
    check_dtypes("mlp", {"x": x.dtype}, named, narrow)


class MLPFunction(torch.autograd.Function):
    """``with_output`` is False where forward runs again for the sake of its backward alone. ``narrow`` is the dtype to
    cast weights and biases to, in forward and again in backward."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up_weight: Tensor,
        down_weight: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        narrow: torch.dtype | None,
        compress: bool,
        with_output: bool,
    ) -> Tensor:
        parameters = (up_weight, down_weight, up_bias, down_bias)
        up_weight, down_weight, up_bias, down_bias = cast(parameters, narrow)
        up = F.linear(in_dtype(rows(x), up_weight.dtype), up_weight, up_bias)  # autocast would cast x, too
        ctx.holds_codes = compress and up.dtype in launch.TRITON_DTYPES
        held = codes_of(up) if ctx.holds_codes else (up,)
        ctx.save_for_backward(x, *parameters, *held)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.narrow = activation, narrow
        shape = *x.shape[:-1], down_weight.shape[0]
        if not with_output:
            return x.new_empty(()).expand(shape)
        return shaped(F.linear(activation_forward(up, activation), down_weight, down_bias), *shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, nothing = ctx.needs_input_grad[:5], (None,) * 4
        if dy is None:
            return (None,) * 5 + nothing
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled():
                inputs = (*ctx.saved_tensors[:5], ctx.activation, ctx.narrow)
                return launch.differentiable_gradients(mlp_reference, inputs, (*needed, False, False), dy)[:5] + nothing
            return _gradients(ctx, needed, dy) + nothing


def _gradients(ctx: Any, needed: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, the weights and the biases: those that are ``needed``, and None for the others."""
    saved = ctx.saved_tensors if ctx.holds_codes else (*ctx.saved_tensors, None)
    x, *parameters = saved[:5]
    up_weight, down_weight = cast(parameters[:2], ctx.narrow)
    held = list(saved[5:])  # `*held` would be a tuple to torch.compile (torch 2.11)
    del saved
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # so that up can be freed below, unless the graph is retained
    needs_dx, up_trains, down_trains, up_bias_trains, down_bias_trains = needed
    shape, dtype, x, dy = x.shape, x.dtype, rows(x), in_dtype(rows(dy), down_weight.dtype)

    needs_dup = needs_dx or up_trains or up_bias_trains
    dup, ddown_weight, ddown_bias = _through_activation(
        dy, held, down_weight, ctx.activation, (needs_dup, down_trains, down_bias_trains)
    )
    dx = sum_of_products(((dup, up_weight),), dtype) if needs_dx else None
    n = in_dtype(x, up_weight.dtype) if up_trains else None
    dup_weight, dup_bias = linear_gradients(dup, n, up_trains, up_bias_trains, weight=up_weight)
    gradients = in_dtypes_of(parameters, (dup_weight, ddown_weight, dup_bias, ddown_bias))
    return None if dx is None else dx.view(shape), *gradients


def _through_activation(
    dy: Tensor,
    held: list[Tensor | None],
    weight: Tensor,
    activation: str,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of the weight and of the bias: those that are ``needed``, and None for the others.

    Args:
        dy: (M, O), of the weight's dtype.
        held: x, (M, I), and None; or codes of an x of the weight's dtype, and their scales. The list is emptied, so
            that these can be freed as soon as they are read.
    """
    x, scales = held
    held.clear()
    assert x is not None
    needs_dx, needs_dweight, needs_dbias = needed
    dtype = weight.dtype if scales is not None else x.dtype
    dx = active = None
    if needs_dx:
        active = in_dtype(dy @ weight, dtype)  # its gradient, in whose place active comes
        if needs_dweight:
            dx = torch.empty_like(active)
            activation_backward_(active, x, scales, dx, activation)
        else:
            dx, active = activation_backward(active, x, scales, activation), None
    elif needs_dweight:
        x = x if scales is None else dequantize_op(x, scales, dtype, BLOCK)
        active = activation_forward(x, activation)
    del x
    active = None if active is None else in_dtype(active, weight.dtype)
    return dx, *linear_gradients(dy, active, needs_dweight, needs_dbias, weight=weight)


def mlp_reference(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """``mlp`` in plain PyTorch, differentiable any number of times."""
    up_weight, down_weight, up_bias, down_bias = cast((up_weight, down_weight, up_bias, down_bias), narrow)
    up = F.linear(x.to(up_weight.dtype), up_weight, up_bias)
    return F.linear(activation_reference(up, activation), down_weight, down_bias)
