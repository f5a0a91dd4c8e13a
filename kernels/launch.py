"""What all ops share: the choice of Triton or reference, launching, registering, checks, second derivatives."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from recompute.engine.thread_state import is_fake, local
from recompute.errors import KernelError
from recompute.kernels.launch_plan import Launch, PlansByLayout, layouts_of, noting

try:
    import triton  # type: ignore[import-untyped]
    import triton.language as tl  # type: ignore[import-untyped]
except ImportError:  # Triton is published for Linux only; elsewhere the references serve
    triton = tl = None

TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DTYPES = (*TRITON_DTYPES, torch.float64)

is_compiling = torch.compiler.is_compiling
count_modes = torch._C._len_torch_dispatch_stack
transform_in_force = torch._C._functorch.peek_interpreter_stack

_LIBRARY = torch.library.Library("recompute", "FRAGMENT")


def jit(function: Callable[..., Any], **settings: Any) -> Any:
    """``triton.jit``. Without Triton, the function itself, which is then never launched."""
    return function if triton is None else triton.jit(function, **settings)


def uses_triton(*tensors: Tensor | None) -> bool:
    """Whether an op on ``tensors`` runs as Triton kernels: where all are on CUDA and of at most 32 bits."""
    if triton is None:
        return False
    return all(tensor is None or (is_on_cuda(tensor) and tensor.dtype in TRITON_DTYPES) for tensor in tensors)


def is_on_cuda(tensor: Tensor) -> bool:
    """Whether ``tensor`` is on CUDA, or is a fake one that stands for such a tensor: see ``local.simulates_cuda``."""
    return tensor.is_cuda or local.simulates_cuda


def run(kernel: Any, programs: int, *arguments: Any, **settings: Any) -> None:
    """Launch ``programs`` programs of a kernel on the device of its first argument, a tensor.

    ``arguments`` come first in the kernel's signature; ``settings`` are its constants and Triton's options. A constant
    among the arguments would count by ``_specialized`` alone, and a kernel that was compiled for another be launched.
    """
    if not programs:
        return
    if local.simulates_cuda:
        if local.on_simulated_launch is not None:
            local.on_simulated_launch(arguments)
        return
    device = arguments[0].device
    if device.type != "cuda":
        if is_fake():
            return
        with _NOTHING if noting.launches is None else _disable_current_modes():  # the interpreter runs ops
            kernel[(programs,)](*arguments, **settings)
        _note(kernel, programs, arguments, settings)
        return
    with _on(device):
        if not _RELAUNCHES or _has_hooks():
            kernel[(programs,)](*arguments, **settings)
            _note(kernel, programs, arguments, settings)
            return
        key = (id(kernel), device.index, *settings.values(), *map(_specialized, arguments))
        known = _compiled.get(key)
        if known is None:
            compiled = kernel[(programs,)](*arguments, **settings)
            constants = tuple([settings[name] for name in kernel.arg_names[len(arguments) :]])
            _compiled[key] = compiled, constants
            _note(kernel, programs, arguments, settings, compiled, constants)
            return
        compiled, constants = known
        _note(kernel, programs, arguments, settings, compiled, constants)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        binary = compiled.function, compiled.packed_metadata, None, None, None
        compiled.run(programs, 1, 1, stream, *binary, *arguments, *constants)


def _note(kernel: Any, programs: int, arguments: Any, settings: Any, compiled: Any = None, constants: Any = ()) -> None:
    if noting.launches is not None:
        hooks = () if compiled is None else _hooks()
        noting.launches.append(Launch(kernel, programs, arguments, settings, compiled, constants, hooks))


# Triton looks a compiled kernel up for every launch, which takes longer than the launch itself. Which one it finds
# depends only on what ``_specialized`` returns, so we keep it. How to launch it is internal to Triton: tried with 3.6.
_RELAUNCHES = triton is not None and triton.__version__.startswith("3.6.") and torch.version.hip is None
_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def _specialized(argument: Any) -> Any:
    """The part of an argument for which Triton compiles another version of a kernel."""
    kind = type(argument)
    if kind is int:
        return 1 if argument == 1 else (argument % 16 == 0, -(2**31) <= argument < 2**31)
    if argument is None or kind is bool:
        return argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return kind


def _has_hooks() -> bool:
    """Whether a profiler of Triton's watches launches."""
    entry, exit = _hooks()
    return bool(entry.calls or exit.calls)


def _hooks() -> tuple[Any, Any]:
    runtime = triton.knobs.runtime
    return runtime.launch_enter_hook, runtime.launch_exit_hook


_NOTHING = contextlib.nullcontext()


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has; 1 where the interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def dense(tensor: Tensor) -> Tensor:
    """``tensor``, or its copy, contiguous from an address that is a multiple of 16 bytes.

    Triton compiles another version of a kernel for another alignment, whose sums may run in another order. Without this
    function, an unaligned view of the same values could give other bits.
    """
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def is_aligned(tensor: Tensor) -> bool:
    """Whether ``tensor`` begins at a multiple of 16 bytes. True for a fake tensor, which has no address."""
    return local.simulates_cuda or tensor.data_ptr() % 16 == 0


def widen(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype that the references compute in: float64 for float64, float32 for all else."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}
"""The function that each registered op runs: called directly to skip the dispatcher, or to see what it allocates."""


def register(
    schema: str, implementation: Callable[..., Any], outputs: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Register the op ``recompute::schema`` and return a function that calls it.

    That function goes through the dispatcher only where somebody is to see the op: a compiler, a mode (as a tape is), a
    transform or a tensor subclass. For the dispatcher takes longer than launching a kernel, and
    ``torch.library.custom_op`` 8 µs longer still (torch 2.13, one CPU core). Either way, CUDA tensors of layouts that
    come again and again get the same launches without a run of ``implementation``.

    Args:
        schema: flat, as the dispatcher knows tensors, numbers and strings. An op with settings takes one argument a
            field. No argument has a default: modes are not given one that is equal to it.
        implementation: called with the arguments that the schema lists, by position. It yields the results as soon as
            they are allocated, and then launches what writes them. For tensors without values it is left at the yield,
            where no size may have decided on anything but sizes: a compiler's sizes are symbols. What it allocates and
            launches may depend on the layouts of the tensors and on the other arguments alone: a plan repeats it
            without asking.
        outputs: for an implementation that returns what ops of PyTorch give it, and yields nothing: allocates the
            results of the same arguments.
    """

    def run_to_the_end(*arguments: Any) -> Any:
        steps = implementation(*arguments)
        results = next(steps)
        for _ in steps:
            raise AssertionError(f"{name} yields its results twice")
        return results

    name = schema.partition("(")[0]
    run = run_to_the_end if outputs is None else implementation
    allocate = outputs or (lambda *arguments: next(implementation(*arguments)))
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    plans = PlansByLayout(run)
    _LIBRARY.impl(name, plans.run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"recompute::{name}", allocate, lib=_LIBRARY)
    overload = getattr(torch.ops.recompute, name).default
    IMPLEMENTATIONS[overload] = run
    PLANS[overload], by_layouts = plans, plans.by_layouts

    def op(*arguments: Any) -> Any:
        if is_compiling() or count_modes() or transform_in_force() is not None:
            return overload(*arguments)
        call = by_layouts.get(layouts_of(arguments))
        return plans.begin(arguments, overload) if call is None else call(*arguments)

    op.__name__ = op.__qualname__ = f"recompute.{name}"
    return op


PLANS: dict[Any, PlansByLayout] = {}
"""The plans of each registered op."""


def check(op: str, **tensors: Tensor | None) -> None:
    """Refuse tensors that ``op`` cannot compute with.

    Raises:
        KernelError: what is no tensor, a dtype other than float16, bfloat16, float32 and float64, or tensors on several
            devices.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None and first is not None:
            continue  # every op needs the first of its tensors
        if not isinstance(tensor, Tensor):
            raise KernelError(f"{op}: {name} is {type(tensor).__name__}; expected a Tensor.")
        check_dtype(op, name, tensor.dtype, DTYPES)
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise KernelError(f"{op}: {first[0]} is on {first[1]} and {name} on {tensor.device}; expected one device.")


def check_one_of(op: str, name: str, value: Any, known: Iterable[Any]) -> None:
    """Refuse a text that is none of those that are known."""
    if value not in known:
        raise KernelError(f"{op}: unknown {name} {value!r}; expected one of {', '.join(known)}.")


def check_dtype(op: str, name: str, dtype: torch.dtype, known: Iterable[torch.dtype] = TRITON_DTYPES) -> None:
    """Refuse a dtype that is none of those that are known."""
    if dtype not in known:
        raise KernelError(f"{op}: {name} is {dtype}; expected one of {', '.join(map(str, known))}.")


def check_same_shape(op: str, **tensors: Tensor) -> None:
    """Refuse tensors of two shapes."""
    (one, first), (other, second) = tensors.items()
    if first.shape != second.shape:
        shapes = f"{one} has shape {tuple(first.shape)} and {other} {tuple(second.shape)}"
        raise KernelError(f"{op}: {shapes}; expected the same shape.")


def differentiable_gradients(
    reference: Callable[..., Any], inputs: tuple[Any, ...], needed: tuple[bool, ...], gradient: Any
) -> tuple[Tensor | None, ...]:
    """The gradients of ``reference``, by autograd, for a backward that is itself differentiated.

    Args:
        reference: computes the op's output from ``inputs`` in plain PyTorch.
        needed: for each input, whether its gradient is wanted; None is returned for the others.
        gradient: that of the output, or those of all outputs.
    """
    # Each input becomes a view of its own: a tensor given twice gets a gradient for each, and not their sum twice.
    inputs = tuple(value.view_as(value) if need else value for value, need in zip(inputs, needed, strict=True))
    wanted = [value for value, need in zip(inputs, needed, strict=True) if need]
    outputs, gradients = reference(*inputs), gradient
    if isinstance(outputs, Tensor):
        outputs, gradients = (outputs,), (gradient,)
    trained = [output.requires_grad for output in outputs]  # a gradient may come for an output that requires none
    outputs, gradients = tuple(compress(outputs, trained)), tuple(compress(gradients, trained))
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True) if wanted else ())
    return tuple(next(found) if need else None for need in needed)
