"""SwiGLU's elementwise core.

With gate, up, dproduct: any one shape, and sigmoid = 1 / (1 + exp(-gate)), all computed in float32:

    silu    = gate · sigmoid
    product = silu · up

    dgate = dproduct · up · sigmoid · (1 + gate · (1 - sigmoid))
    dup   = dproduct · silu

Backward regenerates sigmoid and silu. On request it returns the product too, which the Linear that consumed
it needs for its weight's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.recipe import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl


@jit
def _values(gate, up, offsets, mask):
    """What forward and backward both compute, in one place so that both get the same bits."""
    gate = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return gate, up, sigmoid, silu, silu * up


@jit
def _forward_kernel(gate, up, product, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    _, _, _, _, p = _values(gate, up, offsets, mask)
    tl.store(product + offsets, p.to(product.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(dproduct, gate, up, dgate, dup, product, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g, u, sigmoid, silu, p = _values(gate, up, offsets, mask)
    dp = tl.load(dproduct + offsets, mask=mask, other=0.0).to(tl.float32)
    dg = dp * u * sigmoid * (1.0 + g * (1.0 - sigmoid))
    tl.store(dgate + offsets, dg.to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + offsets, (dp * silu).to(dup.dtype.element_ty), mask=mask)
    if product is not None:
        tl.store(product + offsets, p.to(product.dtype.element_ty), mask=mask)


SETTINGS = {"BLOCK": 1024, "num_warps": 4}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, computed in float32 and rounded once.

    Args:
        gate: any shape and strides; float16, bfloat16, float32 or float64 (which is computed in float64).
        up: of the same shape.

    Returns:
        The product: contiguous, of the promoted dtype. ``gate`` and ``up`` are saved for backward.

    Raises:
        KernelError: for other dtypes, two shapes, or tensors on several devices.
    """
    launch.check("swiglu", gate=gate, up=up)
    if gate.shape != up.shape:
        raise KernelError(
            f"swiglu: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; expected the same shape."
        )
    product = _SwiGLU.apply(gate, up)
    record(product, swiglu_forward, gate, up)
    return product


class _SwiGLU(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        return swiglu_forward(gate, up)

    @staticmethod
    def backward(ctx: Any, dproduct: Tensor | None) -> tuple[Tensor | None, ...]:
        if dproduct is None:
            return None, None
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return launch.differentiable_gradients(swiglu_reference, (gate, up), ctx.needs_input_grad, dproduct)
        dgate, dup, _ = swiglu_backward(dproduct, gate, up, False)
        return dgate, dup


def _forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = launch.dense(gate), launch.dense(up)
    if not launch.uses_triton(gate, up):
        return swiglu_reference(gate, up)
    product = _forward_outputs(gate, up)
    numel = gate.numel()
    launch.run(_forward_kernel, -(-numel // SETTINGS["BLOCK"]), gate, up, product, numel, **SETTINGS)
    return product


def _backward(dproduct: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    dproduct, gate, up = launch.dense(dproduct), launch.dense(gate), launch.dense(up)
    if not launch.uses_triton(gate, up):
        return _backward_reference(dproduct, gate, up, with_product)
    outputs = _backward_outputs(dproduct, gate, up, with_product)
    numel = gate.numel()
    programs = -(-numel // SETTINGS["BLOCK"])
    launch.run(_backward_kernel, programs, dproduct, gate, up, *outputs, numel, **SETTINGS)
    return outputs


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """``swiglu`` in plain PyTorch, differentiable any number of times."""
    product = F.silu(launch.widen(gate)) * launch.widen(up)
    return product.to(torch.promote_types(gate.dtype, up.dtype))


def _backward_reference(
    dproduct: Tensor, gate: Tensor, up: Tensor, with_product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    g, u, dp = launch.widen(gate), launch.widen(up), launch.widen(dproduct)
    sigmoid = torch.sigmoid(g)
    dgate = (dp * u * sigmoid * (1.0 + g * (1.0 - sigmoid))).to(gate.dtype)
    dup = (dp * F.silu(g)).to(up.dtype)
    return dgate, dup, swiglu_reference(gate, up) if with_product else None


def _forward_outputs(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _backward_outputs(
    dproduct: Tensor, gate: Tensor, up: Tensor, with_product: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    product = _forward_outputs(gate, up) if with_product else None
    return gate.new_empty(gate.shape), up.new_empty(up.shape), product


swiglu_forward = launch.register("swiglu_forward(Tensor gate, Tensor up) -> Tensor product", _forward, _forward_outputs)
swiglu_backward = launch.register(
    "swiglu_backward(Tensor dproduct, Tensor gate, Tensor up, bool with_product)"
    " -> (Tensor dgate, Tensor dup, Tensor? product)",
    _backward,
    _backward_outputs,
)
