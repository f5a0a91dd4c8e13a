"""Finds the parts of a policy that have no effect on a given model.

A policy without any effect is an error. A part without effect is a warning, one for each cause.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch._ops import HigherOrderOperator, OpOverloadPacket

from recompute.engine.cut.ops import facts
from recompute.engine.cut.reviewed_ops import PURE
from recompute.errors import NoEffectError, warn
from recompute.policy.loading import is_preset
from recompute.policy.matching import ModuleEntry, layers_beyond, unmatched_rules
from recompute.policy.meaning import meaning_of
from recompute.policy.rules import FAMILIES, Policy


def check_effect(
    policy: Policy,
    name: str,
    entries: Sequence[ModuleEntry],
    rules: Mapping[str, int],
    *,
    strict: bool = True,
    decorated: bool = False,
) -> None:
    """Raise ``NoEffectError`` if ``policy`` governs no module; warn of each part of it that has no effect.

    name: the name of the model's class.
    rules: what ``assign`` returned for the policy and ``entries``.
    strict: False to warn where an error would be raised.
    decorated: whether a decorator puts the policy on.
    """
    unmatched = unmatched_rules(policy, entries, rules)
    if strict and not rules and has_effect(policy):
        lines = "\n  ".join(unmatched)
        raise NoEffectError(
            f"policy {policy.name} governs no module of {name}: {lines}\nAdd a rule that matches, "
            + (
                "or apply the policy to the model that has the layers: recompute.apply(model, policy)"
                if decorated
                else "treat a module as one layer with recompute.recompute(module), or allow this: "
                "recompute.apply(model, policy, strict=False)"
            )
        )
    if unmatched and rules and is_preset(policy):  # it has rules for many models, and no model needs all
        unmatched = []
    for messages in (unmatched, layers_beyond(policy, entries, rules)):
        if messages:
            warn(f"policy {policy.name}: " + "\n  ".join(messages))
    for message, indices in _doubtful_words(policy).items():
        warn(f"policy {policy.name}: {listed([f'rules[{index}]' for index in indices])}: keep: {message}")


def has_effect(policy: Policy) -> bool:
    """Whether any rule is to drop or offload something. If none is, the policy does nothing on purpose."""
    return any(meaning_of(rule).has_effect for rule in policy.rules)


def listed(names: Sequence[str]) -> str:
    """The first few of ``names``, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")


_SHOWN = 5


def _doubtful_words(policy: Policy) -> dict[str, list[int]]:
    """Messages on words in ``keep`` that may name nothing, and the indices of the rules that each is about."""
    words: dict[str, list[int]] = {}
    for index, rule in enumerate(policy.rules):
        for word in rule.keep:
            words.setdefault(word, []).append(index)
    return {message: indices for word, indices in words.items() for message in _doubts(word)}


def _doubts(word: str) -> Iterator[str]:
    if "." in word:
        if not is_op(word):
            yield (
                f"no op is called {word}. explain() lists the ops that a module runs, by their names below autograd "
                "('aten._softmax', not 'aten.softmax')"
            )
    elif word not in FAMILIES and (meant := _meant(word)) is not None:
        yield f"{word} is read as a tensor's name, from recompute.keep(tensor, {word!r}). Did you mean {meant!r}?"


def _meant(word: str) -> str | None:
    """The family or the op that ``word`` probably misspells or shortens."""
    for family in FAMILIES:
        letters = iter(family)
        is_short_form = len(word) > 2 and word[0] == family[0] and all(letter in letters for letter in word)
        if is_short_form or difflib.SequenceMatcher(None, word, family).ratio() >= _ALIKE:
            return family
    # Costly ops alone: the name of a cheap one, such as aten.angle, may well be meant as a tensor's name.
    packet = getattr(torch.ops.aten, word, None)
    overloads = packet.overloads() if is_op(f"aten.{word}") and isinstance(packet, OpOverloadPacket) else ()
    return f"aten.{word}" if any(facts(getattr(packet, each)).family for each in overloads) else None


_ALIKE = 0.8  # "attenion", "gemms"; but not "attention_output", which is a good name for a tensor


def is_op(name: str) -> bool:
    """Whether there is an op called ``name``, in the form of ``OpFacts.name``.

    An op that is a composite of others on every backend does not count, unless it is listed as pure: a tape sees only
    the others.
    """
    space, _, base = name.partition(".")
    packet = getattr(getattr(torch.ops, space), base, None)
    if not isinstance(packet, OpOverloadPacket):
        return isinstance(packet, HigherOrderOperator)
    names = [getattr(packet, overload).name() for overload in packet.overloads() if "out" not in overload]
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return base in PURE or not all(is_composite(op, "CompositeImplicitAutograd") for op in names)
