"""examples/ablation/plans.py: plans hold on a small model, and are set beside uniform policies."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "ablation" / "plans.py"
CONFIG = """
model: {hidden_size: 64, intermediate_size: 172, layers: 3, heads: 2, kv_heads: 1}
sequence_lengths: [128]
batch_size: 4
device: cpu
"""


@pytest.mark.slow
def test_plans_hold_and_are_set_beside_uniform_policies(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("plans_example", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plans_example", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "STEPS", 1)
    (tmp_path / "tiny.yaml").write_text(CONFIG, encoding="utf-8")
    script.main(tmp_path / "tiny.yaml", tmp_path, 3, False, None)

    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    peaks = {point["way"]: point["peak_bytes"] for point in results["points"] if point["kind"] == "uniform"}
    assert max(peaks["full"], peaks["elementwise"]) < peaks["none"]
    plans = [point for point in results["points"] if point["kind"] == "plan"]
    assert [point["budget_bytes"] for point in plans[:3]] == results["steps"]
    for point in plans:
        assert point["peak_bytes"] == pytest.approx(point["predicted_peak_bytes"], rel=0.01)
        assert point["peak_bytes"] <= 1.01 * point["budget_bytes"]
    # Which plan is the fastest depends on the clock; that the smallest budget asks for less than the largest does not.
    assert plans[2]["peak_bytes"] < peaks["none"]
    table = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| elementwise" in table
    assert (tmp_path / "results.png").stat().st_size > 0
    assert f"plan: {script.humanize(plans[0]['peak_bytes'])}" in capsys.readouterr().out
