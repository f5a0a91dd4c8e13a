"""What takes the memory of a training step from 1B to 70B parameters, and what still helps there. It needs no GPU:

    python examples/ablation/scale.py --out results/scale

Every figure is an estimate: forward, backward and the optimizer's step run on tensors without values. Estimates of
steps that fit one GPU were within 0.6% of the measured peaks (see the guide). Three questions, three tables:

- scale: which part dominates, by the size of the model and the devices that share it?
- tokens: how do the parts of one model grow with the tokens of a batch?
- loss: what does it save not to make logits, and where does it stop to pay?

It writes results.json, results.md and results.png, the file of results after each estimate.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import track
from tabulate import tabulate
from transformers import LlamaConfig, Qwen3Config

import recompute
from recompute import counters
from recompute.units import humanize


def llama(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
    )


MODELS = {
    "Llama 3.2 1B": llama(2048, 8192, 16, 32, tied=True),
    "Llama 3.2 3B": llama(3072, 8192, 28, 24, tied=True),
    "Llama 3 8B": llama(4096, 14_336, 32, 32),
    "Qwen 3 32B": Qwen3Config(
        vocab_size=151_936,
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
    ),
    "Llama 3 70B": llama(8192, 28_672, 80, 64),
}
SHARDINGS = (("none", 1), ("zero1", 8), ("fsdp2", 8), ("fsdp2", 64))
POLICIES = ("none", "elementwise", "full")
LOSSES = ("full", "chunked")
TOKENS = ((1, 2048), (1, 8192), (4, 8192), (1, 32_768), (1, 131_072))
"""Batch sizes and sequence lengths."""
OF_TOKENS, SHARED_BY = "Llama 3 8B", ("fsdp2", 8)
LENGTH = 8192
SETTINGS = {"dtype": "bfloat16-mixed", "optimizer": "adamw-fused"}


@dataclass(frozen=True)
class Case:
    """A step to estimate."""

    model: str
    sharding: str
    devices: int
    batch_size: int = 1
    seq_len: int = LENGTH
    policy: str = "none"
    loss: str = "full"


@dataclass(frozen=True)
class Row:
    """A case, and the bytes that it takes on each device."""

    case: Case
    static_bytes: int
    activation_bytes: int
    logits_bytes: int
    peak_bytes: int
    peak_moment: str
    parts: dict[str, int]


def cases() -> list[Case]:
    ways = [(policy, loss) for policy in POLICIES for loss in LOSSES]
    by_scale = [
        Case(model, *sharding, policy=policy, loss=loss)
        for model in MODELS
        for sharding in SHARDINGS
        for policy, loss in ways
    ]
    by_tokens = [
        Case(OF_TOKENS, *SHARED_BY, batch_size, length, policy, loss)
        for batch_size, length in TOKENS
        for policy, loss in ways
    ]
    return list(dict.fromkeys([*by_scale, *by_tokens]))


def estimated(case: Case) -> Row:
    found = recompute.estimate(
        MODELS[case.model],
        batch_size=case.batch_size,
        seq_len=case.seq_len,
        sharding=case.sharding,
        devices=case.devices,
        policy=case.policy,
        loss=case.loss,
        advise=False,
        **SETTINGS,
    )
    return Row(
        case,
        found.static_bytes.total,
        found.activation_bytes,
        found.logits_peak_bytes,
        found.peak_bytes,
        found.peak_moment,
        dict(found.parts),
    )


class Report:
    """The rows as tables and a plot."""

    def __init__(self, results: dict[str, Any]):
        self.results = results
        rows = [Row(**{**row, "case": Case(**row["case"])}) for row in results["rows"]]
        self.rows = {row.case: row for row in rows}

    def markdown(self) -> str:
        machine = self.results["machine"]
        return (
            "\n\n".join(
                [
                    f"`{self.results['command']}`, torch {machine['torch']}, transformers {machine['transformers']}, "
                    f"{machine['date'][:10]}. Estimates, in bytes on each device. Weights and gradients are bfloat16; "
                    "AdamW (fused) keeps weights and states in float32: 16 bytes a parameter together.",
                    f"## Scale\n\nOne sequence of {LENGTH:,} tokens on each device.",
                    self._scale(),
                    f"## Tokens\n\n{OF_TOKENS}, {' over '.join(map(str, SHARED_BY))} devices.",
                    self._tokens(),
                    "## Loss\n\nThe share of the peak that goes if no logits are made.",
                    self._loss(),
                ]
            )
            + "\n"
        )

    def _scale(self) -> str:
        headers = ["model", "sharding", "static", "activations", "logits", "peak", "at", *self._changes()]
        lines = []
        for row in self._plain():
            case = row.case
            if case.seq_len != LENGTH or case.batch_size != 1:
                continue
            lines.append(
                [
                    case.model,
                    _sharding(case),
                    *map(humanize, (row.static_bytes, row.activation_bytes, row.logits_bytes, row.peak_bytes)),
                    row.peak_moment,
                    *self._changed(case),
                ]
            )
        return _table(headers, lines)

    def _tokens(self) -> str:
        headers = ["batch", "static", "activations", "logits", "peak", "at", *self._changes()]
        lines = []
        for size, length in TOKENS:
            case = Case(OF_TOKENS, *SHARED_BY, size, length)
            row = self.rows.get(case)
            if row is not None:
                sizes = map(humanize, (row.static_bytes, row.activation_bytes, row.logits_bytes, row.peak_bytes))
                lines.append([f"{size} x {length:,}", *sizes, row.peak_moment, *self._changed(case)])
        return _table(headers, lines)

    def _loss(self) -> str:
        lines = []
        for row in self._plain():
            case = row.case
            shares = [self._saved_without_logits(case, policy) for policy in POLICIES]
            lines.append([case.model, _sharding(case), f"{case.batch_size} x {case.seq_len:,}", *shares])
        return _table(["model", "sharding", "batch", *[f"under {policy}" for policy in POLICIES]], lines)

    def _saved_without_logits(self, case: Case, policy: str) -> str:
        whole, chunked = (self.rows.get(_like(case, policy, loss)) for loss in LOSSES)
        return "" if whole is None or chunked is None else f"{1 - chunked.peak_bytes / whole.peak_bytes:.0%}"

    def _plain(self) -> Iterator[Row]:
        return (row for row in self.rows.values() if (row.case.policy, row.case.loss) == ("none", "full"))

    def _changes(self) -> list[str]:
        return ["elementwise", "full", "no logits", "full, no logits"]

    def _changed(self, case: Case) -> list[str]:
        """The peaks under the changes, and their ratios to the peak without any."""
        ways = (("elementwise", "full"), ("full", "full"), ("none", "chunked"), ("full", "chunked"))
        before = self.rows[case].peak_bytes
        found = [self.rows.get(_like(case, *way)) for way in ways]
        return ["" if row is None else f"{humanize(row.peak_bytes)} ({row.peak_bytes / before:.2f}x)" for row in found]

    def plot(self) -> Figure:
        """The parts of the peak: without a policy, and under ``full`` without logits, as shares of the former."""
        figure = Figure(figsize=(12, 3.6 * len(SHARDINGS)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(SHARDINGS), 1)
        parts = list(dict.fromkeys(part for row in self.rows.values() for part in row.parts))
        for ax, sharding in zip(axes, SHARDINGS, strict=True):
            labels, at = [], 0.0
            for model in MODELS:
                for way in (("none", "full"), ("full", "chunked")):
                    row = self.rows.get(_like(Case(model, *sharding), *way))
                    if row is None:
                        continue
                    bottom, whole = 0.0, self.rows[Case(model, *sharding)].peak_bytes
                    for index, part in enumerate(parts):
                        size = row.parts.get(part, 0) / whole
                        ax.bar(at, size, bottom=bottom, color=f"C{index}", label=None if at else part)
                        bottom += size
                    ax.text(at, bottom, humanize(row.peak_bytes), ha="center", va="bottom", fontsize=7)
                    labels.append((at, f"{model}\n{'no policy' if way[0] == 'none' else 'full, no logits'}"))
                    at += 1
                at += 0.5
            ax.set_xticks([place for place, _ in labels], [text for _, text in labels], fontsize=7)
            ax.set_ylabel("of the peak without a policy")
            ax.set_ylim(0, 1.1)
            ax.set_title(_sharding(Case("", *sharding)))
            handles, names = ax.get_legend_handles_labels()
            ax.legend(handles, names, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure


def _like(case: Case, policy: str, loss: str) -> Case:
    return Case(case.model, case.sharding, case.devices, case.batch_size, case.seq_len, policy, loss)


def _sharding(case: Case) -> str:
    return "one device" if case.devices == 1 else f"{case.sharding} over {case.devices} devices"


def _table(headers: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return tabulate(lines, headers, "github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/scale"), help="folder for the results")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": counters.describe_machine(torch.device("cpu")),
        "settings": SETTINGS,
        "rows": [],
    }
    for case in track([each for each in cases() if each.model in options.models], "estimates"):
        results["rows"].append(asdict(estimated(case)))
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report = Report(results)
    (options.out / "results.md").write_text(report.markdown(), encoding="utf-8")
    report.plot().savefig(options.out / "results.png")
    print(report.markdown())


if __name__ == "__main__":
    main()
