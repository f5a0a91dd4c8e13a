"""What ``rms_norm`` and ``layer_norm`` share: their ops and their gradients, with a residual or without.

A LayerNorm has the casting ``layer_norm``, a mean for each row, and perhaps a bias. The formulas stand in rms_norm.py
and layer_norm.py. With x, residual, h, y, dy, dh: (M, H), a residual is added before the norm, and h is rounded to its
dtype before it is normalized:

    h = x + residual
    y = norm(h)

    dx = dresidual = norm's gradient for h + dh

Forward then moves 4MH elements in the place of 2MH. It saves h, which is an output anyway, and 4 or 8 bytes a row.
Backward moves 4MH, too: in one pass it computes the norm's gradient and adds dh, rounding once. Without a residual the
stream is x itself, which then needs no copy, and dh is still added in that pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.engine.recipe_book import record
from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.norm_kernels import launch_backward, launch_forward

LAYER_NORM = "layer_norm"
"""The casting of a LayerNorm: everything in float32, rounded once."""

Optionals = tuple[Tensor | None, ...]


def check_norm(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> None:
    launch.check(op, x=x, weight=weight, bias=bias)
    if x.dim() == 0:
        raise KernelError(f"{op}: x has no dimension to normalize over; expected shape (..., H).")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != x.shape[-1:]:
            raise KernelError(
                f"{op}: {name} has shape {tuple(value.shape)}; expected ({x.shape[-1]},) for x of shape "
                f"{tuple(x.shape)}."
            )


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str) -> Tensor:
    y = _Norm.apply(x, None, weight, bias, eps, casting, False)
    record(y, _output, x, weight, bias, eps, casting)
    return y


def add_norm(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str
) -> tuple[Tensor, Tensor]:
    if residual is not None:
        launch.check(op, x=x, residual=residual)
        launch.check_same_shape(op, x=x, residual=residual)
    y, h, mean, rstd = _Norm.apply(x, residual, weight, bias, eps, casting, True)
    record(y, OPS[casting].regenerate, h, weight, bias, mean, rstd, casting)
    return y, h


class _Norm(torch.autograd.Function):
    """``with_stream``: whether the normalized stream is an output, too, and with it the rows' means and deviations."""

    seen_by_dispatcher = True  # so that a tape around may run again what forward runs

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        casting: str,
        with_stream: bool,
    ) -> Any:
        y, h, mean, rstd = OPS[casting].forward(x, residual, weight, bias, eps, casting)
        h = x if h is None else h  # as an output, autograd returns a view of x, whose gradient comes to this node
        ctx.save_for_backward(h, weight, bias, mean, rstd)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.casting = eps, casting
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        if not with_stream:
            return y
        trains_stream = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        known = (rstd,) if mean is None else (mean, rstd)
        ctx.mark_non_differentiable(*known if trains_stream else (*known, h))
        return y, h, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None, *_: None) -> Optionals:
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needed = (needs_x or needs_residual, needs_weight, needs_bias)
        dstream, dweight, dbias = dh, None, None
        if dy is not None:
            h, weight, bias, mean, rstd = ctx.saved_tensors
            if torch.is_grad_enabled():
                inputs = (h, weight, bias, ctx.eps, ctx.casting)
                found = launch.differentiable_gradients(norm_reference, inputs, (*needed, False, False), dy)
                dstream, dweight, dbias = found[:3]
                dstream = dstream if dstream is None or dh is None else dstream + dh
            else:
                dresidual = dh if needed[0] else None
                dstream, dweight, dbias = OPS[ctx.casting].backward(
                    dy, h, weight, bias, mean, rstd, ctx.casting, *needed, dresidual
                )
        dx, dresidual = (
            dstream.to(dtype) if need and dstream is not None else None
            for need, dtype in zip((needs_x, needs_residual), ctx.dtypes, strict=True)
        )
        return dx, dresidual, dweight, dbias, None, None, None


def _in_memory_order(tensor_of: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let an implementation see leading dimensions in the order that x has in memory, as heads have.

    tensor_of: finds x among the arguments. None leaves the dimensions as they are.
    """

    def decorate(implementation: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def reordered(order: list[int], arguments: tuple[Any, ...]) -> Iterator[Any]:
            back = sorted(order, key=order.__getitem__)
            steps = implementation(*(_permuted(argument, order) for argument in arguments))
            results = next(steps)
            whole = isinstance(results, Tensor)
            yield _permuted(results, back) if whole else tuple(_permuted(result, back) for result in results)
            yield from steps

        @functools.wraps(implementation)
        def ordered(*arguments: Any) -> Iterator[Any]:
            order = _memory_order(tensor_of(*arguments))
            return implementation(*arguments) if order is None else reordered(order, arguments)

        return ordered

    return decorate


def _memory_order(x: Tensor | None) -> list[int] | None:
    """The dimensions of x in the order they have in memory; None if that is their own order, or rows have gaps."""
    if x is None or x.dim() < 3 or x.is_contiguous() or x.stride(-1) != 1:
        return None
    leading = range(x.dim() - 1)
    if any(x.stride(dim) == 0 for dim in leading):  # expanded dimensions have no order in memory
        return None
    order = sorted(leading, key=x.stride, reverse=True)
    return None if order == list(leading) else [*order, x.dim() - 1]


def _permuted(value: Any, order: list[int]) -> Any:
    """x, a tensor like it, or a number a row, with dimensions permuted. What has one dimension stays as it is."""
    if isinstance(value, Tensor) and value.dim() > 1:
        return value.permute(order[: value.dim()])
    return value


@_in_memory_order(lambda x, residual, *_: x if residual is None else None)
def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, Tensor]]:
    if not launch.uses_triton(x, residual, weight, bias):
        h = x.contiguous() if residual is None else x.contiguous() + residual.contiguous()
        y, mean, rstd = _forward_reference(h, weight, bias, eps, casting)
        yield y, None if residual is None else h, mean, rstd
        return
    h = x if residual is None else x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = _like_y(h, weight, casting), h.new_empty(h.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if casting == LAYER_NORM else None
    yield y, None if residual is None else h, mean, rstd
    launch_forward(x, residual, weight, bias, h, y, mean, rstd, eps, casting)


@_in_memory_order(lambda x, *_: x)
def _regenerated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor, casting: str
) -> Iterator[Tensor]:
    if not launch.uses_triton(x, weight, bias):
        yield _scaled(_normalized(x.contiguous(), mean, rstd), x.dtype, weight, bias, casting)
        return
    y = _like_y(x, weight, casting)
    yield y
    mean = None if mean is None else launch.dense(mean)
    launch_forward(x, None, weight, bias, x, y, mean, launch.dense(rstd), None, casting)


# These arguments stand flat because torch.library calls an op with the flat arguments of the schema. Making an object
# of them would add about 0.4 µs to each call (torch 2.13, one CPU core).
@_in_memory_order(lambda dy, x, *_: x)
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
    dresidual: Tensor | None,
) -> Iterator[Optionals]:
    weight_like, bias_like = weight if needs_dweight else None, bias if needs_dbias else None
    if not launch.uses_triton(x, weight, bias):
        likes = (weight_like, bias_like)
        yield _backward_reference(dy, x, weight, mean, rstd, casting, needs_dx, likes, dresidual)
        return
    dx = x.new_empty(x.shape) if needs_dx else None
    dweight, dbias = (None if like is None else like.new_empty(like.shape) for like in (weight_like, bias_like))
    yield dx, dweight, dbias
    launch_backward(dy, x, weight, mean, rstd, dresidual, dx, dweight, dbias, casting)


def _like_y(x: Tensor, weight: Tensor | None, casting: str) -> Tensor:
    dtype = x.dtype
    if casting == "llama" and weight is not None:
        dtype = torch.promote_types(dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


def _output(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str) -> Tensor:
    return OPS[casting].forward(x, None, weight, bias, eps, casting)[0]


def norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str) -> Tensor:
    """A norm in plain PyTorch, differentiable any number of times."""
    return _forward_reference(x, weight, bias, eps, casting)[0]


def _forward_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, casting: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    wide = launch.widen(x)
    if casting != LAYER_NORM:
        r = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return _scaled(wide * r, x.dtype, weight, bias, casting), None, r.squeeze(-1)
    mean = wide.mean(-1)
    centered = wide - mean.unsqueeze(-1)
    error = centered.mean(-1)
    mean, rstd = mean + error, torch.rsqrt(centered.square().mean(-1) - error.square() + eps)
    return _scaled(_normalized(x, mean, rstd), x.dtype, weight, bias, casting), mean, rstd


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    wide = launch.widen(x)
    return (wide if mean is None else wide - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def _scaled(normalized: Tensor, dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None, casting: str) -> Tensor:
    if casting == "llama":
        return normalized.to(dtype) if weight is None else weight * normalized.to(dtype)
    y = normalized if weight is None else normalized * _wide_gain(weight, casting)
    return (y if bias is None else y + launch.widen(bias)).to(dtype)


def _backward_reference(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    casting: str,
    needs_dx: bool,
    likes: tuple[Tensor | None, Tensor | None],
    dresidual: Tensor | None,
) -> Optionals:
    """``likes``: weight and bias, each if its gradient is wanted."""
    h, g = _normalized(x.contiguous(), mean, rstd), launch.widen(dy.contiguous())
    shape = rstd.numel(), x.shape[-1]
    sums = zip((g * h, g), likes, strict=True)
    dweight, dbias = (None if like is None else each.reshape(shape).sum(0).to(like.dtype) for each, like in sums)
    if not needs_dx:
        return None, dweight, dbias
    if weight is not None:
        g = g * _wide_gain(weight, casting)
    centered = g if mean is None else g - g.mean(-1, keepdim=True)
    dx = rstd.unsqueeze(-1) * (centered - h * (g * h).mean(-1, keepdim=True))
    return (dx if dresidual is None else dx + dresidual).to(x.dtype), dweight, dbias


def _wide_gain(weight: Tensor, casting: str) -> Tensor:
    return 1.0 + launch.widen(weight) if casting == "gemma" else launch.widen(weight)


class _Ops(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    regenerate: Callable[..., Any]


def _registered(name: str) -> _Ops:
    parameters, rows = "Tensor? weight, Tensor? bias", "Tensor? mean, Tensor rstd"
    return _Ops(
        launch.register(
            f"{name}_forward(Tensor x, Tensor? residual, {parameters}, float eps, str casting)"
            f" -> (Tensor y, Tensor? h, {rows})",
            _forward,
        ),
        launch.register(
            f"{name}_backward(Tensor dy, Tensor x, {parameters}, {rows}, str casting, bool needs_dx,"
            " bool needs_dweight, bool needs_dbias, Tensor? dresidual) -> (Tensor? dx, Tensor? dweight, Tensor? dbias)",
            _backward,
        ),
        launch.register(f"{name}_regenerate(Tensor x, {parameters}, {rows}, str casting) -> Tensor y", _regenerated),
    )


CASTINGS = ("llama", "gemma", "none")
OPS = {**dict.fromkeys(CASTINGS, _registered("rms_norm")), LAYER_NORM: _registered("layer_norm")}
"""The ops of each casting. They compute alike; a policy or a report tells an RMSNorm and a LayerNorm by their names."""
