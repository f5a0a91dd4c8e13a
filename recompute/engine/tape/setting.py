"""Which ops a rule lets run again, and what it pays for that."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from recompute.engine.cut.ops import OpFacts, facts
from recompute.engine.cut.save_plan import PlanCache
from recompute.engine.saved_tensors import RegionStatistics
from recompute.policy.rules import PRICE


class Verdict(NamedTuple):
    """What a rule makes of an op. ``reason``: why it is not run again; "" where it may be."""

    facts: OpFacts
    reason: str


_keys: dict[Any, Any] = {}


class Setting:
    """Which ops run again: the costly families in ``rerun`` and all that are pure and cheap, but for those in ``keep``.

    keep: families, names of ops ("aten.mm"), and names given to ``recompute.keep``.
    price: the bytes that may be held to save a second of running again.
    plan_cache: the last plans of the regions that share it, as equal layers do, by how their frames began.
    """

    def __init__(
        self,
        statistics: RegionStatistics,
        *,
        rerun: Collection[str] = (),
        keep: Collection[str] = (),
        price: float = PRICE,
        plan_cache: PlanCache | None = None,
    ):
        self.statistics = statistics
        self.plan_cache = PlanCache() if plan_cache is None else plan_cache
        self.rerun = frozenset(rerun)
        self.keep = frozenset(keep)
        self.price = price
        self.verdicts: dict[Any, Verdict] = {}
        key = (self.rerun, self.keep, price)
        self.key = _keys.setdefault(key, key)
        """One and the same object for all settings that say the same."""

    def judge(self, op: Any) -> Verdict:
        verdict = self.verdicts[op] = self.judge_facts(facts(op))
        return verdict

    def judge_facts(self, known: OpFacts) -> Verdict:
        if known.reason:
            return Verdict(known, known.reason)
        if known.name in self.keep or known.family in self.keep:
            return Verdict(known, f"the rule keeps {known.name if known.name in self.keep else known.family}")
        if known.family is not None and known.family not in self.rerun:
            return Verdict(known, f"{known.family}, which the rule does not run again")
        return Verdict(known, "")
