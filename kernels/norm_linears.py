"""RMSNorm and the Linears that take its output (q, k and v; gate and up), as one node.

With x: (M, H), weight i: (O_i, H) and n = rms_norm(x): (M, H):

    output_i  = n @ weight_iᵀ + bias_i                      (M, O_i)
    h         = x, for the residual stream                  (M, H)

    dn        = sum over i of doutput_i @ weight_i          (M, H), summed in the products' accumulators
    dx        = dh + the norm's gradient of x, given dn     (M, H)
    dweight_i = doutput_iᵀ @ n                              (O_i, H)

n is not held for backward. The norm's backward, which reads x anyway, regenerates it once for all Linears, and adds dh.
It moves dn, x, dh, dx and n, which are 5 · M · H elements; the norm's backward, an addition and a second forward would
move 8.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.argument_layouts import once_by_layouts
from recompute.kernels.linears import (
    NormSettings,
    added,
    autocast_dtype,
    cast,
    cast_if_made,
    check_dtypes,
    checked_norm,
    in_dtype,
    in_dtypes_of,
    linear,
    linear_gradients,
    norm_gradients,
    rows,
    sum_of_products,
    without_autocast,
)
from recompute.kernels.rms_norm import rms_norm_forward, rms_norm_reference


def norm_linears(
    x: Tensor,
    norm_weight: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    eps: float = 1e-6,
    casting: str = "llama",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """``rms_norm(x)``, and several Linears of it, without holding it for backward.

    Under autocast the matrix products run in its dtype; the norm keeps that of ``x``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        norm_weight: (H,), or None, as ``rms_norm`` takes it.
        weights: (O_i, H) each, of the dtype of the norm's output (any of these under autocast), as the biases.
        biases: (O_i,) or None each; None if there are none.
        eps: the norm's.
        casting: the norm's: ``llama``, ``gemma`` or ``none``.

    Returns:
        ((..., O_i) for each weight), and h, which has the values of ``x``. Use h instead of ``x`` for the residual
        stream: then the stream's gradient is added in the pass that computes the norm's. Like any view that a custom
        Function returns, h cannot be changed in place. Saved for backward are the parameters, ``x`` and a float32 for
        each token.

    Raises:
        KernelError: for other castings, no weights, shapes that do not fit, other or mixed dtypes, or several devices.
    """
    biases = [None] * len(weights) if biases is None else biases
    narrow = autocast_dtype(x.device.type)
    norm = _checked(x, norm_weight, eps, casting, narrow, len(weights), *weights, *biases)
    *outputs, h = _NormLinears.apply(x, norm_weight, norm, narrow, *cast_if_made((*weights, *biases), narrow))
    return tuple(outputs), h if x.requires_grad else x


@once_by_layouts
def _checked(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    casting: str,
    narrow: torch.dtype | None,
    count: int,
    *weights_and_biases: Any,
) -> NormSettings:
    """The norm, after a look at all arguments. narrow: the dtype of autocast; count: how many weights there are."""
    weights, biases = weights_and_biases[:count], weights_and_biases[count:]
    parameters: dict[str, Tensor | None] = {f"weights[{index}]": weight for index, weight in enumerate(weights)}
    parameters |= {f"biases[{index}]": bias for index, bias in enumerate(biases)}
    launch.check("norm_linears", x=x, norm_weight=norm_weight, **parameters)
    norm = checked_norm("norm_linears", x, x.dtype, norm_weight, eps, casting)
    fit = len(biases) == len(weights) > 0 and all(
        weight.dim() == 2 and weight.shape[1] == x.shape[-1] and (bias is None or bias.shape == weight.shape[:1])
        for weight, bias in zip(weights, biases, strict=True)
    )
    if not fit:
        found = ", ".join(f"{name} {tuple(value.shape)}" for name, value in parameters.items() if value is not None)
        raise KernelError(
            f"norm_linears: expected weights (O_i, H), at least one, and as many biases (O_i,) or None, for x "
            f"{tuple(x.shape)}; found {found or 'none'}."
        )
    check_dtypes("norm_linears", {"normalized x": norm.dtype}, parameters, narrow)
    return norm


class _NormLinears(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm: NormSettings,
        narrow: torch.dtype | None,
        *parameters: Any,
    ) -> tuple[Tensor, ...]:
        """``parameters``: the weights, then as many biases. narrow: the dtype to cast them to, in backward again."""
        n, rstd = rms_norm_forward(x, norm_weight, norm.eps, norm.casting)
        ctx.save_for_backward(x, norm_weight, *parameters, rstd)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.narrow = norm, narrow
        outputs = []
        for weight, bias in _pairs(parameters):
            weight, bias = cast((weight, bias), narrow)
            n = in_dtype(n, weight.dtype)
            outputs.append(linear(n, weight, bias))
        return *outputs, x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        *doutputs, dh = gradients
        needs_dx, needs_dnorm_weight, _, _, *trained = ctx.needs_input_grad
        if all(doutput is None for doutput in doutputs):
            return dh, *[None] * (3 + len(trained))
        reached = [doutput is not None for doutput in doutputs]
        needed = (needs_dx, needs_dnorm_weight, *map(operator.and_, trained, 2 * reached))
        x, norm_weight, *parameters, rstd = ctx.saved_tensors
        with without_autocast(x.device.type):
            if not torch.is_grad_enabled():
                operands = cast(parameters, ctx.narrow)
                found = _gradients(ctx.norm, needed, doutputs, dh, x, norm_weight, rstd, operands)
                found = *found[:2], *in_dtypes_of(parameters, found[2:])
            else:
                inputs = (x, norm_weight, *parameters, ctx.norm, ctx.narrow, reached)
                given: Any = tuple(doutput for doutput in doutputs if doutput is not None)
                dx, *others = launch.differentiable_gradients(_reference, inputs, (*needed, *[False] * 3), given)
                found = added(dx, dh), *others[:-3]
        dx, dnorm_weight, *others = found
        return dx, dnorm_weight, None, None, *others


def _gradients(
    norm: NormSettings,
    needed: tuple[bool, ...],
    doutputs: list[Tensor | None],
    dh: Tensor | None,
    x: Tensor,
    norm_weight: Tensor | None,
    rstd: Tensor,
    parameters: Sequence[Any],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, norm_weight and the parameters: those that are ``needed``, and None for the others."""
    count = len(doutputs)
    needs_dx, needs_dnorm_weight, *trained = needed
    doutputs = [None if doutput is None else rows(doutput) for doutput in doutputs]
    needs_dn = needs_dx or needs_dnorm_weight
    dn = sum_of_products(zip(doutputs, parameters, strict=False), norm.dtype) if needs_dn else None
    wanted = (needs_dx, needs_dnorm_weight, any(trained[:count]))
    dresidual = None if dh is None else rows(dh)
    dx, dnorm_weight, n = norm_gradients(norm, dn, rows(x), norm_weight, rstd.flatten(), dresidual, wanted)
    del dn
    n = None if n is None else in_dtype(n, parameters[0].dtype)
    pairs = [
        linear_gradients(doutput, n, *trains)
        for doutput, *trains in zip(doutputs, trained[:count], trained[count:], strict=True)
    ]
    dweights, dbiases = zip(*pairs, strict=True)
    return None if dx is None else dx.view(x.shape), dnorm_weight, *dweights, *dbiases


def _pairs(parameters: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each Linear's weight and bias."""
    return zip(parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :], strict=True)


def _reference(x: Tensor, norm_weight: Tensor | None, *others: Any) -> Any:
    """The outputs that are ``reached`` by a gradient, in plain PyTorch: differentiable any number of times."""
    *parameters, norm, narrow, reached = others
    operands = cast(parameters, narrow)
    n = rms_norm_reference(x, norm_weight, norm.eps, norm.casting)
    outputs = [F.linear(n.to(weight.dtype), weight, bias) for weight, bias in _pairs(operands)]
    return tuple(itertools.compress(outputs, reached))
