"""What one frame of a tape has written down, and what becomes of it when the frame ends: kept tensors and recipes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.engine.cut.layout import Layout
from recompute.engine.cut.op_policy import OpPolicy
from recompute.engine.cut.ops import is_defined
from recompute.engine.cut.save_plan import (
    HAND_OUT,
    PlanCache,
    SavePlan,
    StepInstruction,
    TapeStep,
    ValueFacts,
    ValueRef,
    solve,
)
from recompute.engine.dtensors import has_layout, local_of
from recompute.engine.modes import runs_hidden_from_modes
from recompute.engine.recipes import (
    Handle,
    OpRecipe,
    OuterUnpackRecipe,
    RecipeGroup,
    is_verifying,
    local,
    open_book,
    packing_for_recipe,
    sharing_values,
)
from recompute.engine.rng import RngState
from recompute.engine.saved_tensors import (
    KeptShard,
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    PackedView,
    ParameterReference,
    RegionStatistics,
    VersionGuard,
    pack_through,
    seen_as,
    top_hooks,
    unpack_saved,
    version_of,
)
from recompute.engine.tape.op_arguments import copied, parameter_of

HoldValue = Callable[[ValueRef], PackedTensor]
"""What stands for a value that is kept."""


class RecordedCall(NamedTuple):
    """All that it takes to run a step again, a ``ValueRef`` in the place of each tensor."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    rng: RngState | None
    dtype: torch.dtype
    """The default one."""
    writes: dict[int | str, Layout] | None
    """The argument that it changes in place and that it reads whole, and as which view of that it changes it."""

    def has_not_drawn(self) -> bool:
        """Whether it was to draw random numbers from a generator that is still where it was."""
        return self.rng is not None and self.rng.drawn() is None


_plans = PlanCache()
RELEASED = "it reads a weight that was gathered for a part of the module, and is not held to its end"


class TapeFrame:
    """The steps and values of one frame. As long as it follows a plan, it knows only the values that this needs."""

    def __init__(self, statistics: RegionStatistics, op_policy: OpPolicy, plan_cache: PlanCache, variant: Hashable):
        """plan_cache: of the regions that this one shares its plans with."""
        self.statistics = statistics
        self.outer = top_hooks()
        self.plan: SavePlan | None = None
        """The one that this frame has followed so far."""
        self.count = 0  # steps taken
        self.current: dict[int, int] = {}  # the value in each storage, by the address of its StorageImpl …
        self.weak: list[Any] = []  # … which cannot be used again while these are held (invariant 3)
        self.versions: dict[int, int | None] = {}  # of each value; None where an op has just written it
        self.overwritten: set[int] = set()
        self.exposed: set[int] = set()
        """The storages, by the addresses of their StorageImpls, that others may write to unseen."""
        self.held: dict[int, Tensor] = {}  # with their graphs, until the frame ends
        self.parameters: dict[int, Tensor] = {}
        self.sharded: dict[int, Tensor] = {}
        """The parameters that are DTensors, by the storage of what this rank has of them."""
        self._dtensors: dict[int, weakref.ref[Tensor]] = {}  # other DTensors, likewise
        self.reruns: dict[int, RecordedCall] = {}
        self.saves: list[tuple[int, int]] = []  # what autograd saved, and the step that was next then
        self.handles: list[weakref.ref[Handle]] = []
        self.undetached: list[KeptTensor] = []
        self._asked: weakref.WeakKeyDictionary[Handle, Handle] | None = None
        """The handles that ``autograd.grad``, say, has asked while the frame runs, and what stands in for each."""
        self.holds_alone = _has_only_our_hooks(self.outer)
        """Whether what was made in this frame concerns no hooks around it."""
        self._demanded: Collection[int] = ()
        """The values that autograd saved, once the frame has ended."""
        self.has_begun = False
        self._is_deoptimized = False
        self._book = open_book()
        self._op_policy = op_policy
        self._plan_cache = plan_cache
        self._variant = variant
        self._guard: Hashable = None
        self._steps: list[TapeStep] = []
        self._facts: list[ValueFacts] = []
        self._packed: dict[ValueRef, PackedTensor | OuterUnpackRecipe] = {}
        self._copies: dict[int, KeptTensor] = {}
        self._originals: dict[int, Tensor] | None = {} if is_verifying() else None  # copies, to compare with
        self._group = RecipeGroup()
        self._dtype = torch.get_default_dtype()

    def choose_plan(self, last: SavePlan | None, event: Any, layout: Layout | None) -> None:
        """Choose the plan to follow by the first thing that happens: the last frame's, or one that began alike."""
        self.has_begun = True
        self._guard = (self._op_policy, self._variant, event, layout)
        self.plan = last if last is not None and last.guard == self._guard else self._plan_cache.get(self._guard)

    @runs_hidden_from_modes
    def deoptimize(self) -> None:
        """Go on without the plan: take back what it has let go of, so that nothing depends on what it foresaw."""
        plan = self.plan
        assert plan is not None
        with sharing_values():
            for dropped, stand_in in self._stand_ins():
                dropped.tensor = stand_in.get()
                dropped.version = version_of(dropped.tensor)
                self.held.setdefault(dropped.slot, seen_as(dropped.tensor, plan.facts[dropped.slot].layout))
        for reference in self.handles:
            handle = reference()
            if handle is not None and handle.tensor is not None and handle.slot not in self.overwritten:
                self.held.setdefault(handle.slot, handle.tensor)
        self._steps = list(plan.steps[: self.count])
        size = max([number + 1 for step in self._steps for number in step.made], default=0)
        size = max([size, *(number + 1 for number in self.versions)])
        self._facts = list(plan.facts[:size])
        self.plan = None
        self._is_deoptimized = True
        self._asked = None

    def _stand_ins(self) -> list[tuple[Handle, Handle]]:
        """Each handle of what the plan has let go of, and one that gives its value back while the frame still runs.

        Recipes that none of these needs die here, so that no value waits for them.
        """
        plan = self.plan
        assert plan is not None
        recipes = self.recipes(plan, self.as_it_is)
        found = []
        for reference in self.handles:
            handle = reference()
            if handle is not None and handle.tensor is None:
                step, slot = plan.origin(handle.slot)
                found.append((handle, recipes[step].handle(slot, handle.view)))
        return found

    def give_back(self, handle: Handle) -> Tensor:
        """What a handle stands for that the plan has let go of, while the frame still runs."""
        if self._asked is None or handle not in self._asked:
            self._asked = weakref.WeakKeyDictionary(self._stand_ins())
        return self._asked[handle].get()

    def note_dtensors(self, tensors: Iterable[Tensor]) -> None:
        """Note of which DTensors it is that the tape sees the parts."""
        for tensor in tensors:
            if has_layout(tensor):
                key = tensor._local_tensor.untyped_storage()._cdata  # type: ignore[attr-defined]
                parameter = parameter_of(tensor)
                if parameter is not None:
                    self.sharded[key] = parameter
                elif key not in self._dtensors or self._dtensors[key]() is None:
                    self._dtensors[key] = weakref.ref(tensor)

    def step(self, step: TapeStep) -> None:
        """Note a step that no plan has."""
        self._steps.append(step)
        self.count += 1

    def next_number(self) -> int:
        return len(self._facts)

    def known(self, number: int) -> ValueFacts:
        return (self._facts if self.plan is None else self.plan.facts)[number]

    def enter(
        self,
        tensor: Tensor,
        layout: Layout,
        step: int | None,
        slot: int | None,
        *,
        alive: bool = False,
        parameter: Tensor | None = None,
        written: bool = False,
    ) -> int:
        """A new value in the tensor's storage, which looked at with ``layout`` is seen whole."""
        number = len(self._facts)
        storage = tensor.untyped_storage()
        exposed = storage._cdata in self.exposed
        self._facts.append(ValueFacts(layout, storage.nbytes(), step, slot, alive, parameter is not None, exposed))
        if parameter is None:
            self.held[number] = tensor
        self.adopt(number, tensor, parameter, written=written)
        return number

    def adopt(self, number: int, tensor: Tensor, parameter: Tensor | None = None, *, written: bool = False) -> None:
        """The value ``number`` is what is now in the tensor's storage. written: by an op that is not done yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        old = self.current.get(key)
        self.current[key] = number
        if old is None:
            self.weak.append(storage._weak_ref())
        else:
            self.overwritten.add(old)
            self.held.pop(old, None)
        self.versions[number] = None if written else version_of(tensor)  # autograd counts the write at the op's end
        if key in self.exposed:
            self.overwritten.add(number)
        if parameter is not None:
            self.parameters[number] = parameter
            self.held[number] = local_of(parameter)
        elif self.plan is not None and number in self.plan.kept:
            self.held[number] = tensor
        if self._originals is not None:
            self._originals[number] = aliased(tensor, copy=True)

    def hand_out(
        self,
        number: int,
        tensor: Tensor,
        parameter: Tensor | None,
        unobserved: bool,
        op_policy: OpPolicy,
        instruction: StepInstruction | None,
    ) -> None:
        """The memory of ``tensor``, which holds the value ``number``, holds another one from now on.

        unobserved: and that one stays what it is. instruction: what the plan that is being followed says of this.
        """
        key = tensor.untyped_storage()._cdata
        if not unobserved:
            self.exposed.add(key)
        if instruction is not None:
            self.adopt(instruction.made[0], tensor, parameter)
            self.count += 1
            return
        layout = self.known(number).layout
        for reference in self.handles:
            if (handle := reference()) is not None and handle.slot == number:
                assert handle.tensor is not None
                if handle.tensor.untyped_storage()._cdata != key:  # what came back, and not what others write to
                    handle.tensor = seen_as(aliased(tensor), layout if handle.view is None else handle.view[0])
                    handle.version = version_of(handle.tensor)
        made = self.enter(tensor, layout, self.count, None, alive=parameter is not None, parameter=parameter)
        self.step(
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

    def comes_back(self, tensor: Tensor) -> bool:
        """Whether a recipe of the scope around gives the tensor back, so that holding it costs nothing."""
        return self._book is not None and self._book.knows(tensor)

    @runs_hidden_from_modes
    def finish(self, outputs: Collection[Tensor], hold_value: HoldValue | None = None) -> SavePlan | None:
        """Decide what is kept of what autograd saved; the rest is dropped, if following a plan has not done it.

        outputs: of the region, which the scope around may drop too. source: otherwise as the hooks around have it.
        Returns the plan for the next frame, if there is one.
        """
        try:
            values = [(tensor, self.current.get(tensor.untyped_storage()._cdata)) for tensor in outputs]
            results = {number: tensor for tensor, number in values if number is not None} if self._book else {}
            plan = self._decide(results)
            self._demanded = plan.demanded
            recipes = self.recipes(plan, hold_value or functools.partial(self._pack_for_rerun, plan.copyable))
            self._settle(plan, recipes, hold_value or self._pack)
            self.statistics.dropped_outputs = []
            for number in plan.outputs.intersection(results):
                (step, slot), counted = plan.origin(number), number in plan.demanded
                assert self._book is not None
                self._book.enter(results[number], recipes[step], slot, plan.facts[number].layout, counted=counted)
            self.statistics.plan = plan
            return None if self._is_deoptimized else plan
        finally:
            self._clear()

    def _decide(self, results: Collection[int]) -> SavePlan:
        for number, tensor in self.held.items():
            version = self.versions[number]
            if version is not None and version != version_of(tensor):  # written to by what the tape does not see
                self.overwritten.add(number)
        plan = self.plan
        if plan is not None:
            if (
                self.count == len(plan.steps)
                and len(self.saves) == len(plan.saves)
                and self.overwritten & plan.tracked == plan.tracked_overwritten
            ):
                return plan
            self.deoptimize()
        if released := self._released():
            self._steps = [
                step if step.reason or released.isdisjoint(step.inputs) else step._replace(reason=RELEASED)
                for step in self._steps
            ]
        if self._is_deoptimized:  # of the start, it knows only what the plan was interested in
            self._plan_cache.forget(self._guard)
            return self._solve_for_what_is_left(results)
        key = (
            self._op_policy.price,
            tuple([(step.op, step.reason, step.op_policy, step.inputs, step.made) for step in self._steps]),
            tuple(self._facts),
            tuple(self.saves),
            frozenset(self.overwritten),
            frozenset(results),
        )
        plan = _plans.get(key)
        if plan is None:
            plan = solve(
                self._steps,
                self._facts,
                self.saves,
                self.overwritten,
                results,
                self._op_policy.price,
                guard=self._guard,
            )
            _plans.put(key, plan)
        self._plan_cache.put(self._guard, plan)
        return plan

    def _released(self) -> set[int]:
        """The parameters whose memory is gone by now, as of a module inside whose weights FSDP gathers for its run.

        Or may be at any time: DeepSpeed lets go of weights, which it gives a ``ds_id``, as it sees fit.
        """
        return {
            number
            for number, parameter in self.parameters.items()
            if (held := self.held.get(number)) is not None  # a backward inside may have written to any other
            and (held.untyped_storage().nbytes() == 0 or hasattr(parameter, "ds_id"))
        }

    def _solve_for_what_is_left(self, results: Collection[int]) -> SavePlan:
        """The plan where this frame has let go of tensors and of arguments, as the plan that it began with said.

        What autograd saved and ``deoptimize`` has not taken back was of a graph that is dead by now.
        """
        saves = [save for save in self.saves if save[0] in self.held or save[0] in self.overwritten]
        steps = [
            step if step.reason or index in self.reruns else step._replace(reason="its arguments are not held any more")
            for index, step in enumerate(self._steps)
        ]
        released = [number for number in range(len(self._facts)) if number not in self.held]
        return solve(steps, self._facts, saves, self.overwritten, results, self._op_policy.price, released)

    def as_it_is(self, ref: ValueRef) -> PackedTensor:
        """What stands for a value that is kept while the frame still runs."""
        return KeptTensor(seen_as(aliased(self.held[ref.value]), ref.layout), self.statistics.name)

    def recipes(self, plan: SavePlan, hold_value: HoldValue) -> dict[int, OpRecipe]:
        """For each step that runs again, and has been taken, how."""
        recipes: dict[int, OpRecipe] = {}
        for index in plan.rerun:
            if (rerun := self.reruns.get(index)) is not None:
                recipes[index] = OpRecipe(
                    self.statistics,
                    rerun.op,
                    [_filled(value, plan, hold_value, recipes) for value in rerun.args],
                    {key: _filled(value, plan, hold_value, recipes) for key, value in rerun.kwargs.items()},
                    name=plan.steps[index].name,
                    dtype=None if rerun.dtype is self._dtype else rerun.dtype,
                    rng=rerun.rng,
                    writes=rerun.writes,
                    group=self._group,
                    originals=self._originals_of(plan.steps[index]),
                )
        return recipes

    def _originals_of(self, step: TapeStep) -> dict[int, Tensor] | None:
        """What a step gave, by slot; None where nothing is compared."""
        if self._originals is None:
            return None
        slots = {number: self.known(number).slot for number in step.made if number in self._originals}
        return {
            slot: self._originals[number]
            for number, slot in slots.items()
            if slot is not None and is_defined(step.op, slot)
        }

    def _pack_for_rerun(self, copyable: Collection[int], ref: ValueRef) -> PackedTensor:
        """What holds a kept value for the steps that run again: a copy, if it is ``copyable`` and takes no gradients.

        A buffer may so change between forward and backward, as in plain PyTorch. What autograd itself saved does not
        come from here: it is refused if it has changed, as in plain PyTorch too.
        """
        number, layout = ref
        if number not in copyable or self.held[number].requires_grad:
            return self._pack(ref)
        copy = self._copies.get(number)
        if copy is None:
            whole = self.known(number).layout
            copy = self._copies[number] = KeptTensor(
                copied(seen_as(self.held[number].detach(), whole)), self.statistics.name
            )
        return PackedView(copy, layout)

    def _pack(self, ref: ValueRef) -> PackedTensor:
        """What holds a kept value for backward, as the hooks around the region would have it (invariant 9)."""
        number, layout = ref
        if number in self.parameters:
            return self.alive(number, layout, memory=self.held[number].untyped_storage())
        whole = self.known(number).layout
        held = self._packed.get(ref) or self._packed.get(ValueRef(number, whole)) or self._pack_once(number, whole)
        if isinstance(held, OuterUnpackRecipe):
            if held.layout != layout:  # of the storage the others' hooks have but what they saw
                held = self._pack_once(number, layout)
                assert isinstance(held, OuterUnpackRecipe)
            return held.handle(0)
        if isinstance(held, Handle):  # each that asks has its own
            return held.again((layout, whole))
        return held if layout == whole else PackedView(held, layout)

    def alive(
        self,
        number: int,
        layout: Layout,
        parameter: Tensor | None = None,
        memory: torch.UntypedStorage | None = None,
    ) -> ParameterReference:
        """parameter: which one it is, of several in one storage. memory: as ``ParameterReference`` takes it."""
        parameter = self.parameters[number] if parameter is None else parameter
        is_known = parameter is self.parameters[number] and not has_layout(parameter)
        version = self.versions[number] or 0 if is_known else version_of(parameter)
        return ParameterReference(parameter, layout, version, self.statistics.name, memory)

    def _pack_once(self, number: int, layout: Layout) -> PackedTensor | OuterUnpackRecipe:
        tensor = seen_as(self.held[number].detach(), layout)
        if self.holds_alone and self.known(number).step is not None:
            saved: PackedTensor = KeptTensor(tensor, self.statistics.name)
        elif number in self._demanded:
            saved = pack_through(self.outer, tensor, self.statistics.name)
        else:
            with packing_for_recipe():
                saved = pack_through(self.outer, tensor, self.statistics.name)
        if type(saved) is KeptTensor and self._dtensors:
            saved = self._watched(saved)
        held = (
            OuterUnpackRecipe(self.statistics, saved, layout, self._group)
            if isinstance(saved, PackedByOuterHook)
            else saved
        )
        self._packed[ValueRef(number, layout)] = held
        return held

    def _watched(self, saved: KeptTensor) -> KeptTensor:
        """Of what is a part of a DTensor, one that minds changes to that."""
        reference = self._dtensors.get(saved.tensor.untyped_storage()._cdata)
        whole = None if reference is None else reference()
        if whole is None:
            return saved
        return KeptShard(saved.tensor, self.statistics.name, VersionGuard(aliased(whole), self.statistics.name))

    def _settle(self, plan: SavePlan, recipes: dict[int, OpRecipe], hold_value: HoldValue) -> None:
        """Give each handle what it stands for."""
        for kept in self.undetached:
            kept.tensor = kept.tensor.detach()
        for reference in self.handles:
            handle = reference()
            if handle is None:
                continue
            number = handle.slot
            if number in plan.overwritten:  # to be refused if autograd minds
                assert handle.tensor is not None
                handle.keep(KeptTensor(handle.tensor.detach(), self.statistics.name, handle.version))
            elif number in plan.kept:
                handle.keep(
                    hold_value(ValueRef(number, plan.facts[number].layout if handle.view is None else handle.view[0]))
                )
            else:
                handle.drop()
                step, handle.slot = plan.origin(number)
                handle.recipe = recipes[step]
                recipes[step].handles.append(reference)
        self.statistics.dropped_tensors += len(plan.dropped)
        self.statistics.dropped_nbytes += plan.dropped_nbytes
        self.statistics.kept_nbytes += plan.kept_nbytes
        self.statistics.eager_nbytes += plan.eager_nbytes

    def _clear(self) -> None:
        """Let go of everything: autograd holds the pack hook, and so this, as long as the graph lives (invariant 8)."""
        for reference in self.weak:
            torch.UntypedStorage._free_weak_ref(reference)
        self.weak, self.plan = [], None
        for container in (self.current, self.held, self.parameters, self.reruns, self._packed, self._copies):
            container.clear()
        self.sharded.clear()
        self.exposed.clear()
        self._dtensors.clear()
        self._steps, self._facts, self.handles, self.saves, self.undetached = [], [], [], [], []
        self.versions, self._originals, self._asked = {}, None, None


def aliased(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor, or a copy of it, without its graph."""
    local.regenerating += 1  # not a step
    try:
        return tensor.detach().clone() if copy else tensor.detach()
    finally:
        local.regenerating -= 1


def _has_only_our_hooks(hooks: Any) -> bool:
    """Whether around these hooks, scopes of ours, there are no others'."""
    while hooks is not None and hooks[1] is unpack_saved:
        hooks = hooks[0].__self__.outer
    return hooks is None


def _filled(value: Any, plan: SavePlan, hold_value: HoldValue, recipes: dict[int, OpRecipe]) -> Any:
    """An argument with what stands for a tensor in the place of each ``ValueRef``."""
    if isinstance(value, list):
        return [_filled(item, plan, hold_value, recipes) for item in value]
    if type(value) is not ValueRef:
        return value
    if value.value in plan.kept:
        return hold_value(value)
    step, slot = plan.origin(value.value)
    whole = plan.facts[value.value].layout
    return recipes[step].handle(slot, None if value.layout == whole else (value.layout, whole))
