"""Plots of an ablation's results: memory against time, what both are made of, and the longest sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import BboxBase

from recompute.ablation.peers import BASELINE
from recompute.ablation.row_places import AXES, place, place_of, varied
from recompute.files import png_of

RowDict = Mapping[str, Any]

NAMES = ("results.png", "memory.png", "times.png", "longest.png")
"""The files, in order. Only the first is drawn of every run."""


_CROWDED = 12
"""Points in one frame whose names can still be read."""


def pictures(rows: Sequence[RowDict]) -> dict[str, bytes]:
    """The plots that there are numbers for, as PNG files by their names."""
    figures = {"results.png": memory_against_time(rows)}
    measured = [row for row in rows if row["error"] is None]
    if any(row.get("parameter_bytes") is not None for row in measured):
        figures["memory.png"] = _bars(measured, _memory_parts, *_unit_of_memory(measured))
    if any(row.get("backward_seconds") is not None for row in measured):
        figures["times.png"] = _bars(measured, _time_parts, "milliseconds a step", 1e-3)
    if any(row.get("longest_sequence") is not None for row in rows):
        figures["longest.png"] = _bars(_without_lengths(rows), _length_parts, "tokens of the longest sequence", 1)
    return {name: png_of(figure) for name, figure in figures.items()}


def memory_against_time(rows: Sequence[RowDict]) -> Figure:
    """Memory against step time, with a point for each row that did not fail.

    A point is a bar from what is held after forward (open marker) up to the peak (filled); the baseline's are
    square. A color is a sequence length. Its line is the Pareto frontier: no other row takes both less time and a lower
    peak than a point on it. Each model, batch size and dtype has axes of its own; so has each length, where the points
    would be too many.
    """
    measured = [row for row in rows if row["error"] is None]
    groups = _groups(measured, [axis for axis in AXES if axis != "sequence_length"]) or [("", [])]
    if max(len(group) for _, group in groups) > _CROWDED:
        groups = _groups(measured, AXES)
    figure, frames = _frames(len(groups), width=8, height=5)
    labels = [_draw_points(axes, title, group) for axes, (title, group) in zip(frames, groups, strict=True)]
    figure.canvas.draw()
    for axes, named in zip(frames, labels, strict=True):
        taken: list[BboxBase] = [
            artist.get_window_extent() for artist in (axes.get_legend(), *axes.lines) if artist is not None
        ]
        _spread(named, axes.bbox, taken)
    return figure


def _draw_points(axes: Axes, title: str, rows: Sequence[RowDict]) -> list[Annotation]:
    """Draw rows that differ in policy and sequence length alone; return the labels of their points."""
    large = any(row["peak_bytes"] >= 2**30 for row in rows)
    unit, unit_nbytes = ("GiB", 2**30) if large else ("MiB", 2**20)
    axes.set(xlabel="milliseconds a step", ylabel=f"{unit} above static memory", title=title)
    lengths = sorted({row["sequence_length"] for row in rows})
    labels = []
    for row in rows:
        marker = "s" if row["policy"] == BASELINE else "o"
        color = f"C{lengths.index(row['sequence_length'])}"
        held, peak = row["activation_bytes_held"] / unit_nbytes, row["peak_bytes"] / unit_nbytes
        milliseconds = row["step_seconds"] * 1e3
        axes.plot([milliseconds, milliseconds], [held, peak], color=color, alpha=0.5)
        axes.plot(milliseconds, held, marker, color=color, markerfacecolor="white")
        axes.plot(milliseconds, peak, marker, color=color)
        labels.append(axes.annotate(row["policy"], (milliseconds, peak), (0, 0), textcoords="offset points"))
    for number, length in enumerate(lengths):
        of_length = [row for row in rows if row["sequence_length"] == length]
        best = [(row["step_seconds"] * 1e3, row["peak_bytes"] / unit_nbytes) for row in frontier(of_length)]
        axes.add_collection(LineCollection([_stairs(best)], colors=f"C{number}", alpha=0.4, linestyles="dashed"))
    axes.set_ylim(0, 1.06 * max([row["peak_bytes"] / unit_nbytes for row in rows], default=1))
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    axes.legend(handles=_legend(lengths), loc="best")
    return labels


def frontier(rows: Iterable[RowDict]) -> list[RowDict]:
    """The rows that no other beats in both time and peak, from the fastest to the leanest."""
    best: list[RowDict] = []
    for row in sorted(rows, key=lambda row: (row["step_seconds"], row["peak_bytes"])):
        if not best or row["peak_bytes"] < best[-1]["peak_bytes"]:
            best.append(row)
    return best


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The border of what the points beat: from each to the right, and then down to the next."""
    corners = [(after[0], before[1]) for before, after in pairwise(points)]
    return [each for pair in zip(points, [*corners, points[-1]], strict=True) for each in pair]


def _groups(rows: Iterable[RowDict], axes: Sequence[str]) -> list[tuple[str, list[RowDict]]]:
    """The rows that are equal on these axes, with what tells them from others."""
    rows = list(rows)
    shown = varied(rows) & {*axes}
    found: dict[tuple[Any, ...], list[RowDict]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(axis) for axis in axes), []).append(row)
    return [
        (place_of({axis: group[0].get(axis) for axis in shown}, shown).removeprefix(", "), group)
        for group in found.values()
    ]


def _frames(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2 if count < 5 else 3)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * lines), dpi=150 if count < 5 else 75, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, number + 1) for number in range(count)]


Parts = Mapping[str, float]
"""The lengths of a bar's parts, by what they are."""


def _bars(rows: Sequence[RowDict], parts: Callable[[RowDict, RowDict], Parts], label: str, unit: float) -> Figure:
    """A bar for each row, put together from its parts. Each comparison has axes of its own."""
    groups = _groups(rows, AXES)
    most = max(len(group) for _, group in groups)
    figure, frames = _frames(len(groups), width=7, height=1.2 + 0.35 * most)
    for axes, (title, group) in zip(frames, groups, strict=True):
        base = next((row for row in group if row["policy"] == BASELINE), {})
        drawn = [parts(row, base) for row in group]
        left = [0.0] * len(group)
        for name in dict.fromkeys(name for each in drawn for name in each):
            lengths = [each.get(name, 0.0) / unit for each in drawn]
            axes.barh(range(len(group)), lengths, left=left, label=name)
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        axes.set_yticks(range(len(group)), [row["policy"] for row in group])
        axes.invert_yaxis()
        axes.set(xlabel=label, title=title)
        axes.grid(alpha=0.3, axis="x")
        if len(axes.containers) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _unit_of_memory(rows: Sequence[RowDict]) -> tuple[str, float]:
    large = any(sum(_memory_parts(row, {}).values()) >= 2**30 for row in rows)
    return ("GiB", 2**30) if large else ("MiB", 2**20)


def _memory_parts(row: RowDict, base: RowDict) -> Parts:
    """Bytes between forward and backward; the optimizer's states are there from the second step on."""
    held, logits = row["activation_bytes_held"], max(0, row.get("logits_bytes_held") or 0)
    static = {"parameters": "parameter_bytes", "gradients": "gradient_bytes", "optimizer": "optimizer_bytes"}
    return {name: row.get(key) or 0 for name, key in static.items()} | {
        "activations": held - logits,
        "head and loss": logits,
    }


def _time_parts(row: RowDict, base: RowDict) -> Parts:
    """Seconds. Where the time of regenerating is not known, what backward takes longer than the baseline's is shown."""
    backward, plain = row.get("backward_seconds") or 0.0, base.get("backward_seconds") or math.inf
    regenerating = row.get("regenerating_seconds")
    again = 0.0 if regenerating is None else min(regenerating, backward)
    added = max(0.0, backward - plain) if regenerating is None else 0.0
    return {
        "forward": row.get("forward_seconds") or 0.0,
        "backward": backward - again - added,
        "regenerating": again,
        f"added to backward of {BASELINE}": added,
        "optimizer": row.get("optimizer_seconds") or 0.0,
    }


def _length_parts(row: RowDict, base: RowDict) -> Parts:
    return {"tokens": row.get("longest_sequence") or 0}


def _without_lengths(rows: Iterable[RowDict]) -> list[RowDict]:
    """One row for all sequence lengths, which share the longest that fits."""
    found: dict[tuple[Any, ...], RowDict] = {}
    for row in rows:
        one = {**row, "sequence_length": None}
        found.setdefault((place(one), row["policy"]), one)
    return list(found.values())


def _legend(lengths: Sequence[int]) -> list[Line2D]:
    kinds = [("peak", "black"), ("held after forward", "white")]
    markers = [
        Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor=face, label=label)
        for label, face in kinds
    ]
    markers.append(Line2D([], [], color="gray", linestyle="dashed", label="Pareto frontier"))
    named = [(i, length) for i, length in enumerate(lengths) if length is not None]
    return markers + [Line2D([], [], color=f"C{i}", label=f"sequence {length}") for i, length in named]


def _spread(labels: Sequence[Annotation], frame: BboxBase, taken: list[Any]) -> None:
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
