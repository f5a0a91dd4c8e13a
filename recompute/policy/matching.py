"""Which rule governs which module: pure functions over plain data."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from recompute.policy.model import Policy, Rule


@dataclass(frozen=True)
class ModuleEntry:
    """One module of a model.

    path: its dotted path; "" is the root. type: the name of its class.
    layer, layer_count: its index within, and the length of, the nearest ModuleList around it, or None.
    """

    path: str
    type: str
    layer: int | None = None
    layer_count: int | None = None


def assign(policy: Policy, modules: Iterable[ModuleEntry]) -> dict[str, int]:
    """For each module that a rule matches, its path and the index of the first rule that does."""
    selectors = [_Selector(rule) for rule in policy.rules]
    assignment = {}
    for module in modules:
        for index, selector in enumerate(selectors):
            if selector.has_type(module) and selector.has_layer(module) and selector.has_path(module):
                assignment[module.path] = index
                break
    return assignment


def unmatched_rules(policy: Policy, modules: Sequence[ModuleEntry], assignment: Mapping[str, int]) -> list[str]:
    """One message for each rule that governs no module: which rule, why, and what was probably meant.

    ``assignment`` is what ``assign`` returned for the same policy and modules.
    """
    used = set(assignment.values())
    return [
        f"rules[{index}] governs no module: {_why_unmatched(rule, modules, assignment)}"
        for index, rule in enumerate(policy.rules)
        if index not in used
    ]


class _Selector:
    """A rule's three conditions, compiled; asked one by one they tell which of them fails."""

    def __init__(self, rule: Rule) -> None:
        self._path = _compile(rule.match)
        self._type = _compile(rule.type)
        self._layers = rule.layers

    def has_path(self, module: ModuleEntry) -> bool:
        return _matches(self._path, module.path)

    def has_type(self, module: ModuleEntry) -> bool:
        return _matches(self._type, module.type)

    def has_layer(self, module: ModuleEntry) -> bool:
        if self._layers is None:
            return True
        if module.layer is None or module.layer_count is None:
            return False
        return any(span.selects(module.layer, module.layer_count) for span in self._layers)


def _matches(pattern: re.Pattern[str] | None, name: str) -> bool:
    return pattern is None or pattern.fullmatch(f"{name}." if name else "") is not None


@functools.lru_cache(maxsize=1024)
def _compile(globs: tuple[str, ...]) -> re.Pattern[str] | None:
    """One pattern for all ``globs``, over paths whose every part ends with a dot; None matches anything."""
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
        candidates = _distinct_up_to_numbers(module.path for module in modules)
        return f"match {_quoted(rule.match)} is the path of no module{_nearest(rule.match, candidates)}"
    if not any(map(selector.has_type, modules)):
        candidates = dict.fromkeys(module.type for module in modules)
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
            return f"layers {spelled!r} selects nothing: what the rule matches is in no ModuleList"
        return f"layers {spelled!r} selects none of the {' or '.join(map(str, counts))} layers"
    earlier = sorted({assignment[module.path] for module in selected})
    rules = ", ".join(f"rules[{index}]" for index in earlier)
    return f"the modules it matches ({len(selected)}) are already governed by {rules}"


def _quoted(names: Sequence[str]) -> str:
    shown = [repr(name) for name in names[:5]] + ["..."] * (len(names) > 5)
    return " or ".join(shown)


def _distinct_up_to_numbers(paths: Iterable[str]) -> Iterable[str]:
    """The first of all paths that differ in numbers only: layers repeat, and one stands for all."""
    first: dict[str, str] = {}
    for path in paths:
        first.setdefault(re.sub(r"\d+", "0", path), path)
    return first.values()


def _nearest(globs: Sequence[str], candidates: Iterable[str]) -> str:
    """``"; nearest: 'a', 'b'"``: up to three candidates about as close to a glob as the closest one."""
    scores = {name: max(_resemblance(glob, name) for glob in globs) for name in candidates}
    bar = max(0.6, max(scores.values(), default=0.0) - 0.1)
    close = sorted((name for name in scores if scores[name] >= bar), key=lambda name: -scores[name])[:3]
    return f"; nearest: {', '.join(map(repr, close))}" if close else ""


def _resemblance(glob: str, name: str) -> float:
    """0 to 1: how much of a glob's text is in ``name``, in an end of it as long, or in its last part."""
    plain = re.sub(r"[*?]", "", glob).strip(".")
    ends = {name, name[-len(plain) :], name[: len(plain)]}
    last_parts = _ratio(plain.split(".")[-1], name.split(".")[-1])
    return max(0.8 * last_parts, *(_ratio(plain, end) for end in ends))


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio() if one else 0.0
