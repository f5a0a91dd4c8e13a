"""Memory that an op allocates and copies fill altogether: the op may run again, for the copies run again, too.

So attention's keys are put together of a part for each head and of one for all heads. If anything else touches the
memory before it is full, the memory counts as a factory's output, and is kept (invariant 4).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from recompute.engine.cut.layout import Layout, is_dense
from recompute.engine.cut.ops import FACTORY
from recompute.engine.cut.save_plan import TapeStep, ValueFacts

_ATEN = torch.ops.aten
ALLOCATE = frozenset(
    (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.empty_strided.default,
     _ATEN.new_empty.default, _ATEN.new_empty_strided.default)
)  # fmt: skip
"""The ops that only allocate."""


def with_filled_memory(
    steps: Sequence[TapeStep], facts: Sequence[ValueFacts], saved: Collection[int], parts: Mapping[int, Layout]
) -> list[TapeStep]:
    """The steps. A step that only allocates may run again if copies fill its memory.

    saved: the values that autograd saved. parts: for the steps that write in place, the layouts that they write to.
    """
    found = list(steps)
    for index, step in enumerate(steps):
        if step.op in ALLOCATE and step.reason == FACTORY and _is_filled(step.made[0], steps, facts, saved, parts):
            found[index] = step._replace(reason="")
    return found


def _is_filled(
    number: int,
    steps: Sequence[TapeStep],
    facts: Sequence[ValueFacts],
    saved: Collection[int],
    parts: Mapping[int, Layout],
) -> bool:
    """Whether all of a value is overwritten before anything reads it."""
    whole, found = facts[number].layout, list[Layout]()
    if not is_dense(whole, facts[number].nbytes):
        return False
    while not _cover(whole, found):
        readers = [index for index, step in enumerate(steps) for value in step.inputs if value == number]
        if len(readers) != 1 or number in saved:
            return False
        step = steps[readers[0]]
        if step.op is not _ATEN.copy_.default or step.reason or step.overwrites != (number,):
            return False
        found.append(parts[readers[0]])
        (number,) = step.made
    return True


def _cover(whole: Layout, parts: Sequence[Layout]) -> bool:
    """Whether these are slices of a tensor along one of its dimensions, and together all of it."""
    for dim, (size, step) in enumerate(zip(whole.shape, whole.stride, strict=True)):
        end = 0
        for part in sorted(parts, key=lambda each: int(each.offset)):
            if (part.offset, part.stride, part.dtype) != (end * step, whole.stride, whole.dtype):
                break
            if (*part.shape[:dim], size, *part.shape[dim + 1 :]) != tuple(whole.shape):
                break
            end += part.shape[dim]
        else:
            if end == size and parts:
                return True
    return False
