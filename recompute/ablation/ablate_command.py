"""What `recompute ablate` is asked for: checked, then carried out and reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from recompute.ablation import ablation_report, results_file
from recompute.ablation.ablate import ablate
from recompute.ablation.ablation_config import AblationConfig, default_config
from recompute.ablation.row_places import varied
from recompute.ablation.row_recorder import TellLeft
from recompute.ablation.run_ablation import run
from recompute.ablation.trials import AblationRow, Progress
from recompute.errors import AblationError
from recompute.estimation.factories import load_factory
from recompute.policy.document import load_document, validate
from recompute.policy.loading import load_policy


@dataclass(frozen=True)
class AblationOutcome:
    """What an ablation found, for a terminal."""

    table: Table
    problems: list[str]
    """A line for each policy that failed or does not match the baseline, and one if rows are missing."""
    is_interrupted: bool
    files: list[str]
    """The names of what was written."""


@dataclass(frozen=True, kw_only=True)
class AblateRequest:
    """The ablation of a configuration's models, or of ``model``. What is None or empty is as the configuration says."""

    config: Path | None
    policies: Sequence[str] | None
    peers: Sequence[str] | None
    text: Path | None
    device: str | None
    steps: int | None
    model: str | None
    """``package.module:factory``, in the place of a configuration and a text."""
    out: Path
    """The folder to write to."""
    resume: bool = False
    """Whether to go on with the rows that are there."""

    def settings(self) -> AblationConfig:
        """The configuration, changed as the request says.

        Raises ``AblationError`` or ``PolicyError`` for a request that cannot be carried out.
        """
        if self.model is not None and (self.config or self.text):
            raise AblationError("expected a configuration with its text, or --model; found both")
        if self.model is not None and self.resume:
            raise AblationError("--resume: expected a configuration, which says whose results they are; found --model")
        if self.config:
            base = load_document(AblationConfig, self.config, kind="configuration")
        else:
            base = default_config(self._where)
        given = {
            "policies": self.policies,
            "peers": self.peers,
            "text": self.text,
            "device": self.device,
            "steps": self.steps,
        }
        changes = {key: value for key, value in given.items() if value}
        settings = validate(AblationConfig, {**base.as_given(), **changes}, label="command line")
        for policy in settings.policies:
            load_policy(policy)  # a typing mistake is told now, and not after other policies were trained
        return settings

    def run(
        self, *, command: str, progress: Progress, tell: Callable[[str], None], tell_left: TellLeft
    ) -> AblationOutcome:
        """Train, write ``results.json`` and what is made of it, and report.

        Ctrl-C ends the training; what was measured until then is reported. tell: is given a line for each row.
        """
        settings = self.settings()
        axes = varied(each.facts for each in settings.comparisons())

        def tell_row(row: AblationRow) -> None:
            tell(ablation_report.line(asdict(row), axes))

        is_interrupted = False
        try:
            if self.model is not None:
                self._run_model(self.model, progress, tell_row)
            else:
                options: dict[str, Any] = {"progress": progress, "tell_left": tell_left, "resume": self.resume}
                for row in run(settings, self.out, command=command, **options):
                    tell_row(row)
        except KeyboardInterrupt:
            is_interrupted = True
        results = results_file.load(self.out)
        files = [results_file.NAME, *ablation_report.write(results, self.out)]
        return AblationOutcome(
            ablation_report.table(results["rows"]), ablation_report.failures(results), is_interrupted, files
        )

    @property
    def _where(self) -> str:
        return self.device or "auto"

    def _run_model(self, model: str, progress: Progress, tell_row: Callable[[AblationRow], None]) -> None:
        """What is not asked for is left to ``ablate``'s defaults."""
        given = {"policies": self.policies, "peers": self.peers, "steps": self.steps}
        asked = {name: value for name, value in given.items() if value is not None}
        ablate(
            load_factory(model),
            device=self._where,
            out=self.out,
            progress=progress,
            on_row=tell_row,
            **asked,  # type: ignore[arg-type]
        )
