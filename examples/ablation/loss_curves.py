"""Does training go on alike? The loss of each step under several policies, from the same weights and on the same text:

    python examples/ablation/loss_curves.py none none compress --steps 300 --out results/loss-curves

A policy may be named twice: on CUDA two exact runs differ, since attention's backward and others add in any order. It
trains the model of an ablation's configuration, by default one of the shape of Llama 1B with eight layers on a GPU, and
writes results.json, results.md and results.png. The text is the source of Python's standard library, as bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import Progress
from tabulate import tabulate

from recompute import counters
from recompute.ablation.ablation_config import AblationConfig, default_config
from recompute.ablation.peers import under
from recompute.ablation.subjects import experiment_of, load_text
from recompute.ablation.trials import seeded
from recompute.policy.document import load_document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="+", help="presets, or paths of policy files; the first is compared with")
    parser.add_argument("--config", type=Path, help="an ablation's configuration")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("results/loss-curves"))
    options = parser.parse_args()

    config = configuration(options.config, options.steps)
    device = counters.resolve_device(config.device)
    source, text = load_text(config.text)
    runs = []
    with Progress() as progress:
        for policy in options.policies:
            task = progress.add_task(policy, total=config.steps)
            losses = train(config, policy, text, lambda task=task: progress.advance(task))
            runs.append({"policy": policy, "losses": losses})
    results = {
        "command": shlex.join(sys.argv),
        "machine": counters.describe_machine(device),
        "config": config.model_dump(mode="json"),
        "text": source,
        "runs": runs,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "results.md").write_text(markdown(results), encoding="utf-8")
    plot(results).savefig(options.out / "results.png")
    print(markdown(results))


def configuration(path: Path | None, steps: int) -> AblationConfig:
    config = default_config() if path is None else load_document(AblationConfig, path, kind="configuration")
    if path is None and counters.resolve_device(config.device).type == "cuda":
        config = config.model_copy(update={"model": config.model.model_copy(update={"layers": 8})})
    return config.model_copy(update={"steps": steps, "sequence_lengths": config.sequence_lengths[:1]})


def train(config: AblationConfig, policy: str, text: bytes, advance: Any) -> list[float]:
    """The loss of each step."""
    device = counters.resolve_device(config.device)
    gc.collect()
    experiment = experiment_of(config.single(), text, device, lambda *_: None)
    model = experiment.make()
    losses = []
    with under(policy, model), seeded(config.seed, device):
        optimizer = experiment.optimizer(model.parameters())
        for batch in experiment.batches:
            optimizer.zero_grad()
            loss = experiment.forward(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            advance()
    return losses


def smoothed(losses: list[float], span: int = 10) -> list[float]:
    """The mean of each loss and those before it, as many as ``span``."""
    return [sum(window) / len(window) for i in range(len(losses)) for window in [losses[max(0, i + 1 - span) : i + 1]]]


def markdown(results: dict[str, Any]) -> str:
    """For each run: its last losses, and how far its losses are from those of the first run."""
    first = results["runs"][0]["losses"]
    rows = []
    for run in results["runs"]:
        apart = [abs(one - other) for one, other in zip(run["losses"], first, strict=True)]
        last = sum(run["losses"][-10:]) / len(run["losses"][-10:])
        rows.append((run["policy"], f"{last:.4f}", f"{max(apart):.4f}", f"{sum(apart) / len(apart):.4f}"))
    headers = ("policy", "loss, mean of the last 10", "from the first run, at most", "on average")
    machine = results["machine"]
    where = machine["gpu"] or machine["cpu"]
    table = tabulate(rows, headers, "github", disable_numparse=True)
    return (
        f"{table}\n\n{len(first)} steps on the {results['text']}, {results['config']['dtype']}; {where}, torch "
        f"{machine['torch']}, {machine['date'][:10]}.\n\n`{results['command']}`\n"
    )


def plot(results: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, apart = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    first = smoothed(results["runs"][0]["losses"])
    for number, run in enumerate(results["runs"]):
        curve, label = smoothed(run["losses"]), f"{run['policy']} ({number + 1})"
        losses.plot(curve, label=label, linewidth=1)
        apart.plot([one - other for one, other in zip(curve, first, strict=True)], linewidth=1)
    losses.set_ylabel("loss, mean of 10 steps")
    losses.legend()
    apart.set_ylabel("minus the first run's")
    apart.set_xlabel("step")
    return figure


if __name__ == "__main__":
    main()
