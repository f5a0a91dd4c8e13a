"""What the ops share: where they run; how they are launched, registered, checked and differentiated twice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recompute.errors import KernelError

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # Triton is published for Linux only; elsewhere the references serve
    triton = tl = None

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*TRITON_DTYPES, torch.float64)

_LIBRARY = torch.library.Library("recompute", "FRAGMENT")


def jit(function: Callable[..., Any]) -> Any:
    """``triton.jit``; without Triton the function as it is, which then nothing launches."""
    return function if triton is None else triton.jit(function)


def uses_triton(*tensors: Tensor | None) -> bool:
    """Whether an op on ``tensors`` runs as Triton kernels: where all are on CUDA and of at most 32 bits."""
    if triton is None:
        return False
    return all(tensor is None or (tensor.is_cuda and tensor.dtype in TRITON_DTYPES) for tensor in tensors)


def run(kernel: Any, programs: int, *arguments: Any, **settings: Any) -> None:
    """Launch ``programs`` programs of a kernel on the device of its first argument, a tensor."""
    if programs:
        with _on(arguments[0].device):
            kernel[(programs,)](*arguments, **settings)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Those of a CUDA device; 1 where the interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def dense(tensor: Tensor) -> Tensor:
    """``tensor``, or its copy, contiguous from an address that is a multiple of 16 bytes.

    Triton compiles a kernel anew for another alignment, and its sums may then run in another order: without this, an
    unaligned view of the same values could give other bits.
    """
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype that the references compute in: float64 for float64, float32 for all else."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def register(schema: str, implementation: Callable[..., Any], outputs: Callable[..., Any]) -> Callable[..., Any]:
    """Register and return the op ``recompute::schema``. ``outputs`` allocates its results from its arguments.

    Through ``torch.library.Library``: ``custom_op`` costs 8 µs more a call (torch 2.13, one CPU core).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"recompute::{name}", outputs, lib=_LIBRARY)
    return getattr(torch.ops.recompute, name).default


def check(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that ``op`` cannot compute with.

    Raises:
        KernelError: a dtype other than float16, bfloat16, float32 and float64, or tensors on several devices.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype not in DTYPES:
            raise KernelError(f"{op}: {name} is {tensor.dtype}; expected one of {', '.join(map(str, DTYPES))}.")
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise KernelError(f"{op}: {first[0]} is on {first[1]} and {name} on {tensor.device}; expected one device.")


def differentiable_gradients(
    reference: Callable[..., Tensor], inputs: tuple[Any, ...], needed: tuple[bool, ...], gradient: Tensor
) -> tuple[Tensor | None, ...]:
    """What a backward returns that will itself be differentiated: gradients of ``reference``, by autograd.

    Args:
        reference: computes the op's output from ``inputs`` in plain PyTorch.
        needed: for each input, whether its gradient is wanted; None is returned for the others.
        gradient: that of the output.
    """
    # Views, so that a tensor given as two inputs gets a gradient for each of them and not their sum twice.
    inputs = tuple(value.view_as(value) if need else value for value, need in zip(inputs, needed, strict=True))
    wanted = [value for value, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(reference(*inputs), wanted, gradient, create_graph=True))
    return tuple(next(found) if need else None for need in needed)
