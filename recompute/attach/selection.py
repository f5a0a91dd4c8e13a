"""Which runner each module gets, from its rule and from what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from recompute.attach.runners import CheckpointRunner, KeepRunner, PlainRunner, TapeRunner
from recompute.compiled.captured_region import Shared
from recompute.compiled.lowering import lowering_of
from recompute.compiled.runner import Runner
from recompute.engine.saved_tensors import Owner
from recompute.policy.rules import PRICE, Rule
from recompute.substitution.head import KernelHeadRunner
from recompute.substitution.kernel_runner import KernelRunner, is_plain_linear
from recompute.substitution.module_formula import is_decorated
from recompute.substitution.recognition import find_inner_kernel, find_kernel


def choose(
    path: str, module: nn.Module, rule: Rule, governed: Collection[str], shared: Shared
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules, ``module`` itself or inside it, that ``rule`` makes run otherwise, and how.

    Kernels stand in for what is inside ``module`` and has no rule of its own (``governed``). ``shared``: what the
    modules under one policy share.
    """
    owner = Owner(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if rule.action == "keep":
        yield path, module, KeepRunner(owner)
    elif rule.action == "checkpoint" and not rule.keep:
        yield path, module, CheckpointRunner(owner, module, rule, shared)
    else:
        tape = TapeRunner(owner, rule, shared)
        if rule.via == "hook" or rule.action != "recompute":
            yield path, module, tape
            return
        needs_tape = bool(rule.rerun or rule.keep or rule.price != PRICE)  # what kernels save themselves is less then
        if needs_tape:
            kernel = _find_named_kernel(owner, module, _on_tape(owner, rule))
        else:
            kernel = _find_named_kernel(owner, module, tape if rule.via == "auto" else None)
            if kernel is not None:
                kernel.lowering = lowering_of(rule)
        yield path, module, TapeRunner(owner, rule, shared, kernel) if needs_tape else kernel or tape
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(path, module, rule, governed)


def _find_named_kernel(owner: Owner, module: nn.Module, fallback: Runner | None) -> KernelRunner | None:
    """For a module that a rule names itself. A Linear that is named is a head."""
    if is_plain_linear(module):
        return KernelHeadRunner(owner, fallback and PlainRunner(owner, "it runs as it is"))
    return find_kernel(owner, module, fallback)


def _on_tape(owner: Owner, rule: Rule) -> PlainRunner | None:
    """What runs in the place of a kernel that stands in on CUDA alone."""
    return PlainRunner(owner) if rule.via == "auto" else None


def _kernels_inside(
    path: str, module: nn.Module, rule: Rule, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed or is_decorated(child):
            continue
        owner = Owner(f"{child_path} ({type(child).__name__})")
        kernel = find_inner_kernel(owner, child, module, _on_tape(owner, rule))
        if kernel is not None:
            yield child_path, child, kernel
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(child_path, child, rule, governed)
