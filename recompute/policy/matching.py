"""Decides which rule governs which module, by pure functions over plain data."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recompute.policy.rules import BLOCK, HEAD, Policy, Rule


@dataclass(frozen=True)
class ModuleEntry:
    """One module of a model.

    path: its dotted path; "" is the root.
    type: the name of its class.
    layer, layer_count: its index in the list whose layers a rule's ``layers`` counts, and that list's length; or None.
    is_block: whether it is one of the model's repeated layers: see ``Rule``.
    is_head: whether it gives a language model's logits.
    """

    path: str
    type: str
    layer: int | None = None
    layer_count: int | None = None
    is_block: bool = False
    is_head: bool = False


def assign(policy: Policy, modules: Iterable[ModuleEntry]) -> dict[str, int]:
    """For each module that a rule matches, its path and the index of the first rule that does."""
    selectors = [*enumerate(map(_Selector, policy.rules))]
    assignment = {}
    for module in modules:
        for index, selector in selectors:
            if selector.has_type(module) and selector.has_layer(module) and selector.has_path(module):
                assignment[module.path] = index
                break
    return assignment


def unmatched_rules(policy: Policy, modules: Sequence[ModuleEntry], assignment: Mapping[str, int]) -> list[str]:
    """A message for each rule that governs no module: which rule, why, and what was probably meant.

    The last message counts all rules beyond the first few. ``assignment`` is what ``assign`` returned for the same
    policy and modules.
    """
    used = set(assignment.values())
    idle = [index for index in range(len(policy.rules)) if index not in used]
    messages = [
        f"rules[{index}] governs no module: {_why_unmatched(policy.rules[index], modules, assignment)}"
        for index in idle[:_SHOWN]
    ]
    if len(idle) > _SHOWN:
        messages.append(f"{len(idle) - _SHOWN:,} more of the {len(policy.rules):,} rules govern no module")
    return messages


_SHOWN = 5  # so many messages of a kind are shown


def layers_beyond(policy: Policy, modules: Sequence[ModuleEntry], assignment: Mapping[str, int]) -> list[str]:
    """Messages for the first few rules that govern modules and whose ``layers`` name more layers than there are."""
    messages: list[str] = []
    for index in sorted(set(assignment.values())):
        rule = policy.rules[index]
        if rule.layers is not None and len(messages) < _SHOWN:
            selector = _Selector(rule)
            selected = [each for each in modules if selector.has_type(each) and selector.has_path(each)]
            count = max(each.layer_count or 0 for each in selected)  # of the longest list: one rule may be for several
            if beyond := [str(span.spelling) for span in rule.layers if span.exceeds(count)]:
                messages.append(f"rules[{index}]: layers {', '.join(beyond)!r} exceeds the {count} layers of the model")
    return messages


class _Selector:
    """A rule's three conditions. Each can be asked by itself, to tell which of them fails."""

    def __init__(self, rule: Rule) -> None:
        self._rule, self._path = rule, _compile(rule.match)
        self._class = _compile([glob for glob in rule.type if glob not in (BLOCK, HEAD)])

    def has_path(self, module: ModuleEntry) -> bool:
        return not self._rule.match or _matches(self._path, module.path)

    def has_type(self, module: ModuleEntry) -> bool:
        words = self._rule.type
        if not words or (module.is_block and BLOCK in words) or (module.is_head and HEAD in words):
            return True
        return _matches(self._class, module.type)

    def has_layer(self, module: ModuleEntry) -> bool:
        if self._rule.layers is None:
            return True
        if module.layer is None or module.layer_count is None:
            return False
        return any(span.selects(module.layer, module.layer_count) for span in self._rule.layers)


def pattern_of(path: str) -> str:
    """The path with "*" for numbers, which modules of equal layers share: "model.layers.*.mlp". A class may follow it.

    >>> pattern_of("wav2vec2.layers.0.mlp (Wav2Vec2MLP)")
    'wav2vec2.layers.*.mlp (Wav2Vec2MLP)'
    """
    return re.sub(r"(?<![^.])[0-9]+(?![^. ])", "*", path)


def _matches(pattern: re.Pattern[str] | None, name: str) -> bool:
    return pattern is not None and pattern.fullmatch(f"{name}." if name else "") is not None


def _compile(globs: Sequence[str]) -> re.Pattern[str] | None:
    """One pattern for all ``globs``, over paths whose every part ends with a dot; None for none."""
    return re.compile("|".join(map(_regex, globs))) if globs else None


def _regex(glob: str) -> str:
    pieces = []
    for part in glob.split("."):
        if part == "**":
            pieces.append(r"(?:[^.]+\.)*")
        else:
            wild = re.escape(part).replace(r"\*", "[^.]*").replace(r"\?", "[^.]")
            pieces.append(wild + r"\.")
    return "".join(pieces)


def _why_unmatched(rule: Rule, modules: Sequence[ModuleEntry], assignment: Mapping[str, int]) -> str:
    selector = _Selector(rule)
    by_path = [module for module in modules if selector.has_path(module)]
    if not by_path:
        first: dict[str, str] = {}  # the first of paths that differ in numbers only, as layers' do
        for module in modules:
            first.setdefault(pattern_of(module.path), module.path)
        return f"match {_quoted(rule.match)} is the path of no module{_nearest(rule.match, first.values())}"
    if not any(map(selector.has_type, modules)):
        if rule.type == (BLOCK,):
            return (
                f"type {BLOCK!r} finds no layers that repeat: no ModuleList, ModuleDict or Sequential holds modules "
                "with parts of one class, or one of a class *Layer or *Block, and no siblings of one class have a norm "
                "and names such as b1 and b2"
            )
        if rule.type == (HEAD,):
            return (
                f"type {HEAD!r} finds no head: no module is called lm_head, and no Linear has as many inputs and "
                "outputs as the token Embedding has columns and rows"
            )
        words = [
            word for word, has in ((BLOCK, "is_block"), (HEAD, "is_head")) if any(getattr(m, has) for m in modules)
        ]
        candidates = dict.fromkeys([module.type for module in modules] + words)
        return f"type {_quoted(rule.type)} is the class of no module{_nearest(rule.type, candidates)}"
    by_type = [module for module in by_path if selector.has_type(module)]
    if not by_type:
        classes = _quoted(sorted({module.type for module in by_path}))
        return f"no module at match {_quoted(rule.match)} has type {_quoted(rule.type)}; found {classes}"
    selected = [module for module in by_type if selector.has_layer(module)]
    if not selected:
        spelled = ", ".join(str(span.spelling) for span in rule.layers or ())
        counts = sorted({module.layer_count for module in by_type if module.layer_count is not None})
        if not counts:
            return f"layers {spelled!r} selects nothing: the modules that the rule matches are in no list of layers"
        return f"layers {spelled!r} selects none of the {' or '.join(map(str, counts))} layers"
    earlier = sorted({assignment[module.path] for module in selected})
    rules = ", ".join(f"rules[{index}]" for index in earlier)
    return f"the modules it matches ({len(selected)}) are already governed by {rules}"


def _quoted(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:5]] + ["..."] * (len(names) > 5)
    return " or ".join(shown)


def _nearest(globs: Sequence[str], candidates: Iterable[str]) -> str:
    """``"; nearest: 'a', 'b'"``: up to three candidates about as close to a glob as the closest one."""
    scores = {name: max(_resemblance(glob, name) for glob in globs) for name in candidates}
    bar = max(0.6, max(scores.values(), default=0.0) - 0.1)
    close = sorted((name for name in scores if scores[name] >= bar), key=lambda name: -scores[name])[:3]
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


def _resemblance(glob: str, name: str) -> float:
    """How close a glob is to ``name``, from 0 to 1: to all of it, to an end of it as long, or to its last part."""
    plain = re.sub(r"[*?]", "", glob).strip(".")
    ends = {name, name[-len(plain) :], name[: len(plain)]}
    last_parts = _ratio(plain.split(".")[-1], name.split(".")[-1])
    return max(0.8 * last_parts, *(_ratio(plain, end) for end in ends))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio() if one else 0.0
