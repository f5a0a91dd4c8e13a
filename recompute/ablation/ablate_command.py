"""What `recompute ablate` is asked for: checked, then carried out and reported."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recompute.ablation import ablation_report, results
from recompute.ablation.ablate import policies_by_name, record
from recompute.ablation.ablation_config import PEERS, POLICIES, STEPS, AblationConfig, default_config
from recompute.ablation.run_ablation import RowRecorder, TellLeft, run
from recompute.ablation.trials import Progress
from recompute.errors import AblationError, WriteError
from recompute.estimation.factories import load_factory
from recompute.files import check_new
from recompute.policy.document import load_document, validate
from recompute.policy.loading import load_policy


@dataclass(frozen=True)
class AblationOutcome:
    """What an ablation found, for a terminal.

    table: the verdict, and the rows.
    problems: a line for each policy that failed or does not match the baseline, and one if rows are missing.
    files: the names of what was written.
    """

    table: str
    problems: list[str]
    is_interrupted: bool
    files: list[str]


@dataclass(frozen=True, kw_only=True)
class AblateRequest:
    """The ablation of a configuration's models, or of ``model``. What is None or empty is as the configuration says.

    model: ``package.module:factory``, in the place of a configuration and a text.
    out: the folder to write to.
    resume: whether to go on with the rows that are there.
    overwrite: whether to replace what is there.
    """

    config: Path | None
    policies: Sequence[str] | None
    peers: Sequence[str] | None
    text: Path | None
    device: str | None
    steps: int | None
    model: str | None
    out: Path
    resume: bool = False
    overwrite: bool = False

    def settings(self) -> AblationConfig:
        """The configuration, changed as the request says.

        Raises ``AblationError`` or ``PolicyError`` for a request that cannot be carried out.
        """
        if self.model is not None and (self.config or self.text):
            raise AblationError("expected a configuration with its text, or --model; found both")
        if self.resume and self.overwrite:
            raise AblationError("expected --resume, which goes on with results, or --overwrite; found both")
        if self.model is not None and self.resume:
            raise AblationError("--resume: expected a configuration, which says whose results they are; found --model")
        base = default_config(self.device or "auto")
        if self.config:
            base = load_document(AblationConfig, self.config, kind="configuration")
        changes = {key: getattr(self, key) for key in ("policies", "peers", "text", "device", "steps")}
        given = {key: value for key, value in changes.items() if value}
        settings = validate(AblationConfig, {**base.as_given(), **given}, label="command line")
        for policy in settings.policies:
            load_policy(policy)  # a typing mistake is told now, and not after other policies were trained
        if not self.overwrite and not (self.resume and (self.out / results.NAME).is_file()):
            going_on = "--resume goes on with these results, " if self.model is None else ""
            others = f"{going_on}--overwrite replaces what is there, and --out names another folder"
            files = [self.out / name for name in (results.NAME, *ablation_report.FILES)]
            check_new(files, error=AblationError, others=others)
        return settings

    def run(
        self, *, command: str, progress: Progress, tell: Callable[[str], None], tell_left: TellLeft
    ) -> AblationOutcome:
        """Train, write ``results.json`` and what is made of it, and report.

        Ctrl-C ends the training; what was measured until then is reported, and so is what a full disk has no room for.
        command: what was asked for, by which an interrupted ablation goes on. tell: is given a line for each row.
        """
        settings = self.settings()
        recorder = self._recorder(settings, command, progress, tell_left)
        is_interrupted = not _told(recorder, tell, results.varied(each.facts for each in settings.comparisons()))
        problems, files = ablation_report.failures(recorder.results), []
        try:
            if recorder.problem is not None:
                raise recorder.problem
            files = [results.NAME]
            files += ablation_report.write(recorder.results, self.out)
        except WriteError as error:
            problems.append(str(error))
        if (is_interrupted or len(files) < 2) and self.model is not None:
            problems.append("to start again, add --overwrite: with --model there is no --resume")
        elif is_interrupted or len(files) < 2:
            words = [word for word in shlex.split(command) if word not in ("--overwrite", "--resume")]
            problems.append(f"to go on: {shlex.join([*words, '--resume'])}")
        return AblationOutcome(ablation_report.summary(recorder.results), problems, is_interrupted, files)

    def _recorder(self, settings: AblationConfig, command: str, progress: Progress, tell_left: TellLeft) -> RowRecorder:
        if self.model is None:
            return run(settings, self.out, command=command, progress=progress, tell_left=tell_left, resume=self.resume)
        policies, peers = self.policies or POLICIES, self.peers or PEERS
        policies_by_name(policies)  # before the factory's module is imported
        options: dict[str, Any] = {"steps": self.steps or STEPS, "progress": progress}
        return record(load_factory(self.model), None, policies, peers, self.device or "auto", self.out, **options)


def _told(recorder: RowRecorder, tell: Callable[[str], None], axes: Iterable[str]) -> bool:
    """Train, and tell each row, and on these axes what it is of. Returns False where Ctrl-C ended it."""
    told = False
    try:
        for row in recorder:
            tell(ablation_report.line(vars(row), axes))
            if recorder.problem is not None and not told:
                tell(f"{recorder.problem}. The training goes on")
            told = recorder.problem is not None
    except KeyboardInterrupt:
        return False
    return True
