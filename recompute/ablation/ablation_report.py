"""A verdict and tables of an ablation's results, as `results.json` holds them, and all files that are made of these."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from tabulate import tabulate

from recompute.ablation import ablation_plots
from recompute.ablation.ablation_config import is_factory
from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, grouped, place, place_of, varied
from recompute.files import write_file
from recompute.units import humanize

FILES = ("results.md", *ablation_plots.NAMES, "report.html")
"""What ``write`` may write."""

_MOST_NAMED = 4  # policies in a verdict


def write(results: Mapping[str, Any], out: Path) -> list[str]:
    """Write all that is made of ``results.json`` into the folder `out`. Returns the names of the files.

    These are ``results.md``, plots (``results.png`` and others, as far as there are numbers for them) and
    ``report.html``, a page with all of it, which opens without a network. Raises ``WriteError``.
    """
    drawn = ablation_plots.pictures(results["rows"])
    for name in set(ablation_plots.NAMES) - drawn.keys():
        (out / name).unlink(missing_ok=True)  # of an earlier run
    files: dict[str, str | bytes] = {"results.md": markdown(results)}
    files |= drawn | {"report.html": _page(results, drawn)}
    for name, content in files.items():
        write_file(out / name, content)
    return list(files)


def _page(results: Mapping[str, Any], pictures: Mapping[str, bytes]) -> str:
    """The Markdown with its plots, the configuration and the machine, as HTML."""
    images = [f"![{name}](data:image/png;base64,{base64.b64encode(data).decode()})" for name, data in pictures.items()]
    details = [f"## {name}\n\n```json\n{json.dumps(results[name], indent=2)}\n```" for name in ("config", "machine")]
    text = "\n\n".join(["# Policies compared", markdown(results), *images, *details])
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8")).substitute(body=body)


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
    """The verdict on the rows of one comparison; empty if there is nothing to compare, or to compare with."""
    measured = {row["policy"]: row for row in rows if row["error"] is None}
    base = measured.pop(BASELINE, None)
    if base is None or not measured:
        return ""

    def shares(row: RowDict) -> str:
        keys = {"time": "step_seconds", "activations": "activation_bytes_held", "peak": "peak_bytes"}
        return ", ".join(f"{row[key] / base[key]:.2f} of the {name}" for name, key in keys.items())

    fastest, leanest = (min(measured.values(), key=lambda row: row[key]) for key in ("step_seconds", "peak_bytes"))
    after = "" if fastest["step_seconds"] < base["step_seconds"] else f" after `{BASELINE}`"
    told = [f"`{fastest['policy']}` is fastest{after}: {shares(fastest)} of `{BASELINE}`."]
    if leanest is not fastest:
        told.append(f"`{leanest['policy']}` peaks lowest: {shares(leanest)}.")
    wrong = [name for name, row in measured.items() if _problem(row)]
    changed = [name for name, row in measured.items() if not row["losses_match"] or _grad_error(row)]
    rounding = _listed([name for name in changed if name not in wrong], ", which may round")
    changes = " and ".join(filter(None, (rounding, _listed(wrong, ", which may not"))))
    told.append(f"All results are as under `{BASELINE}`, bit for bit{changes and ', but for '}{changes}.")
    told.append(_listed([row["policy"] for row in rows if row["error"] is not None], " failed."))
    unsteady = [name for name, row in {BASELINE: base, **measured}.items() if _spread(row) > _STEADY]
    told.append(_listed(unsteady, ": steps took very different times. Was this machine busy with something else?"))
    return " ".join(filter(None, told))


_STEADY = 0.25
"""A row's time says something if its steps' quartiles are apart by at most this part of their median."""


def _spread(row: RowDict) -> float:
    first, third = row.get("step_seconds_quartiles") or (0.0, 0.0)
    return (third - first) / row["step_seconds"] if row["step_seconds"] else 0.0


def _listed(names: Sequence[str], then: str) -> str:
    named = [f"`{name}`" for name in names[: _MOST_NAMED if len(names) > _MOST_NAMED + 1 else None]]
    more = f" and {len(names) - len(named)} more" if len(named) < len(names) else ""
    return f"{', '.join(named)}{more}{then}" if names else ""


_NUMBER = re.compile(r"\d\S*")
_LEGEND = {
    "held after forward": "activations that wait for backward. Weights, gradients and optimizer states come on top.",
    "peak": "the most activation memory at once, in forward and backward.",
    "ms a step": "the median of the timed steps. In parentheses: relative to `none`.",
    "✓ bitwise": "equal to `none` in every bit.",
    "✓ …": "differs by rounding alone: at most twice the rounding error of `none` itself.",
    "≈ …": "differs, as rounding in another order does. That is no failure: only bits were compared.",
    "✗ …": "differs by more than this policy allows.",
}


def _legend(cells: Sequence[Sequence[str]], machine: Mapping[str, Any]) -> list[str]:
    """The meanings of the words and marks that a table has."""
    shown = {_NUMBER.sub("…", cell) for line in cells for cell in line}
    lines = [f"**{word}**: {meaning}" for word, meaning in _LEGEND.items() if word in shown]
    if machine["gpu"] is None and {"kernel", "auto"} & {line[0] for line in cells}:
        lines.append("On a CPU, plain PyTorch stands in for the kernels, and takes longer than they do on a GPU.")
    return lines


def failures(results: Mapping[str, Any]) -> list[str]:
    """One line for each row that failed or does not match the baseline, and one if rows are missing."""
    axes = varied(results["rows"])
    lines = [line(row, axes) for row in results["rows"] if _problem(row)]
    return lines if results["complete"] else [*lines, "interrupted: rows are missing"]


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
        return f"gradients differ: relative error {_grad_error(row):.1e}, allowed {row['grad_tolerance']:.1e}"
    if row["exact"] and row["losses_match"] is False:
        return f"losses differ: relative error {row['loss_error']:.1e}, allowed 0"
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
    told = []
    for name, source in (config.get("models") or {"": config["model"]}).items():
        if not isinstance(source, str):
            fields = ", ".join(f"{key} {value}" for key, value in source.items() if key != "model_type")
            source = f"{source.get('model_type', 'Llama')} with {fields}"
        told.append(f"{name}: {source}" if name else source)
    return "; ".join(told)


class _Column(NamedTuple):
    """Shows a key of a row, where the row has it. of_row: ``show`` takes the whole row."""

    key: str
    show: Callable[[Any], str] = humanize
    has_ratio: bool = False
    of_row: bool = False

    def cell(self, row: RowDict, baseline: RowDict) -> str:
        if (value := row.get(self.key)) is None:
            return "-"
        text, other = self.show(row if self.of_row else value), baseline.get(self.key)
        return f"{text} ({value / other:.2f}x)" if self.has_ratio and other and row is not baseline else text


def _median(key: str) -> _Column:
    """A time with its quartiles."""

    def show(row: RowDict) -> str:
        return f"{_milliseconds(row[key])} ({' to '.join(map(_milliseconds, row[f'{key}_quartiles']))})"

    return _Column(f"{key}_quartiles", show, of_row=True)


def tables(rows: Sequence[RowDict]) -> list[tuple[str, list[list[str]]]]:
    """Titles and tables: what every row has; then what times and memory are made of, where that was measured.

    The first columns tell the rows apart. One that no row has anything for is left out.
    """
    own = {"policy": _Column("policy", str)}
    own |= {axis.partition("_")[0]: _Column(axis, str) for axis in AXES if axis in varied(rows)}
    baselines = {place(row): row for row in rows if row["policy"] == BASELINE}
    found: list[tuple[str, list[list[str]]]] = []
    for title, columns in _TABLES.items():
        known = {name for name, each in columns.items() if any(row.get(each.key) is not None for row in rows)}
        if not found or next(iter(columns)) in known:
            shown = {name: each for name, each in {**own, **columns}.items() if name in known or name in own}
            lines = [[each.cell(row, baselines.get(place(row), {})) for each in shown.values()] for row in rows]
            found.append((title, [list(shown), *lines]))
    return found


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _losses(row: RowDict) -> str:
    return "✓ bitwise" if row["losses_match"] else f"{'✗' if row['exact'] else '≈'} {row['loss_error']:.1e}"


def _gradients(row: RowDict) -> str:
    error, mark = _grad_error(row), {True: "✓", False: "✗", None: "≈"}[row["grads_match"]]
    if not error and row["grad_error_last"]:  # what rounds began after the first step: layers were captured
        error, mark = row["grad_error_last"], "≈"
    return f"{mark} {error:.1e}" if error or mark != "✓" else "✓ bitwise"


_TABLES: Mapping[str, Mapping[str, _Column]] = {
    "Memory, time, losses and gradients": {
        "held after forward": _Column("activation_bytes_held", has_ratio=True),
        "peak": _Column("peak_bytes", has_ratio=True),
        "ms a step": _Column("step_seconds", _milliseconds, True),
        "CPU ms a forward": _Column("forward_cpu_seconds", _milliseconds, True),
        "longest sequence": _Column("longest_sequence", "{:,}".format, True),
        "losses": _Column("losses_match", _losses, of_row=True),
        "gradients": _Column("grad_error", _gradients, of_row=True),
    },
    "Milliseconds of a step, by part: the median, and both quartiles": {
        "step": _median("step_seconds"),
        "forward": _median("forward_seconds"),
        "backward": _median("backward_seconds"),
        "of that regenerating": _median("regenerating_seconds"),
        "added to backward": _Column("backward_added_seconds", lambda seconds: f"{seconds * 1e3:+.1f}"),
        "optimizer": _median("optimizer_seconds"),
    },
    "Bytes between forward and backward, by what they are": {
        "parameters": _Column("parameter_bytes"),
        "gradients": _Column("gradient_bytes"),
        "optimizer": _Column("optimizer_bytes"),
        "activations": _Column("activation_bytes_held"),
        "of these by head and loss": _Column("logits_bytes_held"),
    },
}
"""The columns of each table. All but the first table are left out where there is nothing for their first column."""
