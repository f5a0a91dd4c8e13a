"""Finds the kernels that can stand in for a module, or for modules inside it: tries one kind after the other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from recompute.compiled.generated.switch import is_generating
from recompute.engine.region_statistics import RegionStatistics
from recompute.policy.meaning import Kernels, Meaning
from recompute.substitution.adapted_mlp import AdaptedMLPRunner, drops, is_adapted_mlp
from recompute.substitution.feed_forward import KernelMLPRunner, find_kernel_mlp
from recompute.substitution.formulas import is_decorated
from recompute.substitution.head import KernelHeadRunner, is_head
from recompute.substitution.kernel_runner import KernelRunner, PlainRunner
from recompute.substitution.norm import KernelNormRunner, find_norm


def find_kernel(statistics: RegionStatistics, module: nn.Module, meaning: Meaning) -> KernelRunner | None:
    """The runner of the kernels that compute what ``module`` does, if there are any and its rule wants them."""
    if meaning.kernels is Kernels.NEVER:
        return None
    if is_head(module):
        fallback = PlainRunner(statistics, "the module itself") if meaning.kernels is Kernels.ON_CUDA else None
        return KernelHeadRunner(statistics, fallback, meaning.hold)
    return _find(statistics, module, meaning, written_out=True)


def kernels_inside(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, KernelRunner]]:
    """The outermost modules inside of ``module`` that kernels compute, with their paths and runners.

    governed: the paths of modules that have rules of their own, and are passed over.
    """
    if meaning.kernels is Kernels.NEVER:
        return
    # In captured code, generated kernels fuse the written-out ops of a norm or an MLP, and more ops around them.
    generates = meaning.capture and meaning.compiled and is_generating(torch.device("cuda"))
    written_out = meaning.kernels is Kernels.EVERYWHERE or not generates
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        statistics = RegionStatistics(f"{child_path} ({type(child).__name__})")
        kernel = _find(statistics, child, meaning, written_out=written_out)
        if kernel is None:
            yield from kernels_inside(child_path, child, meaning, governed)
        else:
            yield child_path, child, kernel


def _find(
    statistics: RegionStatistics, module: nn.Module, meaning: Meaning, *, written_out: bool
) -> KernelRunner | None:
    """written_out: whether it may be what a module writes out in several ops, such as an MLP, and not only a norm that
    is one op of torch's. An MLP that runs over some tokens at a time always may."""
    if isinstance(module, torch.jit.ScriptModule):
        return None  # nothing runs in place of its code
    fallback = PlainRunner(statistics) if meaning.kernels is Kernels.ON_CUDA else None
    found: KernelRunner | None = None
    if (written_out or meaning.tile is not None) and (mlp := find_kernel_mlp(module)) is not None:
        found = KernelMLPRunner(statistics, fallback, mlp)
    elif meaning.tile is not None and is_adapted_mlp(module):
        found = AdaptedMLPRunner(statistics, fallback, drops(module, is_training=True))
    elif not any(module.children()) and (norm := find_norm(module, written_out=written_out)) is not None:
        found = KernelNormRunner(statistics, fallback, norm)
    if found is not None:
        found.compresses, found.tile = meaning.compresses, meaning.tile
    return found
