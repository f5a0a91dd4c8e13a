"""The decorator `recompute`: classes, modules and functions that run under a policy of their own."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from types import MethodType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from recompute.attach.apply import PolicyLike, PolicyReport, checked_hooks, put_on
from recompute.attach.attachments import attach, attachments_of, deepcopy_without_policy, reduce_without_policy
from recompute.attach.check_effect import check_effect, has_effect
from recompute.attach.explain import Attachment
from recompute.attach.own_checkpointing import find_checkpointing, warn_of_checkpointing
from recompute.attach.runners import RegionRunner
from recompute.compiled.capture_cache import CaptureCache
from recompute.compiled.runner import Forward, Runner
from recompute.compiled.under_torch_compile import refuse_first_run
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.region import StateHook
from recompute.engine.region_statistics import RegionStatistics
from recompute.errors import AlreadyAppliedError, UnsupportedError
from recompute.policy.loading import load_policy
from recompute.policy.matching import ModuleEntry, assign
from recompute.policy.meaning import Kernels, meaning_of
from recompute.policy.rules import Policy, Rule
from recompute.substitution.settings import transformers_layer

Target = TypeVar("Target", bound=Callable[..., Any])
"""A class, a module or a function: what is decorated keeps its type."""


@overload
def recompute(target: Target, *, policy: PolicyLike | None = None, state_hooks: Sequence[StateHook] = ()) -> Target: ...


@overload
def recompute(
    target: None = None, *, policy: PolicyLike | None = None, state_hooks: Sequence[StateHook] = ()
) -> Callable[[Target], Target]: ...


def recompute(target: Any = None, *, policy: PolicyLike | None = None, state_hooks: Sequence[StateHook] = ()) -> Any:
    """Decorate an ``nn.Module`` class, a module or a function so that it runs under ``policy``.

    Use it as ``@recompute`` or ``@recompute(policy=...)``. Without a policy, the whole of what is decorated is treated
    as the preset ``elementwise`` treats a layer, which changes no bit of any gradient.

    To the policy, the decorated module is a ``block``, whatever its class is called. If it holds whole layers, as a
    model does, these layers are the blocks, as under ``apply``.

    A class is decorated in place, and its instances get the policy when they first run. Module paths in the policy
    start at the decorated module, whose own path is empty. To a policy, a function is one module with an empty path,
    whose class name is the function's name. ``state_hooks`` are as ``apply`` takes them.

    The decorated class, module or function has a ``recompute_handle`` with ``explain()`` and ``stats()``. A class's
    handle is about all instances that have run. A module's handle is the one that ``apply`` returns.

    Raises ``PolicyError``, ``NoEffectError``, ``AlreadyAppliedError`` and ``UnsupportedError`` as ``apply`` does.

    >>> @recompute.recompute
    ... def block(x):
    ...     return x.exp().sin()
    >>> block(torch.zeros(2, requires_grad=True)).sum().backward()
    """
    if target is None:
        return functools.partial(recompute, policy=policy, state_hooks=state_hooks)
    loaded = _ALL_OF_IT if policy is None else load_policy(policy)
    if isinstance(target, nn.Module):
        put_on(target, loaded, state_hooks, decorated=True)
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _decorate_class(target, loaded, CaptureCache(checked_hooks(state_hooks)))
    if isinstance(target, (type, Policy)) or not callable(target):
        raise TypeError(
            "recompute decorates an nn.Module class, a module or a function, got "
            f"{target!r}. Pass a policy as a keyword: @recompute(policy=...)"
        )
    return _decorate_function(target, loaded, CaptureCache(checked_hooks(state_hooks)))


_ALL_OF_IT = Policy(name="elementwise", rules=[Rule(match="**", action="recompute", via="hook")])


def _decorate_class(cls: Any, policy: Policy, cache: CaptureCache) -> type[nn.Module]:
    """cache: what all instances share."""
    if "_recompute_decorated" in vars(cls):
        raise AlreadyAppliedError(
            f"the class {cls.__name__} is already decorated with a policy. Decorate it once, with the rules of both."
        )
    original = cls.forward
    instances: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if RUNNER not in vars(self):
            if torch.compiler.is_compiling():
                refuse_first_run()
            _attach_decorated(self, cls, policy, cache)
            instances.add(self)
        decorated = vars(self)[RUNNER]
        if decorated.cls is not cls or decorated.runner is None:  # a decorated subclass's policy goes before
            return original(self, *args, **kwargs)
        bind = functools.partial if torch.compiler.is_compiling() else MethodType  # Dynamo does not know the latter
        return decorated.runner.run(self, bind(original, self), args, kwargs)

    cls.__reduce_ex__ = reduce_without_policy(cls)
    if hasattr(cls, "__deepcopy__"):
        cls.__deepcopy__ = deepcopy_without_policy(cls)
    cls.forward = forward
    layer = transformers_layer()
    if layer is not None and issubclass(cls, layer) and "__init_subclass__" in vars(layer):
        # Since 5.24 this puts its checkpoint around the forward of a class, and passes over all but the outermost.
        vars(layer)["__init_subclass__"].__func__(cls)
    cls._recompute_decorated = True
    cls.recompute_handle = PolicyReport(
        policy, lambda: [each for module in instances for each in vars(module)[RUNNER].attachments]
    )
    return cls


@dataclass(frozen=True)
class _Decorated:
    """Takes the place of a runner in an instance of a decorated class. The class's own forward calls it."""

    cls: type[nn.Module]
    runner: Runner | None
    attachments: list[Attachment]


def _attach_decorated(module: nn.Module, cls: type[nn.Module], policy: Policy, cache: CaptureCache) -> None:
    vars(module)[RUNNER] = _Decorated(cls, None, [])  # until it is attached, its own forward runs
    try:
        if has_effect(policy):
            warn_of_checkpointing(find_checkpointing(module), cls.__name__)
        attachments = attachments_of(module, policy, cache, name=cls.__name__, decorated=True)
        attach([attachment for attachment in attachments if attachment.path])
    except BaseException:
        del vars(module)[RUNNER]
        raise
    runner = next((attachment.runner for attachment in attachments if not attachment.path), None)
    vars(module)[RUNNER] = _Decorated(cls, runner, attachments)


def _decorate_function(function: Forward, policy: Policy, cache: CaptureCache) -> Forward:
    name = getattr(function, "__name__", type(function).__name__)
    if any(is_kind(function) for is_kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
        raise UnsupportedError(
            f"{name} is a generator or a coroutine, which cannot run again as a whole. Decorate a plain function"
        )
    entries = [ModuleEntry("", name, is_block=True)]
    rules = assign(policy, entries)
    check_effect(
        policy, f"the function {name} (its path is empty, its class is {name})", entries, rules, decorated=True
    )
    if not rules:
        return function
    (index,) = rules.values()
    meaning = meaning_of(policy.rules[index])
    if meaning.kernels is Kernels.EVERYWHERE:
        raise UnsupportedError(f"policy {policy.name}: rules[{index}]: no kernel stands in for the function {name}")
    if not meaning.has_effect:
        return function
    statistics = RegionStatistics(name)
    runner = RegionRunner(statistics, meaning, cache, None)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.run(None, function, args, kwargs)

    attachments = [Attachment("", None, index, runner, name)]
    run.recompute_handle = PolicyReport(policy, lambda: attachments)  # type: ignore[attr-defined]
    return run
