"""Plots of an ablation's results: memory against time, what both are made of, and the longest sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, grouped, place
from recompute.files import png_of

NAMES = ("results.png", "memory.png", "times.png", "longest.png")
"""The files, in order. Only the first is drawn of every run."""


def pictures(rows: Sequence[RowDict]) -> dict[str, bytes]:
    """The plots that there are numbers for, as PNG files by their names."""
    figures = {"results.png": memory_against_time(rows)}
    measured = [row for row in rows if row["error"] is None]
    if any(row.get("parameter_bytes") is not None for row in measured):
        unit = _unit(max(sum(_memory_parts(row, {}).values()) for row in measured))
        figures["memory.png"] = _bars(measured, _memory_parts, "Memory between forward and backward", *unit)
    if any(row.get("backward_seconds") is not None for row in measured):
        figures["times.png"] = _bars(measured, _time_parts, "What a step's time goes to", "milliseconds a step", 1e-3)
    if any(row.get("longest_sequence") is not None for row in rows):
        of_all = ({**row, "sequence_length": None} for row in rows)
        once = {(place(one), one["policy"]): one for one in of_all}
        length: Parts = lambda row, base: {"tokens": row.get("longest_sequence") or 0}  # noqa: E731
        figures["longest.png"] = _bars([*once.values()], length, "Longest sequence that fits", "tokens", 1)
    return {name: png_of(figure) for name, figure in figures.items()}


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
    figure, frames = _frames(groups, "Memory against the time of a step: lower left is better", 8, 5)
    for axes, (_, group) in zip(frames, groups, strict=True):
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


def _frames(groups: Sequence[tuple[str, Any]], title: str, width: float, height: float) -> tuple[Figure, list[Axes]]:
    count = len(groups)
    columns = min(count, 2 if count < 5 else 3)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * lines), dpi=150 if count < 5 else 75, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    return figure, [figure.add_subplot(lines, columns, at, title=name) for at, (name, _) in enumerate(groups, 1)]


Parts = Callable[[RowDict, RowDict], Mapping[str, float]]
"""The lengths of a bar's parts, by what they are, from its row and the baseline's."""


def _bars(rows: Sequence[RowDict], parts: Parts, title: str, label: str, unit: float) -> Figure:
    """A bar for each row, put together from its parts. Each comparison has axes of its own."""
    groups = grouped(rows, AXES)
    figure, frames = _frames(groups, title, 7, 1.5 + 0.35 * max(len(group) for _, group in groups))
    for axes, (_, group) in zip(frames, groups, strict=True):
        base = next((row for row in group if row["policy"] == BASELINE), {})
        drawn = [parts(row, base) for row in group]
        left = [0.0] * len(group)
        for name in drawn[0]:
            lengths = [each[name] / unit for each in drawn]
            axes.barh(range(len(group)), lengths, left=left, label=name)
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        axes.set_yticks(range(len(group)), [row["policy"] for row in group])
        axes.invert_yaxis()
        axes.set(xlabel=label)
        axes.grid(alpha=0.3, axis="x")
        if len(axes.containers) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _memory_parts(row: RowDict, base: RowDict) -> Mapping[str, float]:
    """Bytes between forward and backward; the optimizer's states are there from the second step on."""
    logits = max(0, row.get("logits_bytes_held") or 0)
    return {
        "parameters": row.get("parameter_bytes") or 0,
        "gradients": row.get("gradient_bytes") or 0,
        "optimizer": row.get("optimizer_bytes") or 0,
        "activations": row["activation_bytes_held"] - logits,
        "head and loss": logits,
    }


def _time_parts(row: RowDict, base: RowDict) -> Mapping[str, float]:
    """Seconds. Where the time of regenerating is not known, what backward takes longer than the baseline's is shown."""
    backward, plain = row.get("backward_seconds") or 0.0, base.get("backward_seconds") or math.inf
    known = row.get("regenerating_seconds")
    again, added = (0.0, max(0.0, backward - plain)) if known is None else (min(known, backward), 0.0)
    return {
        "forward": row.get("forward_seconds") or 0.0,
        "backward": backward - again - added,
        "regenerating": again,
        f"added to backward of {BASELINE}": added,
        "optimizer": row.get("optimizer_seconds") or 0.0,
    }
