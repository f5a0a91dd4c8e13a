"""The command line: `recompute ablate` and `recompute policies`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from typer.core import TyperGroup

from recompute.errors import RecomputeError

_INTERRUPTED = 130  # what a shell reports of a program that Ctrl-C ended
_UNLIMITED = 1000  # columns, where no terminal wraps the table


class _Commands(TyperGroup):
    """Every command tells a mistake of the user's in one message, without a traceback, and exits with 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RecomputeError as error:
            typer.echo(f"recompute: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Activation recomputation for PyTorch: hooks and Triton kernels, chosen by a policy.",
)


class Device(str, Enum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@app.command()
def ablate(
    config: Annotated[
        Path | None,
        typer.Argument(help="YAML file; see examples/ablation. Default: by whether there is a GPU."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Preset or policy file, instead of the config's. Repeatable.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="torch-checkpoint or torch-selective, instead of the config's. Repeatable."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this file's bytes.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)] = Path("results/ablation"),
    device: Annotated[Device | None, typer.Option(help="Where to train.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps a policy.", min=1)] = None,
) -> None:
    """Train one model under each of several policies, and compare memory, time, losses and gradients.

    Writes results.json, results.md and results.png. Exits with 1 if a policy failed or does not match.
    """
    from recompute import ablation, report
    from recompute.policy.document import load_document, validate

    where = device.value if device else "auto"
    base = (
        load_document(ablation.AblationConfig, config, kind="configuration")
        if config
        else ablation.default_config(where)
    )
    given = {"policies": policy, "peers": peer, "text": text, "device": device and where, "steps": steps}
    changes = {key: value for key, value in given.items() if value}
    settings = validate(ablation.AblationConfig, {**base.model_dump(), **changes}, label="command line")

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.13's profiler else prints each start and stop
    command = shlex.join(["recompute", *sys.argv[1:]])
    stderr = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    interrupted = False
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        try:
            for row in ablation.run(settings, out, command=command, progress=show):
                stderr.print(report.line(asdict(row)))
        except KeyboardInterrupt:
            interrupted = True

    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    report.write(results, out)
    Console(width=None if sys.stdout.isatty() else _UNLIMITED).print(report.table(results["rows"]))
    typer.echo(f"results.json, results.md and results.png are in {out}")
    problems = report.failures(results)
    for problem in problems:
        typer.echo(problem, err=True)
    raise typer.Exit(_INTERRUPTED if interrupted else 1 if problems else 0)


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
