"""RMSNorm: every row divided by its root mean square, then scaled.

With x, dy: (M, H) and weight, gain: (H,), where gain is 1 + weight in Gemma's models and weight in others:

    rstd = 1 / sqrt(mean(x², over H) + eps)      (M,)
    h    = x · rstd                              (M, H)
    y    = h · gain                              (M, H)

    dweight = sum(dy · h, over M)                (H,)
    dx      = rstd · (dy · gain - h · mean(dy · gain · h, over H))

Backward regenerates h from x and rstd. It saves x and not y, from which h could not be had where a gain is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recompute.engine.recipe import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

CASTINGS = ("llama", "gemma", "none")
MAX_HIDDEN = 65536
"""The widest row that the kernels take: a program holds whole rows. Wider ones go to the reference."""


@jit
def _forward_kernel(
    x,
    weight,
    y,
    rstd,
    M,
    H,
    eps,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_H)
    offsets = rows[:, None] * H + columns[None, :]
    mask = (rows < M)[:, None] & (columns < H)[None, :]

    h = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(h * h, axis=1) / H + eps))
    tl.store(rstd + rows, r, mask=rows < M)
    h *= r[:, None]
    if CASTING == "llama":
        h = h.to(x.dtype.element_ty).to(tl.float32)
    if weight is not None:
        h *= _gain(weight, columns, H, CASTING)[None, :]
    tl.store(y + offsets, h.to(y.dtype.element_ty), mask=mask)


@jit
def _backward_kernel(
    dy,
    x,
    weight,
    rstd,
    dx,
    partials,
    M,
    H,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Program p of P takes the tiles p, p + P, p + 2P, … of rows, and sums their dy · h in registers."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_H)
    if weight is not None:
        gain = _gain(weight, columns, H, CASTING)
    sums = tl.zeros((ROWS, BLOCK_H), tl.float32)
    for tile in range(program, tl.cdiv(M, ROWS), tl.num_programs(0)):
        rows = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        offsets = rows[:, None] * H + columns[None, :]
        mask = (rows < M)[:, None] & (columns < H)[None, :]
        r = tl.load(rstd + rows, mask=rows < M, other=0.0)[:, None]
        h = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32) * r
        g = tl.load(dy + offsets, mask=mask, other=0.0).to(tl.float32)
        if partials is not None:
            sums += g * h
        if dx is not None:
            if weight is not None:
                g *= gain[None, :]
            g = r * (g - h * (tl.sum(g * h, axis=1) / H)[:, None])
            tl.store(dx + offsets, g.to(dx.dtype.element_ty), mask=mask)
    if partials is not None:
        tl.store(partials + program.to(tl.int64) * H + columns, tl.sum(sums, axis=0), mask=columns < H)


@jit
def _sum_rows_kernel(total, partials, P, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """total[h] = sum over p of partials[p, h]: the second stage of the weight's gradient."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < P)[:, None] & (columns < H)[None, :]
        sums += tl.load(partials + rows[:, None] * H + columns[None, :], mask=mask, other=0.0)
    tl.store(total + columns, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=columns < H)


@jit
def _gain(weight, columns, H, CASTING: tl.constexpr):
    gain = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    if CASTING == "gemma":
        gain += 1.0
    return gain


def _settings(hidden: int) -> dict[str, int]:
    """Tiles of about 2048 elements or one row, 16 elements a thread while 32 warps are enough for that."""
    block = 1 << max(hidden - 1, 0).bit_length()
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "BLOCK_H": block, "num_warps": min(max(rows * block // 512, 1), 32)}


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, casting: str = "llama") -> Tensor:
    """Divide every row of ``x`` by its root mean square and scale it by ``weight``.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64, of any strides.
        weight: (H,), of any of these dtypes; None normalizes only.
        eps: added to the mean square.
        casting: where values are rounded; all three normalize in float32 (in float64 for float64 input).
            ``llama``, as Hugging Face's LlamaRMSNorm: round to ``x.dtype``, then multiply by ``weight``; the result has
            the promoted dtype of both.
            ``gemma``, as Gemma3RMSNorm: multiply by ``1 + weight`` in float32, then round to ``x.dtype``.
            ``none``, as ``torch.nn.RMSNorm``: multiply by ``weight`` in float32, then round to ``x.dtype``.

    Returns:
        (..., H), contiguous. For backward ``x``, ``weight`` and a float32 a row are saved.

    Raises:
        KernelError: for other dtypes, shapes or castings, or tensors on several devices.
    """
    launch.check("rms_norm", x=x, weight=weight)
    if casting not in CASTINGS:
        raise KernelError(f"rms_norm: unknown casting {casting!r}; expected one of {', '.join(CASTINGS)}.")
    if x.dim() == 0:
        raise KernelError("rms_norm: x has no dimension to normalize over; expected shape (..., H).")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise KernelError(
            f"rms_norm: weight has shape {tuple(weight.shape)}; "
            f"expected ({x.shape[-1]},) for x of shape {tuple(x.shape)}."
        )
    y = _RMSNorm.apply(x, weight, eps, casting)
    record(y, _regenerate, x, weight, eps, casting)
    return y


class _RMSNorm(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
        y, rstd = _forward_op(x, weight, eps, casting)
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
        dx, dweight = _backward_op(dy, x, weight, rstd, ctx.casting, needed[0], needed[1])
        return dx, dweight, None, None


def _forward(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    x = launch.dense(x)
    if not _uses_triton(x, weight):
        return _forward_reference(x, weight, eps, casting)
    y, rstd = _forward_outputs(x, weight, eps, casting)
    weight = None if weight is None else launch.dense(weight)
    hidden = x.shape[-1]
    settings = _settings(hidden)
    tiles = -(-rstd.numel() // settings["ROWS"])
    launch.run(_forward_kernel, tiles, x, weight, y, rstd, rstd.numel(), hidden, eps, CASTING=casting, **settings)
    return y, rstd


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    dy, x, rstd = launch.dense(dy), launch.dense(x), launch.dense(rstd)
    if not _uses_triton(x, weight):
        return _backward_reference(dy, x, weight, rstd, casting, needs_dx, needs_dweight)
    dx, dweight = _backward_outputs(dy, x, weight, rstd, casting, needs_dx, needs_dweight)
    weight = None if weight is None else launch.dense(weight)
    hidden = x.shape[-1]
    settings = _settings(hidden)
    tiles = -(-rstd.numel() // settings["ROWS"])
    resident = launch.multiprocessors(x.device) * (32 // settings["num_warps"])
    programs = max(1, min(tiles, resident))  # one even for no rows: it writes the zeros that are their sum
    partials = None if dweight is None else rstd.new_empty(programs, hidden)
    launch.run(
        _backward_kernel,
        programs,
        *(dy, x, weight, rstd, dx, partials, rstd.numel(), hidden),
        CASTING=casting,
        **settings,
    )
    if dweight is not None:
        launch.run(_sum_rows_kernel, -(-hidden // 64), dweight, partials, programs, hidden, ROWS=32, COLUMNS=64)
    return dx, dweight


def _uses_triton(x: Tensor, weight: Tensor | None) -> bool:
    return x.shape[-1] <= MAX_HIDDEN and launch.uses_triton(x, weight)


def _regenerate(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
    return _forward_op(x, weight, eps, casting)[0]


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> Tensor:
    """``rms_norm`` in plain PyTorch, differentiable any number of times."""
    return _forward_reference(x, weight, eps, casting)[0]


def _forward_reference(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    h = launch.widen(x)
    rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    h = h * rstd
    if casting == "llama":
        y = h.to(x.dtype) if weight is None else weight * h.to(x.dtype)
    else:
        y = (h if weight is None else h * _wide_gain(weight, casting)).to(x.dtype)
    return y, rstd.squeeze(-1)


def _backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    r = rstd.unsqueeze(-1)
    h = launch.widen(x) * r
    g = launch.widen(dy)
    dx = dweight = None
    if needs_dweight and weight is not None:
        dweight = (g * h).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if needs_dx:
        if weight is not None:
            g = g * _wide_gain(weight, casting)
        dx = (r * (g - h * (g * h).mean(-1, keepdim=True))).to(x.dtype)
    return dx, dweight


def _wide_gain(weight: Tensor, casting: str) -> Tensor:
    return 1.0 + launch.widen(weight) if casting == "gemma" else launch.widen(weight)


def _forward_outputs(x: Tensor, weight: Tensor | None, eps: float, casting: str) -> tuple[Tensor, Tensor]:
    dtype = x.dtype
    if casting == "llama" and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    rstd_dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=rstd_dtype)


def _backward_outputs(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    dx = x.new_empty(x.shape) if needs_dx else None
    dweight = weight.new_empty(weight.shape) if needs_dweight and weight is not None else None
    return dx, dweight


_forward_op = launch.register(
    "rms_norm_forward(Tensor x, Tensor? weight, float eps, str casting) -> (Tensor y, Tensor rstd)",
    _forward,
    _forward_outputs,
)
_backward_op = launch.register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, str casting, bool needs_dx,"
    " bool needs_dweight) -> (Tensor? dx, Tensor? dweight)",
    _backward,
    _backward_outputs,
)
