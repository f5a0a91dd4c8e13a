"""The activation between the two Linears of an ungated MLP.

With x, active, dactive, dx: any one shape, N elements in all, and everything computed in float32:

    active = activation(x)
    dx     = dactive · d(active)/d(x)

    silu, gelu, gelu_tanh   x · share, as ``swiglu`` has it
    quick_gelu              x · sigmoid(1.702 · x)
    relu                    max(x, 0)
    relu2                   max(x, 0)²

Backward reads x and regenerates active in the same pass, for the Linear that consumed it needs it for its weight's
gradient. Moved are 2N elements in forward and 4N in backward. Where x is held as codes of 8 bits (``blockwise_8bit``),
backward decodes them in registers, and moves 1 + 4 / 128 bytes for each element of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.kernels import launch
from recompute.kernels.blockwise_8bit import BLOCK, block_tile, decoded, dequantize_op
from recompute.kernels.launch import jit, tl
from recompute.kernels.swiglu import APPROXIMATE, shares, slope

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2")


@jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu" or ACTIVATION == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)  # which leaves NaN as it is
        return positive * positive if ACTIVATION == "relu2" else positive
    share, _ = shares(x, ACTIVATION)
    return x * share


@jit
def _gradient(dactive, x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, dactive)
    if ACTIVATION == "relu2":
        return tl.where(x <= 0.0, 0.0, dactive * (2.0 * x))
    share, rest = shares(x, ACTIVATION)
    return dactive * slope(x, share, rest, ACTIVATION)


@jit
def _forward_kernel(x, active, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(active + offsets, _activated(v, ACTIVATION).to(active.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(dactive, x, dx, active, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """``active`` may be ``dactive``: a thread writes only where it has read before."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    v = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    da = tl.load(dactive + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offsets, _gradient(da, v, ACTIVATION).to(dx.dtype.element_ty), mask=mask)
    if active is not None:
        tl.store(active + offsets, _activated(v, ACTIVATION).to(active.dtype.element_ty), mask=mask)


@jit
def _backward_from_codes_kernel(
    dactive, x, scales, dx, active, N, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    """``active`` may be ``dactive``, as above."""
    blocks, offsets, block_mask, mask = block_tile(N, BLOCK, BLOCKS)
    DTYPE: tl.constexpr = dactive.dtype.element_ty
    scale = tl.load(scales + blocks, mask=block_mask, other=0.0)
    v = decoded(tl.load(x + offsets, mask=mask), scale, DTYPE)
    da = tl.load(dactive + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + offsets, _gradient(da, v, ACTIVATION).to(DTYPE), mask=mask)
    if active is not None:
        tl.store(active + offsets, _activated(v, ACTIVATION).to(DTYPE), mask=mask)


TILE = 1024
"""Elements a program."""
SETTINGS = {"num_warps": 4}


def _forward(x: Tensor, activation: str) -> Tensor:
    x = x.contiguous()
    if not launch.uses_triton(x):
        return activation_reference(x, activation)
    active = _forward_outputs(x, activation)
    launch.run(
        _forward_kernel, -(-x.numel() // TILE), x, active, x.numel(), ACTIVATION=activation, BLOCK=TILE, **SETTINGS
    )
    return active


def _backward(dactive: Tensor, x: Tensor, scales: Tensor | None, activation: str) -> Tensor:
    dx = _backward_outputs(dactive, x, scales, activation)
    _write(dactive.contiguous(), x, scales, dx, None, activation)
    return dx


def _backward_in_place(dactive: Tensor, x: Tensor, scales: Tensor | None, dx: Tensor, activation: str) -> None:
    _write(dactive, x, scales, dx, dactive, activation)


def _write(
    dactive: Tensor, x: Tensor, scales: Tensor | None, dx: Tensor, active: Tensor | None, activation: str
) -> None:
    """Write dx, and active if it is not None. These and dactive are contiguous, and codes are in that order, too."""
    if not launch.uses_triton(dactive):
        x = x if scales is None else dequantize_op(x, scales, dactive.dtype, BLOCK)
        dx.copy_(_gradient_reference(dactive, x, activation))
        if active is not None:
            active.copy_(activation_reference(x, activation))
        return
    constants = {"ACTIVATION": activation, **SETTINGS}
    kernel: Any = _backward_kernel
    arguments: tuple[Any, ...] = (dactive, x.contiguous(), dx, active, dactive.numel())
    if scales is None:
        constants["BLOCK"] = TILE
    else:
        kernel, arguments = _backward_from_codes_kernel, (dactive, x, scales, *arguments[2:])
        constants |= {"BLOCK": BLOCK, "BLOCKS": TILE // BLOCK}
    launch.run(kernel, -(-dactive.numel() // TILE), *arguments, **constants)


def activation_reference(x: Tensor, activation: str) -> Tensor:
    """The activation in plain PyTorch, rounded once, differentiable any number of times."""
    wide = launch.widen(x)
    match activation:
        case "relu":
            active = F.relu(wide)
        case "relu2":
            active = F.relu(wide).square()
        case "quick_gelu":
            active = wide * torch.sigmoid(1.702 * wide)
        case "silu":
            active = F.silu(wide)
        case _:
            active = F.gelu(wide, approximate=APPROXIMATE[activation])
    return active.to(x.dtype)


def _gradient_reference(dactive: Tensor, x: Tensor, activation: str) -> Tensor:
    da, wide = launch.widen(dactive), launch.widen(x)
    match activation:
        case "relu":
            return torch.ops.aten.threshold_backward(da, wide, 0)
        case "relu2":
            return torch.ops.aten.threshold_backward(da * (2 * wide), wide, 0)
        case "quick_gelu":  # silu(1.702 · x) / 1.702
            return torch.ops.aten.silu_backward(da, 1.702 * wide)
        case "silu":
            return torch.ops.aten.silu_backward(da, wide)
    return torch.ops.aten.gelu_backward(da, wide, approximate=APPROXIMATE[activation])


def _forward_outputs(x: Tensor, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _backward_outputs(dactive: Tensor, x: Tensor, scales: Tensor | None, activation: str) -> Tensor:
    return dactive.new_empty(dactive.shape)


def _no_outputs(dactive: Tensor, x: Tensor, scales: Tensor | None, dx: Tensor, activation: str) -> None:
    return None


activation_forward = launch.register(
    "activation_forward(Tensor x, str activation) -> Tensor", _forward, _forward_outputs
)
activation_backward = launch.register(
    "activation_backward(Tensor dactive, Tensor x, Tensor? scales, str activation) -> Tensor",
    _backward,
    _backward_outputs,
)
"""The gradient of x, of the dtype of ``dactive``. If ``scales`` are given, x are codes of it, contiguous ones."""
activation_backward_ = launch.register(
    "activation_backward_(Tensor(a!) dactive, Tensor x, Tensor? scales, Tensor(b!) dx, str activation) -> ()",
    _backward_in_place,
    _no_outputs,
)
"""As ``activation_backward``, but writes the activated x over ``dactive``, which the caller must own, and the gradient
into ``dx``. Both are contiguous, and of the dtype that x has or its codes stand for."""
