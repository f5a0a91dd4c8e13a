"""Finds how each module runs under a policy, replaces the modules' forwards in place, and puts them back."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from recompute.attach.check_effect import check_effect, listed
from recompute.attach.explain import Attachment
from recompute.attach.module_entries import module_entries, paths_around
from recompute.attach.runners import RootRunner, choose_runners, unwrap_forward, wrap_forward
from recompute.compiled.capture_cache import CaptureCache
from recompute.compiled.runner import Runner
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.region_statistics import RegionStatistics
from recompute.errors import AlreadyAppliedError, UnsupportedError, warn
from recompute.policy.matching import assign
from recompute.policy.meaning import Kernels, meaning_of
from recompute.policy.rules import Policy
from recompute.substitution.formulas import is_decorated, looking_once
from recompute.substitution.kernel_runner import kernel_of


def attachments_of(
    model: nn.Module,
    policy: Policy,
    cache: CaptureCache,
    *,
    name: str | None = None,
    strict: bool = True,
    decorated: bool = False,
) -> list[Attachment]:
    """The modules that the policy governs, with their runners. Nothing is changed yet.

    cache: shared with the regions of other instances.
    name: the model's class has this name to the rules; None: its own.
    strict: as ``apply`` takes it.
    decorated: whether a decorator is on the model. Then it is among the modules, whatever the rules are.
    """
    name = name or type(model).__name__
    entries, modules = module_entries(model, name, decorated=decorated)
    rules = assign(policy, entries)
    check_effect(policy, name, entries, rules, strict=strict, decorated=decorated)
    without_kernel: dict[int, dict[str, None]] = {}
    chosen: dict[int, Attachment] = {}
    meanings = [meaning_of(rule) for rule in policy.rules]
    governed = {}
    for path, index in rules.items():
        around = next((rules[each] for each in paths_around(path) if each in rules), None)
        if not (meanings[index].extends_inward and around == index):  # else a part of the region of that module
            governed[path] = index
    with looking_once():
        for path, index in governed.items():
            meaning = meanings[index]
            found = list(choose_runners(path, modules[path], meaning, governed, cache))
            for inside, module, runner in found:
                chosen.setdefault(id(module), Attachment(inside, module, index, runner))
            if meaning.kernels is Kernels.EVERYWHERE and all(kernel_of(runner) is None for _, _, runner in found):
                without_kernel.setdefault(index, {})[type(modules[path]).__name__] = None
    for index, classes in without_kernel.items():
        what = f"no kernel replaces {listed(list(classes))}, so hooks regenerate there. Write via: auto to allow that"
        warn(f"policy {policy.name}: rules[{index}]: {what}")
    if decorated or any(meanings[index].drops_outputs for index in rules.values()):
        root = chosen.get(id(model))
        inner, index_of_root = (None, None) if root is None else (root.runner, root.rule)
        statistics = RegionStatistics(type(model).__name__) if inner is None else inner.statistics
        chosen[id(model)] = Attachment("", model, index_of_root, RootRunner(statistics, inner))
    return list(chosen.values())


def attach(attachments: list[Attachment]) -> None:
    """Have the modules run by their runners: all of them, or none if one cannot be."""
    living = [(each, module) for each in attachments if (module := each.module) is not None]
    for attachment, module in living:
        runner = attachment.runner
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{_name(attachment.path, module)} is a ScriptModule, whose forward a policy cannot reach. Apply the "
                "policy to the module that it was scripted from, or write rules that leave it out."
            )
        # A forward that another library has put on the model itself may stay if the model is under no rule.
        is_bare_root = not attachment.path and isinstance(runner, RootRunner) and runner.inner is None
        if vars(module).get("forward") == MethodType(type(module).forward, module):
            del module.__dict__["forward"]  # its class's own, which removers of hooks leave there
        if "forward" in vars(module) and not is_bare_root:
            raise UnsupportedError(
                f"{_name(attachment.path, module)} has a forward that was set on the instance, where a policy cannot "
                "reach it. Apply the policy first, and replace forward afterwards. A device_map's hooks: "
                "remove_hook_from_submodules(model), apply, dispatch_model(model, model.hf_device_map)."
            )
    with ExitStack() as undo:
        for attachment, module in living:
            undo.callback(detach, module, attachment.runner)
            module.__dict__[RUNNER] = attachment.runner
            if "forward" in vars(module):
                module.__dict__["forward"] = wrap_forward(vars(module)["forward"], module, attachment.runner)
            if any("_recompute_base" in vars(base) for base in type(module).__mro__):
                continue  # a removed policy's class is still under another, as that of ``fully_shard``
            try:
                module.__class__ = _policed(type(module))
            except TypeError as error:
                raise UnsupportedError(
                    f"{_name(attachment.path, module)} cannot be put under a policy: {error}"
                ) from error
        undo.pop_all()


def detach(module: nn.Module, runner: Runner) -> None:
    """Have ``module`` run its own forward, if ``runner`` runs it."""
    if module.__dict__.get(RUNNER) is runner:
        del module.__dict__[RUNNER]
        if (inner := unwrap_forward(vars(module).get("forward"))) is not None:
            module.__dict__["forward"] = inner  # else something is around ours, and ours does nothing from now on
        if (base := vars(type(module)).get("_recompute_base")) is not None:
            module.__class__ = base  # else another class was put over ours, and ours does nothing from now on


def detach_all(model: nn.Module) -> Callable[[], None]:
    """Take the policies off ``model`` and off all inside, but for decorators of classes.

    Returns a function that puts back what was there.
    """
    governed = [
        (module, type(module), vars(module)[RUNNER], vars(module).get("forward"))
        for module in model.modules()
        if RUNNER in vars(module) and not is_decorated(module)
    ]
    for module, _, runner, _ in governed:
        detach(module, runner)

    def put_back() -> None:
        for module, cls, runner, forward in governed:
            module.__dict__[RUNNER] = runner
            if forward is not None:
                module.__dict__["forward"] = forward
            module.__class__ = cls

    return put_back


def _name(path: str, module: nn.Module) -> str:
    return f"module {path!r} ({type(module).__name__})" if path else f"the model ({type(module).__name__})"


def refuse_governed(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise UnsupportedError(
                f"{_name(path, module)} has uninitialized parameters. Run the model once, then apply the policy."
            )
        if is_decorated(module):
            raise AlreadyAppliedError(
                f"{_name(path, module)} is already under a policy: its class is decorated with one. Remove the "
                "decorator, or apply this policy to other modules."
            )
        if RUNNER in vars(module):
            raise AlreadyAppliedError(
                f"{_name(path, module)} is already under a policy. To replace it: recompute.apply(model, policy, "
                "replace=True). To remove it: remove() of the handle that apply returned. To have both, write one "
                "policy with the rules of both."
            )


_policed_classes: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()
"""Policed classes, by their bases. A class lives while it has modules: nothing here keeps it or its base alive."""


def _policed(base: Any) -> type[nn.Module]:
    """A subclass of ``base`` whose forward calls the module's runner. Copies and pickles are instances of ``base``."""
    known = _policed_classes.get(base)
    if known is not None:
        return known

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        runner = self.__dict__.get(RUNNER)
        if runner is None:  # removed since, when ``self`` may no longer be of this class
            return base.forward(self, *args, **kwargs)
        return runner.run(self, super(policed, self).forward, args, kwargs)

    namespace = {"forward": forward, "__reduce_ex__": reduce_without_policy(base), "_recompute_base": base}
    namespace["recompute_handle"] = property(_handle)
    if hasattr(base, "__deepcopy__"):
        namespace["__deepcopy__"] = deepcopy_without_policy(base)
    namespace |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    policed: Any = type(base.__name__, (base,), namespace)
    _policed_classes[base] = policed
    return policed


def _handle(module: nn.Module) -> object:
    handle = getattr(vars(module).get(RUNNER), "handle", None)
    if handle is None:
        raise AttributeError(
            f"{type(module).__name__!r} has no handle: its policy was applied to a model that contains it"
        )
    return handle


def reduce_without_policy(base: Any) -> Callable[..., Any]:
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


def deepcopy_without_policy(base: Any) -> Callable[..., Any]:
    original = base.__deepcopy__

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> Any:
        with _without_policy(self, base):
            return original(self, memo)

    return __deepcopy__


@contextmanager
def _without_policy(module: nn.Module, base: Any) -> Iterator[None]:
    """Inside, ``module`` is without its policy. So any copy that it makes of itself there has none either."""
    kind, runner = type(module), vars(module).pop(RUNNER, None)
    module.__class__ = base
    try:
        yield
    finally:
        module.__class__ = kind
        if runner is not None:
            vars(module)[RUNNER] = runner
