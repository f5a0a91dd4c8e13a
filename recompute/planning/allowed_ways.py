"""The ways to run a region that a plan may be restricted to."""

from __future__ import annotations

from collections.abc import Collection

from recompute.errors import PlanError
from recompute.policy.document import nearest, show
from recompute.profiling.cost_table import Choice, Profile, RegionCosts

COMPRESS = "compress"
ALLOWED = ("keep", "hook", "kernel", "checkpoint", "offload", COMPRESS)
"""The ways that a plan may be restricted to. All but "kernel" and "compress" leave gradients the same, bit for bit.

"compress" is beside "hook" or "kernel", and is used only where it is named: what it holds has 8 bits. "offload" is
beside another one, of which a region's rule offloads what it holds; or alone, where it holds everything.
"""


def only_allowed(profile: Profile, allowed: Collection[str] | None) -> Profile:
    """The profile without the choices that are not allowed; a region that has no other keeps its first.

    allowed: None for all but "compress".
    Raises ``PlanError`` for a word that is none of ``ALLOWED``.
    """
    check_allowed(allowed)
    if allowed is None:
        allowed = [word for word in ALLOWED if word != COMPRESS]

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
    return frozenset([way, *(beside for beside in ("offload", COMPRESS) if rule.get(beside))])


def check_allowed(allowed: Collection[str] | None) -> None:
    if isinstance(allowed, str):
        raise PlanError(f"expected a list of what is allowed, such as ['keep', 'hook']; found {show(allowed)}")
    for word in allowed or ():
        if word not in ALLOWED:
            raise PlanError(
                f"allowed: expected some of {', '.join(ALLOWED)}; found {show(word)}{nearest(str(word), ALLOWED)}"
            )
