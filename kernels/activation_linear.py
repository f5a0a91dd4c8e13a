"""A Linear that reads an activation: the second half of an ungated MLP, for code in which its parts lie apart.

With x: (M, I), weight: (O, I):

    active = activation(x)           (M, I)
    y      = active @ weightᵀ        (M, O)

    dactive   = dy @ weight                          (M, I)
    dx        = the activation's, and active again   (M, I)
    d(weight) = dyᵀ @ active                         (O, I)

and the bias's gradient is dy summed over M.

Only x is saved, where eager also saves active. The kernel that computes dx also regenerates active, and writes it over
dactive, which nobody else holds. The matrix products are PyTorch's, and as many as eager runs. ``mlp`` is a Linear and
then this, with the same bits.
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
    without_autocast,
)


def activation_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """``linear(activation(x))``, holding only ``x`` for backward.

    Under autocast the activation is computed in the dtype of ``x``, and the matrix products in that of autocast, as
    PyTorch does.

    Args:
        x: (..., I), float16, bfloat16, float32 or float64, of any strides.
        weight: (O, I), of the dtype of ``x`` (any of these under autocast), as the bias.
        bias: (O,).
        activation: one of those that ``mlp`` takes.

    Returns:
        (..., O). Saved for backward are ``x``, weight and bias.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.
    """
    narrow = autocast_dtype(x.device.type)
    _check(x, weight, bias, activation, narrow)
    return ActivationLinearFunction.apply(x, *cast_if_made((weight, bias), narrow), activation, narrow)


@once_by_layouts
def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, narrow: torch.dtype | None) -> None:
    launch.check("activation_linear", x=x, weight=weight, bias=bias)
    check_activation("activation_linear", activation)
    fits = weight.dim() == 2 and x.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        found = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
        found += "" if bias is None else f", bias {tuple(bias.shape)}"
        raise KernelError(f"activation_linear: expected x (..., I), weight (O, I) and bias (O,); found {found}.")
    check_dtypes("activation_linear", {"x": x.dtype}, {"weight": weight, "bias": bias}, narrow)


def check_activation(op: str, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise KernelError(f"{op}: unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")


class ActivationLinearFunction(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, narrow: torch.dtype | None
    ) -> Tensor:
        """narrow: the dtype to cast weight and bias to, in forward and again in backward."""
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.narrow = activation, narrow
        weight, bias = cast((weight, bias), narrow)
        active = in_dtype(activation_forward(rows(x), activation), weight.dtype)  # autocast would cast it, too
        return shaped(F.linear(active, weight, bias), *x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[:3]
        if dy is None:
            return None, None, None, None, None
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled():
                inputs = (*ctx.saved_tensors, ctx.activation, ctx.narrow)
                return launch.differentiable_gradients(activation_linear_reference, inputs, (*needed, False, False), dy)
            x, *parameters = ctx.saved_tensors
            if not torch.compiler.is_compiling():
                ctx.maybe_clear_saved_tensors()  # so that x can be freed early, unless the graph is retained
            shape, held = x.shape, [rows(x), None]
            del x
            (weight,) = cast(parameters[:1], ctx.narrow)
            dy = in_dtype(rows(dy), weight.dtype)
            dx, *gradients = activation_linear_gradients(dy, held, weight, ctx.activation, needed)
            return None if dx is None else dx.view(shape), *in_dtypes_of(parameters, gradients), None, None


def activation_linear_gradients(
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


def activation_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, narrow: torch.dtype | None = None
) -> Tensor:
    """``activation_linear`` in plain PyTorch, differentiable any number of times."""
    weight, bias = cast((weight, bias), narrow)
    return F.linear(activation_reference(x, activation).to(weight.dtype), weight, bias)
