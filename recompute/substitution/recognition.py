"""Finds the kernel that can stand in for a module: tries one kind after the other."""

from __future__ import annotations

from torch import nn

from recompute.compiled.runner import Runner
from recompute.engine.region_statistics import RegionStatistics
from recompute.policy.meaning import Meaning
from recompute.substitution.adapted_mlp import AdaptedMLPRunner, is_adapted_mlp
from recompute.substitution.feed_forward import KernelMLPRunner, find_kernel_mlp
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.norm import KernelNormRunner, find_norm


def find_kernel(
    statistics: RegionStatistics,
    module: nn.Module,
    fallback: Runner | None,
    meaning: Meaning,
    *,
    written_out: bool = True,
) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any.

    fallback: as ``KernelRunner`` has it. meaning: of the rule, which may have MLPs run over some tokens at a time, if
    need be by their own code. written_out: whether it may be what a module writes out in several ops, such as an MLP,
    and not only a norm that is one op of torch's. An MLP that runs over some tokens at a time always may.
    """
    found: KernelRunner | None = None
    if (written_out or meaning.tile is not None) and (mlp := find_kernel_mlp(module)) is not None:
        found = KernelMLPRunner(statistics, fallback, mlp)
    elif meaning.tile is not None and is_adapted_mlp(module):
        found = AdaptedMLPRunner(statistics, fallback)
    elif not any(module.children()) and (norm := find_norm(module, written_out=written_out)) is not None:
        found = KernelNormRunner(statistics, fallback, norm)
    if found is not None:
        found.compresses, found.tile = meaning.compresses, meaning.tile
    return found
