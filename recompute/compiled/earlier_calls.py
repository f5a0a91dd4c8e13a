"""Calls that compute the same as an earlier call of the same code, and so need not run.

torchao's float8 casts a gradient twice, once for each GEMM that reads it, and an input once for each Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tag

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.pointwise_ops import COPIES
from recompute.compiled.recording import Recording
from recompute.engine.cut.filled_memory import ALLOCATE
from recompute.engine.cut.ops import Kind, facts, facts_of_call

MAX_DISTANCE = 60
"""A value is read once more if so many statements at most have run since it was last read: else it lives too long."""


@dataclass
class EarlierCalls:
    recording: Recording
    _found: dict[Hashable, tuple[Call, int]] = field(default_factory=dict)
    """The calls so far by a key of op and arguments, and the number of statements when each was last looked up."""
    _same: dict[int, int] = field(default_factory=dict)
    """For the buffer of a call that does not run, the one of the earlier call."""
    _own: set[int] = field(init=False)
    """The buffers that others get: each is to have memory of its own."""

    def __post_init__(self) -> None:
        buffers = self.recording.buffers
        self._changed = {buffer.root for number, buffer in enumerate(buffers) if buffer.root != number}
        functions = [call for call in self.recording.calls if not isinstance(call.op, torch._ops.OpOverload)]
        held = {use.buffer for call in functions for use in call.uses()}  # which they may write to, even in backward
        self._own = self.recording.given_away | held

    def resolved(self, use: Use) -> Use:
        """A tensor that a call reads: an earlier call's output in the place of that of a call that does not run."""
        return use._replace(buffer=self._same.get(use.buffer, use.buffer))

    def twin(self, call: Call, memory: Callable[[Use], str], count: int) -> Call | None:
        """The earlier call that computes the same. memory: the variable of a tensor. count: of statements."""
        if not self._is_alike_each_time(call):
            return None
        key = _key((call.op, call.args, tuple(sorted(call.kwargs.items()))), memory)
        earlier, last = self._found.get(key, (call, count))
        is_near = count - last <= MAX_DISTANCE
        self._found[key] = (earlier if is_near else call), count
        if earlier is call or not is_near:
            return None
        pairs = zip(call.results, earlier.results, strict=True)
        self._same |= {one: other for one, other in pairs if one is not None and other is not None}
        return earlier

    def _is_alike_each_time(self, call: Call) -> bool:
        known = facts_of_call(call.op, call.args, call.kwargs) if call.op in COPIES else facts(call.op)
        if known.kind is not Kind.PURE or known.is_foreign or call.written or call.op in ALLOCATE:
            return False
        if Tag.nondeterministic_seeded in call.op.tags or None in call.results:
            return False
        numbers = [*call.results, *[use.buffer for use in call.uses()]]
        roots = {self.recording.buffers[number].root for number in numbers if number is not None}
        return roots.isdisjoint(self._changed) and self._own.isdisjoint(call.results)


def _key(value: Any, memory: Callable[[Use], str]) -> Hashable:
    """Equal arguments have equal keys."""
    if type(value) is Use:
        return memory(value), value.layout, value.is_conjugate
    if type(value) in (list, tuple):
        return type(value), tuple([_key(item, memory) for item in value])
    return type(value), repr(value) if isinstance(value, float) else value
