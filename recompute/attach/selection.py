"""Which runner each module gets, from its rule and from what it computes."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Collection, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from recompute.attach.runners import CheckpointRunner, KeepRunner, PlainRunner, TapeRunner
from recompute.compiled.captured_region import CaptureCache
from recompute.compiled.runner import Runner
from recompute.compiled.under_torch_compile import compiled_region
from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.saved_tensors import RegionStatistics
from recompute.policy.meaning import Kernels, Meaning, Mechanism
from recompute.substitution.kernel_runners import (
    MLP,
    KernelActivationRunner,
    KernelHeadRunner,
    KernelLayerRunner,
    KernelMLPRunner,
    KernelNormRunner,
    KernelRotaryRunner,
    KernelRunner,
    is_hooked,
    is_plain_linear,
)
from recompute.substitution.recognize import (
    find_activation,
    find_gated_mlp,
    find_norm,
    find_pre_norm_layer,
    is_decorated,
)
from recompute.substitution.rotary import find_rotary


def choose(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str], shared: CaptureCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules, ``module`` itself or inside it, that a rule of this meaning makes run otherwise, and how.

    Kernels stand in for what is inside ``module`` and has no rule of its own (``governed``). ``shared``: what the
    modules under one policy share.
    """
    statistics = RegionStatistics(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if meaning.mechanism is Mechanism.KEEP:
        yield path, module, KeepRunner(statistics, meaning)
    elif meaning.mechanism is Mechanism.CHECKPOINT:
        yield path, module, CheckpointRunner(statistics, module, meaning, shared)
    elif meaning.kernels is Kernels.NEVER:
        yield path, module, TapeRunner(statistics, meaning, shared)
    else:
        runner: Runner
        if meaning.tapes_kernels:
            kernel = _find_kernel(statistics, module, _instead_of_kernel(statistics, meaning), is_named=True)
            runner = TapeRunner(statistics, meaning, shared, kernel)
        else:
            tape = TapeRunner(statistics, meaning, shared)
            fallback = tape if meaning.kernels is Kernels.ON_CUDA else None
            kernel = _find_kernel(statistics, module, fallback, is_named=True)
            if kernel is not None:
                kernel.compiled_region = compiled_region(op_policy(meaning))
            runner = kernel or tape
        yield path, module, runner
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(path, module, meaning, governed)


def _instead_of_kernel(statistics: RegionStatistics, meaning: Meaning) -> PlainRunner | None:
    """What runs on other devices than CUDA, in a module inside of a tape; None if the kernel runs there, too."""
    return PlainRunner(statistics) if meaning.kernels is Kernels.ON_CUDA else None


def _kernels_inside(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        statistics = RegionStatistics(f"{child_path} ({type(child).__name__})")
        kernel = _find_inner_kernel(statistics, child, module, _instead_of_kernel(statistics, meaning))
        if kernel is not None:
            yield child_path, child, kernel
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(child_path, child, meaning, governed)


def _find_kernel(
    statistics: RegionStatistics, module: nn.Module, fallback: Runner | None, *, is_named: bool
) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    is_named: whether a rule names this very module, and not one around it.
    """
    if is_named and is_plain_linear(module):
        return KernelHeadRunner(statistics, fallback and PlainRunner(statistics, "it runs as it is"))
    if (mlp := _find_mlp(module)) is not None:
        return _checked(KernelMLPRunner(statistics, fallback, mlp), module, (mlp.parts, mlp.activation))
    if not any(module.children()):
        norm = find_norm(module)
        return None if norm is None else _checked(KernelNormRunner(statistics, fallback, norm), module, norm)
    if (layer := find_pre_norm_layer(module)) is not None:
        parts = layer.computed(module)
        norm, mlp_norm = map(find_norm, parts[:2])
        if norm is not None and mlp_norm is not None:
            references = tuple(map(weakref.ref, parts))
            return KernelLayerRunner(statistics, fallback, layer, (norm, mlp_norm), _find_mlp(parts[2]), references)
    rotary = find_rotary(module, on_cuda_only=fallback is not None)
    return None if rotary is None else KernelRotaryRunner(statistics, fallback, rotary)


_agree: dict[Any, bool] = {}


def _checked(runner: KernelRunner, module: nn.Module, found: Any) -> KernelRunner | None:
    """``runner``, if its kernel gives what ``module`` gives, up to rounding: compared once for all that are alike."""
    parameters = list(module.parameters())
    if not parameters or not all(type(each) is nn.Parameter and each.untyped_storage().nbytes() for each in parameters):
        return runner  # there are no values to compare with: fake, or sharded
    first = parameters[0]
    if first.is_meta or (isinstance(runner, KernelNormRunner) and first.dim() != 1):
        return runner
    key = (base_of(module), found, *((each.shape, each.dtype, each.device.type) for each in parameters))
    if key not in _agree:
        width = first.shape[-1]
        x = torch.linspace(-3, 3, 6 * width, device=first.device, dtype=first.dtype).view(6, width)
        forward = MethodType(base_of(module).forward, module)
        (name,) = inspect.signature(forward).parameters
        with torch.no_grad():
            expected, kernels = forward(**{name: x}), runner.run_kernel(module, forward, (), {name: x})
        tolerance = torch.finfo(first.dtype).eps ** 0.5
        is_other = (kernels - expected).double().norm() > tolerance * expected.double().norm()
        _agree[key] = kernels.shape == expected.shape and not is_other
    return runner if _agree[key] else None


def _find_inner_kernel(
    statistics: RegionStatistics, module: nn.Module, parent: nn.Module, fallback: Runner | None
) -> KernelRunner | None:
    """As ``find_kernel``, for what is inside of a module that a rule names."""
    is_stack_of_experts = any(parameter.dim() == 3 for parameter in parent.parameters(recurse=False))
    if is_stack_of_experts and (activation := find_activation(module)) is not None:
        return KernelActivationRunner(statistics, fallback, activation)
    return _find_kernel(statistics, module, fallback, is_named=False)


def _find_mlp(module: nn.Module) -> MLP | None:
    children = module._modules.values()
    if not 3 <= len(children) <= 6 or any(child is None or any(child.children()) for child in children):
        return None
    parts = find_gated_mlp(module)
    if parts is None:
        return None
    activation = module._modules[parts.activation]
    name = None if activation is None or is_hooked(activation) else find_activation(activation)
    if activation is None or name is None:
        return None
    mlp = MLP(parts, name, activation)
    return None if mlp.linears(module) is None else mlp
