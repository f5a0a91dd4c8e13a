"""The states of random generators: captured when a region starts, compared when it ends, and put back for a replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from recompute.engine.random_sources import CPU, GLOBALS, RandomSource, source_of
from recompute.errors import RngError


class RngState:
    """The states of the default generators of the CPU, each CUDA device, Python and NumPy, and of any others given."""

    __slots__ = ("_defaults", "_states")

    def __init__(self, extra: Iterable[Any] = (), *, name: str = "a region", only_torch: bool = False):
        """name: of the module that is going to draw; errors mention it.

        only_torch: leave out Python's and NumPy's, unless they are in ``extra``.
        """
        devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        defaults = (*devices, *(() if only_torch else GLOBALS))
        try:
            self._states: list[tuple[RandomSource, Any]] = [(CPU, CPU.state())]
            for value in (*defaults, *extra):
                self.include(value)
        except RngError as error:
            raise RngError(f"{name}: {error}") from error
        self._defaults = 1 + len(defaults)

    @staticmethod
    def of(generator: torch.Generator, name: str) -> RngState:
        """The state of one generator alone."""
        captured = object.__new__(RngState)
        captured._states = []
        try:
            captured.include(generator)
        except RngError as error:
            raise RngError(f"{name}: {error}") from error
        return captured

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
        """The captured states of those sources that have been drawn from since; None if there are none."""
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
        """The span in which the generators have their captured states.

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
    """What an op has drawn that may not say that it draws, nor from what.

    When it runs again it draws the same, and all generators that it may move are put back: one that it left where it
    was in forward may move then, if the op seeds it.
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
