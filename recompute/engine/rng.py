"""Random generators of torch, Python, NumPy, and trackers of such: their states are read, compared and put back.

A region's states are captured when it starts, compared when it ends, and put back for a replay.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from recompute.errors import RngError


class RandomSource:
    """Something random whose state can be read, compared and put back."""

    def __init__(self, generator: Any, read: Callable[[], Any] | None = None, put: Callable[[Any], None] | None = None):
        """read, put: get and set the state, which ``==`` can compare; a subclass may do both in its own way."""
        self.generator = generator
        self._read, self._put = read, put

    def state(self) -> Any:
        assert self._read is not None
        return self._read()

    def restore(self, state: Any) -> None:
        assert self._put is not None
        self._put(state)

    def same(self, a: Any, b: Any) -> bool:
        return bool(a == b)


class CpuSource(RandomSource):
    """The CPU's default generator, or a ``torch.Generator`` on the CPU. Its state is 5 KB, held as bytes to compare."""

    def state(self) -> bytes:
        if not _count_modes():
            return _numpy(self.generator.get_state()).tobytes()
        with _disable_current_modes():  # a mode might make the state a fake tensor, say
            return _numpy(self.generator.get_state()).tobytes()

    def restore(self, state: bytes) -> None:
        with _disable_current_modes():
            self.generator.set_state(torch.from_numpy(np.frombuffer(bytearray(state), np.uint8)))


_count_modes = torch._C._len_torch_dispatch_stack
_numpy = torch._C.TensorBase.numpy  # ``Tensor.numpy`` would tell tapes that memory is handed out


class CudaSource(RandomSource):
    """A CUDA generator. Its algorithm is Philox, whose whole state is a seed and an offset."""

    def state(self) -> tuple[int, int]:
        try:
            return self.generator.initial_seed(), self.generator.get_offset()
        except RuntimeError as error:  # torch refuses to read a generator while a CUDA graph is captured
            raise RngError(
                f"the random generator of {self.generator.device} cannot be read while a CUDA graph is captured, so "
                'random numbers could not be drawn again. Use torch.compile(mode="reduce-overhead") in place of your '
                "own CUDA graph, a rule with `action: recompute` and no dropout, or no policy inside of the graph. "
                f"({error})"
            ) from error

    def restore(self, state: tuple[int, int]) -> None:
        seed, offset = state
        self.generator.manual_seed(seed)
        self.generator.set_offset(offset)


class _TrackerSource(RandomSource):
    """A tracker: it swaps the states of CUDA generators by name, as trainers with tensor parallelism do.

    An object counts as one if its class has ``get_states() -> dict`` and ``set_states(dict)``, as several libraries'
    trackers have. So no library needs an adapter, and a user's own tracker works too.
    """

    def state(self) -> dict[str, Any]:
        return {
            name: state.clone() if isinstance(state, torch.Tensor) else state
            for name, state in self.generator.get_states().items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.generator.set_states(dict(state))

    def same(self, a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(
            torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
        )


GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
GLOBALS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)
"""The generators behind the functions of Python's ``random`` and of ``numpy.random``. To read both takes 50 us."""
CPU = CpuSource(torch.default_generator)


def source_of(value: Any) -> RandomSource | None:
    """``value`` as a source, or the source that it is a method of; None if it is neither."""
    if isinstance(value, torch.Generator):
        return CudaSource(value) if value.device.type == "cuda" else CpuSource(value)
    value = getattr(value, "__self__", value) if isinstance(value, (MethodType, BuiltinMethodType)) else value
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else RandomSource(value, value.getstate, value.setstate)
    # NumPy's states are pickled: a copy, as == cannot compare arrays in it.
    if isinstance(value, np.random.RandomState):  # it makes two normal numbers, and holds the second back
        legacy = value
        return RandomSource(
            value, lambda: pickle.dumps(legacy.get_state(legacy=False)), lambda s: legacy.set_state(pickle.loads(s))
        )
    if isinstance(value, np.random.Generator):
        own = value.bit_generator
        return RandomSource(value, lambda: pickle.dumps(own.state), lambda s: setattr(own, "state", pickle.loads(s)))
    kind = type(value)
    if callable(getattr(kind, "get_states", None)) and callable(getattr(kind, "set_states", None)):
        return _TrackerSource(value)
    return None


def is_random_source(value: Any) -> bool:
    """Whether ``value`` is a random generator of torch, Python or NumPy, a method of one, or a tracker of states."""
    return source_of(value) is not None


class RngState:
    """The states of the default generators of the CPU, each CUDA device, Python and NumPy, and of any others given."""

    __slots__ = ("_defaults", "_states")

    def __init__(
        self, extra: Iterable[Any] = (), *, name: str = "a region", only_torch: bool = False, alone: bool = False
    ):
        """name: of the module that is going to draw; errors mention it.

        only_torch: leave out Python's and NumPy's, unless they are in ``extra``. alone: leave out all but ``extra``.
        """
        devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        defaults = () if alone else (*devices, *(() if only_torch else GLOBALS))
        try:
            self._states: list[tuple[RandomSource, Any]] = [] if alone else [(CPU, CPU.state())]
            self._defaults = len(self._states) + len(defaults)
            for value in (*defaults, *extra):
                self.include(value)
        except RngError as error:
            raise RngError(f"{name}: {error}") from error

    @staticmethod
    def of(generator: torch.Generator, name: str) -> RngState:
        """The state of one generator alone."""
        return RngState((generator,), name=name, alone=True)

    def include(self, value: Any) -> None:
        """Also capture the state of ``value``, if it is a source that has not been captured yet."""
        source = source_of(value)
        if source is not None and all(known.generator is not source.generator for known, _ in self._states):
            self._states.append((source, source.state()))

    def extra(self) -> list[Any]:
        """The generators that were included besides the default ones."""
        return [source.generator for source, _ in self._states[self._defaults :]]

    def is_beyond_torch(self) -> bool:
        """Whether some source here is not one of torch's generators."""
        return any(not isinstance(source.generator, torch.Generator) for source, _ in self._states)

    def drawn(self) -> RngState | None:
        """The captured states of the sources that have been drawn from since; None if there are none."""
        changed = [(source, state) for source, state in self._states if not source.same(state, source.state())]
        if not changed:
            return None
        drawn = object.__new__(RngState)
        drawn._states = changed
        return drawn

    def __enter__(self) -> None:
        """Do nothing yet: ``__exit__`` puts the captured states back (invariant 6)."""

    def __exit__(self, *error: object) -> None:
        if (drawn := self.drawn()) is not None:
            drawn.restore()

    def restore(self) -> None:
        """Give the generators their captured states."""
        for source, state in self._states:
            source.restore(state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the generators have their captured states.

        At the end they get their present ones back, also after an error (invariant 6).
        """
        present = [(source, source.state()) for source, _ in self._states]
        try:
            self.restore()
            yield
        finally:
            for source, state in present:
                source.restore(state)


class WatchedDraws(RngState):
    """The draws of an op that may not say that it draws, nor from which generators.

    When it runs again it draws the same. All generators that it may move are put back, for it may move one then that it
    did not move in forward: an op may seed it.
    """

    __slots__ = ("_extra",)

    def __init__(self, before: RngState):
        """before: the states of all generators before it ran."""
        drawn = before.drawn()
        self._states = [] if drawn is None else drawn._states
        self._extra = before.extra()

    @property
    def are_none(self) -> bool:
        return not self._states

    @contextmanager
    def replayed(self) -> Iterator[None]:
        with RngState(self._extra, only_torch=True):
            self.restore()
            yield
