"""Finds the regions of a model, in the order in which they run, and which of them run alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from recompute.attach.apply import AppliedPolicy, apply
from recompute.attach.module_entries import module_entries, paths_around
from recompute.attach.runners import RegionRunner
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.host.offload import OffloadRegion
from recompute.engine.reachable_objects import base_of
from recompute.errors import ModelError, warn
from recompute.estimation.layer_stacks import structure_of
from recompute.policy.matching import assign
from recompute.policy.rules import BLOCK, NO_RULES, Policy, Rule
from recompute.profiling.candidates import (
    HOOK,
    KEEP,
    TILE,
    Candidate,
    candidates_of,
    head_candidates,
    recomputing_rule,
    rerunning_rule,
)
from recompute.profiling.cost_table import rule_beside_head
from recompute.profiling.dry_run import DryRun
from recompute.substitution.kernel_runner import KernelRunner, is_plain_linear, kernel_of
from recompute.substitution.norm import find_norm

LAYERS = (BLOCK, "*Layer", "*Block")
"""The types of modules that the presets ``elementwise`` and ``auto`` govern as layers or blocks."""


@dataclass(eq=False)
class RegionKind:
    """Regions that run alike: the same class, the same ops on tensors of the same shapes. Each kind is one object."""

    name: str
    candidates: list[Candidate]
    """The first one is the region as it is."""


@dataclass(frozen=True)
class StepLayout:
    """A step's parts in the order of forward: before the regions, the regions, after them."""

    paths: tuple[str, ...]
    """The path of each part; "" where no rule can match: before the regions, and after them without kernels."""
    kinds: tuple[RegionKind, ...]
    """The kind of each path."""
    regions: Mapping[str, nn.Module]
    """The regions by path, in order: all of ``paths`` but the first and the last."""
    also: tuple[str, ...] = ()
    """Modules after the regions that also get the last path's rule, as ``rule_beside_head`` changes it."""

    def rules(self, chosen: Sequence[Candidate]) -> dict[str, Mapping[str, Any] | None]:
        """By path, when each place runs by one of these candidates."""
        found = {path: one.rule for path, one in zip(self.paths, chosen, strict=True) if path}
        rule = chosen[-1].rule
        return found | dict.fromkeys(self.also, None if rule is None else rule_beside_head(rule))


def find_regions(model: nn.Module, match: str | Sequence[str] | None) -> dict[str, nn.Module]:
    """The outermost modules inside of ``model`` at paths that ``match`` selects; without ``match``, the layers.

    Raises ``ModelError`` if there are none, and ``PolicyError`` for a glob that is not valid.
    """
    rule = Rule(type=LAYERS, action="keep") if match is None else Rule(match=match, action="keep")
    entries, modules = module_entries(model, type(model).__name__)
    found = assign(Policy(rules=[rule]), entries).keys() - {""}
    outermost = [path for path in modules if path in found and found.isdisjoint(paths_around(path))]
    if not outermost:
        what = f"matches {match!r}" if match is not None else "repeats, or is of a class *Layer or *Block"
        raise ModelError(
            f"{type(model).__name__}: expected regions to plan for; no module inside of it {what}. Name them by a glob "
            "over module paths, recompute.profile(model, batch, match='blocks.*'), and pass that profile to plan"
        )
    return {path: modules[path] for path in outermost}


def discover_layout(
    run: DryRun, match: str | Sequence[str] | None, *, kernels: bool, compress: bool = False
) -> StepLayout:
    """Run forward with all regions under the policy that holds least, to see their order and their ops.

    kernels: whether to offer kernels where they can stand in, on whatever device.
    compress: whether to offer ways that hold codes of 8 bits.

    Warns with ``PolicyWarning`` of modules that do not run exactly once. They count as part of the code around them.
    """
    regions = find_regions(run.model, match)
    order, later, logits, tokens = _order(run, regions)
    for path in regions:
        if (times := order.count(path)) != 1:
            warn(f"profile: {path} runs {times} times in a forward, not once, so no rule is tried for it")
    regions = {path: regions[path] for path in order if path in regions and order.count(path) == 1}
    if not regions:
        raise ModelError(f"{type(run.model).__name__}: expected regions that run once in a forward; found none")
    by_hooks = _plans(run, regions, HOOK)
    stand_ins = _with_kernels(run.model, regions) if kernels else {}
    with_mlps = _with_mlps(run.model, regions) if kernels else set()
    by_kernels = _plans(run, stand_ins, run.via) if stand_ins else {}
    keys = {path: _likeness(module, by_hooks.get(path)) for path, module in regions.items()}
    kinds: dict[Any, RegionKind] = {}
    # The last of those that are alike counts. The first one has other neighbours than the rest.
    for key, path in {key: path for path, key in keys.items()}.items():
        candidates = candidates_of(
            by_hooks.get(path),
            by_kernels.get(path),
            run.via if path in stand_ins else None,
            on_a_tape=stand_ins.get(path, False),
            in_tiles=run.via if path in with_mlps and tokens[path] > TILE else None,
            compress=compress,
        )
        kinds[key] = RegionKind(base_of(regions[path]).__name__, candidates)
    name, as_it_is = type(run.model).__name__, Candidate(KEEP, None, 0)
    before = RegionKind(f"{name}: before the first region", [as_it_is])
    after = RegionKind(f"{name}: head and loss", [as_it_is])
    replaced = list(_with_kernels(run.model, later)) if kernels else []
    *also, last = replaced or [""]
    if replaced:
        after.candidates += head_candidates(run.via, later[last], logits.get(last))
    found = [kinds[key] for key in keys.values()]
    return StepLayout(("", *regions, last), (before, *found, after), regions, tuple(also))


class _Order(NamedTuple):
    """Modules as a forward runs them."""

    regions: list[str]
    """Their paths in the order of forward."""
    later: dict[str, nn.Module]
    """The norms after all regions, and the last Linear there, which is the head if the model has one."""
    returned: dict[str, Tensor]
    """The output of each Linear, on ``meta``."""
    tokens: dict[str, int]
    """The number of vectors in each region's input."""


def _order(run: DryRun, regions: Mapping[str, nn.Module]) -> _Order:
    order: list[str] = []
    tokens: dict[str, int] = {}
    returned: dict[str, Tensor] = {}
    others: list[tuple[str, int]] = []  # with how many regions had begun by then
    modules = dict(run.model.named_modules())
    with ExitStack() as stack:
        stack.enter_context(apply(run.model, policy_from_rules(dict.fromkeys(regions, rerunning_rule(HOOK)))))
        for path, module in modules.items():
            if path in regions:
                note: Any = partial(order.append, path)
                hook = partial(_note_tokens, tokens, path)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            elif not any(module.children()) and not any(around in regions for around in paths_around(path)):
                note = partial(lambda path: others.append((path, len(order))), path)
            else:
                continue
            stack.callback(module.register_forward_pre_hook(lambda *_, note=note: note()).remove)
            if isinstance(module, nn.Linear):
                stack.callback(module.register_forward_hook(partial(_note_output, returned, path)).remove)
        run.forward()
    paths = list(dict.fromkeys(path for path, begun in others if begun == len(order)))
    norms = [path for path in paths if find_norm(modules[path]) is not None]
    heads = [path for path in paths if is_plain_linear(modules[path])]
    return _Order(order, {path: modules[path] for path in (*norms, *heads[-1:])}, returned, tokens)


def _note_tokens(tokens: dict[str, int], path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    inputs = (each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.is_floating_point())
    first = next(inputs, None)
    tokens[path] = 0 if first is None else first.shape[:-1].numel()


def _note_output(returned: dict[str, Tensor], path: str, module: nn.Module, args: tuple, output: Any) -> None:
    if isinstance(output, Tensor):  # not so of some subclasses of Linear
        returned[path] = torch.empty(output.shape, dtype=output.dtype, device="meta")


def policy_from_rules(rules: Mapping[str, Mapping[str, Any] | None], *, captures: bool = True) -> Policy:
    """The policy that gives each module, by path, a rule of these fields, or none.

    captures: whether modules may be captured. If not, ``kernels`` stand in for those that captured code generates.
    """
    alike: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for path, fields in rules.items():
        if fields is not None:
            if not captures and fields["action"] in ("recompute", "checkpoint"):
                fields = {**fields, "capture": False}
            alike.setdefault(repr(sorted(fields.items())), (fields, []))[1].append(path)
    found = [Rule(match=paths, **fields) for fields, paths in alike.values()]
    return Policy(name="profile", rules=found or NO_RULES)


def _plans(run: DryRun, regions: Collection[str], via: str) -> dict[str, SavePlan]:
    """The plan of each region, under a rule that may run every op again."""
    with apply(run.model, policy_from_rules(dict.fromkeys(regions, rerunning_rule(via)))) as handle:
        run.forward()  # a layer's kernels learn in it which Linears read its norm
        found: dict[str, SavePlan] = {}
        while True:  # where regions of several kinds begin alike, some took the plans of others, and have none yet
            before = len(found)
            run.forward()
            found = {path: plan for path, plan in handle.plans().items() if path in regions}
            if len(found) in (before, len(regions)):
                return found


def _with_kernels(model: nn.Module, regions: Mapping[str, nn.Module]) -> dict[str, bool]:
    """The regions in which kernels can stand in for something, and whether a tape runs around these kernels."""
    rules = dict.fromkeys(regions, recomputing_rule("auto"))
    with apply(model, policy_from_rules(rules, captures=False)) as handle:
        found = _around_kernels(handle, lambda kernel: True)
        taped = {attachment.path for attachment in handle._attachments if isinstance(attachment.runner, RegionRunner)}
    return {path: path in taped for path in regions if path in found}


def _with_mlps(model: nn.Module, regions: Mapping[str, nn.Module]) -> set[str]:
    """The paths of MLPs that a kernel can compute in tiles, and of the modules around them."""
    rule = {**recomputing_rule("auto"), "tile": TILE}
    with apply(model, policy_from_rules(dict.fromkeys(regions, rule))) as handle:
        return _around_kernels(handle, lambda kernel: kernel.has_mlp)


def _around_kernels(handle: AppliedPolicy, counts: Callable[[KernelRunner], bool]) -> set[str]:
    kernels = [(each.path, kernel) for each in handle._attachments if (kernel := kernel_of(each.runner)) is not None]
    return {around for path, kernel in kernels if counts(kernel) for around in (path, *paths_around(path))}


def storages_that_may_travel(handle: AppliedPolicy) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each module under an offloading rule, by path, and the bytes of each storage that could travel in its forward."""
    for attachment in handle._attachments:
        for region in getattr(attachment.runner, "regions", ()):
            if isinstance(region, OffloadRegion):
                yield attachment.path, tuple(sorted(region.last_sizes, reverse=True))


def _likeness(module: nn.Module, plan: SavePlan | None) -> Any:
    """Equal for two modules that run alike."""
    structure = structure_of(module, numbers_count=False)
    if plan is None:
        return structure
    steps = tuple([(step.op, step.inputs, step.made, step.reason) for step in plan.steps])
    values = tuple([(*known.layout[:2], known.layout.dtype, known.step, known.slot) for known in plan.facts])
    return structure, steps, values, plan.saves
