"""Finds out whether a training step fits a device, and the largest batch and the longest sequences that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from recompute.estimation.gpus import find_gpu, read_size
from recompute.units import humanize

_MOST_BATCH, _MOST_TOKENS = 2**16, 2**22
_TRIES = 6  # so many guesses follow a line; after them the range is halved


class Fit(NamedTuple):
    """Whether a training step fits a device, and the largest batch and the longest sequence that do."""

    device: str
    capacity_nbytes: int
    batch_size: int
    seq_len: int
    peak_nbytes: int
    largest_batch: int | None
    """The largest batch at this sequence length; 0: none fits; None: the peak is the same for every size."""
    longest_sequence: int | None
    """The longest sequence at this batch size, of the lengths that ``fit`` tries; 0: none fits; None: as above."""

    @property
    def fits(self) -> bool:
        return self.peak_nbytes <= self.capacity_nbytes

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "fits": self.fits}

    def __str__(self) -> str:
        share = f"{self.peak_nbytes / self.capacity_nbytes:.0%} of {humanize(self.capacity_nbytes)}"
        told = f"{'Fits' if self.fits else 'Does not fit'} {self.device}: {humanize(self.peak_nbytes)} is {share}."
        found = []
        if self.largest_batch is not None:
            batch = f"the largest batch is {_at_most(self.largest_batch, _MOST_BATCH)}"
            where = "" if self.longest_sequence is None else f"at sequence {self.seq_len:,}, "
            found.append(f"{where}{batch if self.largest_batch else 'no batch fits'}")
        if self.longest_sequence is not None:
            length = f"the longest sequence is {_at_most(self.longest_sequence, _MOST_TOKENS)}"
            found.append(f"at batch {self.batch_size:,}, {length if self.longest_sequence else 'no sequence fits'}")
        if not found:
            told += " The model brings its own batch, so no other batch sizes and sequence lengths were tried."
        else:
            told += f" {'; '.join(found).capitalize()}."
        return told if self.fits else f"{told} recompute doctor finds changes that make it fit."


def _at_most(found: int, most: int) -> str:
    return f"{found:,} or more" if found >= most else f"{found:,}"


def read_capacity(gpu: str | None, memory: str | None) -> tuple[str, int] | None:
    """The name of the device that a command line describes, and its bytes; None if it describes none.

    Raises ``ModelError`` for what cannot be read.
    """
    known = None if gpu is None else find_gpu(gpu, "--gpu", "--gpu-memory 24GiB")
    if memory is not None:
        return (known.name if known else "this device"), read_size("--gpu-memory", memory, "24GiB")
    return None if known is None else (known.name, known.capacity_nbytes)


def fit(
    peak_nbytes: Callable[[int, int], int],
    device: tuple[str, int],
    batch_size: int,
    seq_len: int,
) -> Fit:
    """Search for the largest batch and the longest sequence that fit.

    peak_nbytes: the peak of a batch size and a sequence length. It grows with either, or does not depend on it: a
        model's own batch has one size, and images have no length.

    Lengths are tried in steps of 256 tokens, or of fewer where ``seq_len`` is shorter.
    """
    known: dict[tuple[int, int], int] = {}

    def peak(batch: int, length: int) -> int:
        if (batch, length) not in known:
            known[batch, length] = peak_nbytes(batch, length)
        return known[batch, length]

    name, capacity = device
    step = 256 if seq_len >= 256 else max(1, seq_len // 4)
    largest = _largest(lambda batch: peak(batch, seq_len), batch_size, capacity, _MOST_BATCH)
    longest = _largest(
        lambda number: peak(batch_size, number * step), max(1, seq_len // step), capacity, _MOST_TOKENS // step
    )
    longest = None if longest is None else longest * step
    return Fit(name, capacity, batch_size, seq_len, peak(batch_size, seq_len), largest, longest)


def _largest(peak: Callable[[int], int], start: int, capacity: int, most: int) -> int | None:
    """The largest number up to ``most`` whose peak is within the capacity; 0 if there is none, None if all are equal.

    Peaks are nearly linear, so the first guesses follow the line through two of them.
    """
    low, high = 0, most + 1  # low fits, and high does not
    points: list[tuple[int, int]] = []
    guess = start
    while high - low > 1:
        points.append((guess, peak(guess)))
        low, high = (guess, high) if points[-1][1] <= capacity else (low, guess)
        if len(points) == 1:
            guess = 2 * guess if low else guess // 2
        elif len(points) <= _TRIES:
            (a, b), (c, d) = points[-2:]
            guess = int(a + (capacity - b) * (c - a) / (d - b)) if d != b else high - 1
        else:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low if len({nbytes for _, nbytes in points}) > 1 or peak(1) != peak(most) else None
