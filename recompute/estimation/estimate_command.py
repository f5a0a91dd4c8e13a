"""`recompute estimate` checks all it can before anything heavy is imported, and then estimates."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from recompute.estimation.capacity import Fit, fit
from recompute.estimation.check_paths import check_source, names_factory
from recompute.estimation.estimate import estimate
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate
from recompute.estimation.gpus import GPUS
from recompute.policy.loading import load_policy


class EstimateAnswer(NamedTuple):
    """An estimate, and what fits a device."""

    found: Estimate
    fit: Fit | None = None
    """None if no device was named."""

    def to_json(self) -> str:
        fitting = {} if self.fit is None else {"fit": self.fit.as_dict()}
        return json.dumps(self.found.as_dict() | fitting, indent=2)

    def __str__(self) -> str:
        return "\n\n".join(str(each) for each in self if each is not None)


def estimate_as_asked(
    model: str,
    options: EstimateOptions,
    *,
    batch_size: int,
    seq_len: int,
    policy: str | None,
    device: tuple[str, int] | None,
    progress: Callable[[str, int, int], None],
) -> EstimateAnswer:
    """Estimate a step, and find what fits a device if one is named.

    model: names it, as ``recompute.estimate`` takes a name.
    device: the name of the device that the step is to fit, and its bytes.

    Raises ``EstimateError``, ``PolicyError`` or ``ModelError`` before it imports torch where it can.
    """
    rules, options = None if policy is None else load_policy(policy), options.read()
    check_source(model)
    progress("loading torch and transformers", 0, 0)
    gpu = device[0] if device is not None and device[0] in GPUS else None
    estimated: Any = partial(estimate, model, policy=rules, gpu=gpu, **options._asdict())

    found = estimated(batch_size=batch_size, seq_len=seq_len)
    if device is None:
        return EstimateAnswer(found)

    def peak_nbytes(size: int, length: int) -> int:
        if names_factory(model) or (size, length) == (batch_size, seq_len):  # a factory's batch is its own
            return found.most_bytes
        progress(f"estimating batch {size:,} at sequence {length:,}", 0, 0)
        return int(estimated(batch_size=size, seq_len=length, advise=False).most_bytes)

    return EstimateAnswer(found, fit(peak_nbytes, device, batch_size, seq_len))
