"""The tape: writes down every op of a region below autograd, and turns what need not be kept into recipes.

The content of a storage is a *value*: each op that writes makes a new one, also in place. While a frame runs, each op
is a *step* that reads and makes values; views need none. When the frame ends, one minimum cut over its steps is its
plan: which values are kept, and which steps run again to give back the others that autograd saved. A later frame that
takes the same steps follows that plan as it runs, and so lets go of tensors at once; one that departs from it is
decided anew, from what it still has. Recipes are always written from the frame's own arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import Kind, OpFacts, facts_of_call, seconds
from recompute.engine.cut.save_plan import HAND_OUT, KEEP, PlanCache, SavePlan, StepInstruction, TapeStep, ValueRef
from recompute.engine.dtensors import are_sharded, has_layout, local_of
from recompute.engine.modes import (
    count_dispatch_modes,
    count_function_modes,
    has_foreign_modes,
    hidden_from_modes,
    put_beneath,
    put_on_top,
)
from recompute.engine.recipes import Handle, local
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedDTensor,
    PackedTensor,
    RegionStatistics,
    explain_transforms,
    is_inside_checkpoint,
    pack_through,
    top_hooks,
    unpack_saved,
    version_of,
)
from recompute.engine.tape.autocast import in_force, left_out
from recompute.engine.tape.exposed_memory import bytes_of, expose, expose_arrays, is_exposed, watch
from recompute.engine.tape.frame import RecordedCall, TapeFrame, aliased
from recompute.engine.tape.op_arguments import (
    LISTS,
    PLAIN,
    NotRegenerable,
    at,
    capture,
    fits,
    is_dense,
    is_plain,
    is_unobserved,
    not_regenerable,
    parameter_of,
    tensors_in,
    without,
)

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_new = tuple.__new__


class TapeRegion:
    """A module's forward or a function under ``action: recompute``, or ``checkpoint`` with a ``keep``."""

    def __init__(self, statistics: RegionStatistics, op_policy: OpPolicy, plan_cache: PlanCache | None = None):
        """plan_cache: of the regions that this one shares its plans with, as equal layers do."""
        watch()
        self.statistics = statistics
        self.op_policy = op_policy
        self.plan_cache = PlanCache() if plan_cache is None else plan_cache
        self.plan: SavePlan | None = None
        """The last frame's, which the next one follows as far as it can."""

    def run(
        self,
        function: Callable[..., Any],
        args: tuple,
        kwargs: dict,
        variant: Hashable = None,
        start: Callable[[TapeRegion, Hashable], Tape] | None = None,
    ) -> Any:
        """``function(*args, **kwargs)``: inside of another tape as a part of that, with an op policy of its own.

        variant: another one where other ops are to be expected than last time. start: makes another kind of tape.
        """
        if is_inside_checkpoint():  # which drops everything anyway, and counts what is saved
            return function(*args, **kwargs)
        self.statistics.frames += 1
        around = local.active_frames[-1] if local.active_frames else None
        if isinstance(around, Tape):
            with _NestedRegion(around, self.op_policy):
                return function(*args, **kwargs)
        expose_arrays((*args, *kwargs.values()))
        tape = (start or Tape)(self, variant)
        with tape:
            result = function(*args, **kwargs)
        self.plan = tape.record.finish(tape.plain(tree_leaves(result)))
        return result


class _NestedRegion:
    """A region inside of another one's tape."""

    def __init__(self, tape: Tape, op_policy: OpPolicy):
        self._tape = tape
        self._op_policy = op_policy

    def __enter__(self) -> None:
        self._outer, self._tape.op_policy = self._tape.op_policy, self._op_policy
        top = top_hooks()
        self._pushed = top is None or top[1] is unpack_saved  # as inside of an ``action: keep`` in between
        if self._pushed:
            _push_hooks(self._tape.pack, unpack_saved)

    def __exit__(self, *error: object) -> None:
        if self._pushed:
            _pop_hooks()
        self._tape.op_policy = self._outer


MadeTensor = tuple[int | None, Tensor, Layout]
"""A tensor that a step wrote, as which of its outputs, and how to see it whole. None: as none that it gives back."""


class _PlanMismatch(Exception):
    """The frame does not do what the plan that it follows has foreseen."""


class Tape(TorchDispatchMode):
    """Writes the record of one frame of a region."""

    is_checkpoint = False
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that what is compiled inside of the region, as flex attention is, is compiled all the same."""
        return True

    def __init__(self, region: TapeRegion, variant: Hashable):
        super().__init__()
        self.op_policy = region.op_policy
        self.statistics = region.statistics
        self.name = "a tape that is still running"
        self.record = TapeFrame(region.statistics, region.op_policy, region.plan_cache, variant)
        self.outer = self.record.outer
        self._last = region.plan

    def __enter__(self) -> Tape:
        _push_hooks(self.pack, unpack_saved)
        local.books.append(None)
        local.active_frames.append(self)
        self._regenerating, local.regenerating = local.regenerating, 0
        super().__enter__()
        if count_dispatch_modes() > 1:
            put_beneath(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if count_dispatch_modes() > 1:
            put_on_top(self)
        super().__exit__(kind, error, trace)
        local.regenerating = self._regenerating
        local.active_frames.pop()
        local.books.pop()
        _pop_hooks()
        if kind is not None:  # what ran of the region may live on
            self.record.finish((), self.record.as_it_is)
            explain_transforms(error, self.statistics)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if local.regenerating:
            return op(*args, **kwargs)
        if types and are_sharded(types):  # which go on to what this rank has of them, and that comes here
            self.record.note_dtensors(tensors_in((args, kwargs)))
            return NotImplemented
        known, reason = self.op_policy.decisions.get(op) or self.op_policy.decide(op)
        if (known.casts_inside or torch.is_inference_mode_enabled()) and (keys := left_out()):
            with in_force(keys, op, kwargs, self.statistics.name):
                return self.__torch_dispatch__(op, types, args, kwargs)
        unobserved = not torch.is_grad_enabled() and is_unobserved(_RUN)
        if known.kind is Kind.VIEW and not unobserved:
            return op(*args, **kwargs)
        record = self.record
        if not record.has_begun:
            first = next(iter(tensors_in(args)), None)
            record.choose_plan(self._last, op, Layout.of(first) if first is not None and is_plain(first) else None)
        if record.plan is not None:
            instruction = self._next_instruction(op, unobserved)
            if instruction is not None and not instruction.matters:
                record.count += 1
                return op(*args, **kwargs)
        else:
            instruction = None
        if known.varies:
            known, reason = self.op_policy.decide_by(facts_of_call(op, args, kwargs))
        if unobserved:
            reason = "made inside a custom autograd.Function"
        if instruction is not None:
            return self._run_planned(instruction, op, known, reason, args, kwargs)
        return self._run_unplanned(op, known, reason, args, kwargs, unobserved)

    def _next_instruction(self, op: Any, unobserved: bool) -> StepInstruction | None:
        """What the plan says of this step; None, and the end of following it, where it has another one here."""
        record = self.record
        assert record.plan is not None
        instructions = record.plan.instructions
        if record.count < len(instructions):
            instruction = instructions[record.count]
            if (
                instruction.op is op
                and instruction.unobserved == unobserved
                and instruction.op_policy is self.op_policy
            ):
                return instruction
        record.deoptimize()
        return None

    def _run_planned(
        self, instruction: StepInstruction, op: Any, known: OpFacts, reason: str, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Run a step as the plan has foreseen it, or give the plan up."""
        record = self.record
        rerun = None
        try:
            if known.writes or instruction.unobserved:
                written = self._writable(known, instruction.unobserved, args, kwargs)
                numbers = map(self._known_value_number, written)
                if record.plan.tracked.intersection(numbers) != instruction.tracked_overwritten:  # type: ignore[union-attr]
                    raise _PlanMismatch
            if instruction.runs_again:
                rerun, inputs = self._prepare_rerun(op, known, reason, args, kwargs, instruction.inputs)
                if rerun is None or inputs != instruction.inputs:
                    raise _PlanMismatch
        except (_PlanMismatch, NotRegenerable):
            if record.plan is not None:
                record.deoptimize()
            return self._run_unplanned(op, known, reason, args, kwargs, instruction.unobserved)
        output = op(*args, **kwargs)
        if known.writes:
            self._count_writes(at(known.writes, args, kwargs))
        made = self._made(known, reason, instruction.unobserved, args, kwargs, output, instruction.layouts)
        if made is None or (rerun is not None and rerun.has_not_drawn()) or not _agree(made, instruction.layouts):
            record.deoptimize()
            self._record_step(
                op, known, reason or "it does not do the same every time", (), made or [], None, instruction.unobserved
            )
            return output
        if rerun is not None:
            record.reruns[record.count] = rerun
        record.count += 1
        tracked = record.plan.tracked  # type: ignore[union-attr]
        for number, (_, tensor, _) in zip(instruction.made, made, strict=True):
            if number in tracked or tensor.untyped_storage()._cdata in record.current:
                record.adopt(number, tensor, written=bool(known.writes) or instruction.unobserved)
        return output

    def _run_unplanned(
        self, op: Any, known: OpFacts, reason: str, args: tuple, kwargs: dict[str, Any], unobserved: bool
    ) -> Any:
        """Run a step that no plan foresees."""
        rerun: RecordedCall | None = None
        inputs: tuple[int, ...] = ()
        try:
            if not unobserved:
                rerun, inputs = self._prepare_rerun(op, known, reason, args, kwargs)
        except NotRegenerable as error:
            reason = reason or str(error)
        if known.running_statistics and rerun is not None:
            reason = ""
        output = op(*args, **kwargs)
        if known.writes:
            self._count_writes(at(known.writes, args, kwargs))
        made = self._made(known, reason, unobserved, args, kwargs, output)
        if made is None:
            made, rerun, reason = [], None, reason or "its output shares memory with another tensor"
        if rerun is not None and rerun.has_not_drawn():
            rerun, reason = None, "it draws random numbers, and not from the generator that it should"
        costs = 0.0 if reason else seconds(op, args, kwargs, output)
        self._record_step(op, known, reason, inputs, made, rerun, unobserved, costs)
        return output

    @staticmethod
    def _count_writes(written: list[Any]) -> None:
        """Move the versions of lists of tensors, as ``_foreach_add_`` writes to: under a mode torch does not."""
        for value in written:
            if type(value) in LISTS:
                torch.autograd.graph.increment_version(value)

    def _record_step(
        self,
        op: Any,
        known: OpFacts,
        reason: str,
        inputs: tuple[int, ...],
        made: list[MadeTensor],
        rerun: RecordedCall | None,
        unobserved: bool,
        costs: float = 0.0,
    ) -> None:
        record = self.record
        overwrites = [self._known_value_number(tensor) for _, tensor, _ in made]
        writes = bool(known.writes) or unobserved
        numbers = [record.enter(tensor, layout, record.count, slot, written=writes) for slot, tensor, layout in made]
        if rerun is not None:
            record.reruns[record.count] = rerun
        record.step(
            TapeStep(
                op,
                known.name,
                inputs,
                tuple(numbers),
                reason,
                costs,
                is_costly=known.family is not None,
                writes=writes,
                overwrites=tuple([number for number in overwrites if number is not None]),
                unobserved=unobserved,
                op_policy=self.op_policy,
            )
        )

    def _prepare_rerun(
        self,
        op: Any,
        known: OpFacts,
        reason: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        foreseen: tuple[int, ...] = (),
    ) -> tuple[RecordedCall | None, tuple[int, ...]]:
        """How to run the step again, if it may be, and the values that it reads."""
        if known.running_statistics:  # are collected by now, and its outputs are the same without
            if self.record.plan is None:
                self._with_refs(at(known.running_statistics, args, kwargs), [], ())
            args, reason = without(known.running_statistics, args), ""
        inputs: list[int] = []
        template = self._with_refs(args, inputs, foreseen)
        keywords = (
            dict(zip(kwargs, self._with_refs(kwargs.values(), inputs, foreseen), strict=True)) if kwargs else kwargs
        )
        if reason:
            return None, tuple(inputs)
        writes = self._in_copy(known, template) if known.kind is Kind.IN_PLACE else None
        rng = capture(args, kwargs, self.statistics.name) if known.kind is Kind.RANDOM else None
        return RecordedCall(op, template, keywords, rng, torch.get_default_dtype(), writes), tuple(inputs)

    def _made(
        self,
        known: OpFacts,
        reason: str,
        unobserved: bool,
        args: tuple,
        kwargs: dict[str, Any],
        output: Any,
        foreseen: tuple[Layout, ...] = (),
    ) -> list[MadeTensor] | None:
        """What a step that has run made; None if its output has the memory of another tensor."""
        if known.kind is Kind.IN_PLACE and not reason:
            tensor = args[known.writes[0]]  # type: ignore[index]
            return [(0, tensor, self._whole(tensor, *foreseen[:1]))]
        if not known.writes and not unobserved:
            return self._new_outputs(output, self.record.current)
        written = self._writable(known, unobserved, args, kwargs)
        others = {*self.record.current, *(tensor.untyped_storage()._cdata for tensor in written)}
        return [(None, tensor, Layout.of(tensor)) for tensor in written] + (self._new_outputs(output, others) or [])

    def _with_refs(self, values: Iterable[Any], inputs: list[int], foreseen: tuple[int, ...]) -> list[Any]:
        """``values`` with a ``ValueRef`` in the place of each tensor, whose numbers ``inputs`` gets."""
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in PLAIN or isinstance(value, Tensor):
                number = self._value_number(value, foreseen[len(inputs)] if len(inputs) < len(foreseen) else None)
                inputs.append(number)
                value = _new(ValueRef, (number, Layout.of(value)))
            elif kind in LISTS:
                value = self._with_refs(value, inputs, foreseen)
            found.append(value)
        return found

    def _value_number(self, tensor: Tensor, foreseen: int | None) -> int:
        """The number of the value in a tensor, which is ``foreseen`` by the plan that is being followed."""
        record = self.record
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            raise not_regenerable(tensor)
        number = record.current.get(tensor.untyped_storage()._cdata)
        if number is None or (number not in record.parameters and parameter_of(tensor) is not None):  # just gathered
            return self._new_input(tensor, foreseen)
        version = version_of(tensor)
        known = record.versions[number]
        if version != known:
            other = record.parameters.get(number)
            if other is not None and (parameter := parameter_of(tensor)) is not None and parameter is not other:
                return number  # one of several in one storage, as ZeRO lays them out
            if known is not None:  # written to by something that the tape does not see
                number = self._new_input(tensor, None)
            record.versions[number] = version
        return number

    def _new_input(self, tensor: Tensor, foreseen: int | None) -> int:
        """The number of a value that no step has made."""
        if tensor.is_nested:
            raise not_regenerable(tensor)
        record = self.record
        parameter = parameter_of(tensor)
        if parameter is None and record.sharded:
            parameter = record.sharded.get(tensor.untyped_storage()._cdata)
        layout = Layout.of(tensor if parameter is None else local_of(parameter))
        alive = parameter is not None or record.comes_back(tensor)
        storage = tensor.untyped_storage()
        exposed = parameter is None and is_exposed(storage)
        if exposed:
            record.exposed.add(storage._cdata)
        if record.plan is None:
            return record.enter(tensor, layout, None, None, alive=alive, parameter=parameter)
        if foreseen is None or foreseen in record.versions:  # another tensor has that number
            raise _PlanMismatch
        known = record.plan.facts[foreseen]
        if (
            known.step is not None
            or known.layout != layout
            or known.alive is not alive
            or known.is_exposed is not exposed
        ):
            raise _PlanMismatch
        record.adopt(foreseen, tensor, parameter)
        return foreseen

    def _known_value_number(self, tensor: Tensor) -> int | None:
        return self.record.current.get(tensor.untyped_storage()._cdata)

    def _in_copy(self, known: OpFacts, template: list[Any]) -> dict[int | str, Layout]:
        """Have a step that changes an argument read it whole, to run again on a copy; how it sees it."""
        (place,) = known.writes
        ref = template[place]  # type: ignore[index]
        if not isinstance(ref, ValueRef):
            raise NotRegenerable("it changes several tensors in place")
        value = self.record.known(ref.value)
        if not is_dense(value.layout, value.nbytes):
            raise NotRegenerable("it changes in place a tensor of which the module has seen a part")
        template[place] = ValueRef(ref.value, value.layout)  # type: ignore[index]
        return {place: ref.layout}

    def _whole(self, tensor: Tensor, foreseen: Layout | None = None) -> Layout:
        """How to see a value whole, though ``tensor`` may be a part of it."""
        number = self._known_value_number(tensor)
        if number is not None:
            return self.record.known(number).layout
        return foreseen if foreseen is not None and fits(foreseen, tensor) else Layout.of(tensor)

    def _writable(self, known: OpFacts, unobserved: bool, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """One tensor for each storage that a step may write to; a parameter is what it is.

        Where a kernel is not observed, it may have written to whatever is in its reach.
        """
        tensors = self.plain(tensors_in((args, kwargs) if unobserved else at(known.writes, args, kwargs)))
        found = {
            key: tensor
            for tensor in tensors
            if parameter_of(tensor) is None and (key := tensor.untyped_storage()._cdata) not in self.record.sharded
        }
        return list(found.values())

    def _new_outputs(self, output: Any, others: Container[int]) -> list[MadeTensor] | None:
        """The tensors of an op's output; None if one has the memory of another tensor, or is no plain tensor."""
        if type(output) is Tensor and is_plain(output) and output.untyped_storage()._cdata not in others:
            return [(0, output, Layout.of(output))]
        made: list[MadeTensor] = []
        keys: set[int] = set()
        for slot, tensor in enumerate(output if type(output) in LISTS else (output,)):
            if isinstance(tensor, Tensor):
                if not is_plain(tensor):
                    return None
                key = tensor.untyped_storage()._cdata
                if key in others or key in keys:
                    return None
                keys.add(key)
                made.append((slot, tensor, Layout.of(tensor)))
        return made

    def plain(self, values: Iterable[Any]) -> list[Tensor]:
        tensors = [value for value in values if isinstance(value, Tensor)]
        return [tensor for tensor in map(self._part, tensors) if is_plain(tensor)]

    def _part(self, tensor: Tensor) -> Tensor:
        """What this rank has of a tensor: itself, if it is plain."""
        if type(tensor) in PLAIN:
            return tensor
        self.record.note_dtensors((tensor,))
        return local_of(tensor)

    def pack(self, tensor: Tensor) -> PackedTensor:
        """The pack hook of what autograd saves in the frame."""
        if (count_dispatch_modes() > 1 or count_function_modes()) and has_foreign_modes():  # than this one
            with hidden_from_modes():
                return self.pack(tensor)
        record = self.record
        if type(tensor) not in PLAIN:
            if has_layout(tensor):
                return PackedDTensor(aliased(tensor), self.pack(self._part(tensor)), self.statistics.name)
            tensor = self._part(tensor)
        try:
            number = self._saved(tensor)
        except NotRegenerable:
            return pack_through(self.outer, aliased(tensor), self.statistics.name)
        record.saves.append((number, record.count))
        if number in record.parameters:
            parameter = parameter_of(tensor)
            memory = None if parameter is tensor else tensor.untyped_storage()
            return record.alive(number, Layout.of(tensor), parameter, memory)
        plan = record.plan
        if plan is None:
            record.held.setdefault(number, tensor)
        elif number in plan.kept and plan.facts[number].step is not None and record.holds_alone:
            kept = KeptTensor(tensor, self.statistics.name)
            record.undetached.append(kept)
            return kept
        layout, whole = Layout.of(tensor), record.known(number).layout
        handle = Handle(self, number, tensor, None if layout == whole else (layout, whole))
        if plan is not None and number in plan.dropped:
            handle.drop()
        record.handles.append(weakref.ref(handle))
        return handle

    def _saved(self, tensor: Tensor) -> int:
        record = self.record
        if not record.has_begun:
            record.choose_plan(self._last, "saved", Layout.of(tensor) if is_plain(tensor) else None)
        if record.plan is not None:
            index, saves = len(record.saves), record.plan.saves
            try:
                if index < len(saves) and self._value_number(tensor, saves[index][0]) == saves[index][0]:
                    return saves[index][0]
            except _PlanMismatch:
                pass
            record.deoptimize()
        return self._value_number(tensor, None)

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        """Never regenerate ``tensor``, if the rule in force says so of ``name`` or there is none."""
        part = self._part(tensor)
        if self.op_policy.keeps_tensor(name) and is_plain(part):
            record = self.record
            if not record.has_begun:
                record.choose_plan(self._last, KEEP, Layout.of(part))
            if record.plan is not None:
                instruction = self._next_instruction(KEEP, False)
                if instruction is not None and instruction.inputs == (self._known_value_number(part),):
                    record.count += 1
                    return tensor
                if instruction is not None:
                    record.deoptimize()
            record.step(
                TapeStep(KEEP, KEEP, (self._value_number(part, None),), (), "not an op", op_policy=self.op_policy)
            )
        return tensor

    def hand_out(self, memory: Any, is_array: bool) -> None:
        """Others are about to get the memory of a tensor, or a storage, as an array or by its address.

        In a custom ``autograd.Function`` it counts as overwritten, as by a kernel; elsewhere from then on it may change
        at any time. The address of a parameter is asked for by libraries, and for other reasons than to write to it.
        """
        if local.regenerating or not self._is_in_force():  # in an op, whose schema says what it writes to
            return
        tensor = self._part(memory) if isinstance(memory, Tensor) else None
        if tensor is not None and not is_plain(tensor):
            return
        record = self.record
        storage = memory if tensor is None else tensor.untyped_storage()
        number = record.current.get(storage._cdata)
        parameter = record.sharded.get(storage._cdata) if number is None else record.parameters.get(number)
        if parameter is None and tensor is not None:
            parameter = parameter_of(tensor)
        if parameter is not None and not is_array:
            return
        unobserved = not torch.is_grad_enabled() and is_unobserved(_RUN)
        if not unobserved:
            expose(storage)
        if number is None or storage._cdata in record.exposed:
            return
        instruction = None if record.plan is None else self._next_instruction(HAND_OUT, unobserved)
        if instruction is not None and instruction.inputs != (number,):
            record.deoptimize()
            instruction = None
        tensor = bytes_of(storage) if tensor is None else tensor
        record.hand_out(number, tensor, parameter, unobserved, self.op_policy, instruction)

    def _is_in_force(self) -> bool:
        """Whether what is called now would come to this tape."""
        modes = range(count_dispatch_modes())
        return any(torch._C._get_dispatch_stack_at(index) is self for index in modes)

    def take(self, handle: Handle) -> Tensor:
        """A value that is asked for while the frame still runs, as by ``autograd.grad`` inside of it."""
        return self.record.give_back(handle)


def _agree(made: list[MadeTensor], layouts: tuple[Layout, ...]) -> bool:
    return tuple([layout for _, _, layout in made]) == layouts


_RUN = TapeRegion.run.__code__
