"""What `recompute ablate` is asked for: checked, then carried out and reported."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from recompute.ablation import ablation_report, results
from recompute.ablation.ablate import PEERS, POLICIES, STEPS, WARMUP, policies_by_name, record
from recompute.ablation.ablation_config import AblationConfig, default_config
from recompute.ablation.peers import treatments
from recompute.ablation.run_ablation import RowRecorder, TellLeft, run
from recompute.ablation.subjects import FactorySubject
from recompute.ablation.trials import Progress
from recompute.counters import resolve_device
from recompute.errors import AblationError, WriteError
from recompute.estimation.factories import load_factory
from recompute.files import check_new
from recompute.policy.document import load_document, validate
from recompute.policy.loading import load_policy


@dataclass(frozen=True)
class AblationOutcome:
    """What an ablation found, for a terminal.

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
        if self.config:
            base = load_document(AblationConfig, self.config, kind="configuration")
        else:
            base = default_config(self.device or "auto")
        changes = {key: getattr(self, key) for key in ("policies", "peers", "text", "device", "steps")}
        given = {key: value for key, value in changes.items() if value}
        settings = validate(AblationConfig, {**base.as_given(), **given}, label="command line")
        for policy in settings.policies:
            load_policy(policy)  # a typing mistake is told now, and not after other policies were trained
        return settings

    def run(
        self, *, command: str, progress: Progress, tell: Callable[[str], None], tell_left: TellLeft
    ) -> AblationOutcome:
        """Train, write ``results.json`` and what is made of it, and report.

        Ctrl-C ends the training; what was measured until then is reported, and so is what a full disk has no room for.
        command: what was asked for, by which an interrupted ablation goes on. tell: is given a line for each row.
        """
        settings = self.settings()
        self._check_new()
        axes = results.varied(each.facts for each in settings.comparisons())
        if self.model is not None:
            recorder = self._of_model(self.model, progress)
        else:
            options: dict[str, Any] = {"progress": progress, "tell_left": tell_left, "resume": self.resume}
            recorder = run(settings, self.out, command=command, **options)
        is_interrupted, told = False, False
        try:
            for row in recorder:
                tell(ablation_report.line(vars(row), axes))
                if recorder.problem is not None and not told:
                    tell(f"{recorder.problem}. The training goes on")
                told = recorder.problem is not None
        except KeyboardInterrupt:
            is_interrupted = True
        problems, files = ablation_report.failures(recorder.results), []
        try:
            if recorder.problem is not None:
                raise recorder.problem
            files = [results.NAME]
            files += ablation_report.write(recorder.results, self.out)
        except WriteError as error:
            problems.append(str(error))
        if is_interrupted or len(files) < 2:
            problems.append(self._how_to_go_on(command))
        return AblationOutcome(ablation_report.table(recorder.results["rows"]), problems, is_interrupted, files)

    def _check_new(self) -> None:
        """Raise ``AblationError`` where results are there that are neither to be gone on with nor to be replaced."""
        if self.overwrite or (self.resume and (self.out / results.NAME).is_file()):
            return
        going_on = "--resume goes on with these results, " if self.model is None else ""
        others = f"{going_on}--overwrite replaces what is there, and --out names another folder"
        names = (results.NAME, *ablation_report.FILES)
        check_new([self.out / name for name in names], error=AblationError, others=others)

    def _how_to_go_on(self, command: str) -> str:
        if self.model is not None:
            return "to start again, add --overwrite: with --model there is no --resume"
        words = [word for word in shlex.split(command) if word not in ("--overwrite", "--resume")]
        return f"to go on: {shlex.join([*words, '--resume'])}"

    def _of_model(self, model: str, progress: Progress) -> RowRecorder:
        named = policies_by_name(self.policies or POLICIES)
        device = resolve_device(self.device or "auto")
        subject = FactorySubject(load_factory(model), None, self.steps or STEPS, 0, None, device)
        optimizer = partial(AdamW, lr=1e-3)
        experiment = subject.experiment(optimizer=optimizer, progress=progress, warmup=WARMUP, policies=named)
        names = treatments(named, self.peers or PEERS, compiled=False)
        return record(experiment, subject.description, names, self.out)
