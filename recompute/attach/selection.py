"""Which runner each module gets, from its rule and from what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from recompute.attach.runners import CheckpointRunner, KeepRunner, PlainRunner, TapeRunner
from recompute.compiled.captured_region import CaptureCache
from recompute.compiled.lowering import lowering_of
from recompute.compiled.runner import Runner
from recompute.engine.saved_tensors import RegionStatistics
from recompute.policy.rules import PRICE, Rule
from recompute.substitution.head import KernelHeadRunner
from recompute.substitution.kernel_runner import KernelRunner, is_plain_linear
from recompute.substitution.module_formula import is_decorated
from recompute.substitution.recognition import find_inner_kernel, find_kernel


def choose(
    path: str, module: nn.Module, rule: Rule, governed: Collection[str], shared: CaptureCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules, ``module`` itself or inside it, that ``rule`` makes run otherwise, and how.

    Kernels stand in for what is inside ``module`` and has no rule of its own (``governed``). ``shared``: what the
    modules under one policy share.
    """
    statistics = RegionStatistics(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if rule.action == "keep":
        yield path, module, KeepRunner(statistics)
    elif rule.action == "checkpoint" and not rule.keep:
        yield path, module, CheckpointRunner(statistics, module, rule, shared)
    else:
        tape = TapeRunner(statistics, rule, shared)
        if rule.via == "hook" or rule.action != "recompute":
            yield path, module, tape
            return
        needs_tape = bool(rule.rerun or rule.keep or rule.price != PRICE)  # what kernels save themselves is less then
        if needs_tape:
            kernel = _find_named_kernel(statistics, module, _on_tape(statistics, rule))
        else:
            kernel = _find_named_kernel(statistics, module, tape if rule.via == "auto" else None)
            if kernel is not None:
                kernel.lowering = lowering_of(rule)
        yield path, module, TapeRunner(statistics, rule, shared, kernel) if needs_tape else kernel or tape
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(path, module, rule, governed)


def _find_named_kernel(statistics: RegionStatistics, module: nn.Module, fallback: Runner | None) -> KernelRunner | None:
    """For a module that a rule names itself. A Linear that is named is a head."""
    if is_plain_linear(module):
        return KernelHeadRunner(statistics, fallback and PlainRunner(statistics, "it runs as it is"))
    return find_kernel(statistics, module, fallback)


def _on_tape(statistics: RegionStatistics, rule: Rule) -> PlainRunner | None:
    """What runs in the place of a kernel that stands in on CUDA alone."""
    return PlainRunner(statistics) if rule.via == "auto" else None


def _kernels_inside(
    path: str, module: nn.Module, rule: Rule, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        statistics = RegionStatistics(f"{child_path} ({type(child).__name__})")
        kernel = find_inner_kernel(statistics, child, module, _on_tape(statistics, rule))
        if kernel is not None:
            yield child_path, child, kernel
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(child_path, child, rule, governed)
