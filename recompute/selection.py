"""Which runner each module gets, from its rule and from what it computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from recompute.engine.plan import PlanCache
from recompute.engine.saved import Owner
from recompute.kernel_runners import find_inner_kernel, find_kernel
from recompute.lowering import lowering_of
from recompute.policy.model import PRICE, Rule
from recompute.recognize import is_decorated
from recompute.runners import CheckpointRunner, KeepRunner, PlainRunner, Runner, TapeRunner


def choose(
    path: str, module: nn.Module, rule: Rule, governed: Collection[str], openings: PlanCache
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules, ``module`` itself or inside it, that ``rule`` makes run otherwise, and how.

    Kernels stand in for what is inside ``module`` and has no rule of its own (``governed``). ``openings``: the plans
    that the modules under one policy share.
    """
    owner = Owner(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if rule.action == "keep":
        yield path, module, KeepRunner(owner)
    elif rule.action == "checkpoint" and not rule.keep:
        yield path, module, CheckpointRunner(owner, module)
    else:
        tape = TapeRunner(owner, rule, openings)
        if rule.via == "hook" or rule.action != "recompute":
            yield path, module, tape
            return
        needs_tape = bool(rule.rerun or rule.keep or rule.price != PRICE)  # what kernels save themselves is less then
        if needs_tape:
            kernel = find_kernel(Owner(owner.name), module, _on_tape(owner, rule), is_named=True)
        else:
            kernel = find_kernel(owner, module, tape if rule.via == "auto" else None, is_named=True)
            if kernel is not None:
                kernel.lowering = lowering_of(rule)
        yield path, module, TapeRunner(owner, rule, openings, kernel) if needs_tape else kernel or tape
        if kernel is None or kernel.stands_in_for_parts:
            yield from _kernels_inside(path, module, rule, governed)


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
