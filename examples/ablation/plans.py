"""Do plans hold, and are they faster than torch's memory budget and uniform policies at equal peaks? All in one run:

    python examples/ablation/plans.py examples/ablation/llama-8b.yaml --out results/plans-8b

It trains the model of an ablation's configuration (forward, loss, backward, optimizer) under uniform policies and under
what others offer, and profiles it once. Then it plans for budgets from the peak with everything kept down to the peak
of a full checkpoint, and for the peak of each other way, and trains under each plan. It writes results.json, results.md
and results.png.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import nn
from torch.optim import AdamW

import recompute
from recompute import counters
from recompute.ablation.ablation_config import AblationConfig
from recompute.ablation.ablation_report import describe_models
from recompute.ablation.peers import under
from recompute.ablation.subjects import experiment_of, load_text
from recompute.ablation.trials import Experiment
from recompute.compiled.generated.generated_kernel import wait_for_kernels
from recompute.counters import resolve_device
from recompute.errors import BudgetError
from recompute.policy.document import load_document
from recompute.profiling.cost_table import Profile
from recompute.profiling.dry_run import static_nbytes
from recompute.units import humanize

UNIFORM = ("none", "elementwise", "auto", "full")
PEERS = ("torch-checkpoint", "torch-selective", "torch-compile", "torch-compile-selective")
BUDGETS = ("torch-budget-0.7", "torch-budget-0.5", "torch-budget-0.4", "torch-budget-0.3", "torch-budget-0.2")
WARMUP, STEPS = 7, 7  # regions are captured in the first steps
ROUNDING = 1 << 20


@dataclass(frozen=True)
class Point:
    """One way to train: what was predicted for it, if anything, and what was measured. Peaks include static bytes."""

    way: str
    kind: str
    """"uniform", "peer", "budget" (torch's) or "plan"."""
    peak_bytes: int
    step_seconds: float
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_seconds: float | None = None


@dataclass
class Trainer:
    """Real training steps, which change the weights a little."""

    experiment: Experiment
    model: nn.Module
    optimizer: AdamW | None = None

    @property
    def batch(self) -> Any:
        return self.experiment.batches[0]

    def step(self) -> None:
        if self.optimizer is None:
            self.optimizer = AdamW(self.model.parameters(), lr=1e-6, fused=True)
        self.experiment.loss(self.model, self.batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measure(self) -> tuple[int, float]:
        """The peak, static bytes included, and the median seconds of a step."""
        device = self.experiment.device
        for _ in range(WARMUP):
            self.step()
            wait_for_kernels()
        seconds = []
        for _ in range(STEPS):
            start = counters.wall_seconds(device)
            self.step()
            seconds.append(counters.wall_seconds(device) - start)
        assert self.optimizer is not None, "the first step makes one"
        static = static_nbytes(self.model, self.optimizer, self.batch)
        with counters.memory_trace(device) as trace:
            self.step()
        return static + trace.peak_nbytes, statistics.median(seconds)


def main(config_path: Path, out: Path, count: int, peers: bool, profile_path: Path | None) -> None:
    config = load_document(AblationConfig, config_path, kind="configuration")
    comparison, *others = config.comparisons()
    if others or comparison.dtype == "autocast":
        raise SystemExit(f"{config_path}: expected one model, length and batch size, in float32 or bfloat16")
    device = resolve_device(config.device)
    experiment = experiment_of(comparison, load_text(config.text)[1], device, lambda *_: None)

    def trainer() -> Trainer:
        gc.collect()
        return Trainer(experiment, experiment.make())

    points: list[Point] = []
    ways = {way: "uniform" for way in UNIFORM}
    if peers:
        ways |= {way: "peer" for way in PEERS} | {way: "budget" for way in BUDGETS}
    for way, kind in ways.items():
        one = trainer()
        with under(way, one.model):
            points.append(Point(way, kind, *one.measure()))
        del one
        show(points[-1])
    one = trainer()
    start = counters.wall_seconds(device)
    if profile_path is not None:
        profile = Profile.load(profile_path)
    else:
        profile = recompute.profile(one.model, one.batch, optimizer=partial(AdamW, fused=True))
    profile_seconds = counters.wall_seconds(device) - start
    out.mkdir(parents=True, exist_ok=True)
    profile.save(out / "profile.json")
    most, least = (next(point.peak_bytes for point in points if point.way == way) for way in ("none", "full"))
    steps = [round(most - (most - least) * i / (count - 1)) for i in range(count)]
    for budget in dict.fromkeys([*steps, *(point.peak_bytes for point in points)]):
        try:
            plan = recompute.plan(profile, budget=budget)
        except BudgetError as error:
            print(f"{humanize(budget)}: {error}", file=sys.stderr)
            continue
        with recompute.apply(one.model, plan.policy):
            found = one.measure()
        points.append(Point("plan", "plan", *found, budget, plan.predicted_peak_bytes, plan.predicted_step_seconds))
        show(points[-1])
    results: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "machine": counters.describe_machine(device),
        "config": config.model_dump(mode="json"),
        "profile_seconds": profile_seconds,
        "static_bytes": profile.static_nbytes,
        "steps": steps,
        "points": [asdict(point) for point in points],
    }
    write(results, out)


def show(point: Point) -> None:
    predicted = ""
    if point.predicted_peak_bytes is not None and point.predicted_step_seconds is not None:
        predicted = f" (predicted {humanize(point.predicted_peak_bytes)}, {point.predicted_step_seconds * 1e3:.1f} ms)"
    print(f"{point.way}: {humanize(point.peak_bytes)}, {point.step_seconds * 1e3:.1f} ms{predicted}", flush=True)


def write(results: dict[str, Any], out: Path) -> None:
    points = [Point(**point) for point in results["points"]]
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    (out / "results.md").write_text(markdown(results, points), encoding="utf-8")
    plot(results, points).savefig(out / "results.png")


def markdown(results: dict[str, Any], points: list[Point]) -> str:
    plans = {point.budget_bytes: point for point in points if point.kind == "plan"}
    fastest = {point.peak_bytes: best_within(point.peak_bytes, plans.values()) for point in points}
    held = [line(plans[budget]) for budget in results["steps"] if budget in plans]
    columns = ("budget", "predicted peak", "measured peak", "", "predicted ms", "measured ms", "")
    blocks = ["# Plans", tabulate(held, columns, "github", disable_numparse=True)]
    beside = []
    ratios = []
    for point in points:
        plan = fastest[point.peak_bytes]
        if point.kind == "plan" or plan is None:
            continue
        ratio = plan.step_seconds / point.step_seconds
        ratios += [ratio] if point.kind == "budget" else []
        beside.append(
            (
                point.way,
                humanize(point.peak_bytes),
                f"{point.step_seconds * 1e3:.1f}",
                humanize(plan.peak_bytes),
                f"{plan.step_seconds * 1e3:.1f}",
                f"{ratio:.3f}",
            )
        )
    blocks.append("## At the measured peak of each other way")
    headers = ("way", "peak", "ms a step", "fastest plan within that", "its ms a step", "of the way's")
    blocks.append(tabulate(beside, headers, "github", disable_numparse=True))
    if ratios:
        blocks.append(
            f"Of torch's memory budgets' time, in the geometric mean: {statistics.geometric_mean(ratios):.3f}."
        )
    machine, config = results["machine"], results["config"]
    blocks.append(
        f"Whole training steps (fused AdamW); peaks include {humanize(results['static_bytes'])} of parameters and "
        f"optimizer states. {describe_models(config)}; sequence "
        f"{config['sequence_lengths'][0]}, batch {config['batch_size']}, {config['dtype']}. Profiled in "
        f"{results['profile_seconds']:.0f} s. {machine['gpu'] or machine['cpu']}, torch {machine['torch']}, "
        f"{machine['date'][:10]}."
    )
    blocks.append(f"`{results['command']}`")
    return "\n\n".join(blocks) + "\n"


def best_within(peak_bytes: int, plans: Iterable[Point]) -> Point | None:
    """The fastest of the plans whose measured peak is no higher, up to the allocator's rounding."""
    fitting = [plan for plan in plans if plan.peak_bytes <= peak_bytes + ROUNDING]
    return min(fitting, key=lambda plan: plan.step_seconds, default=None)


def line(plan: Point) -> tuple[str, ...]:
    assert plan.budget_bytes is not None
    assert plan.predicted_peak_bytes is not None
    assert plan.predicted_step_seconds is not None
    return (
        humanize(plan.budget_bytes),
        humanize(plan.predicted_peak_bytes),
        humanize(plan.peak_bytes),
        f"{plan.peak_bytes / plan.predicted_peak_bytes - 1:+.1%}"
        + (" over" if plan.peak_bytes > plan.budget_bytes else ""),
        f"{plan.predicted_step_seconds * 1e3:.1f}",
        f"{plan.step_seconds * 1e3:.1f}",
        f"{plan.step_seconds / plan.predicted_step_seconds - 1:+.1%}",
    )


def plot(results: dict[str, Any], points: list[Point]) -> Figure:
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="GiB at the peak", ylabel="milliseconds a step")
    groups = {
        "plan": ("plans, measured", "C0", "o-"),
        "budget": ("torch.compile, memory budget", "C1", "s-"),
        "uniform": ("uniform policies", "C2", "^"),
        "peer": ("peers", "C3", "D"),
    }
    for kind, (label, color, style) in groups.items():
        found = sorted((point.peak_bytes / 2**30, point.step_seconds * 1e3) for point in points if point.kind == kind)
        if found:
            axes.plot(*zip(*found, strict=True), style, color=color, label=label, markersize=5)
    plans = [point for point in points if point.predicted_peak_bytes and point.predicted_step_seconds]
    predicted = sorted((point.predicted_peak_bytes / 2**30, point.predicted_step_seconds * 1e3) for point in plans)  # type: ignore[operator]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), "--", color="C0", alpha=0.5, label="plans, predicted")
    for point in points:
        if point.kind in ("uniform", "peer"):
            axes.annotate(
                point.way,
                (point.peak_bytes / 2**30, point.step_seconds * 1e3),
                (5, 4),
                textcoords="offset points",
                fontsize=7,
            )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config", type=Path, help="an ablation's configuration: its model, sequence length, batch and dtype"
    )
    parser.add_argument("--out", type=Path, default=Path("results/plans"), help="folder to write to")
    parser.add_argument("--budgets", type=int, default=10, help="from everything kept down to a full checkpoint")
    parser.add_argument("--no-peers", action="store_true", help="uniform policies alone: nothing is compiled")
    parser.add_argument("--profile", type=Path, help="a profile to plan from, instead of measuring one")
    arguments = parser.parse_args()
    main(arguments.config, arguments.out, arguments.budgets, not arguments.no_peers, arguments.profile)
