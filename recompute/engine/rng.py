"""What a region drew from: random generators captured at its start, compared at its end, put back around a replay."""

from __future__ import annotations

import ctypes
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

from recompute.errors import RngError


class Source(Protocol):
    """Something random whose state can be read, compared and put back."""

    generator: Any

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...

    def same(self, a: Any, b: Any) -> bool: ...


class _CpuSource:
    """The CPU's default generator, or a ``torch.Generator`` on the CPU: its whole state (5 KB)."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state(self) -> torch.Tensor:
        return self.generator.get_state()

    def restore(self, state: torch.Tensor) -> None:
        self.generator.set_state(state)

    @staticmethod
    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return _numpy(a).tobytes() == _numpy(b).tobytes()  # torch.equal takes three times as long


_numpy = torch._C.TensorBase.numpy  # which tells no tape that memory is handed out


class _CudaSource:
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

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a == b


class _TrackerSource:
    """An object with ``get_states`` and ``set_states``, such as Megatron's tracker, that swaps CUDA states by name."""

    def __init__(self, tracker: Any):
        self.generator = tracker

    def state(self) -> dict[str, Any]:
        return {
            name: state.clone() if isinstance(state, torch.Tensor) else state
            for name, state in self.generator.get_states().items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.generator.set_states(dict(state))

    @staticmethod
    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(
            torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
        )


_CPU = _CpuSource(torch.default_generator)


def _fields_of(value: Any) -> Any:
    """A view, as long as ``value`` lives, of the fields that its C type has: ``raw`` copies them. None but in CPython.

    Python's and NumPy's generators have their whole state there. To ask them for it takes 7 and 33 us, this 0.1.
    """
    if sys.implementation.name != "cpython":
        return None
    header = object.__basicsize__
    return (ctypes.c_char * (type(value).__basicsize__ - header)).from_address(id(value) + header)


class _PythonSource:
    """Python's ``random``, or a ``random.Random``."""

    def __init__(self, generator: random.Random):
        self.generator = generator

    def state(self) -> Any:
        return self.generator.getstate()

    def restore(self, state: Any) -> None:
        self.generator.setstate(state)

    @staticmethod
    def same(a: Any, b: Any) -> bool:
        return a == b


class _NumpySource:
    """A NumPy ``Generator``: its bit generator is all the state there is."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.bit_generator.state)  # a copy, and of arrays too one that compares

    def restore(self, state: bytes) -> None:
        self.generator.bit_generator.state = pickle.loads(state)

    @staticmethod
    def same(a: bytes, b: bytes) -> bool:
        return a == b


class _LegacyNumpySource:
    """NumPy's global generator, or a ``RandomState``: a bit generator, and every second normal number held back."""

    def __init__(self, generator: np.random.RandomState):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.get_state(legacy=False))

    def restore(self, state: bytes) -> None:
        self.generator.set_state(pickle.loads(state))

    @staticmethod
    def same(a: bytes, b: bytes) -> bool:
        return a == b


class _Remembered(ABC):
    """A source that any code may draw from, so that every region looks at it: cheap where nobody has drawn."""

    def __init__(self, source: Source):
        self.restore, self.same, self.generator = source.restore, source.same, source.generator
        self._read = source.state
        self._last: tuple[Any, Any] = (None, None)  # its memory, and its state then

    def state(self) -> Any:
        memory = self._memory()
        before, state = self._last
        if memory == before:
            return state
        state = self._read()
        if memory == self._memory():  # no other thread has drawn meanwhile
            self._last = memory, state
        return state

    @abstractmethod
    def _memory(self) -> Any:
        """The whole state as bytes; or something that is equal to nothing else, where it cannot be had as bytes."""


class _GlobalPython(_Remembered):
    """What the functions of Python's ``random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_PythonSource(random._inst))
        self._fields = _fields_of(self.generator)

    def _memory(self) -> Any:
        return object() if self._fields is None else (self._fields.raw, self.generator.gauss_next)


class _GlobalNumpy(_Remembered):
    """What the functions of ``numpy.random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_LegacyNumpySource(np.random.mtrand._rand))
        self._fields = _fields_of(self.generator)
        self._bits: tuple[Any, Any] = (None, None)

    def _memory(self) -> Any:
        bits, fields = self._bits
        if bits is not self.generator._bit_generator:  # np.random.set_bit_generator
            bits = self.generator._bit_generator
            fields = _fields_of(bits) if type(bits).__module__.startswith("numpy.random.") else None
            self._bits = bits, fields
        return object() if fields is None else (fields.raw, self._fields.raw)


_PYTHON, _NUMPY = _GlobalPython(), _GlobalNumpy()


GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def _source(value: Any) -> Source | None:
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


def is_source(value: Any) -> bool:
    """Whether ``value`` is a random generator of torch, Python or NumPy, a method of one, or a tracker of states."""
    return _source(value) is not None


def _read(source: Source, name: str) -> Any:
    try:
        return source.state()
    except RngError as error:
        raise RngError(f"{name}: {error}") from error


class RngState:
    """The states of the default generators of the CPU, each CUDA device, Python and NumPy, and of those given."""

    __slots__ = ("_defaults", "_states")

    def __init__(self, extra: Iterable[Any] = (), *, name: str = "a region"):
        """name: of the module that is going to draw, for errors."""
        sources: list[Source] = [_CPU, _PYTHON, _NUMPY]
        if torch.cuda.is_initialized():
            sources += map(_CudaSource, torch.cuda.default_generators)
        self._states: list[tuple[Source, Any]] = [(source, _read(source, name)) for source in sources]
        self._defaults = len(sources)
        for value in extra:
            self.include(value)

    @staticmethod
    def of(generator: torch.Generator, name: str) -> RngState:
        """The state of one generator alone."""
        captured = object.__new__(RngState)
        source = _CudaSource(generator) if generator.device.type == "cuda" else _CpuSource(generator)
        captured._states = [(source, _read(source, name))]
        return captured

    def include(self, value: Any) -> None:
        """Capture the state of another source, unless it has been captured."""
        source = _source(value)
        if source is not None and all(known.generator is not source.generator for known, _ in self._states):
            self._states.append((source, source.state()))

    def extra(self) -> list[Any]:
        """What has been included besides the defaults."""
        return [source.generator for source, _ in self._states[self._defaults :]]

    def drawn(self) -> RngState | None:
        """Only the sources that have been drawn from since this was taken; None where there are none."""
        now = [source.state() for source, _ in self._states]
        changed = [
            (source, state)
            for (source, state), new in zip(self._states, now, strict=True)
            if new is not state and not source.same(state, new)
        ]
        if not changed:
            return None
        drawn = object.__new__(RngState)
        drawn._states = changed
        return drawn

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Put the captured states back at the end, also after an error (invariant 6)."""
        try:
            yield
        finally:
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
