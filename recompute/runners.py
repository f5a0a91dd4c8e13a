"""How a module under a policy runs its forward: one runner a module, chosen from its rule and from what it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recompute.engine.context import surroundings
from recompute.engine.plan import PlanCache
from recompute.engine.recipe import local
from recompute.engine.region import KeepSpan, Region, Scope, is_recording
from recompute.engine.saved import Owner
from recompute.engine.setting import Setting
from recompute.engine.tape import TapeRegion
from recompute.policy.model import FAMILIES, Rule
from recompute.recognize import GatedMLP, Norm, find_gated_mlp, find_norm, is_silu

Forward = Callable[..., Any]


class Runner(Protocol):
    """Runs ``forward(*args, **kwargs)``, the module's own, or what stands in for it."""

    owner: Owner
    note: str
    """What it does, for ``explain``."""

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any: ...


def is_active(module: nn.Module) -> bool:
    """Whether a policy does anything: the module trains, and autograd records."""
    return module.training and is_recording()


@dataclass
class RootRunner:
    """Opens the scope in which outputs are dropped, around the model or around what its own rule says."""

    owner: Owner
    inner: Runner | None = None
    note: str = field(init=False)

    def __post_init__(self) -> None:
        scope = "outputs that come back are dropped wherever they are saved inside"
        self.note = scope if self.inner is None else f"{self.inner.note}; {scope}"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return self._inside(module, forward, args, kwargs)
        with Scope(self.owner):
            return self._inside(module, forward, args, kwargs)

    def _inside(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.inner is None:
            return forward(*args, **kwargs)
        return self.inner.run(module, forward, args, kwargs)


@dataclass
class PlainRunner:
    """Runs forward as it is: where a kernel stands in on CUDA alone, and a tape around sees the ops elsewhere."""

    owner: Owner
    note: str = "its ops are on the tape around it"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)


@dataclass
class KeepRunner:
    """``action: keep``: what autograd saves is kept, also inside a region that drops."""

    owner: Owner
    note: str = "everything is kept"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        with KeepSpan(self.owner):
            return forward(*args, **kwargs)


class CheckpointRunner:
    """``action: checkpoint``: the whole forward is run again from its inputs."""

    note = "its Python runs again from its inputs"

    def __init__(self, owner: Owner, module: nn.Module):
        self.owner = owner
        self._region = Region(owner, beyond=surroundings(module.modules()))

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        return self._region.run(forward, (module,), args, kwargs)


class TapeRunner:
    """``action: recompute``, or ``checkpoint`` with a ``keep``: ops run again, by a tape of the whole forward."""

    def __init__(self, owner: Owner, rule: Rule, openings: PlanCache):
        self.owner = owner
        self._region = TapeRegion(setting_of(owner, rule, openings))
        what = "all ops run again" if rule.action == "checkpoint" else "cheap ops run again"
        if rule.rerun:
            what += f" and {', '.join(rule.rerun)}"
        self.note = f"{what}; {', '.join(rule.keep)} kept" if rule.keep else what

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        return self._region.run(forward, args, kwargs)


def setting_of(owner: Owner, rule: Rule, openings: PlanCache | None = None) -> Setting:
    """What a rule says of each op."""
    if rule.action == "checkpoint":  # fewest bytes, whatever it costs
        return Setting(owner, rerun=set(FAMILIES) - {"collective"}, keep=rule.keep, price=0, openings=openings)
    return Setting(owner, rerun=rule.rerun, keep=rule.keep, openings=openings)


@dataclass
class KernelNormRunner:
    """``recompute.kernels.rms_norm`` stands in, also without gradients: training and inference compute the same."""

    owner: Owner
    norm: Norm
    fallback: Runner | None
    """Runs instead where the input is not on CUDA; None: the kernel's reference does."""
    note: str = field(init=False)

    def __post_init__(self) -> None:
        self.note = f"kernel: rms_norm ({self.norm.casting} casting)" + _elsewhere(self.fallback)

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.rms_norm import rms_norm

        x = _only_argument(args, kwargs)
        if self.fallback is not None and not x.is_cuda:
            return self.fallback.run(module, forward, args, kwargs)
        weight = None if self.norm.weight is None else getattr(module, self.norm.weight)
        if weight is not None and weight.shape != x.shape[-1:]:
            return forward(*args, **kwargs)  # broadcast, which the kernel does not do
        with _Owned(self.owner):
            return rms_norm(x, weight, self.norm.eps, self.norm.casting)


@dataclass
class KernelMLPRunner:
    """``recompute.kernels.gated_mlp`` stands in, as long as the parts are what they were and have no hooks."""

    owner: Owner
    parts: GatedMLP
    activation: nn.Module
    fallback: Runner | None
    note: str = field(init=False)

    def __post_init__(self) -> None:
        self.note = "kernel: gated_mlp" + _elsewhere(self.fallback)

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.gated_mlp import gated_mlp

        x = _only_argument(args, kwargs)
        if self.fallback is not None and not x.is_cuda:
            return self.fallback.run(module, forward, args, kwargs)
        gate, up, down, activation = (getattr(module, name) for name in _names(self.parts))
        is_plain = all(map(_is_plain_linear, (gate, up, down)))
        if not is_plain or activation is not self.activation or _is_hooked(activation):
            return forward(*args, **kwargs)  # an adapter or a hook has come since the policy was applied
        with _Owned(self.owner):
            return gated_mlp(x, gate.weight, up.weight, down.weight)


KERNELS = (KernelNormRunner, KernelMLPRunner)


class _Owned:
    """Recipes recorded inside are counted for ``owner``."""

    __slots__ = ("_outer", "_owner")

    def __init__(self, owner: Owner):
        self._owner = owner

    def __enter__(self) -> None:
        self._outer, local.owner = local.owner, self._owner
        self._owner.frames += is_recording()

    def __exit__(self, *error: object) -> None:
        local.owner = self._outer


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
        kernel = None if rule.via == "hook" else _kernel(owner, module, tape if rule.via == "auto" else None)
        yield path, module, kernel or tape
        if kernel is None and rule.via != "hook" and rule.action == "recompute":
            yield from _kernels_inside(path, module, governed)


def _kernels_inside(path: str, module: nn.Module, governed: Collection[str]) -> Iterator[tuple[str, nn.Module, Runner]]:
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path in governed:
            continue
        owner = Owner(f"{child_path} ({type(child).__name__})")
        kernel = _kernel(owner, child, PlainRunner(owner))
        if kernel is not None:
            yield child_path, child, kernel
        else:
            yield from _kernels_inside(child_path, child, governed)


def _kernel(owner: Owner, module: nn.Module, fallback: Runner | None) -> Runner | None:
    """The runner of the kernel that computes what ``module`` does, if there is one."""
    if any(any(child.children()) for child in module.children()):
        return None
    if 4 <= len(list(module.children())) <= 6 and (parts := find_gated_mlp(module)) is not None:
        *projections, activation = (getattr(module, name) for name in _names(parts))
        if all(map(_is_plain_linear, projections)) and not _is_hooked(activation) and is_silu(activation):
            return KernelMLPRunner(owner, parts, activation, fallback)
    elif (norm := find_norm(module)) is not None:
        return KernelNormRunner(owner, norm, fallback)
    return None


def _is_plain_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None and not _is_hooked(module)


def _is_hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its class's forward does."""
    return bool(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def _names(parts: GatedMLP) -> tuple[str, str, str, str]:
    return parts.gate, parts.up, parts.down, parts.activation


def _only_argument(args: tuple, kwargs: dict) -> Tensor:
    (x,) = (*args, *kwargs.values())
    return x


def _elsewhere(fallback: Runner | None) -> str:
    return "" if fallback is None else f" on CUDA, else {fallback.note}"
