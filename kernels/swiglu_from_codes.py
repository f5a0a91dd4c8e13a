"""Backward of SwiGLU and GEGLU, of gate and up that are held as codes of 8 bits.

With the formulas of ``swiglu``, and gate and up as ``blockwise_8bit.quantize_blockwise`` holds them:

    gate = gate_codes · gate_scales,  up = up_codes · up_scales      rounded to dproduct's dtype
    dgate, dup, product                                              as ``swiglu.glu_backward`` gives them

Codes are decoded in registers. For N elements, moved are N of dproduct, dgate and dup each, those of the product if it
is asked for, and 1 + 4 / block bytes for each of gate's and up's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.blockwise_8bit import BLOCK, block_tile, check_codes, decoded, dequantize_op
from recompute.kernels.launch import jit, tl
from recompute.kernels.swiglu import ACTIVATIONS, glu_backward, glu_backward_, shares, slope


@jit
def _kernel(
    dproduct,
    gate,
    gate_scales,
    up,
    up_scales,
    dgate,
    dup,
    product,
    N,
    row_blocks,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``product`` may be ``dproduct``: a thread writes only where it has read before.

    Packed, a row of the product has ``row_blocks`` blocks, and one of gate and up twice as many.
    """
    blocks, offsets, block_mask, mask = block_tile(N, BLOCK, BLOCKS)
    gate_blocks, gate_offsets, up_blocks, up_offsets = blocks, offsets, blocks, offsets
    if PACKED:
        gate_blocks = blocks + blocks // row_blocks * row_blocks
        up_blocks = gate_blocks + row_blocks
        columns = tl.arange(0, BLOCK)[None, :]
        gate_offsets, up_offsets = gate_blocks[:, None] * BLOCK + columns, up_blocks[:, None] * BLOCK + columns
    DTYPE: tl.constexpr = dproduct.dtype.element_ty
    gate_scale = tl.load(gate_scales + gate_blocks, mask=block_mask, other=0.0)
    up_scale = tl.load(up_scales + up_blocks, mask=block_mask, other=0.0)
    g = decoded(tl.load(gate + gate_offsets, mask=mask), gate_scale, DTYPE)
    u = decoded(tl.load(up + up_offsets, mask=mask), up_scale, DTYPE)
    dp = tl.load(dproduct + offsets, mask=mask, other=0.0).to(tl.float32)
    share, rest = shares(g, ACTIVATION)
    active = g * share
    if dgate is not None:
        dg = dp * u * slope(g, share, rest, ACTIVATION)
        tl.store(dgate + gate_offsets, dg.to(DTYPE), mask=mask)
    if dup is not None:
        tl.store(dup + up_offsets, (dp * active).to(DTYPE), mask=mask)
    if product is not None:
        tl.store(product + offsets, (active * u).to(DTYPE), mask=mask)


TILE = 1024
"""Elements a program, or one block if that is more."""
SETTINGS = {"num_warps": 4}


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
    """Gradients of gate and up, and the product again: bitwise ``glu_backward`` of what ``dequantize_blockwise`` gives.

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
    if activation not in ACTIVATIONS:
        raise KernelError(f"{op}: unknown activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    if dproduct.dtype not in launch.TRITON_DTYPES:
        expected = ", ".join(map(str, launch.TRITON_DTYPES))
        raise KernelError(f"{op}: dproduct is {dproduct.dtype}; expected one of {expected}.")
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
    return glu_backward_from_codes_op(dproduct, gate, gate_scales, up, up_scales, block, activation, *needs)


def _backward(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    block: int,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    with_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    codes, needs = (gate, gate_scales, up, up_scales), (needs_dgate, needs_dup, with_product)
    if not _fits_in_one_pass(dproduct, gate, up, block):
        return glu_backward_from_codes_reference(dproduct, *codes, block, activation, *needs)
    outputs = _outputs(dproduct, *codes, block, activation, *needs)
    _write_gradients(dproduct.contiguous(), *codes, *outputs, block, activation)
    return outputs


def _backward_in_place(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    block: int,
    activation: str,
) -> None:
    codes = (gate, gate_scales, up, up_scales)
    if _fits_in_one_pass(dproduct, gate, up, block):
        _write_gradients(dproduct, *codes, dgate, dup, dproduct, block, activation)
    else:
        glu_backward_(dproduct, *decoded_gates(*codes, block, dproduct.dtype), dgate, dup, activation)


def _fits_in_one_pass(dproduct: Tensor, gate: Tensor, up: Tensor | None, block: int) -> bool:
    """Whether there is a kernel, and blocks of codes are blocks of the product too."""
    in_blocks = gate.shape[-1] % (2 * block) == 0 if up is None else up.is_contiguous()
    return in_blocks and gate.is_contiguous() and launch.uses_triton(dproduct)


def _write_gradients(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    product: Tensor | None,
    block: int,
    activation: str,
) -> None:
    """Write those of dgate, dup and product that are not None. They are contiguous, and so is dproduct."""
    packed = up is None
    if packed:
        up, up_scales, dup = gate, gate_scales, dgate
    blocks = max(TILE // block, 1)
    programs = -(-dproduct.numel() // (blocks * block))
    row_blocks = gate.shape[-1] // (2 * block) if packed else 0
    arguments = (dproduct, gate, gate_scales, up, up_scales, dgate, dup, product, dproduct.numel(), row_blocks)
    constants = {"ACTIVATION": activation, "PACKED": packed, "BLOCK": block, "BLOCKS": blocks}
    launch.run(_kernel, programs, *arguments, **constants, **SETTINGS)


def glu_backward_from_codes_reference(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    block: int,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    with_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``glu_backward_from_codes`` in two passes, with the same bits."""
    gate, up = decoded_gates(gate, gate_scales, up, up_scales, block, dproduct.dtype)
    return glu_backward(dproduct, gate, up, activation, needs_dgate, needs_dup, with_product)


def decoded_gates(
    gate: Tensor, gate_scales: Tensor, up: Tensor | None, up_scales: Tensor | None, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gate and up of their codes, in ``dtype``."""
    gate = dequantize_op(gate, gate_scales, dtype, block)
    return gate, None if up is None else dequantize_op(up, up_scales, dtype, block)


def _outputs(
    dproduct: Tensor,
    gate: Tensor,
    gate_scales: Tensor,
    up: Tensor | None,
    up_scales: Tensor | None,
    block: int,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    with_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dgate = dproduct.new_empty(gate.shape) if needs_dgate else None
    dup = dproduct.new_empty(up.shape) if needs_dup and up is not None else None
    return dgate, dup, dproduct.new_empty(dproduct.shape) if with_product else None


def _no_outputs(*arguments: Any) -> None:
    return None


glu_backward_from_codes_op = launch.register(
    "glu_backward_from_codes(Tensor dproduct, Tensor gate, Tensor gate_scales, Tensor? up, Tensor? up_scales,"
    " int block, str activation, bool needs_dgate, bool needs_dup, bool with_product)"
    " -> (Tensor? dgate, Tensor? dup, Tensor? product)",
    _backward,
    _outputs,
)
glu_backward_from_codes_ = launch.register(
    "glu_backward_from_codes_(Tensor(a!) dproduct, Tensor gate, Tensor gate_scales, Tensor? up, Tensor? up_scales,"
    " Tensor(b!)? dgate, Tensor(c!)? dup, int block, str activation) -> ()",
    _backward_in_place,
    _no_outputs,
)
"""As ``glu_backward_from_codes``, writing the product over ``dproduct`` and the gradients into the tensors given for
them, as ``glu_backward_`` does."""
