"""Shows a plan's frontier, the plans for other budgets, as a table and as a plot."""

from __future__ import annotations

import textwrap
from collections import Counter

from matplotlib.figure import Figure
from tabulate import tabulate

from recompute.planning.plan import Plan
from recompute.planning.prediction import choices_of
from recompute.units import humanize

_TITLE_WIDTH = 90  # characters that the figure has room for


def table(plan: Plan) -> str:
    """One line for each point of the frontier: peak, time, the peak's moment, how many regions run in which way."""
    fastest = min(point.prediction.step_seconds for point in plan.frontier) or 1.0
    rows = []
    for assignment, prediction in plan.frontier:
        choices = choices_of(plan.profile, assignment)
        ways = Counter(choice.name for choice in choices if choice.rule is not None)
        milliseconds = f"{prediction.step_seconds * 1e3:.1f} ({prediction.step_seconds / fastest:.2f}x)"
        ways_text = ", ".join(f"{count} {name}" for name, count in ways.items()) or "none"
        rows.append((humanize(prediction.peak_nbytes), milliseconds, prediction.peak_moment, ways_text))
    headers = ("peak", "ms a step", "peak during", "regions under a rule")
    return tabulate(rows, headers, "github", colalign=("right", "right", "left", "left"), disable_numparse=True)


def plot(plan: Plan) -> Figure:
    """Peak against step time: the frontier, the plan, its budget, and the best uniform policy."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    predictions = [point.prediction for point in plan.frontier]
    unit, nbytes = next(
        (unit, 1024**exponent)
        for unit, exponent in (("GiB", 3), ("MiB", 2), ("KiB", 1), ("B", 0))
        if plan.predicted_peak_bytes >= 1024**exponent or not exponent
    )
    title = "\n".join(textwrap.wrap(plan.profile.model, _TITLE_WIDTH))
    axes = figure.add_subplot(xlabel=f"peak memory, {unit}", ylabel="milliseconds a step")
    axes.set_title(title, fontsize="medium")
    axes.plot(
        [prediction.peak_nbytes / nbytes for prediction in predictions],
        [prediction.step_seconds * 1e3 for prediction in predictions],
        "o-",
        drawstyle="steps-pre",  # a budget between two points gives the plan of the smaller one
        label="frontier (predicted)",
    )
    axes.axvline(
        plan.budget_nbytes / nbytes, color="black", linestyle=":", label=f"budget {humanize(plan.budget_nbytes)}"
    )
    if plan.uniform is not None:
        peak, seconds = plan.uniform.predicted_peak_bytes, plan.uniform.predicted_step_seconds
        axes.plot(peak / nbytes, seconds * 1e3, "s", color="C1", label=f"uniform: {plan.uniform.choice}")
    axes.plot(plan.predicted_peak_bytes / nbytes, plan.predicted_step_seconds * 1e3, "D", color="C2", label="plan")
    for found in plan.rounds[-1:]:
        axes.plot(
            found.measured_peak_nbytes / nbytes, found.measured_step_seconds * 1e3, "*", color="C3", label="measured"
        )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
