"""Plots of an ablation's results: memory against time, what both are made of, and the longest sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import BboxBase

from recompute.ablation.peers import BASELINE
from recompute.ablation.results import AXES, RowDict, place, place_of, varied
from recompute.files import png_of

NAMES = ("results.png", "memory.png", "times.png", "longest.png")
"""The files, in order. Only the first is drawn of every run."""

_CROWDED = 12
"""Points in one frame whose names can still be read."""


def pictures(rows: Sequence[RowDict]) -> dict[str, bytes]:
    """The plots that there are numbers for, as PNG files by their names."""
    figures = {"results.png": memory_against_time(rows)}
    measured = [row for row in rows if row["error"] is None]
    if any(row.get("parameter_bytes") is not None for row in measured):
        most = max(sum(_memory_parts(row, {}).values()) for row in measured)
        figures["memory.png"] = _bars(measured, _memory_parts, *_unit(most))
    if any(row.get("backward_seconds") is not None for row in measured):
        figures["times.png"] = _bars(measured, _time_parts, "milliseconds a step", 1e-3)
    if any(row.get("longest_sequence") is not None for row in rows):
        without_lengths = {
            (place(one), one["policy"]): one for one in ({**row, "sequence_length": None} for row in rows)
        }
        parts = lambda row, base: {"tokens": row.get("longest_sequence") or 0}  # noqa: E731
        figures["longest.png"] = _bars([*without_lengths.values()], parts, "tokens of the longest sequence", 1)
    return {name: png_of(figure) for name, figure in figures.items()}


def _unit(most_nbytes: float) -> tuple[str, float]:
    return ("GiB", 2**30) if most_nbytes >= 2**30 else ("MiB", 2**20)


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
        drawn = [axes.get_legend(), *(line for line in axes.lines if line.get_drawstyle() == "default")]
        _spread(named, axes.bbox, [artist.get_window_extent() for artist in drawn if artist is not None])
    return figure


def _draw_points(axes: Axes, title: str, rows: Sequence[RowDict]) -> list[Annotation]:
    """Draw rows that differ in policy and sequence length alone; return the labels of their points."""
    unit, unit_nbytes = _unit(max((row["peak_bytes"] for row in rows), default=0))
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
        best = frontier(row for row in rows if row["sequence_length"] == length)
        corners = [(row["step_seconds"] * 1e3, row["peak_bytes"] / unit_nbytes) for row in best]
        axes.step(*zip(*corners, strict=True), f"C{number}--", where="post", alpha=0.4)
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


def _groups(rows: Sequence[RowDict], axes: Sequence[str]) -> list[tuple[str, list[RowDict]]]:
    """The rows that are equal on these axes, with what tells them from others."""
    shown = varied(rows) & {*axes}
    found: dict[tuple[Any, ...], list[RowDict]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(axis) for axis in axes), []).append(row)
    titles = [place_of({axis: group[0].get(axis) for axis in shown}, shown) for group in found.values()]
    return [(title.removeprefix(", "), group) for title, group in zip(titles, found.values(), strict=True)]


def _frames(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2 if count < 5 else 3)
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * lines), dpi=150 if count < 5 else 75, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, [figure.add_subplot(lines, columns, number + 1) for number in range(count)]


Parts = Callable[[RowDict, RowDict], Mapping[str, float]]
"""The lengths of a bar's parts, by what they are, from its row and the baseline's."""


def _bars(rows: Sequence[RowDict], parts: Parts, label: str, unit: float) -> Figure:
    """A bar for each row, put together from its parts. Each comparison has axes of its own."""
    groups = _groups(rows, AXES)
    figure, frames = _frames(len(groups), width=7, height=1.2 + 0.35 * max(len(group) for _, group in groups))
    for axes, (title, group) in zip(frames, groups, strict=True):
        base = next((row for row in group if row["policy"] == BASELINE), {})
        drawn = [parts(row, base) for row in group]
        left = [0.0] * len(group)
        for name in drawn[0]:
            lengths = [each[name] / unit for each in drawn]
            axes.barh(range(len(group)), lengths, left=left, label=name)
            left = [a + b for a, b in zip(left, lengths, strict=True)]
        axes.set_yticks(range(len(group)), [row["policy"] for row in group])
        axes.invert_yaxis()
        axes.set(xlabel=label, title=title)
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


def _legend(lengths: Sequence[int]) -> list[Line2D]:
    markers = [
        Line2D([], [], color="black", marker="o", linestyle="", markerfacecolor=face, label=label)
        for label, face in (("peak", "black"), ("held after forward", "white"))
    ]
    markers.append(Line2D([], [], color="gray", linestyle="dashed", label="Pareto frontier"))
    named = [(number, length) for number, length in enumerate(lengths) if length is not None]
    return markers + [Line2D([], [], color=f"C{number}", label=f"sequence {length}") for number, length in named]


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
