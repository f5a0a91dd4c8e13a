"""The ways to run a region that a plan may be restricted to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from recompute.errors import PlanError
from recompute.policy.document import nearest, show
from recompute.profiling.cost_table import Choice, Profile, RegionCosts

COMPRESS = "compress"
ALLOWED = ("keep", "hook", "kernel", "checkpoint", "offload", COMPRESS)
"""The ways that a plan may be restricted to. All but "kernel" and "compress" leave gradients the same, bit for bit.

"compress" is beside "hook" or "kernel": they hold 8-bit codes, and only where it is named. "offload" is beside any
other one, whose saved bytes a rule offloads; or alone, where a region saves everything.
"""


def only_allowed(profile: Profile, allowed: Collection[str] | None) -> Profile:
    """The profile with the allowed choices alone. A region without any keeps its first choice.

    allowed: None for all but "compress".
    Raises ``PlanError`` for a word that is none of ``ALLOWED``.
    """
    check_allowed(allowed)
    if allowed is None:
        allowed = [word for word in ALLOWED if word != COMPRESS]

    def left(region: RegionCosts) -> Sequence[Choice]:
        return [choice for choice in region.choices if ways_of(choice).issubset(allowed)] or region.choices[:1]

    return profile.with_choices(left)


def ways_of(choice: Choice) -> frozenset[str]:
    """The words of ``ALLOWED`` for the choice. ``via: auto`` counts as a kernel, since it may round in another way."""
    rule = choice.rule or {"action": "keep"}
    way = rule["action"]
    if way == "recompute":
        way = "hook" if rule.get("via") == "hook" else "kernel"
    return frozenset([way, *(beside for beside in ("offload", COMPRESS) if rule.get(beside))])


def check_allowed(allowed: Collection[str] | None) -> None:
    if isinstance(allowed, str):
        raise PlanError(f"allowed: expected a list such as ['keep', 'hook']; found {show(allowed)}")
    for word in allowed or ():
        if word not in ALLOWED:
            raise PlanError(
                f"allowed: expected some of {', '.join(ALLOWED)}; found {show(word)}{nearest(str(word), ALLOWED)}"
            )
