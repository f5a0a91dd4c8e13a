"""The longest sequence that fits a GPU and the memory of its host, under each of some policies.

Each moment of a step takes bytes in proportion to tokens, beside static ones, and so does the host. Two estimates tell
both numbers. No step of the longest sequence runs, not even on tensors without values.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from recompute.errors import ModelError, NoEffectError
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate, table
from recompute.estimation.gpus import Gpu
from recompute.policy.loading import load_policy
from recompute.policy.rules import Policy
from recompute.units import humanize

if TYPE_CHECKING:
    from recompute.estimation.model_estimator import ModelEstimator

LENGTHS = (65536, 131072)
"""The lengths of the two estimates: whole tiles of ``long``, and so many that no tile is a step's peak."""
_STEP = 256
NO_LENGTH = "--longest: the peak of this model does not depend on --seq-len; expected a model of tokens"
_AGAIN = "long, attention again"


class SequenceThatFits(NamedTuple):
    """The longest sequence under a policy, the bytes of its step on the device and on the host, and its seconds."""

    policy: str
    seq_len: int
    """0: none fits."""
    peak_nbytes: int
    host_nbytes: int
    seconds: float


@dataclass(frozen=True)
class SequencesThatFit:
    """The sequences under each policy, the longest first."""

    gpu: Gpu
    host_nbytes: int
    """The host's memory. A policy takes at most half of it."""
    rows: tuple[SequenceThatFits, ...]

    @property
    def fits(self) -> bool:
        return any(row.seq_len for row in self.rows)

    def to_json(self) -> str:
        told = {"gpu": self.gpu.name, "capacity_bytes": self.gpu.capacity_nbytes, "host_bytes": self.host_nbytes}
        return json.dumps({**told, "longest": [row._asdict() for row in self.rows]}, indent=2)

    def __str__(self) -> str:
        rows = [
            (
                row.policy,
                f"{row.seq_len:,}" if row.seq_len else "none fits",
                humanize(row.peak_nbytes) if row.seq_len else "",
                humanize(row.host_nbytes) if row.seq_len and row.host_nbytes else "",
                f"{row.seconds:,.3g}" if row.seq_len else "",
            )
            for row in self.rows
        ]
        lines = [table("policy", rows, "tokens", "peak", "on the host", "s a step"), ""]
        if any(row.policy == _AGAIN for row in self.rows):
            lines.append(f"To use '{_AGAIN}': the rules of long, with rerun: [gemm, attention] in the first one.")
        return "\n".join(
            [
                f"The longest sequence on one {self.gpu.name} with {humanize(self.gpu.capacity_nbytes)}, if half of "
                f"the host's {humanize(self.host_nbytes)} may be used:",
                "",
                *lines,
                f"All figures are extrapolated from estimates at {LENGTHS[0]:,} and {LENGTHS[1]:,} tokens. Times leave "
                "out the copies to the host.",
            ]
        )


def longest_sequences(
    estimator: Callable[[int], AbstractContextManager[ModelEstimator]],
    options: EstimateOptions,
    gpu: Gpu,
    host_nbytes: int,
    progress: Callable[[str, int, int], None],
) -> SequencesThatFit:
    """The sequences under ``auto``, ``full``, ``long``, and ``long`` that runs attention again, too.

    estimator: makes one for a batch of so many tokens a sequence, with a clock.

    Raises ``ModelError`` where the batch does not depend on a length.
    """
    found: dict[str, list[tuple[Estimate, float]]] = defaultdict(list)
    for length in LENGTHS:
        with estimator(length) as of_length:
            for name, policy in _policies():
                progress(f"estimating {name} at {length:,} tokens", 0, 0)
                try:
                    found[name].append((of_length.estimate(options, policy), of_length.seconds(options, policy)))
                except NoEffectError:  # nothing for that policy to govern
                    continue
    rooms = gpu.capacity_nbytes, host_nbytes // 2
    rows = [_longest(name, less, more, rooms) for name, (less, more) in found.items()]
    return SequencesThatFit(gpu, host_nbytes, tuple(sorted(rows, key=lambda row: -row.seq_len)))


def _policies() -> Iterator[tuple[str, Policy]]:
    for name in ("auto", "full", "long"):
        yield name, load_policy(name)
    long = load_policy("long")
    first, *others = long.rules
    again = first.model_copy(update={"rerun": ("gemm", "attention")})
    yield _AGAIN, long.model_copy(update={"rules": (again, *others)})


def _longest(
    name: str, less: tuple[Estimate, float], more: tuple[Estimate, float], rooms: tuple[int, int]
) -> SequenceThatFits:
    """By lines through two estimates, and a parabola through their seconds, as attention compares all with all."""
    (few, few_seconds), (many, many_seconds) = less, more
    start, stop = LENGTHS

    def line(low: int, high: int) -> Callable[[int], float]:
        return lambda length: low + (high - low) * (length - start) / (stop - start)

    moments = {moment: (few.moments[moment], many.moments[moment]) for moment in few.moments if moment in many.moments}
    limits = [(*ends, rooms[0]) for ends in moments.values()] + [(few.host_bytes, many.host_bytes, rooms[1])]
    longest = [start + (room - low) * (stop - start) / (high - low) for low, high, room in limits if high > low]
    if not longest:
        raise ModelError(NO_LENGTH)
    length = max(0, int(min(longest))) // _STEP * _STEP
    square = (many_seconds / stop - few_seconds / start) / (stop - start)
    seconds = length * (few_seconds / start + square * (length - start))
    peak, host = max(line(*ends)(length) for ends in moments.values()), line(few.host_bytes, many.host_bytes)(length)
    return SequenceThatFits(name, length, int(peak), int(host), seconds)
