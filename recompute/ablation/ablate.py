"""``recompute.ablate``: compares policies on a model of the caller's own, by the code that compares them on a Llama."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from recompute.ablation import ablation_plots, ablation_report, results
from recompute.ablation.ablation_config import PEERS, POLICIES, STEPS, WARMUP
from recompute.ablation.peers import BASELINE, COMPILED, is_peer, treatments
from recompute.ablation.results import AblationRow
from recompute.ablation.run_ablation import RowRecorder
from recompute.ablation.subjects import factory_experiment
from recompute.ablation.trials import Progress
from recompute.attach.apply import PolicyLike
from recompute.counters import describe_machine, resolve_device
from recompute.errors import AblationError, WriteError
from recompute.estimation.factories import Factory
from recompute.files import user_path
from recompute.policy.loading import load_policy


@dataclass(frozen=True)
class Ablation:
    """What each policy and peer did. Printed, it is a table."""

    rows: tuple[AblationRow, ...]
    """The baseline ``none`` first. One that failed has an ``error``."""
    results: Mapping[str, Any]
    """The same as ``results.json`` has it, with ``machine`` and ``config``: what was run where."""

    def row(self, policy: str) -> AblationRow:
        """That of a policy or peer. Raises ``KeyError`` if there is none."""
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
    loss: a scalar of what the model returns; None: its own ``loss`` (attribute or key), or the sum of what it returns.
    optimizer: makes one of the parameters; None: AdamW with a learning rate of 1e-3.
    steps: training steps for each policy. The first ``warmup`` of them are not timed, unless no other is left.
    seed: for the weights, and for what training draws, such as dropout.
    dtype: of the model and the batch's floats; None: as they are. device: "auto", "cpu", "cuda" or a ``torch.device``.
    out: a folder for ``results.json``, written again after each row, and for tables and plots at the end. They take
        the places of those that are there. What cannot be written, as on a full disk, is a warning.
    progress: called after each step with what runs, the steps done, and the steps in all. on_row: with each row.

    A policy that fails is a row with an ``error``, and the others go on: see ``AblationRow``. Raises before anything is
    trained: ``AblationError`` for a bad option, ``ModelError`` where the factory gives no model, ``PolicyError`` for a
    bad policy, ``WriteError`` where ``out`` cannot be written.
    """
    _check({"steps": (steps, 1), "warmup": (warmup, 0), "seed": (seed, 0)}, dtype, peers)
    given: dict[str, Any] = {"steps": steps, "warmup": warmup, "seed": seed, "dtype": dtype, "layers": layers}
    given |= {"loss": loss, "optimizer": optimizer, "progress": progress}
    recorder = record(model_factory, batch, policies, peers, device, out, compiled=compile, **given)
    for row in recorder:
        (on_row or (lambda row: None))(row)
    found = Ablation(recorder.rows, recorder.results)
    try:
        if out is not None:
            found.save(out)
    except WriteError as error:  # whoever trained for hours gets the numbers
        warnings.warn(f"{error}. What was measured is returned; its save(folder) writes it", stacklevel=2)
    return found


def record(
    factory: Factory,
    batch: Any,
    policies: Any,
    peers: Sequence[str],
    device: str | torch.device,
    out: str | Path | None,
    *,
    compiled: bool = False,
    steps: int = STEPS,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> RowRecorder:
    """To iterate over it is to train a function's models. options: of an ``Experiment``; None: by default."""
    named, place = policies_by_name(policies), resolve_device(device) if isinstance(device, str) else device
    defaults = {"warmup": WARMUP, "seed": 0, "optimizer": partial(AdamW, lr=1e-3), "progress": lambda *step: None}
    given = {**defaults, "policies": named, **{key: value for key, value in options.items() if value is not None}}
    experiment = factory_experiment(factory, batch, steps, dtype, place, **given)
    head = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": describe_machine(place) | {"recompute": results.package_version()},
        "config": {"model": experiment.description, "steps": steps, **{key: given[key] for key in ("warmup", "seed")}},
    }
    names = treatments(named, peers, compiled=compiled)
    work = partial(RowRecorder.train, ask=experiment.ask, names=names, facts=experiment.facts)
    return RowRecorder(head, None if out is None else user_path(out), work=work)


def _check(numbers: Mapping[str, tuple[Any, int]], dtype: Any, peers: Any) -> None:
    for name, (number, least) in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise AblationError(f"{name}: expected a whole number, at least {least}; found {number!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise AblationError(f"dtype: expected a torch.dtype of floats, or None; found {dtype!r}")
    for peer in (peers,) if isinstance(peers, str) else peers:
        if isinstance(peers, str) or not isinstance(peer, str) or not is_peer(peer):
            raise AblationError(f"peers: expected a list of names such as {PEERS[0]!r}; found {peer!r}")


def policies_by_name(policies: Any) -> dict[str, PolicyLike]:
    """The policies, loaded, by the names of their rows, without the baseline."""
    if isinstance(policies, str):
        raise AblationError(f"policies: expected several, as in [{policies!r}]; found one name")
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
                f"policies: expected a name for each, of no other policy and no peer; found {name!r}. Pass a mapping "
                "of names to policies"
            )
        named[name] = loaded
    return named
