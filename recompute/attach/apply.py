"""`recompute.apply`: puts a policy on a model, and gives a handle that reports and takes it off again."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recompute.attach.attachments import attach, attachments_of, detach, refuse_governed
from recompute.attach.explain import Attachment, Stats, explanation, stats
from recompute.compiled.captured_region import CaptureCache
from recompute.compiled.unwrap import uncompiled
from recompute.engine.checkpoint.region import StateHook
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.host.host_memory import pool_in
from recompute.engine.stopwatch import Stopwatch
from recompute.policy.loading import load_policy
from recompute.policy.meaning import meaning_of
from recompute.policy.rules import Policy
from recompute.substitution.head import KernelHeadRunner, LossObserver
from recompute.substitution.kernel_runner import kernel_of

PolicyLike = Policy | Mapping[str, Any] | str | os.PathLike[str]


def apply(
    model: nn.Module,
    policy: PolicyLike = "elementwise",
    *,
    strict: bool = True,
    state_hooks: Sequence[StateHook] = (),
) -> AppliedPolicy:
    """Put ``model`` under ``policy``, in place.

    Module names, ``state_dict``, and copies and pickles of the model are the same as without a policy. Where gradients
    are off or a module is in ``eval()`` mode, the policy does nothing, except that kernels stand in there, too. If this
    raises, the model is as before.

    policy: a ``Policy``, a mapping, the path of a policy file, or the name of a preset. The default changes no bit of
    any gradient.
    strict: whether to refuse a policy that governs no module of ``model`` at all. A policy in which no rule drops or
        offloads anything (only ``keep``, or no rules) is never refused.
    state_hooks: pairs ``(snapshot, restored)``, for state that forward reads in ways that a checkpoint cannot see.
        ``snapshot()`` is called where a checkpointed module begins. In backward the module runs again inside of the
        context manager that ``restored(what snapshot returned)`` gives. With hooks nothing is captured.

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
    refuse_governed(model)
    attachments = attachments_of(model, policy, cache=CaptureCache(checked_hooks(state_hooks)), strict=strict)
    attach(attachments)
    _policies[model] = policy
    return AppliedPolicy(policy, attachments, model)


def checked_hooks(state_hooks: Any) -> tuple[StateHook, ...]:
    """``state_hooks``, if they are what ``apply`` takes."""
    hooks = tuple(state_hooks)
    for hook in hooks:
        if not (isinstance(hook, (tuple, list)) and len(hook) == 2 and all(map(callable, hook))):
            raise TypeError(
                f"state_hooks takes pairs of functions, (snapshot, restored), got {hook!r}. snapshot() is called in "
                "forward; restored(what it returned) gives a context manager, in which the module runs again."
            )
    return hooks


_policies: weakref.WeakKeyDictionary[nn.Module, Policy] = weakref.WeakKeyDictionary()


def policy_on(model: nn.Module) -> Policy | None:
    """The policy that ``apply`` has put on ``model`` itself; None if there is none on it now."""
    return _policies.get(uncompiled(model))


class AppliedPolicy:
    """A policy on a model. As a context manager it removes itself at the end."""

    def __init__(self, policy: Policy, attachments: list[Attachment], model: nn.Module):
        self.policy = policy
        self._model = weakref.ref(model)
        self._attachments = attachments
        self._stopwatch: Stopwatch | None = None

    def stats(self) -> Stats:
        """What was held, dropped and regenerated since the policy was applied. For one step, subtract two of these.

        before = handle.stats()
        model(**batch).loss.backward()
        print(handle.stats() - before)
        """
        return stats(self._attachments, self._stopwatch)

    def time_regeneration(self) -> None:
        """Have ``stats()`` say from now on how long regenerating takes. On CUDA each time costs two events."""
        if self._stopwatch is None:
            parameter = next((each for a in self._attachments for each in a.module.parameters()), None)
            self._stopwatch = Stopwatch(torch.device("cpu") if parameter is None else parameter.device)
        for attachment in self._attachments:
            attachment.runner.statistics.regenerated.stopwatch = self._stopwatch

    def plans(self) -> dict[str, SavePlan]:
        """What the last forward of each module on a tape kept and dropped, by module path; "" is the model.

        These are the modules under ``recompute``, or under ``checkpoint`` with a ``keep``. Fake tensors work, too. The
        plan of a module is missing if its last forward took other steps than the one before: run forward once more.
        """
        plans = {attachment.path: attachment.runner.statistics.plan for attachment in self._attachments}
        return {path: plan for path, plan in plans.items() if plan is not None and plan.is_complete}

    def explain(self) -> str:
        """A table of which modules got which rule and what a forward drops of them; then each tensor, and why.

        Modules share a line if their paths differ in indices alone and they are treated alike. A line has the bytes of
        one module's forward, which is a mean over those so far, and the bytes of all forwards of all its modules. The
        last line has the sums of the latter, which are those of ``stats()``.

        The tensors listed are those of one module's last forward: what autograd saved in it, which of its outputs a
        later module saved, and what is held only so that others can be regenerated. What kernels save is counted, and
        not listed.
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
        """Take the policy off: the model is what it was. Graphs that were built under it still run backward.

        That is, unless ``torch.utils.checkpoint`` is to run a module again that was under it: see the limits.

        Host memory that the policy offloaded to is freed, except what such graphs still need.
        """
        for attachment in self._attachments:
            detach(attachment)
        for rule in self.policy.rules:
            if (offloading := meaning_of(rule).offloading) is not None:
                pool_in(offloading.directory).free_unused()
        if (model := self._model()) is not None and _policies.get(model) is self.policy:
            del _policies[model]

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<policy {self.policy.name!r} on {len(self._attachments)} modules>"
