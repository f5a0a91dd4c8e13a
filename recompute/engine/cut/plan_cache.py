"""Plans that were made before, for frames that are alike; and the choice of one for a frame."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from contextlib import suppress

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_policy import OpPolicy
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


class PlanChoice:
    """Chooses the plan that a frame follows, by its beginning, and the plan that it gets when it ends, by its steps."""

    def __init__(self, op_policy: OpPolicy, cache: PlanCache, variant: Hashable, last: SavePlan | None):
        """op_policy, cache: the region's. variant: the kind of the call. last: the plan of the region's last frame."""
        self.op_policy = op_policy
        self._cache = cache
        self._variant = variant
        self._last = last
        self._guard: Hashable = None

    def to_follow(self, event: Hashable, layout: Layout | None, settings: Hashable) -> SavePlan | None:
        """The plan to follow for a frame that begins so: the last frame's, or another one's that began alike."""
        last = self._last
        self._guard = (self.op_policy, self._variant, event, layout, settings)
        return last if last is not None and last.guard == self._guard else self._cache.get(self._guard)

    def of(self, frame: FrameSteps, results: Collection[int]) -> SavePlan:
        """``solve``, once for all frames that are alike: a cut takes milliseconds (invariant 10).

        A later frame that begins like this one follows the plan.
        """
        key = (
            self.op_policy.price,
            self.op_policy.hold,
            tuple([(step.op, step.reason, step.op_policy, step.inputs, step.made) for step in frame.steps]),
            tuple(frame.facts),
            tuple(frame.saves),
            frozenset(frame.overwritten),
            frozenset(results),
        )
        plan = _solved.get(key)
        if plan is None:
            plan = solve(frame, results, self.op_policy.price, self.op_policy.hold, guard=self._guard)
            _solved.put(key, plan)
        self._cache.put(self._guard, plan)
        return plan

    def of_what_is_left(
        self, frame: FrameSteps, results: Collection[int], held: Collection[int], held_calls: Collection[int]
    ) -> SavePlan:
        """The plan of a frame that has let go of tensors and of arguments, as the plan that it began with said.

        held: the values, and held_calls: the steps whose arguments, it still has. Other values that autograd saved
        belonged to a graph that is dead by now.
        """
        saves = [save for save in frame.saves if save[0] in held or save[0] in frame.overwritten]
        steps = [
            step if step.reason or index in held_calls else step._replace(reason="its arguments have been freed")
            for index, step in enumerate(frame.steps)
        ]
        released = [number for number in range(len(frame.facts)) if number not in held]
        record = FrameSteps(steps, frame.facts, saves, frame.overwritten)
        return solve(record, results, self.op_policy.price, self.op_policy.hold, released)

    def forget(self) -> None:
        """Have no later frame follow the plan that this one began with."""
        self._cache.forget(self._guard)
