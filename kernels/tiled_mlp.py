"""The gated MLP over some tokens at a time, so that none of its (M, I) tensors is ever whole.

With x: (M, H) in tiles of at most T rows, and ``mlp`` the formula of ``gated_mlp`` or of ``mlp``:

    y[tile] = mlp(x[tile])                                                     (T, H)

    dx[tile] = what autograd gives of mlp(x[tile]), which runs again           (T, H)
    d(weights) = Σ over tiles, in float32, rounded once at the end

Saved is x alone. Alive at once are five tensors of (T, I) in the place of five of (M, I). Backward runs two of the
three matrix products of forward again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.linears import cast, in_dtypes_of, rows, shaped, without_autocast

Compute = Callable[..., Tensor]
"""Computes the MLP of a tile, from x, the parameters and the activation. ``with_output``: whether the values of what it
returns matter, and not only the graph behind it."""


class TiledMLPFunction(torch.autograd.Function):
    """An MLP of x, whose rows do not depend on each other.

    ``narrow`` is the dtype to cast weights and biases to, in forward and again in backward.
    """

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        compute: Compute,
        reference: Any,
        activation: str,
        narrow: torch.dtype | None,
        tile: int,
        width: int,
        *parameters: Tensor | None,
    ) -> Tensor:
        """width: that of the output."""
        ctx.save_for_backward(x, *parameters)
        ctx.set_materialize_grads(False)
        ctx.compute, ctx.reference, ctx.activation, ctx.narrow, ctx.tile = compute, reference, activation, narrow, tile
        operands = cast(parameters, narrow)
        tiles = [compute(part, *operands, activation, with_output=True) for part in rows(x).split(tile)]
        return shaped(torch.cat(tiles), *x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[7:]
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        with without_autocast(dy.device.type):
            if torch.is_grad_enabled():
                inputs = (*ctx.saved_tensors, ctx.activation, ctx.narrow)
                found = launch.differentiable_gradients(ctx.reference, inputs, (*needed, False, False), dy)
                dx, *gradients = found[: len(needed)]
            else:
                dx, *gradients = _gradients(ctx, needed, dy)
        return dx, None, None, None, None, None, None, *gradients


def _gradients(ctx: Any, needed: tuple[bool, ...], dy: Tensor) -> tuple[Tensor | None, ...]:
    x, *given = ctx.saved_tensors
    needs_dx, *trained = needed
    parameters = [
        None if each is None else each.detach().requires_grad_(needs)
        for each, needs in zip(cast(given, ctx.narrow), trained, strict=True)
    ]
    wanted = [each for each in parameters if each is not None and each.requires_grad]
    dx = x.new_empty(x.shape) if needs_dx else None
    parts = rows(dx).split(ctx.tile) if dx is not None else None
    sums: list[Tensor] = []
    for number, (part, gradient) in enumerate(zip(rows(x).split(ctx.tile), rows(dy).split(ctx.tile), strict=True)):
        with torch.enable_grad():
            leaf = part.detach().requires_grad_(needs_dx)
            y = ctx.compute(leaf, *parameters, ctx.activation, with_output=False)
        found = torch.autograd.grad(y, [*([leaf] if needs_dx else []), *wanted], gradient.contiguous())
        del y
        if parts is not None:
            parts[number].copy_(found[0])
            found = found[1:]
        if number == 0:
            sums = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in found]
        else:
            for total, each in zip(sums, found, strict=True):
                total += each
        del found
    gradients = iter(sums)
    of_parameters = [
        next(gradients).to(each.dtype) if each is not None and each.requires_grad else None for each in parameters
    ]
    return dx, *in_dtypes_of(given, of_parameters)
