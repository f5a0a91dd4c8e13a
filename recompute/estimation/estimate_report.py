"""Estimates as tables, and a sweep over batch and sequence as a table and a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure
from tabulate import tabulate

from recompute.estimation.estimate_result import Estimate
from recompute.units import humanize


def sweep_table(estimates: Sequence[tuple[int, int, Estimate]]) -> str:
    """One line for each batch size and sequence length."""
    rows = [
        (
            batch_size,
            length,
            humanize(each.static_bytes.total),
            humanize(each.activation_bytes),
            humanize(each.logits_peak_bytes),
            humanize(each.peak_bytes),
            each.peak_moment,
            each.dominates,
            each.advice[0].what if each.advice else "",
        )
        for batch_size, length, each in estimates
    ]
    columns = ["batch", "sequence", "static", "activations", "logits", "peak", "at", "most of it", "best change"]
    align = ["right"] * 6 + ["left"] * 3
    return tabulate(rows, columns, "simple", colalign=align, disable_numparse=True)


def sweep_plot(estimates: Sequence[tuple[int, int, Estimate]]) -> Figure:
    """The peak against the sequence length, a line for each batch size, over what is static."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for size in sorted({batch_size for batch_size, _, _ in estimates}):
        points = sorted(
            (length, each.peak_bytes / 2**30) for batch_size, length, each in estimates if batch_size == size
        )
        axes.plot(*zip(*points, strict=True), marker="o", label=f"batch {size}")
    static = estimates[0][2].static_bytes.total / 2**30
    axes.axhline(static, color="gray", linestyle="--", label="static")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("peak, GiB a device")
    axes.set_title("\n".join(textwrap.wrap(estimates[0][2].settings.model, 80)), fontsize="medium")
    axes.legend()
    return figure
