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
    if meaning.mechanism is not Mechanism.TAPE or meaning.kernels is Kernels.NEVER:
        yield path, module, runner_without_kernels(statistics, module, meaning, cache)
        return
    is_on_cuda = meaning.kernels is Kernels.ON_CUDA
    kernel: KernelRunner | None
    if is_head(module):
        fallback = PlainRunner(statistics, "it runs as it is") if is_on_cuda else None
        kernel = KernelHeadRunner(statistics, fallback, meaning.hold)
    else:
        kernel = _kernel_of(module, statistics, meaning)
    if kernel is None or kernel.wants_tape or (meaning.tapes_kernels and not is_head(module)):
        runner: Runner = TapeRunner(statistics, meaning, cache, kernel)
    else:
        if is_on_cuda and not is_head(module):
            kernel.fall_back_on(TapeRunner(statistics, meaning, cache))
        kernel.compiled_region = compiled_region(op_policy(meaning), compresses=meaning.compresses)
        runner = kernel
    yield path, module, offloaded(runner, meaning)
    if kernel is None:
        yield from _kernels_inside(path, module, meaning, governed)


def runner_without_kernels(
    statistics: RegionStatistics, module: nn.Module | None, meaning: Meaning, cache: CaptureCache
) -> Runner:
    """What runs a module, or a decorated function, under a rule without kernels. module: None of a function."""
    if meaning.mechanism is Mechanism.CHECKPOINT:
        return offloaded(CheckpointRunner(statistics, module, meaning, cache), meaning)
    if meaning.mechanism is Mechanism.TAPE:
        return offloaded(TapeRunner(statistics, meaning, cache), meaning)
    return KeepRunner(statistics, meaning) if meaning.offloading is None else OffloadRunner(statistics, meaning, None)


def offloaded(runner: Runner, meaning: Meaning) -> Runner:
    """``runner``; if the rule offloads, with what it holds taken off the device."""
    return runner if meaning.offloading is None else OffloadRunner(runner.statistics, meaning, runner)


def _kernel_of(
    module: nn.Module, statistics: RegionStatistics, meaning: Meaning, *, written_out: bool = True
) -> KernelRunner | None:
    """The kernels for a module. Where the rule wants them on CUDA alone, it runs as it is elsewhere."""
    fallback = PlainRunner(statistics) if meaning.kernels is Kernels.ON_CUDA else None
    in_tiles = meaning.tile is not None
    kernel = find_kernel(statistics, module, fallback, written_out=written_out, in_tiles=in_tiles)
    if kernel is not None:
        kernel.configure(compresses=meaning.compresses, tile=meaning.tile)
    return kernel


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
        if (kernel := _kernel_of(child, statistics, meaning, written_out=written_out)) is None:
            yield from _kernels_inside(child_path, child, meaning, governed)
        else:
            yield child_path, child, kernel
