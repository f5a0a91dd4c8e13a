"""Attaching a policy to a module tree, and taking it off again; the decorator."""

from __future__ import annotations

import copyreg
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn.parameter import is_lazy

from recompute.engine.context import RUNNER, reachable
from recompute.engine.recipe import Owner
from recompute.engine.region import Region, is_recording
from recompute.errors import AlreadyAppliedError, UnsupportedError, warn
from recompute.policy.loading import load_policy
from recompute.policy.matching import ModuleEntry, assign, unmatched_rules
from recompute.policy.model import Policy
from recompute.runners import Forward, KernelMLPRunner, KernelNormRunner, RegionRunner, RootRunner, Runner, choose

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


def apply(model: nn.Module, policy: PolicyLike) -> AppliedPolicy:
    """Put ``model`` under ``policy``, in place.

    Module names, ``state_dict``, and copies and pickles of the model are as without it. So is the model itself where
    gradients are off or a module is in ``eval()`` mode, but for kernels, which stand in there too. If anything fails,
    the model is as before.

    policy: a ``Policy``, a mapping, the path of a policy file, or the name of a preset.
    Returns a handle with ``explain()``, ``stats()`` and ``remove()``, which is also a context manager that removes the
    policy at its end.
    Raises ``PolicyError`` for a bad policy, ``AlreadyAppliedError`` where a module is already under one,
    ``UnsupportedError`` where a module cannot be put under one. Warns with ``PolicyWarning`` of rules without effect.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recompute.apply takes a torch.nn.Module, got {type(model).__name__}")
    policy = load_policy(policy)
    _refuse_governed(model)
    attachments = _attachments(model, policy)
    _attach(attachments)
    return AppliedPolicy(policy, attachments)


@dataclass(frozen=True)
class Stats:
    """Totals since the policy was applied, over the modules that it governs."""

    frames: int
    """Forward runs of a region."""
    dropped_tensors: int
    """Saved tensors dropped, each storage counted once."""
    dropped_nbytes: int
    kept_nbytes: int
    """Bytes saved in regions that could not be dropped."""
    regenerations: int
    """Times that backward ran a region again."""


class AppliedPolicy:
    """A policy on a model. As a context manager it removes itself at the end."""

    def __init__(self, policy: Policy, attachments: list[_Attachment]):
        self.policy = policy
        self._attachments = attachments

    def stats(self) -> Stats:
        """What was dropped and regenerated since the policy was applied."""
        owners = [attachment.runner.owner for attachment in self._attachments]
        return Stats(*(sum(getattr(owner, name) for owner in owners) for name in Stats.__dataclass_fields__))

    def explain(self) -> str:
        """A table: which modules got which rule, how they come back, and what a forward drops of them.

        Modules whose paths differ in their indices alone, and that are treated alike, share a line. Bytes are a mean
        over the forward runs so far.
        """
        groups: dict[tuple[str, ...], list[Owner]] = {}
        for attachment in self._attachments:
            pattern = re.sub(r"\d+", "*", attachment.path) or "(the model)"
            rule = "-" if attachment.rule is None else f"rules[{attachment.rule}]: {self._action(attachment.rule)}"
            key = pattern, type(attachment.module).__name__, rule, attachment.runner.note
            groups.setdefault(key, []).append(attachment.runner.owner)
        rows = []
        for (pattern, type_name, rule, note), owners in groups.items():
            frames = sum(owner.frames for owner in owners)
            dropped = sum(owner.dropped_nbytes for owner in owners)
            kept = sum(owner.kept_nbytes for owner in owners)
            per_forward = [f"{nbytes / frames:,.0f}" if frames else "" for nbytes in (dropped, kept)]
            rows.append((pattern, len(owners), type_name, rule, note, *per_forward))
        headers = ("module", "count", "class", "rule", "in backward", "bytes dropped", "bytes kept")
        return f"policy {self.policy.name}\n" + tabulate(rows, headers, disable_numparse=True)

    def _action(self, rule: int) -> str:
        return self.policy.rules[rule].action

    def remove(self) -> None:
        """Take the policy off: the model is what it was. Graphs that were built under it still run backward."""
        for attachment in self._attachments:
            _detach(attachment)

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<policy {self.policy.name!r} on {len(self._attachments)} modules>"


@dataclass(frozen=True)
class _Attachment:
    path: str
    module: nn.Module
    rule: int | None
    runner: Runner


def _attachments(model: nn.Module, policy: Policy, name: str | None = None) -> list[_Attachment]:
    """What the policy does to which module; nothing is changed yet. ``name`` stands for the model's class's."""
    entries, modules = _entries(model, name or type(model).__name__)
    rules = assign(policy, entries)
    for message in unmatched_rules(policy, entries, rules):
        warn(f"policy {policy.name}: {message}")
    chosen: dict[int, _Attachment] = {}
    for path, index in rules.items():
        found = list(choose(path, modules[path], policy.rules[index], rules.keys()))
        for inside, module, runner in found:
            chosen.setdefault(id(module), _Attachment(inside, module, index, runner))
        _warn_of_little(policy, index, modules[path], [runner for _, _, runner in found])
    if any(policy.rules[index].action == "recompute" for index in rules.values()):
        root = chosen.get(id(model))
        inner, index_of_root = (None, None) if root is None else (root.runner, root.rule)
        owner = Owner(type(model).__name__) if inner is None else inner.owner
        chosen[id(model)] = _Attachment("", model, index_of_root, RootRunner(owner, inner))
    return list(chosen.values())


def _warn_of_little(policy: Policy, index: int, module: nn.Module, runners: list[Runner]) -> None:
    rule, name = policy.rules[index], type(module).__name__
    if not runners:
        message = f"nothing in {name} can be regenerated without running a GEMM again; use action: checkpoint"
    elif rule.via == "kernel" and not any(isinstance(runner, KernelNormRunner | KernelMLPRunner) for runner in runners):
        message = f"no kernel computes what {name} does; hooks regenerate it"
    else:
        return
    warn(f"policy {policy.name}: rules[{index}]: {message}")


def _entries(model: nn.Module, name: str) -> tuple[list[ModuleEntry], dict[str, nn.Module]]:
    """The modules that a policy on ``model`` may govern: all, but for those in instances of a decorated class."""
    entries = [ModuleEntry("", name)]
    modules = {"": model}
    pending: list[tuple[str, nn.Module, tuple[int | None, int | None]]] = [("", model, (None, None))]
    while pending:
        path, parent, around = pending.pop()
        for key, module in reversed(parent._modules.items()):
            if module is not None and not _is_decorated(module):
                layer = (int(key), len(parent)) if isinstance(parent, nn.ModuleList) and key.isdigit() else around
                pending.append((f"{path}.{key}" if path else key, module, layer))
        if path:
            entries.append(ModuleEntry(path, type(parent).__name__, *around))
            modules[path] = parent
    return entries, modules


def _attach(attachments: list[_Attachment]) -> None:
    """Have the modules run by their runners: all of them, or none if one cannot be."""
    for attachment in attachments:
        if "forward" in vars(attachment.module):
            raise UnsupportedError(
                f"{_name(attachment.path, attachment.module)} has had its forward replaced on the instance, where a "
                "policy cannot reach it. Apply the policy before whatever replaces it."
            )
    with ExitStack() as undo:
        for attachment in attachments:
            module = attachment.module
            undo.callback(_detach, attachment)
            module.__dict__[RUNNER] = attachment.runner
            try:
                module.__class__ = _policed(type(module))  # type: ignore[arg-type]
            except TypeError as error:
                raise UnsupportedError(
                    f"{_name(attachment.path, module)} cannot be put under a policy: {error}"
                ) from error
        undo.pop_all()


def _detach(attachment: _Attachment) -> None:
    module = attachment.module
    if module.__dict__.get(RUNNER) is attachment.runner:
        del module.__dict__[RUNNER]
        if (base := vars(type(module)).get("_recompute_base")) is not None:
            module.__class__ = base  # else another class was put over ours, which does nothing from now on


def _name(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


def _is_decorated(module: nn.Module) -> bool:
    return hasattr(type(module), "_recompute_decorated")


def _refuse_governed(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{_name(path, module)} is a ScriptModule, whose forward a policy cannot reach. Apply the policy to "
                "the module that it was scripted from."
            )
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise UnsupportedError(
                f"{_name(path, module)} has parameters without a shape yet. Run the model once, then apply the policy."
            )
        if RUNNER in vars(module) or _is_decorated(module):
            raise AlreadyAppliedError(
                f"{_name(path, module)} is already under a policy. Remove that one first (handle.remove(), or the "
                "decorator), or give the model one policy with the rules of both."
            )


@functools.cache
def _policed(base: Any) -> type[nn.Module]:
    """``base``, with its forward run by the module's runner; copies and pickles of an instance are of ``base``."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = self.__dict__.get(RUNNER)
        if runner is None:
            return super(policed, self).forward(*args, **kwargs)
        return runner.run(self, super(policed, self).forward, args, kwargs)

    namespace = {"forward": forward, "__reduce_ex__": _reduce(base), "_recompute_base": base}
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy(base)
    namespace |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    policed: Any = type(base.__name__, (base,), namespace)
    return policed


def _reduce(base: Any) -> Callable[..., Any]:
    original = base.__reduce_ex__

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        with _without_policy(self, base):
            reduced = original(self, protocol)
            if isinstance(reduced, tuple):
                function, args, *rest = reduced
                if function is copyreg.__newobj__:  # type: ignore[attr-defined]
                    function = base.__new__  # pickle insists that the other makes instances of the object's own class
                if rest and rest[0] is vars(self):
                    rest[0] = dict(vars(self))
                reduced = (function, args, *rest)
        return reduced

    return __reduce_ex__


def _deepcopy(base: Any) -> Callable[..., Any]:
    original = base.__deepcopy__

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:
        with _without_policy(self, base):
            return original(self, memo)

    return __deepcopy__


@contextmanager
def _without_policy(module: nn.Module, base: Any) -> Iterator[None]:
    """``module`` as it is without the policy, so that however it copies itself the copy is."""
    kind, runner = type(module), vars(module).pop(RUNNER, None)
    module.__class__ = base
    try:
        yield
    finally:
        module.__class__ = kind
        if runner is not None:
            vars(module)[RUNNER] = runner


def recompute(target: Any = None, *, policy: PolicyLike | None = None) -> Any:
    """Decorate an ``nn.Module`` class, a module or a function so that it runs under ``policy``.

    Use it as ``@recompute`` or ``@recompute(policy=...)``. Without a policy what is decorated is checkpointed: its
    inputs are held, and it runs again in backward. A class is decorated in place, and its instances get the policy
    when they first run; module paths in the policy start at the decorated module, whose own path is empty. A function
    is to a policy one module of an empty path whose class name is the function's name.

    Raises ``PolicyError``, ``AlreadyAppliedError`` and ``UnsupportedError`` as ``apply`` does.
    """
    if target is None:
        return functools.partial(recompute, policy=policy)
    loaded = None if policy is None else load_policy(policy)
    if isinstance(target, nn.Module):
        if loaded is None:
            _refuse_governed(target)
            _attach([_checkpointed(target)])
        else:
            apply(target, loaded)
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _decorate_class(target, loaded)
    if isinstance(target, (type, Policy)) or not callable(target):
        raise TypeError(
            "recompute decorates an nn.Module class, a module or a function, got "
            f"{target!r}; a policy goes in by name: @recompute(policy=...)"
        )
    return _decorate_function(target, loaded)


def _checkpointed(module: nn.Module) -> _Attachment:
    """What a decorator without a policy does."""
    return _Attachment("", module, None, RegionRunner(Owner(type(module).__name__), module, drops_outputs=False))


def _decorate_class(cls: Any, policy: Policy | None) -> type[nn.Module]:
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if RUNNER not in vars(self):
            _attach_decorated(self, cls, policy)
        decorated = vars(self)[RUNNER]
        if decorated.cls is not cls or decorated.runner is None:  # a decorated subclass's policy goes before
            return original(self, *args, **kwargs)
        return decorated.runner.run(self, functools.partial(original, self), args, kwargs)

    cls.__reduce_ex__ = _reduce(cls)
    if hasattr(cls, "__deepcopy__"):
        cls.__deepcopy__ = _deepcopy(cls)
    cls.forward = forward
    cls._recompute_decorated = True
    return cls


@dataclass(frozen=True)
class _Decorated:
    """In the place of a runner in an instance of a decorated class, which needs no other class."""

    cls: type[nn.Module]
    runner: Runner | None


def _attach_decorated(module: nn.Module, cls: type[nn.Module], policy: Policy | None) -> None:
    attachments = [_checkpointed(module)] if policy is None else _attachments(module, policy, cls.__name__)
    _attach([attachment for attachment in attachments if attachment.path])
    runner = next((attachment.runner for attachment in attachments if not attachment.path), None)
    vars(module)[RUNNER] = _Decorated(cls, runner)


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _decorate_function(function: Forward, policy: Policy | None) -> Forward:
    name = _function_name(function)
    if any(is_kind(function) for is_kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
        raise UnsupportedError(f"{name} is a generator or a coroutine: what it runs cannot be run again as one piece")
    action = "checkpoint"
    if policy is not None:
        index = assign(policy, [ModuleEntry("", name)]).get("")
        if index is None:
            warn(f"policy {policy.name}: no rule matches the function {name}: a module of an empty path and that class")
            return function
        action = policy.rules[index].action
        if policy.rules[index].via == "kernel":
            raise UnsupportedError(f"policy {policy.name}: rules[{index}]: no kernel stands in for the function {name}")
    if action == "keep":
        return function
    region = Region(Owner(name), drops_outputs=action == "recompute")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return function(*args, **kwargs)
        region.reach(reachable(function))  # which it may have been given only after it was decorated
        return region.run(function, (), args, kwargs)

    return run
