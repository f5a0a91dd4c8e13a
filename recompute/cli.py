"""The command line: `recompute ablate`, `explain`, `estimate`, `doctor`, `plan`, `verify` and `policies`."""

from __future__ import annotations

import shlex
import shutil
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperGroup

from recompute import cli_parts as parts
from recompute import errors
from recompute.cli_parts import own_path
from recompute.errors import PolicyWarning, RecomputeError

if TYPE_CHECKING:
    from recompute.ablation.ablate import AblationOutcome
    from recompute.policy.rules import Policy

_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class _Commands(TyperGroup):
    """Every command tells a mistake of the user's in one message, without a traceback, and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show_warning, warnings.showwarning)
            try:
                return super().invoke(ctx)
            except RecomputeError as error:
                typer.echo(f"recompute: {error}", err=True)
                raise typer.Exit(2) from error


def _show_warning(show: Any, message: Any, category: type[Warning], *where: Any, **others: Any) -> None:
    """Tell of a policy without a line of this package's code; ``show`` shows the warnings of others."""
    if issubclass(category, PolicyWarning):
        typer.echo(f"recompute: warning: {message}", err=True)
    else:
        show(message, category, *where, **others)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Activation recomputation for PyTorch: a policy says what a training step holds, and what it recomputes.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from recompute import __version__

        typer.echo(f"recompute {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


@app.command()
def ablate(
    config: Path | None = typer.Argument(
        None, help="YAML file, as in examples/ablation. By default, a Llama that fits this device.", callback=own_path
    ),
    policy: list[str] | None = typer.Option(None, help="Preset or policy file, in place of the config's. Repeatable."),
    peer: list[str] | None = typer.Option(
        None, help="Other method (torch-checkpoint, liger …), in place of the config's. Repeatable."
    ),
    text: Path | None = typer.Option(None, help="File to train on, byte by byte.", callback=own_path),
    out: Path = typer.Option("results/ablation", help="Folder to write to.", file_okay=False, callback=own_path),
    device: parts.Device | None = typer.Option(None, help="Where to train."),
    steps: int | None = typer.Option(None, help="Training steps for each policy.", min=1),
    model: str | None = typer.Option(
        None, help="package.module:factory, a function that returns a model and a batch, in place of a Llama."
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the results in --out; repeat what failed."),
    overwrite: parts.OverwriteOption = False,
    compare: tuple[Path, Path] | None = typer.Option(
        None, metavar="A B", help="Train nothing. Compare two results.json, or their folders."
    ),
) -> None:
    """Train a model under several policies, and compare memory, time, losses and gradients.

    Writes results.json, tables, plots and an HTML page. Exits with 1 if a policy fails or changes results.
    """
    if compare is not None:
        from recompute.ablation.results import compare as compare_results

        typer.echo(compare_results(*compare))
        return
    if config is not None and not config.is_file():  # told before torch is imported
        raise errors.PolicyError(f"{config}: cannot be read as a configuration file: there is no such file")

    options = {"policies": policy, "peers": peer, "text": text, "device": device, "steps": steps}
    outcome = _ablated(config, model, options, out, resume=resume, overwrite=overwrite)
    typer.echo(outcome.table)
    if outcome.files:
        typer.echo(f"in {out}: {', '.join(outcome.files)}")
    for problem in outcome.problems:
        typer.echo(problem, err=True)
    raise typer.Exit(_INTERRUPTED if outcome.is_interrupted else 1 if outcome.problems else 0)


def _ablated(*asked: Any, **ways: Any) -> AblationOutcome:
    from recompute.ablation.ablate import ablate_as_asked

    left, command = "", shlex.join(["recompute", *sys.argv[1:]])

    def show_left(done: int, total: int, seconds: float | None) -> None:
        nonlocal left
        left = f"{done} of {total} done" + (f", about {_duration(seconds)} left" if seconds else "")

    with Progress(console=parts.stderr(), transient=True, disable=not parts.stderr().is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{left} {what}".strip(), completed=done, total=total)

        def tell(line: str) -> None:
            progress.console.print(f"{line} ({left})" if left and not progress.console.is_terminal else line)

        return ablate_as_asked(*asked, **ways, command=command, progress=show, tell=tell, tell_left=show_left)


def _duration(seconds: float) -> str:
    """Roughly, in one unit: an estimate has no more digits."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command()
def explain(
    policy: parts.PolicyArgument,
    model: parts.ModelOption,
    seq_len: parts.LengthOption = 4096,
    batch_size: parts.BatchOption = 1,
    dtype: parts.DTypeOption = "bfloat16",
    lora: parts.LoraOption = None,
    lora_targets: parts.LoraTargetsOption = "all-linear",
    base: parts.BaseOption = "",
    device: parts.Device = typer.Option("auto", help="Device to explain for; cuda needs no GPU."),
    wide: bool = typer.Option(False, "--wide", help="Show exact bytes, in long lines."),
) -> None:
    """Print which tensors of a model a policy keeps and drops, and why.

    Needs no GPU, no weights and no memory for the model.
    """
    from recompute.estimation.adapters import Adapters

    adapters = Adapters(lora, lora_targets, base).read()
    rules = _load_policy(policy, model)

    from recompute.attach.explain import WIDTH
    from recompute.diagnostics.policy_commands import explain_policy

    width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    asked = {"seq_len": seq_len, "batch_size": batch_size, "dtype": dtype, "device": device, "adapters": adapters}
    typer.echo(explain_policy(rules, model, wide=wide, width=width, **asked))


@app.command()
def estimate(
    model: str = typer.Option(..., "--model", "--config", help=parts.MODEL_HELP),
    seq_len: parts.LengthOption = 4096,
    batch_size: parts.BatchOption = 1,
    dtype: str = typer.Option("bfloat16", help=parts.DTYPE_HELP),
    optimizer: str = typer.Option("adamw", help=parts.OPTIMIZER_HELP),
    lora: parts.LoraOption = None,
    lora_targets: parts.LoraTargetsOption = "all-linear",
    base: parts.BaseOption = "",
    sharding: parts.ShardingOption = "none",
    devices: parts.DevicesOption = 1,
    gpu: str | None = typer.Option(None, help="Say whether the step fits this GPU (H200, …), and which sizes do."),
    gpu_memory: str | None = typer.Option(None, help="The GPU's memory, such as 24GiB."),
    policy: str | None = typer.Option(None, help="Preset or policy file."),
    loss: str = typer.Option("full", help="full: logits are made. chunked: a cross-entropy without logits."),
    microbatches: parts.MicrobatchesOption = 1,
    microbatches_in_flight: parts.InFlightOption = 1,
    as_json: parts.JsonOption = False,
) -> None:
    """Print the memory of a training step: parameters, gradients, optimizer, activations, and the peak.

    Estimates for a CUDA device. Needs no GPU, no weights and no memory for the model.
    With --gpu or --gpu-memory it exits with 0 if the step fits, with 1 if it does not, and with 2 for a mistake.
    """
    from recompute.estimation.capacity import read_capacity
    from recompute.estimation.estimate_command import estimate_as_asked
    from recompute.estimation.estimate_options import EstimateOptions

    several = microbatches, microbatches_in_flight, lora, lora_targets, base
    options = EstimateOptions(dtype, optimizer, sharding, devices, loss, *several)
    device, sizes = read_capacity(gpu, gpu_memory), {"batch_size": batch_size, "seq_len": seq_len}
    with parts.progress_told() as tell:
        answer = estimate_as_asked(model, options, policy=policy, device=device, progress=tell, **sizes)
    typer.echo(answer.to_json() if as_json else str(answer))
    if answer.fit is not None and not answer.fit.fits:
        raise typer.Exit(1)


@app.command()
def doctor(
    model: parts.ModelOption,
    seq_len: parts.LengthOption = 4096,
    batch_size: parts.BatchOption = 1,
    dtype: str = typer.Option("bfloat16", help=parts.DTYPE_HELP),
    optimizer: str = typer.Option("adamw", help=parts.OPTIMIZER_HELP),
    lora: parts.LoraOption = None,
    lora_targets: parts.LoraTargetsOption = "all-linear",
    base: parts.BaseOption = "",
    gpu: str | None = typer.Option(None, help="The GPU to fit (H200, 'RTX 4090', …). Default: this machine's."),
    gpu_memory: str | None = typer.Option(None, help="The GPU's memory, such as 24GiB. Default: by its name."),
    gpu_tflops: parts.TflopsOption = None,
    gpu_bandwidth: parts.BandwidthOption = None,
    longest: bool = typer.Option(False, "--longest", help="Print the longest sequence that fits, for each policy."),
    host: str | None = typer.Option(None, help="Host memory for --longest, such as 128GiB. Default: what is free."),
    as_json: parts.JsonOption = False,
) -> None:
    """Say whether a run fits a GPU, what takes the memory, and which three changes are fastest.

    Needs no GPU. Exits with 0 if the run fits without changes, with 1 if it does not, and with 2 for a mistake.
    """
    from recompute.estimation.estimate_options import EstimateOptions
    from recompute.estimation.gpus import read_gpu
    from recompute.planning.doctor_command import diagnose

    options = EstimateOptions(dtype, optimizer, "none", 1, "full", 1, 1, lora, lora_targets, base)
    device = read_gpu(gpu, memory=gpu_memory, tflops=gpu_tflops, bandwidth=gpu_bandwidth)
    where: dict[str, Any] = {"gpu": device, "batch_size": batch_size, "seq_len": seq_len}
    with parts.progress_told() as tell:
        found = diagnose(model, options, longest=longest, host=host, progress=tell, **where)
    typer.echo(found.to_json() if as_json else str(found))
    if not found.fits:
        raise typer.Exit(1)


@app.command()
def verify(
    policy: parts.PolicyArgument,
    model: parts.ModelOption,
    seq_len: parts.LengthOption = 256,
    batch_size: parts.BatchOption = 1,
    dtype: parts.DTypeOption = "float32",
    device: parts.Device = typer.Option("auto", help="Where to train."),
) -> None:
    """Check that a policy does not change the gradients of a model, with random weights.

    Exits with 1 if it changes them, or if the policy's rules drop nothing.
    """
    rules = _load_policy(policy, model)

    from recompute.diagnostics.policy_commands import verify_policy

    asked = {"seq_len": seq_len, "batch_size": batch_size, "dtype": dtype, "device": device}
    try:
        for found in verify_policy(rules, model, **asked):
            typer.echo(found)
    except (errors.GradientMismatch, errors.NoEffectError, errors.RegenerationError) as error:
        typer.echo(f"recompute: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def plan(
    budget: str = typer.Option(..., help="Memory of the whole step: 40GiB, 40GB, or 80% of the device."),
    model: str | None = typer.Option(None, help=parts.MODEL_HELP),
    profile: Path | None = typer.Option(None, help="A file of --save-profile, to measure nothing.", callback=own_path),
    save_profile: Path | None = typer.Option(None, help="Write the measurements to this JSON file.", callback=own_path),
    seq_len: parts.LengthOption = 4096,
    batch_size: parts.BatchOption = 1,
    dtype: parts.DTypeOption = "bfloat16",
    lora: parts.LoraOption = None,
    lora_targets: parts.LoraTargetsOption = "all-linear",
    base: parts.BaseOption = "",
    device: parts.Device = typer.Option("auto", help="Where to measure."),
    gpu: str | None = typer.Option(
        None, help="Measure nothing. Calculate for this GPU (H200, 'RTX 4090', …), which need not be here."
    ),
    gpu_memory: str | None = typer.Option(None, help="The GPU's memory by its data sheet, such as 24GiB."),
    gpu_tflops: parts.TflopsOption = None,
    gpu_bandwidth: parts.BandwidthOption = None,
    sharding: parts.ShardingOption = "none",
    devices: parts.DevicesOption = 1,
    microbatches: parts.MicrobatchesOption = 1,
    microbatches_in_flight: parts.InFlightOption = 1,
    optimizer: str = typer.Option("adamw", help="adamw (torch's choice), adamw-fused, adamw-loop, sgd, sgd-momentum."),
    allow: list[str] | None = typer.Option(None, help=parts.ALLOW_HELP),
    out: Path | None = typer.Option(None, help="Write the policy to this YAML file.", callback=own_path),
    overwrite: parts.OverwriteOption = False,
    as_json: parts.JsonOption = False,
    frontier: bool = typer.Option(False, "--frontier", help="Show plans for other budgets."),
    verify: bool = typer.Option(False, "--verify", help="Run the plan. If its peak is off by over 2%, plan again."),
) -> None:
    """Choose the policy that trains a model fastest within a memory budget.

    Exits with 1 if --verify finds the plan over the budget.
    """
    from recompute.estimation.adapters import Adapters
    from recompute.estimation.gpus import read_gpu
    from recompute.planning.plan_command import PlanRequest

    training: dict[str, Any] = {"dtype": dtype, "device": device, "optimizer": optimizer, "seq_len": seq_len}
    training |= {"batch_size": batch_size, "sharding": sharding, "devices": devices, "microbatches": microbatches}
    files: dict[str, Any] = {"profile": profile, "save_profile": save_profile, "out": out, "overwrite": overwrite}
    request = PlanRequest(
        budget=budget,
        model=model,
        gpu=read_gpu(gpu, memory=gpu_memory, tflops=gpu_tflops, bandwidth=gpu_bandwidth),
        allowed=tuple(allow or ()) or None,
        microbatches_in_flight=microbatches_in_flight,
        adapters=Adapters(lora, lora_targets, base).read(),
        frontier=frontier,
        verify=verify,
        **files,
        **training,
    ).checked()
    with parts.progress_told() as tell:
        found = request.run(tell)
    typer.echo(request.text(found, as_json=as_json))
    for path in request.write(found):
        typer.echo(f"written: {path}", err=True)
    raise typer.Exit(1 if found.is_over_budget else 0)


def _load_policy(policy: str, model: str) -> Policy:
    """The policy. It and the model's name are checked before anything heavy is imported."""
    from recompute.estimation.check_paths import check_source
    from recompute.policy.loading import load_policy

    rules = load_policy(policy)
    check_source(model)
    return rules


@app.command()
def policies(
    name: str | None = typer.Argument(None, help="The preset to print."),
) -> None:
    """List the presets, or print one."""
    from recompute.policy.loading import load_policy, preset_names, preset_path

    if name is not None:
        typer.echo(preset_path(name).read_text(encoding="utf-8"), nl=False)
        return
    table = Table.grid(padding=(0, 2))
    for preset in preset_names():
        table.add_row(preset, load_policy(preset).description)
    Console(markup=False, highlight=False).print(table)
