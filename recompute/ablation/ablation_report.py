"""Tables of an ablation's results, as `results.json` holds them, and all files that are made of these."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from tabulate import tabulate

from recompute.ablation import ablation_plots
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, place, place_of, varied
from recompute.estimation.check_paths import names_factory
from recompute.files import write_file
from recompute.units import humanize

FILES = ("results.md", "results.csv", *ablation_plots.NAMES, "report.html")
"""What ``write`` may write."""

_NOTHING = "-"
_NOT_IN_CSV = ("losses", "timings")
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Policies compared</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border-bottom: 1px solid #ddd; padding: 0.2em 0.8em; white-space: nowrap; }}
pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto; }}
img {{ max-width: 100%; }}
</style>
</head>
<body>
{body}</body>
</html>
"""


def write(results: Mapping[str, Any], out: Path) -> list[str]:
    """Write all that is made of ``results.json`` into the folder `out`. Returns the names of the files.

    These are ``results.md``, ``results.csv``, plots (``results.png`` and others, as far as there are numbers for them)
    and ``report.html``, a page with all of it, which opens without a network. Raises ``WriteError``.
    """
    drawn = ablation_plots.pictures(results["rows"])
    for name in set(ablation_plots.NAMES) - drawn.keys():
        (out / name).unlink(missing_ok=True)  # of an earlier run
    files: dict[str, str | bytes] = {"results.md": markdown(results), "results.csv": _csv(results["rows"])}
    files |= drawn | {"report.html": _page(results, drawn)}
    for name, content in files.items():
        write_file(out / name, content)
    return list(files)


def _page(results: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The Markdown with its plots, the configuration and the machine, as HTML."""
    images = [f"![{name}](data:image/png;base64,{base64.b64encode(data).decode()})" for name, data in pictures.items()]
    details = [f"## {name}\n\n```json\n{json.dumps(results[name], indent=2)}\n```" for name in ("config", "machine")]
    text = "\n\n".join(["# Policies compared", markdown(results), *images, *details])
    return _PAGE.format(body=MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _csv(rows: Sequence[RowDict]) -> str:
    """One line for each row; a pair of quartiles takes two columns."""
    flat: list[dict[str, Any]] = [{} for _ in rows]
    for row, found in zip(rows, flat, strict=True):
        for key, value in row.items():
            if key.endswith("_quartiles"):
                first, third = value or (None, None)
                name = key.removesuffix("quartiles")
                found |= {f"{name}first_quartile": first, f"{name}third_quartile": third}
            elif key not in _NOT_IN_CSV:
                found[key] = value
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for found in flat for key in found)))
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def table(rows: Sequence[RowDict]) -> str:
    """The rows as plain text."""
    return _tabulated(_filled(rows, _FIRST), "simple")


def text(rows: Sequence[RowDict]) -> str:
    """The rows as plain text, with what failed below."""
    axes = varied(rows)
    return "\n".join([table(rows), *(line(row, axes) for row in rows if _problem(row))])


def markdown(results: Mapping[str, Any]) -> str:
    """The rows as GitHub tables, and below them what failed, what was run, where, and by which command."""
    (_, first), *others = tables(results["rows"])
    problems = "\n".join(f"- {problem}" for problem in failures(results))
    blocks = [_tabulated(first, "github"), *([problems] if problems else [])]
    blocks += [f"{title}:\n\n{_tabulated(cells, 'github')}" for title, cells in others]
    blocks += [describe(results), f"`{results['command']}`"]
    return "\n\n".join(blocks) + "\n"


def _tabulated(cells: Sequence[Sequence[str]], style: str) -> str:
    align = ["left", *["right"] * (len(cells[0]) - 1)]
    return str(tabulate(cells, "firstrow", style, colalign=align, disable_numparse=True))


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
    if isinstance(config["model"], str):  # of the caller's own
        return f"{config['model']}; {config['steps']} steps. {where}"
    of_layers = " of all but head, loss and optimizer" if config.get("step") == "layers" else ""
    repeats = f", each {config['repeats']} times" if config.get("repeats", 1) > 1 else ""
    sources = (config.get("models") or {"": config["model"]}).values()
    sizes, bytes_of = "", ""
    if not all(isinstance(source, str) and names_factory(source) for source in sources):
        lengths = ", ".join(map(str, config["sequence_lengths"]))
        sizes = f"batch {_listed(config, 'batch_size')}, sequence {lengths}, "
        bytes_of = f"{of_layers} on bytes of: {results['text']['source']}"
    steps = f"{config['steps']} steps{bytes_of}{repeats}"
    return f"{describe_models(config)}; {sizes}{_listed(config, 'dtype')}, {steps}. {where}"


def describe_models(config: Mapping[str, Any]) -> str:
    """What a configuration trains: each model by its name and fields, or the shape of its Llama."""
    if models := config.get("models"):
        return "; ".join(f"{name}: {_model(source)}" for name, source in models.items())
    return _model(config["model"])


def _model(source: Any) -> str:
    if isinstance(source, str):
        return source
    fields = ", ".join(f"{key} {value}" for key, value in source.items() if key != "model_type")
    return f"{source.get('model_type', 'Llama')} with {fields}"


def _listed(config: Mapping[str, Any], key: str) -> str:
    return ", ".join(map(str, config.get(f"{key}s") or [config[key]]))


def tables(rows: Sequence[RowDict]) -> list[tuple[str, list[list[str]]]]:
    """Titles and tables: what every row has; then what times and memory are made of, where that was measured."""
    found = [("Memory, time, losses and gradients", _filled(rows, _FIRST))]
    if not _is_unknown("backward_seconds", rows):
        found.append(("Milliseconds of a step, by part: the median, and both quartiles", _filled(rows, _TIMES)))
    if not _is_unknown("parameter_bytes", rows):
        found.append(("Bytes between forward and backward, by what they are", _filled(rows, _MEMORY)))
    return found


def _is_unknown(key: str, rows: Sequence[RowDict]) -> bool:
    return all(row.get(key) is None for row in rows)


Cell = Callable[[RowDict, RowDict], str]
"""The text of a cell, from its row and the baseline's of the same comparison."""


def _filled(rows: Sequence[RowDict], columns: Mapping[str, Cell]) -> list[list[str]]:
    """The table of these columns, behind those that tell the rows apart. A column of ``_OPTIONAL`` has a number."""
    axes = varied(rows)
    named = {"policy": _number("policy", str)}
    named |= {axis.partition("_")[0]: _number(axis, str) for axis in AXES if axis in axes}
    shown = named | {
        name: cell for name, cell in columns.items() if not _is_unknown(_OPTIONAL.get(name, "policy"), rows)
    }
    baselines = {place(row): row for row in rows if row["policy"] == BASELINE}
    lines = [[cell(row, baselines.get(place(row), {})) for cell in shown.values()] for row in rows]
    return [list(shown), *lines]


def _number(key: str, show: Callable[[Any], str], *, has_ratio: bool = False, has_quartiles: bool = False) -> Cell:
    def cell(row: RowDict, baseline: RowDict) -> str:
        if (value := row.get(key)) is None:
            return _NOTHING
        if has_quartiles:
            return f"{show(value)} ({' to '.join(map(show, row[f'{key}_quartiles']))})"
        has_other = has_ratio and row is not baseline and baseline.get(key)
        return f"{show(value)} ({value / baseline[key]:.2f}x)" if has_other else show(value)

    return cell


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _losses(row: RowDict, baseline: RowDict) -> str:
    if row["losses_match"] is None:
        return _NOTHING
    return "✓ bitwise" if row["losses_match"] else f"{'✗ ' if row['exact'] else ''}{row['loss_error']:.1e}"


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


_FIRST: Mapping[str, Cell] = {
    "held after forward": _number("activation_bytes_held", humanize, has_ratio=True),
    "peak": _number("peak_bytes", humanize, has_ratio=True),
    "ms a step": _number("step_seconds", _milliseconds, has_ratio=True),
    "CPU ms a forward": _number("forward_cpu_seconds", _milliseconds, has_ratio=True),
    "longest sequence": _number("longest_sequence", "{:,}".format, has_ratio=True),
    "losses": _losses,
    "gradients": _gradients,
}
_TIMES: Mapping[str, Cell] = {
    "step": _number("step_seconds", _milliseconds, has_quartiles=True),
    "forward": _number("forward_seconds", _milliseconds, has_quartiles=True),
    "backward": _number("backward_seconds", _milliseconds, has_quartiles=True),
    "of that regenerating": _number("regenerating_seconds", _milliseconds, has_quartiles=True),
    "added to backward": _number("backward_added_seconds", lambda seconds: f"{seconds * 1e3:+.1f}"),
    "optimizer": _number("optimizer_seconds", _milliseconds, has_quartiles=True),
}
_MEMORY: Mapping[str, Cell] = {
    "parameters": _number("parameter_bytes", humanize),
    "gradients": _number("gradient_bytes", humanize),
    "optimizer": _number("optimizer_bytes", humanize),
    "activations": _number("activation_bytes_held", humanize),
    "of these by head and loss": _number("logits_bytes_held", humanize),
}
_OPTIONAL = {
    "CPU ms a forward": "forward_cpu_seconds",
    "longest sequence": "longest_sequence",
    "of that regenerating": "regenerating_seconds",
}
"""The columns that are left out where no row has a number, and the keys of these."""


def _problem(row: RowDict) -> str | None:
    if row["error"] is not None:
        return str(row["error"]).partition("\n")[0]
    if row["grads_match"] is False:
        return f"relative error {_grad_error(row):.1e} of the gradients, above {row['grad_tolerance']:.1e}"
    if row["exact"] and row["losses_match"] is False:
        return f"relative error {row['loss_error']:.1e} of the losses, above 0"
    return None
