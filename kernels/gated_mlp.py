"""The gated MLP of Llama-like decoders.

With x: (M, H), gate_weight, up_weight: (I, H), down_weight: (O, I), where O is H in those decoders:

    gate    = x @ gate_weightᵀ           (M, I)
    up      = x @ up_weightᵀ             (M, I)
    product = activation(gate) · up      (M, I)
    y       = product @ down_weightᵀ     (M, O)

    dproduct         = dy @ down_weight                        (M, I)
    dgate, dup       = the activation's, and product again     (M, I)
    d(down_weight)   = dyᵀ @ product                           (O, I)
    dx               = dgate @ gate_weight + dup @ up_weight   (M, H)
    d(gate_weight)   = dgateᵀ @ x;  d(up_weight) = dupᵀ @ x    (I, H)

and the biases' gradients are dgate, dup and dy summed over M. Packed, gate_weight and up_weight are the halves of one
(2 · I, H), gate and up those of one (M, 2 · I), with one matrix product in the place of two.

Of forward's (M, I) tensors only gate and up are saved. The kernel that computes their gradients also regenerates the
product, and writes it over dproduct, which nobody else holds. So at most five such tensors are alive, and three once
gate and up have been read. The matrix products are PyTorch's, and as many as eager runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.compression import Codes, note_compressed
from recompute.engine.thread_state import local
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.argument_layouts import once_by_layouts
from recompute.kernels.blockwise_8bit import BLOCK, quantize_op
from recompute.kernels.linears import (
    autocast_dtype,
    cast,
    cast_if_made,
    check_dtypes,
    in_dtype,
    in_dtypes_of,
    linear,
    linear_gradients,
    rows,
    sum_of_products,
    without_autocast,
)
from recompute.kernels.swiglu import ACTIVATIONS, glu_backward, glu_backward_, glu_forward, glu_reference
from recompute.kernels.swiglu_from_codes import decoded_gates, glu_backward_from_codes_, glu_backward_from_codes_op
from recompute.kernels.tiled_mlp import TiledMLPFunction


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    compress: bool = False,
    tile: int | None = None,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``, holding only ``gate(x)`` and ``up(x)`` for backward.

    Under autocast the matrix products run in its dtype, as those of ``torch.nn.Linear`` do. Inputs and parameters that
    require no gradient cost no matrix product in backward.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        gate_weight: (I, H), of the dtype of ``x`` (any of these under autocast), as the other weights and biases.
            Packed: (2 · I, H), gate's rows before up's.
        up_weight: (I, H); None if ``gate_weight`` is packed.
        down_weight: (O, I).
        activation: of the gate; ``silu``, ``gelu``, or ``gelu_tanh``, which approximates it.
        gate_bias: as many as ``gate_weight`` has rows.
        up_bias: (I,); None if packed.
        down_bias: (O,).
        compress: whether gate and up are held as codes of 8 bits (``blockwise_8bit``), which backward reads. Then the
            gradients are those of slightly different gates and ups. Those of float64 are held as they are.
        tile: compute so many tokens at a time, and hold ``x`` alone: backward runs the tiles again (``tiled_mlp``).
            None: all at once.

    Returns:
        (..., O). Saved for backward are ``x``, weights and biases, and gate and up: 2 · I elements a token.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.
    """
    parameters = (gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    narrow = autocast_dtype(x.device.type)
    _check(x, activation, narrow, *parameters)
    operands = cast_if_made(parameters, narrow)
    if tile is None or torch.compiler.is_compiling():
        return GatedMLPFunction.apply(x, *operands, activation, narrow, compress, True)
    if tile < 1:
        raise KernelError(f"gated_mlp: tile is {tile}; expected at least 1 token, or None.")
    width = down_weight.shape[0]
    return TiledMLPFunction.apply(x, _of_a_tile, gated_mlp_reference, activation, narrow, tile, width, *operands)


def _of_a_tile(x: Tensor, *arguments: Any, with_output: bool) -> Tensor:
    return GatedMLPFunction.apply(x, *arguments, None, False, with_output)


_PARAMETERS = ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias")


@once_by_layouts
def _check(x: Tensor, activation: str, narrow: torch.dtype | None, *parameters: Tensor | None) -> None:
    named = dict(zip(_PARAMETERS, parameters, strict=True))
    operands: dict[str, Any] = {"x": x, **named}
    launch.check("gated_mlp", **operands)
    check_activation("gated_mlp", activation, ACTIVATIONS)
    found = {name: tuple(tensor.shape) for name, tensor in operands.items() if tensor is not None}
    hidden, down = found["x"][-1:], found["down_weight"]
    outer, inner = down[:1], down[1:]
    gated = inner if "up_weight" in found else tuple(2 * size for size in inner)
    fit = {
        "gate_weight": gated + hidden,
        "up_weight": inner + hidden,
        "gate_bias": gated,
        "up_bias": inner if "up_weight" in found else None,
        "down_bias": outer,
    }
    if not hidden or len(down) != 2 or any(found[name] != shape for name, shape in fit.items() if name in found):
        listed = ", ".join(f"{name} {shape}" for name, shape in found.items())
        raise KernelError(
            "gated_mlp: expected x (..., H), gate_weight and up_weight (I, H), or gate_weight (2 · I, H) and no "
            f"up_weight, down_weight (O, I), and biases as long as their weights; found {listed}."
        )
    check_dtypes("gated_mlp", {"x": x.dtype}, named, narrow)


def check_activation(op: str, activation: str, known: Sequence[str]) -> None:
    if activation not in known:
        raise KernelError(f"{op}: unknown activation {activation!r}; expected one of {', '.join(known)}.")


class GatedMLPFunction(torch.autograd.Function):
    """``with_output`` is False where forward runs again for the sake of its backward alone. ``narrow`` is the dtype to
    cast weights and biases to, in forward and again in backward."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weight: Tensor,
        up_weight: Tensor | None,
        down_weight: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        activation: str,
        narrow: torch.dtype | None,
        compress: bool,
        with_output: bool,
    ) -> Tensor:
        parameters = (gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
        gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = cast(parameters, narrow)
        n = in_dtype(x, gate_weight.dtype)  # autocast would do so, too
        gate = F.linear(n, gate_weight, gate_bias)
        up = None if up_weight is None else F.linear(n, up_weight, up_bias)
        del n, gate_weight, up_weight, gate_bias, up_bias
        ctx.holds_codes = compress and gate.dtype in launch.TRITON_DTYPES
        if ctx.holds_codes:
            (gate_codes, gate_scales), (up_codes, up_scales) = codes_of(gate), codes_of(up)
            ctx.save_for_backward(x, *parameters, gate_codes, up_codes, gate_scales, up_scales)
        else:
            ctx.save_for_backward(x, *parameters, gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation, ctx.narrow = activation, narrow
        if not with_output:
            return x.new_empty(()).expand(*x.shape[:-1], down_weight.shape[0])
        return linear(glu_forward(gate, up, activation), down_weight, down_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, nothing = ctx.needs_input_grad[:7], (None,) * 4
        if dy is None:
            return (None,) * 7 + nothing
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled():
                inputs = (*ctx.saved_tensors[:7], ctx.activation, ctx.narrow)
                found = launch.differentiable_gradients(gated_mlp_reference, inputs, (*needed, False, False), dy)
                return found[:7] + nothing
            return _gradients(ctx, needed, dy) + nothing


def codes_of(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Codes and scales of what an MLP holds, counted in the statistics of the region around."""
    if tensor is None:
        return None, None
    encoded = Codes(*quantize_op(tensor, BLOCK, None, True))
    note_compressed(local.statistics, encoded, tensor.nbytes)
    return encoded.codes, encoded.scales


def _gradients(ctx: Any, needed: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, the weights and the biases: those that are ``needed``, and None for the others."""
    saved = ctx.saved_tensors if ctx.holds_codes else (*ctx.saved_tensors, None, None)
    x, *parameters, gate, up, gate_scales, up_scales = saved
    del saved
    gate_weight, up_weight, down_weight = cast(parameters[:3], ctx.narrow)
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # so that gate and up can be freed below, unless the graph is retained
    needs_dx, gate_trains, up_trains, down_trains, gate_bias_trains, up_bias_trains, down_bias_trains = needed
    needs_dgate = needs_dx or gate_trains or gate_bias_trains
    needs_dup = up is not None and (needs_dx or up_trains or up_bias_trains)
    shape, dtype, x, dy = x.shape, x.dtype, rows(x), in_dtype(rows(dy), down_weight.dtype)

    dgate = dup = product = None
    if needs_dgate or needs_dup:
        dproduct = dy @ down_weight
        dgate, dup, product = _through_activation(
            dproduct, gate, up, gate_scales, up_scales, ctx.activation, needs_dgate, needs_dup, down_trains
        )
        del dproduct
    elif down_trains:
        if gate_scales is not None:
            gate, up = decoded_gates(gate, gate_scales, up, up_scales, BLOCK, down_weight.dtype)
        product = rows(glu_forward(gate, up, ctx.activation))
    del gate, up
    ddown_weight, ddown_bias = linear_gradients(dy, product, down_trains, down_bias_trains)
    del product
    dx = sum_of_products(((dgate, gate_weight), (dup, up_weight)), dtype) if needs_dx else None
    n = in_dtype(x, gate_weight.dtype) if gate_trains or up_trains else None
    dgate_weight, dgate_bias = linear_gradients(dgate, n, gate_trains, gate_bias_trains)
    del dgate
    dup_weight, dup_bias = linear_gradients(dup, n, up_trains, up_bias_trains)
    gradients = (dgate_weight, dup_weight, ddown_weight, dgate_bias, dup_bias, ddown_bias)
    return None if dx is None else dx.view(shape), *in_dtypes_of(parameters, gradients)


def _through_activation(
    dproduct: Tensor,
    gate: Tensor,
    up: Tensor | None,
    gate_scales: Tensor | None,
    up_scales: Tensor | None,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    needs_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dgate, dup and the product, as matrices. The product is written over ``dproduct``, which is not needed again.

    gate_scales, up_scales: of gate and up, if these are codes.
    """
    gate, up = rows(gate), None if up is None else rows(up)
    if not needs_product:
        if gate_scales is not None:
            needs = (needs_dgate, needs_dup, False)
            return glu_backward_from_codes_op(dproduct, gate, gate_scales, up, up_scales, BLOCK, activation, *needs)
        return glu_backward(dproduct, gate, up, activation, needs_dgate, needs_dup, False)
    dgate = dup = None
    if needs_dgate:  # packed, it has twice the columns of the product
        dgate = dproduct.new_empty(gate.shape) if up is None else torch.empty_like(dproduct)
    if needs_dup and up is not None:
        dup = torch.empty_like(dproduct)
    if gate_scales is not None:
        glu_backward_from_codes_(dproduct, gate, gate_scales, up, up_scales, dgate, dup, BLOCK, activation)
    else:
        glu_backward_(dproduct, gate, up, dgate, dup, activation)
    return dgate, dup, dproduct


def gated_mlp_reference(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    narrow: torch.dtype | None = None,
) -> Tensor:
    """``gated_mlp`` in plain PyTorch, differentiable any number of times."""
    operands = cast((gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias), narrow)
    gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = operands
    gate = F.linear(x.to(gate_weight.dtype), gate_weight, gate_bias)
    up = None if up_weight is None else F.linear(x.to(up_weight.dtype), up_weight, up_bias)
    return F.linear(glu_reference(gate, up, activation), down_weight, down_bias)
