"""One execution of a region by a tape: the steps it takes, the plan it follows, and what it drops when it ends.

The content of a storage is a *value*: each op that writes makes a new one, also in place. Each op is a *step*, which
reads and makes values. When the frame ends, one minimum cut over its steps is its plan: which values are kept, and
which steps run again to give back the others that autograd saved. A later frame that takes the same steps follows that
plan as it runs, so it lets go of tensors at once. A frame that does something else deoptimizes: it is decided anew,
from what it still has. Recipes are always made from the frame's own arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from typing import Any

import torch
from torch import Tensor

from recompute.engine.bit_comparison import is_verifying
from recompute.engine.compression import Codec
from recompute.engine.cut.filled_memory import with_filled_memory
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_costs import seconds
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import Kind, tensors_in
from recompute.engine.cut.plan_cache import PlanCache, solve_once
from recompute.engine.cut.save_plan import (
    HAND_OUT,
    KEEP,
    FrameSteps,
    SavePlan,
    StepInstruction,
    TapeStep,
    solve,
)
from recompute.engine.dtensors import is_managed_elsewhere
from recompute.engine.modes import runs_hidden_from_modes
from recompute.engine.recipe_book import open_book
from recompute.engine.recipes import Handle, RecipeGroup, RecordedCall
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedTensor,
    are_held_as_they_are,
    pack_through,
    seen_as,
    top_hooks,
    version_of,
)
from recompute.engine.tape.exposed_memory import bytes_of
from recompute.engine.tape.frame_values import FrameValues, PlanMismatch, without_graph
from recompute.engine.tape.kept_values import KeptValues, ValuesAsTheyAre
from recompute.engine.tape.op_arguments import NotRegenerable, is_plain, parameter_of
from recompute.engine.tape.recorded_call import (
    MadeTensor,
    OpCall,
    agree,
    as_drawn,
    count_writes,
    made_by,
    record_call,
    writable,
)
from recompute.engine.thread_state import sharing_values

RELEASED = "it reads a weight that was gathered for a part of the module, and is not held to its end"


class TapeFrame:
    """The steps of one execution of a region, and the handles of what autograd saved in it."""

    name = "a tape that is still running"

    def __init__(
        self,
        statistics: RegionStatistics,
        op_policy: OpPolicy,
        plan_cache: PlanCache,
        variant: Hashable,
        last: SavePlan | None,
        codec: Codec | None = None,
    ):
        """All arguments are the region's. last: the plan of its last frame."""
        self.statistics = statistics
        self.outer = top_hooks()
        self._op_policy = op_policy
        self._plan_cache = plan_cache
        self._variant = variant
        self._last = last
        self._codec = codec
        self._book = open_book()
        self.values = FrameValues(statistics.name, self._book, compares=is_verifying() and codec is None)
        self.has_begun = False
        self._guard: Hashable = None
        self._is_deoptimized = False
        self._count = 0
        """Steps taken."""
        self._steps: list[TapeStep] = []
        self._calls: dict[int, RecordedCall] = {}
        """The calls of the steps that may run again."""
        self._saves: list[tuple[int, int]] = []
        """The values that autograd saved, each with the step that was next then."""
        self._handles: list[weakref.ref[Handle]] = []
        self._with_graphs: list[KeptTensor] = []
        """Tensors that were kept as soon as they were saved. They have their graphs until the frame ends."""
        self._stand_ins: weakref.WeakKeyDictionary[Handle, Handle] | None = None
        """For each handle whose tensor is dropped, one that gives the value back while the frame runs.

        They are made as soon as somebody asks, as ``autograd.grad`` inside of the region does.
        """
        self.are_held_as_they_are = codec is None and are_held_as_they_are(self.outer)
        self._group = RecipeGroup()

    def choose_plan(self, event: Any, layout: Layout | None) -> None:
        """Choose the plan to follow by the first thing that happens: the last frame's, or one that began alike."""
        if self.has_begun:
            return
        self.has_begun = True
        last = self._last
        self._guard = (self._op_policy, self._variant, event, layout)
        is_alike = last is not None and last.guard == self._guard
        if (plan := last if is_alike else self._plan_cache.get(self._guard)) is not None:
            self.values.follow(plan)

    def begin(self, op: Any, args: tuple) -> None:
        """The first op is about to run."""
        first = next(iter(tensors_in(args)), None)
        self.choose_plan(op, Layout.of(first) if first is not None and is_plain(first) else None)

    def follow(self, op: Any, unobserved: bool, op_policy: OpPolicy) -> StepInstruction | None:
        """The plan's instruction for this step. A step that does not matter counts as taken at once.

        If the plan has another step here, this deoptimizes and returns None. op_policy: the one in force.
        """
        plan = self.values.plan
        assert plan is not None
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

    @runs_hidden_from_modes
    def deoptimize(self) -> None:
        """Go on without the plan: take back what the frame has let go of, so that nothing depends on the plan now."""
        plan = self.values.plan
        assert plan is not None
        values = self.values
        with sharing_values():
            for dropped, stand_in in self._find_stand_ins():
                dropped.tensor = stand_in.get()
                dropped.version = version_of(dropped.tensor)
                whole = seen_as(dropped.tensor, plan.facts[dropped.number].layout)
                values.held.setdefault(dropped.number, whole)
        for reference in self._handles:
            handle = reference()
            if handle is not None and handle.tensor is not None and handle.number not in values.overwritten:
                values.held.setdefault(handle.number, handle.tensor)
        self._steps = list(plan.steps[: self._count])
        size = max([number + 1 for step in self._steps for number in step.made], default=0)
        size = max([size, *(number + 1 for number in values.versions)])
        values.plan, values.facts = None, list(plan.facts[:size])
        self._is_deoptimized = True
        self._stand_ins = None

    def _find_stand_ins(self) -> list[tuple[Handle, Handle]]:
        """Each handle whose tensor is dropped, and one that gives its value back while the frame still runs.

        Recipes that none of these needs are freed here, so that no value is held for them.
        """
        plan = self.values.plan
        assert plan is not None
        recipes = self._kept(ValuesAsTheyAre, plan).recipes(self._calls)
        found = []
        for reference in self._handles:
            handle = reference()
            if handle is not None and handle.tensor is None:
                found.append((handle, recipes[plan.origin(handle.number)].handle(handle.number, handle.view)))
        return found

    def take(self, handle: Handle) -> Tensor:
        """A value that is asked for while the frame still runs, as by ``autograd.grad`` inside of it."""
        if self._stand_ins is None or handle not in self._stand_ins:
            self._stand_ins = weakref.WeakKeyDictionary(self._find_stand_ins())
        return self._stand_ins[handle].get()

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
        output = call.op(*call.args, **call.kwargs) if call.function is None else call.function()
        if known.writes:
            count_writes(call)
        made = made_by(self.values, call, output)
        reason = call.reason
        if made is None:
            made, recorded, reason = [], None, reason or "its output shares memory with another tensor"
        if recorded is not None and (recorded := as_drawn(recorded, known)) is None:
            reason = "it draws random numbers, and not from the generator that it should"
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
        output = call.op(*call.args, **call.kwargs) if call.function is None else call.function()
        if is_pure and len(step.made) == 1 and (recorded is None or recorded.rng is None) and is_plain(output):
            storage = output.untyped_storage()
            if storage._cdata not in values.current and Layout.of(output) == instruction.layouts[0]:
                if recorded is not None:
                    self._calls[self._count] = recorded
                self._count += 1
                if (number := step.made[0]) in plan.tracked:
                    values.bind_new(number, output, storage, holds=number in plan.kept)
                return output
        if known.writes:
            count_writes(call)
        made = made_by(values, call, output, instruction.layouts)
        has_drawn_unseen = recorded is not None and (recorded := as_drawn(recorded, known)) is None
        is_other = is_function and not self._writes_as_foreseen(instruction, call)
        if made is None or has_drawn_unseen or is_other or not agree(made, instruction.layouts):
            self.deoptimize()
            self._write_down(call, call.reason or "it does not do the same every time", (), made or [], None)
            return output
        if recorded is not None:
            self._calls[self._count] = recorded
        self._count += 1
        tracked, current = plan.tracked, values.current
        for number, (_, tensor, _) in zip(step.made, made, strict=True):
            if number in tracked or tensor.untyped_storage()._cdata in current:
                is_written = bool(known.writes) or call.unobserved
                values.bind(number, tensor, holds=number in plan.kept, written=is_written)
        return output

    def _writes_as_foreseen(self, instruction: StepInstruction, call: OpCall) -> bool:
        """Whether the values that a step may write over are those that the plan expects."""
        if not call.known.writes and not call.unobserved:
            return True
        assert self.values.plan is not None
        written = map(self.values.known_number, writable(self.values, call))
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
        values, step, known = self.values, self._count, call.known
        overwrites = [values.known_number(tensor) for _, tensor, _ in made]
        writes = bool(known.writes) or call.unobserved
        # At no price, what may run again is as good as never kept: the frame need not hold it to find that out.
        holds = self._op_policy.price > 0 or self._op_policy.hold is not None or recorded is None or bool(reason)
        numbers = [
            values.add(tensor, layout, step=step, slot=slot, holds=holds, written=writes)
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
        """Autograd saves a tensor; what it is to hold."""
        values = self.values
        try:
            number = self._number_of_saved(tensor)
        except NotRegenerable:
            return pack_through(self.outer, without_graph(tensor), self.statistics.name)
        self._saves.append((number, self._count))
        if number in values.parameters:
            parameter = parameter_of(tensor)
            memory = None if parameter is tensor else tensor.untyped_storage()
            return values.parameter_reference(number, Layout.of(tensor), parameter, memory)
        plan = self.values.plan
        if plan is None:
            values.held.setdefault(number, tensor)
        elif number in plan.kept and plan.facts[number].step is not None and self.are_held_as_they_are:
            kept = KeptTensor(tensor, self.statistics.name)
            self._with_graphs.append(kept)
            return kept
        layout, whole = Layout.of(tensor), values.facts[number].layout
        is_dropped = plan is not None and number in plan.dropped
        handle = Handle(self, number, None if is_dropped else tensor, None if layout == whole else (layout, whole))
        self._handles.append(weakref.ref(handle))
        return handle

    def _number_of_saved(self, tensor: Tensor) -> int:
        if not self.has_begun:
            self.choose_plan("saved", Layout.of(tensor) if is_plain(tensor) else None)
        plan = self.values.plan
        if plan is not None:
            index, saves = len(self._saves), plan.saves
            try:
                if index < len(saves):
                    foreseen = saves[index][0]
                    if self.values.number_of(tensor, foreseen) == foreseen:
                        return foreseen
            except PlanMismatch:
                pass
            self.deoptimize()
        return self.values.number_of(tensor)

    def pin(self, tensor: Tensor, op_policy: OpPolicy) -> None:
        """``tensor``, a plain one, was passed to ``recompute.keep``. op_policy: the one in force."""
        self.choose_plan(KEEP, Layout.of(tensor))
        if self.values.plan is not None:
            instruction = self.follow(KEEP, False, op_policy)
            if instruction is not None and instruction.step.inputs == (self.values.known_number(tensor),):
                self._count += 1
                return
            if instruction is not None:
                self.deoptimize()
        number = self.values.number_of(tensor)
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

        unobserved: that value stays what it is, as only the code that runs now writes to it. Otherwise others may write
        to it at any time. parameter: the one that the storage belongs to.
        """
        values = self.values
        number = values.number_in(storage)
        if number is None or storage._cdata in values.exposed:
            return
        instruction = None if self.values.plan is None else self.follow(HAND_OUT, unobserved, op_policy)
        if instruction is not None and instruction.step.inputs != (number,):
            self.deoptimize()
            instruction = None
        tensor = bytes_of(storage) if tensor is None else tensor
        if not unobserved:
            values.exposed.add(storage._cdata)
        if instruction is not None:
            assert self.values.plan is not None
            made = instruction.step.made[0]
            values.bind(made, tensor, parameter, holds=made in self.values.plan.kept)
            self._count += 1
            return
        layout = values.facts[number].layout
        for reference in self._handles:
            if (handle := reference()) is not None and handle.number == number:
                assert handle.tensor is not None
                # Deoptimizing may have brought the value back, in other memory than others are going to write to.
                if handle.tensor.untyped_storage()._cdata != storage._cdata:
                    handle.tensor = seen_as(without_graph(tensor), layout if handle.view is None else handle.view[0])
                    handle.version = version_of(handle.tensor)
        made = values.add(tensor, layout, step=self._count, alive=parameter is not None, parameter=parameter)
        self._add_step(
            TapeStep(
                HAND_OUT,
                HAND_OUT,
                (number,),
                (made,),
                "its memory was handed out",
                writes=True,
                overwrites=(number,),
                unobserved=unobserved,
                op_policy=op_policy,
            )
        )

    def abandon(self) -> None:
        """The region has raised an error. What ran of it may live on."""
        self.finish((), ValuesAsTheyAre)

    def discard(self) -> None:
        """Nobody has what ran, nor will run its backward. It counts nowhere."""
        for handle in filter(None, [reference() for reference in self._handles]):
            handle.drop()  # what it holds has a graph, and that graph holds the handle
        for saved in self._with_graphs:
            saved.tensor = saved.tensor.detach()
        self._clear()

    @runs_hidden_from_modes
    def finish(self, outputs: Collection[Tensor], keep: type[KeptValues] = KeptValues) -> SavePlan | None:
        """Decide which saved tensors are kept, and drop the others, as far as the frame has not done so already.

        outputs: the region's, which the scope around it may drop too. keep: holds what is kept.
        Returns the plan for the next frame, if there is one.
        """
        try:
            results: dict[int, Tensor] = {}
            if self._book is not None:
                numbers = [(tensor, self.values.known_number(tensor)) for tensor in outputs]
                results = {number: tensor for tensor, number in numbers if number is not None}
            plan = self._decide(results)
            kept = self._kept(keep, plan)
            recipes = kept.recipes(self._calls)
            for saved in self._with_graphs:
                saved.tensor = saved.tensor.detach()
            kept.resolve(self._handles, recipes)
            self.statistics.dropped_outputs = []
            for number in plan.outputs.intersection(results):
                assert self._book is not None
                layout, counted = plan.facts[number].layout, number in plan.demanded
                self._book.enter(results[number], recipes[plan.origin(number)], number, layout, counted=counted)
            self.statistics.plan = plan
            return None if self._is_deoptimized else plan
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
        if released := self._released():
            self._steps = [
                step if step.reason or released.isdisjoint(step.inputs) else step._replace(reason=RELEASED)
                for step in self._steps
            ]
        parts = {index: layout for index, call in self._calls.items() for layout in (call.writes or {}).values()}
        self._steps = with_filled_memory(self._steps, values.facts, {number for number, _ in self._saves}, parts)
        if self._is_deoptimized:  # it knows of its beginning only what the plan needed
            self._plan_cache.forget(self._guard)
            return self._solve_for_what_is_left(results)
        record = FrameSteps(self._steps, values.facts, self._saves, values.overwritten)
        plan = solve_once(record, results, self._op_policy.price, self._op_policy.hold, self._guard)
        self._plan_cache.put(self._guard, plan)
        if plan.kept <= values.held.keys():
            return plan
        self._is_deoptimized = True  # the next frame keeps what this one has not held
        return self._solve_for_what_is_left(results)

    def _released(self) -> set[int]:
        """The parameters whose memory is gone by now, or may be at any time.

        FSDP, for one, gathers the weights of an inner module only while that runs.
        """
        held = self.values.held
        return {
            number
            for number, parameter in self.values.parameters.items()
            if (memory := held.get(number)) is not None  # it is None if a backward inside has written to it
            and (memory.untyped_storage().nbytes() == 0 or is_managed_elsewhere(parameter))
        }

    def _solve_for_what_is_left(self, results: Collection[int]) -> SavePlan:
        """The plan of a frame that has let go of tensors and of arguments, as the plan that it began with said.

        What autograd saved, but ``deoptimize`` has not taken back, belonged to a graph that is dead by now.
        """
        values = self.values
        saves = [save for save in self._saves if save[0] in values.held or save[0] in values.overwritten]
        steps = [
            step if step.reason or index in self._calls else step._replace(reason="its arguments are not held any more")
            for index, step in enumerate(self._steps)
        ]
        released = [number for number in range(len(values.facts)) if number not in values.held]
        record = FrameSteps(steps, values.facts, saves, values.overwritten)
        return solve(record, results, self._op_policy.price, self._op_policy.hold, released)

    def _kept(self, keep: type[KeptValues], plan: SavePlan) -> KeptValues:
        return keep(self.values, plan, self.statistics, self.outer, self._group, self._codec)

    def _clear(self) -> None:
        """Let go of everything: autograd holds the pack hook, and so this, as long as the graph lives (invariant 8)."""
        self.values.clear()
        self._last = self._book = self._stand_ins = None
        self._calls.clear()
        self._steps, self._handles, self._saves, self._with_graphs = [], [], [], []
