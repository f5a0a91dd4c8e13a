"""The figure of the first page: the whole peak of each row of an ablation's first model, part by part.

python examples/ablation/whole_peaks.py examples/ablation/results/against-peers-h200/results.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recompute.files import png_of

PARTS = {
    "parameter_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "peak_bytes": "activations",
}
COLORS = ("#9aa5b1", "#c3cbd4", "#dfe4ea", "#d9622b")


def plot(rows: list[dict[str, Any]]) -> Figure:
    figure = Figure(figsize=(9, 0.38 * len(rows) + 1.1), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, row in enumerate(rows):
        left = 0.0
        for (part, word), color in zip(PARTS.items(), COLORS, strict=True):
            size = row[part] / 2**30
            axes.barh(number, size, left=left, color=color, label=word if number == 0 else None)
            left += size
        axes.text(left + 0.4, number, f"{left:.1f} GiB, {row['step_seconds'] * 1e3:.0f} ms a step", va="center")
    axes.set_yticks(range(len(rows)), [row["policy"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(sum(row[part] for part in PARTS) / 2**30 for row in rows))
    axes.set_xlabel("GiB at the peak")
    axes.legend(loc="lower right", ncols=4, frameon=False, bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, help="by default whole-peaks.png beside the results")
    options = parser.parse_args()
    rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    measured = [row for row in rows if row["model"] == rows[0]["model"] and row["error"] is None]
    (options.out or options.results.with_name("whole-peaks.png")).write_bytes(png_of(plot(measured)))


if __name__ == "__main__":
    main()
