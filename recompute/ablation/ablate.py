"""``recompute.ablate`` compares policies on a model of the caller's own; the command, on models of a configuration."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer

from recompute.ablation import ablation_plots, ablation_report, results
from recompute.ablation.ablation_config import (
    PEERS,
    POLICIES,
    STEPS,
    WARMUP,
    AblationConfig,
    Comparison,
    default_config,
)
from recompute.ablation.peers import BASELINE, COMPILED, is_peer
from recompute.ablation.results import AblationRow
from recompute.ablation.run_ablation import RowRecorder, TellLeft, run
from recompute.ablation.subjects import factory_experiment
from recompute.ablation.trials import Progress
from recompute.attach.apply import PolicyLike
from recompute.counters import describe_machine, resolve_device
from recompute.errors import AblationError, PolicyError, WriteError
from recompute.estimation.factories import Factory, load_factory
from recompute.files import check_new, user_path
from recompute.policy.document import load_document, validate
from recompute.policy.loading import load_policy


@dataclass(frozen=True)
class Ablation:
    """The results of each policy and peer. Printed, it is a table."""

    rows: tuple[AblationRow, ...]
    """The baseline ``none`` first. One that failed has an ``error``."""
    results: Mapping[str, Any]
    """The same as ``results.json`` has it, with ``machine`` and ``config``: what was run where."""

    def row(self, policy: str) -> AblationRow:
        """The row of a policy or peer. Raises ``KeyError`` if there is none."""
        return {row.policy: row for row in self.rows}[policy]

    def table(self) -> str:
        """The rows as text: bytes held and at the peak, milliseconds, and whether losses and gradients match."""
        return ablation_report.text(self.results["rows"])

    __str__ = table

    def markdown(self) -> str:
        """A verdict, the rows as a table in Markdown, what failed, and below it what was run, and on what."""
        return ablation_report.markdown(self.results)

    def plot(self) -> Figure:
        """Memory against the time of a step, as a matplotlib figure."""
        return ablation_plots.memory_against_time(self.results["rows"])

    def save(self, folder: str | Path) -> None:
        """Write ``results.json``, tables, plots and a page of all into ``folder``, which is made.

        They take the places of those that are there. Raises ``WriteError`` where one cannot be written.
        """
        results.save(self.results, user_path(folder))
        ablation_report.write(self.results, user_path(folder))


def ablate(
    model_factory: Factory,
    batch: Any = None,
    policies: Sequence[PolicyLike] | Mapping[str, PolicyLike] = POLICIES,
    *,
    peers: Sequence[str] = PEERS,
    layers: str | Sequence[str] | None = None,
    compile: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    steps: int = STEPS,
    warmup: int = WARMUP,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "auto",
    out: str | Path | None = None,
    progress: Progress | None = None,
    on_row: Callable[[AblationRow], None] | None = None,
) -> Ablation:
    """Train a model under each of several policies; compare memory, time, losses and gradients.

    model_factory: returns the model, or ``(model, batch)``. It is called anew for each policy, with the same random
        state, and must return equal weights each time.
    batch: what forward is given at each step: a tensor, a tuple of arguments, a mapping of keyword arguments; or a
        function that returns one, called once a step before anything is trained.
    policies: as ``recompute.apply`` takes them, or a mapping from names of rows to such. ``none`` runs first, anyway.
        On a CPU, ``auto`` runs by the kernels' references.
    peers: what others offer, as further rows: "torch-checkpoint", "torch-selective", "torch-compile",
        "torch-compile-selective", "torch-budget-0.5" (any share), "torch-save-on-cpu", "torchtune-offload", "liger"
        and "liger-loss" (Llama alone), "cut-cross-entropy" (models of transformers).
    layers: globs over the paths of what peers and ``compile`` take for layers; None: classes ``*Layer`` and ``*Block``.
    compile: whether each policy also runs, as ``POLICY+compile``, with these layers compiled.
    loss: computes a scalar from the model's output; None: the output's ``loss`` (attribute or key), or its sum.
    optimizer: makes an optimizer of the parameters; None: AdamW with a learning rate of 1e-3.
    steps: training steps for each policy. The first ``warmup`` of them are not timed, unless no other is left.
    seed: for the weights, and for what training draws, such as dropout.
    dtype: of the model and the batch's floats; None: as they are. device: "auto", "cpu", "cuda" or a ``torch.device``.
    out: a folder for ``results.json``, written again after each row, and for tables and plots at the end. They take
        the places of those that are there. What cannot be written, as on a full disk, is a warning.
    progress: called after each step with what runs, the steps done, and the steps in all. on_row: with each row.

    A policy that fails is a row with an ``error``, and the others go on: see ``AblationRow``. Raises before anything is
    trained: ``AblationError`` for a bad option, ``ModelError`` where the factory gives no model, ``PolicyError`` for a
    bad policy, ``WriteError`` where ``out`` cannot be written.

    >>> def make():
    ...     return torch.nn.TransformerEncoderLayer(64, 2, batch_first=True)
    >>> found = recompute.ablate(make, torch.randn(4, 32, 64), ["none", "elementwise"], peers=[], steps=2, warmup=1)
    >>> [row.grads_match for row in found.rows]
    [True, True]
    """
    config = _configured(dtype, peers=peers, compile=compile, steps=steps, warmup=warmup, seed=seed)
    options: Any = {"dtype": dtype, "layers": layers, "loss": loss, "optimizer": optimizer, "progress": progress}
    recorder = record(config, model_factory, batch, policies, device, out, **options)
    for row in recorder:
        if on_row is not None:
            on_row(row)
    found = Ablation(recorder.rows, recorder.results)
    try:
        if out is not None:
            found.save(out)
    except WriteError as error:  # whoever trained for hours gets the numbers
        warnings.warn(f"{error}. The results are returned: call save(folder) on them to write them", stacklevel=2)
    return found


def _configured(dtype: Any, **asked: Any) -> AblationConfig:
    """The configuration of the options that files have, too. Raises ``AblationError`` where one of all is wrong."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise AblationError(f"dtype: expected a torch.dtype of floats, or None; found {dtype!r}")
    try:
        return validate(AblationConfig, asked, label="recompute.ablate")
    except PolicyError as error:
        raise AblationError(str(error)) from error


def record(
    config: AblationConfig,
    factory: Factory,
    batch: Any,
    policies: Any,
    device: str | torch.device,
    out: str | Path | None,
    recording: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> RowRecorder:
    """A recorder that trains a function's models, by the configuration, while one iterates over it.

    recording: further options of the ``RowRecorder``. options: of ``factory_experiment``; None: by default.
    """
    named, place = policies_by_name(policies), resolve_device(device) if isinstance(device, str) else device
    comparison = Comparison(config)
    given = {key: value for key, value in options.items() if value is not None}
    experiment = factory_experiment(comparison, factory, batch, place, policies=named, **given)
    head = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": describe_machine(place) | {"recompute": results.package_version()},
        "config": {"model": experiment.description, **config.model_dump(include={"steps", "warmup", "seed"})},
    }
    names = config.treatments(named)
    work = partial(RowRecorder.train, ask=experiment.ask, names=names, facts=comparison.facts)
    return RowRecorder(head, None if out is None else user_path(out), work, len(names), **recording)


def policies_by_name(policies: Any) -> dict[str, PolicyLike]:
    """The policies, loaded, by the names of their rows, without the baseline."""
    if isinstance(policies, str):
        raise AblationError(f"policies: expected a list, as in [{policies!r}]; found a single name")
    given = policies.items() if isinstance(policies, Mapping) else ((None, policy) for policy in policies)
    named: dict[str, PolicyLike] = {}
    for name, policy in given:
        loaded = load_policy(policy)
        if name is None:
            name = str(policy) if not isinstance(policy, Mapping) and policy is not loaded else loaded.name
        if name == BASELINE and not loaded.rules:
            continue
        if name in named or name == BASELINE or is_peer(name) or name.endswith(COMPILED):
            raise AblationError(
                f"policies: expected a name for each that no other policy and no peer has; found {name!r}. Pass a "
                "mapping of names to policies"
            )
        named[name] = loaded
    return named


class AblationOutcome(NamedTuple):
    """The outcome of an ablation, for a terminal: the verdict with the rows, and the names of the files written."""

    table: str
    problems: list[str]
    """A line for each policy that failed or does not match the baseline, and one if rows are missing."""
    is_interrupted: bool
    files: list[str]


def ablate_as_asked(
    config: Path | None,
    model: str | None,
    options: Mapping[str, Any],
    out: Path,
    *,
    resume: bool,
    overwrite: bool,
    command: str,
    progress: Progress,
    tell: Callable[[str], None],
    tell_left: TellLeft,
) -> AblationOutcome:
    """Train what is asked for, write ``results.json`` and what is made of it, and report.

    Ctrl-C ends the training; what was measured until then is reported, and so is what a full disk has no room for.

    model: ``package.module:factory``, in the place of a configuration and a text.
    options: keys of a configuration, which go before the file's where they are neither None nor empty.
    resume: whether to go on with the rows that are there. overwrite: whether to replace what is there.
    command: what was asked for; it continues an interrupted ablation. tell: is given a line for each row.

    Raises ``AblationError`` or ``PolicyError`` for what cannot be carried out.
    """
    given = {key: value for key, value in options.items() if value}
    if model is not None and (config or "text" in given):
        raise AblationError("expected a configuration file or --text, or else --model; found both. Drop one of them")
    if resume and overwrite:
        raise AblationError("--resume continues results and --overwrite replaces them; found both. Drop one of them")
    base = AblationConfig() if model else default_config(given.get("device", "auto"))
    if config:
        base = load_document(AblationConfig, config, kind="configuration")
    settings = validate(
        AblationConfig, {**base.model_dump(mode="json", exclude_unset=True), **given}, label="command line"
    )
    for policy in settings.policies:
        load_policy(policy)  # a typing mistake is told now, and not after other policies were trained
    if not overwrite and not (resume and (out / results.NAME).is_file()):
        others = "Pass --resume to continue these results, --overwrite to replace them, or --out for another folder"
        check_new((out / name for name in (results.NAME, *ablation_report.FILES)), error=AblationError, others=others)
    recording = {"resume": resume, "tell": tell, "tell_left": tell_left}
    if model is None:
        recorder = run(settings, out, command=command, progress=progress, **recording)
    else:
        factory, policies = load_factory(model), settings.policies
        recorder = record(settings, factory, None, policies, settings.device, out, recording, progress=progress)
    axes = results.varied(each.facts for each in settings.comparisons())
    is_interrupted = False
    try:
        for row in recorder:
            tell(ablation_report.line(vars(row), axes))
    except KeyboardInterrupt:
        is_interrupted = True
    return _reported(recorder, out, command, is_interrupted)


def _reported(recorder: RowRecorder, out: Path, command: str, is_interrupted: bool) -> AblationOutcome:
    problems, files = ablation_report.failures(recorder.results), []
    try:
        if recorder.problem is not None:
            raise recorder.problem
        files = [results.NAME]
        files += ablation_report.write(recorder.results, out)
    except WriteError as error:
        problems.append(str(error))
    if is_interrupted or len(files) < 2:
        words = [word for word in shlex.split(command) if word not in ("--overwrite", "--resume")]
        problems.append(f"to continue: {shlex.join([*words, '--resume'])}")
    return AblationOutcome(ablation_report.summary(recorder.results), problems, is_interrupted, files)
