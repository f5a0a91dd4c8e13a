"""What a region drew from: random generators captured at its start, compared at its end, put back around a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from recompute.errors import RngError


class Source(Protocol):
    """Something random whose state can be read, compared and put back."""

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
        return a.numpy().tobytes() == b.numpy().tobytes()  # torch.equal takes three times as long


class _CudaSource:
    """A CUDA generator: Philox, so a seed and an offset say all."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    def state(self) -> tuple[int, int]:
        try:
            return self.generator.initial_seed(), self.generator.get_offset()
        except RuntimeError as error:  # torch refuses to read a generator while a CUDA graph is captured
            raise RngError(
                f"the state of the random generator of {self.generator.device} cannot be read: a region under a policy "
                "ran while a CUDA graph was being captured, where what it draws cannot be drawn again. Capture the "
                f"graph without the policy. ({error})"
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
        self.tracker = tracker

    def state(self) -> dict[str, Any]:
        return {
            name: state.clone() if isinstance(state, torch.Tensor) else state
            for name, state in self.tracker.get_states().items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.tracker.set_states(dict(state))

    @staticmethod
    def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
        return a.keys() == b.keys() and all(
            torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a
        )


_CPU = _CpuSource(torch.default_generator)


def is_source(value: Any) -> bool:
    """Whether ``value`` is a generator or a tracker of generators' states."""
    return isinstance(value, torch.Generator) or (
        not isinstance(value, type)
        and callable(getattr(type(value), "get_states", None))
        and callable(getattr(type(value), "set_states", None))
    )


def _source(value: Any) -> Source:
    if not isinstance(value, torch.Generator):
        return _TrackerSource(value)
    return _CudaSource(value) if value.device.type == "cuda" else _CpuSource(value)


class RngState:
    """The states of the CPU's and every CUDA device's default generator, and of ``extra`` generators and trackers."""

    __slots__ = ("_states",)

    def __init__(self, extra: Iterable[Any] = ()):
        sources: list[Source] = [_CPU]
        if torch.cuda.is_initialized():
            sources += map(_CudaSource, torch.cuda.default_generators)
        sources += map(_source, extra)
        self._states: list[tuple[Source, Any]] = [(source, source.state()) for source in sources]

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
