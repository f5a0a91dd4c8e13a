"""A frame's holdings for backward: autograd's handles, the values that it keeps, and the recipes of those it drops."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recompute.engine.compression import Codec, CompressedTensor
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import is_defined
from recompute.engine.cut.save_plan import SavePlan, ValueRef
from recompute.engine.recipes import Handle, OpRecipe, OuterUnpackRecipe, Recipe, RecipeGroup, RecordedCall
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    KeptShard,
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    PackedView,
    VersionGuard,
    are_held_as_they_are,
    pack_through,
    seen_as,
    top_hooks,
    version_of,
    without_graph,
)
from recompute.engine.tape.frame_values import FrameValues
from recompute.engine.tape.op_arguments import copied
from recompute.engine.thread_state import alive, packing_for_recipe, sharing_values


class FrameHandles:
    """The handles of one frame. Each has its tensor until the frame ends, unless the plan that it follows drops it."""

    name = "a tape that is still running"

    def __init__(
        self, statistics: RegionStatistics, codec: Codec | None, values: FrameValues, calls: Mapping[int, RecordedCall]
    ):
        """statistics, codec: the region's. values, calls: the frame's; calls are by the numbers of their steps."""
        self.statistics = statistics
        self.outer = top_hooks()
        self.hooks_hold_them_as_they_are = are_held_as_they_are(self.outer)
        self.are_held_as_they_are = codec is None and self.hooks_hold_them_as_they_are
        self.codec = codec
        self.values = values
        self._calls = calls
        self.group = RecipeGroup(values.numerics)
        self._handles: list[weakref.ref[Handle]] = []
        self._with_graphs: list[KeptTensor] = []
        """Tensors that were kept as soon as they were saved. They have their graphs until the frame ends."""
        self._stand_ins: weakref.WeakKeyDictionary[Handle, Handle] | None = None
        """For each handle whose tensor is dropped, a handle that regenerates the value while the frame runs.

        They are made when one is asked for first, as by ``autograd.grad`` inside of the region.
        """

    def hold(self, number: int, tensor: Tensor, parameter: Tensor | None) -> PackedTensor:
        """Autograd saves a tensor. Returns what it holds. number, parameter: as ``FrameValues.number_of`` just said."""
        values = self.values
        if number in values.parameters:
            memory = None if parameter is tensor else tensor.untyped_storage()
            return values.parameter_reference(number, Layout.of(tensor), parameter, memory)
        plan, version = values.plan, values.versions[number]
        assert version is not None
        if plan is None:
            values.held.setdefault(number, tensor)
        elif number in plan.kept and plan.facts[number].step is not None and self.are_held_as_they_are:
            kept = KeptTensor(tensor, self.statistics.name, version)
            self._with_graphs.append(kept)
            return kept
        layout, whole = Layout.of(tensor), values.facts[number].layout
        dropped = plan is not None and number in plan.dropped
        view = None if layout == whole else (layout, whole)
        handle = Handle(self, number, None if dropped else tensor, version, view)
        self._handles.append(weakref.ref(handle))
        return handle

    def take(self, handle: Handle) -> Tensor:
        """A value that is asked for while the frame still runs, as by ``autograd.grad`` inside of it."""
        if self._stand_ins is None or handle not in self._stand_ins:
            self._stand_ins = weakref.WeakKeyDictionary(self._find_stand_ins())
        return self._stand_ins[handle].get()

    def _find_stand_ins(self) -> list[tuple[Handle, Handle]]:
        """Each handle whose tensor is dropped, and a handle that regenerates its value while the frame still runs.

        Recipes that none of these needs are freed here, so that no value is held for them.
        """
        plan = self.values.plan
        assert plan is not None
        recipes = ValuesAsTheyAre(self, plan).recipes(self._calls)
        return [
            (handle, recipes[plan.origin(handle.number)].handle(handle.number, handle.view))
            for handle in alive(self._handles)
            if handle.tensor is None
        ]

    def take_back(self, plan: SavePlan) -> None:
        """Have every handle hold its tensor again, and the frame its value: ``plan`` is not followed any more."""
        values = self.values
        with sharing_values():
            for dropped, stand_in in self._find_stand_ins():
                dropped.tensor = stand_in.get()
                dropped.version = version_of(dropped.tensor)
                whole = seen_as(dropped.tensor, plan.facts[dropped.number].layout)
                values.held.setdefault(dropped.number, whole)
        for handle in alive(self._handles):
            if handle.tensor is not None and handle.number not in values.overwritten:
                values.held.setdefault(handle.number, handle.tensor)
        self._stand_ins = None

    def move(self, number: int, storage: torch.UntypedStorage, tensor: Tensor) -> None:
        """The memory of a value is handed out. ``tensor`` is a view of that ``storage``.

        ``take_back`` may have brought the value back, in other memory than others are going to write to.
        """
        layout = self.values.facts[number].layout
        for handle in alive(self._handles):
            if handle.number == number:
                assert handle.tensor is not None
                if handle.tensor.untyped_storage()._cdata != storage._cdata:
                    handle.tensor = seen_as(without_graph(tensor), layout if handle.view is None else handle.view[0])
                    handle.version = version_of(handle.tensor)

    def drop(self) -> None:
        """Let go of every tensor: nobody will ask for one."""
        for handle in list(alive(self._handles)):
            handle.tensor = None  # its tensor has a graph, and that graph holds the handle
        self._let_go_of_graphs()

    def resolve(self, plan: SavePlan, keep: type[KeptValues]) -> dict[int, OpRecipe]:
        """The frame has ended: each handle gets the holder of its value, or the recipe that regenerates it.

        keep: holds the kept values. Returns the recipe of each step that runs again.
        """
        kept = keep(self, plan)
        recipes = kept.recipes(self._calls)
        self._let_go_of_graphs()
        kept.resolve(self._handles, recipes)
        return recipes

    def _let_go_of_graphs(self) -> None:
        for saved in self._with_graphs:
            saved.tensor = saved.tensor.detach()

    def clear(self) -> None:
        self._stand_ins, self._handles, self._with_graphs = None, [], []


class KeptValues:
    """Packs the values that a plan keeps, each once, through the hooks around the region (invariant 9)."""

    def __init__(self, handles: FrameHandles, plan: SavePlan):
        self._plan = plan
        self._values, self._statistics, self._codec = handles.values, handles.statistics, handles.codec
        self._outer, self._group = handles.outer, handles.group
        self._hooks_hold_them_as_they_are = handles.hooks_hold_them_as_they_are
        self._packed: dict[int, PackedTensor | Recipe] = {}
        self._views: dict[ValueRef, PackedTensor | Recipe] = {}
        """Views that hooks of others hold by themselves."""
        self._copies: dict[int, KeptTensor] = {}

    def for_backward(self, ref: ValueRef) -> PackedTensor:
        """Hold a value that autograd itself saved."""
        number, layout = ref
        if number in self._values.parameters:
            memory = self._values.held[number].untyped_storage()
            return self._values.parameter_reference(number, layout, memory=memory)
        whole = self._plan.facts[number].layout
        packed = self._packed.get(number)
        if packed is None:
            packed = self._packed[number] = self._pack(number, whole)
        if type(packed) is KeptTensor:
            return packed if layout == whole else PackedView(packed, layout)
        if isinstance(packed, OuterUnpackRecipe):
            if packed.layout != layout:  # hooks of others hold only the view that they were given
                packed = self._views.get(ref) or self._views.setdefault(ref, self._pack(number, layout))
                assert isinstance(packed, OuterUnpackRecipe)
            return packed.handle(0)
        if isinstance(packed, Handle):  # whoever asks gets a handle of their own
            return packed.another(None if layout == whole else (layout, whole))
        assert isinstance(packed, PackedTensor)
        return packed if layout == whole else PackedView(packed, layout)

    def for_rerun(self, ref: ValueRef) -> PackedTensor:
        """Hold a value for a step that runs again and reads it: as a copy, if that is cheap.

        So a buffer may change between forward and backward, as in plain PyTorch. A value that autograd itself saved, in
        memory that the region made, is not copied: it is refused if it has changed, also as in plain PyTorch.
        """
        number, layout = ref
        if number not in self._plan.copyable or self._values.held[number].requires_grad:
            return self.for_backward(ref)
        copy = self._copies.get(number)
        if copy is None:
            whole = seen_as(self._values.held[number].detach(), self._plan.facts[number].layout)
            copy = self._copies[number] = KeptTensor(copied(whole), self._statistics.name)
        return PackedView(copy, layout)

    def _pack(self, number: int, layout: Layout) -> PackedTensor | Recipe:
        tensor = seen_as(self._values.held[number].detach(), layout)
        name = self._statistics.name
        if self._codec is not None and number in self._plan.compressible:
            return CompressedTensor(tensor, self._codec, self._statistics, self._outer, self._group).handle(0)
        if self._hooks_hold_them_as_they_are and self._plan.facts[number].step is not None:
            saved: PackedTensor = KeptTensor(tensor, name)
        elif number in self._plan.demanded:
            saved = pack_through(self._outer, tensor, name)
        else:
            with packing_for_recipe():
                saved = pack_through(self._outer, tensor, name)
        if type(saved) is KeptTensor and (dtensor := self._values.dtensor_of(saved.tensor)) is not None:
            saved = KeptShard(saved.tensor, name, VersionGuard(without_graph(dtensor), name))
        if isinstance(saved, PackedByOuterHook):
            return OuterUnpackRecipe(self._statistics, saved, layout, self._group)
        return saved

    def recipes(self, calls: Mapping[int, RecordedCall]) -> dict[int, OpRecipe]:
        """The recipe of each step that the plan runs again and that the frame has taken, by the step's number.

        calls: the frame's, by the numbers of their steps.
        """
        plan, originals, recipes = self._plan, self._values.originals, dict[int, OpRecipe]()
        for index in plan.rerun:
            if (call := calls.get(index)) is None:
                continue
            slots, compared = plan.slots[index], None
            if originals is not None:
                known = ((number, slot) for number, slot in slots.items() if number in originals)
                compared = {number: originals[number] for number, slot in known if is_defined(call.op, slot)}
            args = [self._with_packed(value, recipes) for value in call.args]
            kwargs = {key: self._with_packed(value, recipes) for key, value in call.kwargs.items()}
            again = RecordedCall(call.op, args, kwargs, call.rng, call.writes)
            name = plan.steps[index].name
            recipes[index] = OpRecipe(self._statistics, again, name, self._group, slots, compared)
        return recipes

    def _with_packed(self, value: Any, recipes: dict[int, OpRecipe]) -> Any:
        """An argument with a ``PackedTensor`` in the place of each ``ValueRef``."""
        if type(value) is not ValueRef:
            return [self._with_packed(item, recipes) for item in value] if isinstance(value, list) else value
        number, layout = value
        if number in self._plan.kept:
            return self.for_rerun(value)
        whole = self._plan.facts[number].layout
        view = None if layout == whole else (layout, whole)
        return recipes[self._plan.origin(number)].handle(number, view)

    def resolve(self, handles: Iterable[weakref.ref[Handle]], recipes: Mapping[int, OpRecipe]) -> None:
        """Give each handle of the frame the holder of its value, or the recipe that regenerates it."""
        plan, statistics = self._plan, self._statistics
        for reference in handles:
            if (handle := reference()) is None:
                continue
            number = handle.number
            if number in plan.overwritten:  # its version is checked when autograd asks for it
                assert handle.tensor is not None
                handle.keep(KeptTensor(handle.tensor.detach(), statistics.name, handle.version))
            elif number in plan.kept:
                layout = plan.facts[number].layout if handle.view is None else handle.view[0]
                handle.keep(self.for_backward(ValueRef(number, layout)))
            else:
                handle.drop_for(recipes[plan.origin(number)])
        statistics.dropped_tensors += len(plan.dropped)
        statistics.dropped_nbytes += plan.dropped_nbytes
        statistics.kept_nbytes += plan.kept_nbytes
        statistics.eager_nbytes += plan.eager_nbytes


class ValuesAsTheyAre(KeptValues):
    """The same where the frame still runs, or was stopped by an error: each value is held as it is."""

    def for_backward(self, ref: ValueRef) -> PackedTensor:
        tensor = without_graph(self._values.held[ref.value])
        return KeptTensor(seen_as(tensor, ref.layout), self._statistics.name)

    for_rerun = for_backward
