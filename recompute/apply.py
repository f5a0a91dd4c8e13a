"""Attaching a policy to a module tree, and taking it off again; the decorator."""

from __future__ import annotations

import copyreg
import functools
import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from tabulate import tabulate
from torch import Tensor, nn

from recompute.engine.context import RUNNER, reachable
from recompute.engine.recipe import Owner
from recompute.engine.region import Region, is_recording
from recompute.errors import AlreadyAppliedError, PolicyWarning, UnsupportedError
from recompute.policy.loading import load_policy
from recompute.policy.matching import ModuleEntry, assign, unmatched_rules
from recompute.policy.model import Policy, Rule
from recompute.runners import Forward, KernelMLPRunner, KernelNormRunner, RootRunner, Runner, choose

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]
Target = TypeVar("Target")

_KEY = RUNNER  # in the __dict__, of which a DataParallel replica gets a copy


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
        self._attachments = []

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


def _attachments(model: nn.Module, policy: Policy) -> list[_Attachment]:
    """What the policy does to which module; nothing is changed yet."""
    entries, modules = _entries(model)
    rules = assign(policy, entries)
    for message in unmatched_rules(policy, entries, rules):
        warnings.warn(f"policy {policy.name}: {message}", PolicyWarning, stacklevel=3)
    chosen: dict[str, _Attachment] = {}
    for path, index in rules.items():
        rule = policy.rules[index]
        found = list(choose(path, modules[path], rule, rules.keys()))
        chosen.update({path: _Attachment(path, module, index, runner) for path, module, runner in found})
        _warn_of_little(policy, index, modules[path], [runner for _, _, runner in found])
    if any(policy.rules[index].action == "recompute" for index in rules.values()):
        root = chosen.pop("", None)
        inner, index_of_root = (None, None) if root is None else (root.runner, root.rule)
        owner = Owner(type(model).__name__) if inner is None else inner.owner
        chosen[""] = _Attachment("", model, index_of_root, RootRunner(owner, inner))
    return list(chosen.values())


def _warn_of_little(policy: Policy, index: int, module: nn.Module, runners: list[Runner]) -> None:
    rule, name = policy.rules[index], type(module).__name__
    if not runners:
        message = f"nothing in {name} can be regenerated without running a GEMM again; use action: checkpoint"
    elif rule.via == "kernel" and not any(isinstance(runner, KernelNormRunner | KernelMLPRunner) for runner in runners):
        message = f"no kernel computes what {name} does; hooks regenerate it"
    else:
        return
    warnings.warn(f"policy {policy.name}: rules[{index}]: {message}", PolicyWarning, stacklevel=4)


def _entries(model: nn.Module) -> tuple[list[ModuleEntry], dict[str, nn.Module]]:
    modules = dict(model.named_modules())
    entries = []
    layers: dict[str, tuple[int | None, int | None]] = {"": (None, None)}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if path:
            container = modules.get(parent)
            if isinstance(container, nn.ModuleList):
                layers[path] = int(name), len(container)
            else:
                layers[path] = layers.get(parent, (None, None))
        entries.append(ModuleEntry(path, type(module).__name__, *layers[path]))
    return entries, modules


def _attach(attachments: list[_Attachment]) -> None:
    """Have the modules run by their runners: all of them, or none if one cannot be."""
    for attachment in attachments:
        _refuse(attachment)
    with ExitStack() as undo:
        for attachment in attachments:
            module = attachment.module
            undo.callback(_detach, attachment)
            module.__dict__[_KEY] = attachment.runner
            try:
                module.__class__ = _policed(type(module))  # type: ignore[arg-type]
            except TypeError as error:
                raise UnsupportedError(f"{_name(attachment)} cannot be put under a policy: {error}") from error
        undo.pop_all()


def _detach(attachment: _Attachment) -> None:
    module = attachment.module
    if module.__dict__.get(_KEY) is attachment.runner:
        del module.__dict__[_KEY]
        if (base := vars(type(module)).get("_recompute_base")) is not None:
            module.__class__ = base  # else another class was put over ours, which does nothing from now on


def _name(attachment: _Attachment) -> str:
    name = type(attachment.module).__name__
    return f"module {attachment.path!r} ({name})" if attachment.path else f"the model ({name})"


def _refuse(attachment: _Attachment) -> None:
    module, name = attachment.module, _name(attachment)
    if _KEY in vars(module) or hasattr(type(module), "_recompute_policy"):
        raise AlreadyAppliedError(
            f"{name} is already under a policy. Remove that one first (handle.remove(), or the decorator), or give "
            "the model one policy with the rules of both."
        )
    if "forward" in vars(module):
        raise UnsupportedError(
            f"{name} has had its forward replaced on the instance, where a policy cannot reach it. Apply the policy "
            "before whatever replaces it."
        )


@functools.cache
def _policed(base: Any) -> type[nn.Module]:
    """``base``, with its forward run by the module's runner; copies and pickles of an instance are of ``base``."""

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = self.__dict__.get(_KEY)
        if runner is None:
            return base.forward(self, *args, **kwargs)
        return runner.run(self, base.forward, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _without_policy(base.__reduce_ex__(self, protocol), type(self), base)

    namespace = {"forward": forward, "__reduce_ex__": reduce, "_recompute_base": base}
    namespace |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(base.__name__, (base,), namespace)


def _without_policy(reduced: Any, policed: type, base: type) -> Any:
    if not isinstance(reduced, tuple):
        return reduced
    function, args, *rest = reduced
    if function is copyreg.__newobj__:  # type: ignore[attr-defined]
        # Pickle insists that this makes an instance of the object's own class.
        function = base.__new__
    args = tuple(base if arg is policed else arg for arg in args)
    if rest and isinstance(rest[0], dict):
        rest[0] = {key: value for key, value in rest[0].items() if key != _KEY}
    return (function, args, *rest)


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
    if isinstance(target, nn.Module):
        apply(target, _policy_for(policy, type(target).__name__))
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        return _decorate_class(target, _policy_for(policy, target.__name__))
    if isinstance(target, type) or not callable(target):
        raise TypeError(
            "recompute decorates an nn.Module class, a module or a function, got "
            f"{target!r}; a policy goes in by name: @recompute(policy=...)"
        )
    return _decorate_function(target, _policy_for(policy, _function_name(target)))


def _policy_for(policy: PolicyLike | None, name: str) -> Policy:
    if policy is not None:
        return load_policy(policy)
    return Policy(name="checkpoint", rules=(Rule(type=name, action="checkpoint"),))


def _decorate_class(cls: type[nn.Module], policy: Policy) -> type[nn.Module]:
    original, reduce = cls.forward, cls.__reduce_ex__

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _KEY not in vars(self):
            _attach_decorated(self, policy)
        runner = vars(self)[_KEY]
        return original(self, *args, **kwargs) if runner is None else runner.run(self, original, args, kwargs)

    cls.forward = forward
    cls.__reduce_ex__ = lambda self, protocol: _without_policy(reduce(self, protocol), cls, cls)  # type: ignore[method-assign]
    cls._recompute_policy = policy  # type: ignore[attr-defined]
    return cls


def _attach_decorated(module: nn.Module, policy: Policy) -> None:
    """Attach to a decorated class's instance, which needs no other class."""
    attachments = _attachments(module, policy)
    _attach([attachment for attachment in attachments if attachment.path])
    module.__dict__[_KEY] = next((attachment.runner for attachment in attachments if not attachment.path), None)


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _decorate_function(function: Forward, policy: Policy) -> Forward:
    name = _function_name(function)
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise UnsupportedError(f"{name} is a generator or a coroutine: what it runs cannot be run again as one piece")
    index = assign(policy, [ModuleEntry("", name)]).get("")
    if index is None:
        warnings.warn(
            f"policy {policy.name}: no rule matches the function {name}, a module of an empty path and that class name",
            PolicyWarning,
            stacklevel=3,
        )
    if index is None or policy.rules[index].action == "keep":
        return function
    if policy.rules[index].via == "kernel":
        raise UnsupportedError(f"policy {policy.name}: rules[{index}]: no kernel stands in for the function {name}")
    region = Region(Owner(name), drops_outputs=policy.rules[index].action == "recompute")

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            return function(*args, **kwargs)
        region.reach(reachable(function))  # which it may have been given only after it was decorated
        return region.run(function, (), args, kwargs)

    return run
