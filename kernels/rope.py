"""Rotary position embedding of queries and keys by half rotation, as Hugging Face's ``apply_rotary_pos_emb``.

With q: (B, heads, S, D), k: (B, kv_heads, S, D) and cos, sin: (B or 1, S, R), which all heads share; for x, q or k, in
three parts [x1, x2, rest] of R / 2, R / 2 and D - R columns, and cos = [c1, c2] and sin = [s1, s2]:

    y1 = x1 · c1 - x2 · s1
    y2 = x2 · c2 + x1 · s2
    y  = [y1, y2, rest]

    dx1 = dy1 · c1 + dy2 · s2
    dx2 = dy2 · c2 - dy1 · s1

So backward is forward with -s2 and -s1 in the places of s1 and s2: with the angle negated, where the halves are equal.
It needs cos and sin alone. One launch reads q and k in place, by their strides, and writes both results: 2 · B · S ·
(heads + kv_heads) · D elements moved, besides cos and sin.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.launch import jit, tl


@jit
def _kernel(
    cos, sin, q, k, q_rot, k_rot, S, angle_batch, angle_token,
    q_batch, q_token, q_head, k_batch, k_token, k_head,
    q_rot_batch, q_rot_token, q_rot_head, k_rot_batch, k_rot_token, k_rot_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """All heads of TOKENS tokens, for which cos and sin are read once."""
    tiles = tl.cdiv(S, TOKENS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    tokens = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < S
    tokens = tokens.to(tl.int64)
    columns = tl.arange(0, BLOCK_HALF)

    angles = batch * angle_batch + tokens[:, None, None] * angle_token + columns[None, None, :]
    mask = inside[:, None, None] & (columns < HALF)[None, None, :]
    c1 = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
    c2 = tl.load(cos + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    s1 = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
    s2 = tl.load(sin + angles + HALF, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        a, b = -s2, -s1
    else:
        a, b = s1, s2

    # All loads come before the first store, since the compiler would not move a load across a store.
    if q is not None:
        q_rows, q_mask = _rows(q, batch, tokens, inside, q_batch, q_token, q_head, Q_HEADS, BLOCK_Q)
        q1, q2 = _halves(q_rows, columns, q_mask, HALF)
    if k is not None:
        k_rows, k_mask = _rows(k, batch, tokens, inside, k_batch, k_token, k_head, K_HEADS, BLOCK_K)
        k1, k2 = _halves(k_rows, columns, k_mask, HALF)
    if q is not None:
        y, _ = _rows(q_rot, batch, tokens, inside, q_rot_batch, q_rot_token, q_rot_head, Q_HEADS, BLOCK_Q)
        _store_rotated(y, q1, q2, c1, c2, a, b, columns, q_mask, HALF)
        _copy_rest(y, q_rows, q_mask, HALF, REST, BLOCK_REST)
    if k is not None:
        y, _ = _rows(k_rot, batch, tokens, inside, k_rot_batch, k_rot_token, k_rot_head, K_HEADS, BLOCK_K)
        _store_rotated(y, k1, k2, c1, c2, a, b, columns, k_mask, HALF)
        _copy_rest(y, k_rows, k_mask, HALF, REST, BLOCK_REST)


@jit
def _rows(x, batch, tokens, inside, x_batch, x_token, x_head, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """Pointers to the heads of the tokens, (TOKENS, BLOCK, 1), and a mask of those that exist."""
    heads = tl.arange(0, BLOCK)
    offsets = batch * x_batch + tokens[:, None, None] * x_token + heads.to(tl.int64)[None, :, None] * x_head
    return x + offsets, inside[:, None, None] & (heads < HEADS)[None, :, None]


@jit
def _halves(rows, columns, mask, HALF: tl.constexpr):
    columns = columns[None, None, :]
    mask = mask & (columns < HALF)
    x1 = tl.load(rows + columns, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(rows + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    return x1, x2


@jit
def _store_rotated(rows, x1, x2, c1, c2, a, b, columns, mask, HALF: tl.constexpr):
    columns = columns[None, None, :]
    mask = mask & (columns < HALF)
    # Fused explicitly: otherwise compilations for different layouts might fuse differently, and give other bits.
    y1 = tl.fma(x1, c1, -(x2 * a))
    y2 = tl.fma(x2, c2, x1 * b)
    tl.store(rows + columns, y1.to(rows.dtype.element_ty), mask=mask)
    tl.store(rows + HALF + columns, y2.to(rows.dtype.element_ty), mask=mask)


@jit
def _copy_rest(y_rows, x_rows, mask, HALF: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr):
    if REST > 0:
        columns = tl.arange(0, BLOCK)[None, None, :]
        mask = mask & (columns < REST)
        rest = tl.load(x_rows + 2 * HALF + columns, mask=mask, other=0.0)
        tl.store(y_rows + 2 * HALF + columns, rest.to(y_rows.dtype.element_ty), mask=mask)


@functools.lru_cache(256)
def _settings(q_heads: int, k_heads: int, half: int, rest: int) -> dict[str, int]:
    """Tiles of about 4096 elements or one token, about 40 elements a thread while 16 warps are enough for that."""
    block_q, block_k = _power_of_2(q_heads), _power_of_2(k_heads)
    width = 2 * _power_of_2(half) + _power_of_2(rest) * (rest > 0)
    per_token = (block_q * (q_heads > 0) + block_k * (k_heads > 0)) * width
    tokens = max(1, _power_of_2(4096 // per_token + 1) // 2)
    return {
        "Q_HEADS": q_heads,
        "K_HEADS": k_heads,
        "HALF": half,
        "REST": rest,
        "TOKENS": tokens,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_HALF": _power_of_2(half),
        "BLOCK_REST": _power_of_2(rest),
        "num_warps": min(max(_power_of_2(tokens * per_token // 1024 + 1) // 2, 1), 16),
    }


def _power_of_2(number: int) -> int:
    """The least power of 2 that is not below ``number``; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions, computed in float32 and rounded once.

    Args:
        q: (B, heads, S, D), or (B, S, heads, D) for ``unsqueeze_dim=2``; float16, bfloat16, float32 or float64 (which
            is computed in float64). Of any strides; read in place if those of the last dimension are 1.
        k: likewise with its own number of heads, of the dtype of ``q``.
        cos: (B, S, R) or (1, S, R) with R even and at most D; of any of these dtypes. The last D - R columns of ``q``
            and ``k`` are passed on as they are.
        sin: as ``cos``.
        unsqueeze_dim: the dimension of the heads in ``q`` and ``k``, which ``cos`` and ``sin`` do not have.

    Returns:
        ``q`` and ``k`` rotated, dense, with their dimensions in the same order in memory: a transposed view of
        (B, S, heads, D) memory gives one. Of the promoted dtype of ``q`` and the angles. Saved for backward are ``cos``
        and ``sin``; these get gradients by plain PyTorch if they require them.

    Raises:
        KernelError: for other dtypes or shapes, or tensors on several devices.

    >>> q, angle = torch.ones(1, 1, 1, 2), torch.full((1, 1, 2), torch.pi / 2)  # a quarter of a turn
    >>> rope(q, q, angle.cos(), angle.sin())[0].round()
    tensor([[[[-1.,  1.]]]])
    """
    launch.check("rope", q=q, k=k, cos=cos, sin=sin)
    heads_dim = _checked_heads_dim(q, k, cos, sin, unsqueeze_dim)
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return rope_reference(q, k, cos, sin, heads_dim)
    dtype = _promoted(q, cos, sin)
    return _Rope.apply(q, k, cos, sin, heads_dim, dtype, False)


def _checked_heads_dim(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> int:
    heads_dim = unsqueeze_dim + 4 if unsqueeze_dim < 0 else unsqueeze_dim
    if heads_dim not in (1, 2):
        raise KernelError(f"rope: unsqueeze_dim is {unsqueeze_dim}; expected that of the heads, 1 or 2.")
    if q.dtype is not k.dtype:
        raise KernelError(f"rope: q is {q.dtype} and k {k.dtype}; expected the same dtype.")
    fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and sin.shape == cos.shape
    if fits:
        (batch, tokens, width), of_k = ((x.shape[0], x.shape[3 - heads_dim], x.shape[3]) for x in (q, k))
        first, second, rotated = cos.shape
        fits = of_k == (batch, tokens, width) and first in (1, batch) and second == tokens
        fits = fits and 0 < rotated <= width and rotated % 2 == 0
    if not fits:
        expected = "(B, heads, S, D)" if heads_dim == 1 else "(B, S, heads, D)"
        raise KernelError(
            f"rope: expected q and k of shape {expected}, each with its own number of heads, and cos and sin (B or 1, "
            f"S, R) with an even R of at most D; found q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, "
            f"sin {tuple(sin.shape)}."
        )
    return heads_dim


def _promoted(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    dtype = x.dtype
    if cos.dtype is dtype and sin.dtype is dtype:
        return dtype
    return torch.promote_types(torch.promote_types(dtype, cos.dtype), sin.dtype)


class _Rope(torch.autograd.Function):
    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor | None,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        heads_dim: int,
        dtype: torch.dtype,
        backward: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.heads_dim, ctx.dtype, ctx.backward = heads_dim, (k if q is None else q).dtype, backward  # type: ignore[union-attr]
        return _rope_op(q, k, cos, sin, heads_dim, dtype, backward)

    @staticmethod
    def backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_dq, needs_dk, *_ = ctx.needs_input_grad
        dq, dk = dq if needs_dq else None, dk if needs_dk else None
        if dq is not None or dk is not None:
            rotate = _Rope.apply if torch.is_grad_enabled() else _rope_op
            dq, dk = rotate(dq, dk, *ctx.saved_tensors, ctx.heads_dim, ctx.dtype, not ctx.backward)
        return dq, dk, None, None, None, None, None


def _rope(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, heads_dim: int, dtype: torch.dtype, backward: bool
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    q_rot, k_rot = (None if x is None else _output(x, dtype) for x in (q, k))
    yield q_rot, k_rot
    if not launch.uses_triton(q, k, cos, sin):
        for x, y in ((q, q_rot), (k, k_rot)):
            if x is not None and y is not None:
                y.copy_(_rotated(x, cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim), backward))
        return
    q, k = _readable(q), _readable(k)
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    some = k if q is None else q
    assert some is not None, "rope: neither q nor k"
    batch, tokens = some.shape[0], some.shape[3 - heads_dim]
    rotated = cos.shape[2]
    heads = (0 if x is None else x.shape[heads_dim] for x in (q, k))
    settings = _settings(*heads, rotated // 2, some.shape[3] - rotated)
    launch.run(
        _kernel,
        batch * -(-tokens // settings["TOKENS"]),
        *(cos, sin, q, k, q_rot, k_rot, tokens, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1)),
        *_strides(q, heads_dim),
        *_strides(k, heads_dim),
        *_strides(q_rot, heads_dim),
        *_strides(k_rot, heads_dim),
        BACKWARD=backward,
        **settings,
    )


def _readable(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(3) == 1 else x.contiguous()


def _strides(x: Tensor | None, heads_dim: int) -> tuple[int, int, int]:
    """Strides of batches, tokens and heads. That of a single batch is set to 0, so that fewer kernels are compiled."""
    if x is None:
        return 0, 0, 0
    batch, first, second, _ = x.stride()
    if x.shape[0] == 1:
        batch = 0
    return (batch, second, first) if heads_dim == 1 else (batch, first, second)


def rope_reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """``rope`` in plain PyTorch, differentiable any number of times, also in ``cos`` and ``sin``."""
    dtype = _promoted(q, cos, sin)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin, False).to(dtype), _rotated(k, cos, sin, False).to(dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    half = cos.shape[-1] // 2
    x1, x2, rest = launch.widen(x).split([half, half, x.shape[-1] - 2 * half], -1)
    c1, c2 = launch.widen(cos).split(half, -1)
    s1, s2 = launch.widen(sin).split(half, -1)
    if backward:
        s1, s2 = -s2, -s1
    return torch.cat([x1 * c1 - x2 * s1, x2 * c2 + x1 * s2, rest], -1)


def _output(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty_like(x, dtype=dtype)  # dense, with the dimensions in the order that they have in memory
    return y if y.stride(3) == 1 else x.new_empty(x.shape, dtype=dtype)


_rope_op = launch.register(
    "rope(Tensor? q, Tensor? k, Tensor cos, Tensor sin, int heads_dim, ScalarType dtype, bool backward)"
    " -> (Tensor? q_rot, Tensor? k_rot)",
    _rope,
)
