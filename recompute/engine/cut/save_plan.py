"""The steps of a frame without its tensors, and the plan made of them: the values it keeps, the steps it runs again."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from recompute.engine.cut.best_cuts import best_cut
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.minimum_cut import Op, Value
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.tolerance import can_be_codes, passes_on, tolerates


class ValueRef(NamedTuple):
    """A tensor as a view of a value."""

    value: int
    layout: Layout


class ValueFacts(NamedTuple):
    """The facts of a value. A value is the content of a storage from one write to the next.

    ``step`` made it, as its output ``slot``. If ``step`` is None, it was there before. If ``slot`` is None, running the
    step again does not regenerate it.
    """

    layout: Layout
    nbytes: int
    step: int | None
    slot: int | None
    alive: bool
    """Whether it lives anyway, as parameters do, so that keeping it costs nothing."""
    is_parameter: bool = False
    is_exposed: bool = False
    """Whether others may write to its memory unseen, so that nothing that reads it runs again."""


class TapeStep(NamedTuple):
    """One op, or ``recompute.keep`` of a tensor."""

    op: Any
    name: str
    inputs: tuple[int, ...]
    """The values that it reads, one for each tensor among its arguments."""
    made: tuple[int, ...]
    """The values that it makes. Those that have a slot come back when it runs again."""
    reason: str
    """Why it is not run again; "" if it may be."""
    seconds: float = 0.0
    is_costly: bool = False
    is_thin: bool = False
    """Whether it is a GEMM that takes no longer than to read and write its output."""
    writes: bool = False
    """Whether it changes arguments."""
    overwrites: tuple[int, ...] = ()
    """The values that it replaces in their memory, so that they are gone after it."""
    unobserved: bool = False
    """Whether it ran where not all that happens is seen."""
    op_policy: OpPolicy | None = None
    """Which ops may run again where this one ran."""


class StepInstruction(NamedTuple):
    """A step that a plan expects, and the work there for a frame that follows the plan."""

    step: TapeStep
    matters: bool
    """Whether there is anything to do but to run it."""
    runs_again: bool
    layouts: tuple[Layout, ...]
    """The layouts of the values that it makes."""
    tracked_overwritten: frozenset[int]
    """The plan's ``tracked`` values that are gone after it."""


KEEP = "recompute.keep"
"""In the place of a step's op: ``recompute.keep`` was called."""
HAND_OUT = "handed out"
"""In the place of a step's op: memory was handed out. From then on it holds another value."""

LARGEST_COPY = 1 << 16
"""In bytes: a kept value without gradients is copied up to this size, so that it may change before backward, as buffers
do.

It is 16384 float32. Averages, statistics and counters of any hidden size fit, and copying one takes no longer than the
launch. The tables of angles and the masks that every layer reads do not fit, once sequences are long.
"""


@dataclass(frozen=True)
class SavePlan:
    """The values to keep and the steps to run again, in a frame of these ``steps``."""

    steps: tuple[TapeStep, ...]
    facts: tuple[ValueFacts, ...]
    saves: tuple[tuple[int, int], ...]
    """The values that autograd saved, in order, each with the step that was next then."""
    kept: frozenset[int]
    rerun: tuple[int, ...]
    """The steps that run again, in order, for values that autograd saved or for outputs."""
    outputs: frozenset[int] = frozenset()
    """Values of the region's results that come back without a costly step, so whoever else saves them may drop them."""
    overwritten: frozenset[int] = frozenset()
    """Values that were overwritten: autograd refuses them if it saved them, and nothing is regenerated from them."""
    guard: Hashable = None
    """How the frame began that it was made of. A frame that begins alike may follow it.

    None if that frame had followed another plan and had let go of tensors before it deoptimized.
    """

    @property
    def is_complete(self) -> bool:
        """Whether its frame still had everything that it made when the plan was made."""
        return self.guard is not None

    @cached_property
    def demanded(self) -> frozenset[int]:
        return frozenset(number for number, _ in self.saves)

    @cached_property
    def dropped(self) -> frozenset[int]:
        """The values that autograd saved and that come back by running steps again."""
        return self.demanded - self.kept - self.overwritten

    @cached_property
    def kept_nbytes(self) -> int:
        """Bytes of the values that are held and do not live anyway. One that was saved and overwritten is held, too."""
        held = self.kept | (self.demanded & self.overwritten)
        return sum(self.facts[number].nbytes for number in held if not self.lives_anyway(number))

    @cached_property
    def dropped_nbytes(self) -> int:
        return sum(self.facts[number].nbytes for number in self.dropped)

    @cached_property
    def copyable(self) -> frozenset[int]:
        """The values that it keeps and that are small enough to be copied, because others may write to them.

        A value that autograd itself saved, in memory that the region made, is none of them. It is held anyway, a copy
        would be held beside it, and that memory is no buffer of others.
        """
        facts, demanded = self.facts, self.demanded
        return frozenset(
            n
            for n in self.kept
            if not facts[n].alive
            and facts[n].nbytes <= LARGEST_COPY
            and (n not in demanded or self._is_in_given_memory(n))
        )

    def _is_in_given_memory(self, number: int) -> bool:
        """Whether a value may be in memory that was there before, as a buffer that the region updates in place."""
        pending, seen = [number], set[int]()
        while pending:
            step = self.facts[pending.pop()].step
            if step is None:
                return True
            if step not in seen:
                seen.add(step)
                pending += self.steps[step].overwrites
        return False

    @cached_property
    def eager_nbytes(self) -> int:
        """Bytes of the values that autograd saved and that do not live anyway."""
        return sum(self.facts[number].nbytes for number in self.demanded if not self.lives_anyway(number))

    def lives_anyway(self, number: int) -> bool:
        """Whether holding a value costs nothing.

        Others hold the memory of a value that was given and then overwritten: a batch norm's running statistics, say.
        """
        known = self.facts[number]
        return known.alive or (number in self.overwritten and known.step is None)

    @cached_property
    def rerun_set(self) -> frozenset[int]:
        return frozenset(self.rerun)

    def origin(self, number: int) -> int:
        """The step that regenerates a value when it runs again."""
        step = self.facts[number].step
        assert step is not None
        return step

    @cached_property
    def slots(self) -> dict[int, dict[int, int]]:
        """For each step that runs again: the values that it regenerates, each with the number of its output."""
        facts = self.facts
        return {
            index: {n: slot for n in self.steps[index].made if (slot := facts[n].slot) is not None}
            for index in self.rerun
        }

    @cached_property
    def tracked(self) -> frozenset[int]:
        """A frame that follows this plan must know these values: it keeps or drops them, or runs steps on them."""
        read = [number for step in self.rerun for number in (*self.steps[step].inputs, *self.steps[step].made)]
        return self.kept.union(self.demanded, self.outputs, read, self.handed_out, pinned_by(self.steps))

    @cached_property
    def handed_out(self) -> frozenset[int]:
        """The values whose memory was handed out, and the values that took their places."""
        return frozenset(number for step in self.steps if step.op is HAND_OUT for number in (*step.inputs, *step.made))

    @cached_property
    def tracked_overwritten(self) -> frozenset[int]:
        return self.overwritten & self.tracked

    @cached_property
    def instructions(self) -> tuple[StepInstruction, ...]:
        """The instruction for each step of a frame that follows this plan."""
        instructions = []
        for index, step in enumerate(self.steps):
            overwritten = self.tracked.intersection(step.overwrites)
            runs_again = index in self.rerun_set
            matters = runs_again or step.op is KEEP or step.writes or not self.tracked.isdisjoint(step.made)
            layouts = tuple([self.facts[number].layout for number in step.made])
            instructions.append(StepInstruction(step, matters, runs_again, layouts, overwritten))
        return tuple(instructions)

    @cached_property
    def compressible(self) -> frozenset[int]:
        """The values that it keeps and that may come back a little off.

        All readers of such a value tolerate that: the op that autograd saved it for, the steps that run again on it,
        and the readers of their outputs. It was made here, of such values, and was not passed to ``recompute.keep``.
        """
        facts, pinned = self.facts, pinned_by(self.steps)
        bearing = [number for number in self.kept if self._may_be_off(number)]
        return frozenset(
            number
            for number in bearing
            if number not in pinned | self.overwritten | self.handed_out
            and not facts[number].alive
            and not facts[number].is_exposed
            and can_be_codes(facts[number].layout, facts[number].nbytes)
        )

    def _may_be_off(self, number: int) -> bool:
        """Whether a value was made here, and all its readers tolerate that it is off."""
        pending, seen = [number], {number}
        while pending:
            value = pending.pop()
            known = self.facts[value]
            if known.step is None or value in self.outputs:
                return False
            maker = self.steps[known.step]
            if maker.unobserved or not passes_on(maker.name, maker.inputs):
                return False
            if not all(self._is_saver_bearing(value, step) for saved, step in self.saves if saved == value):
                return False
            for index in self.rerun:
                step = self.steps[index]
                if value in step.inputs:
                    if not passes_on(step.name, step.inputs):
                        return False
                    pending += [made for made in step.made if made not in seen]
                    seen.update(step.made)
        return True

    def _is_saver_bearing(self, number: int, step: int) -> bool:
        """Whether each op that may have saved a value when ``step`` was next tolerates a value that is off.

        It may be ``step``, because autograd saves an op's inputs before it runs. It may be the step before, if that is
        not known to save only inputs. A custom ``autograd.Function`` saves tensors after the last op inside of it.
        """
        if step:
            before = self.steps[step - 1]
            touches = number in before.made or number in before.inputs
            if before.unobserved or (touches and not passes_on(before.name, before.inputs)):
                return False
        if step == len(self.steps):
            return False
        saver = self.steps[step]
        return number in saver.inputs and tolerates(saver.name, saver.inputs)


def pinned_by(steps: Iterable[TapeStep]) -> set[int]:
    return {number for step in steps if step.op is KEEP for number in step.inputs}


class FrameSteps(NamedTuple):
    """The record of a frame, in the words of ``SavePlan``."""

    steps: Sequence[TapeStep]
    facts: Sequence[ValueFacts]
    saves: Collection[tuple[int, int]]
    overwritten: Collection[int]


def tables(frame: FrameSteps | SavePlan, released: Collection[int] = ()) -> tuple[list[Value], list[Op]]:
    """The tables for ``minimum_cut``, numbered as ``facts`` and ``steps`` are. released: as ``solve`` takes it."""
    facts, unkeepable = frame.facts, {*frame.overwritten, *released}
    wanted = {number for number, _ in frame.saves}.difference(frame.overwritten)
    values = [
        Value(
            None if number in unkeepable else known.nbytes, number in wanted, known.alive and number not in unkeepable
        )
        for number, known in enumerate(facts)
    ]
    pinned = pinned_by(frame.steps)
    ops = [
        Op(
            tuple(dict.fromkeys(step.inputs)),
            tuple([number for number in step.made if facts[number].slot is not None]),
            step.seconds,
            not step.reason and pinned.isdisjoint(step.made),
        )
        for step in frame.steps
    ]
    return values, ops


def solve(
    frame: FrameSteps,
    results: Collection[int],
    price: float,
    hold: int | None = None,
    released: Collection[int] = (),
    guard: Hashable = None,
) -> SavePlan:
    """The plan that holds least, counting a second of running again as ``price`` bytes.

    hold: if it is given, the plan is a fast one that holds no more bytes than this, if there is one. The price does not
    matter then.
    results: values of the region's results. The plan tells which of them come back without a costly step.
    released: values whose memory has been freed. They cannot be kept, and neither can overwritten ones.
    """
    steps, facts, saves, overwritten = frame
    cut = best_cut(*tables(frame, released), price, hold)
    rerun = set(cut.rerun)
    kept, pinned = cut.kept, pinned_by(steps)
    outputs = set()
    for number in results:
        if (
            number not in kept
            and number not in pinned
            and (needed := derivation(number, steps, facts, kept)) is not None
        ):
            rerun |= needed
            outputs.add(number)
    return SavePlan(
        steps=tuple(steps),
        facts=tuple(facts),
        saves=tuple(saves),
        kept=frozenset(kept),
        rerun=tuple(sorted(rerun)),
        outputs=frozenset(outputs),
        overwritten=frozenset(overwritten),
        guard=guard,
    )


def derivation(
    number: int, steps: Sequence[TapeStep], facts: Sequence[ValueFacts], kept: Collection[int]
) -> set[int] | None:
    """The steps that regenerate ``number`` from ``kept`` values; None if one of them is costly or may not run again."""
    needed: set[int] = set()
    pending = [number]
    while pending:
        value = pending.pop()
        if value in kept:
            continue
        index = facts[value].step
        if index is None or facts[value].slot is None or steps[index].reason or steps[index].is_costly:
            return None
        if index not in needed:
            needed.add(index)
            pending += steps[index].inputs
    return needed
