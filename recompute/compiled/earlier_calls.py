"""Calls that give what an earlier call of the same code has given, and so need not run.

torchao's float8 casts a gradient twice, once for each GEMM that reads it, and an input once for each Linear.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tag

from recompute.compiled.generated.pointwise_ops import COPIES
from recompute.compiled.recording import Call, Recording, Use
from recompute.engine.cut.filled_memory import ALLOCATE
from recompute.engine.cut.ops import Kind, facts, facts_of_call

MAX_DISTANCE = 60
"""Statements since a value was read last, up to which it is read once more. What is read later lives longer."""


@dataclass
class EarlierCalls:
    recording: Recording
    _found: dict[Hashable, tuple[Call, int]] = field(default_factory=dict)
    """The calls so far by what they compute, and the statement that was next when each was last asked for."""
    _same: dict[int, int] = field(default_factory=dict)
    """For the buffer of a call that does not run, the one of the earlier call."""
    _own: set[int] = field(init=False)
    """The buffers that others get, each of which is to have memory of its own."""

    def __post_init__(self) -> None:
        buffers = self.recording.buffers
        self._changed = {buffer.root for number, buffer in enumerate(buffers) if buffer.root != number}
        functions = [call for call in self.recording.calls if not isinstance(call.op, torch._ops.OpOverload)]
        held = {use.buffer for call in functions for use in call.uses()}  # which they may write to, even in backward
        self._own = self.recording.given_away | held

    def resolved(self, value: Any) -> Any:
        """A call's argument, with what an earlier call has given in the place of what none gives."""
        if type(value) is Use:
            return value._replace(buffer=self._same.get(value.buffer, value.buffer))
        if type(value) in (list, tuple):
            return type(value)([self.resolved(item) for item in value])
        return value

    def twin(self, call: Call, memory: Callable[[Use], str], count: int) -> Call | None:
        """The earlier call that gives the same. memory: the variable that a tensor is in. count: of statements."""
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
    """What two arguments have in common that are the same."""
    if type(value) is Use:
        return memory(value), value.layout, value.is_conjugate
    if type(value) in (list, tuple):
        return type(value), tuple([_key(item, memory) for item in value])
    return type(value), repr(value) if isinstance(value, float) else value
