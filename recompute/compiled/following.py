"""Follows calls that were recorded before: a graph must make the calls that forward has made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from recompute.compiled.calls import ObjectUse, Started, Use
from recompute.compiled.recording import Departure, Recording
from recompute.engine.tape.functions import FunctionOp


@dataclass
class FollowingRecording(Recording):
    """A recording whose calls of forward must be those that are expected, with buffers of its own."""

    expected: Recording = field(default_factory=Recording)
    read: frozenset[str] = frozenset()
    """The names that the code has read in Python."""
    _same: dict[int, int] = field(default_factory=dict)
    """For each buffer of the expected calls, the one here."""
    _before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Each input that forward was about to write to, with a copy."""

    def start(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Started | None:
        started = super().start(op, args, kwargs)
        if started is not None and self.is_forward:
            index, expected = len(self.calls), self.expected.calls
            call = expected[index] if index < len(expected) else None
            given = started.args, started.kwargs
            if call is None or call.op is not started.op or not self._agree((call.args, call.kwargs), given):
                raise Departure
            if type(op) is not FunctionOp:
                self._before += [(tensor, tensor.clone()) for tensor, _ in started.written if self.is_given(tensor)]
        return started

    def put_back(self) -> None:
        """Forward has stopped in its middle: undo what it has written to its inputs.

        Their versions stay: an earlier forward, whose backward is to come, may have saved a batch norm's statistics.
        """
        for tensor, copy in reversed(self._before):
            tensor.data.copy_(copy)

    def end(self, started: Started, output: Any) -> None:
        super().end(started, output)
        if self.is_forward:
            index = len(self.calls) - 1
            pairs = list(zip(self.expected.calls[index].made, self.calls[index].made, strict=True))
            if any((one is None) is not (other is None) for one, other in pairs):
                raise Departure
            # The graph was taken with the Function's results of then. One may be a number that the code reads.
            if index in self.functions and not self._agree(
                self.expected.functions[index].results, self.functions[index].results
            ):
                raise Departure
            self._same.update((one, other) for one, other in pairs if one is not None and other is not None)

    def end_forward(self) -> None:
        """Forward has made all of its calls. It is a departure if fewer were made than expected."""
        if len(self.calls) != len(self.expected.calls):
            raise Departure
        self.is_forward = False
        self._before.clear()

    def _agree(self, expected: Any, found: Any) -> bool:
        if type(expected) is not type(found):
            return False
        if type(expected) is ObjectUse:
            return True
        if type(expected) is Use:
            return expected[1:] == found[1:] and self._same.setdefault(expected.buffer, found.buffer) == found.buffer
        if isinstance(expected, (list, tuple)):
            return len(expected) == len(found) and all(map(self._agree, expected, found))
        if isinstance(expected, dict):
            return expected.keys() == found.keys() and all(self._agree(expected[key], found[key]) for key in expected)
        return repr(expected) == repr(found) if isinstance(expected, float) else bool(expected == found)
