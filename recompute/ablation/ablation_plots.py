"""The plot of an ablation's results: memory against time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, grouped


def _unit(most_nbytes: float) -> tuple[str, float]:
    return ("GiB", 2**30) if most_nbytes >= 2**30 else ("MiB", 2**20)


def memory_against_time(rows: Sequence[RowDict]) -> Figure:
    """Memory against step time, with a point for each row that did not fail, in the color of its policy.

    A point is a bar from what is held after forward (open marker) up to the peak (filled); the baseline's are square.
    The line is the Pareto frontier: no other row takes both less time and a lower peak than a point on it. Each
    comparison has axes of its own.
    """
    measured = [row for row in rows if row["error"] is None]
    policies = list(dict.fromkeys(row["policy"] for row in measured))
    groups = grouped(measured, AXES) or [("", [])]
    count = len(groups)
    columns = min(count, 2 if count < 5 else 3)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(8 * columns, 5 * lines), dpi=150 if count < 5 else 75, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Memory against the time of a step: lower left is better")
    for number, (title, group) in enumerate(groups, 1):
        axes = figure.add_subplot(lines, columns, number, title=title)
        _draw_points(axes, group, {policy: _COLORS(number % _COLORS.N) for number, policy in enumerate(policies)})
    return figure


_COLORS = colormaps["tab20"]


def _draw_points(axes: Axes, rows: Sequence[RowDict], colors: Mapping[str, Any]) -> None:
    unit, unit_nbytes = _unit(max((row["peak_bytes"] for row in rows), default=0))
    axes.set(xlabel="milliseconds a step", ylabel=f"{unit} above weights, gradients, optimizer")
    for row in rows:
        color, marker = colors[row["policy"]], "s" if row["policy"] == BASELINE else "o"
        held, peak = row["activation_bytes_held"] / unit_nbytes, row["peak_bytes"] / unit_nbytes
        time = row["step_seconds"] * 1e3
        axes.plot([time, time], [held, peak], color=color, alpha=0.5)
        axes.plot(time, held, marker, color=color, markerfacecolor="white")
        axes.plot(time, peak, marker, color=color, label=row["policy"])
    best = frontier(rows)
    times, peaks = [row["step_seconds"] * 1e3 for row in best], [row["peak_bytes"] / unit_nbytes for row in best]
    axes.step(times, peaks, "--", color="gray", where="post", alpha=0.4, label="Pareto frontier")
    axes.set_ylim(0, 1.06 * max([row["peak_bytes"] / unit_nbytes for row in rows], default=1))
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), title="filled: peak\nopen: held after forward")


def frontier(rows: Iterable[RowDict]) -> list[RowDict]:
    """The rows that no other beats in both time and peak, from the fastest to the leanest."""
    best: list[RowDict] = []
    for row in sorted(rows, key=lambda row: (row["step_seconds"], row["peak_bytes"])):
        if not best or row["peak_bytes"] < best[-1]["peak_bytes"]:
            best.append(row)
    return best
