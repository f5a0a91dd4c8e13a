"""Finds the kernel that can stand in for a module: tries one kind after the other."""

from __future__ import annotations

from torch import nn

from recompute.compiled.runner import Runner
from recompute.engine.region_statistics import RegionStatistics
from recompute.substitution.adapted_mlp import AdaptedMLPRunner, is_adapted_mlp
from recompute.substitution.feed_forward import KernelMLPRunner, find_kernel_mlp
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.norm import KernelNormRunner, find_norm


def find_kernel(
    statistics: RegionStatistics,
    module: nn.Module,
    fallback: Runner | None,
    *,
    written_out: bool = True,
    in_tiles: bool = False,
) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    fallback: as ``KernelRunner`` has it. written_out: whether it may be what a module writes out in several ops, such
    as an MLP, and not only a norm that is one op of torch's. in_tiles: whether MLPs are to run over some tokens at a
    time, if need be by their own code.
    """
    if written_out and (mlp := find_kernel_mlp(module)) is not None:
        return KernelMLPRunner(statistics, fallback, mlp)
    if in_tiles and is_adapted_mlp(module):
        return AdaptedMLPRunner(statistics, fallback)
    norm = None if any(module.children()) else find_norm(module, written_out=written_out)
    return None if norm is None else KernelNormRunner(statistics, fallback, norm)
