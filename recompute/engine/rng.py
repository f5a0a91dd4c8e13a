"""What a region drew from: random generators captured at its start, compared at its end, put back around a replay."""

from __future__ import annotations

import ctypes
import itertools
import pickle
import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from recompute.errors import RngError


class RandomSource(ABC):
    """Something random whose state can be read, compared and put back."""

    generator: Any

    @abstractmethod
    def state(self) -> Any: ...

    @abstractmethod
    def restore(self, state: Any) -> None: ...

    def same(self, a: Any, b: Any) -> bool:
        return bool(a == b)


class _CpuSource(RandomSource):
    """The CPU's default generator, or a ``torch.Generator`` on the CPU: its whole state (5 KB), as bytes to compare."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state(self) -> bytes:
        with _disable_current_modes():  # one that makes tensors fake, say
            return bytes(_numpy(self.generator.get_state()))

    def restore(self, state: bytes) -> None:
        with _disable_current_modes():
            self.generator.set_state(torch.from_numpy(np.frombuffer(bytearray(state), np.uint8)))


_numpy = torch._C.TensorBase.numpy  # which tells no tape that memory is handed out


class _CudaSource(RandomSource):
    """A CUDA generator: Philox, so a seed and an offset say all."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state(self) -> tuple[int, int]:
        try:
            return self.generator.initial_seed(), self.generator.get_offset()
        except RuntimeError as error:  # torch refuses to read a generator while a CUDA graph is captured
            raise RngError(
                f"the state of the random generator of {self.generator.device} cannot be read: the module ran under "
                "its rule while a CUDA graph was being captured, where what it draws cannot be drawn again. Compile "
                'it, with `mode="reduce-overhead"`, which has CUDA graphs of its own; or give it a rule with `action: '
                f"recompute` and no dropout; or capture the graph without the policy. ({error})"
            ) from error

    def restore(self, state: tuple[int, int]) -> None:
        seed, offset = state
        self.generator.manual_seed(seed)
        self.generator.set_offset(offset)


class StateTracker(Protocol):
    """Swaps the states of CUDA generators by name, as trainers with tensor parallelism do.

    Any object whose class has these two methods is taken for one. Trackers of several libraries are alike in this, so
    none of them needs an adapter, and a user's own works too.
    """

    def get_states(self) -> dict[str, Any]: ...

    def set_states(self, states: dict[str, Any]) -> None: ...


class _TrackerSource(RandomSource):
    """A ``StateTracker``."""

    def __init__(self, tracker: StateTracker):
        self.generator = tracker

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


def _fields_of(value: Any) -> Any:
    """A view, as long as ``value`` lives, of the fields that its C type has. None but in CPython.

    Python's and NumPy's generators have their whole state there. To ask them for it takes 7 and 33 us, this 0.1.
    """
    if sys.implementation.name != "cpython":
        return None
    header = object.__basicsize__
    return (ctypes.c_char * (type(value).__basicsize__ - header)).from_address(id(value) + header)


class _PythonSource(RandomSource):
    """Python's ``random``, or a ``random.Random``."""

    def __init__(self, generator: random.Random):
        self.generator = generator

    def state(self) -> Any:
        return self.generator.getstate()

    def restore(self, state: Any) -> None:
        self.generator.setstate(state)


class _NumpySource(RandomSource):
    """A NumPy ``Generator``: its bit generator is all the state there is."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.bit_generator.state)  # a copy, and of arrays too one that compares

    def restore(self, state: bytes) -> None:
        self.generator.bit_generator.state = pickle.loads(state)


class _LegacyNumpySource(RandomSource):
    """NumPy's global generator, or a ``RandomState``: a bit generator, and every second normal number held back."""

    def __init__(self, generator: np.random.RandomState):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.get_state(legacy=False))

    def restore(self, state: bytes) -> None:
        self.generator.set_state(pickle.loads(state))


class _CachedSource(RandomSource):
    """A source that any code may draw from, so that every region looks at it: cheap where nobody has drawn."""

    def __init__(self, source: RandomSource):
        self.generator = source.generator
        self._source = source
        self._last: tuple[Any, Any] = (None, None)  # a copy of its memory, and its state then

    def state(self) -> Any:
        memory = self.memory()
        before, state = self._last
        if before == memory is not None:
            return state
        copy = None if memory is None else tuple([_copy_of(part) for part in memory])
        state = self._source.state()
        if copy == self.memory():  # no other thread has drawn meanwhile
            self._last = copy, state
        return state

    def restore(self, state: Any) -> None:
        self._source.restore(state)

    def copy_of(self, state: Any) -> tuple[Any, ...] | None:
        """The copy of the memory that had this state; None if it is not that of the last look."""
        copy, last = self._last
        return copy if last is state else None

    @abstractmethod
    def memory(self) -> tuple[Any, ...] | None:
        """All that the state consists of, as it is now: views of memory, and numbers. None where it cannot be had."""


def _copy_of(part: Any) -> Any:
    return bytearray(part) if isinstance(part, ctypes.Array) else part  # is compared with a view without copying that


_WORDS = 624  # of 4 bytes, that a CPU generator makes its numbers of
_BEFORE, _BEHIND = 20, 28  # bytes: of the seed, and of which word is next; of the normal numbers held back


def _words_of(generator: torch.Generator) -> bytes:
    """A CPU generator's words, which its state has as integers of 8 bytes behind others of 24."""
    return _numpy(generator.get_state())[24:].view(np.int64)[:_WORDS].astype(np.uint32).tobytes()


def _where_words_are() -> int | None:
    """How many bytes into a CPU generator its words begin; None unless all that it draws is seen to show there."""
    probe = torch.Generator()
    place = ctypes.string_at(_address_of(probe), 256).find(_words_of(probe)[:64])  # it is ten times as long as that
    if place < _BEFORE or _memory_of(probe, place).raw[_BEFORE:-_BEHIND] != _words_of(probe):
        return None
    seen = [_memory_of(probe, place).raw]
    for dtype in (torch.float64, torch.float64, torch.float32, torch.float32):  # every second one was held back
        torch.randn(1, dtype=dtype, generator=probe, device="cpu")
        seen.append(_memory_of(probe, place).raw)
    torch.rand(1, generator=probe, device="cpu")
    seen.append(_memory_of(probe, place).raw)
    return place if len(set(seen)) == len(seen) else None


def _address_of(generator: torch.Generator) -> int:
    return generator._cdata  # type: ignore[attr-defined]


def _memory_of(generator: torch.Generator, place: int) -> Any:
    """A view, as long as ``generator`` lives, of all that its next numbers depend on."""
    return (ctypes.c_char * (_BEFORE + _WORDS * 4 + _BEHIND)).from_address(_address_of(generator) + place - _BEFORE)


class _GlobalCpu(_CachedSource):
    """What ops on the CPU draw from that are given no generator."""

    def __init__(self) -> None:
        super().__init__(_CpuSource(torch.default_generator))
        place = _where_words_are()
        self._views = None if place is None else (_memory_of(torch.default_generator, place),)

    def memory(self) -> tuple[Any, ...] | None:
        return self._views


class _GlobalPython(_CachedSource):
    """What the functions of Python's ``random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_PythonSource(random._inst))
        self._fields = _fields_of(self.generator)

    def memory(self) -> tuple[Any, ...] | None:
        return None if self._fields is None else (self._fields, self.generator.gauss_next)


class _GlobalNumpy(_CachedSource):
    """What the functions of ``numpy.random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_LegacyNumpySource(np.random.mtrand._rand))
        self._fields = _fields_of(self.generator)
        self._bits: tuple[Any, Any] = (None, None)

    def memory(self) -> tuple[Any, ...] | None:
        bits, fields = self._bits
        if bits is not self.generator._bit_generator:  # np.random.set_bit_generator
            bits = self.generator._bit_generator
            fields = _fields_of(bits) if type(bits).__module__.startswith("numpy.random.") else None
            self._bits = bits, fields
        return None if fields is None else (fields, self._fields, bits)


class _GlobalGenerators:
    """The generators that any code may draw from on the CPU: one comparison for all of them where nobody has drawn."""

    def __init__(self) -> None:
        self._python: Any = random._inst
        self._numpy: Any = np.random.mtrand._rand
        self._sources = (_GlobalCpu(), _GlobalPython(), _GlobalNumpy())
        # Views of all their memory, a copy of it, and their states then.
        self._last: tuple[tuple[Any, ...], Any, list[tuple[RandomSource, Any]]] = ((None,) * 4, None, [])

    def states(self) -> list[tuple[RandomSource, Any]]:
        """Each with its state: the same list as the last time where the states are the same."""
        (cpu, python, bits, numpy), before, states = self._last
        if before == (cpu, python, self._python.gauss_next, bits, numpy, self._numpy._bit_generator):
            return states
        states = [(source, source.state()) for source in self._sources]
        copies = [source.copy_of(state) or () for source, (_, state) in zip(self._sources, states, strict=True)]
        memories = [source.memory() or () for source in self._sources]
        if all(copies) and all(memories):
            cpu, python, _, bits, numpy, _ = itertools.chain(*memories)
            self._last = (cpu, python, bits, numpy), tuple(itertools.chain(*copies)), states
        return states


_GLOBALS = _GlobalGenerators()


GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def _source(value: Any) -> RandomSource | None:
    """The source of randomness that ``value`` is, or of which it is a method."""
    if isinstance(value, torch.Generator):
        return _CudaSource(value) if value.device.type == "cuda" else _CpuSource(value)
    value = getattr(value, "__self__", value) if isinstance(value, (MethodType, BuiltinMethodType)) else value
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _PythonSource(value)
    if isinstance(value, np.random.RandomState):
        return _LegacyNumpySource(value)
    if isinstance(value, np.random.Generator):
        return _NumpySource(value)
    kind = type(value)
    if callable(getattr(kind, "get_states", None)) and callable(getattr(kind, "set_states", None)):
        return _TrackerSource(value)
    return None


def is_random_source(value: Any) -> bool:
    """Whether ``value`` is a random generator of torch, Python or NumPy, a method of one, or a tracker of states."""
    return _source(value) is not None


class RngState:
    """The states of the default generators of the CPU, each CUDA device, Python and NumPy, and of those given."""

    __slots__ = ("_defaults", "_states")

    def __init__(self, extra: Iterable[Any] = (), *, name: str = "a region"):
        """name: of the module that is going to draw, for errors."""
        try:
            self._states = _GLOBALS.states()  # shared: what is included makes another list
            if torch.cuda.is_initialized():
                devices = map(_CudaSource, torch.cuda.default_generators)
                self._states = [*self._states, *((source, source.state()) for source in devices)]
        except RngError as error:
            raise RngError(f"{name}: {error}") from error
        self._defaults = len(self._states)
        for value in extra:
            self.include(value)

    @staticmethod
    def of(generator: torch.Generator, name: str) -> RngState:
        """The state of one generator alone."""
        captured = object.__new__(RngState)
        source = _CudaSource(generator) if generator.device.type == "cuda" else _CpuSource(generator)
        try:
            captured._states = [(source, source.state())]
        except RngError as error:
            raise RngError(f"{name}: {error}") from error
        return captured

    def include(self, value: Any) -> None:
        """Capture the state of another source, unless it has been captured."""
        source = _source(value)
        if source is not None and all(known.generator is not source.generator for known, _ in self._states):
            self._states = [*self._states, (source, source.state())]

    def extra(self) -> list[Any]:
        """What has been included besides the defaults."""
        return [source.generator for source, _ in self._states[self._defaults :]]

    def is_beyond_torch(self) -> bool:
        """Whether there is a source here that is none of torch's generators."""
        return any(not isinstance(source.generator, torch.Generator) for source, _ in self._states)

    def drawn(self) -> RngState | None:
        """Only the sources that have been drawn from since this was taken; None where there are none."""
        if self._states is _GLOBALS.states():
            return None
        changed = [
            (source, state)
            for source, state in self._states
            if (new := source.state()) is not state and not source.same(state, new)
        ]
        if not changed:
            return None
        drawn = object.__new__(RngState)
        drawn._states = changed
        return drawn

    def __enter__(self) -> None:
        """Leave the generators alone now. At the end their captured states are put back (invariant 6)."""

    def __exit__(self, *error: object) -> None:
        if (drawn := self.drawn()) is not None:
            drawn.restore()

    def restore(self) -> None:
        """Put the captured states in force."""
        for source, state in self._states:
            source.restore(state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Put the captured states in force, and the present ones back at the end, also after an error (invariant 6)."""
        present = [(source, source.state()) for source, _ in self._states]
        try:
            self.restore()
            yield
        finally:
            for source, state in present:
                source.restore(state)
