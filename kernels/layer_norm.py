"""LayerNorm: every row less its mean, divided by its standard deviation, then scaled and shifted.

With x, dy: (M, H) and weight, bias: (H,) or missing, and means over H:

    mean = mean(x)                               (M,)
    rstd = 1 / sqrt(mean((x - mean)²) + eps)     (M,)
    h    = (x - mean) · rstd                     (M, H)
    y    = h · weight + bias                     (M, H)

    dweight = sum(dy · h, over M)                (H,)
    dbias   = sum(dy, over M)                    (H,)
    g       = dy · weight                        (M, H)
    dx      = rstd · (g - mean(g) - h · mean(g · h)) + dresidual

A sum of many numbers errs in float32, and with it a mean, which matters where it is large beside the deviation. So the
mean of x - mean, which would be 0, is taken along with that of its square: the mean is corrected by it, and the square.

Backward regenerates h from x, mean and rstd. rms_norm.py says why not from y, what dresidual is, and how much is moved.
Here, forward reads rows once more that are wider than a program's registers: from L2.
"""

from __future__ import annotations

from torch import Tensor

from recompute.kernels.norm_ops import LAYER_NORM, add_norm, check_norm, norm


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Subtract from every row of ``x`` its mean, divide it by its standard deviation, and apply weight and bias.

    As ``torch.nn.LayerNorm`` and Hugging Face's CohereLayerNorm do, all of it is computed in float32 (in float64 for
    float64 input) and rounded once, to ``x.dtype``.

    Args:
        x: (..., H), as ``rms_norm`` takes it.
        weight: (H,), of any dtype that ``x`` may have; None does not scale.
        bias: (H,), likewise; None does not shift.
        eps: added to the variance.

    Returns:
        (..., H), dense, of the dtype of ``x``, in the order in memory that ``rms_norm`` describes. For backward ``x``,
        weight, bias and two float32 for each row are saved.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    check_norm("layer_norm", x, weight, bias)
    return norm(x, weight, bias, eps, LAYER_NORM)


def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalize that: ``h = x + residual; y = layer_norm(h, weight, bias, eps)``.

    Args:
        x, residual: as ``add_rms_norm`` takes them.
        weight, bias, eps: as for ``layer_norm``.

    Returns:
        y: (..., H), as ``layer_norm(h)`` returns it.
        h: as ``add_rms_norm`` returns it. For backward ``h``, weight, bias and two float32 a row are saved.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.
    """
    check_norm("add_layer_norm", x, weight, bias)
    return add_norm("add_layer_norm", x, residual, weight, bias, eps, LAYER_NORM)
