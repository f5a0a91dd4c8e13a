"""The figures as tables for a terminal and for Markdown, and as a plot."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_benchmark.ways import BARS, COPY
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from tabulate import tabulate

from recompute.units import humanize


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def error_text(errors: Mapping[str, float | None]) -> str:
    """All of a few errors; of many the largest."""
    errors = {name: math.nan if error is None else error for name, error in errors.items()}
    told = [f"{name} {error:.1e}" for name, error in errors.items()]
    if len(told) <= 4:
        return ", ".join(told)
    largest = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return f"{largest} {errors[largest]:.1e}, others less"


def note(row: Mapping[str, Any]) -> str:
    if row["failure"]:
        return row["failure"]
    return "waits for the GPU" if row["in_graph"] is False else ""


COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "measure": ("measure", str),
    "size": ("size", str),
    "way": ("way", str),
    "time": ("seconds", duration),
    "GB/s": ("gb_per_second", "{:.0f}".format),
    "of copy": ("of_copy", "{:.1%}".format),
    "TFLOP/s": ("tflop_per_second", "{:.0f}".format),
    "extra peak": ("extra_peak_nbytes", humanize),
    "held, bytes a token": ("held_bytes_per_token", "{:,.0f}".format),
    "errors": ("errors", error_text),
}


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The names of the columns that say anything, then the texts of each row."""
    nothing = (None, {})
    columns = {name: shown for name, shown in COLUMNS.items() if any(row[shown[0]] not in nothing for row in rows)}
    lines = [["" if row[key] in nothing else show(row[key]) for key, show in columns.values()] for row in rows]
    return [[*columns, "note"], *([*line, note(row)] for line, row in zip(lines, rows, strict=True))]


def terminal(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns, *lines = cells(rows)
    table = Table(title=name, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("measure", "size", "way", "note") else "right")
    for line in lines:
        table.add_row(*line)
    return table


def markdown(results: Mapping[str, Any]) -> str:
    blocks = ["# Kernels and their peers"]
    origins: dict[str, list[str]] = {}
    for name, result in results["ops"].items():
        blocks += [f"## {name}", tabulate(cells(result["rows"]), "firstrow", "github", disable_numparse=True)]
        origins.setdefault(f"{describe(result['machine'])} `{result['command']}`", []).append(name)
    return "\n\n".join([*blocks, *(f"{', '.join(names)}: {origin}" for origin, names in origins.items())]) + "\n"


def describe(machine: Mapping[str, Any]) -> str:
    hardware = machine["gpu"] or f"{machine['cpu']} ({machine['threads']} threads)"
    versions = {"torch": machine["torch"], "triton": machine["triton"], **machine["peers"]}
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{hardware}, {found}, {machine['date'][:10]}."


UNITS = (("of_copy", 100, "% of a copy's bandwidth"), ("tflop_per_second", 1, "TFLOP/s"), ("seconds", 1e6, "µs"))


def plot(results: Mapping[str, Any]) -> Figure:
    """A panel for each op, in it a group for each measure and size, in it a bar for each way that did not fail."""
    ops = results["ops"]
    figure = Figure(figsize=(14, 3.5 * len(ops)), dpi=100, layout="constrained")
    for index, (name, result) in enumerate(ops.items()):
        rows = [row for row in result["rows"] if row["seconds"] and row["way"] != COPY]
        draw_bars(figure.add_subplot(len(ops), 1, index + 1, title=name), rows)
    return figure


def draw_bars(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    key, scale, label = next(unit for unit in UNITS if any(row[unit[0]] for row in rows) or unit is UNITS[-1])
    groups = list(dict.fromkeys((row["measure"], row["size"]) for row in rows))
    ways = [way for way in BARS if any(row["way"] == way for row in rows)]
    width = 0.8 / max(len(ways), 1)
    for place, way in enumerate(ways):
        heights = {(row["measure"], row["size"]): row[key] * scale for row in rows if row["way"] == way}
        middles = [groups.index(group) + (place + 0.5) * width for group in heights]
        axes.bar(middles, heights.values(), width, label=way, color=f"C{BARS.index(way)}")
    axes.set_xticks([index + 0.4 for index in range(len(groups))], ["\n".join(group) for group in groups], fontsize=7)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    if ways:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def write(results: Mapping[str, Any], out: Path) -> None:
    """Write ``results.json`` and ``results.md`` into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / "results.json.part"
    unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, out / "results.json")
    (out / "results.md").write_text(markdown(results), encoding="utf-8")
