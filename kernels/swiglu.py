"""SwiGLU and GEGLU: an activation of a gate, times up.

With gate, up, product, dproduct: any one shape, N elements in all, and everything computed in float32:

    share   = sigmoid(gate)                                         silu
              sigmoid(2 · sqrt(2/π) · (gate + 0.044715 · gate³))    gelu_tanh, as 1 + tanh(z) = 2 · sigmoid(2z)
              (1 + erf(gate / sqrt(2))) / 2                         gelu
    active  = gate · share
    product = active · up

    dgate = dproduct · up · (share + gate · d(share)/d(gate))
    dup   = dproduct · active

Backward regenerates share, and on request the product, which the Linear that consumed it needs for its weight's
gradient. Moved are 3N elements in forward, 5N in backward, 6N with the product.

The packed form has gate and up as the halves of one tensor's last dimension, and so are its gradients. Halves, and
any other rows that lie evenly apart, are read and written where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@jit
def shares(gate, ACTIVATION: tl.constexpr):
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
def slope(gate, share, rest, ACTIVATION: tl.constexpr):
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
def _tile(N, blocks, BLOCK: tl.constexpr):
    """This program's row, and its columns of the row's N, of which each of ``blocks`` programs takes some."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    columns = (program % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < N


@jit
def _forward_kernel(
    gate,
    up,
    product,
    N,
    blocks,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, columns, mask = _tile(N, blocks, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    share, _ = shares(g, ACTIVATION)
    p = g * share * u
    tl.store(product + row * N + columns, p.to(product.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dproduct,
    gate,
    up,
    dgate,
    dup,
    product,
    N,
    blocks,
    gate_stride,
    up_stride,
    gradient_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``product`` may be ``dproduct``: a thread writes only where it has read before."""
    row, columns, mask = _tile(N, blocks, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dp = tl.load(dproduct + row * N + columns, mask=mask, other=0.0).to(tl.float32)
    share, rest = shares(g, ACTIVATION)
    active = g * share
    if dgate is not None:
        dg = dp * u * slope(g, share, rest, ACTIVATION)
        tl.store(dgate + row * gradient_stride + columns, dg.to(dgate.dtype.element_ty), mask=mask)
    if dup is not None:
        du = dp * active
        tl.store(dup + row * gradient_stride + columns, du.to(dup.dtype.element_ty), mask=mask)
    if product is not None:
        p = active * u
        tl.store(product + row * N + columns, p.to(product.dtype.element_ty), mask=mask)


SETTINGS = {"BLOCK": 1024, "num_warps": 4}


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
    """
    return _apply("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """``gelu(gate) * up``, in all else as ``swiglu``.

    Args:
        gate: as ``swiglu`` takes it.
        up: as ``swiglu`` takes it.
        approximate: of ``torch.nn.functional.gelu``: ``tanh``, or ``none`` for the exact form by erf.

    Raises:
        KernelError: as ``swiglu`` does, and for other values of ``approximate``.
    """
    if approximate not in ("tanh", "none"):
        raise KernelError(f"geglu: unknown approximate {approximate!r}; expected 'tanh' or 'none'.")
    return _apply("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _apply(op: str, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    launch.check(op, gate=gate, up=up)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise KernelError(f"{op}: gate has shape {tuple(gate.shape)}; expected (..., 2 · I) where up is None.")
    elif gate.shape != up.shape:
        raise KernelError(
            f"{op}: gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; expected the same shape."
        )
    product = _GLU.apply(gate, up, activation)
    record(product, glu_forward, gate, up, activation)
    return product


class _GLU(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.set_materialize_grads(False)
        ctx.activation = activation
        return glu_forward(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, dproduct: Tensor | None) -> tuple[Tensor | None, ...]:
        if dproduct is None:
            return None, None, None
        gate, up = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return launch.differentiable_gradients(glu_reference, (gate, up, ctx.activation), needed, dproduct)
        dgate, dup, _ = glu_backward(dproduct, gate, up, ctx.activation, needed[0], needed[1], False)
        return dgate, dup, None


def _forward(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    if not launch.uses_triton(gate, up):
        return _forward_reference(gate, up, activation)
    product = _forward_outputs(gate, up, activation)
    if product.numel():
        columns, gate, gate_stride, up, up_stride = _rows(*_halves(gate, up))
        blocks = -(-columns // SETTINGS["BLOCK"])
        programs = product.numel() // columns * blocks
        arguments = (gate, up, product, columns, blocks, gate_stride, up_stride)
        launch.run(_forward_kernel, programs, *arguments, ACTIVATION=activation, **SETTINGS)
    return product


def _backward(
    dproduct: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    with_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    outputs = _backward_outputs(dproduct, gate, up, activation, needs_dgate, needs_dup, with_product)
    _write_gradients(dproduct.contiguous(), gate, up, *outputs, activation)
    return outputs


def _backward_in_place(
    dproduct: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None, activation: str
) -> None:
    _write_gradients(dproduct, gate, up, dgate, dup, dproduct, activation)


def _write_gradients(
    dproduct: Tensor,
    gate: Tensor,
    up: Tensor | None,
    dgate: Tensor | None,
    dup: Tensor | None,
    product: Tensor | None,
    activation: str,
) -> None:
    """Write those of dgate, dup and product that are not None. They are contiguous, and so is dproduct."""
    if not dproduct.numel():
        return
    packed = up is None
    gate, up = _halves(gate, up)
    if packed and dgate is not None:
        dgate, dup = _halves(dgate, None)
    if not launch.uses_triton(gate, up):
        values = _backward_reference(dproduct, gate.contiguous(), up.contiguous(), activation)
        for output, value in zip((dgate, dup, product), values, strict=True):
            if output is not None:
                output.copy_(value)
        return
    columns, gate, gate_stride, up, up_stride = _rows(gate, up, packed)
    blocks = -(-columns // SETTINGS["BLOCK"])
    programs = dproduct.numel() // columns * blocks
    strides = (gate_stride, up_stride, 2 * columns if packed else columns)
    arguments = (dproduct, gate, up, dgate, dup, product, columns, blocks, *strides)
    launch.run(_backward_kernel, programs, *arguments, ACTIVATION=activation, **SETTINGS)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    if up is not None:
        return gate, up
    gate, up = gate.chunk(2, -1)
    return gate, up


def _rows(gate: Tensor, up: Tensor, apart: bool = False) -> tuple[int, Tensor, int, Tensor, int]:
    """The columns of a row, then gate and up, each with the distance between its rows.

    If both are contiguous, all elements make one row, unless the rows of the output will lie ``apart``. A tensor is
    copied only where it does not consist of contiguous rows at equal distances.
    """
    columns = gate.numel()
    if apart or not (gate.is_contiguous() and up.is_contiguous()):
        columns = gate.shape[-1]
        gate, up = (tensor.reshape(-1, columns) for tensor in (gate, up))
        gate, up = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (gate, up))
        return columns, gate, gate.stride(0), up, up.stride(0)
    return columns, gate, columns, up, columns


def _forward_reference(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    gate, up = _halves(gate, up)
    return glu_reference(gate.contiguous(), up.contiguous(), activation)  # on a CPU the bits depend on the strides


def glu_reference(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """``swiglu`` and ``geglu`` in plain PyTorch, differentiable any number of times."""
    gate, up = _halves(gate, up)
    wide = launch.widen(gate)
    active = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate=APPROXIMATE[activation])
    return (active * launch.widen(up)).to(torch.promote_types(gate.dtype, up.dtype))


APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}
"""Activations that are a GELU, and its argument ``approximate``."""


def _backward_reference(dproduct: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gate and up, and the product, rounded where they are stored."""
    g, u, dp = launch.widen(gate), launch.widen(up), launch.widen(dproduct)
    if activation == "silu":
        dgate, active = torch.ops.aten.silu_backward(dp * u, g), F.silu(g)
    else:
        approximate = APPROXIMATE[activation]
        dgate = torch.ops.aten.gelu_backward(dp * u, g, approximate=approximate)
        active = F.gelu(g, approximate=approximate)
    return dgate, dp * active, active * u


def _forward_outputs(gate: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _backward_outputs(
    dproduct: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    needs_dgate: bool,
    needs_dup: bool,
    with_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dgate = gate.new_empty(gate.shape) if needs_dgate else None
    dup = up.new_empty(up.shape) if needs_dup and up is not None else None
    return dgate, dup, _forward_outputs(gate, up) if with_product else None


def _no_outputs(*arguments: Any) -> None:
    return None


glu_forward = launch.register(
    'glu_forward(Tensor gate, Tensor? up=None, str activation="silu") -> Tensor product', _forward, _forward_outputs
)
glu_backward = launch.register(
    "glu_backward(Tensor dproduct, Tensor gate, Tensor? up, str activation, bool needs_dgate, bool needs_dup,"
    " bool with_product) -> (Tensor? dgate, Tensor? dup, Tensor? product)",
    _backward,
    _backward_outputs,
)
glu_backward_ = launch.register(
    "glu_backward_(Tensor(a!) dproduct, Tensor gate, Tensor? up, Tensor(b!)? dgate, Tensor(c!)? dup, str activation)"
    " -> ()",
    _backward_in_place,
    _no_outputs,
)
"""As ``glu_backward``, but writes the product over ``dproduct``, which the caller must own, and the gradients into the
tensors given for them. These and ``dproduct`` are contiguous; ``dproduct`` has the product's dtype."""
