"""Tables of an ablation's results, as `results.json` holds them, and all files that are made of these."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from tabulate import tabulate

from recompute.ablation import ablation_plots
from recompute.ablation.html_report import Section, page
from recompute.ablation.peers import BASELINE
from recompute.ablation.row_places import AXES, place, place_of, varied
from recompute.estimation.check_paths import names_factory
from recompute.files import write_file
from recompute.units import humanize

RowDict = Mapping[str, Any]
"""One of the ``rows`` of `results.json`; `recompute.ablation.trials.AblationRow` documents the keys.

Results from before a key was known lack it."""

_NOTHING = "-"
_TITLES = {"model": "model", "batch_size": "batch", "dtype": "dtype", "sequence_length": "sequence"}
_NOT_IN_CSV = ("losses", "timings")


FILES = ("results.md", "results.csv", *ablation_plots.NAMES, "report.html")
"""What ``write`` may write."""


def write(results: Mapping[str, Any], out: Path) -> list[str]:
    """Write all that is made of ``results.json`` into the folder `out`. Returns the names of the files.

    These are ``results.md``, ``results.csv``, plots (``results.png`` and others, as far as there are numbers for them)
    and ``report.html``, a page with all of it. Raises ``WriteError``.
    """
    write_file(out / "results.md", markdown(results))
    write_file(out / "results.csv", _csv(results["rows"]))
    drawn = ablation_plots.pictures(results["rows"])
    for name in ablation_plots.NAMES:
        if name in drawn:
            write_file(out / name, drawn[name])
        else:
            (out / name).unlink(missing_ok=True)  # of an earlier run
    sections = [Section(title, cells) for title, cells in tables(results["rows"])]
    text = page(results, describe(results), failures(results), sections, drawn)
    write_file(out / "report.html", text)
    return ["results.md", "results.csv", *drawn, "report.html"]


def _csv(rows: Sequence[RowDict]) -> str:
    """One line for each row; a pair of quartiles takes two columns."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, columns)
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: RowDict) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key.endswith("_quartiles"):
            names = (key.replace("quartiles", "first_quartile"), key.replace("quartiles", "third_quartile"))
            found |= zip(names, value or (None, None), strict=True)
        elif key not in _NOT_IN_CSV:
            found[key] = value
    return found


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
    return "\n".join([block, *(line(row, varied(rows)) for row in rows if _problem(row))])


def markdown(results: Mapping[str, Any]) -> str:
    """The rows as GitHub tables, and below them what failed, what was run, where, and by which command."""
    (_, first), *others = tables(results["rows"])
    blocks = [_github(first)]
    if problems := failures(results):
        blocks.append("\n".join(f"- {problem}" for problem in problems))
    blocks += [f"{title}:\n\n{_github(cells)}" for title, cells in others]
    blocks += [describe(results), f"`{results['command']}`"]
    return "\n\n".join(blocks) + "\n"


def _github(cells: Sequence[Sequence[str]]) -> str:
    align = ["left", *["right"] * (len(cells[0]) - 1)]
    return tabulate(cells, "firstrow", "github", colalign=align, disable_numparse=True)


def failures(results: Mapping[str, Any]) -> list[str]:
    """One line for each row that failed or does not match the baseline, and one if rows are missing."""
    axes = varied(results["rows"])
    lines = [line(row, axes) for row in results["rows"] if _problem(row)]
    return lines if results["complete"] else [*lines, "interrupted: the rows still to come are missing"]


def line(row: RowDict, axes: Iterable[str] = ()) -> str:
    """A row in one line: what it measured, or what is wrong with it. axes: those on which it differs from others."""
    text = _problem(row)
    if text is None:
        held, peak = humanize(row["activation_bytes_held"]), humanize(row["peak_bytes"])
        text = f"{held} held, {peak} peak, {_milliseconds(row['step_seconds'])} ms a step"
        if (longest := row.get("longest_sequence")) is not None:
            text += f", longest sequence {longest:,}"
    return f"{row['policy']}{place_of(row, axes)}: {text}"


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
    repeats = f", each {config['repeats']} times" if config.get("repeats", 1) > 1 else ""
    models = config.get("models") or {}
    if models and all(isinstance(source, str) and names_factory(source) for source in models.values()):
        return f"{describe_models(config)}; {_listed(config, 'dtype')}, {config['steps']} steps{repeats}. {where}"
    return (
        f"{describe_models(config)}; batch {_listed(config, 'batch_size')}, "
        f"sequence {', '.join(map(str, config['sequence_lengths']))}, {_listed(config, 'dtype')}, {config['steps']} "
        f"steps{of_layers} on bytes of: {results['text']['source']}{repeats}. {where}"
    )


def describe_models(config: Mapping[str, Any]) -> str:
    """What a configuration trains: each model by its name and fields, or the shape of its Llama."""
    if models := config.get("models"):
        return "; ".join(f"{name}: {_model(source)}" for name, source in models.items())
    return _model(config["model"])


def _model(source: Any) -> str:
    if isinstance(source, str):
        return source
    if "model_type" in source:
        others = ", ".join(f"{key} {value}" for key, value in source.items() if key != "model_type")
        return f"{source['model_type']} with {others}" if others else source["model_type"]
    return (
        f"Llama with {source['layers']} layers, hidden size {source['hidden_size']}, intermediate size "
        f"{source['intermediate_size']}, {source['heads']} heads and {source['kv_heads']} kv heads"
    )


def _listed(config: Mapping[str, Any], key: str) -> str:
    return ", ".join(map(str, config.get(f"{key}s") or [config[key]]))


Cell = Callable[[RowDict, RowDict], str]
"""The text of a cell, from its row and the baseline's of the same comparison."""


def tables(rows: Sequence[RowDict]) -> list[tuple[str, list[list[str]]]]:
    """Titles and tables: what every row has; then what times and memory are made of, where that was measured."""
    found = [("Memory, time, losses and gradients", _cells(rows))]
    if any(row.get("backward_seconds") is not None for row in rows):
        times = _without(_TIMES, {"of that regenerating": "regenerating_seconds"}, rows)
        found.append(("Milliseconds of a step, by part: the median, and both quartiles", _filled(rows, times)))
    if any(row.get("parameter_bytes") is not None for row in rows):
        found.append(("Bytes between forward and backward, by what they are", _filled(rows, _MEMORY)))
    return found


def _cells(rows: Sequence[RowDict]) -> list[list[str]]:
    """The names of the columns, then the texts of each row."""
    columns: dict[str, Cell] = {
        "held after forward": _measure("activation_bytes_held", humanize),
        "peak": _measure("peak_bytes", humanize),
        "ms a step": _measure("step_seconds", _milliseconds),
        "CPU ms a forward": _measure("forward_cpu_seconds", _milliseconds),
        "longest sequence": _measure("longest_sequence", lambda length: f"{length:,}"),
        "losses": _losses,
        "gradients": _gradients,
    }
    keys = {"CPU ms a forward": "forward_cpu_seconds", "longest sequence": "longest_sequence"}
    return _filled(rows, _without(columns, keys, rows))


def _without(columns: Mapping[str, Cell], keys: Mapping[str, str], rows: Sequence[RowDict]) -> dict[str, Cell]:
    """The columns but for those of ``keys`` for which no row has a number. keys: that of the number, by column."""
    unknown = {column for column, key in keys.items() if all(row.get(key) is None for row in rows)}
    return {column: cell for column, cell in columns.items() if column not in unknown}


def _filled(rows: Sequence[RowDict], columns: Mapping[str, Cell]) -> list[list[str]]:
    """The table of these columns, behind those that tell the rows apart."""
    axes = varied(rows)
    named: dict[str, Cell] = {"policy": lambda row, _: row["policy"]}
    named |= {_TITLES[axis]: _axis(axis) for axis in AXES if axis in axes}
    columns = {**named, **columns}
    baselines = {place(row): row for row in rows if row["policy"] == BASELINE}
    lines = [[cell(row, baselines.get(place(row), _NO_ROW)) for cell in columns.values()] for row in rows]
    return [list(columns), *lines]


_NO_ROW: RowDict = {"policy": BASELINE}


def _axis(key: str) -> Cell:
    return lambda row, _: _NOTHING if row.get(key) is None else str(row[key])


def _measure(key: str, show: Callable[[Any], str]) -> Cell:
    def cell(row: RowDict, baseline: RowDict) -> str:
        if (value := row.get(key)) is None:
            return _NOTHING
        if row is baseline or not baseline.get(key):
            return show(value)
        return f"{show(value)} ({value / baseline[key]:.2f}x)"

    return cell


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _with_quartiles(key: str) -> Cell:
    def cell(row: RowDict, _: RowDict) -> str:
        if row.get(key) is None:
            return _NOTHING
        first, third = map(_milliseconds, row[f"{key}_quartiles"])
        return f"{_milliseconds(row[key])} ({first} to {third})"

    return cell


def _plain(key: str, show: Callable[[Any], str]) -> Cell:
    return lambda row, _: _NOTHING if row.get(key) is None else show(row[key])


_TIMES: Mapping[str, Cell] = {
    "step": _with_quartiles("step_seconds"),
    "forward": _with_quartiles("forward_seconds"),
    "backward": _with_quartiles("backward_seconds"),
    "of that regenerating": _with_quartiles("regenerating_seconds"),
    "added to backward": _plain("backward_added_seconds", lambda seconds: f"{seconds * 1e3:+.1f}"),
    "optimizer": _with_quartiles("optimizer_seconds"),
}
_MEMORY: Mapping[str, Cell] = {
    "parameters": _plain("parameter_bytes", humanize),
    "gradients": _plain("gradient_bytes", humanize),
    "optimizer": _plain("optimizer_bytes", humanize),
    "activations": _plain("activation_bytes_held", humanize),
    "of these by head and loss": _plain("logits_bytes_held", humanize),
}


def _losses(row: RowDict, baseline: RowDict) -> str:
    if row["losses_match"] is None:
        return _NOTHING
    if row["losses_match"]:
        return "✓ bitwise"
    return f"{'✗ ' if row['exact'] else ''}{row['loss_error']:.1e}"


def _gradients(row: RowDict, baseline: RowDict) -> str:
    if row["grad_error"] is None:
        return _NOTHING
    error = _grad_error(row)
    if row["grads_match"] is None:
        return f"{error:.1e}"
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
