"""Attaching a policy to a module tree, and taking it off again; the decorator."""

from __future__ import annotations

import copyreg
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from recompute.attach.check_effect import check_effect, listed
from recompute.attach.explain import Attachment, Stats, explanation, stats
from recompute.attach.module_entries import module_entries
from recompute.attach.runners import FunctionCheckpointRunner, RootRunner, TapeRunner, unwrap_forward, wrap_forward
from recompute.attach.selection import choose_runners
from recompute.compiled.captured_region import CaptureCache
from recompute.compiled.runner import Forward, Runner
from recompute.compiled.under_torch_compile import refuse_first_run
from recompute.compiled.unwrap import uncompiled
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.stopwatch import Stopwatch
from recompute.errors import AlreadyAppliedError, UnsupportedError, warn
from recompute.policy.loading import load_policy
from recompute.policy.matching import ModuleEntry, assign
from recompute.policy.meaning import Kernels, Mechanism, meaning_of
from recompute.policy.rules import Policy, Rule
from recompute.substitution.head import KernelHeadRunner, LossObserver
from recompute.substitution.kernel_runner import kernel_of
from recompute.substitution.module_formula import is_decorated

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


def apply(model: nn.Module, policy: PolicyLike = "elementwise", *, strict: bool = True) -> AppliedPolicy:
    """Put ``model`` under ``policy``, in place.

    Module names, ``state_dict``, and copies and pickles of the model are as without it. So is the model itself where
    gradients are off or a module is in ``eval()`` mode, but for kernels, which stand in there too. If anything fails,
    the model is as before.

    policy: a ``Policy``, a mapping, the path of a policy file, or the name of a preset. The default changes no bit of
    any gradient.
    strict: whether a policy is refused that governs no module of ``model`` at all. One without a rule that drops
        anything (all ``keep``, or none) is meant so, and is not refused.
    Returns a handle with ``explain()``, ``stats()`` and ``remove()``, which is also a context manager that removes the
    policy at its end.
    Raises ``PolicyError`` for a bad policy, ``NoEffectError`` for one that governs nothing, ``AlreadyAppliedError``
    where a module is already under one, ``UnsupportedError`` where a module cannot be put under one. Warns with
    ``PolicyWarning`` of rules without effect.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"recompute.apply takes a torch.nn.Module, got {type(model).__name__}")
    policy = load_policy(policy)
    model = uncompiled(model)
    _refuse_governed(model)
    attachments = _attachments(model, policy, strict=strict)
    _attach(attachments)
    _policies[model] = policy
    return AppliedPolicy(policy, attachments, model)


_policies: weakref.WeakKeyDictionary[nn.Module, Policy] = weakref.WeakKeyDictionary()


def policy_on(model: nn.Module) -> Policy | None:
    """The policy that ``model`` itself was put under, while it is."""
    return _policies.get(uncompiled(model))


class AppliedPolicy:
    """A policy on a model. As a context manager it removes itself at the end."""

    def __init__(self, policy: Policy, attachments: list[Attachment], model: nn.Module):
        self.policy = policy
        self._model = weakref.ref(model)
        self._attachments = attachments
        self._stopwatch: Stopwatch | None = None

    def stats(self) -> Stats:
        """What was held, dropped and regenerated since the policy was applied; of a step, the difference of two.

        before = handle.stats()
        model(**batch).loss.backward()
        print(handle.stats() - before)
        """
        return stats(self._attachments, self._stopwatch)

    def time_regeneration(self) -> None:
        """Have ``stats()`` say, from now on, how long regenerating takes. That costs two events a time on CUDA."""
        if self._stopwatch is None:
            parameter = next((each for a in self._attachments for each in a.module.parameters()), None)
            self._stopwatch = Stopwatch(torch.device("cpu") if parameter is None else parameter.device)
        for attachment in self._attachments:
            attachment.runner.statistics.stopwatch = self._stopwatch

    def plans(self) -> dict[str, SavePlan]:
        """What the last forward kept and dropped, by module path: of the modules whose ops are written down.

        That is those under ``recompute``, or ``checkpoint`` with a ``keep``; "" is the model. Also on fake tensors. One
        is missing where a module did not do what it did the time before: run forward once more.
        """
        plans = {attachment.path: attachment.runner.statistics.plan for attachment in self._attachments}
        return {path: plan for path, plan in plans.items() if plan is not None and plan.is_complete}

    def explain(self) -> str:
        """A table of which modules got which rule, and what a forward drops of them; then each tensor, and why.

        Modules whose paths differ in their indices alone, and that are treated alike, share a line. A line has the
        bytes of one module's forward, a mean over those so far, and the bytes of all forwards of all its modules. The
        last line adds the latter up, to what ``stats()`` says.

        The tensors are those of one module's last forward: what autograd saved in it, which of its outputs autograd
        saved behind it, and what is held only so that others come back. What kernels save is counted and not listed.
        """
        return explanation(self.policy, self._attachments)

    def observe_losses(self, observe: LossObserver) -> bool:
        """Have ``observe(argmax, target, ignore_index)`` called for each loss that is computed without logits.

        argmax, target: int64, one number a token. Returns whether the policy has such losses computed.
        """
        kernels = [kernel_of(attachment.runner) for attachment in self._attachments]
        heads = [kernel for kernel in kernels if isinstance(kernel, KernelHeadRunner)]
        for head in heads:
            head.observe = observe
        return bool(heads)

    def remove(self) -> None:
        """Take the policy off: the model is what it was. Graphs that were built under it still run backward."""
        for attachment in self._attachments:
            _detach(attachment)
        if (model := self._model()) is not None and _policies.get(model) is self.policy:
            del _policies[model]

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<policy {self.policy.name!r} on {len(self._attachments)} modules>"


def _attachments(
    model: nn.Module,
    policy: Policy,
    name: str | None = None,
    cache: CaptureCache | None = None,
    *,
    strict: bool = True,
) -> list[Attachment]:
    """What the policy does to which module; nothing is changed yet.

    name: stands for the model's class's. cache: what these regions share with equal ones of other instances.
    strict: as ``apply`` takes it.
    """
    cache = CaptureCache() if cache is None else cache
    name = name or type(model).__name__
    entries, modules = module_entries(model, name)
    rules = assign(policy, entries)
    check_effect(policy, name, entries, rules, strict=strict)
    without_kernel: dict[int, dict[str, None]] = {}
    chosen: dict[int, Attachment] = {}
    meanings = [meaning_of(rule) for rule in policy.rules]
    parts = {path for path, i in rules.items() if meanings[i].extends_inward and _governor(path, rules) == i}
    governed = rules.keys() - parts
    for path, index in rules.items():
        if path in parts:  # of the region of the module around it
            continue
        meaning = meanings[index]
        found = list(choose_runners(path, modules[path], meaning, governed, cache))
        for inside, module, runner in found:
            chosen.setdefault(id(module), Attachment(inside, module, index, runner))
        if meaning.kernels is Kernels.EVERYWHERE and all(kernel_of(runner) is None for _, _, runner in found):
            without_kernel.setdefault(index, {})[type(modules[path]).__name__] = None
    for index, classes in without_kernel.items():
        does = "does" if len(classes) == 1 else "do"
        what = f"no kernel computes what {listed(list(classes))} {does}; hooks regenerate it"
        warn(f"policy {policy.name}: rules[{index}]: {what}")
    if any(meanings[index].drops_outputs for index in rules.values()):
        root = chosen.get(id(model))
        inner, index_of_root = (None, None) if root is None else (root.runner, root.rule)
        statistics = RegionStatistics(type(model).__name__) if inner is None else inner.statistics
        chosen[id(model)] = Attachment("", model, index_of_root, RootRunner(statistics, inner))
    return list(chosen.values())


def _governor(path: str, rules: Mapping[str, int]) -> int | None:
    """The rule of the nearest module around ``path`` that has one."""
    while path:
        path = path.rpartition(".")[0]
        if path in rules:
            return rules[path]
    return None


def _attach(attachments: list[Attachment]) -> None:
    """Have the modules run by their runners: all of them, or none if one cannot be."""
    for attachment in attachments:
        if "forward" in vars(attachment.module) and not _is_bare_root(attachment):
            raise UnsupportedError(
                f"{_name(attachment.path, attachment.module)} has had its forward replaced on the instance, where a "
                "policy cannot reach it. Apply the policy before whatever replaces it."
            )
    with ExitStack() as undo:
        for attachment in attachments:
            module = attachment.module
            undo.callback(_detach, attachment)
            module.__dict__[RUNNER] = attachment.runner
            if "forward" in vars(module):
                module.__dict__["forward"] = wrap_forward(vars(module)["forward"], module, attachment.runner)
            try:
                module.__class__ = _policed(type(module))  # type: ignore[arg-type]
            except TypeError as error:
                raise UnsupportedError(
                    f"{_name(attachment.path, module)} cannot be put under a policy: {error}"
                ) from error
        undo.pop_all()


def _detach(attachment: Attachment) -> None:
    module = attachment.module
    if module.__dict__.get(RUNNER) is attachment.runner:
        del module.__dict__[RUNNER]
        if (inner := unwrap_forward(vars(module).get("forward"))) is not None:
            module.__dict__["forward"] = inner  # else something is around ours, which does nothing from now on
        if (base := vars(type(module)).get("_recompute_base")) is not None:
            module.__class__ = base  # else another class was put over ours, which does nothing from now on


def _is_bare_root(attachment: Attachment) -> bool:
    """The model, of which no rule says anything: what other libraries replace its forward by may run in a scope."""
    runner = attachment.runner
    return not attachment.path and isinstance(runner, RootRunner) and runner.inner is None


def _name(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


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
        if RUNNER in vars(module) or is_decorated(module):
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
        if runner is None:  # removed since, when ``self`` may no longer be of this class
            return base.forward(self, *args, **kwargs)
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

    Use it as ``@recompute`` or ``@recompute(policy=...)``. Without a policy all of what is decorated gets what the
    preset ``elementwise`` gives a layer, which changes no bit of any gradient. A class is decorated in place, and its
    instances get the policy when they first run; module paths in the policy start at the decorated module, whose own
    path is empty. A function is to a policy one module of an empty path whose class name is the function's name.

    Raises ``PolicyError``, ``NoEffectError``, ``AlreadyAppliedError`` and ``UnsupportedError`` as ``apply`` does.
    """
    if target is None:
        return functools.partial(recompute, policy=policy)
    loaded = _ALL_OF_IT if policy is None else load_policy(policy)
    if isinstance(target, nn.Module):
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


_ALL_OF_IT = Policy(name="elementwise", rules=[Rule(match="**", action="recompute", via="hook")])


def _decorate_class(cls: Any, policy: Policy) -> type[nn.Module]:
    original = cls.forward
    cache = CaptureCache()  # of all instances

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if RUNNER not in vars(self):
            if torch.compiler.is_compiling():
                refuse_first_run()
            _attach_decorated(self, cls, policy, cache)
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


def _attach_decorated(module: nn.Module, cls: type[nn.Module], policy: Policy, cache: CaptureCache) -> None:
    vars(module)[RUNNER] = _Decorated(cls, None)  # so that a look at it runs what was decorated
    try:
        attachments = _attachments(module, policy, cls.__name__, cache)
        _attach([attachment for attachment in attachments if attachment.path])
    except BaseException:
        del vars(module)[RUNNER]
        raise
    runner = next((attachment.runner for attachment in attachments if not attachment.path), None)
    vars(module)[RUNNER] = _Decorated(cls, runner)


def _function_name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _decorate_function(function: Forward, policy: Policy) -> Forward:
    name = _function_name(function)
    if any(is_kind(function) for is_kind in (isgeneratorfunction, iscoroutinefunction, isasyncgenfunction)):
        raise UnsupportedError(f"{name} is a generator or a coroutine: what it runs cannot be run again as one piece")
    entries = [ModuleEntry("", name)]
    rules = assign(policy, entries)
    check_effect(policy, f"the function {name}, one of an empty path and that class", entries, rules, strict=True)
    if not rules:
        return function
    (index,) = rules.values()
    meaning = meaning_of(policy.rules[index])
    if meaning.kernels is Kernels.EVERYWHERE:
        raise UnsupportedError(f"policy {policy.name}: rules[{index}]: no kernel stands in for the function {name}")
    if not meaning.drops:
        return function
    statistics = RegionStatistics(name)
    runner: Runner
    if meaning.mechanism is Mechanism.TAPE:
        runner = TapeRunner(statistics, meaning, CaptureCache())
    else:
        runner = FunctionCheckpointRunner(statistics, meaning)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return runner.run(None, function, args, kwargs)

    return run
