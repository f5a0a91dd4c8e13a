"""The SwiGLU MLP of Llama-like decoders.

With x: (M, H), gate_weight, up_weight: (I, H), down_weight: (O, I), where O is H in those decoders:

    gate    = x @ gate_weightᵀ           (M, I)
    up      = x @ up_weightᵀ             (M, I)
    product = silu(gate) · up            (M, I)
    y       = product @ down_weightᵀ     (M, O)

    dproduct         = dy @ down_weight                        (M, I)
    dgate, dup       = swiglu's, and product again             (M, I)
    d(down_weight)   = dyᵀ @ product                           (O, I)
    d(gate_weight)   = dgateᵀ @ x;  d(up_weight) = dupᵀ @ x    (I, H)
    dx               = dgate @ gate_weight + dup @ up_weight   (M, H)

Of forward's (M, I) tensors only gate and up are saved: the kernel that computes their gradients regenerates
the product on the way. The matrix products are PyTorch's, and no more than eager runs.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.swiglu import swiglu_backward, swiglu_forward, swiglu_reference

ACTIVATIONS = ("silu",)


def gated_mlp(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, activation: str = "silu"
) -> Tensor:
    """``down(silu(gate(x)) * up(x))`` without biases, holding only ``gate(x)`` and ``up(x)`` for backward.

    Under autocast the matrix products run in its dtype, as those of ``torch.nn.Linear`` do. An input that is
    frozen costs no matrix product in backward.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        gate_weight: (I, H), of the dtype of ``x`` (any of these under autocast), as the other weights.
        up_weight: (I, H).
        down_weight: (O, I).
        activation: of the gate; ``silu`` is the one there is.

    Returns:
        (..., O). Saved for backward are ``x``, the three weights, and gate and up: 2 · I elements a token.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.
    """
    tensors = {"x": x, "gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    launch.check("gated_mlp", **tensors)
    if activation not in ACTIVATIONS:
        raise KernelError(f"gated_mlp: unknown activation {activation!r}; expected {' or '.join(ACTIVATIONS)}.")
    _check_shapes(x, gate_weight, up_weight, down_weight)
    operands = _autocast(*tensors.values())
    if len({operand.dtype for operand in operands}) > 1:
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in zip(tensors, operands, strict=True))
        raise KernelError(f"gated_mlp: expected one dtype for x and the weights, found {found}.")
    return _GatedMLP.apply(*operands)


def _check_shapes(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> None:
    two_dimensional = gate_weight.dim() == down_weight.dim() == 2 and x.dim() > 0
    if (
        not two_dimensional
        or up_weight.shape != gate_weight.shape
        or gate_weight.shape[1] != x.shape[-1]
        or down_weight.shape[1] != gate_weight.shape[0]
    ):
        raise KernelError(
            "gated_mlp: expected x (..., H), gate_weight and up_weight (I, H), down_weight (O, I); found x "
            f"{tuple(x.shape)}, gate_weight {tuple(gate_weight.shape)}, up_weight {tuple(up_weight.shape)} "
            f"and down_weight {tuple(down_weight.shape)}."
        )


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts a Linear's operands: outside of our Function, so that autograd sees it."""
    device = tensors[0].device.type
    if not _autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)


def _autocast_enabled(device: str) -> bool:
    return device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast, and asking raises


class _GatedMLP(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
        ctx.save_for_backward(x, gate_weight, up_weight, down_weight, gate, up)
        ctx.set_materialize_grads(False)
        return F.linear(swiglu_forward(gate, up), down_weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        device = dy.device.type
        # Everything has forward's dtype by now, whatever backward is called under.
        with torch.autocast(device, enabled=False) if _autocast_enabled(device) else nullcontext():
            if torch.is_grad_enabled():
                return launch.differentiable_gradients(gated_mlp_reference, saved[:4], needed, dy)
            return _gradients(needed, dy, *saved)


def _gradients(
    needed: tuple[bool, ...],
    dy: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate: Tensor,
    up: Tensor,
) -> tuple[Tensor | None, ...]:
    """Those of x, gate_weight, up_weight and down_weight that are ``needed``; None for the others."""
    dy, tokens, gate, up = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (dy, x, gate, up))
    dx = dgate_weight = dup_weight = ddown_weight = product = None
    if any(needed[:3]):
        dgate, dup, product = swiglu_backward(dy @ down_weight, gate, up, needed[3])
        if needed[0]:
            dx = dgate @ gate_weight
            dx = torch.addmm(dx, dup, up_weight, out=dx).view(x.shape)  # FlopCounterMode overlooks addmm_
        if needed[1]:
            dgate_weight = dgate.t() @ tokens
        if needed[2]:
            dup_weight = dup.t() @ tokens
    if needed[3]:
        ddown_weight = dy.t() @ (swiglu_forward(gate, up) if product is None else product)
    return dx, dgate_weight, dup_weight, ddown_weight


def gated_mlp_reference(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """``gated_mlp`` in plain PyTorch, differentiable any number of times."""
    return F.linear(swiglu_reference(F.linear(x, gate_weight), F.linear(x, up_weight)), down_weight)
