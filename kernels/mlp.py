"""The ungated MLP of GPT-like models, encoders and vision transformers.

With x: (M, H), up_weight: (I, H), down_weight: (O, I), where O is H in those models:

    up     = x @ up_weightᵀ             (M, I)
    active = activation(up)             (M, I)
    y      = active @ down_weightᵀ      (M, O)

    dactive        = dy @ down_weight                     (M, I)
    dup            = the activation's, and active again   (M, I)
    d(down_weight) = dyᵀ @ active                         (O, I)
    dx             = dup @ up_weight                      (M, H)
    d(up_weight)   = dupᵀ @ x                             (I, H)

and the biases' gradients are dup and dy summed over M.

Of forward's (M, I) tensors only up is saved, where eager also saves active. As in gated_mlp.py, active is written over
dactive. So at most three such tensors are alive, and two once up has been read.
"""

from __future__ import annotations

from torch import Tensor

from recompute.kernels.mlp_ops import run_mlp


def mlp(
    x: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    activation: str = "gelu",
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    compress: bool = False,
    tile: int | None = None,
) -> Tensor:
    """``down(activation(up(x)))``, holding only ``up(x)`` for backward.

    Under autocast the matrix products run in its dtype, as those of ``torch.nn.Linear`` do. Inputs and parameters that
    require no gradient cost no matrix product in backward.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        up_weight: (I, H), of the dtype of ``x`` (any of these under autocast), as the other weight and the biases. For
            the weight of Hugging Face's Conv1D, which is (H, I), give its transpose: it is read in place, and so is the
            gradient written.
        down_weight: (O, I).
        activation: ``silu``, ``gelu``, ``gelu_tanh``, which approximates it, ``quick_gelu`` (x · sigmoid(1.702 · x)),
            ``relu`` or ``relu2``, its square.
        up_bias: (I,).
        down_bias: (O,).
        compress: whether ``up(x)`` is held as codes, as gate and up are in ``gated_mlp``.
        tile: as for ``gated_mlp``.

    Returns:
        (..., O). Saved for backward are ``x``, weights and biases, and ``up(x)``: I elements a token.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.

    >>> mlp(torch.ones(1, 2), torch.ones(3, 2), torch.ones(2, 3), "relu")
    tensor([[6., 6.]])
    """
    parameters = (up_weight, None, down_weight, up_bias, None, down_bias)
    return run_mlp("mlp", x, parameters, activation, compress, tile)
