"""What a frame holds for backward: the values that it keeps, and the recipes of those that it drops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from recompute.engine.compression import Codec, CompressedTensor
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.ops import is_defined
from recompute.engine.cut.save_plan import SavePlan, ValueRef
from recompute.engine.recipes import Handle, OpRecipe, OuterUnpackRecipe, Recipe, RecipeGroup
from recompute.engine.saved_tensors import (
    Hooks,
    KeptShard,
    KeptTensor,
    PackedByOuterHook,
    PackedTensor,
    PackedView,
    RegionStatistics,
    VersionGuard,
    are_held_as_they_are,
    pack_through,
    seen_as,
)
from recompute.engine.tape.frame_values import FrameValues, without_graph
from recompute.engine.tape.op_arguments import copied
from recompute.engine.tape.recorded_call import RecordedCall
from recompute.engine.thread_state import packing_for_recipe

PackKept = Callable[[ValueRef], PackedTensor]
"""Returns what is held for a value that is kept."""


class KeptValues:
    """Packs the values that a plan keeps, each once, as the hooks around the region would have it (invariant 9)."""

    def __init__(
        self,
        values: FrameValues,
        plan: SavePlan,
        statistics: RegionStatistics,
        outer: Hooks | None,
        group: RecipeGroup,
        codec: Codec | None,
    ):
        """outer: the hooks around the region. group: of the frame's recipes. codec: as the region has it."""
        self._values = values
        self._plan = plan
        self._statistics = statistics
        self._outer = outer
        self._are_held_as_they_are = are_held_as_they_are(outer)
        self._group = group
        self._codec = codec
        self._packed: dict[int, PackedTensor | Recipe] = {}
        self._views: dict[ValueRef, PackedTensor | Recipe] = {}
        """Views that hooks of others hold by themselves."""
        self._copies: dict[int, KeptTensor] = {}

    def for_backward(self, ref: ValueRef) -> PackedTensor:
        """What is held for a value that autograd itself saved."""
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
        """What is held for a step that runs again and reads this value: a copy, if that is cheap.

        So a buffer may change between forward and backward, as in plain PyTorch. What autograd itself saved, in memory
        that the region made, is not copied: it is refused if it has changed, also as in plain PyTorch.
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


def make_recipes(
    calls: Mapping[int, RecordedCall],
    plan: SavePlan,
    pack: PackKept,
    statistics: RegionStatistics,
    group: RecipeGroup,
    dtype: torch.dtype,
    originals: Mapping[int, Tensor] | None,
) -> dict[int, OpRecipe]:
    """The recipe of each step that the plan runs again, as far as it has been taken. They take the frame's arguments.

    calls: by the numbers of their steps. dtype: the default one of the frame. originals: values to compare with, if
    that is wanted.
    """
    recipes: dict[int, OpRecipe] = {}
    for index in plan.rerun:
        if (call := calls.get(index)) is None:
            continue
        slots, compared = plan.slots[index], None
        if originals is not None:
            compared = {n: originals[n] for n, slot in slots.items() if n in originals and is_defined(call.op, slot)}
        recipes[index] = OpRecipe(
            statistics,
            call.op,
            [_with_packed(value, plan, pack, recipes) for value in call.args],
            {key: _with_packed(value, plan, pack, recipes) for key, value in call.kwargs.items()},
            name=plan.steps[index].name,
            dtype=None if call.dtype is dtype else call.dtype,
            rng=call.rng,
            writes=call.writes,
            group=group,
            slots=slots,
            originals=compared,
        )
    return recipes


def resolve_handles(
    handles: Iterable[weakref.ref[Handle]],
    plan: SavePlan,
    recipes: Mapping[int, OpRecipe],
    pack: PackKept,
    statistics: RegionStatistics,
) -> None:
    """Give each handle of a frame what holds its value, or the recipe that gives it back."""
    for reference in handles:
        handle = reference()
        if handle is None:
            continue
        number = handle.number
        if number in plan.overwritten:  # to be refused if autograd minds
            assert handle.tensor is not None
            handle.keep(KeptTensor(handle.tensor.detach(), statistics.name, handle.version))
        elif number in plan.kept:
            layout = plan.facts[number].layout if handle.view is None else handle.view[0]
            handle.keep(pack(ValueRef(number, layout)))
        else:
            handle.drop_for(recipes[plan.origin(number)])
    statistics.dropped_tensors += len(plan.dropped)
    statistics.dropped_nbytes += plan.dropped_nbytes
    statistics.kept_nbytes += plan.kept_nbytes
    statistics.eager_nbytes += plan.eager_nbytes


def _with_packed(value: Any, plan: SavePlan, pack: PackKept, recipes: dict[int, OpRecipe]) -> Any:
    """An argument with a ``PackedTensor`` in the place of each ``ValueRef``."""
    if type(value) is not ValueRef:
        return [_with_packed(item, plan, pack, recipes) for item in value] if isinstance(value, list) else value
    if value.value in plan.kept:
        return pack(value)
    whole = plan.facts[value.value].layout
    view = None if value.layout == whole else (value.layout, whole)
    return recipes[plan.origin(value.value)].handle(value.value, view)
