"""Finds the longest sequence whose training step fits a budget of memory, by doubling and bisection."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

from recompute.errors import AblationError, BudgetError
from recompute.policy.document import with_unit
from recompute.units import parse_budget

DEVICE = "device"
"""The budget that is all memory of the device: whatever runs fits."""

SequenceLength = Annotated[int, Field(ge=2)]


def is_out_of_memory(error: str) -> bool:
    """Whether a row's error says that there was no memory left."""
    of_torch = ("OutOfMemoryError", "MemoryError", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
    signs = (*of_torch, "out of memory", signal.SIGKILL.name)  # CUDA's, and the kernel's who ends what takes all
    return any(sign in error for sign in signs)


class LongestSequence(BaseModel):
    """How to search, for each policy and peer, for the longest sequence whose whole training step fits a budget.

    budget: bytes ("139GiB"), a share of the device ("80%"), or "device": whatever runs without an error fits.
    start: the first length that is tried. It is doubled until one does not fit.
    multiple: the answer is a multiple of it.
    most: no longer one is tried.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    budget: Annotated[str | PositiveInt, BeforeValidator(with_unit)]
    start: SequenceLength = 1024
    multiple: PositiveInt = 256
    most: SequenceLength = 1 << 20

    @model_validator(mode="after")
    def _can_be_searched(self) -> LongestSequence:
        if self.budget != DEVICE:
            try:
                parse_budget(self.budget, capacity_nbytes=1 << 40)
            except BudgetError as error:
                raise ValueError(f"budget: {error}, or '{DEVICE}'") from error
        if self.start > self.most:
            raise ValueError(f"expected start to be at most most = {self.most}")
        return self

    def budget_nbytes(self, device: torch.device) -> int | None:
        """The bytes of the budget; None if it is the device itself.

        Raises ``AblationError`` for a share of a device whose size is not known, as the CPU's.
        """
        on_cuda = device.type == "cuda"
        if self.budget == DEVICE and on_cuda:
            return None
        is_share = isinstance(self.budget, str) and "%" in self.budget  # to look at a device takes some of its memory
        try:
            if self.budget == DEVICE:
                raise BudgetError(f"expected a size such as '4GiB' on {device.type}; found '{DEVICE}', a CUDA device's")
            return parse_budget(self.budget, torch.cuda.mem_get_info(device)[1] if is_share and on_cuda else None)
        except BudgetError as error:
            raise AblationError(f"longest_sequence.budget: {error}") from error

    def longest(self, fits: Callable[[int], bool], most: int) -> int:
        """The longest sequence that fits, of the multiples up to ``most``, too; 0 if none does.

        fits: whether a length does. Whatever is shorter than a length that fits has to fit, too.
        """
        step = self.multiple
        most = min(most, self.most) // step
        low, high = 0, most + 1  # multiples: low fits, and high does not
        guess = min(max(1, self.start // step), most)
        while high - low > 1:
            low, high = (guess, high) if fits(guess * step) else (low, guess)
            guess = 2 * guess if guess == low and high == most + 1 else (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
        return low * step
