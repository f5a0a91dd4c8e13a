"""What the first frame of a checkpoint learns for those after it.

Finding out what a region's code draws from and what it changes costs too much to be done in each frame. So the first
frame is watched, and later frames rely on what it found. If something turns out otherwise they notice it, by versions
and by comparing states, and learn anew.

Other parts of the package learn in a first run, too. They do not use this class, for these reasons:

- A tape needs nothing to be known before a frame begins. It follows the plan of a frame that began alike
  (``TapeRegion.plan_cache``), compares each step with it, and deoptimizes at the first one that differs.
- AOTAutograd traces a region twice and tells only the first time what autograd saves (``compiled.partitioner``). What
  is learned there is found again by the ops that were traced, and belongs to no region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from recompute.engine.checkpoint.held_buffers import LearnedBuffers
from recompute.engine.checkpoint.module_state import ModuleState
from recompute.engine.checkpoint.reached_state import Places, ReachedState, alive
from recompute.engine.cut.ops import EFFECT, facts
from recompute.engine.cut.reviewed_ops import is_effect_registered
from recompute.engine.modes import SeesAllOps
from recompute.engine.random_sources import is_random_source
from recompute.engine.rng import RngState
from recompute.engine.tape.autocast import run_as_called
from recompute.engine.tape.op_arguments import generators_of

_NOTHING: AbstractContextManager[None] = nullcontext()


class LearnedFacts:
    """What is known of a region after its first frame."""

    __slots__ = ("_places", "buffers", "effect", "found", "generators", "is_scripted")

    def __init__(self) -> None:
        self.generators: list[Any] | None = None
        """The random generators that it may draw from; None as long as no frame with these places has ended."""
        self.found: list[Any] = []
        """Those of them that names in its code lead to."""
        self.is_scripted = False
        """Whether it may run a ScriptModule."""
        self.effect = ""
        """An op with an effect that it has run, by its name; "" as long as none was seen."""
        self.buffers = LearnedBuffers()
        self._places: Places | None = None

    def reach(
        self, function: Callable[..., Any], modules: Sequence[nn.Module], given: Sequence[Any]
    ) -> tuple[ModuleState, ReachedState]:
        """What ``function(...)`` reads beside its arguments, as it is now: of modules, and at other places.

        modules: those it runs. given: what it may call, run or draw from among its arguments.
        """
        roots = [*modules, *[value for value in given if isinstance(value, nn.Module)]]
        places = self._places
        state = ModuleState([*roots, *alive(places.modules)] if places and places.modules else roots, self.buffers)
        values = None if places is None else places.values()
        if places is None or values is None or not places.are_those_of(function, state.held, given, values):
            places, values, state = self._walk(function, roots, given, state if places is None else None)
        reached = ReachedState(places, values)
        state.watch([*reached.tensors, *alive(places.tensors)] if places.tensors else reached.tensors)
        return state, reached

    def _walk(
        self, function: Callable[..., Any], roots: Sequence[nn.Module], given: Sequence[Any], state: ModuleState | None
    ) -> tuple[Places, list[Any], ModuleState]:
        """Find the places anew. state: that of ``roots``, if it is known."""
        state = state or ModuleState(roots, self.buffers)
        places = Places(function, state.modules(), given)
        self.is_scripted = any(isinstance(value, torch.jit.ScriptModule) for value in places.reached)
        self.found = [*{id(value): value for value in places.reached if is_random_source(value)}.values()]
        self.generators = None
        self.buffers.may_change_unseen |= places.names_batch_norm
        if places.modules:
            state = ModuleState([*roots, *alive(places.modules)], self.buffers)
        values = places.values()
        places.note(state.held, values)
        del places.reached
        self._places = places  # at last, as other threads may look at it
        return places, values, state

    def watching(self, rng: RngState | None, name: str) -> AbstractContextManager[Any]:
        """A context for a frame. In the first one it notes the generators of ops, and ops that have effects.

        Where such ops are registered it does so in every frame, as any frame may be the first one to run one.

        rng: they are included in it. None where tensors have no values, and random numbers mean nothing.
        name: the region's, for errors.
        """
        is_known = self.generators is not None and not is_effect_registered()
        return _NOTHING if rng is None or is_known else _OpWatcher(self, rng, name)


class _OpWatcher(SeesAllOps):
    """Sees the ops of a frame: nothing else tells which random generators they draw from, and which have effects."""

    def __init__(self, learned: LearnedFacts, rng: RngState, name: str):
        super().__init__()
        self._learned = learned
        self._rng = rng
        self._name = name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = facts(function)
        if known.reason == EFFECT:
            self._learned.effect = known.name
        for value in (*args, *kwargs.values(), *(generators_of(function) if known.is_foreign else ())):
            if is_random_source(value):
                self._rng.include(value)
        return run_as_called(function, args, kwargs, self._name)
