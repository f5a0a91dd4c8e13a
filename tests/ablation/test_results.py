"""What ``results.json`` holds: it is gone on with, or refused, and two of them are compared."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from ablation_testing import LEAST, results, row, saved, started, timed
from test_cli import recompute as command

from recompute.ablation.results import compare
from recompute.errors import AblationError

RESULTS = Path(__file__).parents[2] / "examples" / "ablation" / "results"


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
