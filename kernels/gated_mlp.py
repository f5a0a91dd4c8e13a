"""The gated MLP of Llama-like decoders.

With x: (M, H), gate_weight, up_weight: (I, H), down_weight: (O, I), where O is H in those decoders:

    gate    = x @ gate_weightᵀ           (M, I)
    up      = x @ up_weightᵀ             (M, I)
    product = activation(gate) · up      (M, I)
    y       = product @ down_weightᵀ     (M, O)

    dproduct         = dy @ down_weight                        (M, I)
    dgate, dup       = the activation's, and product again     (M, I)
    d(down_weight)   = dyᵀ @ product                           (O, I)
    dx               = dgate @ gate_weight + dup @ up_weight   (M, H)
    d(gate_weight)   = dgateᵀ @ x;  d(up_weight) = dupᵀ @ x    (I, H)

and the biases' gradients are dgate, dup and dy summed over M. Packed, gate_weight and up_weight are the halves of one
(2 · I, H), gate and up those of one (M, 2 · I), with one matrix product in the place of two.

Of forward's (M, I) tensors only gate and up are saved. The kernel that computes their gradients also regenerates the
product, and writes it over dproduct, which nobody else holds. So at most five such tensors are alive, and three once
gate and up have been read. The matrix products are PyTorch's, and as many as eager runs.
"""

from __future__ import annotations

from torch import Tensor

from recompute.kernels.mlp_ops import run_mlp


def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor,
    activation: str = "silu",
    *,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    compress: bool = False,
    tile: int | None = None,
) -> Tensor:
    """``down(activation(gate(x)) * up(x))``, holding only ``gate(x)`` and ``up(x)`` for backward.

    Under autocast the matrix products run in its dtype, as those of ``torch.nn.Linear`` do. Inputs and parameters that
    require no gradient cost no matrix product in backward.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        gate_weight: (I, H), of the dtype of ``x`` (any of these under autocast), as the other weights and biases.
            Packed: (2 · I, H), gate's rows before up's.
        up_weight: (I, H); None if ``gate_weight`` is packed.
        down_weight: (O, I).
        activation: of the gate; ``silu``, ``gelu``, or ``gelu_tanh``, which approximates it.
        gate_bias: as many as ``gate_weight`` has rows.
        up_bias: (I,); None if packed.
        down_bias: (O,).
        compress: whether gate and up are held as codes of 8 bits (``blockwise_8bit``), which backward reads. Then the
            gradients are those of slightly different gates and ups. Those of float64 are held as they are.
        tile: compute so many tokens at a time, and hold ``x`` alone: backward runs the tiles again (``mlp_ops``).
            Compiled code makes no tiles. None: all at once.

    Returns:
        (..., O). Saved for backward are ``x``, weights and biases, and gate and up: 2 · I elements a token.

    Raises:
        KernelError: for other activations, shapes that do not fit, other or mixed dtypes, or several devices.

    >>> gated_mlp(torch.ones(1, 2), torch.ones(3, 2), torch.ones(3, 2), torch.ones(2, 3))
    tensor([[10.5696, 10.5696]])
    """
    parameters = (gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    return run_mlp("gated_mlp", x, parameters, activation, compress, tile)
