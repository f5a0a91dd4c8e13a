"""A frame's holdings for backward: the values that it keeps, and the recipes of the values that it drops."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from recompute.engine.compression import Codec, CompressedTensor
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import is_defined
from recompute.engine.cut.save_plan import SavePlan, ValueRef
from recompute.engine.recipes import Handle, OpRecipe, OuterUnpackRecipe, Recipe, RecipeGroup, RecordedCall
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    Hooks,
    KeptShard,
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    PackedView,
    VersionGuard,
    are_held_as_they_are,
    pack_through,
    seen_as,
    without_graph,
)
from recompute.engine.tape.frame_values import FrameValues
from recompute.engine.tape.op_arguments import copied
from recompute.engine.thread_state import packing_for_recipe


@dataclass(eq=False)
class KeptValues:
    """Packs the values that a plan keeps, each once, through the hooks around the region (invariant 9)."""

    _values: FrameValues
    _plan: SavePlan
    _statistics: RegionStatistics
    _outer: Hooks | None
    """The hooks around the region."""
    _group: RecipeGroup
    """The group of the frame's recipes."""
    _codec: Codec | None
    """The region's."""
    _packed: dict[int, PackedTensor | Recipe] = field(default_factory=dict)
    _views: dict[ValueRef, PackedTensor | Recipe] = field(default_factory=dict)
    """Views that hooks of others hold by themselves."""
    _copies: dict[int, KeptTensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._are_held_as_they_are = are_held_as_they_are(self._outer)

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
        if isinstance(packed, CompressedTensor):
            return packed.handle(0, None if layout == whole else (layout, whole))
        if isinstance(packed, Handle):  # whoever asks gets a handle of their own
            return packed.another((layout, whole))
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
            return CompressedTensor(tensor, self._codec, self._statistics, self._outer, self._group)
        if self._are_held_as_they_are and self._plan.facts[number].step is not None:
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
            again = RecordedCall(call.op, args, kwargs, call.rng, call.dtype, call.writes)
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
