"""Tables, sentences and the plot hold what the rows say, for rows that ran, failed, differ or are missing."""

from __future__ import annotations

import base64
import csv
import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recompute.ablation import ablation_plots, ablation_report

MIB = 2**20
BITWISE = {
    "losses_match": True,
    "loss_error": 0.0,
    "grads_match": True,
    "grad_error": 0.0,
    "grad_error_last": 0.0,
}


def row(policy: str, held: int = 8 * MIB, peak: int = 10 * MIB, seconds: float = 0.1, **changes: Any) -> dict[str, Any]:
    measured = {
        "policy": policy,
        "sequence_length": 64,
        "exact": True,
        "activation_bytes_held": held,
        "peak_bytes": peak,
        "step_seconds": seconds,
        "forward_cpu_seconds": None,
        "grad_tolerance": 0.0,
        "error": None,
        **BITWISE,
    }
    return {**measured, **changes}


def failed(policy: str, error: str) -> dict[str, Any]:
    nothing = dict.fromkeys(row(policy))
    return {**nothing, "policy": policy, "sequence_length": 64, "error": error}


NONE = row("none")
FULL = row("full", held=2 * MIB, peak=4 * MIB, seconds=0.13)
KERNEL = row(
    "kernel",
    exact=False,
    losses_match=False,
    loss_error=1.25e-7,
    grad_error=2.5e-7,
    grad_error_last=0.25,
    grad_tolerance=5e-7,
)
BROKEN = failed("broken", "OutOfMemoryError: tried to allocate 80 GiB\nand more advice")


def results(*rows: dict[str, Any], complete: bool = True) -> dict[str, Any]:
    shape = {"hidden_size": 64, "intermediate_size": 172, "layers": 2, "heads": 4, "kv_heads": 2}
    machine = {"cpu": "a CPU", "threads": 2, "gpu": None, "torch": "2.11.0", "transformers": "5.0.0"}
    return {
        "complete": complete,
        "command": "recompute ablate",
        "config": {"model": shape, "batch_size": 4, "sequence_lengths": [64], "dtype": "float32", "steps": 8},
        "machine": {**machine, "python": "3.11.7", "date": "2026-01-02T03:04:05+00:00"},
        "text": {"source": "a text", "nbytes": 1000},
        "rows": list(rows),
    }


def cells(markdown: str) -> list[list[str]]:
    """The table of a Markdown text, without the line below its header."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * MIB, "3.0 MiB"),
        (1024 * MIB - 1, "1024.0 MiB"),
        (1536 * MIB, "1.50 GiB"),
        (2**52, "4096.00 TiB"),
        (-58_653_184, "-55.9 MiB"),
        (-1, "-1 B"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_they_fill(nbytes: int, text: str) -> None:
    assert ablation_report.humanize(nbytes) == text


def test_table_gives_ratios_to_the_baseline_and_what_matches() -> None:
    assert cells(ablation_report.markdown(results(NONE, FULL, KERNEL))) == [
        ["policy", "held after forward", "peak", "ms a step", "losses", "gradients"],
        ["none", "8.0 MiB", "10.0 MiB", "100.0", "✓ bitwise", "✓ bitwise"],
        ["full", "2.0 MiB (0.25x)", "4.0 MiB (0.40x)", "130.0 (1.30x)", "✓ bitwise", "✓ bitwise"],
        ["kernel", "8.0 MiB (1.00x)", "10.0 MiB (1.00x)", "100.0 (1.00x)", "1.2e-07", "✓ 2.5e-07"],
    ]


def test_ratios_are_to_the_baseline_of_the_same_length() -> None:
    longer = [row("none", held=40 * MIB, sequence_length=128), row("full", held=4 * MIB, sequence_length=128)]
    table = cells(ablation_report.markdown(results(NONE, FULL, *longer)))
    assert [line[1] for line in table] == ["sequence", "64", "64", "128", "128"]
    assert [line[2] for line in table[1:]] == ["8.0 MiB", "2.0 MiB (0.25x)", "40.0 MiB", "4.0 MiB (0.10x)"]


def test_cpu_time_of_forward_is_shown_where_it_was_measured() -> None:
    gpu_rows = [row("none", forward_cpu_seconds=0.01), row("full", forward_cpu_seconds=0.02)]
    table = cells(ablation_report.markdown(results(*gpu_rows)))
    assert [line[4] for line in table] == ["CPU ms a forward", "10.0", "20.0 (2.00x)"]


def test_what_differs_is_marked_and_told() -> None:
    other_losses = row("hook", losses_match=False, loss_error=1e-3)
    other_gradients = row("full", grads_match=False, grad_error=0.0, grad_error_last=2e-3)
    too_far = {**KERNEL, "grads_match": False, "grad_error": 6e-7}
    found = results(NONE, other_losses, other_gradients, too_far)
    table = cells(ablation_report.markdown(found))
    assert [line[4:] for line in table[2:]] == [
        ["✗ 1.0e-03", "✓ bitwise"],
        ["✓ bitwise", "✗ 2.0e-03"],
        ["1.2e-07", "✗ 6.0e-07"],
    ]
    assert ablation_report.failures(found) == [
        "hook, sequence 64: relative error 1.0e-03 of the losses, above 0",
        "full, sequence 64: relative error 2.0e-03 of the gradients, above 0.0e+00",
        "kernel, sequence 64: relative error 6.0e-07 of the gradients, above 5.0e-07",
    ]


def test_an_error_that_cannot_be_judged_is_shown_without_a_mark() -> None:
    found = results(NONE, {**KERNEL, "grads_match": None, "grad_error": 2.5e-3, "grad_tolerance": None})
    assert cells(ablation_report.markdown(found))[2][5] == "2.5e-03"
    assert ablation_report.failures(found) == []


def test_a_failed_row_stays_in_the_table_and_its_error_stands_below() -> None:
    found = results(NONE, BROKEN, FULL)
    text = ablation_report.markdown(found)
    assert [line[0] for line in cells(text)[1:]] == ["none", "broken", "full"]
    assert cells(text)[2][1:] == ["-"] * 5
    assert ablation_report.failures(found) == ["broken, sequence 64: OutOfMemoryError: tried to allocate 80 GiB"]
    assert "- broken, sequence 64: OutOfMemoryError: tried to allocate 80 GiB\n" in text


def test_without_a_baseline_numbers_have_no_ratio() -> None:
    incomparable = dict.fromkeys(BITWISE)
    table = cells(ablation_report.markdown(results(failed("none", "no room"), {**FULL, **incomparable})))
    assert table[2] == ["full", "2.0 MiB", "4.0 MiB", "130.0", "-", "-"]


def test_an_interrupted_run_says_that_rows_are_missing() -> None:
    found = results(NONE, complete=False)
    assert ablation_report.failures(found) == ["interrupted: the rows still to come are missing"]
    assert "- interrupted" in ablation_report.markdown(found)
    assert ablation_report.failures(results(NONE)) == []
    assert len(cells(ablation_report.markdown(results(complete=False)))) == 1


def test_markdown_names_shape_machine_versions_date_and_command() -> None:
    text = ablation_report.markdown(results(NONE))
    for part in (
        "2 layers",
        "hidden size 64",
        "batch 4",
        "float32",
        "a text",
        "a CPU",
        "2.11.0",
        "2026-01-02",
    ):
        assert part in text
    assert text.endswith("`recompute ablate`\n")


def test_terminal_table_holds_the_same_texts() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(ablation_report.table([NONE, FULL, KERNEL, BROKEN]))
    for line in cells(ablation_report.markdown(results(NONE, FULL, KERNEL, BROKEN))):
        assert all(text in capture.get() for text in line)


def test_line_says_what_was_measured_or_what_is_wrong() -> None:
    assert ablation_report.line(FULL) == "full, sequence 64: 2.0 MiB held, 4.0 MiB peak, 130.0 ms a step"
    assert ablation_report.line(BROKEN) == "broken, sequence 64: OutOfMemoryError: tried to allocate 80 GiB"


def test_plot_labels_each_policy_once_inside_and_no_label_covers_another() -> None:
    near = [row(f"policy-{index}", peak=10 * MIB + index, seconds=0.1 + index * 1e-6) for index in range(6)]
    last = row("the-last-one-to-the-right", seconds=0.14)
    figure = ablation_plots.memory_against_time([NONE, FULL, BROKEN, *near, last])
    labels = figure.axes[0].texts
    names = ["none", "full", *(row["policy"] for row in near), "the-last-one-to-the-right"]
    assert [label.get_text() for label in labels] == names
    boxes = [label.get_window_extent() for label in labels]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    frame = figure.axes[0].bbox
    assert all(frame.x0 < box.x0 and box.x1 < frame.x1 for box in boxes)


@pytest.mark.parametrize(("scale", "unit"), [(1, "MiB"), (1024, "GiB")])
def test_plot_goes_from_held_to_peak(scale: int, unit: str) -> None:
    rows = [
        {**row, "activation_bytes_held": held * scale * MIB, "peak_bytes": peak * scale * MIB}
        for row, held, peak in ((NONE, 8, 10), (FULL, 2, 4))
    ]
    axes = ablation_plots.memory_against_time(rows).axes[0]
    bars = [line.get_xydata().tolist() for line in axes.lines if len({*line.get_xdata()}) < len(line.get_xdata())]
    assert bars == [[[100, 8], [100, 10]], [[130, 2], [130, 4]]]
    assert axes.get_ylabel() == f"{unit} above static memory"
    assert axes.get_xlabel() == "milliseconds a step"


def test_files_are_written(tmp_path: Path) -> None:
    ablation_report.write(results(NONE, FULL, BROKEN), tmp_path)
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == ablation_report.markdown(
        results(NONE, FULL, BROKEN)
    )
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_at_all_can_be_plotted(tmp_path: Path) -> None:
    ablation_report.write(results(complete=False), tmp_path)
    assert (tmp_path / "results.png").stat().st_size > 1000


def timed(policy: str, seconds: float = 0.1, backward: float = 0.05, **changes: Any) -> dict[str, Any]:
    """A row as it is written now, with all numbers."""
    found = row(policy, seconds=seconds)
    for name, value in (("step", seconds), ("forward", 0.03), ("backward", backward), ("optimizer", 0.01)):
        found |= {f"{name}_seconds": value, f"{name}_seconds_quartiles": [value * 0.9, value * 1.1]}
    facts = {"model": "m", "batch_size": 2, "dtype": "float32", "backward_added_seconds": backward - 0.05}
    static = {"parameter_bytes": MIB, "gradient_bytes": MIB, "optimizer_bytes": 2 * MIB, "logits_bytes_held": 3 * MIB}
    more = {"losses": [1.0], "timings": [{"step": [seconds]}], "longest_sequence": 4096}
    return {**found, **facts, **static, **more, **changes}


def tables_in(text: str) -> list[list[list[str]]]:
    blocks = text.split("\n\n")
    return [cells(block) for block in blocks if block.startswith("|")]


def test_times_by_part_and_memory_by_kind_have_tables_of_their_own() -> None:
    first, times, memory = tables_in(ablation_report.markdown(results(timed("none"), timed("full", 0.12, 0.07))))
    assert first[0] == ["policy", "held after forward", "peak", "ms a step", "longest sequence", "losses", "gradients"]
    assert first[2][4] == "4,096 (1.00x)"
    assert times == [
        ["policy", "step", "forward", "backward", "added to backward", "optimizer"],
        ["none", "100.0 (90.0 to 110.0)", "30.0 (27.0 to 33.0)", "50.0 (45.0 to 55.0)", "+0.0", "10.0 (9.0 to 11.0)"],
        ["full", "120.0 (108.0 to 132.0)", "30.0 (27.0 to 33.0)", "70.0 (63.0 to 77.0)", "+20.0", "10.0 (9.0 to 11.0)"],
    ]
    assert memory[0] == ["policy", "parameters", "gradients", "optimizer", "activations", "of these by head and loss"]
    assert memory[1] == ["none", "1.0 MiB", "1.0 MiB", "2.0 MiB", "8.0 MiB", "3.0 MiB"]


def test_what_regenerating_takes_is_a_part_of_backward_where_it_is_known() -> None:
    full = timed("full", 0.12, 0.07, regenerating_seconds=0.03, regenerating_seconds_quartiles=[0.02, 0.04])
    rows = [timed("none"), full, timed("torch-checkpoint", 0.13, 0.08)]
    _, times, _ = tables_in(ablation_report.markdown(results(*rows)))
    assert [line[4] for line in times] == ["of that regenerating", "-", "30.0 (20.0 to 40.0)", "-"]
    parts = [ablation_plots._time_parts(each, rows[0]) for each in rows]
    assert [each["regenerating"] for each in parts] == [0.0, 0.03, 0.0]
    assert [each["backward"] for each in parts] == pytest.approx([0.05, 0.04, 0.05])
    assert [each["added to backward of none"] for each in parts] == pytest.approx([0.0, 0.0, 0.03])
    assert [sum(each.values()) for each in parts] == pytest.approx([0.09, 0.11, 0.12])  # the bar's length stays


def test_columns_tell_apart_what_differs_and_nothing_else() -> None:
    rows = [timed("none"), timed("none", model="n"), timed("none", dtype="autocast", model="n")]
    table = cells(ablation_report.markdown(results(*rows)))
    assert [line[:3] for line in table[:4]] == [
        ["policy", "model", "dtype"], ["none", "m", "float32"], ["none", "n", "float32"], ["none", "n", "autocast"],
    ]  # fmt: skip
    assert [ablation_report.line(each, {"model", "dtype"}).partition(":")[0] for each in rows] == [
        "none, m, sequence 64, float32", "none, n, sequence 64, float32", "none, n, sequence 64, autocast",
    ]  # fmt: skip


def test_ratios_are_to_the_baseline_of_the_same_model() -> None:
    rows = [timed("none"), timed("none", 0.4, model="n"), timed("full", 0.2), timed("full", 0.2, model="n")]
    table = cells(ablation_report.markdown(results(*rows)))
    column = table[0].index("ms a step")
    assert [line[column] for line in table[1:5]] == ["100.0", "400.0", "200.0 (2.00x)", "200.0 (0.50x)"]


def test_a_comparison_whose_baseline_is_missing_has_no_ratios() -> None:
    table = cells(ablation_report.markdown(results(timed("full"))))
    assert table[1][3] == "100.0"


def test_a_matrix_is_described_with_its_models() -> None:
    found = results(NONE)
    models = {"own": "a.module:make", "q": {"model_type": "qwen3", "hidden_size": 8}, "l": found["config"]["model"]}
    found["config"] |= {"models": models, "batch_sizes": [1, 2], "dtypes": ["float32", "autocast"], "repeats": 3}
    text = ablation_report.describe(found)
    assert text.startswith("own: a.module:make; q: qwen3 with hidden_size 8; l: Llama with 2 layers, ")
    assert "batch 1, 2, sequence 64, float32, autocast, 8 steps on bytes of: a text, each 3 times. a CPU" in text


def test_of_factories_no_sizes_are_told_that_are_their_own() -> None:
    found = results(NONE)
    found["config"] |= {"models": {"a": "m:a", "b": "m:b"}}
    assert ablation_report.describe(found).startswith("a: m:a; b: m:b; float32, 8 steps. a CPU")


def test_csv_has_a_line_for_each_row_and_a_column_for_each_number(tmp_path: Path) -> None:
    ablation_report.write(results(timed("none"), BROKEN), tmp_path)
    with (tmp_path / "results.csv").open(encoding="utf-8", newline="") as stream:
        none, broken = csv.DictReader(stream)
    assert none["policy"] == "none"
    assert float(none["backward_seconds"]) == 0.05
    assert float(none["backward_seconds_first_quartile"]) == pytest.approx(0.045)
    assert float(none["backward_seconds_third_quartile"]) == pytest.approx(0.055)
    assert none["longest_sequence"] == "4096"
    assert not {"losses", "timings"} & none.keys()
    assert broken["error"].startswith("OutOfMemoryError: tried to allocate 80 GiB\n")
    assert broken["backward_seconds"] == ""


def test_the_page_holds_all_and_asks_no_network(tmp_path: Path) -> None:
    found = results(timed("none"), timed("full <script>", 0.12, 0.07), BROKEN)
    files = ablation_report.write(found, tmp_path)
    pictures = ["results.png", "memory.png", "times.png", "longest.png"]
    assert files == ["results.md", "results.csv", *pictures, "report.html"]
    assert {path.name for path in tmp_path.iterdir()} == {*files}
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for name in pictures:
        picture = base64.b64encode((tmp_path / name).read_bytes()).decode()
        assert f'<img src="data:image/png;base64,{picture}" alt="{name}" />' in text
    assert not re.search(r"https?://|<script|<link|src=\"(?!data:)", text)
    for part in ("full &lt;script&gt;", "a CPU", "tried to allocate 80 GiB", "recompute ablate", "intermediate_size"):
        assert part in text
    assert text.count("<table>") == 3


def test_plots_without_numbers_are_not_drawn_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / "longest.png").write_bytes(b"of an earlier run")
    assert ablation_report.write(results(NONE), tmp_path) == ["results.md", "results.csv", "results.png", "report.html"]
    assert not (tmp_path / "longest.png").exists()


@pytest.mark.parametrize(
    ("points", "best"),
    [
        ([], []),
        ([(1, 5)], [(1, 5)]),
        ([(2, 4), (1, 5), (3, 3)], [(1, 5), (2, 4), (3, 3)]),
        ([(1, 5), (2, 5), (3, 6), (4, 1)], [(1, 5), (4, 1)]),
        ([(1, 5), (1, 4)], [(1, 4)]),
    ],
)
def test_the_frontier_is_what_no_other_row_beats_in_both(points: list[Any], best: list[Any]) -> None:
    rows = [row("a", seconds=seconds, peak=peak) for seconds, peak in points]
    assert [(each["step_seconds"], each["peak_bytes"]) for each in ablation_plots.frontier(rows)] == best


def test_the_frontier_is_drawn_as_stairs_for_each_length() -> None:
    longer = [row("none", seconds=0.3, sequence_length=128), row("full", seconds=0.2, sequence_length=128)]
    axes = ablation_plots.memory_against_time([NONE, FULL, *longer]).axes[0]
    stairs = [each for each in axes.lines if each.get_drawstyle() == "steps-post"]
    assert [each.get_xydata().tolist() for each in stairs] == [[[100, 10], [130, 4]], [[200, 10]]]


def test_each_model_has_axes_of_its_own() -> None:
    rows = [timed("none"), timed("none", model="n"), timed("full", model="n")]
    figure = ablation_plots.memory_against_time(rows)
    assert [axes.get_title() for axes in figure.axes] == ["m", "n"]
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["none"], ["none", "full"]]


def test_lengths_have_axes_of_their_own_where_points_are_too_many() -> None:
    def titles(count: int) -> list[str]:
        names = ["none", *(f"policy-{number}" for number in range(count - 1))]
        rows = [
            row(name, peak=number, sequence_length=length) for length in (64, 128) for number, name in enumerate(names)
        ]
        return [axes.get_title() for axes in ablation_plots.memory_against_time(rows).axes]

    assert titles(6) == [""]
    assert titles(7) == ["sequence 64", "sequence 128"]


def test_bars_add_up_to_what_was_measured() -> None:
    rows = [timed("none"), timed("full", 0.12, 0.07), timed("kernel", 0.08, 0.04)]
    none = rows[0]
    assert list(ablation_plots._memory_parts(none, none).values()) == [MIB, MIB, 2 * MIB, 5 * MIB, 3 * MIB]
    added = [ablation_plots._time_parts(each, none)["added to backward of none"] for each in rows]
    assert added == pytest.approx([0, 0.02, 0])
    for each in rows:
        parts = ablation_plots._time_parts(each, none)
        assert sum(parts.values()) == pytest.approx(0.03 + each["backward_seconds"] + 0.01)


RESULTS = Path(__file__).parents[2] / "examples" / "ablation" / "results"
OLD = ("default-cpu", "llama-1b-h200", "llama-8b-compiled-h200", "llama-8b-offload-h200", "offload-preset-h200")


@pytest.mark.parametrize("folder", OLD)
def test_results_of_earlier_versions_can_be_read(folder: str) -> None:
    found = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
    text = ablation_report.markdown(found)
    assert cells(text) == cells((RESULTS / folder / "results.md").read_text(encoding="utf-8"))
    assert len(ablation_plots.memory_against_time(found["rows"]).axes[0].texts) == len(found["rows"])
