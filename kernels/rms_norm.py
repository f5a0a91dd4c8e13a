"""RMSNorm: every row divided by its root mean square, then scaled.

With x, dy: (M, H) and weight, gain: (H,), where gain is 1 + weight in Gemma's models and weight in others:

    rstd = 1 / sqrt(mean(x², over H) + eps)      (M,)
    h    = x · rstd                              (M, H)
    y    = h · gain                              (M, H)

    dweight = sum(dy · h, over M)                (H,)
    dx      = rstd · (dy · gain - h · mean(dy · gain · h, over H)) + dresidual

Backward regenerates h from x and rstd, and on request y. So x is saved and not y, from which h could not be computed
where a gain is 0. dresidual is a gradient of x from elsewhere: that of the residual stream that the norm reads.

Forward moves 2MH elements, backward 3MH (and MH more for each of dresidual and y). Rows wider than a program's
registers are read twice. In forward the second read comes from L2; backward then moves 5MH.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.norm_kernels import launch_backward, launch_forward
from recompute.kernels.norm_layout import in_memory_order

CASTINGS = ("llama", "gemma", "none")


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
    """
    check_rms_norm("rms_norm", x, weight, casting)
    y = _RMSNorm.apply(x, weight, eps, casting)
    record(y, rms_norm_output, x, weight, eps, casting)
    return y


def check_rms_norm(op: str, x: Tensor, weight: Tensor | None, casting: str) -> None:
    launch.check(op, x=x, weight=weight)
    if casting not in CASTINGS:
        raise KernelError(f"{op}: unknown casting {casting!r}; expected one of {', '.join(CASTINGS)}.")
    if x.dim() == 0:
        raise KernelError(f"{op}: x has no dimension to normalize over; expected shape (..., H).")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise KernelError(
            f"{op}: weight has shape {tuple(weight.shape)}; expected ({x.shape[-1]},) for x of shape {tuple(x.shape)}."
        )


class _RMSNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
        y, rstd = rms_norm_forward(x, weight, eps, casting)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.casting = eps, casting
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs = (x, weight, ctx.eps, ctx.casting)
            return launch.differentiable_gradients(rms_norm_reference, inputs, needed, dy)
        dx, dweight, _ = rms_norm_backward(dy, x, weight, rstd, ctx.casting, needed[0], needed[1])
        return dx, dweight, None, None


@in_memory_order(0)
def _forward(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    if not launch.uses_triton(x, weight):
        return rms_norm_forward_reference(x.contiguous(), weight, eps, casting)
    y, rstd = rms_norm_forward_outputs(x, weight, eps, casting)
    launch_forward(x, None, weight, None, None, y, None, rstd, eps, casting)
    return y, rstd


@in_memory_order(0)
def _regenerated(x: Tensor, weight: Tensor | None, rstd: Tensor, casting: str) -> Tensor:
    if not launch.uses_triton(x, weight):
        return _scaled(launch.widen(x.contiguous()) * rstd.unsqueeze(-1), x.dtype, weight, casting)
    y = _regenerated_outputs(x, weight, rstd, casting)
    launch_forward(x, None, weight, None, None, y, None, launch.dense(rstd), None, casting)
    return y


# These nine parameters stand three times because torch.library calls an op, and what allocates its outputs, with the
# flat arguments of the schema. Making an object of them would add about 0.4 µs to each call (torch 2.13, one CPU core).
@in_memory_order(1)
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    dresidual: Tensor | None = None,
    with_y: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not launch.uses_triton(x, weight):
        return _backward_reference(dy, x, weight, rstd, casting, needs_dx, needs_dweight, dresidual, with_y)
    dx, dweight, y = _backward_outputs(dy, x, weight, rstd, casting, needs_dx, needs_dweight, dresidual, with_y)
    launch_backward(dy, x, weight, None, rstd, dresidual, dx, dweight, None, y, casting)
    return dx, dweight, y


def rms_norm_output(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
    return rms_norm_forward(x, weight, eps, casting)[0]


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
    """``rms_norm`` in plain PyTorch, differentiable any number of times."""
    return rms_norm_forward_reference(x, weight, eps, casting)[0]


def rms_norm_forward_reference(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    wide = launch.widen(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return _scaled(wide * rstd, x.dtype, weight, casting), rstd.squeeze(-1)


def _scaled(normalized: Tensor, dtype: torch.dtype, weight: Tensor | None, casting: str) -> Tensor:
    if casting == "llama":
        return normalized.to(dtype) if weight is None else weight * normalized.to(dtype)
    return (normalized if weight is None else normalized * _wide_gain(weight, casting)).to(dtype)


def _backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    dresidual: Tensor | None,
    with_y: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    r = rstd.unsqueeze(-1)
    h = launch.widen(x.contiguous()) * r
    g = launch.widen(dy.contiguous())
    dx = dweight = y = None
    if with_y:
        y = _scaled(h, x.dtype, weight, casting)
    if needs_dweight and weight is not None:
        dweight = (g * h).reshape(rstd.numel(), x.shape[-1]).sum(0).to(weight.dtype)
    if needs_dx:
        if weight is not None:
            g = g * _wide_gain(weight, casting)
        dx = r * (g - h * (g * h).mean(-1, keepdim=True))
        dx = (dx if dresidual is None else dx + dresidual).to(x.dtype)
    return dx, dweight, y


def _wide_gain(weight: Tensor, casting: str) -> Tensor:
    return 1.0 + launch.widen(weight) if casting == "gemma" else launch.widen(weight)


@in_memory_order(0)
def rms_norm_forward_outputs(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    rstd_dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return _like_y(x, weight, casting), x.new_empty(x.shape[:-1], dtype=rstd_dtype)


@in_memory_order(0)
def _regenerated_outputs(x: Tensor, weight: Tensor | None, rstd: Tensor, casting: str) -> Tensor:
    return _like_y(x, weight, casting)


@in_memory_order(1)
def _backward_outputs(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    dresidual: Tensor | None = None,
    with_y: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = x.new_empty(x.shape) if needs_dx else None
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else None
    return dx, dweight, _like_y(x, weight, casting) if with_y else None


def _like_y(x: Tensor, weight: Tensor | None, casting: str) -> Tensor:
    dtype = x.dtype
    if casting == "llama" and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


rms_norm_forward = launch.register(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, str casting) -> (Tensor y, Tensor rstd)",
    _forward,
    rms_norm_forward_outputs,
)
rms_norm_backward = launch.register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, str casting, bool needs_dx,"
    " bool needs_dweight, Tensor? dresidual=None, bool with_y=False) -> (Tensor? dx, Tensor? dweight, Tensor? y)",
    _backward,
    _backward_outputs,
)
rms_norm_regenerate = launch.register(
    "rms_norm_regenerate(Tensor x, Tensor? weight, Tensor rstd, str casting) -> Tensor y",
    _regenerated,
    _regenerated_outputs,
)
