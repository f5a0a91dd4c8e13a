"""A verdict and tables of an ablation's results, as `results.json` holds them, and all files that are made of these."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from markdown_it import MarkdownIt
from tabulate import tabulate

from recompute.ablation import ablation_plots
from recompute.ablation.ablation_config import is_factory
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, grouped, place, place_of, varied
from recompute.files import write_file
from recompute.units import humanize

FILES = ("results.md", "results.csv", *ablation_plots.NAMES, "report.html")
"""What ``write`` may write."""

_MOST_NAMED = 4  # policies in a verdict
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
    flat: list[dict[str, Any]] = []
    for row in rows:
        flat.append({key: value for key, value in row.items() if key not in ("losses", "timings")})
        for key in [key for key in row if key.endswith("_quartiles")]:
            first, third = flat[-1].pop(key) or (None, None)
            name = key.removesuffix("quartiles")
            flat[-1] |= {f"{name}first_quartile": first, f"{name}third_quartile": third}
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(dict.fromkeys(key for each in flat for key in each)))
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def summary(results: Mapping[str, Any]) -> str:
    """The verdict, and the rows as plain text."""
    return "\n".join([*verdicts(results["rows"]), "", _tabulated(tables(results["rows"])[0][1], "simple")])


def text(rows: Sequence[RowDict]) -> str:
    """The rows as plain text, with what failed below."""
    axes = varied(rows)
    return "\n".join([_tabulated(tables(rows)[0][1], "simple"), *(line(row, axes) for row in rows if _problem(row))])


def markdown(results: Mapping[str, Any]) -> str:
    """A verdict, and tables for GitHub with a legend; what failed, what was run, where, and by which command."""
    rows = results["rows"]
    (_, first), *others = tables(rows)
    lists = [verdicts(rows), _legend(first, results["machine"]), failures(results)]
    verdict, legend, problems = ("\n".join(f"- {each}" for each in lines) for lines in lists)
    blocks = [verdict.removeprefix("- ") if len(lists[0]) == 1 else verdict, _tabulated(first, "github")]
    blocks += [problems, legend, *(f"{title}:\n\n{_tabulated(cells, 'github')}" for title, cells in others)]
    blocks += [describe(results), f"`{results['command']}`"]
    return "\n\n".join(filter(None, blocks)) + "\n"


def _tabulated(cells: Sequence[Sequence[str]], style: str) -> str:
    align = ["left", *["right"] * (len(cells[0]) - 1)]
    return str(tabulate(cells, "firstrow", style, colalign=align, disable_numparse=True))


def verdicts(rows: Sequence[RowDict]) -> list[str]:
    """For each comparison a sentence or more on its rows: what is fastest, what is leanest, and what changes bits."""
    found = [(title, _verdict(group)) for title, group in grouped(rows, AXES)]
    return [f"{title}: {told}" if title else told for title, told in found if told]


def _verdict(rows: Sequence[RowDict]) -> str:
    """Of the rows of one comparison. Nothing where there is nothing to compare, or nothing to compare with."""
    measured = {row["policy"]: row for row in rows if row["error"] is None}
    base = measured.pop(BASELINE, None)
    if base is None or not measured:
        return ""
    fastest, leanest = (min(measured.values(), key=lambda row: row[key]) for key in ("step_seconds", "peak_bytes"))
    is_faster = fastest["step_seconds"] < base["step_seconds"]
    speed = "is fastest" if is_faster else f"is fastest after `{BASELINE}`"
    told = [f"`{fastest['policy']}` {speed}: {_shares(fastest, base)} of `{BASELINE}`."]
    if leanest is not fastest:
        told.append(f"`{leanest['policy']}` peaks lowest: {_shares(leanest, base)}.")
    changed = [row for row in measured.values() if not row["losses_match"] or _grad_error(row)]
    wrong = [row["policy"] for row in measured.values() if _problem(row)]
    rounding = [row["policy"] for row in changed if row["policy"] not in wrong]
    but = [_listed(rounding, ", which may round"), _listed(wrong, ", which may not")]
    told.append(f"Nothing changes a bit{' but ' if rounding or wrong else ''}{' and '.join(filter(None, but))}.")
    told.append(_listed([row["policy"] for row in rows if row["error"] is not None], " failed."))
    return " ".join(filter(None, told))


def _shares(row: RowDict, base: RowDict) -> str:
    keys = {"time": "step_seconds", "activations": "activation_bytes_held", "peak": "peak_bytes"}
    return ", ".join(f"{row[key] / base[key]:.2f} of the {name}" for name, key in keys.items())


def _listed(names: Sequence[str], then: str) -> str:
    named = [f"`{name}`" for name in names[: _MOST_NAMED if len(names) > _MOST_NAMED + 1 else None]]
    more = f" and {len(names) - len(named)} more" if len(named) < len(names) else ""
    return f"{', '.join(named)}{more}{then}" if names else ""


_NUMBER = re.compile(r"\d\S*")
_LEGEND = {
    "held after forward": "activations that wait for backward. Weights, gradients and optimizer states come on top.",
    "peak": "the most of them alive at once in forward and backward.",
    "ms a step": "the median of the timed steps. In parentheses: how many times that of `none`.",
    "✓ bitwise": "equal to `none` in every bit.",
    "✓ …": "differs by rounding alone: at most twice as far from `none` as rounding puts `none` from the exact value.",
    "≈ …": "differs, as rounding in another order does. That is no failure: nothing but bits was compared.",
    "✗ …": "differs by more than this policy may.",
}


def _legend(cells: Sequence[Sequence[str]], machine: Mapping[str, Any]) -> list[str]:
    """What the words and marks of a table mean, as far as it has them."""
    shown = {_NUMBER.sub("…", cell) for line in cells for cell in line}
    lines = [f"**{word}**: {meaning}" for word, meaning in _LEGEND.items() if word in shown]
    if machine["gpu"] is None and {"kernel", "auto"} & {line[0] for line in cells}:
        lines.append("On a CPU, kernels are their references in plain PyTorch, which take longer than kernels do.")
    return lines


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


def _problem(row: RowDict) -> str | None:
    if row["error"] is not None:
        return str(row["error"]).partition("\n")[0]
    if row["grads_match"] is False:
        return f"relative error {_grad_error(row):.1e} of the gradients, above {row['grad_tolerance']:.1e}"
    if row["exact"] and row["losses_match"] is False:
        return f"relative error {row['loss_error']:.1e} of the losses, above 0"
    return None


def _grad_error(row: RowDict) -> float:
    """The error that `grads_match` judges."""
    return max(row["grad_error"], row["grad_error_last"]) if row["exact"] else row["grad_error"]


def describe(results: Mapping[str, Any]) -> str:
    """What was trained, and on what."""
    config, machine = results["config"], results["machine"]
    hardware = machine["gpu"] or f"{machine['cpu']} ({machine['threads']} threads)"
    versions = f"torch {machine['torch']}, transformers {machine['transformers']}, Python {machine['python']}"
    where = f"{hardware}, {versions}, {machine['date'][:10]}."
    steps = f"{config['steps']} steps"
    if isinstance(config["model"], str):  # of the caller's own
        return f"{config['model']}; {steps}. {where}"
    batches, dtypes = (", ".join(map(str, config.get(f"{key}s") or [config[key]])) for key in ("batch_size", "dtype"))
    sizes = ""
    if not all(map(is_factory, (config.get("models") or {"": config["model"]}).values())):
        sizes = f"batch {batches}, sequence {', '.join(map(str, config['sequence_lengths']))}, "
        steps += " of all but head, loss and optimizer" if config.get("step") == "layers" else ""
        steps += f" on bytes of: {results['text']['source']}"
    repeats = f", each {config['repeats']} times" if config.get("repeats", 1) > 1 else ""
    return f"{describe_models(config)}; {sizes}{dtypes}, {steps}{repeats}. {where}"


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


class _Column(NamedTuple):
    """Shows a key of a row. beside: what else is shown; "row": ``show`` takes the whole row."""

    key: str
    show: Callable[[Any], str] = str
    beside: Literal["", "ratio", "quartiles", "row"] = ""

    def cell(self, row: RowDict, baseline: RowDict) -> str:
        if (value := row.get(self.key)) is None:
            return "-"
        if self.beside == "row":
            return self.show(row)
        if self.beside == "quartiles":
            return f"{self.show(value)} ({' to '.join(map(self.show, row[f'{self.key}_quartiles']))})"
        other = baseline.get(self.key) if self.beside == "ratio" and row is not baseline else None
        return f"{self.show(value)} ({value / other:.2f}x)" if other else self.show(value)


def tables(rows: Sequence[RowDict]) -> list[tuple[str, list[list[str]]]]:
    """Titles and tables: what every row has; then what times and memory are made of, where that was measured.

    The first columns tell the rows apart. One that no row has anything for is left out.
    """
    axes = varied(rows)
    own = {"policy": _Column("policy")} | {axis.partition("_")[0]: _Column(axis) for axis in AXES if axis in axes}
    baselines = {place(row): row for row in rows if row["policy"] == BASELINE}
    found = []
    for title, needed, columns in _TABLES:
        if needed != "policy" and all(row.get(needed) is None for row in rows):
            continue
        shown = own | {
            name: each for name, each in columns.items() if any(row.get(each.key) is not None for row in rows)
        }
        lines = [[each.cell(row, baselines.get(place(row), {})) for each in shown.values()] for row in rows]
        found.append((title, [list(shown), *lines]))
    return found


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _losses(row: RowDict) -> str:
    return "✓ bitwise" if row["losses_match"] else f"{'✗' if row['exact'] else '≈'} {row['loss_error']:.1e}"


def _gradients(row: RowDict) -> str:
    error, mark = _grad_error(row), {True: "✓", False: "✗", None: "≈"}[row["grads_match"]]
    return f"{mark} {error:.1e}" if error or mark != "✓" else "✓ bitwise"


_PARTS = {"step": "step", "forward": "forward", "backward": "backward", "of that regenerating": "regenerating"}
_TABLES: Sequence[tuple[str, str, Mapping[str, _Column]]] = (
    (
        "Memory, time, losses and gradients",
        "policy",
        {
            "held after forward": _Column("activation_bytes_held", humanize, "ratio"),
            "peak": _Column("peak_bytes", humanize, "ratio"),
            "ms a step": _Column("step_seconds", _milliseconds, "ratio"),
            "CPU ms a forward": _Column("forward_cpu_seconds", _milliseconds, "ratio"),
            "longest sequence": _Column("longest_sequence", "{:,}".format, "ratio"),
            "losses": _Column("losses_match", _losses, "row"),
            "gradients": _Column("grad_error", _gradients, "row"),
        },
    ),
    (
        "Milliseconds of a step, by part: the median, and both quartiles",
        "backward_seconds",
        {name: _Column(f"{key}_seconds", _milliseconds, "quartiles") for name, key in _PARTS.items()}
        | {"added to backward": _Column("backward_added_seconds", lambda seconds: f"{seconds * 1e3:+.1f}")}
        | {"optimizer": _Column("optimizer_seconds", _milliseconds, "quartiles")},
    ),
    (
        "Bytes between forward and backward, by what they are",
        "parameter_bytes",
        {
            "parameters": _Column("parameter_bytes", humanize),
            "gradients": _Column("gradient_bytes", humanize),
            "optimizer": _Column("optimizer_bytes", humanize),
            "activations": _Column("activation_bytes_held", humanize),
            "of these by head and loss": _Column("logits_bytes_held", humanize),
        },
    ),
)
