"""Which ops a rule lets run again: one answer for each op, which the tape and compiled code both ask for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from recompute.engine.cut.ops import EFFECT, FACTORY, STATISTICS, Kind, OpFacts, facts, facts_of_call
from recompute.policy.meaning import Meaning, Mechanism


class Decision(NamedTuple):
    """A rule's decision on an op. ``reason``: why its outputs are kept; "" where it may run again."""

    facts: OpFacts
    reason: str


@dataclass(eq=False)
class OpPolicy:
    """Which ops of a region may run again, and at which price.

    All rules that say the same of ops share one (see ``op_policy``), so two regions have the same op policy if it is
    the same object. Plans of eager code and graphs of compiled code that were made under it serve both.
    """

    mechanism: Mechanism
    rerun: frozenset[str]
    keep: frozenset[str]
    price: float
    hold: int | None
    """The most bytes that a region may hold, where the rule says that and no price; else None."""
    regenerates: bool
    decisions: dict[Any, Decision] = field(default_factory=dict, init=False)
    """The decisions on the ops that a tape has met; see ``decide``."""

    def decide(self, op: Any) -> Decision:
        """Decide on an op that a tape meets for the first time, and remember that in ``decisions``."""
        decision = self.decisions[op] = self.decide_by(facts(op))
        return decision

    def decide_by(self, known: OpFacts) -> Decision:
        """The decision on an op, or on one call of it. known: its facts."""
        return Decision(known, known.reason or self._reason_to_keep(known))

    def may_rerun_compiled(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether this call may run again in compiled code.

        In compiled code a checkpoint runs ops again, and not Python. AOTAutograd has made the graph functional, so two
        kinds of op may run again there whose outputs a tape keeps. One is factories: nothing writes unseen to their
        outputs. The other collects statistics: it returns them instead of writing them.

        An op of another library never runs again there, unless a tag says that it draws random numbers: it may draw
        all the same, and nothing watches the generators there.
        """
        known = facts_of_call(op, args, kwargs)
        if known.reason == EFFECT or (known.is_foreign and known.kind is not Kind.RANDOM):
            return False
        if self.mechanism is not Mechanism.TAPE:
            return self.mechanism is Mechanism.CHECKPOINT
        return (not known.reason or known.reason in (FACTORY, STATISTICS)) and not self._reason_to_keep(known)

    def keeps_tensor(self, name: str | None) -> bool:
        """Whether a tensor is kept that was passed to ``recompute.keep`` with ``name``."""
        return name is None or name in self.keep

    def _reason_to_keep(self, known: OpFacts) -> str:
        """Why the rule itself keeps an op's outputs; "" if it does not."""
        if not self.regenerates:
            return "the rule reruns nothing"
        if known.name in self.keep or known.family in self.keep:
            return f"the rule's keep lists {known.name if known.name in self.keep else known.family}"
        if known.is_costly and known.family not in self.rerun:
            return f"{known.family}: the rule does not rerun it"
        return ""


def op_policy(meaning: Meaning) -> OpPolicy:
    """The op policy of a rule."""
    return _op_policy(meaning.mechanism, meaning.rerun, meaning.keep, meaning.price, meaning.hold, meaning.regenerates)


_op_policy = functools.cache(OpPolicy)
