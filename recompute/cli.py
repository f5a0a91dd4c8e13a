"""The command line: `recompute ablate`, `explain`, `estimate`, `plan`, `verify` and `policies`."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperGroup

from recompute.errors import (
    GradientMismatch,
    NoEffectError,
    PolicyError,
    PolicyWarning,
    RecomputeError,
    RegenerationError,
)
from recompute.files import user_path

if TYPE_CHECKING:
    from recompute.policy.rules import Policy

_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended


class _Commands(TyperGroup):
    """Every command tells a mistake of the user's in one message, without a traceback, and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        os.environ.setdefault(
            "KINETO_LOG_LEVEL", "6"
        )  # the profiler prints its starts and stops; torch reads this once
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
    help="Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy.",
)


def _print_version(asked: bool) -> None:
    if asked:
        from recompute import __version__

        typer.echo(f"recompute {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class Device(str, Enum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class DType(str, Enum):
    """What to calculate in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def _dtype(name: str) -> DType:
    from recompute.estimation.static_memory import read_option

    try:
        return DType(
            read_option("dtype", name.value if isinstance(name, DType) else name, [each.value for each in DType])
        )
    except RecomputeError as error:
        raise typer.BadParameter(str(error)) from error


_MODEL_HELP = (
    "An ablation's .yaml (its model section), a config.json or its folder, a name Hugging Face knows, or "
    "package.module:factory, a function that returns a model and a batch."
)
_DTYPES = "float32|bfloat16|float16"


def _user_path(path: Path | None) -> Path | None:
    return None if path is None else user_path(path)


PolicyArgument = Annotated[str, typer.Argument(help="Preset or policy file.")]
ModelOption = Annotated[str, typer.Option(help=_MODEL_HELP)]
LengthOption = Annotated[int, typer.Option(help="Tokens of a sequence. A factory has its own.", min=2)]
BatchOption = Annotated[int, typer.Option(help="Sequences or images. A factory has its own.", min=1)]
DTypeOption = Annotated[DType, typer.Option(help="The model's dtype.", parser=_dtype, metavar=_DTYPES)]
TrainingDevice = Annotated[Device, typer.Option(help="Where to train.")]
ShardingOption = Annotated[str, typer.Option(help="none, ddp, zero1, zero2, zero3 or fsdp2.")]
DevicesOption = Annotated[int, typer.Option(help="That share the model; the batch is one device's.", min=1)]
MicrobatchesOption = Annotated[int, typer.Option(help="Of a step; the batch is one of them.", min=1)]
InFlightOption = Annotated[
    int, typer.Option(help="Of a pipeline's stage: how many are between forward and backward at once.", min=1)
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def ablate(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML file; see examples/ablation. Default: by whether there is a GPU.", callback=_user_path
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Preset or policy file, instead of the config's. Repeatable.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="torch-checkpoint, liger …, instead of the config's. Repeatable."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this file's bytes.", callback=_user_path)] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False, callback=_user_path)] = Path(
        "results/ablation"
    ),
    device: Annotated[Device | None, typer.Option(help="Where to train.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps a policy.", min=1)] = None,
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory, which returns a model and a batch, instead of a Llama and a text."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results in the folder; measure again what failed.")
    ] = False,
    overwrite: OverwriteOption = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Train nothing: say what changed between two results.json, or their folders."),
    ] = None,
) -> None:
    """Train models under each of several policies, and compare memory, time, losses and gradients.

    Writes results.json, and tables, plots and a page of it. Exits with 1 if a policy failed or does not match.
    """
    if compare is not None:
        from recompute.ablation.results import compare as compare_results

        typer.echo(compare_results(*compare))
        return

    if config is not None and not config.is_file():  # told before torch is imported
        raise PolicyError(f"{config}: cannot be read as a configuration file: there is no such file")

    from recompute.ablation.ablate_command import AblateRequest

    given: dict[str, Any] = {"policies": policy, "peers": peer, "device": device and device.value, "steps": steps}
    request = AblateRequest(config=config, text=text, model=model, out=out, resume=resume, overwrite=overwrite, **given)
    stderr = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        cells = progress.add_task("", total=None, visible=False)
        task = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        def show_left(done: int, total: int, seconds: float | None) -> None:
            left = f", about {_duration(seconds)} left" if seconds else ""
            progress.update(
                cells, description=f"{done} of {total} done{left}", completed=done, total=total, visible=True
            )

        def tell(line: str) -> None:
            left = "" if stderr.is_terminal else progress.tasks[cells].description  # where no bar can show it
            stderr.print(f"{line} ({left})" if left else line)

        command = shlex.join(["recompute", *sys.argv[1:]])
        outcome = request.run(command=command, progress=show, tell=tell, tell_left=show_left)
    typer.echo(outcome.table)
    if outcome.files:
        typer.echo(f"{_listed(outcome.files)} {'is' if len(outcome.files) == 1 else 'are'} in {out}")
    for problem in outcome.problems:
        typer.echo(problem, err=True)
    raise typer.Exit(_INTERRUPTED if outcome.is_interrupted else 1 if outcome.problems else 0)


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _duration(seconds: float) -> str:
    """Roughly, in one unit: what is estimated has no more digits to show."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@app.command()
def explain(
    policy: PolicyArgument,
    model: ModelOption,
    seq_len: LengthOption = 4096,
    batch_size: BatchOption = 1,
    dtype: DTypeOption = DType.bfloat16,
    device: Annotated[
        Device, typer.Option(help="Whose attention and kernels to explain. No GPU is needed for cuda.")
    ] = Device.auto,
    wide: Annotated[bool, typer.Option("--wide", help="Every byte, in lines as long as that takes.")] = False,
) -> None:
    """Print what a policy keeps and drops of a model, tensor by tensor, and why.

    Takes no memory for the model, and neither its weights nor a GPU.
    """
    rules = _load_policy(policy, model)

    from recompute.attach.explain import WIDTH
    from recompute.diagnostics.explain_command import explain_policy

    width = max(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDTH
    asked = {"seq_len": seq_len, "batch_size": batch_size, "dtype": dtype.value, "device": device.value}
    typer.echo(explain_policy(rules, model, wide=wide, width=width, **asked))


@app.command()
def estimate(
    model: Annotated[str, typer.Option("--model", "--config", help=_MODEL_HELP)],
    seq_len: LengthOption = 4096,
    batch_size: BatchOption = 1,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, bfloat16-autocast, bfloat16-mixed (float32 master weights) or float32.")
    ] = "bfloat16",
    optimizer: Annotated[
        str, typer.Option(help="adamw (foreach), adamw-fused, adamw-loop, adamw-8bit, sgd or sgd-momentum.")
    ] = "adamw",
    sharding: ShardingOption = "none",
    devices: DevicesOption = 1,
    gpu: Annotated[str | None, typer.Option(help="Say whether it fits this GPU (H200, …), and what would.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="The GPU's memory instead: 24GiB.")] = None,
    policy: Annotated[str | None, typer.Option(help="Preset or policy file.")] = None,
    loss: Annotated[str, typer.Option(help="full: with all logits; chunked: without them.")] = "full",
    microbatches: MicrobatchesOption = 1,
    microbatches_in_flight: InFlightOption = 1,
    as_json: JsonOption = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="A table, and a plot, of 1, 2, 4 times the batch by 1/2, 1, 2, 4 the length."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot.", file_okay=False, callback=_user_path)] = Path(
        "results/estimate"
    ),
    overwrite: OverwriteOption = False,
) -> None:
    """Print what a training step will take: parameters, gradients, optimizer, activations, and the peak.

    Counts on a CUDA device; takes neither a GPU nor memory for the model, nor its weights.

    With --gpu or --gpu-memory it exits with 0 if the step fits, and with 1 if it does not; with 2 for a mistake.
    """
    from recompute.estimation.capacity import read_capacity
    from recompute.estimation.estimate_command import EstimateRequest
    from recompute.estimation.estimate_options import EstimateOptions

    options = EstimateOptions(dtype, optimizer, sharding, devices, loss, microbatches, microbatches_in_flight)
    fitted = read_capacity(gpu, gpu_memory)
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    request = EstimateRequest.checked(
        model=model, options=options, policy=policy, device=fitted, sweep=sweep, out=out, overwrite=overwrite, **sizes
    )
    with _progress() as tell:
        answer = request.run(tell)
    typer.echo(answer.to_json() if as_json else answer.text)
    if answer.fit is not None and not answer.fit.fits:
        raise typer.Exit(1)


@app.command()
def verify(
    policy: PolicyArgument,
    model: ModelOption,
    seq_len: LengthOption = 256,
    batch_size: BatchOption = 1,
    dtype: DTypeOption = DType.float32,
    device: TrainingDevice = Device.auto,
) -> None:
    """Check that a model with random weights has the same gradients with a policy as without it.

    Exits with 1 if it has not, or if the policy's rules drop nothing, so that there is nothing to check.
    """
    rules = _load_policy(policy, model)

    from recompute.diagnostics.verify_command import verify_policy

    asked = {"seq_len": seq_len, "batch_size": batch_size, "dtype": dtype.value, "device": device.value}
    try:
        for found in verify_policy(rules, model, **asked):
            typer.echo(found)
    except (GradientMismatch, NoEffectError, RegenerationError) as error:
        typer.echo(f"recompute: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def plan(
    budget: Annotated[str, typer.Option(help="Of the whole step: 40GiB, 40GB, or 80% of the device.")],
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="What --save-profile wrote, instead of measuring a model again.", callback=_user_path),
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Write what was measured to this JSON file.", callback=_user_path)
    ] = None,
    seq_len: LengthOption = 4096,
    batch_size: BatchOption = 1,
    dtype: DTypeOption = DType.bfloat16,
    device: Annotated[Device, typer.Option(help="Where to measure.")] = Device.auto,
    gpu: Annotated[
        str | None,
        typer.Option(help="Measure nothing: calculate for this GPU (H200, rtx4090, …), which need not be here."),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of a GPU by its data sheet: 24GiB.")] = None,
    gpu_tflops: Annotated[
        float | None, typer.Option(help="Of a GPU by its data sheet, dense, in the model's dtype: 165.")
    ] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(help="Of a GPU by its data sheet: 1008GB/s.")] = None,
    sharding: ShardingOption = "none",
    devices: DevicesOption = 1,
    microbatches: MicrobatchesOption = 1,
    microbatches_in_flight: InFlightOption = 1,
    optimizer: Annotated[
        str, typer.Option(help="adamw (torch's own choice), adamw-fused, adamw-loop, sgd or sgd-momentum.")
    ] = "adamw",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="keep, hook, kernel, checkpoint, offload or compress: only what is listed may be chosen. compress is "
            "not exact, and chosen only if listed. Repeatable."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the policy to this YAML file.", callback=_user_path)] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Show what other budgets give; with --out, draw it beside it as a PNG.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the plan; if its peak is off by more than 2%, plan again.")
    ] = False,
) -> None:
    """Choose the policy with which a model trains fastest within a budget of memory.

    Exits with 1 if --verify finds the plan over the budget.
    """
    from recompute.estimation.gpus import read_gpu
    from recompute.planning.plan_command import PlanRequest

    training: dict[str, Any] = {"dtype": dtype.value, "device": device.value, "optimizer": optimizer}
    training |= {"seq_len": seq_len, "batch_size": batch_size, "sharding": sharding, "devices": devices}
    training |= {"microbatches": microbatches, "microbatches_in_flight": microbatches_in_flight}
    files: dict[str, Any] = {"profile": profile, "save_profile": save_profile, "out": out, "overwrite": overwrite}
    request = PlanRequest(
        budget=budget,
        model=model,
        gpu=read_gpu(gpu, memory=gpu_memory, tflops=gpu_tflops, bandwidth=gpu_bandwidth),
        allowed=tuple(allow) if allow else None,
        frontier=frontier,
        verify=verify,
        **files,
        **training,
    ).checked()
    with _progress() as tell:
        found = request.run(tell)
    typer.echo(request.text(found, as_json=as_json))
    for path in request.write(found):
        typer.echo(f"written: {path}", err=True)
    raise typer.Exit(1 if found.is_over_budget else 0)


def _load_policy(policy: str, model: str) -> Policy:
    """The policy; with the model's name it is checked before anything heavy is imported: mistakes are told at once."""
    from recompute.estimation.check_paths import check_source
    from recompute.policy.loading import load_policy

    rules = load_policy(policy)
    check_source(model)
    return rules


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Tells on stderr what is done, how far it is and of how much (0: not known): a bar, or lines where none can be."""
    stderr = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if not stderr.is_terminal:
        yield _Lines()
        return
    with Progress(console=stderr, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total or None)


class _Lines:
    """A line for what begins, and for each tenth of what has a known end."""

    def __init__(self) -> None:
        self._told: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if (what, tenth) != self._told:
            self._told = what, tenth
            typer.echo(f"recompute: {what}: {done} of {total}" if total else f"recompute: {what}", err=True)


@app.command()
def policies(
    name: Annotated[str | None, typer.Argument(help="Print this preset's file, to read or to start from.")] = None,
) -> None:
    """List the policies that come with this package, or print one."""
    from recompute.policy.loading import load_policy, preset_names, preset_path

    if name is not None:
        typer.echo(preset_path(name).read_text(encoding="utf-8"), nl=False)
        return
    table = Table.grid(padding=(0, 2))
    for preset in preset_names():
        table.add_row(preset, load_policy(preset).description)
    Console(markup=False, highlight=False).print(table)
