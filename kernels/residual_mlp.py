"""The second half of a pre-norm decoder layer: residual addition, RMSNorm, gated MLP, and residual addition.

With x, residual: (M, H) and the gated MLP's weights as in ``gated_mlp``, whose O is H:

    h       = x + residual                                     (M, H)
    n       = rms_norm(h)                                      (M, H)
    product = activation(n @ gate_weightᵀ) · (n @ up_weightᵀ)  (M, I)
    y       = h + product @ down_weightᵀ                       (M, H), in one matrix product

    dn         = as dx of the gated MLP                        (M, H)
    dx         = dy + the norm's gradient of h, given dn       (M, H), and dresidual is the same

Saved are h, a float32 for each row, gate and up. The norm's backward, which reads h anyway, regenerates n for the
gradients of the weights, and adds dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels.argument_layouts import once_by_layouts
from recompute.kernels.gated_mlp import PARAMETERS, GatedMLPFunction, check_operands, tiled
from recompute.kernels.linears import NormSettings, autocast_dtype, cast_if_made, check_dtypes, checked_norm


def residual_mlp(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    eps: float = 1e-6,
    casting: str = "llama",
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    compress: bool = False,
    tile: int | None = None,
) -> Tensor:
    """``h + gated_mlp(rms_norm(h))`` of ``h = x + residual``, holding ``h``, gate and up for backward.

    Under autocast the matrix products run in its dtype; the residual stream and the norm keep theirs.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides: attention's output, say.
        residual: the stream, of the shape of ``x``; None if that is ``x`` itself.
        norm_weight: (H,), or None, as ``rms_norm`` takes it.
        gate_weight: (I, H), or packed (2 · I, H), of the dtype of the norm's output (any of these under autocast), as
            the other weights and the biases.
        up_weight: (I, H); None if ``gate_weight`` is packed.
        down_weight: (H, I).
        eps: the norm's.
        casting: the norm's: ``llama``, ``gemma`` or ``none``.
        activation: of the gate: ``silu``, ``gelu`` or ``gelu_tanh``.
        gate_bias: as many as ``gate_weight`` has rows.
        up_bias: (I,); None if packed.
        down_bias: (H,).
        compress: as ``gated_mlp`` takes it.
        tile: as ``gated_mlp`` takes it. Then ``h`` alone is held.

    Returns:
        (..., H), of the promoted dtype of ``h`` and the MLP. Saved for backward are the parameters, ``h``, a float32 a
        token, and 2 · I elements a token.

    Raises:
        KernelError: for other activations or castings, shapes that do not fit, other or mixed dtypes, or several
            devices.
    """
    parameters = (gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    narrow = autocast_dtype(x.device.type)
    norm = _checked(x, residual, norm_weight, eps, casting, activation, narrow, *parameters)
    operands = cast_if_made(parameters, narrow)
    if tile is not None and not torch.compiler.is_compiling():
        return tiled(x if residual is None else x + residual, norm_weight, *operands, norm, activation, narrow, tile)
    return GatedMLPFunction.apply(x, residual, norm_weight, *operands, norm, activation, narrow, compress, True)[0]


@once_by_layouts
def _checked(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    casting: str,
    activation: str,
    narrow: torch.dtype | None,
    *parameters: Any,
) -> NormSettings:
    """The norm, after a look at all arguments. narrow: the dtype of autocast."""
    named: dict[str, Tensor | None] = dict(zip(PARAMETERS, parameters, strict=True))
    check_operands("residual_mlp", activation, {"x": x, "residual": residual, "norm_weight": norm_weight, **named})
    down_weight = parameters[PARAMETERS.index("down_weight")]
    if down_weight.shape[0] != x.shape[-1] or (residual is not None and residual.shape != x.shape):
        found = None if residual is None else tuple(residual.shape)
        raise KernelError(
            f"residual_mlp: expected residual of the shape of x, and down_weight (H, I); found x {tuple(x.shape)}, "
            f"residual {found} and down_weight {tuple(down_weight.shape)}."
        )
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    norm = checked_norm("residual_mlp", x, dtype, norm_weight, eps, casting)
    check_dtypes("residual_mlp", {"normalized x": norm.dtype}, named, narrow)
    return norm
