"""What ``mlp`` and ``gated_mlp`` share: an MLP as one autograd node, of all tokens at once or of some at a time.

gated_mlp.py and mlp.py have the formulas. In an ungated MLP the Linear before the activation is called ``gate`` here,
and there is no ``up``. In a packed one, ``gate`` is both.

In tiles, none of the (M, I) tensors is ever whole. With x: (M, H) in tiles of at most T rows:

    y[tile] = mlp(x[tile])                                                     (T, H)

    dx[tile] = the gradient, by autograd, of mlp(x[tile]), which runs again    (T, H)
    d(weights) = Σ over tiles, in float32, rounded once at the end

Saved is x alone. Alive at once are five tensors of (T, I) in the place of five of (M, I). Backward runs the matrix
products of forward again, but for the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.engine.compression import Codes, note_compressed
from recompute.engine.thread_state import is_tracing, local
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.activation import (
    ACTIVATION,
    ACTIVATIONS,
    GATE_ACTIVATIONS,
    GLU,
    activation_reference,
    decoded_gates,
    glu_reference,
)
from recompute.kernels.blockwise_8bit import BLOCK, quantize_op
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


class MLPForm(NamedTuple):
    """A kind of MLP: what its op takes."""

    names: tuple[str | None, ...]
    """The names of the weights of gate, up and down, and of their biases; None: there is none."""
    activations: tuple[str, ...]
    expected: str


FORMS = {
    "gated_mlp": MLPForm(
        ("gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
        GATE_ACTIVATIONS,
        "x (..., H), gate_weight and up_weight (I, H), or gate_weight (2 · I, H) and no up_weight, down_weight (O, I), "
        "and biases as long as their weights",
    ),
    "mlp": MLPForm(
        ("up_weight", None, "down_weight", "up_bias", None, "down_bias"),
        ACTIVATIONS,
        "x (..., H), up_weight (I, H), down_weight (O, I), and biases as long as their weights",
    ),
}


def run_mlp(
    op: str, x: Tensor, parameters: tuple[Tensor | None, ...], activation: str, compress: bool, tile: int | None
) -> Tensor:
    """The output of an MLP of the form ``op``. ``parameters``: as the form names them."""
    narrow = autocast_dtype(x.device.type)
    _check(op, x, activation, narrow, *parameters)
    operands, is_gated = cast_if_made(parameters, narrow), op == "gated_mlp"
    is_compiled = torch.compiler.is_compiling() and not is_tracing()  # a compiler traces no autograd in backward
    if tile is None or is_compiled:
        return _MLP.apply(x, *operands, is_gated, activation, narrow, compress, True)
    if tile < 1:
        raise KernelError(f"{op}: tile is {tile}; expected at least 1 token, or None.")
    return _TiledMLP.apply(x, *operands, is_gated, activation, narrow, tile)


def _check(op: str, x: Tensor, activation: str, narrow: torch.dtype | None, *parameters: Tensor | None) -> None:
    names, known, expected = FORMS[op]
    given = {name: each for name, each in zip(("x", *names), (x, *parameters), strict=True) if name is not None}
    launch.check(op, **given)
    launch.check_one_of(op, "activation", activation, known)
    found = {name: each.shape for name, each in given.items() if each is not None}
    hidden, down, is_packed = x.shape[-1:], found["down_weight"], op == "gated_mlp" and parameters[1] is None
    outer, inner = down[:1], down[1:]
    first = torch.Size([2 * size for size in inner]) if is_packed else inner
    shapes = (first + hidden, inner + hidden, down, first, None if is_packed else inner, outer)
    misfit = any(name in found and found[name] != shape for name, shape in zip(names, shapes, strict=True))
    if not hidden or len(down) != 2 or misfit:
        listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in found.items())
        raise KernelError(f"{op}: expected {expected}; found {listed}.")
    check_dtypes(op, given, narrow)


class _MLP(torch.autograd.Function):
    """``with_output`` is False where forward runs again for the sake of its backward alone. ``narrow`` is the dtype to
    cast weights and biases to, in forward and again in backward."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        parameters, (is_gated, activation, narrow, compress, with_output) = arguments[:6], arguments[6:]
        gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = cast(parameters, narrow)
        n = in_dtype(x if is_gated else rows(x), gate_weight.dtype)  # autocast would do so, too
        gate = F.linear(n, gate_weight, gate_bias)
        up = None if up_weight is None else F.linear(n, up_weight, up_bias)
        del n, gate_weight, up_weight, gate_bias, up_bias
        ctx.holds_codes = compress and gate.dtype in launch.TRITON_DTYPES
        if ctx.holds_codes:
            (gate_codes, gate_scales), (up_codes, up_scales) = _codes_of(gate), _codes_of(up)
            ctx.save_for_backward(x, *parameters, gate_codes, up_codes, gate_scales, up_scales)
        else:
            ctx.save_for_backward(x, *parameters, gate, up)
        ctx.set_materialize_grads(False)
        ctx.is_gated, ctx.activation, ctx.narrow = is_gated, activation, narrow
        shape = *x.shape[:-1], down_weight.shape[0]
        if not with_output:
            return x.new_empty(()).expand(shape)
        product = _ops(is_gated).forward(gate, up, activation)
        del gate, up
        return shaped(F.linear(rows(product), down_weight, down_bias), *shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return _of_all_arguments(ctx, dy, _gradients)


def _ops(is_gated: bool) -> Any:
    return GLU if is_gated else ACTIVATION


def _codes_of(tensor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Codes and scales of a tensor that an MLP saves, counted in the statistics of the region around."""
    if tensor is None:
        return None, None
    encoded = Codes(*quantize_op(tensor, BLOCK, None, True))
    note_compressed(local.statistics, encoded, tensor.nbytes)
    return encoded.codes, encoded.scales


def _of_all_arguments(ctx: Any, dy: Tensor | None, gradients: Callable[..., Any]) -> tuple[Tensor | None, ...]:
    """The gradients of x, the weights and the biases, and None for what else the Function is given."""
    needed, others = ctx.needs_input_grad[:7], (None,) * (len(ctx.needs_input_grad) - 7)
    if dy is None:
        return (None,) * 7 + others
    with without_autocast(dy.device.type):
        if torch.is_grad_enabled():
            inputs = (*ctx.saved_tensors[:7], ctx.is_gated, ctx.activation, ctx.narrow)
            found = launch.differentiable_gradients(mlp_reference, inputs, (*needed, False, False, False), dy)
            return found[:7] + others
        return gradients(ctx, needed, dy) + others


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
        held = (rows(gate), gate_scales, None if up is None else rows(up), up_scales)
        dgate, dup, product = _through_activation(ctx, dy @ down_weight, held, needs_dgate, needs_dup, down_trains)
        del held
    elif down_trains:
        if gate_scales is not None:
            gate, up = decoded_gates(gate, gate_scales, up, up_scales, BLOCK, down_weight.dtype)
        product = rows(_ops(ctx.is_gated).forward(gate, up, ctx.activation))
    del gate, up
    ddown_weight, ddown_bias = linear_gradients(dy, product, down_trains, down_bias_trains, down_weight)
    del product
    dx = sum_of_products(((dgate, gate_weight), (dup, up_weight)), dtype) if needs_dx else None
    n = in_dtype(x, gate_weight.dtype) if gate_trains or up_trains else None
    dgate_weight, dgate_bias = linear_gradients(dgate, n, gate_trains, gate_bias_trains, gate_weight)
    del dgate
    dup_weight, dup_bias = linear_gradients(dup, n, up_trains, up_bias_trains, up_weight)
    gradients = (dgate_weight, dup_weight, ddown_weight, dgate_bias, dup_bias, ddown_bias)
    return None if dx is None else dx.view(shape), *in_dtypes_of(parameters, gradients)


def _through_activation(
    ctx: Any,
    dproduct: Tensor,
    held: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    needs_dgate: bool,
    needs_dup: bool,
    needs_product: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dgate, dup and the product, as matrices. The product is written over ``dproduct``, which is not needed again.

    held: gate and up, each with its scales if it is codes.
    """
    gate, _, up, _ = held
    ops = _ops(ctx.is_gated)
    if not needs_product:
        return ops.backward(dproduct, *held, BLOCK, ctx.activation, needs_dgate, needs_dup, False)
    dgate = dup = None
    if needs_dgate:  # packed, it has twice the columns of the product
        dgate = dproduct.new_empty(gate.shape)
    if needs_dup and up is not None:
        dup = torch.empty_like(dproduct)
    ops.backward_(dproduct, *held, dgate, dup, BLOCK, ctx.activation)
    return dgate, dup, dproduct


def mlp_reference(x: Tensor, *arguments: Any) -> Tensor:
    """An MLP in plain PyTorch, differentiable any number of times."""
    parameters, (is_gated, activation, narrow) = arguments[:6], arguments[6:]
    gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias = cast(parameters, narrow)
    gate = F.linear(x.to(gate_weight.dtype), gate_weight, gate_bias)
    up = None if up_weight is None else F.linear(x.to(up_weight.dtype), up_weight, up_bias)
    product = glu_reference(gate, up, activation) if is_gated else activation_reference(gate, activation)
    return F.linear(product, down_weight, down_bias)


class _TiledMLP(torch.autograd.Function):
    """``narrow`` is the dtype to cast weights and biases to, in forward and again in backward."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        parameters, (is_gated, activation, narrow, tile) = arguments[:6], arguments[6:]
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        ctx.is_gated, ctx.activation, ctx.narrow, ctx.tile = is_gated, activation, narrow, tile
        operands = cast(parameters, narrow)
        tiles = [_MLP.apply(part, *operands, is_gated, activation, None, False, True) for part in rows(x).split(tile)]
        return shaped(torch.cat(tiles), *x.shape[:-1], operands[2].shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return _of_all_arguments(ctx, dy, _gradients_of_tiles)


def _gradients_of_tiles(ctx: Any, needed: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    x, *given = ctx.saved_tensors
    needs_dx, *trained = needed
    parameters = [
        None if each is None else each.detach().requires_grad_(needs)
        for each, needs in zip(cast(given, ctx.narrow), trained, strict=True)
    ]

    def run(part: Tensor) -> Tensor:
        return _MLP.apply(part, *parameters, ctx.is_gated, ctx.activation, None, False, False)

    dx, gradients = gradients_of_tiles(run, x, dy, ctx.tile, needs_dx, parameters)
    return dx, *in_dtypes_of(given, gradients)


def gradients_of_tiles(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    dy: Tensor,
    tile: int,
    needs_dx: bool,
    parameters: Sequence[Tensor | None],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradients of x, and of the parameters that require one, for a function that runs on tiles of rows.

    run: computes a tile of the output from a tile of the input. A parameter's gradient is summed up in float32, and
    rounded once.
    """
    wanted = {place: each for place, each in enumerate(parameters) if each is not None and each.requires_grad}
    dx = x.new_empty(x.shape) if needs_dx else None
    parts = iter(() if dx is None else rows(dx).split(tile))
    sums: list[Tensor | None] = [None] * len(parameters)
    for part, gradient in zip(rows(x).split(tile), rows(dy).split(tile), strict=True):
        with torch.enable_grad():
            leaf = part.detach().requires_grad_(needs_dx)
            y = run(leaf)
        inputs = [*([leaf] if needs_dx else []), *wanted.values()]
        found = list(torch.autograd.grad(y, inputs, gradient.contiguous(), allow_unused=True))
        del y
        if needs_dx:
            next(parts).copy_(found.pop(0))
        for place, each in zip(wanted, found, strict=True):
            if each is not None:
                total = sums[place]
                sums[place] = launch.widen(each) if total is None else total.add_(each)
        del found
    return dx, list(in_dtypes_of(parameters, sums))
