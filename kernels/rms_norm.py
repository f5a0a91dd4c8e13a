"""RMSNorm: every row divided by its root mean square, then scaled.

With x, dy: (M, H) and weight, gain: (H,), where gain is 1 + weight in Gemma's models and weight in others:

    rstd = 1 / sqrt(mean(x², over H) + eps)      (M,)
    h    = x · rstd                              (M, H)
    y    = h · gain                              (M, H)

    dweight = sum(dy · h, over M)                (H,)
    dx      = rstd · (dy · gain - h · mean(dy · gain · h, over H)) + dresidual

Backward regenerates h from x and rstd. It could not do so from y where a gain is 0, so x is saved, and not y.
dresidual is a gradient of x from elsewhere: that of the residual stream that the norm reads.

Forward moves 2MH elements, backward 3MH, and MH more for dresidual. Rows wider than a program's registers are read
twice. In forward the second read comes from L2; backward then moves 5MH. norm_ops.py has what a residual adds.
"""

from __future__ import annotations

from torch import Tensor

from recompute.kernels.launch import check_one_of
from recompute.kernels.norm_ops import CASTINGS, add_norm, check_norm, norm


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, casting: str = "llama") -> Tensor:
    """Divide every row of ``x`` by its root mean square and scale it by ``weight``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides. Rows that are contiguous, with leading
            dimensions in any order, are read in place.
        weight: (H,), of any of these dtypes; None normalizes only.
        eps: added to the mean square.
        casting: where values are rounded; all three normalize in float32 (in float64 for float64 input).
            ``llama``, as Hugging Face's LlamaRMSNorm: round to ``x.dtype``, then multiply by ``weight``; the result has
            the promoted dtype of both.
            ``gemma``, as Gemma3RMSNorm: multiply by ``1 + weight`` in float32, then round to ``x.dtype``.
            ``none``, as ``torch.nn.RMSNorm``: multiply by ``weight`` in float32, then round to ``x.dtype``.

    Returns:
        (..., H), dense. If the rows of ``x`` are contiguous, leading dimensions have the order in memory that they have
        in ``x``, so that transposed heads keep the layout that attention reads best. Otherwise it is contiguous. For
        backward ``x``, ``weight`` and a float32 for each row are saved.

    Raises:
        KernelError: for other dtypes, shapes or castings, or tensors on several devices.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    _check("rms_norm", x, weight, casting)
    return norm(x, weight, None, eps, casting)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None = None, eps: float = 1e-6, casting: str = "llama"
) -> tuple[Tensor, Tensor]:
    """Add ``x`` to the residual stream and normalize that: ``h = x + residual; y = rms_norm(h, weight, eps, casting)``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        residual: of the same shape, of any of these dtypes and any strides; None where ``x`` is the stream already.
        weight, eps, casting: as for ``rms_norm``.

    Returns:
        y: (..., H), as ``rms_norm(h)`` returns it.
        h: (..., H), contiguous, of the promoted dtype of ``x`` and ``residual``; without a residual a view of ``x``.
            For backward ``h``, ``weight`` and a float32 a row are saved. It must not be changed in place.

    Raises:
        KernelError: for other dtypes, shapes or castings, or tensors on several devices.
    """
    _check("add_rms_norm", x, weight, casting)
    return add_norm("add_rms_norm", x, residual, weight, None, eps, casting)


def _check(op: str, x: Tensor, weight: Tensor | None, casting: str) -> None:
    check_norm(op, x, weight)
    check_one_of(op, "casting", casting, CASTINGS)
