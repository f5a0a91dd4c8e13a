"""Plans that were made before, for frames that are alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from contextlib import suppress

from recompute.engine.cut.save_plan import FrameSteps, SavePlan, solve


class PlanCache:
    """At most ``MOST`` plans. The least recently used one is dropped first."""

    MOST = 256

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, SavePlan] = OrderedDict()

    def get(self, key: Hashable) -> SavePlan | None:
        plan = self._plans.get(key)
        if plan is not None:
            with suppress(KeyError):  # another thread has just dropped it
                self._plans.move_to_end(key)
        return plan

    def forget(self, key: Hashable) -> None:
        self._plans.pop(key, None)

    def put(self, key: Hashable, plan: SavePlan) -> None:
        self._plans[key] = plan
        if len(self._plans) > self.MOST:
            self._plans.popitem(last=False)


_solved = PlanCache()
"""The plans of all frames, by all that they depend on."""


def solve_once(
    frame: FrameSteps, results: Collection[int], price: float, hold: int | None, guard: Hashable
) -> SavePlan:
    """``solve``, once for all frames that are alike: a cut takes milliseconds (invariant 10)."""
    key = (
        price,
        hold,
        tuple([(step.op, step.reason, step.op_policy, step.inputs, step.made) for step in frame.steps]),
        tuple(frame.facts),
        tuple(frame.saves),
        frozenset(frame.overwritten),
        frozenset(results),
    )
    plan = _solved.get(key)
    if plan is None:
        plan = solve(frame, results, price, hold, guard=guard)
        _solved.put(key, plan)
    return plan
