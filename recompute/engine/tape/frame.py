"""One execution of a region by a tape: the steps it takes, the plan it follows, and its end.

The content of a storage is a *value*: each op that writes makes a new one, also in place. Each op is a *step*, which
reads and makes values. When the frame ends, one minimum cut over its steps is its plan: which values are kept, and
which steps run again to regenerate the others that autograd saved. A later frame that takes the same steps follows that
plan as it runs, so it lets go of tensors at once. A frame that does something else deoptimizes: it is decided anew,
from the tensors that it still has. Recipes are always made from the frame's own arguments.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from recompute.engine.bit_comparison import is_verifying
from recompute.engine.compression import Codec
from recompute.engine.cut.filled_memory import with_filled_memory
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_costs import seconds
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import EXPOSED, Kind, tensors_in
from recompute.engine.cut.plan_cache import PlanChoice
from recompute.engine.cut.save_plan import HAND_OUT, KEEP, FrameSteps, SavePlan, StepInstruction, TapeStep
from recompute.engine.dtensors import local_of
from recompute.engine.modes import hidden_from_any_modes
from recompute.engine.recipe_book import open_book
from recompute.engine.recipes import RecordedCall
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import PackedTensor, pack_through, without_graph
from recompute.engine.tape.exposed_memory import bytes_of
from recompute.engine.tape.frame_handles import FrameHandles, KeptValues, ValuesAsTheyAre
from recompute.engine.tape.frame_values import FrameValues, PlanMismatch
from recompute.engine.tape.op_arguments import NotRegenerable, is_plain
from recompute.engine.tape.recorded_call import (
    MadeTensor,
    OpCall,
    as_drawn,
    made_by,
    record_call,
    writable,
)

RELEASED = "it reads a gathered (FSDP) weight that is freed before the module ends"


class TapeFrame:
    """The steps of one execution of a region, and the values that autograd saved in it."""

    def __init__(self, statistics: RegionStatistics, plans: PlanChoice, codec: Codec | None = None):
        """statistics, codec: the region's."""
        self.statistics = statistics
        self._plans = plans
        self._book = open_book()
        self.values = FrameValues(statistics.name, self._book, compares=is_verifying() and codec is None)
        self._has_begun = False
        self._is_deoptimized = False
        self._count = 0
        """Steps taken."""
        self._steps: list[TapeStep] = []
        self._calls: dict[int, RecordedCall] = {}
        """The calls of the steps that may run again."""
        self._saves: list[tuple[int, int]] = []
        """The values that autograd saved, each with the step that was next then."""
        self.handles = FrameHandles(statistics, codec, self.values, self._calls)

    def _begin(self, event: Any, args: tuple) -> None:
        """Choose the plan to follow by the first thing that happens: an op runs, or a tensor is saved or pinned."""
        self._has_begun = True
        first = next(iter(tensors_in(args)), None)
        layout = Layout.of(first) if first is not None and is_plain(first) else None
        if (plan := self._plans.to_follow(event, layout, self.values.numerics)) is not None:
            self.values.follow(plan)

    def follow(self, op: Any, args: tuple, unobserved: bool, op_policy: OpPolicy) -> StepInstruction | None:
        """The plan's instruction for this step, if there is a plan. A step that does not matter is taken at once.

        If the plan has another step here, this deoptimizes and returns None. op_policy: the one in force.
        """
        if not self._has_begun:
            self._begin(op, args)
        plan = self.values.plan
        if plan is None:
            return None
        instructions = plan.instructions
        if self._count < len(instructions):
            instruction = instructions[self._count]
            step = instruction.step
            if step.op is op and step.unobserved == unobserved and step.op_policy is op_policy:
                if not instruction.matters:
                    self._count += 1
                return instruction
        self.deoptimize()
        return None

    def deoptimize(self) -> None:
        """Go on without the plan: take back the tensors that it dropped, so that nothing depends on the plan now."""
        values, plan = self.values, self.values.plan
        assert plan is not None
        with hidden_from_any_modes():
            self.handles.take_back(plan)
        self._steps = list(plan.steps[: self._count])
        size = max([number + 1 for step in self._steps for number in step.made], default=0)
        size = max([size, *(number + 1 for number in values.versions)])
        values.plan, values.facts = None, list(plan.facts[:size])
        self._is_deoptimized = True

    def run(self, call: OpCall) -> Any:
        """Run a step that no plan foresees, and write it down."""
        known = call.known
        recorded: RecordedCall | None = None
        inputs: tuple[int, ...] = ()
        try:
            if not call.unobserved:
                recorded, inputs = record_call(self.values, call)
        except NotRegenerable as error:
            call = call._replace(reason=call.reason or str(error))
        if known.running_statistics and recorded is not None:
            call = call._replace(reason="")
        output = call.run()
        made = made_by(self.values, call, output)
        reason = call.reason
        if made is None:
            made, recorded, reason = [], None, reason or "its output shares memory with another tensor"
        if recorded is not None and (recorded := as_drawn(recorded, known)) is None:
            reason = "it draws random numbers from an unexpected generator"
        costs = 0.0 if reason else seconds(call.op, call.args, call.kwargs, output)
        self._write_down(call, reason, inputs, made, recorded, costs)
        return output

    def run_planned(self, instruction: StepInstruction, call: OpCall) -> Any:
        """Run a step as the plan has foreseen it, or give the plan up."""
        values, known, is_function = self.values, call.known, call.function is not None
        plan, step = values.plan, instruction.step
        assert plan is not None
        recorded = None
        is_pure = known.kind is Kind.PURE and not call.unobserved
        try:
            if not is_pure and not is_function and not self._writes_as_foreseen(instruction, call):
                raise PlanMismatch
            if instruction.runs_again:
                recorded, inputs = record_call(values, call, step.inputs)
                if recorded is None or inputs != step.inputs:
                    raise PlanMismatch
        except (PlanMismatch, NotRegenerable):
            if self.values.plan is not None:
                self.deoptimize()
            return self.run(call)
        output = call.run()
        if is_pure and len(step.made) == 1 and (recorded is None or recorded.rng is None) and is_plain(output):
            storage = output.untyped_storage()
            if storage._cdata not in values.current and Layout.of(output) == instruction.layouts[0]:
                if recorded is not None:
                    self._calls[self._count] = recorded
                self._count += 1
                if (number := step.made[0]) in plan.tracked:
                    values.bind_new(number, output, storage, holds=number in plan.kept)
                return output
        made = made_by(values, call, output, instruction.layouts)
        has_drawn_unseen = recorded is not None and (recorded := as_drawn(recorded, known)) is None
        is_other = is_function and not self._writes_as_foreseen(instruction, call)
        if made is None or has_drawn_unseen or is_other or [each for *_, each in made] != [*instruction.layouts]:
            self.deoptimize()
            self._write_down(
                call, call.reason or "it does not return the same kind of outputs in each call", (), made or [], None
            )
            return output
        if recorded is not None:
            self._calls[self._count] = recorded
        self._count += 1
        tracked, current = plan.tracked, values.current
        for number, (_, tensor, _) in zip(step.made, made, strict=True):
            if number in tracked or tensor.untyped_storage()._cdata in current:
                is_written = bool(known.writes) or call.unobserved
                values.bind(number, tensor, tensor if number in plan.kept else None, written=is_written)
        return output

    def _writes_as_foreseen(self, instruction: StepInstruction, call: OpCall) -> bool:
        """Whether a step may write over the values that the plan expects, and over no others."""
        if not call.known.writes and not call.unobserved:
            return True
        assert self.values.plan is not None
        written = map(self.values.current.of, writable(self.values, call))
        return self.values.plan.tracked.intersection(written) == instruction.tracked_overwritten

    def _write_down(
        self,
        call: OpCall,
        reason: str,
        inputs: tuple[int, ...],
        made: list[MadeTensor],
        recorded: RecordedCall | None,
        costs: float = 0.0,
    ) -> None:
        values, step, known, op_policy = self.values, self._count, call.known, self._plans.op_policy
        overwrites = [values.current.of(tensor) for _, tensor, _ in made]
        writes = bool(known.writes) or call.unobserved
        # The cut may keep what is costly to make again, or impossible. At price 0 it hardly ever keeps what is costly.
        # If it keeps any other value, that is held from the next frame on, unless autograd has saved it in this one.
        is_priced = op_policy.price > 0 or op_policy.hold is not None
        holds = recorded is None or bool(reason) or (is_priced and known.is_costly)
        numbers = [
            values.add(tensor, layout, step=step, slot=slot, held=tensor if holds else None, written=writes)
            for slot, tensor, layout in made
        ]
        if recorded is not None:
            self._calls[step] = recorded
        self._add_step(
            TapeStep(
                call.op,
                known.name,
                inputs,
                tuple(numbers),
                reason,
                costs,
                is_costly=known.is_costly,
                is_thin=known.is_thin,
                writes=writes,
                overwrites=tuple([number for number in overwrites if number is not None]),
                unobserved=call.unobserved,
                op_policy=call.op_policy,
            )
        )

    def _add_step(self, step: TapeStep) -> None:
        self._steps.append(step)
        self._count += 1

    def save(self, tensor: Tensor) -> PackedTensor:
        """Autograd saves a tensor. Returns what it holds in its place."""
        if not self._has_begun:
            self._begin("saved", (tensor,))
        values = self.values
        try:
            plan, index = values.plan, len(self._saves)
            foreseen = None if plan is None or index >= len(plan.saves) else plan.saves[index][0]
            number, parameter = values.number_of(tensor, foreseen)
        except PlanMismatch:
            self.deoptimize()
            return self.save(tensor)
        except NotRegenerable:
            return pack_through(self.handles.outer, without_graph(tensor), self.statistics.name)
        if plan is not None and number != foreseen:
            self.deoptimize()
        self._saves.append((number, self._count))
        return self.handles.hold(number, tensor, parameter)

    def pin(self, tensor: Tensor, op_policy: OpPolicy) -> None:
        """``tensor``, a plain one, was passed to ``recompute.keep``. op_policy: the one in force."""
        if self._follow_on(self.values.current.of(tensor), KEEP, tensor, False, op_policy) is not None:
            self._count += 1
            return
        number, _ = self.values.number_of(tensor)
        self._add_step(TapeStep(KEEP, KEEP, (number,), (), "not an op", op_policy=op_policy))

    def hand_out(
        self,
        storage: torch.UntypedStorage,
        tensor: Tensor | None,
        parameter: Tensor | None,
        unobserved: bool,
        op_policy: OpPolicy,
    ) -> None:
        """The storage that ``tensor`` is a view of is handed out: it holds another value from now on.

        unobserved: that value stays as it is, as only the code that runs now writes to it. Otherwise others may write
        to it at any time. parameter: the one that the storage belongs to.
        """
        values = self.values
        number = values.current.get(storage._cdata)
        if number is None or storage._cdata in values.exposed:
            return
        tensor = bytes_of(storage) if tensor is None else tensor
        instruction = self._follow_on(number, HAND_OUT, tensor, unobserved, op_policy)
        part = tensor if parameter is None else local_of(parameter)
        if not unobserved:
            values.exposed.add(storage._cdata)
        if instruction is not None:
            assert values.plan is not None
            (made,) = instruction.step.made
            is_held = parameter is not None or made in values.plan.kept
            values.bind(made, tensor, part if is_held else None, parameter)
            self._count += 1
            return
        self.handles.move(number, storage, tensor)
        layout = values.facts[number].layout
        made = values.add(tensor, layout, step=self._count, slot=None, held=part, parameter=parameter)
        self._add_step(
            TapeStep(
                HAND_OUT,
                HAND_OUT,
                (number,),
                (made,),
                EXPOSED,
                writes=True,
                overwrites=(number,),
                unobserved=unobserved,
                op_policy=op_policy,
            )
        )

    def _follow_on(
        self, number: int | None, event: str, tensor: Tensor, unobserved: bool, op_policy: OpPolicy
    ) -> StepInstruction | None:
        """As ``follow``, for a step that is no op and reads ``tensor`` alone, the value ``number``."""
        instruction = self.follow(event, (tensor,), unobserved, op_policy)
        if instruction is not None and instruction.step.inputs != (number,):
            self.deoptimize()
            return None
        return instruction

    def abandon(self) -> None:
        """The region has raised an error. Its tensors may live on."""
        with hidden_from_any_modes():
            self.finish((), ValuesAsTheyAre)

    def discard(self) -> None:
        """Nobody has the results, nor will run their backward. The frame counts nowhere."""
        self.handles.drop()
        self._clear()

    def finish(self, outputs: Collection[Tensor], keep: type[KeptValues] = KeptValues) -> SavePlan | None:
        """Decide which saved tensors are kept, and drop the others, if the frame has not dropped them before.

        outputs: the region's, which the scope around it may drop too. keep: holds the kept values.
        Returns the plan for the next frame, if there is one.
        """
        try:
            results: dict[int, Tensor] = {}
            if self._book is not None:
                numbers = [(tensor, self.values.current.of(tensor)) for tensor in outputs]
                results = {number: tensor for tensor, number in numbers if number is not None}
            plan = self._decide(results)
            recipes = self.handles.resolve(plan, keep)
            self.statistics.dropped_outputs = []
            for number in plan.outputs.intersection(results):
                assert self._book is not None
                layout, counted = plan.facts[number].layout, number in plan.demanded
                self._book.enter(results[number], recipes[plan.origin(number)], number, layout, counted=counted)
            self.statistics.plan = plan
            return None if self._is_deoptimized else plan
        except BaseException:  # as from a saved-tensor hook around the region
            self.handles.drop()
            raise
        finally:
            self._clear()

    def _decide(self, results: Collection[int]) -> SavePlan:
        values, plan = self.values, self.values.plan
        values.note_unseen_writes()
        if plan is not None:
            if (
                self._count == len(plan.steps)
                and len(self._saves) == len(plan.saves)
                and values.overwritten & plan.tracked == plan.tracked_overwritten
            ):
                return plan
            self.deoptimize()
        released = values.released_parameters()
        steps = [
            step if step.reason or released.isdisjoint(step.inputs) else step._replace(reason=RELEASED)
            for step in self._steps
        ]
        parts = {index: layout for index, call in self._calls.items() for layout in (call.writes or {}).values()}
        steps = with_filled_memory(steps, values.facts, {number for number, _ in self._saves}, parts)
        record = FrameSteps(steps, values.facts, self._saves, values.overwritten)
        if self._is_deoptimized:  # it knows only the values of its beginning that the plan needed
            self._plans.forget()
        else:
            plan = self._plans.of(record, results)
            if plan.kept <= values.held.keys():
                return plan
            self._is_deoptimized = True  # the next frame keeps the values that this one has not held
        return self._plans.of_what_is_left(record, results, values.held.keys(), self._calls.keys())

    def _clear(self) -> None:
        """Let go of everything: autograd holds the pack hook, and so this, as long as the graph lives (invariant 8)."""
        self.values.clear()
        self.handles.clear()
        self._book = None
        self._calls.clear()
        self._steps, self._saves = [], []
