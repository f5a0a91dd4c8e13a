"""How a module under a policy runs its forward: one runner a module, chosen from its rule and from what it computes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recompute.engine.context import base_of, surroundings
from recompute.engine.recipe import Owner, local
from recompute.engine.region import KeepSpan, Region, Scope, is_recording
from recompute.policy.model import Rule
from recompute.recognize import GatedMLP, Norm, find_gated_mlp, find_norm, is_formula, is_silu

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
class KeepRunner:
    """``action: keep``: what autograd saves is kept, also inside a region that drops."""

    owner: Owner
    note: str = "everything is kept"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        with KeepSpan(self.owner):
            return forward(*args, **kwargs)


class RegionRunner:
    """The whole forward is a region."""

    def __init__(self, owner: Owner, module: nn.Module, *, drops_outputs: bool):
        self.owner = owner
        self.regions = _Regions(owner, drops_outputs=drops_outputs)
        self.regions.over(module, running=False)
        self.note = "hook: runs again from its input" if drops_outputs else "runs again from its inputs"

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        return self.regions.over(module).run(forward, (module,), args, kwargs)


class GatedMLPRunner:
    """The product of a gated MLP, which its down-projection saves, and the activation are regenerated; no GEMM is."""

    note = "hook: activation and product run again from gate and up"

    def __init__(self, owner: Owner, module: nn.Module, parts: GatedMLP):
        self.owner = owner
        self.parts = parts
        self.regions = _Regions(owner, drops_outputs=True)
        self.regions.over(getattr(module, parts.activation), running=False)

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if not is_active(module):
            return forward(*args, **kwargs)
        x = _only_argument(args, kwargs)
        gate, up, down, activation = (getattr(module, name) for name in _names(self.parts))
        product = functools.partial(_product, activation)
        # Not in the traced order (gate, activation, up), which no result depends on.
        return down(self.regions.over(activation).run(product, (activation,), (gate(x), up(x)), {}))


class _Regions:
    """The region over a module's forward, made anew where it was known to be pure and that may have changed."""

    def __init__(self, owner: Owner, *, drops_outputs: bool):
        self._owner = owner
        self._drops_outputs = drops_outputs
        self._region: Region | None = None
        self._made_for: list[Any] = []

    def over(self, module: nn.Module, *, running: bool = True) -> Region:
        # The module itself is not among these, as replicas of it run in the same region, and hold this.
        made_for = [base_of(module), _is_hooked(module)]
        if self._region is None or self._region.pure:  # what a trace takes for given, as a dropout's probability of 0
            made_for += [
                value
                for name, value in vars(module).items()
                if name[0] != "_" and name != "training" and not isinstance(value, Tensor)
            ]
        same = len(made_for) == len(self._made_for) and all(map(operator.is_, made_for, self._made_for))
        if self._region is None or not same:
            modules = list(module.modules())
            # A trace patches nn.Module for all threads: not while forward runs.
            pure = not running and len(modules) == 1 and not _is_hooked(module) and is_formula(module)
            beyond = surroundings(modules)
            self._region = Region(self._owner, drops_outputs=self._drops_outputs, pure=pure, beyond=beyond)
            self._made_for = made_for if pure else made_for[:2]
        return self._region


def _product(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


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
    path: str, module: nn.Module, rule: Rule, governed: Collection[str]
) -> Iterator[tuple[str, nn.Module, Runner]]:
    """The modules, ``module`` itself or inside it, that ``rule`` makes run otherwise, and how.

    ``recompute`` goes down to the largest modules that run no GEMM and have no rule of their own (``governed``).
    """
    owner = Owner(f"{path} ({type(module).__name__})" if path else type(module).__name__)
    if rule.action == "keep":
        yield path, module, KeepRunner(owner)
    elif rule.action == "checkpoint":
        yield path, module, RegionRunner(owner, module, drops_outputs=False)
    elif (runner := _regenerating(owner, module, rule)) is not None:
        yield path, module, runner
    else:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if child_path not in governed:
                yield from choose(child_path, child, rule, governed)


def _regenerating(owner: Owner, module: nn.Module, rule: Rule) -> Runner | None:
    """The runner for a module that comes back without running a GEMM again; None for any other module."""
    hook: Runner | None = None
    leaves = all(not any(child.children()) for child in module.children())
    parts = find_gated_mlp(module) if leaves and 4 <= len(list(module.children())) <= 6 else None
    if parts is not None and not _is_cheap(getattr(module, parts.activation)):
        parts = None
    if parts is not None:
        hook = GatedMLPRunner(owner, module, parts)
    elif _is_cheap(module):
        hook = RegionRunner(owner, module, drops_outputs=True)
    if hook is None or rule.via == "hook":
        return hook
    fallback = hook if rule.via == "auto" else None
    if parts is not None:
        *projections, activation = (getattr(module, name) for name in _names(parts))
        if all(map(_is_plain_linear, projections)) and not _is_hooked(activation) and is_silu(activation):
            return KernelMLPRunner(owner, parts, activation, fallback)
    elif leaves and (norm := find_norm(module)) is not None:
        return KernelNormRunner(owner, norm, fallback)
    return hook


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


def _is_cheap(module: nn.Module) -> bool:
    """Whether running ``module`` again runs no GEMM, convolution or embedding: it has no weight matrix."""
    return type(module).forward is not nn.Module.forward and all(
        parameter.dim() <= 1 or isinstance(owner, _NORMS)
        for owner in module.modules()
        for parameter in owner.parameters(recurse=False)
    )


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
