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
from recompute.engine.cut.save_plan import HAND_OUT, KEEP, Guide, Plan, PlanCache, Ref, Step
from recompute.engine.modes import (
    are_others_in_force,
    count_dispatch_modes,
    count_function_modes,
    put_beneath,
    put_on_top,
    unseen,
)
from recompute.engine.recipes import Handle, local
from recompute.engine.saved_tensors import (
    Kept,
    Owner,
    Saved,
    Sharded,
    explain_transforms,
    hold_through,
    is_under_a_checkpoint,
    top_hooks,
    unpack_saved,
    version_of,
)
from recompute.engine.sharded import are_sharded, has_layout, local_of
from recompute.engine.tape.autocast import in_force, left_out
from recompute.engine.tape.exposed import bytes_of, expose, expose_arrays, is_exposed, watch
from recompute.engine.tape.frame import Record, Rerun, aliased
from recompute.engine.tape.operands import (
    LISTS,
    PLAIN,
    Unfit,
    at,
    capture,
    fits,
    is_dense,
    is_in_the_dark,
    is_plain,
    parameter_of,
    tensors_in,
    unfit,
    without,
)

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_new = tuple.__new__


class TapeRegion:
    """A module's forward or a function under ``action: recompute``, or ``checkpoint`` with a ``keep``."""

    def __init__(self, owner: Owner, op_policy: OpPolicy, plans: PlanCache | None = None):
        """plans: by how their frames begin, the last plans of the regions that share this, as layers alike do."""
        watch()
        self.owner = owner
        self.op_policy = op_policy
        self.plans = PlanCache() if plans is None else plans
        self.plan: Plan | None = None
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
        if is_under_a_checkpoint():  # which drops everything anyway, and counts what is saved
            return function(*args, **kwargs)
        self.owner.frames += 1
        around = local.spans[-1] if local.spans else None
        if isinstance(around, Tape):
            with _Joined(around, self.op_policy):
                return function(*args, **kwargs)
        expose_arrays((*args, *kwargs.values()))
        tape = (start or Tape)(self, variant)
        with tape:
            result = function(*args, **kwargs)
        self.plan = tape.record.finish(tape.plain(tree_leaves(result)))
        return result


class _Joined:
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


Made = tuple[int | None, Tensor, Layout]
"""A tensor that a step wrote, as which of its outputs, and how to see it whole. None: as none that it gives back."""


class _Departure(Exception):
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
        self.owner = region.owner
        self.name = "a tape that is still running"
        self.record = Record(region.owner, region.op_policy, region.plans, variant)
        self.outer = self.record.outer
        self._last = region.plan

    def __enter__(self) -> Tape:
        _push_hooks(self.pack, unpack_saved)
        local.books.append(None)
        local.spans.append(self)
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
        local.spans.pop()
        local.books.pop()
        _pop_hooks()
        if kind is not None:  # what ran of the region may live on
            self.record.finish((), self.record.as_it_is)
            explain_transforms(error, self.owner)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if local.regenerating:
            return op(*args, **kwargs)
        if types and are_sharded(types):  # which go on to what this rank has of them, and that comes here
            self.record.see(tensors_in((args, kwargs)))
            return NotImplemented
        known, reason = self.op_policy.decisions.get(op) or self.op_policy.decide(op)
        if (known.casts_inside or torch.is_inference_mode_enabled()) and (keys := left_out()):
            with in_force(keys, op, kwargs, self.owner.name):
                return self.__torch_dispatch__(op, types, args, kwargs)
        dark = not torch.is_grad_enabled() and is_in_the_dark(_RUN)
        if known.kind is Kind.VIEW and not dark:
            return op(*args, **kwargs)
        record = self.record
        if not record.begun:
            first = next(iter(tensors_in(args)), None)
            record.begin(self._last, op, Layout.of(first) if first is not None and is_plain(first) else None)
        if record.plan is not None:
            guide = self._guide(op, dark)
            if guide is not None and not guide.matters:
                record.count += 1
                return op(*args, **kwargs)
        else:
            guide = None
        if known.varies:
            known, reason = self.op_policy.decide_by(facts_of_call(op, args, kwargs))
        if dark:
            reason = "made inside a custom autograd.Function"
        if guide is not None:
            return self._follow(guide, op, known, reason, args, kwargs)
        return self._run(op, known, reason, args, kwargs, dark)

    def _guide(self, op: Any, dark: bool) -> Guide | None:
        """What the plan says of this step; None, and the end of following it, where it has another one here."""
        record = self.record
        assert record.plan is not None
        guides = record.plan.guides
        if record.count < len(guides):
            guide = guides[record.count]
            if guide.op is op and guide.dark == dark and guide.op_policy is self.op_policy:
                return guide
        record.leave()
        return None

    def _follow(self, guide: Guide, op: Any, known: OpFacts, reason: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a step as the plan has foreseen it, or leave the plan."""
        record = self.record
        rerun = None
        try:
            if known.writes or guide.dark:
                written = self._writable(known, guide.dark, args, kwargs)
                if record.plan.tracked.intersection(map(self._number_if_known, written)) != guide.overwritten:  # type: ignore[union-attr]
                    raise _Departure
            if guide.again:
                rerun, inputs = self._prepare(op, known, reason, args, kwargs, guide.inputs)
                if rerun is None or inputs != guide.inputs:
                    raise _Departure
        except (_Departure, Unfit):
            if record.plan is not None:
                record.leave()
            return self._run(op, known, reason, args, kwargs, guide.dark)
        output = op(*args, **kwargs)
        if known.writes:
            self._count_writes(at(known.writes, args, kwargs))
        made = self._made(known, reason, guide.dark, args, kwargs, output, guide.layouts)
        if made is None or (rerun is not None and rerun.has_not_drawn()) or not _agree(made, guide.layouts):
            record.leave()
            self._note(op, known, reason or "it does not do the same every time", (), made or [], None, guide.dark)
            return output
        if rerun is not None:
            record.reruns[record.count] = rerun
        record.count += 1
        tracked = record.plan.tracked  # type: ignore[union-attr]
        for number, (_, tensor, _) in zip(guide.made, made, strict=True):
            if number in tracked or tensor.untyped_storage()._cdata in record.current:
                record.adopt(number, tensor, written=bool(known.writes) or guide.dark)
        return output

    def _run(self, op: Any, known: OpFacts, reason: str, args: tuple, kwargs: dict[str, Any], dark: bool) -> Any:
        """Run a step that no plan foresees."""
        rerun: Rerun | None = None
        inputs: tuple[int, ...] = ()
        try:
            if not dark:
                rerun, inputs = self._prepare(op, known, reason, args, kwargs)
        except Unfit as unfit:
            reason = reason or str(unfit)
        if known.statistics and rerun is not None:
            reason = ""
        output = op(*args, **kwargs)
        if known.writes:
            self._count_writes(at(known.writes, args, kwargs))
        made = self._made(known, reason, dark, args, kwargs, output)
        if made is None:
            made, rerun, reason = [], None, reason or "its output shares memory with another tensor"
        if rerun is not None and rerun.has_not_drawn():
            rerun, reason = None, "it draws random numbers, and not from the generator that it should"
        costs = 0.0 if reason else seconds(op, args, kwargs, output)
        self._note(op, known, reason, inputs, made, rerun, dark, costs)
        return output

    @staticmethod
    def _count_writes(written: list[Any]) -> None:
        """Move the versions of lists of tensors, as ``_foreach_add_`` writes to: under a mode torch does not."""
        for value in written:
            if type(value) in LISTS:
                torch.autograd.graph.increment_version(value)

    def _note(
        self,
        op: Any,
        known: OpFacts,
        reason: str,
        inputs: tuple[int, ...],
        made: list[Made],
        rerun: Rerun | None,
        dark: bool,
        costs: float = 0.0,
    ) -> None:
        record = self.record
        overwrites = [self._number_if_known(tensor) for _, tensor, _ in made]
        writes = bool(known.writes) or dark
        numbers = [record.enter(tensor, layout, record.count, slot, written=writes) for slot, tensor, layout in made]
        if rerun is not None:
            record.reruns[record.count] = rerun
        record.step(
            Step(
                op,
                known.name,
                inputs,
                tuple(numbers),
                reason,
                costs,
                is_costly=known.family is not None,
                writes=writes,
                overwrites=tuple([number for number in overwrites if number is not None]),
                dark=dark,
                op_policy=self.op_policy,
            )
        )

    def _prepare(
        self,
        op: Any,
        known: OpFacts,
        reason: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        foreseen: tuple[int, ...] = (),
    ) -> tuple[Rerun | None, tuple[int, ...]]:
        """How to run the step again, if it may be, and the values that it reads."""
        if known.statistics:  # are collected by now, and its outputs are the same without
            if self.record.plan is None:
                self._refs(at(known.statistics, args, kwargs), [], ())
            args, reason = without(known.statistics, args), ""
        inputs: list[int] = []
        template = self._refs(args, inputs, foreseen)
        keywords = dict(zip(kwargs, self._refs(kwargs.values(), inputs, foreseen), strict=True)) if kwargs else kwargs
        if reason:
            return None, tuple(inputs)
        writes = self._in_copy(known, template) if known.kind is Kind.IN_PLACE else None
        rng = capture(args, kwargs, self.owner.name) if known.kind is Kind.RANDOM else None
        return Rerun(op, template, keywords, rng, torch.get_default_dtype(), writes), tuple(inputs)

    def _made(
        self,
        known: OpFacts,
        reason: str,
        dark: bool,
        args: tuple,
        kwargs: dict[str, Any],
        output: Any,
        foreseen: tuple[Layout, ...] = (),
    ) -> list[Made] | None:
        """What a step that has run made; None if its output has the memory of another tensor."""
        if known.kind is Kind.IN_PLACE and not reason:
            tensor = args[known.writes[0]]  # type: ignore[index]
            return [(0, tensor, self._whole(tensor, *foreseen[:1]))]
        if not known.writes and not dark:
            return self._fresh(output, self.record.current)
        written = self._writable(known, dark, args, kwargs)
        others = {*self.record.current, *(tensor.untyped_storage()._cdata for tensor in written)}
        return [(None, tensor, Layout.of(tensor)) for tensor in written] + (self._fresh(output, others) or [])

    def _refs(self, values: Iterable[Any], inputs: list[int], foreseen: tuple[int, ...]) -> list[Any]:
        """``values`` with a ``Ref`` in the place of each tensor, whose numbers ``inputs`` gets."""
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind in PLAIN or isinstance(value, Tensor):
                number = self._number(value, foreseen[len(inputs)] if len(inputs) < len(foreseen) else None)
                inputs.append(number)
                value = _new(Ref, (number, Layout.of(value)))
            elif kind in LISTS:
                value = self._refs(value, inputs, foreseen)
            found.append(value)
        return found

    def _number(self, tensor: Tensor, foreseen: int | None) -> int:
        """The number of the value in a tensor, which is ``foreseen`` by the plan that is being followed."""
        record = self.record
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            raise unfit(tensor)
        number = record.current.get(tensor.untyped_storage()._cdata)
        if number is None or (number not in record.parameters and parameter_of(tensor) is not None):  # just gathered
            return self._found(tensor, foreseen)
        version = version_of(tensor)
        known = record.versions[number]
        if version != known:
            other = record.parameters.get(number)
            if other is not None and (parameter := parameter_of(tensor)) is not None and parameter is not other:
                return number  # one of several in one storage, as ZeRO lays them out
            if known is not None:  # written to by something that the tape does not see
                number = self._found(tensor, None)
            record.versions[number] = version
        return number

    def _found(self, tensor: Tensor, foreseen: int | None) -> int:
        """The number of a value that no step has made."""
        if tensor.is_nested:
            raise unfit(tensor)
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
            raise _Departure
        known = record.plan.facts[foreseen]
        if (
            known.step is not None
            or known.layout != layout
            or known.alive is not alive
            or known.is_exposed is not exposed
        ):
            raise _Departure
        record.adopt(foreseen, tensor, parameter)
        return foreseen

    def _number_if_known(self, tensor: Tensor) -> int | None:
        return self.record.current.get(tensor.untyped_storage()._cdata)

    def _in_copy(self, known: OpFacts, template: list[Any]) -> dict[int | str, Layout]:
        """Have a step that changes an argument read it whole, to run again on a copy; how it sees it."""
        (place,) = known.writes
        ref = template[place]  # type: ignore[index]
        if not isinstance(ref, Ref):
            raise Unfit("it changes several tensors in place")
        value = self.record.known(ref.value)
        if not is_dense(value.layout, value.nbytes):
            raise Unfit("it changes in place a tensor of which the module has seen a part")
        template[place] = Ref(ref.value, value.layout)  # type: ignore[index]
        return {place: ref.layout}

    def _whole(self, tensor: Tensor, foreseen: Layout | None = None) -> Layout:
        """How to see a value whole, though ``tensor`` may be a part of it."""
        number = self._number_if_known(tensor)
        if number is not None:
            return self.record.known(number).layout
        return foreseen if foreseen is not None and fits(foreseen, tensor) else Layout.of(tensor)

    def _writable(self, known: OpFacts, dark: bool, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        """One tensor for each storage that a step may write to; a parameter is what it is.

        In the dark, a kernel may have written to whatever is in its reach.
        """
        tensors = self.plain(tensors_in((args, kwargs) if dark else at(known.writes, args, kwargs)))
        found = {
            key: tensor
            for tensor in tensors
            if parameter_of(tensor) is None and (key := tensor.untyped_storage()._cdata) not in self.record.sharded
        }
        return list(found.values())

    def _fresh(self, output: Any, others: Container[int]) -> list[Made] | None:
        """The tensors of an op's output; None if one has the memory of another tensor, or is no plain tensor."""
        if type(output) is Tensor and is_plain(output) and output.untyped_storage()._cdata not in others:
            return [(0, output, Layout.of(output))]
        made: list[Made] = []
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
        self.record.see((tensor,))
        return local_of(tensor)

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook of what autograd saves in the frame."""
        if (count_dispatch_modes() > 1 or count_function_modes()) and are_others_in_force():  # than this one
            with unseen():
                return self.pack(tensor)
        record = self.record
        if type(tensor) not in PLAIN:
            if has_layout(tensor):
                return Sharded(aliased(tensor), self.pack(self._part(tensor)), self.owner.name)
            tensor = self._part(tensor)
        try:
            number = self._saved(tensor)
        except Unfit:
            return hold_through(self.outer, aliased(tensor), self.owner.name)
        record.saves.append((number, record.count))
        if number in record.parameters:
            parameter = parameter_of(tensor)
            memory = None if parameter is tensor else tensor.untyped_storage()
            return record.alive(number, Layout.of(tensor), parameter, memory)
        plan = record.plan
        if plan is None:
            record.held.setdefault(number, tensor)
        elif number in plan.kept and plan.facts[number].step is not None and record.holds_alone:
            kept = Kept(tensor, self.owner.name)
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
        if not record.begun:
            record.begin(self._last, "saved", Layout.of(tensor) if is_plain(tensor) else None)
        if record.plan is not None:
            index, saves = len(record.saves), record.plan.saves
            try:
                if index < len(saves) and self._number(tensor, saves[index][0]) == saves[index][0]:
                    return saves[index][0]
            except _Departure:
                pass
            record.leave()
        return self._number(tensor, None)

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        """Never regenerate ``tensor``, if the rule in force says so of ``name`` or there is none."""
        part = self._part(tensor)
        if self.op_policy.keeps_tensor(name) and is_plain(part):
            record = self.record
            if not record.begun:
                record.begin(self._last, KEEP, Layout.of(part))
            if record.plan is not None:
                guide = self._guide(KEEP, False)
                if guide is not None and guide.inputs == (self._number_if_known(part),):
                    record.count += 1
                    return tensor
                if guide is not None:
                    record.leave()
            record.step(Step(KEEP, KEEP, (self._number(part, None),), (), "not an op", op_policy=self.op_policy))
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
        dark = not torch.is_grad_enabled() and is_in_the_dark(_RUN)
        if not dark:
            expose(storage)
        if number is None or storage._cdata in record.exposed:
            return
        guide = None if record.plan is None else self._guide(HAND_OUT, dark)
        if guide is not None and guide.inputs != (number,):
            record.leave()
            guide = None
        tensor = bytes_of(storage) if tensor is None else tensor
        record.hand_out(number, tensor, parameter, dark, self.op_policy, guide)

    def _is_in_force(self) -> bool:
        """Whether what is called now would come to this tape."""
        modes = range(count_dispatch_modes())
        return any(torch._C._get_dispatch_stack_at(index) is self for index in modes)

    def take(self, handle: Handle) -> Tensor:
        """A value that is asked for while the frame still runs, as by ``autograd.grad`` inside of it."""
        return self.record.give_back(handle)


def _agree(made: list[Made], layouts: tuple[Layout, ...]) -> bool:
    return tuple([layout for _, _, layout in made]) == layouts


_RUN = TapeRegion.run.__code__
