"""Chooses the runner of each module, by its rule and by what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from recompute.attach.runners import (
    CheckpointRunner,
    KeepRunner,
    OffloadRunner,
    PlainRunner,
    TapeRunner,
)
from recompute.compiled.captured_region import CaptureCache
from recompute.compiled.generated.switch import is_generating
from recompute.compiled.runner import Runner
from recompute.compiled.under_torch_compile import compiled_region
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.region_statistics import RegionStatistics
from recompute.policy.meaning import Kernels, Meaning, Mechanism
from recompute.substitution.formulas import is_decorated
from recompute.substitution.head import KernelHeadRunner, is_head
from recompute.substitution.kernel_runner import KernelRunner
from recompute.substitution.recognition import find_kernel


def choose_runners(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str], cache: CaptureCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules that a rule on ``module`` makes run in another way, with their paths and runners.

    These are ``module`` itself and modules inside it. Kernels stand in for those inside that have no rule of their own.

    meaning: that of the rule.
    governed: the paths of all modules that have a rule.
    cache: what the modules under one policy share.
    """
    statistics = RegionStatistics(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    runners = _runners(path, module, statistics, meaning, governed, cache)
    if meaning.offloading is None:
        yield from runners
        return
    for inside, part, runner in runners:
        yield inside, part, OffloadRunner(statistics, meaning, runner) if part is module else runner


def _runners(
    path: str,
    module: nn.Module,
    statistics: RegionStatistics,
    meaning: Meaning,
    governed: Collection[str],
    cache: CaptureCache,
) -> Iterator[tuple[str, nn.Module, Runner]]:
    if meaning.mechanism is not Mechanism.TAPE or meaning.kernels is Kernels.NEVER:
        yield path, module, runner_without_kernels(statistics, module, meaning, cache)
    else:
        runner: Runner
        if meaning.tapes_kernels and not is_head(module):
            kernel = _find_named_kernel(statistics, module, _instead_of_kernel(statistics, meaning), meaning)
            runner = TapeRunner(statistics, meaning, cache, kernel)
        else:
            tape = TapeRunner(statistics, meaning, cache)
            fallback = tape if meaning.kernels is Kernels.ON_CUDA else None
            kernel = _find_named_kernel(statistics, module, fallback, meaning)
            if kernel is not None and kernel.wants_tape:
                kernel.fallback = _instead_of_kernel(statistics, meaning)
                runner = TapeRunner(statistics, meaning, cache, kernel)
            else:
                if kernel is not None:
                    kernel.compiled_region = compiled_region(op_policy(meaning), compresses=meaning.compresses)
                runner = kernel or tape
        yield path, module, runner
        if kernel is None:
            yield from _kernels_inside(path, module, meaning, governed)


def runner_without_kernels(
    statistics: RegionStatistics, module: nn.Module | None, meaning: Meaning, cache: CaptureCache
) -> Runner:
    """What runs a module, or a decorated function, under a rule, but for what offloads. module: None of a function."""
    if meaning.mechanism is Mechanism.CHECKPOINT:
        return CheckpointRunner(statistics, module, meaning, cache)
    if meaning.mechanism is Mechanism.TAPE:
        return TapeRunner(statistics, meaning, cache)
    return KeepRunner(statistics, meaning) if meaning.offloading is None else PlainRunner(statistics)


def _find_named_kernel(
    statistics: RegionStatistics, module: nn.Module, fallback: Runner | None, meaning: Meaning
) -> KernelRunner | None:
    """The kernels for a module that a rule itself names. If that is a Linear, it is a head."""
    if is_head(module):
        return KernelHeadRunner(statistics, fallback and PlainRunner(statistics, "it runs as it is"), meaning.hold)
    return find_kernel(statistics, module, fallback, meaning)


def _instead_of_kernel(statistics: RegionStatistics, meaning: Meaning) -> PlainRunner | None:
    """The runner for other devices than CUDA; None if the kernel runs there, too."""
    return PlainRunner(statistics) if meaning.kernels is Kernels.ON_CUDA else None


def _kernels_inside(
    path: str, module: nn.Module, meaning: Meaning, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    # In captured code, generated kernels fuse what a norm or an MLP writes out in ops with more than these are.
    generates = meaning.capture and meaning.compiled and is_generating(torch.device("cuda"))
    written_out = meaning.kernels is Kernels.EVERYWHERE or not generates
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        statistics = RegionStatistics(f"{child_path} ({type(child).__name__})")
        fallback = _instead_of_kernel(statistics, meaning)
        kernel = find_kernel(statistics, child, fallback, meaning, written_out=written_out)
        if kernel is None:
            yield from _kernels_inside(child_path, child, meaning, governed)
        else:
            yield child_path, child, kernel
