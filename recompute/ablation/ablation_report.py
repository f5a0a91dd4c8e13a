"""Tables and a plot of an ablation's results, as `results.json` holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import BboxBase
from rich.table import Table
from tabulate import tabulate

from recompute.units import humanize

RowDict = Mapping[str, Any]
"""One of the ``rows`` of `results.json`; `recompute.ablation.trials.Row` documents the keys."""

_BASELINE = "none"
_NOTHING = "-"


def write(results: Mapping[str, Any], out: Path) -> None:
    """Write ``results.md`` and ``results.png`` into the folder `out`, from what ``results.json`` holds."""
    (out / "results.md").write_text(markdown(results), encoding="utf-8")
    plot(results["rows"]).savefig(out / "results.png")


def table(rows: Sequence[RowDict]) -> Table:
    """The rows for a terminal."""
    columns, *lines = _cells(rows)
    result = Table()
    for column in columns:
        first = column == columns[0]
        result.add_column(column, justify="left" if first else "right", no_wrap=first)
    for line in lines:
        result.add_row(*line)
    return result


def text(rows: Sequence[RowDict]) -> str:
    """The rows as plain text, with what failed below."""
    columns, *lines = _cells(rows)
    align = ["left", *["right"] * (len(columns) - 1)]
    block = tabulate(lines, columns, colalign=align, disable_numparse=True)
    return "\n".join([block, *(line(row) for row in rows if _problem(row))])


def markdown(results: Mapping[str, Any]) -> str:
    """The rows as a GitHub table, and below it what failed, what was run, where, and by which command."""
    columns, *lines = _cells(results["rows"])
    align = ["left", *["right"] * (len(columns) - 1)]
    blocks = [tabulate([columns, *lines], "firstrow", "github", colalign=align, disable_numparse=True)]
    if problems := failures(results):
        blocks.append("\n".join(f"- {problem}" for problem in problems))
    blocks += [describe(results), f"`{results['command']}`"]
    return "\n\n".join(blocks) + "\n"


def failures(results: Mapping[str, Any]) -> list[str]:
    """One line for each row that failed or does not match the baseline, and one if rows are missing."""
    lines = [line(row) for row in results["rows"] if _problem(row)]
    return lines if results["complete"] else [*lines, "interrupted: the rows still to come are missing"]


def line(row: RowDict) -> str:
    """A row in one line: what it measured, or what is wrong with it."""
    text = _problem(row)
    if text is None:
        held, peak = humanize(row["activation_bytes_held"]), humanize(row["peak_bytes"])
        text = f"{held} held, {peak} peak, {_milliseconds(row['step_seconds'])} ms a step"
    length = row["sequence_length"]
    return f"{row['policy']}{'' if length is None else f', sequence {length}'}: {text}"


def describe(results: Mapping[str, Any]) -> str:
    """What was trained, and on what."""
    config, machine = results["config"], results["machine"]
    hardware = machine["gpu"] or f"{machine['cpu']} ({machine['threads']} threads)"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}"
    where = f"{hardware}, {versions}, {machine['date'][:10]}."
    shape = config["model"]
    if isinstance(shape, str):  # of the caller's own
        return f"{shape}; {config['steps']} steps. {where}"
    of_layers = " of all but head, loss and optimizer" if config.get("step") == "layers" else ""
    return (
        f"Llama with {shape['layers']} layers, hidden size {shape['hidden_size']}, intermediate size "
        f"{shape['intermediate_size']}, {shape['heads']} heads and {shape['kv_heads']} kv heads; "
        f"batch {config['batch_size']}, sequence {', '.join(map(str, config['sequence_lengths']))}, "
        f"{config['dtype']}, {config['steps']} steps{of_layers} on bytes of: {results['text']['source']}. {where}"
    )


def plot(rows: Sequence[RowDict]) -> Figure:
    """Memory against step time, with a point for each row that did not fail.

    A point is a bar from what is held after forward (open marker) up to the peak (filled); the baseline's are
    square. A color is a sequence length.
    """
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    measured = [row for row in rows if row["error"] is None]
    large = any(row["peak_bytes"] >= 2**30 for row in measured)
    unit, unit_nbytes = ("GiB", 2**30) if large else ("MiB", 2**20)
    axes = figure.add_subplot(xlabel="milliseconds a step", ylabel=f"{unit} above static memory")
    lengths = sorted({row["sequence_length"] for row in measured})
    labels = []
    for row in measured:
        marker = "s" if row["policy"] == _BASELINE else "o"
        color = f"C{lengths.index(row['sequence_length'])}"
        held, peak = row["activation_bytes_held"] / unit_nbytes, row["peak_bytes"] / unit_nbytes
        milliseconds = row["step_seconds"] * 1e3
        axes.plot([milliseconds, milliseconds], [held, peak], color=color, alpha=0.5)
        axes.plot(milliseconds, held, marker, color=color, markerfacecolor="white")
        axes.plot(milliseconds, peak, marker, color=color)
        labels.append(axes.annotate(row["policy"], (milliseconds, peak), (0, 0), textcoords="offset points"))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    legend = axes.legend(handles=_legend(lengths), loc="best")
    canvas.draw()
    _spread(labels, axes.bbox, [artist.get_window_extent() for artist in (legend, *axes.lines)])
    return figure


def _legend(lengths: Sequence[int]) -> list[Line2D]:
    kinds = [("peak", "black"), ("held after forward", "white")]
    markers = [
        Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor=face, label=label)
        for label, face in kinds
    ]
    named = [(i, length) for i, length in enumerate(lengths) if length is not None]
    return markers + [Line2D([], [], color=f"C{i}", label=f"sequence {length}") for i, length in named]


def _spread(labels: Sequence[Annotation], frame: BboxBase, taken: list[BboxBase]) -> None:
    """Move each label to the nearest place beside its point that is in the frame and not taken by anything."""
    heights = sorted(range(-108, 109, 9), key=abs)
    for label in labels:
        for dy, side in product(heights, (1, -1)):
            label.set(position=(8 * side, dy), va="center", ha="left" if side > 0 else "right")
            box = label.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 and box.y1 < frame.y1
            if inside and not box.count_overlaps(taken):
                break
        taken.append(label.get_window_extent())


Cell = Callable[[RowDict, RowDict], str]
"""The text of a cell, from its row and the baseline's at the same sequence length."""


def _cells(rows: Sequence[RowDict]) -> list[list[str]]:
    """The names of the columns, then the texts of each row."""
    columns: dict[str, Cell] = {
        "policy": lambda row, _: row["policy"],
        "sequence": lambda row, _: str(row["sequence_length"]),
        "held after forward": _measure("activation_bytes_held", humanize),
        "peak": _measure("peak_bytes", humanize),
        "ms a step": _measure("step_seconds", _milliseconds),
        "CPU ms a forward": _measure("forward_cpu_seconds", _milliseconds),
        "losses": _losses,
        "gradients": _gradients,
    }
    if len({row["sequence_length"] for row in rows}) < 2:
        del columns["sequence"]
    if all(row["forward_cpu_seconds"] is None for row in rows):
        del columns["CPU ms a forward"]
    baselines = {row["sequence_length"]: row for row in rows if row["policy"] == _BASELINE}
    lines = [[cell(row, baselines[row["sequence_length"]]) for cell in columns.values()] for row in rows]
    return [list(columns), *lines]


def _measure(key: str, show: Callable[[Any], str]) -> Cell:
    def cell(row: RowDict, baseline: RowDict) -> str:
        if row[key] is None:
            return _NOTHING
        if row is baseline or not baseline[key]:
            return show(row[key])
        return f"{show(row[key])} ({row[key] / baseline[key]:.2f}x)"

    return cell


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _losses(row: RowDict, baseline: RowDict) -> str:
    if row["losses_match"] is None:
        return _NOTHING
    if row["losses_match"]:
        return "✓ bitwise"
    return f"{'✗ ' if row['exact'] else ''}{row['loss_error']:.1e}"


def _gradients(row: RowDict, baseline: RowDict) -> str:
    if row["grads_match"] is None:
        return _NOTHING
    error = _grad_error(row)
    return f"{'✓' if row['grads_match'] else '✗'} {f'{error:.1e}' if error else 'bitwise'}"


def _grad_error(row: RowDict) -> float:
    """The error that `grads_match` judges."""
    return max(row["grad_error"], row["grad_error_last"]) if row["exact"] else row["grad_error"]


def _problem(row: RowDict) -> str | None:
    if row["error"] is not None:
        return row["error"].partition("\n")[0]
    if row["grads_match"] is False:
        return f"relative error {_grad_error(row):.1e} of the gradients, above {row['grad_tolerance']:.1e}"
    if row["exact"] and row["losses_match"] is False:
        return f"relative error {row['loss_error']:.1e} of the losses, above 0"
    return None
