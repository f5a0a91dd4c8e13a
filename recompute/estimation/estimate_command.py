"""What `recompute estimate` is asked for: checked before anything heavy is imported, then carried out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from recompute.errors import EstimateError
from recompute.estimation.capacity import Fit, fit
from recompute.estimation.check_paths import check_source, names_factory
from recompute.estimation.estimate import estimate, estimator_of
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate, sweep_plot, sweep_table
from recompute.estimation.gpus import GPUS
from recompute.files import check_new, check_writable, png_of, user_path, write_file
from recompute.policy.loading import load_policy
from recompute.policy.rules import Policy

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class EstimateAnswer:
    """What was found, as text and as plain data."""

    text: str
    data: Any
    fit: Fit | None
    """Whether it fits the device; None if that was not asked."""

    def to_json(self) -> str:
        return json.dumps(self.data, indent=2)


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """An estimate for the model of a file. ``recompute.estimate`` says what the fields are."""

    model: str
    batch_size: int
    seq_len: int
    options: EstimateOptions
    policy: Policy | None = None
    device: tuple[str, int] | None = None
    """The name of the device that the step is to fit, and its bytes; None if nobody asks whether it fits."""
    sweep: bool = False
    out: Path
    """The folder for a sweep's plot."""
    overwrite: bool = False
    """Whether a plot that is there is replaced."""

    @staticmethod
    def checked(*, options: EstimateOptions, policy: str | None, **fields: Any) -> EstimateRequest:
        """A request, with other spellings of names replaced by the names themselves.

        Raises ``EstimateError``, ``PolicyError`` or ``ModelError`` for mistakes that can be found without torch.
        """
        loaded = None if policy is None else load_policy(policy)
        request = EstimateRequest(options=options.read(), policy=loaded, **fields)
        check_source(request.model)
        if request.sweep:
            if names_factory(request.model):
                raise EstimateError(
                    f"--sweep: expected a model whose batch is made here, in several sizes; {request.model} returns a "
                    "batch of its own. Estimate one size after another by what the function returns"
                )
            check_writable(request.out, error=EstimateError, is_folder=True)
            if not request.overwrite:
                others = "--overwrite replaces it, and --out names another folder"
                check_new([request._plot], error=EstimateError, others=others)
        return request

    @property
    def _plot(self) -> Path:
        return user_path(self.out) / "estimate.png"

    def run(self, progress: Progress) -> EstimateAnswer:
        """Make the estimate, and find what fits the device if there is one; or make a sweep, and write its plot."""
        progress("loading torch and transformers", 0, 0)
        answer = self._sweep(progress) if self.sweep else self._single()
        if self.device is None:
            return answer
        fitting = fit(self._peak_nbytes, self.device, self.batch_size, self.seq_len, progress)
        if not fitting.fits:
            from recompute.estimation.fitting_changes import Sizes, fewest_changes  # which imports torch

            sizes, asked = (self.batch_size, self.seq_len), (self.options, self.policy, fitting.capacity_nbytes)
            given = None if names_factory(self.model) else Sizes(*sizes)
            with estimator_of(self.model, self.options, *sizes, None, self._gpu) as estimator:
                found = fewest_changes(estimator, *asked, given=given, progress=progress)
            if found is not None:
                fitting = fitting._replace(changes=found.changes, changed_peak_nbytes=found.peak_nbytes)
        data = answer.data if self.sweep else answer.data | {"fit": fitting.as_dict()}
        return EstimateAnswer(f"{answer.text}\n\n{fitting}", data, fitting)

    @property
    def _gpu(self) -> str | None:
        return self.device[0] if self.device is not None and self.device[0] in GPUS else None

    def _estimate(self, batch_size: int, seq_len: int, advise: bool = True) -> Estimate:
        options: dict[str, Any] = {**self.options._asdict(), "policy": self.policy, "advise": advise, "gpu": self._gpu}
        return estimate(self.model, batch_size=batch_size, seq_len=seq_len, **options)

    def _peak_nbytes(self, batch_size: int, seq_len: int) -> int:
        return self._estimate(batch_size, seq_len, advise=False).peak_bytes

    def _single(self) -> EstimateAnswer:
        found = self._estimate(self.batch_size, self.seq_len)
        return EstimateAnswer(str(found), found.as_dict(), None)

    def _sweep(self, progress: Progress) -> EstimateAnswer:
        """1, 2 and 4 times the batch by 1/2, 1, 2 and 4 times the length."""
        lengths = (max(2, self.seq_len // 2), self.seq_len, 2 * self.seq_len, 4 * self.seq_len)
        sizes = list(product((self.batch_size, 2 * self.batch_size, 4 * self.batch_size), lengths))
        points = []
        for done, (size, length) in enumerate(sizes):
            progress("estimating", done, len(sizes))
            points.append((size, length, self._estimate(size, length)))
        write_file(self._plot, png_of(sweep_plot(points)))
        rows = [{"batch_size": size, "seq_len": length, **each.as_dict()} for size, length, each in points]
        return EstimateAnswer(f"{sweep_table(points)}\n\nestimate.png is in {self._plot.parent}", rows, None)
