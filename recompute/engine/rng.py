"""What a region drew from: random generators captured at its start, compared at its end, put back around a replay."""

from __future__ import annotations

import pickle
import random
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

    @staticmethod
    def same(a: Any, b: Any) -> bool: ...


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
    """NumPy's global generator, a ``RandomState`` or a ``Generator``: what has a bit generator."""

    def __init__(self, generator: np.random.BitGenerator):
        self.generator = generator

    def state(self) -> bytes:
        return pickle.dumps(self.generator.state)  # a copy, and of arrays too one that compares

    def restore(self, state: bytes) -> None:
        self.generator.state = pickle.loads(state)

    @staticmethod
    def same(a: bytes, b: bytes) -> bool:
        return a == b


def _source(value: Any) -> Source | None:
    """The source of randomness that ``value`` is, or gives access to as a module of functions."""
    if isinstance(value, torch.Generator):
        return _CudaSource(value) if value.device.type == "cuda" else _CpuSource(value)
    value = getattr(value, "__self__", value) if isinstance(value, (MethodType, BuiltinMethodType)) else value
    if value is random or value is random._inst:
        return _PythonSource(random._inst)
    if isinstance(value, random.Random):
        return _PythonSource(value)
    if value is np or value is np.random or isinstance(value, np.random.RandomState):
        state = value if isinstance(value, np.random.RandomState) else np.random.mtrand._rand
        return _NumpySource(state._bit_generator)
    if isinstance(value, np.random.Generator):
        return _NumpySource(value.bit_generator)
    kind = type(value)
    if callable(getattr(kind, "get_states", None)) and callable(getattr(kind, "set_states", None)):
        return _TrackerSource(value)
    return None


def is_source(value: Any) -> bool:
    """Whether ``value`` is a random generator of torch, Python or NumPy, a module of theirs or a tracker of states."""
    return _source(value) is not None


def _read(source: Source, name: str) -> Any:
    try:
        return source.state()
    except RngError as error:
        raise RngError(f"{name}: {error}") from error


class RngState:
    """The states of the CPU's and every CUDA device's default generator, and of the sources among ``extra``."""

    __slots__ = ("_states",)

    def __init__(self, extra: Iterable[Any] = (), *, name: str = "a region"):
        """name: of the module that is going to draw, for errors."""
        sources: list[Source] = [_CPU]
        if torch.cuda.is_initialized():
            sources += map(_CudaSource, torch.cuda.default_generators)
        self._states: list[tuple[Source, Any]] = [(source, _read(source, name)) for source in sources]
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

    def generators(self) -> list[torch.Generator]:
        return [source.generator for source, _ in self._states if isinstance(source.generator, torch.Generator)]

    def drawn(self) -> RngState | None:
        """Only the sources that have been drawn from since this was taken; None where there are none."""
        changed = [(source, state) for source, state in self._states if not source.same(state, source.state())]
        if not changed:
            return None
        drawn = object.__new__(RngState)
        drawn._states = changed
        return drawn

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Put the captured states in force, and the present ones back at the end, also after an error (invariant 6)."""
        present = [(source, source.state()) for source, _ in self._states]
        try:
            for source, state in self._states:
                source.restore(state)
            yield
        finally:
            for source, state in present:
                source.restore(state)
