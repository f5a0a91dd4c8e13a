"""Random generators whose states can be read, compared and put back: torch's, Python's, NumPy's, and trackers of such.

Every region reads the global ones, so that has to be cheap: a ``_CachedSource`` asks its generator for the state only
if the generator's memory has changed.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import random
import sys
from abc import ABC, abstractmethod
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


class CpuSource(RandomSource):
    """The CPU's default generator, or a ``torch.Generator`` on the CPU. Its state is 5 KB, held as bytes to compare."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state(self) -> bytes:
        with _disable_current_modes():  # a mode might make the state a fake tensor, say
            return bytes(_numpy(self.generator.get_state()))

    def restore(self, state: bytes) -> None:
        with _disable_current_modes():
            self.generator.set_state(torch.from_numpy(np.frombuffer(bytearray(state), np.uint8)))


_numpy = torch._C.TensorBase.numpy  # ``Tensor.numpy`` would tell tapes that memory is handed out


class CudaSource(RandomSource):
    """A CUDA generator. Its algorithm is Philox, whose whole state is a seed and an offset."""

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

    Any object whose class has these two methods counts as a tracker. The trackers of several libraries have them, so no
    library needs an adapter, and a user's own tracker works too.
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
    """A view of the fields that the C type of ``value`` has, valid as long as ``value`` lives; None outside of CPython.

    Python's and NumPy's generators have their whole state in these fields. To ask them for it takes 7 and 33 us, to
    read the fields 0.1 us.
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
    """A NumPy ``Generator``. Its bit generator has its whole state."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.bit_generator.state)  # a copy; == could not compare arrays in it

    def restore(self, state: bytes) -> None:
        self.generator.bit_generator.state = pickle.loads(state)


class _LegacyNumpySource(RandomSource):
    """NumPy's global generator, or a ``RandomState``. It makes two normal numbers at a time and holds the second back.

    So its state is that of its bit generator, and that number.
    """

    def __init__(self, generator: np.random.RandomState):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.get_state(legacy=False))

    def restore(self, state: bytes) -> None:
        self.generator.set_state(pickle.loads(state))


class _CachedSource(RandomSource):
    """A global generator. Any code may draw from it, so every region looks at it: cheaply, if nobody has drawn."""

    def __init__(self, source: RandomSource):
        self.generator = source.generator
        self._source = source
        self._last: tuple[Any, Any] = (None, None)  # as last read: a copy of its memory, and its state

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
        """The copy of the memory that goes with ``state``; None unless that is the state that was read last."""
        copy, last = self._last
        return copy if last is state else None

    @abstractmethod
    def memory(self) -> tuple[Any, ...] | None:
        """All that the state consists of now, as views of memory and numbers; None where these cannot be had."""


def _copy_of(part: Any) -> Any:
    return bytearray(part) if isinstance(part, ctypes.Array) else part  # == with a view does not copy the view


_WORDS = 624  # of 4 bytes each, from which a CPU generator makes its numbers
# Bytes around the words: before them the seed and the number of the next word, behind them the normal numbers that are
# held back.
_BEFORE, _BEHIND = 20, 28


def _words_of(generator: torch.Generator) -> bytes:
    """A CPU generator's words. ``get_state`` gives them as integers of 8 bytes each, behind 24 other bytes."""
    return _numpy(generator.get_state())[24:].view(np.int64)[:_WORDS].astype(np.uint32).tobytes()


def _where_words_are() -> int | None:
    """How many bytes into a CPU generator its words begin. torch promises no such layout, so a probe looks for them.

    None unless each draw from the probe is seen to change the memory that ``_memory_of`` shows.
    """
    probe = torch.Generator()
    # A generator is ten times as long as the bytes that are read here.
    place = ctypes.string_at(_address_of(probe), 256).find(_words_of(probe)[:64])
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
    """A view of all that the generator's next numbers depend on, valid as long as ``generator`` lives."""
    return (ctypes.c_char * (_BEFORE + _WORDS * 4 + _BEHIND)).from_address(_address_of(generator) + place - _BEFORE)


class _GlobalCpu(_CachedSource):
    """The generator that ops on the CPU draw from if they are given none."""

    def __init__(self) -> None:
        super().__init__(CpuSource(torch.default_generator))
        with _disable_current_modes():  # the package may be imported where tensors are fake
            place = _where_words_are()
        self._views = None if place is None else (_memory_of(torch.default_generator, place),)

    def memory(self) -> tuple[Any, ...] | None:
        return self._views


class _GlobalPython(_CachedSource):
    """The generator that the functions of Python's ``random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_PythonSource(random._inst))
        self._fields = _fields_of(self.generator)

    def memory(self) -> tuple[Any, ...] | None:
        return None if self._fields is None else (self._fields, self.generator.gauss_next)


class _GlobalNumpy(_CachedSource):
    """The generator that the functions of ``numpy.random`` draw from."""

    def __init__(self) -> None:
        super().__init__(_LegacyNumpySource(np.random.mtrand._rand))
        self._fields = _fields_of(self.generator)
        self._bits: tuple[Any, Any] = (None, None)

    def memory(self) -> tuple[Any, ...] | None:
        bits, fields = self._bits
        if bits is not self.generator._bit_generator:  # somebody has called np.random.set_bit_generator
            bits = self.generator._bit_generator
            fields = _fields_of(bits) if type(bits).__module__.startswith("numpy.random.") else None
            self._bits = bits, fields
        return None if fields is None else (fields, self._fields, bits)


class _GlobalGenerators:
    """The three global generators on the CPU. If nobody has drawn, one comparison finds that out for all of them."""

    def __init__(self) -> None:
        self._python: Any = random._inst
        self._numpy: Any = np.random.mtrand._rand
        self.cpu = _GlobalCpu()
        self._sources = (self.cpu, _GlobalPython(), _GlobalNumpy())
        # As last read: views of all their memory, a copy of it, and their states.
        self._last: tuple[tuple[Any, ...], Any, list[tuple[RandomSource, Any]]] = ((None,) * 4, None, [])

    def states(self) -> list[tuple[RandomSource, Any]]:
        """Each generator with its state. Returns the same list object as last time if no state has changed."""
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


GLOBALS = _GlobalGenerators()


GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


def source_of(value: Any) -> RandomSource | None:
    """The source that ``value`` is, or whose method it is; None if it is neither."""
    if isinstance(value, torch.Generator):
        return CudaSource(value) if value.device.type == "cuda" else CpuSource(value)
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
    return source_of(value) is not None
