"""SwiGLU and GEGLU: an activation of a gate, times up. activation.py has the formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.activation import GATE_ACTIVATIONS, GLU, glu_reference
from recompute.kernels.blockwise_8bit import BLOCK, check_codes


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate: any shape and strides; float16, bfloat16, float32 or float64 (which is computed in float64). Without
            ``up``: (..., 2 · I), gate and up side by side.
        up: of the same shape.

    Returns:
        The product: contiguous, of the promoted dtype. ``gate`` and ``up`` are saved for backward.

    Raises:
        KernelError: for other dtypes, two shapes, an odd number of packed columns, or tensors on several devices.

    >>> swiglu(torch.ones(1, 2), torch.full((1, 2), 2.0))
    tensor([[1.4621, 1.4621]])
    """
    return _apply("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``, in all else as ``swiglu``.

    Args:
        gate, up: as ``swiglu`` takes them.
        approximate: of ``torch.nn.functional.gelu``: ``tanh``, or ``none`` for the exact form by erf.

    Raises:
        KernelError: as ``swiglu`` does, and for other values of ``approximate``.
    """
    launch.check_one_of("geglu", "approximate", approximate, ("tanh", "none"))
    return _apply("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _apply(op: str, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    launch.check(op, gate=gate, up=up)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise KernelError(f"{op}: gate has shape {tuple(gate.shape)}; expected (..., 2 · I) if up is None.")
    else:
        launch.check_same_shape(op, gate=gate, up=up)
    product = _GLU.apply(gate, up, activation)
    record(product, GLU.forward, gate, up, activation)
    return product


class _GLU(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation = activation
        return GLU.forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, dproduct: Tensor | None) -> tuple[Tensor | None, ...]:
        if dproduct is None:
            return None, None, None
        gate, up = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return launch.differentiable_gradients(glu_reference, (gate, up, ctx.activation), needed, dproduct)
        dgate, dup, _ = GLU.backward(dproduct, gate, None, up, None, BLOCK, ctx.activation, needed[0], needed[1], False)
        return dgate, dup, None


def glu_backward_from_codes(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    activation: str,
    needs_dgate: bool = True,
    needs_dup: bool = True,
    with_product: bool = False,
    block: int = BLOCK,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of gate and up, and the product again: bitwise those for the output of ``dequantize_blockwise``.

    One pass reads the codes where these are contiguous and, if packed, each half of a row is whole blocks. Otherwise
    the codes are decoded first. Nothing here is differentiated a second time.

    Args:
        dproduct: the product's gradient: (..., I), float16, bfloat16 or float32; of the dtype that gate and up had.
        gate: codes of the gate: (..., I). Without ``up``: (..., 2 · I), gate and up side by side.
        gate_scales: those of ``gate``.
        up: codes of up: (..., I).
        up_scales: those of ``up``.
        activation: of the gate; ``silu``, ``gelu``, or ``gelu_tanh``, which approximates it.
        needs_dgate: whether the gate's gradient is wanted; packed, both gradients as one tensor.
        needs_dup: whether up's gradient is wanted.
        with_product: whether the product is wanted.
        block: the one that ``quantize_blockwise`` was given.

    Returns:
        dgate, dup and the product, each contiguous and of ``dproduct``'s dtype, or None where it is not wanted.

    Raises:
        KernelError: for other activations or dtypes, shapes that do not fit, or several devices.
    """
    op = "glu_backward_from_codes"
    launch.check_one_of(op, "activation", activation, GATE_ACTIVATIONS)
    launch.check_dtype(op, "dproduct", dproduct.dtype)
    for codes, scales in ((gate, gate_scales), (up, up_scales)):
        if codes is not None and scales is not None:
            check_codes(op, codes, scales, block)
    shape = tuple(dproduct.shape)
    expected_gate = shape if up is not None else (*shape[:-1], *(2 * size for size in shape[-1:]))
    fits = tuple(gate.shape) == expected_gate and (up is None or up.shape == gate.shape)
    if not fits or (up is None) is not (up_scales is None) or not shape:
        raise KernelError(
            f"{op}: dproduct has shape {shape}, gate {tuple(gate.shape)} and up "
            f"{None if up is None else tuple(up.shape)}; expected (..., I) for all three, or gate (..., 2 · I) and "
            "neither up nor its scales."
        )
    if gate.device != dproduct.device or (up is not None and up.device != dproduct.device):
        raise KernelError(f"{op}: dproduct is on {dproduct.device} and gate on {gate.device}; expected one device.")
    needs = (needs_dgate, needs_dup, with_product)
    return GLU.backward(dproduct, gate, gate_scales, up, up_scales, block, activation, *needs)
