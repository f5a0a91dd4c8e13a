"""What commands share: options with their help texts, and how they tell how far they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from recompute.errors import RecomputeError
from recompute.files import user_path

Device = Literal["auto", "cpu", "cuda"]


def _dtype(name: str) -> str:
    from recompute.estimation.static_memory import read_option

    try:
        return read_option("dtype", name, _DTYPES)
    except RecomputeError as error:
        raise typer.BadParameter(str(error)) from error


MODEL_HELP = (
    "A config.json or its folder, a name on Hugging Face, an ablation's .yaml, or package.module:factory, a function "
    "that returns a model and a batch."
)
DTYPE_HELP = "bfloat16, bfloat16-autocast, bfloat16-mixed (float32 master weights), float32."
OPTIMIZER_HELP = "adamw (foreach), adamw-fused, adamw-loop, adamw-8bit, sgd, sgd-momentum."
ALLOW_HELP = (
    "Choose only among these: keep, hook, kernel, checkpoint, offload, compress. By default all but compress, which is "
    "not exact. Repeatable."
)
_DTYPES = ("float32", "bfloat16", "float16")


def own_path(path: Path | None) -> Path | None:
    return None if path is None else user_path(path)


PolicyArgument = Annotated[str, typer.Argument(help="Preset or policy file.")]
ModelOption = Annotated[str, typer.Option(help=MODEL_HELP)]
LengthOption = Annotated[int, typer.Option(help="Tokens of a sequence. A factory ignores it.", min=2)]
BatchOption = Annotated[int, typer.Option(help="Sequences or images. A factory ignores it.", min=1)]
DTypeOption = Annotated[str, typer.Option(help="The model's dtype.", parser=_dtype, metavar="|".join(_DTYPES))]
ShardingOption = Annotated[str, typer.Option(help="none, ddp, zero1, zero2, zero3 or fsdp2.")]
DevicesOption = Annotated[int, typer.Option(help="Devices that share the model. Each has a batch.", min=1)]
MicrobatchesOption = Annotated[int, typer.Option(help="Batches of one optimizer step.", min=1)]
InFlightOption = Annotated[
    int, typer.Option(help="Batches of a pipeline's stage that are between forward and backward at once.", min=1)
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
LoraOption = Annotated[int | None, typer.Option(help="Train only LoRA adapters, of this rank.", min=1)]
LoraTargetsOption = Annotated[str, typer.Option(help="Modules with adapters: all-linear, or names: q_proj,v_proj.")]
BaseOption = Annotated[
    str, typer.Option(help="Dtype of the frozen base: bf16, int8, nf4, nf4-double (double quantization) or float8.")
]
TflopsOption = Annotated[float | None, typer.Option(help="Its dense TFLOP/s in the model's dtype, such as 165.")]
BandwidthOption = Annotated[str | None, typer.Option(help="Its memory bandwidth, such as 1008GB/s.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def stderr() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def progress_told() -> Iterator[Callable[[str, int, int], None]]:
    """Tells on stderr a task, its progress and its size (0: not known), by a bar, or by lines outside of a terminal."""
    if not stderr().is_terminal:
        yield _Lines()
        return
    with Progress(console=stderr(), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total or None)


class _Lines:
    """A line for each task that begins, and for each tenth of one with a known end."""

    _told: tuple[str, int] | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if (what, tenth) != self._told:
            self._told = what, tenth
            typer.echo(f"recompute: {what}: {done} of {total}" if total else f"recompute: {what}", err=True)
