"""The ways to run a region that a plan may be restricted to."""

from __future__ import annotations

from collections.abc import Collection

from recompute.errors import PlanError
from recompute.policy.document import nearest, show
from recompute.profiling.cost_table import Choice, Profile, RegionCosts

ALLOWED = ("keep", "hook", "kernel", "checkpoint", "offload")
"""The ways that a plan may be restricted to. All but "kernel" leave gradients the same, bit for bit.

"offload" is beside another one, of which a region's rule offloads what it holds; or alone, where it holds everything.
"""


def only_allowed(profile: Profile, allowed: Collection[str] | None) -> Profile:
    """The profile without the choices that are not allowed; a region that has no other keeps its first.

    Raises ``PlanError`` for a word that is none of ``ALLOWED``.
    """
    if allowed is None:
        return profile
    check_allowed(allowed)

    def of(region: RegionCosts) -> RegionCosts:
        left = [choice for choice in region.choices if ways_of(choice).issubset(allowed)]
        return region.model_copy(update={"choices": tuple(left) or region.choices[:1]})

    return profile.model_copy(update={"regions": tuple(map(of, profile.regions))})


def ways_of(choice: Choice) -> frozenset[str]:
    """Those of ``ALLOWED`` that the choice is. ``via: auto`` counts as a kernel, since it may round in another way."""
    rule = choice.rule or {"action": "keep"}
    way = rule["action"]
    if way == "recompute":
        way = "hook" if rule.get("via") == "hook" else "kernel"
    return frozenset([way, "offload"] if rule.get("offload") else [way])


def check_allowed(allowed: Collection[str] | None) -> None:
    if isinstance(allowed, str):
        raise PlanError(f"expected a list of what is allowed, such as ['keep', 'hook']; found {show(allowed)}")
    for word in allowed or ():
        if word not in ALLOWED:
            raise PlanError(
                f"allowed: expected some of {', '.join(ALLOWED)}; found {show(word)}{nearest(str(word), ALLOWED)}"
            )
