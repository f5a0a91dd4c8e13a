"""``recompute ablate --compare A B`` says what was run otherwise, which rows are new, and how their numbers moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recompute.ablation.results import compare
from recompute.cli import app
from recompute.errors import AblationError

RESULTS = Path(__file__).parents[2] / "examples" / "ablation" / "results"


def row(policy: str, seconds: float = 0.1, spread: float = 0.01, **changes: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "model": "m",
        "sequence_length": 64,
        "batch_size": 1,
        "dtype": "float32",
        "peak_bytes": 1000,
        "step_seconds": seconds,
        "step_seconds_quartiles": [seconds - spread, seconds + spread],
        "error": None,
        **changes,
    }


def results(*rows: dict[str, Any], **config: Any) -> dict[str, Any]:
    machine = {"torch": "2.13", "gpu": None, "date": "2026-01-02"}
    return {"config": {"models": {"m": "x:y"}, "steps": 3, **config}, "machine": machine, "text": {}, "rows": [*rows]}


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    def compared(before: dict[str, Any], after: dict[str, Any]) -> str:
        for name, found in (("a", before), ("b", after)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "results.json").write_text(json.dumps(found), encoding="utf-8")
        return compare(tmp_path / "a", tmp_path / "b" / "results.json")

    return compared


def lines(text: str, policy: str) -> dict[str, list[str]]:
    """What is said of each number of a policy's row."""
    split = [line.split("  ") for line in text.splitlines() if line.startswith(policy)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in split]
    return {name: rest for _, name, *rest in cells}


def test_each_number_has_its_ratio_and_whether_it_is_beyond_the_spread(compared: Any) -> None:
    before = results(row("none"), row("near"), row("far"), row("unknown"), row("same"))
    after = results(
        row("none", 0.2, peak_bytes=1001),
        row("near", 0.119),
        row("far", 0.121),
        row("unknown", 0.3, step_seconds_quartiles=None),
        row("same"),
    )
    text = compared(before, after)
    assert lines(text, "none, ")["step"] == ["100.00 ms", "200.00 ms", "2.000x", "beyond the spread"]
    assert lines(text, "none, ")["peak_bytes"] == ["1,000", "1,001", "1.001x", "beyond the spread"]
    assert lines(text, "near, ")["step"][-1] == "within the spread"
    assert lines(text, "far, ")["step"][-1] == "beyond the spread"
    assert lines(text, "unknown, ")["step"][-1] == "spread not known"
    assert lines(text, "same, ")["step"][-2:] == ["1.000x", "the same"]


def test_rows_of_one_alone_and_errors_are_named(compared: Any) -> None:
    before = results(row("none"), row("gone"), row("fails"))
    after = results(
        row("none"), row("new", sequence_length=128), row("fails", error="OutOfMemoryError: no room\nat all")
    )
    text = compared(before, after)
    assert "rows before alone:\n  gone, sequence 64\n" in text
    assert "rows after alone:\n  new, sequence 128\n" in text
    assert lines(text, "fails, ")["error"] == ["none", "OutOfMemoryError: no room", "different"]


def test_configuration_and_machine_are_named_where_they_differ(compared: Any) -> None:
    before, after = results(row("none")), results(row("none"), steps=5)
    after["machine"] |= {"torch": "2.14", "date": "2027-01-01", "threads": 2}
    text = compared(before, after)
    assert "config: different\n  steps: 3 before, 5 after\n" in text
    assert "machine: different\n  torch: '2.13' before, '2.14' after\n  threads: 'absent' before, 2 after\n" in text
    assert "text: the same" in text
    assert "2027" not in text


def test_results_of_before_comparisons_had_names_are_compared(compared: Any) -> None:
    """Their rows say neither model nor batch size nor dtype: the configuration does."""
    old = {key: row("none")[key] for key in ("policy", "sequence_length", "step_seconds", "error")}
    config = {"model": {"layers": 2}, "batch_size": 1, "dtype": "float32"}
    before = {**results(old), "config": config}
    after = {**results(row("none", 0.2, model="llama")), "config": {**config, "models": {}}}
    assert lines(compared(before, after), "none, ")["step"] == ["100.00 ms", "200.00 ms", "2.000x", "spread not known"]


def test_the_command_compares_the_results_of_this_repository(tmp_path: Path) -> None:
    found = CliRunner().invoke(
        app, ["ablate", "--compare", str(RESULTS / "llama-8b-h200"), str(RESULTS / "llama-1b-h200")]
    )
    assert found.exit_code == 0, found.output
    assert "model.hidden_size: 4096 before, 2048 after" in found.output
    assert "rows after alone:\n  none, sequence 4096" in found.output
    same = CliRunner().invoke(app, ["ablate", "--compare", *[str(RESULTS / "llama-8b-h200")] * 2])
    assert "config: the same" in same.output
    assert "beyond" not in same.output
    missing = CliRunner().invoke(app, ["ablate", "--compare", str(tmp_path), str(tmp_path)])
    assert missing.exit_code == 2
    assert f"{tmp_path / 'results.json'}: expected the results.json of an ablation; No such file" in missing.output


def test_what_holds_no_results_is_told(tmp_path: Path) -> None:
    with pytest.raises(AblationError, match=r"gone: expected the results\.json of an ablation; No such file"):
        compare(tmp_path / "gone", tmp_path)
