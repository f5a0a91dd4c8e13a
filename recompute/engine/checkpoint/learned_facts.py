"""What the first frame of a checkpoint learns for those after it.

Finding out what a region's code draws from and what it changes costs too much to be done in each frame. So the first
frame is watched, and later frames rely on what it found. If something turns out otherwise they notice it, by versions
and by comparing states, and learn anew.
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
from recompute.engine.reachable_objects import Walk
from recompute.engine.rng import RngState, is_random_source
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
        places = self._places or self._find(function, roots, given)
        state, values = ModuleState([*roots, *alive(places.modules)], self.buffers), places.values()
        if places is self._places and not places.are_those_of(function, state.held, given, values):
            places = self._find(function, roots, given)
            state, values = ModuleState([*roots, *alive(places.modules)], self.buffers), places.values()
        if places is not self._places:
            places.note(state.held, values)
            self._places = places  # at last, as other threads may look at it
        reached = ReachedState(places, values)
        state.watch([*reached.tensors, *alive(places.tensors)] if places.tensors else reached.tensors)
        return state, reached

    def _find(self, function: Callable[..., Any], roots: Sequence[nn.Module], given: Sequence[Any]) -> Places:
        """The places, found anew, and what else a walk through the code tells."""
        own = [m for root in roots for m in root.modules() if not isinstance(m, torch.jit.ScriptModule)]
        walk = Walk((function, *own, *given))
        self.is_scripted = any(isinstance(value, torch.jit.ScriptModule) for value in walk.values)
        self.found = [*{id(value): value for value in walk.values if is_random_source(value)}.values()]
        self.generators = None
        self.buffers.may_change_unseen |= any("batch_norm" in name or "instance_norm" in name for name in walk.names)
        return Places(walk, function, own, given)

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
