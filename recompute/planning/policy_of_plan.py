"""Makes the policy under which each place of a profile runs by the choice that a plan made for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from recompute.planning.prediction import Assignment, choices_of
from recompute.policy.rules import NO_RULES, Policy, Rule
from recompute.profiling.cost_table import Profile, rule_beside_head


def policy_of(profile: Profile, assignment: Assignment, description: str = "", name: str = "plan") -> Policy:
    """The policy that gives each place the rule of its choice. Places with equal rules share one.

    Where such places are known to be in one ModuleList, the rule names the list and their ``layers``; else their paths.
    """
    groups: dict[tuple[str, str], tuple[Mapping[str, Any], list[str], list[int]]] = {}
    for path, layer, fields in _governed(profile, assignment):
        pattern = None if layer is None else _pattern(path, layer)
        key = json.dumps(fields, sort_keys=True), pattern or ""
        _, paths, layers = groups.setdefault(key, (fields, [], []))
        paths.append(path)
        layers += [] if layer is None else [layer]
    rules = []
    for (_, pattern), (fields, paths, layers) in groups.items():
        selected = {"match": pattern, "layers": layer_spans(layers)} if pattern else {"match": paths}
        rules.append(Rule(**{**selected, **fields}))
    return Policy(name=name, description=description, rules=rules or NO_RULES)


def _governed(profile: Profile, assignment: Assignment) -> Iterator[tuple[str, int | None, Mapping[str, Any]]]:
    """The path of each module with a rule, its index in the list of layers around it, and the rule's fields."""
    for place, choice in zip(profile.places, choices_of(profile, assignment), strict=True):
        if choice.rule is not None:
            yield place.path, place.layer, choice.rule
            for path in place.also:
                yield path, None, rule_beside_head(choice.rule)


def _pattern(path: str, layer: int) -> str | None:
    """The path with "*" for the layer's number; None if the number does not stand once in it."""
    parts = path.split(".")
    return ".".join("*" if part == str(layer) else part for part in parts) if parts.count(str(layer)) == 1 else None


def layer_spans(numbers: Iterable[int]) -> list[str]:
    """Numbers as a policy's ``layers`` spells them: "0-3", "5"."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in spans]
