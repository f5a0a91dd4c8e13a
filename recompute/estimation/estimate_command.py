"""`recompute estimate` checks all it can before anything heavy is imported, and then estimates."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from recompute.errors import EstimateError
from recompute.estimation.capacity import Fit, fit
from recompute.estimation.check_paths import check_source, names_factory
from recompute.estimation.estimate import estimate, estimator_of
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate, sweep_plot, sweep_table
from recompute.estimation.gpus import GPUS
from recompute.files import check_new, check_writable, png_of, user_path, write_file
from recompute.policy.loading import load_policy

Progress = Callable[[str, int, int], None]


class EstimateAnswer(NamedTuple):
    """Estimates as text and as plain data."""

    text: str
    data: Any
    fit: Fit | None = None
    """Whether it fits the device; None if no device was named."""

    def to_json(self) -> str:
        return json.dumps(self.data, indent=2)


def estimate_as_asked(
    model: str,
    options: EstimateOptions,
    *,
    batch_size: int,
    seq_len: int,
    policy: str | None,
    device: tuple[str, int] | None,
    sweep: bool,
    out: Path,
    overwrite: bool,
    progress: Progress,
) -> EstimateAnswer:
    """Estimate a step, and find what fits a device if one is named; or make a sweep, and write its plot.

    model: names it, as ``recompute.estimate`` takes a name.
    device: the name of the device that the step is to fit, and its bytes.
    sweep: make a table, and a plot in the folder ``out``. overwrite: whether it may replace one that is there.

    Raises ``EstimateError``, ``PolicyError`` or ``ModelError`` before it imports torch where it can.
    """
    rules, options = None if policy is None else load_policy(policy), options.read()
    check_source(model)
    plot = user_path(out) / "estimate.png"
    if sweep:
        _check_sweep(model, plot, overwrite)
    progress("loading torch and transformers", 0, 0)
    gpu = device[0] if device is not None and device[0] in GPUS else None
    asked: dict[str, Any] = {**options._asdict(), "policy": rules, "gpu": gpu}

    def estimated(size: int, length: int, advise: bool = False) -> Estimate:
        return estimate(model, batch_size=size, seq_len=length, advise=advise, **asked)

    if sweep:
        answer = _sweep(estimated, batch_size, seq_len, plot, progress)
    else:
        found = estimated(batch_size, seq_len, advise=True)
        answer = EstimateAnswer(str(found), found.as_dict())
    if device is None:
        return answer
    fitting = fit(lambda *sizes: estimated(*sizes).peak_bytes, device, batch_size, seq_len, progress)
    if not fitting.fits:
        from recompute.estimation.fitting_changes import Sizes, fewest_changes  # which imports torch

        given = None if names_factory(model) else Sizes(batch_size, seq_len)
        with estimator_of(model, options, batch_size, seq_len, None, gpu) as estimator:
            changes = fewest_changes(estimator, options, rules, device[1], given=given, progress=progress)
        if changes is not None:
            fitting = fitting._replace(changes=changes.changes, changed_peak_nbytes=changes.peak_nbytes)
    data = answer.data if sweep else answer.data | {"fit": fitting.as_dict()}
    return EstimateAnswer(f"{answer.text}\n\n{fitting}", data, fitting)


def _check_sweep(model: str, plot: Path, overwrite: bool) -> None:
    if names_factory(model):
        raise EstimateError(
            f"--sweep: expected a model for which batches of several sizes can be made; {model} returns its own batch. "
            "Drop --sweep, and have the function return one size after another"
        )
    check_writable(plot.parent, error=EstimateError, is_folder=True)
    if not overwrite:
        check_new([plot], error=EstimateError, others="Pass --overwrite to replace it, or --out for another folder")


def _sweep(
    estimated: Callable[[int, int, bool], Estimate], batch_size: int, seq_len: int, plot: Path, progress: Progress
) -> EstimateAnswer:
    """1, 2 and 4 times the batch by 1/2, 1, 2 and 4 times the length."""
    lengths = (max(2, seq_len // 2), seq_len, 2 * seq_len, 4 * seq_len)
    points = []
    for done, (size, length) in enumerate(product((batch_size, 2 * batch_size, 4 * batch_size), lengths)):
        progress("estimating", done, 3 * len(lengths))
        points.append((size, length, estimated(size, length, True)))
    write_file(plot, png_of(sweep_plot(points)))
    rows = [{"batch_size": size, "seq_len": length, **each.as_dict()} for size, length, each in points]
    return EstimateAnswer(f"{sweep_table(points)}\n\nestimate.png is in {plot.parent}", rows)
