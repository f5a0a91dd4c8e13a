"""Finds the longest sequence whose training step fits a budget of memory, by doubling and bisection."""

from __future__ import annotations

import signal
from collections.abc import Callable

import torch

from recompute.ablation.ablation_config import DEVICE, LongestSequence
from recompute.errors import AblationError, BudgetError
from recompute.units import parse_budget

_OUT_OF_MEMORY = (
    torch.OutOfMemoryError.__name__,
    MemoryError.__name__,
    "out of memory",  # CUDA's own error
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # torch's allocator of the CPU
    signal.SIGKILL.name,  # the kernel's way to end what takes all memory
)


def is_out_of_memory(error: str) -> bool:
    """Whether a row's error says that there was no memory left."""
    return any(sign in error for sign in _OUT_OF_MEMORY)


def budget_nbytes(asked: LongestSequence, device: torch.device) -> int | None:
    """The bytes of the budget; None if it is the device itself.

    Raises ``AblationError`` for a share of a device whose size is not known, as the CPU's.
    """
    if asked.budget == DEVICE:
        if device.type != "cuda":
            raise AblationError(
                f"longest_sequence.budget: expected a size such as '4GiB' on {device.type}; found '{DEVICE}', which is "
                "for a CUDA device"
            )
        return None
    # To look at a device takes some of its memory.
    is_share = isinstance(asked.budget, str) and "%" in asked.budget
    capacity = torch.cuda.mem_get_info(device)[1] if is_share and device.type == "cuda" else None
    try:
        return parse_budget(asked.budget, capacity)
    except BudgetError as error:
        raise AblationError(f"longest_sequence.budget: {error}") from error


def find_longest(fits: Callable[[int], bool], asked: LongestSequence) -> int:
    """The longest sequence that fits, of the multiples up to the most that is asked for; 0 if none does.

    fits: whether a length does. Whatever is shorter than a length that fits has to fit, too.
    """
    step = asked.multiple
    most = asked.most // step
    low, high = 0, most + 1  # multiples: low fits, and high does not
    guess = min(max(1, asked.start // step), most)
    while high - low > 1:
        low, high = (guess, high) if fits(guess * step) else (low, guess)
        guess = 2 * guess if guess == low and high == most + 1 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low * step
