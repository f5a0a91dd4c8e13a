"""Each example runs, and shows what it is there to show."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def output_of(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("policy", ["none", "full", "hook", "kernel", "elementwise", "auto"])
def test_train_llama(policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--policy", policy, "--steps", "2")
    output = output_of("train_llama.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    losses = [float(loss) for loss in re.findall(r"^step \d: loss (\S+)$", output, re.MULTILINE)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert f"policy {policy}\n" in output
    before, after = map(float, re.findall(r"([\d.]+) MiB", output))
    assert after == before if policy == "none" else after < 0.75 * before


def test_decorate_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of("decorate_module.py", monkeypatch=monkeypatch, capsys=capsys)
    held = re.findall(r"^(a \w+): ([\d,]+) bytes held without, ([\d,]+) with$", output, re.MULTILINE)
    assert [what for what, *_ in held] == ["a class", "a module", "a function"]
    for _, before, after in held:
        assert int(after.replace(",", "")) < int(before.replace(",", ""))


def test_estimate_against_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--tiny", "--out", str(tmp_path))
    output = output_of("estimate_against_measured.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    results = json.loads((tmp_path / "estimates.json").read_text(encoding="utf-8"))
    assert [row["policy"] for row in results["rows"]] == ["none", "full", "elementwise"]
    for row in results["rows"]:
        assert set(row["estimated"]) == set(row["measured"]) == {"held", "forward", "backward", "optimizer", "peak"}
        assert min(row["measured"].values()) > 0
    assert "| tiny" in output


@pytest.mark.parametrize("policy", ["full", "elementwise", "kernel"])
def test_compile_llama(policy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--policy", policy, "--backend", "aot_eager_decomp_partition")
    output = output_of("compile_llama.py", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    held = re.findall(r"^(\w+): ([\d.]+) MiB .* ([\d.]+) MiB", output, re.MULTILINE)
    assert [code for code, *_ in held] == ["eager", "compiled"]
    for _, before, after in held:
        assert float(after) < 0.75 * float(before)


def test_every_example_is_run_here() -> None:
    run_here = {"train_llama.py", "compile_llama.py", "decorate_module.py", "estimate_against_measured.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run_here
