"""Autograd's handles of a frame's saved tensors while the frame runs; and tensors that a plan keeps at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

from recompute.engine.compression import Codec
from recompute.engine.cut.layout import Layout
from recompute.engine.cut.save_plan import SavePlan
from recompute.engine.recipes import Handle, OpRecipe, RecipeGroup, RecordedCall
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedTensor,
    are_held_as_they_are,
    seen_as,
    top_hooks,
    version_of,
    without_graph,
)
from recompute.engine.tape.frame_values import FrameValues
from recompute.engine.tape.kept_values import KeptValues, ValuesAsTheyAre
from recompute.engine.thread_state import alive, sharing_values


class FrameHandles:
    """The handles of one frame. Each has its tensor until the frame ends, unless the plan that it follows drops it."""

    name = "a tape that is still running"

    def __init__(
        self, statistics: RegionStatistics, codec: Codec | None, values: FrameValues, calls: Mapping[int, RecordedCall]
    ):
        """statistics, codec: the region's. values, calls: the frame's; calls are by the numbers of their steps."""
        self.statistics = statistics
        self.outer = top_hooks()
        self.are_held_as_they_are = codec is None and are_held_as_they_are(self.outer)
        self._codec = codec
        self._values = values
        self._calls = calls
        self._group = RecipeGroup()
        self._handles: list[weakref.ref[Handle]] = []
        self._with_graphs: list[KeptTensor] = []
        """Tensors that were kept as soon as they were saved. They have their graphs until the frame ends."""
        self._stand_ins: weakref.WeakKeyDictionary[Handle, Handle] | None = None
        """For each handle whose tensor is dropped, a handle that regenerates the value while the frame runs.

        They are made when one is asked for first, as by ``autograd.grad`` inside of the region.
        """

    def hold(self, number: int, tensor: Tensor, parameter: Tensor | None) -> PackedTensor:
        """Autograd saves a tensor. Returns what it holds. number, parameter: as ``FrameValues.number_of`` just said."""
        values = self._values
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
        plan = self._values.plan
        assert plan is not None
        recipes = self._kept(plan, ValuesAsTheyAre).recipes(self._calls)
        return [
            (handle, recipes[plan.origin(handle.number)].handle(handle.number, handle.view))
            for handle in alive(self._handles)
            if handle.tensor is None
        ]

    def take_back(self, plan: SavePlan) -> None:
        """Have every handle hold its tensor again, and the frame its value: ``plan`` is not followed any more."""
        values = self._values
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
        layout = self._values.facts[number].layout
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
        kept = self._kept(plan, keep)
        recipes = kept.recipes(self._calls)
        self._let_go_of_graphs()
        kept.resolve(self._handles, recipes)
        return recipes

    def _kept(self, plan: SavePlan, keep: type[KeptValues]) -> KeptValues:
        return keep(self._values, plan, self.statistics, self.outer, self._group, self._codec)

    def _let_go_of_graphs(self) -> None:
        for saved in self._with_graphs:
            saved.tensor = saved.tensor.detach()

    def clear(self) -> None:
        self._stand_ins, self._handles, self._with_graphs = None, [], []
