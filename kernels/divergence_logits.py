"""The divergence of the logits of a student and a teacher, in forward: by blocks of columns, or by rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recompute.kernels.cross_entropy_rows import observe
from recompute.kernels.divergence_rows import FORWARD_KL, REVERSE_KL, DivergenceSettings, Normalizers, add_up, conclude
from recompute.kernels.logit_blocks import BlockPlan, Head
from recompute.kernels.loss_settings import Targets, wide_dtype
from recompute.kernels.row_statistics import new_statistics

FEWEST_ROWS, ROW_STEP = 256, 64
"""The fewest whole rows that are made at a time. To read the weights more often costs more than a second product."""


class BothHeads(NamedTuple):
    """The student's head and the teacher's."""

    student: Head
    teacher: Head

    @classmethod
    def of(cls, operands: Sequence[Any]) -> BothHeads:
        return cls(Head(*operands[:3]), Head(*operands[3:6]))

    def narrowed(self, narrow: torch.dtype | None) -> list[Any]:
        """The operands of both, with weights and biases as autocast to ``narrow`` casts them."""
        return [each for head in self for each in head.narrowed(narrow)[:3]]

    def plans(self, logits_bytes: int, hold: bool, trains_weight: bool) -> tuple[BlockPlan, BlockPlan]:
        """The plans of both, with the same blocks. Each has its part of the memory."""
        sizes = [max(head.tokens, 1) * head.hidden.dtype.itemsize for head in self]
        columns = logits_bytes // sum(sizes)
        trains = (trains_weight, False)
        ours, theirs = (
            head.plan(columns * size, hold, train) for head, size, train in zip(self, sizes, trains, strict=True)
        )
        return ours, theirs

    def rows_at_a_time(self, kind: int, logits_bytes: int, hold: bool, trains_weight: bool) -> int:
        """For how many tokens at a time forward makes whole rows of logits; 0 if it makes blocks of columns of all."""
        plans = self.plans(logits_bytes, hold, trains_weight)
        are_held = all(plan.in_gradient + plan.beside == plan.blocks for plan in plans)
        if kind in (FORWARD_KL, REVERSE_KL) or are_held:
            return 0
        rows = logits_bytes // (len(self.student.weight) * sum(head.hidden.dtype.itemsize for head in self))
        if rows >= self.student.tokens:
            return self.student.tokens
        return rows // ROW_STEP * ROW_STEP if rows >= FEWEST_ROWS else 0

    def numbers(self) -> Tensor:
        """Room for normalizers and means: (5, M), each from a multiple of 16 on."""
        tokens = self.student.tokens
        dtype = torch.promote_types(*(wide_dtype(head.hidden) for head in self))
        return self.student.hidden.new_empty((5, -(-tokens // 16) * 16), dtype=dtype)[:, :tokens]


def divergence_by_rows(
    both: BothHeads, settings: DivergenceSettings, asked: list[Targets], numbers: Tensor, rows: int
) -> Tensor:
    """The divergence, (M,), from whole rows of logits, which are held for these rows alone. Writes ``numbers``."""
    hidden, found = [head.hidden.reshape(-1, head.hidden.shape[-1]) for head in both], []
    for start in range(0, both.student.tokens, rows):
        span = slice(start, start + rows)
        some = BothHeads(*(head._replace(hidden=each[span]) for head, each in zip(both, hidden, strict=True)))
        found.append(divergence_by_blocks(some, settings, asked, numbers[:, span], (sys.maxsize, True, False))[0])
    return torch.cat(found)


def divergence_by_blocks(
    both: BothHeads, settings: DivergenceSettings, asked: list[Targets], numbers: Tensor, memory: tuple[Any, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The divergence, (M,), from blocks of columns, and what is held of these. Writes ``numbers``."""
    plans = both.plans(*memory)
    (dweight, kept), (_, teacher_kept) = (head.held(plan) for head, plan in zip(both, plans, strict=True))
    ours = both.student.blocks(plans[0], dweight, kept)
    theirs = both.teacher.blocks(plans[1], None, teacher_kept)
    count, is_kl = plans[0].blocks, settings.kind in (FORWARD_KL, REVERSE_KL)
    statistics = [new_statistics(numbers, both.student.tokens, count, each.settings, 0) for each in asked]
    values = new_statistics(numbers, both.student.tokens, count, asked[0].settings, 0)
    for block in range(count):
        logits = ours.make(block), theirs.make(block)
        for found, tile, targets in zip(statistics, logits, asked, strict=True):
            observe(found, block, ours.columns(block).start, tile, targets)
        if is_kl:
            within = Normalizers(*(each[block] for found in statistics for each in found[:2]))
            add_up(*logits, within, values.maxima[block], None, settings)
    normalizers, kl = conclude(statistics, values.maxima if is_kl else None, settings.kind)
    if kl is None:
        for block in range(count):
            add_up(ours.get(block), theirs.get(block), normalizers, values.maxima[block], values.sums[block], settings)
        divergence, means = values.maxima.sum(0), values.sums.sum(0)
    else:
        divergence = means = kl
    torch.stack([*normalizers, means], out=numbers)
    return divergence, dweight, kept, teacher_kept
