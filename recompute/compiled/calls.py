"""Calls of ops below autograd, and the buffers that they read, make and write to.

A tensor is known by its storage and its layout, so views need no calls of their own: whoever reads a view reads a
buffer through a layout. A buffer is the contents of a storage from one write to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.engine.cut.layout import Layout
from recompute.engine.tape.op_arguments import LISTS


class Use(NamedTuple):
    """A tensor: a buffer seen through a layout."""

    buffer: int
    layout: Layout
    is_conjugate: bool = False
    """Whether it is the conjugate of the numbers in memory: torch computes it only where an op reads it."""


@dataclass
class Buffer:
    """The contents of a storage from one write to the next."""

    layout: Layout
    """The layout of the first tensor that had it."""
    nbytes: int
    root: int
    """The first buffer in the same storage. An op that writes in place writes into the tensor of that."""
    given: int | None = None
    """The position of the input that has it; None if a call made it."""
    call: int | None = None
    """The call that made it, or wrote it."""
    constant: Tensor | None = None
    """The tensor itself, if it is a literal in the code."""
    device: torch.device | None = None


class FunctionResult(NamedTuple):
    """A tensor that a custom ``autograd.Function`` returns."""

    layout: Layout
    device: torch.device


class ObjectUse(NamedTuple):
    """An argument of a custom ``autograd.Function`` that is neither a tensor nor a constant: a configuration, say."""

    position: int | None
    """Its position among the objects that the graph is given; None in a recording of no graph."""


class RecordedFunction(NamedTuple):
    """A forward of a custom ``autograd.Function``."""

    results: Sequence[Any]
    """Its results, with a ``FunctionResult`` in the place of each tensor."""
    reached: Sequence[int | None]
    """The buffers that it may have written to."""
    returned: Sequence[int | None]
    """The buffers of its results; None for one that is no tensor."""
    changed: frozenset[str] = frozenset()
    """The names of the objects that it has changed in Python."""


class Call(NamedTuple):
    """One op, with a ``Use`` in the place of each tensor."""

    op: Any
    """An ``OpOverload``, a ``FunctionOp`` or a ``FunctionBackward``."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    """The buffers of its outputs; None for one that is no tensor, or that shares the memory of another."""
    written: tuple[tuple[int, int], ...]
    """For each storage that it writes to, the buffers before and after: the same where a Function leaves it so."""
    is_sequence: bool
    """Whether it returns several outputs."""

    @property
    def made(self) -> list[int | None]:
        """The buffers that it has made, and those that it has written."""
        return [*self.results, *[after for _, after in self.written]]

    def uses(self) -> Iterator[Use]:
        found: list[Use] = []
        self.with_uses(found.append)
        return iter(found)

    def with_uses(self, replaced: Callable[[Use], Any]) -> Call:
        """The call with something else in the place of each tensor."""
        return self._replace(args=_with_uses(self.args, replaced), kwargs=_with_uses(self.kwargs, replaced))


def _with_uses(value: Any, replaced: Callable[[Use], Any]) -> Any:
    if type(value) is Use:
        return replaced(value)
    if isinstance(value, dict):
        return {key: _with_uses(item, replaced) for key, item in value.items()}
    return type(value)([_with_uses(item, replaced) for item in value]) if type(value) in LISTS else value


class Started(NamedTuple):
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    written: Sequence[tuple[Tensor, Layout]]
