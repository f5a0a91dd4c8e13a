"""What is between the Linears of an MLP: an activation, and the product with up where the MLP is gated.

With gate, up, product, dproduct: any one shape, N elements in all, and everything computed in float32:

    share   = sigmoid(gate)                                         silu
              sigmoid(2 · sqrt(2/π) · (gate + 0.044715 · gate³))    gelu_tanh, as 1 + tanh(z) = 2 · sigmoid(2z)
              (1 + erf(gate / sqrt(2))) / 2                         gelu
              sigmoid(1.702 · gate)                                 quick_gelu
    active  = gate · share;  max(gate, 0) for relu;  max(gate, 0)² for relu2
    product = active · up, or active

    dgate = dproduct · up · d(active)/d(gate)
    dup   = dproduct · active

Backward regenerates active, and on request the product, which the Linear that consumed it needs for its weight's
gradient. Moved are 3N elements in forward, 5N in backward, 6N with the product; where there is no up, 2N, 3N and 4N.

Gate and up may be held as codes of 8 bits (``blockwise_8bit``). Backward decodes them in registers, rounded to
dproduct's dtype, and moves 1 + 4 / block bytes for each of their elements.

The packed form has gate and up as the halves of one tensor's last dimension, and so are its gradients. Halves, and
any other rows that lie evenly apart, are read and written where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels import launch
from recompute.kernels.blockwise_8bit import block_tile, decoded, dequantize_op
from recompute.kernels.launch import jit, tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")
GATE_ACTIVATIONS = ACTIVATIONS[:3]
"""The activations of a gate."""
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
"""Activations that are a GELU, and its argument ``approximate``."""


@jit
def _shares(gate, ACTIVATION: tl.constexpr):
    """The share of gate that the activation lets through, and 1 minus that share."""
    # Forward and backward must get the same bits. So every sum with a product in it is an explicit fused multiply-add:
    # otherwise the compiler might fuse it in one kernel and not in the other.
    if ACTIVATION == "gelu":
        share = tl.fma(tl.erf(gate * 0.7071067811865476), 0.5, 0.5)
        return share, 1.0 - share
    if ACTIVATION == "gelu_tanh":
        gate *= tl.fma(gate * gate, 0.07135481627260025, 1.5957691216057308)
    if ACTIVATION == "quick_gelu":
        gate *= 1.702
    e = tl.exp(-gate)
    share = 1.0 / (1.0 + e)
    return share, tl.where(e < 1.0, e * share, 1.0 - share)  # neither a difference of nearly equal numbers nor inf · 0


@jit
def _slope(gate, share, rest, ACTIVATION: tl.constexpr):
    """d(gate · share) / d(gate)."""
    if ACTIVATION == "gelu":
        return tl.fma(gate, tl.exp(gate * gate * -0.5) * 0.3989422804014327, share)
    change = share * rest
    if ACTIVATION == "gelu_tanh":
        change *= tl.fma(gate * gate, 0.21406444881780076, 1.5957691216057308)
    if ACTIVATION == "quick_gelu":
        change *= 1.702
    return tl.fma(gate, change, share)


@jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu" or ACTIVATION == "relu2":
        positive = tl.where(gate < 0.0, 0.0, gate)  # NaN stays NaN
        return positive * positive if ACTIVATION == "relu2" else positive
    share, _ = _shares(gate, ACTIVATION)
    return gate * share


@jit
def _gradient(dactive, gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(gate <= 0.0, 0.0, dactive)
    if ACTIVATION == "relu2":
        return tl.where(gate <= 0.0, 0.0, dactive * (2.0 * gate))
    share, rest = _shares(gate, ACTIVATION)
    return dactive * _slope(gate, share, rest, ACTIVATION)


@jit
def _tile(N, blocks, BLOCK: tl.constexpr):
    """This program's row, and its columns. ``blocks`` programs share the row's N columns."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < N


@jit
def _forward_kernel(
    gate, up, product, N, blocks, gate_stride, up_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns, mask = _tile(N, blocks, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    p = _activated(g, ACTIVATION)
    if up is not None:
        p *= tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(product + row * N + columns, p.to(product.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dproduct, gate, gate_scales, up, up_scales, dgate, dup, product,
    N, blocks, gate_stride, up_stride, gradient_stride,
    ACTIVATION: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """``product`` may be ``dproduct``: a thread writes only where it has read before.

    Codes are read by blocks that share a scale. Packed ones have ``blocks`` blocks for each half of a row.
    """
    if gate_scales is None:
        row, columns, mask = _tile(N, blocks, BLOCK)
        offsets = row * N + columns
        dgate_offsets = row * gradient_stride + columns
        dup_offsets = dgate_offsets
        g = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
        if up is not None:
            u = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    else:
        gate_blocks, offsets, block_mask, mask = block_tile(N, BLOCK, BLOCKS)
        up_blocks, dgate_offsets, dup_offsets = gate_blocks, offsets, offsets
        if PACKED:
            gate_blocks += gate_blocks // blocks * blocks
            up_blocks = gate_blocks + blocks
            columns = tl.arange(0, BLOCK)[None, :]
            dgate_offsets, dup_offsets = gate_blocks[:, None] * BLOCK + columns, up_blocks[:, None] * BLOCK + columns
        DTYPE: tl.constexpr = dproduct.dtype.element_ty
        gate_scale = tl.load(gate_scales + gate_blocks, mask=block_mask, other=0.0)
        g = decoded(tl.load(gate + dgate_offsets, mask=mask), gate_scale, DTYPE)
        if up is not None:
            up_scale = tl.load(up_scales + up_blocks, mask=block_mask, other=0.0)
            u = decoded(tl.load(up + dup_offsets, mask=mask), up_scale, DTYPE)
    d = tl.load(dproduct + offsets, mask=mask, other=0.0).to(tl.float32)
    active = _activated(g, ACTIVATION)
    if dup is not None:
        tl.store(dup + dup_offsets, (d * active).to(dup.dtype.element_ty), mask=mask)
    if up is not None:
        d *= u
        active *= u
    if dgate is not None:
        dg = _gradient(d, g, ACTIVATION)
        tl.store(dgate + dgate_offsets, dg.to(dgate.dtype.element_ty), mask=mask)
    if product is not None:
        tl.store(product + offsets, active.to(product.dtype.element_ty), mask=mask)


TILE = 1024
"""Elements a program. Of codes one block, if that is more."""
SETTINGS = {"num_warps": 4}


def _forward(is_gated: bool, gate: Tensor, up: Tensor | None, activation: str) -> Iterator[Tensor]:
    halves = _halves(gate, up) if is_gated else (gate, None)
    if not launch.uses_triton(gate, up):  # on a CPU the bits depend on the strides
        gate, up = halves
        yield _product(gate.contiguous(), None if up is None else up.contiguous(), activation)
        return
    dtype = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype)
    product = gate.new_empty(halves[0].shape, dtype=dtype)
    yield product
    if product.numel():
        columns, gate, gate_stride, up, up_stride = _rows(*halves)
        blocks = -(-columns // TILE)
        arguments = (gate, up, product, columns, blocks, gate_stride, up_stride)
        programs = product.numel() // columns * blocks
        launch.run(_forward_kernel, programs, *arguments, ACTIVATION=activation, BLOCK=TILE, **SETTINGS)


class Gates(NamedTuple):
    """Gate and up, each with its scales if it is codes."""

    gate: Tensor
    gate_scales: Tensor | None
    up: Tensor | None
    up_scales: Tensor | None


Outputs = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dgate, dup and the product."""


def _backward(is_gated: bool, dproduct: Tensor, *flat: Any) -> Iterator[Outputs]:
    gates, (block, activation, needs_dgate, needs_dup, with_product) = Gates(*flat[:4]), flat[4:]
    gate, scales, up, _ = gates
    dtypes = [dproduct.dtype if scales is not None else each.dtype for each in (gate, up) if each is not None]
    dgate = gate.new_empty(gate.shape, dtype=dtypes[0]) if needs_dgate else None
    dup = up.new_empty(up.shape, dtype=dtypes[-1]) if needs_dup and up is not None else None
    product_dtype = torch.promote_types(dtypes[0], dtypes[-1])
    product = dproduct.new_empty(dproduct.shape, dtype=product_dtype) if with_product else None
    yield dgate, dup, product
    _write(is_gated, dproduct.contiguous(), gates, (dgate, dup, product), block, activation)


def _backward_in_place(is_gated: bool, dproduct: Tensor, *flat: Any) -> Iterator[None]:
    gates, (dgate, dup, block, activation) = Gates(*flat[:4]), flat[4:]
    yield
    _write(is_gated, dproduct, gates, (dgate, dup, dproduct), block, activation)


def _write(is_gated: bool, dproduct: Tensor, gates: Gates, outputs: Outputs, block: int, activation: str) -> None:
    """Write those of the outputs that are not None. They are contiguous, and so is dproduct."""
    if not dproduct.numel():
        return
    gate, gate_scales, up, up_scales = gates
    packed = is_gated and up is None
    if gate_scales is not None:
        if _fits_in_one_pass(dproduct, gate, up, packed, block):
            _launch_from_codes(dproduct, gates, outputs, packed, block, activation)
            return
        gate, up = decoded_gates(gate, gate_scales, up, up_scales, block, dproduct.dtype)
    dgate, dup, product = outputs
    halves: tuple[Tensor, Tensor | None] = (gate, up)
    if packed:
        halves = _halves(gate, None)
        dgate, dup = (None, None) if dgate is None else _halves(dgate, None)
    if not launch.uses_triton(*halves):
        values = _backward_reference(dproduct, *halves, activation)
        for output, value in zip((dgate, dup, product), values, strict=True):
            if output is not None and value is not None:
                output.copy_(value)
        return
    columns, gate, gate_stride, up, up_stride = _rows(*halves, packed)
    blocks = -(-columns // TILE)
    strides = (gate_stride, up_stride, 2 * columns if packed else columns)
    arguments = (dproduct, gate, None, up, None, dgate, dup, product, columns, blocks, *strides)
    constants = {"ACTIVATION": activation, "PACKED": False, "BLOCK": TILE, "BLOCKS": 1}
    launch.run(_backward_kernel, dproduct.numel() // columns * blocks, *arguments, **constants, **SETTINGS)


def _fits_in_one_pass(dproduct: Tensor, gate: Tensor, up: Tensor | None, packed: bool, block: int) -> bool:
    """Whether there is a kernel, and blocks of codes are blocks of the product too."""
    in_blocks = gate.shape[-1] % (2 * block) == 0 if packed else up is None or up.is_contiguous()
    return in_blocks and gate.is_contiguous() and launch.uses_triton(dproduct)


def _launch_from_codes(
    dproduct: Tensor, gates: Gates, outputs: Outputs, packed: bool, block: int, activation: str
) -> None:
    dgate, dup, product = outputs
    if packed:
        gates, dup = Gates(*gates[:2], *gates[:2]), dgate
    blocks, row_blocks = max(TILE // block, 1), dproduct.shape[-1] // block if packed else 0
    given = (dproduct, *gates, dgate, dup, product, dproduct.numel(), row_blocks, 0, 0, 0)
    constants = {"ACTIVATION": activation, "PACKED": packed, "BLOCK": block, "BLOCKS": blocks}
    launch.run(_backward_kernel, -(-dproduct.numel() // (blocks * block)), *given, **constants, **SETTINGS)


def decoded_gates(
    gate: Tensor, gate_scales: Tensor, up: Tensor | None, up_scales: Tensor | None, block: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Gate and up, decoded to ``dtype``."""
    gate = dequantize_op(gate, gate_scales, dtype, block)
    return gate, None if up is None else dequantize_op(up, up_scales, dtype, block)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    gate, up = gate.chunk(2, -1)
    return gate, up


def _rows(gate: Tensor, up: Tensor | None, apart: bool = False) -> tuple[int, Tensor, int, Tensor | None, int]:
    """The columns of a row, then gate and up, each with the distance between its rows.

    If both are contiguous, all elements make one row, unless the rows of the output will lie ``apart``. A tensor is
    copied only where it does not consist of contiguous rows at equal distances.
    """
    columns = gate.numel()
    if not apart and gate.is_contiguous() and (up is None or up.is_contiguous()):
        return columns, gate, columns, up, columns
    columns = gate.shape[-1]
    gate, *others = (each.reshape(-1, columns) for each in (gate, up) if each is not None)
    gate, *others = (each if each.stride(1) == 1 else each.contiguous() for each in (gate, *others))
    up = others[0] if others else None
    return columns, gate, gate.stride(0), up, columns if up is None else up.stride(0)


def glu_reference(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """``swiglu`` and ``geglu`` in plain PyTorch, differentiable any number of times."""
    return _product(*_halves(gate, up), activation)


def activation_reference(x: Tensor, activation: str) -> Tensor:
    """The activation in plain PyTorch, rounded once, differentiable any number of times."""
    return _product(x, None, activation)


def _product(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    active = _active(launch.widen(gate), activation)
    if up is None:
        return active.to(gate.dtype)
    return (active * launch.widen(up)).to(torch.promote_types(gate.dtype, up.dtype))


def _active(wide: Tensor, activation: str) -> Tensor:
    match activation:
        case "relu":
            return F.relu(wide)
        case "relu2":
            return F.relu(wide).square()
        case "quick_gelu":
            return wide * torch.sigmoid(1.702 * wide)
        case "silu":
            return F.silu(wide)
    return F.gelu(wide, approximate=APPROXIMATE[activation])


def _backward_reference(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of gate and up, and the product, rounded where they are stored."""
    g, d = launch.widen(gate.contiguous()), launch.widen(dproduct)
    active = _active(g, activation)
    if up is None:
        return _active_gradient(d, g, activation), None, active
    u = launch.widen(up.contiguous())
    return _active_gradient(d * u, g, activation), d * active, active * u


def _active_gradient(dactive: Tensor, wide: Tensor, activation: str) -> Tensor:
    match activation:
        case "relu":
            return torch.ops.aten.threshold_backward(dactive, wide, 0)
        case "relu2":
            return torch.ops.aten.threshold_backward(dactive * (2 * wide), wide, 0)
        case "quick_gelu":  # silu(1.702 · x) / 1.702
            return torch.ops.aten.silu_backward(dactive, 1.702 * wide)
        case "silu":
            return torch.ops.aten.silu_backward(dactive, wide)
    return torch.ops.aten.gelu_backward(dactive, wide, approximate=APPROXIMATE[activation])


class ActivationOps(NamedTuple):
    forward: Callable[..., Tensor]
    backward: Callable[..., Outputs]
    """dgate, dup and the product, each contiguous. Gate and up are codes where ``gate_scales`` are given."""
    backward_: Callable[..., None]
    """As ``backward``, but writes the product over ``dproduct``, which the caller must own, and the gradients into the
    tensors given for them. These and ``dproduct`` are contiguous; ``dproduct`` has the product's dtype."""


def _registered(name: str, is_gated: bool) -> ActivationOps:
    gates = "Tensor gate, Tensor? gate_scales, Tensor? up, Tensor? up_scales"
    return ActivationOps(
        launch.register(
            f"{name}_forward(Tensor gate, Tensor? up, str activation) -> Tensor product",
            functools.partial(_forward, is_gated),
        ),
        launch.register(
            f"{name}_backward(Tensor dproduct, {gates}, int block, str activation, bool needs_dgate, bool needs_dup,"
            " bool with_product) -> (Tensor? dgate, Tensor? dup, Tensor? product)",
            functools.partial(_backward, is_gated),
        ),
        launch.register(
            f"{name}_backward_(Tensor(a!) dproduct, {gates}, Tensor(b!)? dgate, Tensor(c!)? dup, int block,"
            " str activation) -> ()",
            functools.partial(_backward_in_place, is_gated),
        ),
    )


GLU, ACTIVATION = _registered("glu", True), _registered("activation", False)
"""The ops of gated MLPs, where gate is packed if there is no up; and of others, where gate is what is activated. They
compute alike; a policy or a report tells them by their names."""
