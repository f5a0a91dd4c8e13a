"""What the ops with Linears in them share: autocast, dtypes, sums of matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.thread_state import is_tracing
from recompute.errors import KernelError


def check_dtypes(op: str, tensors: dict[str, Tensor | None], narrow: torch.dtype | None) -> None:
    """Refuse an input and parameters that have several dtypes after autocast to ``narrow``, as PyTorch does."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if narrow is not None:
        dtypes = {name: dtype if dtype is torch.float64 else narrow for name, dtype in dtypes.items()}
    if len(set(dtypes.values())) > 1:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise KernelError(f"{op}: expected one dtype, found {found}.")


def check_head(
    op: str,
    prefix: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Refuse shapes that are not those of a head. ``prefix``: what the names of its arguments begin with."""
    fits = hidden.dim() > 0 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1] and weight.numel() > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        names = _names(prefix)
        tensors = zip(names, (hidden, weight, bias), strict=True)
        found = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors if tensor is not None)
        expected = f"{names[0]} (..., H), {names[1]} (V, H) with H, V > 0, {names[2]} (V,)"
        raise KernelError(f"{op}: expected {expected}; found {found}.")
    if adapter is not None:
        thin, up = (tuple(each.shape) for each in adapter)
        if thin[:-1] != hidden.shape[:-1] or up != (len(weight), thin[-1]):
            expected = f"thin {(*hidden.shape[:-1], 'R')} and up ({len(weight)}, R)"
            raise KernelError(f"{op}: adapter is {thin} and {up}; expected {expected}.")


def _names(prefix: str) -> tuple[str, str, str]:
    return (prefix, f"{prefix}_weight", f"{prefix}_bias") if prefix else ("hidden", "weight", "bias")


def head_operands(
    op: str,
    prefix: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    narrow: torch.dtype | None,
    adapter: tuple[Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:
    """A head's operands for a Function, under autocast to ``narrow``. Refuses several dtypes. ``prefix``: see above."""
    thin, up = adapter or (None, None)
    named = dict(zip(_names(prefix), (hidden, weight, bias), strict=True)) | {"thin": thin, "up": up}
    check_dtypes(op, named, narrow)
    (hidden, thin), (weight, bias, up) = cast((hidden, thin), narrow), cast_if_made((weight, bias, up), narrow)
    return (hidden, weight, bias) if adapter is None else (hidden, weight, bias, thin, up)


def cast(tensors: Sequence[Tensor | None], narrow: torch.dtype | None) -> tuple[Any, ...]:
    """These tensors as autocast to ``narrow`` would cast them; None: autocast is off."""
    if narrow is None:
        return tuple(tensors)
    return tuple(
        tensor if tensor is None or tensor.dtype is torch.float64 else in_dtype(tensor, narrow) for tensor in tensors
    )


def cast_if_made(parameters: Sequence[Tensor | None], narrow: torch.dtype | None) -> tuple[Any, ...]:
    """Parameters for a Function that casts them to ``narrow`` itself, in forward and again in backward.

    Parameters are alive anyway: then no copy of them is held for backward. What was made in forward is cast here, so
    that the Function holds the smaller of the two.
    """
    if narrow is None or (torch.compiler.is_compiling() and not is_tracing()):  # a compiler chooses what to hold
        return cast(parameters, narrow)
    return tuple(each if each is None or _is_alive_anyway(each) else cast((each,), narrow)[0] for each in parameters)


def _is_alive_anyway(tensor: Tensor) -> bool:
    """Whether it is a parameter. One that is given to ``torch.func.functional_call`` is a plain leaf."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


def in_dtypes_of(parameters: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of parameters that were cast, in the dtypes of ``parameters``."""
    return tuple(
        gradient if gradient is None or parameter is None else in_dtype(gradient, parameter.dtype)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    )


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast has matrix products computed in; None where it is off."""
    return torch.get_autocast_dtype(device) if autocasts(device) else None


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Turn autocast off, for a backward pass: it computes in forward's dtypes, even if it is called under autocast."""
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()


def autocasts(device: str) -> bool:
    """Whether autocast is on for ``device``."""
    return device != "meta" and torch.is_autocast_enabled(device)  # meta has no autocast, and asking raises


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which costs the host half a microsecond also where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def rows(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, -2) if tensor.dim() > 1 else tensor[None]


def shaped(matrix: Tensor, *shape: int) -> Tensor:
    """An output of a Function in its shape. It is no view for autograd, which refuses to change such outputs in place.

    matrix: nobody else has it.
    """
    return torch.ops.aten._unsafe_view.default(matrix, shape)


def sum_of_products(pairs: Iterable[tuple[Tensor | None, Tensor]], dtype: torch.dtype) -> Tensor | None:
    """The sum of left @ right over the pairs whose left is not None; None if there are none.

    The sum has ``dtype``. If the products have it, too, they accumulate into it. If autocast made them narrower, each
    is first rounded to its own dtype, as in eager.
    """
    total: Tensor | None = None
    for left, right in pairs:
        if left is None:
            continue
        if total is None:
            total = in_dtype(left @ right, dtype)
        elif left.dtype is dtype:
            total = torch.addmm(total, left, right, out=total)  # FlopCounterMode overlooks addmm_
        else:
            total += left @ right
    return total


def linear_gradients(
    doutput: Tensor | None, inputs: Tensor | None, needs_dweight: bool, needs_dbias: bool, weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of a Linear's weight and bias. ``inputs`` may be None where the weight's is not needed.

    weight: its gradient gets the order in memory that it has. A transposed weight of GPT-2 has a gradient that autograd
    would otherwise copy into that order.
    """
    if doutput is None:
        return None, None
    dweight = None
    if needs_dweight and inputs is not None:
        is_transposed = weight is not None and weight.stride(0) == 1 < weight.stride(1)
        dweight = (inputs.t() @ doutput).t() if is_transposed else doutput.t() @ inputs
    return dweight, doutput.sum(0) if needs_dbias else None
