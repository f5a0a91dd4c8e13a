"""Finds the kernel that can stand in for a module: tries one kind after the other, and compares results once."""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import nn

from recompute.compiled.runner import Runner
from recompute.engine.checkpoint.module_state import base_of
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import RegionStatistics
from recompute.substitution.activation_and_linear import KernelActivationLinearRunner
from recompute.substitution.decoder_layer import KernelLayerRunner
from recompute.substitution.experts import KernelActivationRunner, has_stacked_experts
from recompute.substitution.feed_forward import GATE_ACTIVATIONS, KernelMLPRunner, find_activation, find_kernel_mlp
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.norm import KernelNormRunner, find_norm
from recompute.substitution.rotary import KernelRotaryRunner, find_rotary


def find_kernel(statistics: RegionStatistics, module: nn.Module, fallback: Runner | None) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    fallback: as ``KernelRunner`` has it.
    """
    if (mlp := find_kernel_mlp(module)) is not None:
        runner = KernelMLPRunner(statistics, fallback, mlp)
        return _compared(runner, module, (mlp.parts, mlp.linears, mlp.activation))
    if not any(module.children()):
        norm = find_norm(module)
        return None if norm is None else _compared(KernelNormRunner(statistics, fallback, norm), module, norm)
    if (layer := KernelLayerRunner.for_module(statistics, fallback, module)) is not None:
        return layer
    rotary = find_rotary(module, on_cuda_only=fallback is not None)
    return None if rotary is None else KernelRotaryRunner(statistics, fallback, rotary)


def find_inner_kernel(
    statistics: RegionStatistics, module: nn.Module, parent: nn.Module, root: nn.Module, fallback: Runner | None
) -> KernelRunner | None:
    """The same for a module inside of ``root``, which a rule names.

    It may also be an activation whose ``parent`` has stacked experts, or that a Linear in ``root`` reads.
    """
    if has_stacked_experts(parent) and (activation := find_activation(module)) in GATE_ACTIVATIONS:
        return KernelActivationRunner(statistics, fallback, activation)
    before_linear = KernelActivationLinearRunner.for_module(statistics, fallback, module, root)
    return before_linear or find_kernel(statistics, module, fallback)


_agree: dict[Any, bool] = {}


def _compared(runner: KernelRunner, module: nn.Module, found: Any) -> KernelRunner | None:
    """``runner`` if its kernel gives what ``module`` gives, up to rounding; else None.

    Modules that are alike are compared once.
    """
    parameters = list(module.parameters())
    if not parameters or not all(type(each) is nn.Parameter and each.untyped_storage().nbytes() for each in parameters):
        return runner  # fake and sharded parameters have no values here to compare with
    first = parameters[0]
    if first.is_meta or (isinstance(runner, KernelNormRunner) and first.dim() != 1):
        return runner
    width = first.shape[-1]
    if isinstance(runner, KernelMLPRunner) and (operands := runner.mlp.operands(module)) is not None:
        width = operands[0][0].shape[-1]
    key = (base_of(module), found, *((each.shape, each.dtype, each.device.type) for each in parameters))
    if key not in _agree:
        x = torch.linspace(-3, 3, 6 * width, device=first.device, dtype=first.dtype).view(6, width)
        forward = MethodType(base_of(module).forward, module)
        (name,) = inspect.signature(forward).parameters
        state = RngState()  # a dropout draws the same numbers in both, and none as far as others can tell
        with torch.no_grad():
            with state.replayed():
                expected = forward(**{name: x})
            with state.replayed():
                kernels = runner.run_kernel(module, forward, (), {name: x})
        tolerance = torch.finfo(first.dtype).eps ** 0.5
        is_other = (kernels - expected).double().norm() > tolerance * expected.double().norm()
        _agree[key] = kernels.shape == expected.shape and not is_other
    return runner if _agree[key] else None
