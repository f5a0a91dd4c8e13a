"""Finds the kernel that can stand in for a module: tries one kind after the other."""

from __future__ import annotations

from torch import nn

from recompute.compiled.runner import Runner
from recompute.engine.saved_tensors import RegionStatistics
from recompute.substitution.activation_and_linear import KernelActivationLinearRunner
from recompute.substitution.activation_and_product import KernelActivationRunner
from recompute.substitution.decoder_layer import KernelLayerRunner
from recompute.substitution.feed_forward import KernelMLPRunner, find_kernel_mlp
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.norm import KernelNormRunner, find_norm
from recompute.substitution.rotary import KernelRotaryRunner, find_rotary


def find_kernel(statistics: RegionStatistics, module: nn.Module, fallback: Runner | None) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    fallback: as ``KernelRunner`` has it.
    """
    if (mlp := find_kernel_mlp(module)) is not None:
        return KernelMLPRunner(statistics, fallback, mlp)
    if not any(module.children()):
        norm = find_norm(module)
        return None if norm is None else KernelNormRunner(statistics, fallback, norm)
    if (layer := KernelLayerRunner.for_module(statistics, fallback, module)) is not None:
        return layer
    rotary = find_rotary(module, on_cuda_only=fallback is not None)
    return None if rotary is None else KernelRotaryRunner(statistics, fallback, rotary)


def find_inner_kernel(
    statistics: RegionStatistics, module: nn.Module, parent: nn.Module, root: nn.Module, fallback: Runner | None
) -> KernelRunner | None:
    """The same for a module inside of ``root``, which a rule names.

    It may also be an activation that its ``parent`` multiplies by something, or that a Linear in ``root`` reads.
    """
    before_product = KernelActivationRunner.for_module(statistics, fallback, module, parent)
    if before_product is not None:
        return before_product
    before_linear = KernelActivationLinearRunner.for_module(statistics, fallback, module, root)
    return before_linear or find_kernel(statistics, module, fallback)
