"""The state that a region's code reads beside its arguments and its modules: globals, closures, attributes, and more.

A frame notes this state when it begins, and puts it back while it runs again (invariant 11). To find the places of the
state, the generators and the changes of a code costs too much to be done in each frame. So the first frame is watched,
and later frames rely on its findings. They learn anew if they meet another function or object there, or if versions and
states differ from those expected.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat, starmap
from types import CellType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from recompute.engine.checkpoint.copies import StateCopies
from recompute.engine.checkpoint.module_state import TORCHS_OWN, LearnedBuffers, ModuleState
from recompute.engine.cut.ops import EFFECT, facts
from recompute.engine.cut.reviewed_ops import is_effect_registered
from recompute.engine.modes import SeesAllOps
from recompute.engine.reachable_objects import Walk, dict_of, is_foreign
from recompute.engine.rng import RngState, is_random_source
from recompute.engine.tape.autocast import run_as_called
from recompute.engine.tape.op_arguments import generators_of
from recompute.engine.thread_state import alive

_NOTHING: AbstractContextManager[None] = nullcontext()

_MISSING = object()
_MANY = 100
"""The contents of a longer list or dict, as a vocabulary, are not noted."""


Place = tuple[Any, Any]
"""The owner of a value, and the value's name there.

The owner is a dict, and the name a key; or a class, and an attribute; or an object or a closure's cell, and a slot; or
None, and an object that is read whole: a ``threading.local``, which is empty on another thread, or the environment.
"""


def _get(owner: Any, name: Any) -> Any:
    if owner is None:
        return environment() if name is os.environ else vars(name).copy()
    if type(owner) is dict or isinstance(owner, type):
        return (owner if type(owner) is dict else vars(owner)).get(name, _MISSING)
    try:
        return name.__get__(owner)
    except (AttributeError, ValueError):  # the slot is empty; the latter of a cell
        return _MISSING


def _put(owner: Any, name: Any, value: Any) -> None:
    if owner is None:
        if name is os.environ:
            _put_environment(value)
        else:
            vars(name).clear()
            vars(name).update(value)
    elif type(owner) is dict:
        if value is _MISSING:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif isinstance(owner, type):
        delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
    else:
        name.__delete__(owner) if value is _MISSING else name.__set__(owner, value)


def reads_environment(walk: Walk) -> bool:
    return not walk.names.isdisjoint(("environ", "environb", "getenv"))


def environment() -> dict[Any, Any]:
    """The environment variables, encoded: to decode them all takes 20 us."""
    return os.environ._data.copy()  # type: ignore[attr-defined]


def _put_environment(value: dict[Any, Any]) -> None:
    now = environment()
    for key in [key for key in now.keys() | value.keys() if now.get(key) != value.get(key)]:
        if key in value:
            os.environ[os.environ.decodekey(key)] = os.environ.decodevalue(value[key])
        else:
            del os.environ[os.environ.decodekey(key)]


class Places:
    """The places that a region's code reads, as one of its frames found them."""

    def __init__(self, walk: Walk, function: Callable[..., Any], own: Sequence[nn.Module], given: Sequence[Any]):
        """walk: through the region's ``function`` and ``given``, arguments to look at.

        own: modules whose state is noted elsewhere.
        """
        self.defaults = [*map(weakref.ref, walk.defaults)]
        """The tensors among the defaults of functions."""
        self._code = [*map(_weakly, _code_of(function, given))]
        known = set(map(id, own))
        found = {id(value): value for value in walk.values if isinstance(value, nn.Module) and id(value) not in known}
        # A module around the region's own does not run inside of it, though a hook, say, may know it.
        inside = [value for value in found.values() if known.isdisjoint(map(id, value.modules()))]
        self.modules = [weakref.ref(value) for value in inside]
        """The modules that names in the code lead to, beside the region's own."""
        places: list[Place] = [(cell, CellType.cell_contents) for cell in walk.cells.values()]
        places += [(None, os.environ)] if reads_environment(walk) else []
        entries = dict(walk.globals)
        for value in {id(value): value for value in walk.values}.values():
            if isinstance(value, threading.local):
                places.append((None, value))
            elif id(value) not in known and not is_foreign(value):
                space = dict_of(value)
                if type(space) is dict:
                    found_or_made = (space.keys() | walk.assigned) - TORCHS_OWN - _SUMS
                    entries |= {(id(space), n): (space, n) for n in walk.names & found_or_made}
            places += _attributes_read(value, walk.names)
        kept = [(space, key) for space, key in entries.values() if not isinstance(space.get(key), ModuleType)]
        self._spaces = [space for space, _ in kept]
        self._keys = [key for _, key in kept]
        self._others = places

    def note(self, state: ModuleState, found: Sequence[Any]) -> None:
        """state: of the region's modules. found: the objects in it and at the places, as ``StateCopies`` finds them."""
        self._code += map(_weakly, state.adorned)
        self._kinds = [(kind, len(attributes)) for _, kind, attributes, _ in state.held]
        self._objects = [*map(_weakly, found)]

    def values(self) -> list[Any]:
        """The values at the places now."""
        return [*map(dict.get, self._spaces, self._keys, repeat(_MISSING)), *starmap(_get, self._others)]

    def all(self) -> list[Place]:
        return [*zip(self._spaces, self._keys, strict=True), *self._others]

    @contextmanager
    def replayed(self, values: list[Any], copies: StateCopies) -> Iterator[None]:
        """Inside, ``values`` are at the places again. Afterwards the present ones are."""
        places = self.all()
        now = self.values()
        try:
            for place, then, present in zip(places, copies.all(values, _MANY), now, strict=True):
                if then is not present:
                    _put(*place, then)
            yield
        finally:
            for place, present in zip(places, now, strict=True):
                if _get(*place) is not present:
                    _put(*place, present)

    def are_those_of(
        self, function: Callable[..., Any], state: ModuleState, given: Sequence[Any], found: Sequence[Any]
    ) -> bool:
        """Whether a walk would find them again: whether it would go through the same functions and objects.

        found: as for ``note``, now. Modules may be others, of the same classes and as many attributes.
        """
        return (
            [(kind, len(attributes)) for _, kind, attributes, _ in state.held] == self._kinds
            and _are_same(self._code, [*_code_of(function, given), *state.adorned])
            and _are_same(self._objects, found)
        )


_SUMS = frozenset(("main_grad",))
"""Sums of gradients, by Megatron's name. Code finds them in forward, and backward adds to them before other replays."""


def _code_of(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """The objects by which calls differ that may run other code. Modules of one class have their code in common."""
    found = [getattr(function, "__func__", None) or getattr(function, "func", function)]
    pending = list(given)
    while pending:
        value = pending.pop()
        if type(value) is MethodType:
            found += value.__self__, value.__func__
        elif type(value) is partial:
            pending += value.func, *value.args, *value.keywords.values()
        elif callable(value) or isinstance(value, Tensor):
            found.append(value)
    return found


def _weakly(value: Any) -> Callable[[], Any]:
    """Returns ``value`` as long as it lives; forever, if it bears no weak reference."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _are_same(known: Sequence[Callable[[], Any]], values: Sequence[Any]) -> bool:
    return len(known) == len(values) and all(ref() is value for ref, value in zip(known, values, strict=True))


def class_attributes_read(walk: Walk) -> list[tuple[type, str]]:
    """The attributes of classes, but for methods, that the walked code may read: the classes and the names."""
    unique = {id(value): value for value in walk.values}.values()
    places = [place for value in unique for place in _attributes_read(value, walk.names)]
    return [*{place: None for place in places if isinstance(place[0], type)}]


def _attributes_read(value: Any, names: set[str]) -> Iterator[Place]:
    """The attributes of ``value`` called ``names`` that are in slots and in classes, but for methods."""
    if isinstance(value, (ModuleType, Tensor, dict, list, set)) or not hasattr(type(value), "__mro__"):
        return
    for base in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        if not is_foreign(base):
            for name in names & vars(base).keys():
                attribute = vars(base)[name]
                if isinstance(attribute, MemberDescriptorType):
                    if not isinstance(value, type):
                        yield value, attribute
                elif not hasattr(attribute, "__get__"):
                    yield base, name


@dataclass(slots=True)
class LearnedFacts:
    """The facts of a region that its first frame has shown."""

    generators: list[Any] | None = None
    """The random generators that it may draw from; None as long as no frame with these places has ended."""
    found: list[Any] = field(default_factory=list)
    """The generators that names in its code lead to."""
    is_scripted: bool = False
    """Whether it may run a ScriptModule."""
    effect: str = ""
    """An op with an effect that it has run, by its name; "" as long as none was seen."""
    buffers: LearnedBuffers = field(default_factory=LearnedBuffers)
    _places: Places | None = None

    def reach(
        self, function: Callable[..., Any], modules: Sequence[nn.Module], given: Sequence[Any]
    ) -> tuple[ModuleState, Places, list[Any]]:
        """The state that ``function(...)`` reads beside its arguments: of modules; other places; and the values there.

        modules: the ones it runs. given: the arguments that it may call, run or draw from.
        """
        roots = [*modules, *[value for value in given if isinstance(value, nn.Module)]]
        known = self._places
        places = known or self._find(function, roots, given)
        while True:
            copies = StateCopies()
            state = ModuleState([*roots, *alive(places.modules)], self.buffers, copies)
            values = copies.all(places.values(), _MANY)
            if places is not known or places.are_those_of(function, state, given, copies.found):
                break
            places = self._find(function, roots, given)
        if places is not known:
            places.note(state, copies.found)
            self._places = places  # at last, as other threads may look at it
        state.watch([*copies.tensors, *alive(places.defaults)] if places.defaults else copies.tensors)
        return state, places, values

    def _find(self, function: Callable[..., Any], roots: Sequence[nn.Module], given: Sequence[Any]) -> Places:
        """Find the places anew, and the other facts that a walk through the code shows."""
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
    """Sees the ops of a frame, for nothing else says which generators they draw from, and which have effects."""

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
