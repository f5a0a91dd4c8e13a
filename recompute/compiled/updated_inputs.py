"""Inputs that a region writes to, and reads nowhere else: a batch norm's running statistics and its counter of batches.

No output depends on them. So forward may run again on copies of them, and an op may run again without them. Backward
reads the memory of one that autograd has saved, whatever is there by then, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from recompute.compiled.calls import Call, Use
from recompute.compiled.recording import WRITES_GRADIENT, NotCapturable, Recording
from recompute.engine.cut.ops import facts, facts_of_call
from recompute.engine.tape.functions import FunctionOp
from recompute.engine.tape.op_arguments import without


def updated_by(recording: Recording, given: Sequence[Tensor], results: Iterable[Use]) -> frozenset[int]:
    """The buffers of the inputs that forward's calls have written to. Raises ``NotCapturable`` if anything reads one.

    given: the inputs, as they are after forward. results: the region's outputs.
    """
    roots = [buffer.root for buffer in recording.buffers]
    calls = [call for call in recording.calls if type(call.op) is not FunctionOp]
    written = [{roots[before] for before, _ in call.written} for call in calls]
    updated = {
        root: given[at] for each in written for root in each if (at := recording.buffers[root].given) is not None
    }
    read = {roots[use.buffer] for use in results}
    for call, own in zip(calls, written, strict=True):
        is_update = len(own) == 1 or bool(_statistics_of(call))
        read |= {roots[use.buffer] for use in call.uses()} - (own if is_update else set())
    if updated and len(calls) < len(recording.calls):
        raise NotCapturable("it writes to one of its inputs, and calls a custom Function")
    if read.intersection(updated):
        raise NotCapturable("it writes to one of its inputs, and reads it")
    if any(tensor.requires_grad for tensor in updated.values()):
        raise NotCapturable(WRITES_GRADIENT)
    return frozenset(updated)


def without_statistics(call: Call) -> Call:
    """The call as it runs again: it has collected its running statistics, and its outputs do not depend on them."""
    statistics = _statistics_of(call)
    return call._replace(args=tuple(without(statistics, call.args)), written=()) if statistics else call


def _statistics_of(call: Call) -> tuple[int | str, ...]:
    collects = facts(call.op).running_statistics
    return facts_of_call(call.op, call.args, call.kwargs).running_statistics if collects else ()
