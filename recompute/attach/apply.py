"""`recompute.apply`: puts a policy on a model, and gives a handle that reports and takes it off again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from recompute.attach.attachments import attach, attachments_of, detach, detach_all, refuse_governed
from recompute.attach.check_effect import has_effect
from recompute.attach.explain import WIDTH, Attachment, Stats, explanation, stats
from recompute.attach.module_entries import module_entries
from recompute.attach.own_checkpointing import Checkpointing, find_checkpointing, said_of, warn_of_checkpointing
from recompute.attach.runners import regions_in
from recompute.compiled.capture_cache import CaptureCache
from recompute.compiled.captured_region import CapturedRegion
from recompute.compiled.under_torch_compile import uncompiled
from recompute.engine.checkpoint.module_state import RUNNER
from recompute.engine.checkpoint.region import StateHook
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.host.host_memory import POOL
from recompute.engine.region_statistics import Stopwatch
from recompute.policy.loading import load_policy
from recompute.policy.meaning import Kernels, meaning_of
from recompute.policy.rules import HEAD, Policy
from recompute.substitution.head import KernelHeadRunner, is_head, why_no_head
from recompute.substitution.head_operands import LossObserver
from recompute.substitution.kernel_runner import kernel_of

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


def apply(
    model: nn.Module,
    policy: PolicyLike = "elementwise",
    *,
    strict: bool = True,
    replace: bool = False,
    replace_checkpointing: bool = False,
    state_hooks: Sequence[StateHook] = (),
) -> AppliedPolicy:
    """Put ``model`` under ``policy``, in place.

    Module names, ``state_dict``, and copies and pickles of the model are the same as without a policy. Where gradients
    are off or a module is in ``eval()`` mode, the policy does nothing, except that kernels stand in there, too. The
    first forward in ``eval()`` mode with gradients warns of that. If this raises, the model is as before.

    policy: a ``Policy``, a mapping, the path of a policy file, or the name of a preset. The default changes no bit of
        any gradient.
    strict: whether to refuse a policy that governs no module of ``model`` at all. A policy without a rule that
        drops or offloads anything (only ``keep``, or no rules) is never refused.
    replace: whether to take off what policies there are on ``model`` and on modules inside, as when a notebook's cell
        runs again. A decorator of a class stays, and is refused.
    replace_checkpointing: whether to turn off the model's own checkpointing, of transformers, diffusers, timm or
        torch's ``checkpoint_wrapper``, until the policy is removed. Copies made until then have it off.
    state_hooks: pairs ``(snapshot, restored)``, for state that forward reads in ways that a checkpoint cannot see.
        ``snapshot()`` is called where a checkpointed module begins. In backward ``restored(what snapshot returned)``
        gives a context manager, and the module runs again inside of it. With hooks nothing is captured.

    Returns a handle with ``explain()``, ``stats()`` and ``remove()``, which is also a context manager that removes the
    policy at its end.

    Raises ``PolicyError`` for a bad policy, ``NoEffectError`` for one that governs nothing, ``AlreadyAppliedError``
    where a module is already under one, ``UnsupportedError`` where a module cannot be put under one. Warns with
    ``PolicyWarning`` of rules without effect, and of checkpointing that leaves the policy nothing to choose.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    >>> with recompute.apply(model, {"rules": [{"match": "1", "action": "recompute"}]}) as handle:
    ...     model(torch.ones(2, 8)).sum().backward()
    >>> handle.stats().dropped_nbytes
    64
    """
    ways = {"strict": strict, "replace": replace, "replace_checkpointing": replace_checkpointing}
    return put_on(model, policy, state_hooks, **ways)


def put_on(
    model: nn.Module,
    policy: PolicyLike,
    state_hooks: Sequence[StateHook],
    *,
    strict: bool = True,
    replace: bool = False,
    replace_checkpointing: bool = False,
    decorated: bool = False,
) -> AppliedPolicy:
    """``apply``, also for the decorator. decorated: whether the decorator calls it: then ``model`` is one block."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"recompute.apply takes a torch.nn.Module, got {type(model).__name__}")
    policy = load_policy(policy)
    model = uncompiled(model)
    cache = CaptureCache(checked_hooks(state_hooks))
    with ExitStack() as undo:
        replaced = _take_off_all(model, undo) if replace else []
        refuse_governed(model)
        checkpointing = find_checkpointing(model) if has_effect(policy) else []
        if not replace_checkpointing:
            warn_of_checkpointing(checkpointing, type(model).__name__)
            checkpointing = []
        attachments = attachments_of(model, policy, cache, strict=strict, decorated=decorated)
        on_model = _OnModel(policy, checkpointing)
        undo.callback(on_model.end)
        attach(attachments)
        undo.pop_all()
    for each in replaced:
        each.free_host_memory()
    _on[model] = on_model
    handle = AppliedPolicy(on_model, attachments, model)
    if (root := vars(model).get(RUNNER)) is not None:
        root.handle = handle
    return handle


def checked_hooks(state_hooks: Any) -> tuple[StateHook, ...]:
    """``state_hooks``, once they are checked."""
    hooks = tuple(state_hooks)
    for hook in hooks:
        if not (isinstance(hook, (tuple, list)) and len(hook) == 2 and all(map(callable, hook))):
            raise TypeError(
                f"state_hooks takes pairs of functions, (snapshot, restored), got {hook!r}. snapshot() runs in forward "
                "and returns a state; restored(state) returns a context manager, in which the module runs again."
            )
    return hooks


class _OnModel:
    """A policy that is on a model. It knows all that has to end with it, except the modules' runners."""

    def __init__(self, policy: Policy, checkpointing: Sequence[Checkpointing]):
        """checkpointing: the model's own, which is off meanwhile."""
        self.policy = policy
        self._checkpointing = checkpointing
        self._undo: list[Callable[[], None]] = []
        self.begin()

    def begin(self) -> None:
        self.is_removed = False
        self._undo = [each.turn_off() for each in self._checkpointing]

    def end(self) -> None:
        self.is_removed = True
        for undo in self._undo:
            undo()

    def free_host_memory(self) -> None:
        """Free the host memory that was offloaded to, except the part that graphs still need."""
        if any(meaning_of(rule).offloading is not None for rule in self.policy.rules):
            POOL.free_unused()


_on: weakref.WeakKeyDictionary[nn.Module, _OnModel] = weakref.WeakKeyDictionary()
"""The policies, by the models that they are on. No value leads to its model: that would keep the model alive.

So these are no handles. A handle leads to runners, and a runner to ``state_hooks``, which may well read the model.
"""


def policy_on(model: nn.Module) -> Policy | None:
    """The policy that ``apply`` has put on ``model`` itself; None if there is none on it now."""
    on_model = _on.get(uncompiled(model))
    return None if on_model is None else on_model.policy


def _take_off_all(model: nn.Module, undo: ExitStack) -> list[_OnModel]:
    """Take the policies off ``model`` and off all inside. ``undo`` puts them back."""
    put_back = detach_all(model)
    taken = {module: on_model for module in model.modules() if (on_model := _on.pop(module, None)) is not None}
    for on_model in taken.values():
        on_model.end()

    def restore() -> None:
        for on_model in taken.values():
            on_model.begin()
        _on.update(taken)
        put_back()

    undo.callback(restore)
    return list(taken.values())


class PolicyReport:
    """What a policy does to the modules that it governs, or to a decorated function.

    A decorator leaves one on what it decorates, as ``recompute_handle``. On a class it is about all living instances
    that have run.
    """

    def __init__(self, policy: Policy, find: Callable[[], list[Attachment]]):
        """find: returns the attachments of the modules that the policy governs now."""
        self.policy = policy
        self._find = find
        self._stopwatch: Stopwatch | None = None

    @property
    def _attachments(self) -> list[Attachment]:
        return self._find()

    @property
    def _regions(self) -> list[CapturedRegion]:
        """The regions that may be captured."""
        return [region for attachment in self._attachments for region in regions_in(attachment.runner)]

    @property
    def removed(self) -> bool:
        """Whether the policy is no longer on the model."""
        return False

    def stats(self) -> Stats:
        """What was held, dropped and regenerated since the policy was applied. For one step, subtract two of these.

        before = handle.stats()
        model(**batch).loss.backward()
        print(handle.stats() - before)
        """
        return stats(self._attachments, self._stopwatch, removed=self.removed)

    def time_regeneration(self) -> None:
        """Have ``stats()`` say from now on how long regenerating takes. On CUDA each time costs two events."""
        if self._stopwatch is None:
            modules = [module for each in self._attachments if (module := each.module) is not None]
            parameter = next((parameter for module in modules for parameter in module.parameters()), None)
            self._stopwatch = Stopwatch(torch.device("cpu") if parameter is None else parameter.device)
        for attachment in self._attachments:
            attachment.runner.statistics.regenerated.stopwatch = self._stopwatch

    def plans(self) -> dict[str, SavePlan]:
        """The plan of what each module on a tape kept and dropped in its last forward, by module path; "" is the model.

        These are the modules under ``recompute``, or under ``checkpoint`` with a ``keep``. Fake tensors work, too. The
        plan of a module is missing if its last forward took other steps than the one before: run forward once more.
        """
        plans = {attachment.path: attachment.runner.statistics.plan for attachment in self._attachments}
        return {path: plan for path, plan in plans.items() if plan is not None and plan.is_complete}

    def explain(self, *, wide: bool = False, width: int = WIDTH) -> str:
        """A table of which modules got which rule and what a forward drops of them; then each tensor, and why.

        Modules share a line if their paths differ in indices alone and they are treated alike. A line has the bytes of
        one module's forward, which is a mean over those so far. The last line has the bytes of all forwards, which are
        those of ``stats()``.

        The tensors listed are those of one module's last forward: what autograd saved in it, which of its outputs a
        later module saved, and what is held only so that others can be regenerated. What kernels save is counted, and
        not listed.

        wide: every byte instead, of one forward and of all, whole names, and one line for each module and tensor.
        width: the most columns of a line if it is not wide.
        """
        return explanation(self.policy, self._attachments, self._notes(), wide=wide, width=width)

    def _notes(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        count = len(self._attachments)
        removed = ", removed" if self.removed else ""
        return f"<policy {self.policy.name!r} on {count} module{'s' * (count != 1)}{removed}>"


class AppliedPolicy(PolicyReport):
    """A policy on a model. As a context manager it removes itself at the end."""

    def __init__(self, on_model: _OnModel, attachments: list[Attachment], model: nn.Module):
        super().__init__(on_model.policy, lambda: attachments)
        self._on_model = on_model
        self._model = weakref.ref(model)

    @property
    def removed(self) -> bool:
        return self._on_model.is_removed

    def _notes(self) -> list[str]:
        if self.removed:
            return ["This policy was removed. The figures are from before."]
        model = self._model()
        if model is None:
            return []
        found = find_checkpointing(model) if has_effect(self.policy) else []
        return [*([said_of(found, type(model).__name__)] if found else []), *self._notes_on_head(model)]

    def _notes_on_head(self, model: nn.Module) -> list[str]:
        """Why a loss has logits, where a rule is for heads and no kernel stands in for any."""
        asks = [HEAD in rule.type and meaning_of(rule).kernels is not Kernels.NEVER for rule in self.policy.rules]
        kernels = [kernel_of(attachment.runner) for attachment in self._attachments]
        if not any(asks) or any(isinstance(kernel, KernelHeadRunner) for kernel in kernels):
            return []
        entries, modules = module_entries(model, type(model).__name__)
        heads = [each.path for each in entries if each.is_head]
        if not heads:
            return [
                "No loss is computed without logits, because no head was found: no Linear outside of the layers has "
                "the Embedding's shape, and no module is called lm_head."
            ]
        why = "; ".join(f"{path} is {why_no_head(modules[path])}" for path in heads if not is_head(modules[path]))
        return [f"No loss is computed without logits: {why or 'other rules govern ' + ', '.join(heads)}."]

    def observe_losses(self, observe: LossObserver, observe_logits: Callable[[], None]) -> bool:
        """Have ``observe(argmax, target, ignore_index)`` called for each loss that is computed without logits.

        argmax, target: int64, one number a token.
        observe_logits: called whenever logits are made because something other than a loss reads them.

        Returns whether the policy has such losses computed.
        """
        kernels = [kernel_of(attachment.runner) for attachment in self._attachments]
        heads = [kernel for kernel in kernels if isinstance(kernel, KernelHeadRunner)]
        for head in heads:
            head.observe, head.observe_logits = observe, observe_logits
        return bool(heads)

    def remove(self) -> None:
        """Take the policy off: the model is what it was. Graphs that were built under it still run backward.

        The exception: ``torch.utils.checkpoint`` is still to run a module again that was under it. See the limits.

        Host memory that the policy offloaded to is freed, except what such graphs still need.
        """
        if self.removed:  # or another policy has taken its place
            return
        for attachment in self._attachments:
            if (module := attachment.module) is not None:
                detach(module, attachment.runner)
        self._on_model.end()
        self._on_model.free_host_memory()
        if (model := self._model()) is not None:
            del _on[model]

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()
