"""Tables, sentences and the plot hold what the rows say, for rows that ran, failed, differ or are missing."""

import base64
import json
import re
from functools import partial
from pathlib import Path

import pytest
from ablation_testing import JUDGED, LEAST, MIB, results, row, saved, started, timed
from test_cli import recompute as command

from recompute.ablation import ablation_plots, ablation_report
from recompute.ablation.results import compare
from recompute.errors import AblationError
from recompute.units import humanize


def failed(policy, error):
    return {**dict.fromkeys(row(policy)), "policy": policy, "sequence_length": 64, "error": error}


NONE = row("none")
FULL = row("full", held=2 * MIB, peak=4 * MIB, seconds=0.13)
ROUNDED = dict(zip(JUDGED, (False, 1.25e-7, True, 2.5e-7, 0.25), strict=True))
KERNEL = row("kernel", exact=False, **ROUNDED, grad_tolerance=5e-7)
BROKEN = failed("broken", "OutOfMemoryError: tried to allocate 80 GiB\nand more advice")
TOLD = "broken, sequence 64: OutOfMemoryError: tried to allocate 80 GiB"


def tables_in(text):
    """The tables of a Markdown text, without the lines below their headers."""
    blocks = [[line for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    rows = [[header, *lines] for header, _, *lines in filter(None, blocks)]
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in table] for table in rows]


def cells(*rows):
    return tables_in(ablation_report.markdown(results(*rows)))[0]


def test_the_table_has_ratios_to_the_baseline_and_what_matches():
    assert cells(NONE, FULL, KERNEL, BROKEN) == [
        ["policy", "held after forward", "peak", "ms a step", "losses", "gradients"],
        ["none", "8.0 MiB", "10.0 MiB", "100.0", "✓ bitwise", "✓ bitwise"],
        ["full", "2.0 MiB (0.25x)", "4.0 MiB (0.40x)", "130.0 (1.30x)", "✓ bitwise", "✓ bitwise"],
        ["kernel", "8.0 MiB (1.00x)", "10.0 MiB (1.00x)", "100.0 (1.00x)", "≈ 1.2e-07", "✓ 2.5e-07"],
        ["broken", *["-"] * 5],
    ]


@pytest.mark.parametrize("axis", [{"sequence_length": 128}, {"model": "n"}])
def test_ratios_are_to_the_baseline_of_the_same_comparison(axis):
    table = cells(NONE, FULL, row("none", held=40 * MIB, **axis), row("full", held=4 * MIB, **axis))
    held = table[0].index("held after forward")
    assert [line[held] for line in table[1:]] == ["8.0 MiB", "2.0 MiB (0.25x)", "40.0 MiB", "4.0 MiB (0.10x)"]


@pytest.mark.parametrize("baseline", [[], [failed("none", "no room")]])
def test_without_a_baseline_numbers_have_no_ratio(baseline):
    assert cells(*baseline, {**FULL, **dict.fromkeys(JUDGED)})[-1] == ["full", "2.0 MiB", "4.0 MiB", "130.0"]


def test_cpu_time_of_forward_is_shown_where_it_was_measured():
    table = cells(row("none", forward_cpu_seconds=0.01), row("full", forward_cpu_seconds=0.02))
    assert [line[4] for line in table] == ["CPU ms a forward", "10.0", "20.0 (2.00x)"]


UNJUDGED = {**KERNEL, "grads_match": None, "grad_error": 2.5e-3, "grad_tolerance": None}


@pytest.mark.parametrize(
    ("changed", "shown", "told"),
    [
        (row("hook", losses_match=False, loss_error=1e-3), ["✗ 1.0e-03", "✓ bitwise"],
            "losses differ: relative error 1.0e-03, allowed 0"),
        (row("full", grads_match=False, grad_error_last=2e-3), ["✓ bitwise", "✗ 2.0e-03"],
            "gradients differ: relative error 2.0e-03, allowed 0.0e+00"),
        ({**KERNEL, "grads_match": False, "grad_error": 6e-7}, ["≈ 1.2e-07", "✗ 6.0e-07"],
            "gradients differ: relative error 6.0e-07, allowed 5.0e-07"),
        (UNJUDGED, ["≈ 1.2e-07", "≈ 2.5e-03"], None),  # there was no room for the reference
        ({**KERNEL, "grad_error": 0.0, "grad_error_last": 2e-7}, ["≈ 1.2e-07", "≈ 2.0e-07"], None),  # captured later
    ],
)  # fmt: skip
def test_what_differs_is_marked_and_told(changed, shown, told):
    assert cells(NONE, changed)[2][4:] == shown
    expected = [] if told is None else [f"{changed['policy']}, sequence 64: {told}"]
    assert ablation_report.failures(results(NONE, changed)) == expected


def test_what_failed_or_is_missing_stands_below_the_table():
    found = results(NONE, BROKEN, complete=False)
    assert ablation_report.failures(found) == [TOLD, "interrupted: rows are missing"]
    assert f"- {TOLD}\n- interrupted: rows" in ablation_report.markdown(found)
    assert len(cells()) == 1


def test_a_line_says_what_was_measured_or_what_is_wrong():
    assert ablation_report.line(FULL) == "full, sequence 64: 2.0 MiB held, 4.0 MiB peak, 130.0 ms a step"
    assert ablation_report.line(timed("none")).endswith("100.0 ms a step, longest sequence 4,096")
    assert ablation_report.line(BROKEN) == TOLD


def test_plain_text_holds_the_same_texts():
    rows = [NONE, FULL, KERNEL, BROKEN]
    plain = ablation_report.text(rows)
    for line in cells(*rows):
        assert all(text in plain for text in line)
    assert plain.endswith(TOLD)


def test_times_by_part_and_memory_by_kind_have_tables_of_their_own():
    full = timed("full", 0.12, 0.07, regenerating_seconds=0.03, regenerating_seconds_quartiles=[0.02, 0.04])
    first, times, memory = tables_in(ablation_report.markdown(results(timed("none"), full)))
    assert first[0] == ["policy", "held after forward", "peak", "ms a step", "longest sequence", "losses", "gradients"]
    assert first[2][4] == "4,096 (1.00x)"
    assert times == [
        ["policy", "step", "forward", "backward", "of that regenerating", "added to backward", "optimizer"],
        ["none", "100.0 (90.0 to 110.0)", "30.0 (27.0 to 33.0)", "50.0 (45.0 to 55.0)", "-", "+0.0",
            "10.0 (9.0 to 11.0)"],
        ["full", "120.0 (108.0 to 132.0)", "30.0 (27.0 to 33.0)", "70.0 (63.0 to 77.0)", "30.0 (20.0 to 40.0)", "+20.0",
            "10.0 (9.0 to 11.0)"],
    ]  # fmt: skip
    assert memory == [
        ["policy", "parameters", "gradients", "optimizer", "activations", "of these by head and loss"],
        *([name, "1.0 MiB", "1.0 MiB", "2.0 MiB", "8.0 MiB", "3.0 MiB"] for name in ("none", "full")),
    ]
    _, unknown, _ = tables_in(ablation_report.markdown(results(timed("none"))))
    assert "of that regenerating" not in unknown[0]


def test_columns_tell_apart_what_differs_and_nothing_else():
    rows = [timed("none"), timed("none", model="n"), timed("none", dtype="autocast", model="n")]
    assert [line[:3] for line in cells(*rows)] == [
        ["policy", "model", "dtype"], ["none", "m", "float32"], ["none", "n", "float32"], ["none", "n", "autocast"],
    ]  # fmt: skip
    assert [ablation_report.line(each, {"model", "dtype"}).partition(":")[0] for each in rows] == [
        "none, m, sequence 64, float32", "none, n, sequence 64, float32", "none, n, sequence 64, autocast",
    ]  # fmt: skip


LLAMA = "Llama with hidden_size 64, intermediate_size 172, layers 2, heads 4, kv_heads 2"
MODELS = {"own": "a.module:make", "q": {"model_type": "qwen3", "hidden_size": 8}, "l": results()["config"]["model"]}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, f"{LLAMA}; batch 4, sequence 64, float32, 8 steps on bytes of: a text. "),
        ({"step": "layers"}, f"{LLAMA}; batch 4, sequence 64, float32, 8 steps of all but head, loss and optimizer "),
        ({"models": MODELS, "batch_sizes": [1, 2], "dtypes": ["float32", "autocast"], "repeats": 3},
            f"own: a.module:make; q: qwen3 with hidden_size 8; l: {LLAMA}; batch 1, 2, sequence 64, float32, autocast, "
            "8 steps on bytes of: a text, each 3 times. "),
        ({"models": {"a": "m:a", "b": "m:b"}}, "a: m:a; b: m:b; float32, 8 steps. "),  # whose sizes are their own
        ({"model": "MLP, 3 parameters"}, "MLP, 3 parameters; 8 steps. "),
    ],
)  # fmt: skip
def test_what_was_trained_and_on_what_is_described(config, text):
    found = results(NONE, **config)
    where = "a CPU (2 threads), torch 2.11.0, transformers 5.0.0, Python 3.11.7, 2026-01-02."
    assert ablation_report.describe(found).startswith(text)
    assert ablation_report.markdown(found).endswith(f"{where}\n\n`recompute ablate`\n")


EQUAL = "All results are as under `none`, bit for bit"
SHARES = "1.30 of the time, 0.25 of the activations, 0.40 of the peak"
FAST = {**KERNEL, "policy": "auto", "step_seconds": 0.09, "peak_bytes": 5 * MIB, "activation_bytes_held": 2 * MIB}
FASTEST = "`auto` is fastest: 0.90 of the time, 0.25 of the activations, 0.50 of the peak of `none`."


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([NONE, FULL], [f"`full` is fastest after `none`: {SHARES} of `none`. {EQUAL}."]),
        ([NONE, FULL, FAST],
            [f"{FASTEST} `full` peaks lowest: {SHARES}. {EQUAL}, but for `auto`, which may round."]),
        ([NONE, FAST, BROKEN], [f"{FASTEST} {EQUAL}, but for `auto`, which may round. `broken` failed."]),
        ([NONE, row("full", 2 * MIB, 4 * MIB, 0.13, grads_match=False, grad_error_last=2e-3)],
            [f"`full` is fastest after `none`: {SHARES} of `none`. {EQUAL}, but for `full`, which may not."]),
        ([timed("none"), timed("none", model="n"), timed("a", model="n")],
            ["n: `a` is fastest after `none`: 1.00 of the time, 1.00 of the activations, 1.00 of the peak of `none`. "
             f"{EQUAL}."]),
        ([NONE, {**FULL, "step_seconds_quartiles": (0.11, 0.15)}],
            [f"`full` is fastest after `none`: {SHARES} of `none`. {EQUAL}. `full`: steps took very different times. "
             "Was this machine busy with something else?"]),
        ([NONE], []),
        ([failed("none", "no room"), FULL], []),
    ],
)  # fmt: skip
def test_the_verdict_says_what_is_fastest_what_is_leanest_and_what_changes_bits(rows, told):
    assert ablation_report.verdicts(rows) == told


def test_the_legend_has_the_words_and_marks_that_the_table_has():
    legend = ablation_report.markdown(results(NONE, KERNEL))
    words = ["held after forward", "peak", "ms a step", "✓ bitwise", "✓ …", "≈ …"]
    assert re.findall(r"^- [*]{2}(.*)[*]{2}: ", legend, re.MULTILINE) == words
    assert "On a CPU, plain PyTorch stands in for the kernels" in legend
    assert "✓ …" not in ablation_report.markdown(results(NONE, FULL))


def test_the_page_holds_all_and_asks_no_network(tmp_path):
    found = results(timed("none"), timed("full <script>", 0.12, 0.07), BROKEN)
    files = ablation_report.write(found, tmp_path)
    pictures = ["results.png", "memory.png", "times.png", "longest.png"]
    assert files == ["results.md", *pictures, "report.html"]
    assert {path.name for path in tmp_path.iterdir()} == {*files}
    assert (tmp_path / "results.md").read_text(encoding="utf-8") == ablation_report.markdown(found)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for name in pictures:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert f'<img src="data:image/png;base64,{base64.b64encode(data).decode()}" alt="{name}" />' in text
    assert not re.search(r"https?://|<script|<link|src=\"(?!data:)", text)
    for part in ("full &lt;script&gt;", "a CPU", "tried to allocate 80 GiB", "recompute ablate", "intermediate_size"):
        assert part in text
    assert text.count("<table>") == 3


@pytest.mark.parametrize("rows", [[NONE], []])
def test_plots_without_numbers_are_not_drawn_and_old_ones_go(rows, tmp_path):
    (tmp_path / "longest.png").write_bytes(b"of an earlier run")
    assert ablation_report.write(results(*rows), tmp_path) == ["results.md", "results.png", "report.html"]
    assert not (tmp_path / "longest.png").exists()


def named_in(axes):
    return [label.get_text() for label in axes.get_legend().get_texts()]


@pytest.mark.parametrize(("scale", "unit"), [(1, "MiB"), (1024, "GiB")])
def test_the_plot_goes_from_held_to_peak_with_the_frontier_as_stairs(scale, unit):
    longer = [row("none", seconds=0.3, sequence_length=128), row("full", seconds=0.2, sequence_length=128)]
    bytes_of = ("activation_bytes_held", "peak_bytes")
    rows = [{**each, **{key: each[key] * scale for key in bytes_of}} for each in (NONE, FULL, *longer)]
    figure = ablation_plots.memory_against_time([*rows, BROKEN])
    assert figure.get_suptitle().startswith("Memory against the time of a step")
    points = [(100, 8, 10), (130, 2, 4)], [(300, 8, 10), (200, 8, 10)]
    for axes, drawn, best in zip(figure.axes, points, ([[100, 10], [130, 4]], [[200, 10]]), strict=True):
        assert named_in(axes) == ["none", "full", "Pareto frontier"]
        bars = [line.get_xydata().tolist() for line in axes.lines if len({*line.get_xdata()}) < len(line.get_xdata())]
        assert bars == [[[x, held], [x, peak]] for x, held, peak in drawn]
        assert [line.get_xydata().tolist() for line in axes.lines if line.get_drawstyle() == "steps-post"] == [best]
        assert axes.get_xlabel() == "milliseconds a step"
        assert axes.get_ylabel() == f"{unit} above weights, gradients, optimizer"


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
def test_the_frontier_is_what_no_other_row_beats_in_both(points, best):
    rows = [row("a", seconds=seconds, peak=peak) for seconds, peak in points]
    assert [(each["step_seconds"], each["peak_bytes"]) for each in ablation_plots.frontier(rows)] == best


def test_each_comparison_has_axes_of_its_own_and_a_policy_one_color_in_all():
    figure = ablation_plots.memory_against_time([timed("none"), timed("none", model="n"), timed("full", model="n")])
    assert [axes.get_title() for axes in figure.axes] == ["m", "n"]
    assert [named_in(axes)[:-1] for axes in figure.axes] == [["none"], ["none", "full"]]
    one, other = ({line.get_label(): line.get_color() for line in axes.lines} for axes in figure.axes)
    assert one["none"] == other["none"] != other["full"]


def test_bars_add_up_to_what_was_measured():
    """Where it is known what regenerating takes, that is a part; where it is not, what backward takes longer is."""
    rows = [
        *(timed("none"), timed("full", 0.12, 0.07, regenerating_seconds=0.03)),
        *(timed("torch-checkpoint", 0.13, 0.08), timed("kernel", 0.08, 0.04)),
    ]
    assert list(ablation_plots._memory_parts(rows[0], rows[0]).values()) == [MIB, MIB, 2 * MIB, 5 * MIB, 3 * MIB]
    parts = [ablation_plots._time_parts(each, rows[0]) for each in rows]
    assert [each["regenerating"] for each in parts] == [0.0, 0.03, 0.0, 0.0]
    assert [each["backward"] for each in parts] == pytest.approx([0.05, 0.04, 0.05, 0.04])
    assert [each["added to backward of none"] for each in parts] == pytest.approx([0.0, 0.0, 0.03, 0.0])
    assert [sum(each.values()) for each in parts] == pytest.approx([0.09, 0.11, 0.12, 0.08])


RESULTS = Path(__file__).parents[2] / "examples" / "ablation" / "results"
OLD = ("default-cpu", "llama-8b-h200")


@pytest.mark.parametrize("folder", OLD)
def test_results_of_earlier_versions_can_be_read(folder):
    found = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))
    (_, *rows), *_ = tables_in(ablation_report.markdown(found))
    for (policy, held, *_), each in zip(rows, found["rows"], strict=True):
        assert policy == each["policy"]
        assert held.split(" (")[0] == (humanize(each["activation_bytes_held"]) if each["error"] is None else "-")
    drawn = [name for axes in ablation_plots.memory_against_time(found["rows"]).axes for name in named_in(axes)[:-1]]
    assert sorted(drawn) == sorted(each["policy"] for each in found["rows"])


# What ``results.json`` holds: it is gone on with, or refused, and two of them are compared


@pytest.fixture
def compared(tmp_path):
    def compared(before, after):
        for name, found in (("a", before), ("b", after)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "results.json").write_text(json.dumps(found), encoding="utf-8")
        return compare(tmp_path / "a", tmp_path / "b" / "results.json")

    return compared


def lines(text, policy):
    """What is said of each number of a policy's row."""
    split = [line.split("  ") for line in text.splitlines() if line.startswith(f"{policy}, ")]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in split]
    return {name: rest for _, name, *rest in cells}


@pytest.mark.parametrize(
    ("after", "number", "told"),
    [
        (timed("a", 0.2), "step", ["100.00 ms", "200.00 ms", "2.000x", "beyond the spread"]),
        (timed("a", 0.12), "step", ["100.00 ms", "120.00 ms", "1.200x", "within the spread"]),
        (timed("a", 0.082), "step", ["100.00 ms", "82.00 ms", "0.820x", "within the spread"]),
        (timed("a", 0.123), "step", ["100.00 ms", "123.00 ms", "1.230x", "beyond the spread"]),
        (timed("a", 0.081), "step", ["100.00 ms", "81.00 ms", "0.810x", "beyond the spread"]),
        (
            timed("a", 0.3, step_seconds_quartiles=None),
            "step",
            ["100.00 ms", "300.00 ms", "3.000x", "spread not known"],
        ),
        (timed("a", longest_sequence=4097), "longest_sequence", ["4,096", "4,097", "1.000x", "beyond the spread"]),
        (timed("a", error="Error: no room\nat all"), "error", ["none", "Error: no room", "different"]),
        (timed("a", grads_match=None), "grads_match", ["True", "None", "different"]),
    ],
)
def test_each_number_has_its_ratio_and_whether_it_is_beyond_the_spread(compared, after, number, told):
    text = compared(results(timed("a")), results(after))
    assert lines(text, "a") == {number: told}
    assert re.search(r"\n\n(\d+) of (?!\1)\d+ numbers are the same$", text)


def test_rows_of_one_alone_and_what_was_run_otherwise_are_named(compared):
    before = results(timed("none"), timed("gone"))
    after = results(timed("none"), timed("new", sequence_length=128), steps=5)
    after["machine"] |= {"torch": "2.14", "date": "2027-01-01", "cores": 2}
    text = compared(before, after)
    assert "rows before alone:\n  gone, sequence 64\n" in text
    assert "rows after alone:\n  new, sequence 128\n" in text
    assert "config: different\n  steps: 8 before, 5 after\n" in text
    assert "machine: different\n  torch: '2.11.0' before, '2.14' after\n  cores: 'absent' before, 2 after\n" in text
    assert "text: the same" in text
    assert "2027" not in text


def test_results_of_before_comparisons_had_names_are_compared(compared):
    """Their rows say neither model nor batch size nor dtype: the configuration does."""
    after = timed("none", 0.2, model="llama", batch_size=4)
    found = lines(compared(results(row("none")), results(after, models={})), "none")
    assert found["step"] == ["100.00 ms", "200.00 ms", "2.000x", "spread not known"]


def test_the_command_compares_the_results_of_this_repository(tmp_path):
    told = partial(command, "ablate", "--compare")
    code, output = told(RESULTS / "llama-8b-h200", RESULTS / "llama-1b-peers-h200")
    assert code == 0, output
    assert "model.hidden_size: 4096 before, 2048 after" in output
    assert "rows after alone:\n  none, sequence 4096" in output
    _, output = told(RESULTS / "llama-8b-h200", RESULTS / "llama-8b-h200")
    assert "config: the same" in output
    assert "beyond" not in output
    code, output = told(tmp_path / "gone", tmp_path)
    assert code == 2
    assert "gone: expected the results.json of an ablation; No such file" in output


@pytest.fixture(scope="module")
def least(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    list(started(out, LEAST))
    return (out / "results.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("config", "steps", 7, r"config\.steps: results\.json has 7, this run 2"),
        ("machine", "torch", "1.0", r"machine\.torch: results\.json has '1\.0', this run '"),
        ("machine", "cpu", "another", r"machine\.cpu: results\.json has 'another'"),
        ("machine", "recompute", "0", r"machine\.recompute: results\.json has '0'"),
        ("text", "nbytes", 3, r"text\.nbytes: results\.json has 3"),
    ],
)
def test_results_of_others_are_not_resumed(least, tmp_path, part, key, value, message):
    found = json.loads(least)
    found[part][key] = value
    (tmp_path / "results.json").write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(AblationError, match=rf"results\.json: expected results of the same(.|\n)*{message}"):
        started(tmp_path, LEAST, resume=True)
    assert saved(tmp_path) == found


@pytest.mark.parametrize(("text", "message"), [("{", "invalid JSON"), ('{"rows": 3}', "with rows that each have")])
def test_a_file_that_holds_no_results_is_told(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    with pytest.raises(AblationError, match=rf"results\.json: expected the results\.json of an ablation.*{message}"):
        started(tmp_path, LEAST, resume=True)
