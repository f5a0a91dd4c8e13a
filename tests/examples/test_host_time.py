"""The benchmark of whole steps: its rows hold what each way measured or why it failed, and ways leave others alone."""

import json
import re
import runpy
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.llama import modeling_llama

from recompute.diagnostics.comparing_runs import same_bits

SCRIPT = Path(__file__).parents[2] / "examples" / "ablation" / "host_time.py"
LAYERS = 2  # of the tiny models


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


def trial(script, *ways, kind="Trial", device="cpu"):
    """Of a tiny Llama's layers: two steps, and one to warm up."""
    case = script["CASES"]["llama-1b-layers"]
    case = replace(case, sizes=case.sizes | script["TINY"], sequence_length=8, ways=ways)
    return script[kind](case, torch.device(device), warmup=1, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_each_model_has_a_row_for_each_way(in_turn, tmp_path, output_of):
    chosen = ["liger", "elementwise", "gradient-checkpointing"]
    arguments = ["--tiny", "--models", "gpt2-xl", "mixtral-small", "--ways", *chosen, "--steps", "2", "--warmup", "1"]
    file = tmp_path / "results" / "figures.json"
    arguments += ["--json", str(file), *(["--in-turn"] if in_turn else [])]
    printed = output_of("ablation/host_time.py", *arguments)
    results = json.loads(file.read_text())
    assert results["machine"]["torch"] == torch.__version__
    assert results["command"].endswith(" ".join(["ablation/host_time.py", *arguments]))
    assert list(results["models"]) == ["gpt2-xl", "mixtral-small"]
    for model in results["models"].values():
        rows = {row.pop("way"): row for row in model["rows"]}
        assert list(rows) == ["none", *chosen]
        failed = rows.pop("liger")
        assert "the peer liger needs transformers' LlamaForCausalLM" in failed.pop("error")
        assert set(failed.values()) == {None}
        for row in rows.values():
            # Dropout is in force in GPT-2.
            assert row["same loss"]
            assert row["same gradients"]
            assert row["error of gradients"] == 0
            assert row["of none's"] == row["ms a step"] / rows["none"]["ms a step"]
            assert 0 < row["CPU ms a forward"] < row["ms a step"]
            assert 0 < row["held GiB"] <= row["peak GiB"]
        assert rows["gradient-checkpointing"]["held GiB"] < rows["elementwise"]["held GiB"] < rows["none"]["held GiB"]
    assert all(printed.count(f"| {way} ") == 2 for way in ("none", *chosen))


def test_layers_alone_train_the_same_under_each_exact_way(script):
    found = trial(script, "none", "gradient-checkpointing", "elementwise", "torch-selective")
    rows = {row["way"]: row for row in found.rows(in_turn=True)}
    assert all(row["same loss"] and row["same gradients"] for row in rows.values())
    held = {way: row["held GiB"] for way, row in rows.items()}
    assert held["gradient-checkpointing"] < held["elementwise"] < held["none"]
    _, gradients = found.references[False]
    without = sum(not gradient.any() for gradient in gradients)
    assert without == 3  # of embedding, last norm and head


@pytest.mark.gpu
@pytest.mark.parametrize("in_turn", [False, True])
def test_a_step_in_a_cuda_graph_trains_the_same(in_turn, script):
    found = trial(script, "none", "none+graph", "elementwise+graph", "auto+graph", device="cuda")
    _, plain, exact, auto = found.rows(in_turn=in_turn)
    assert not any("error" in row for row in (plain, exact, auto))
    assert plain["same gradients"]
    assert exact["same gradients"]
    assert all(map(same_bits, found.references[True][1], found.references[False][1]))
    assert auto["error of gradients"] < 0.1
    assert exact["ms a step"] > 0
    assert exact["CPU ms a forward"] is exact["held GiB"] is None


def test_without_cuda_a_graph_says_what_it_needs(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, graphed = trial(script, "none", "none+graph").rows(in_turn=False)
    assert graphed["error"] == "RuntimeError: +graph: expected a CUDA device; there is none"


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_what_liger_puts_into_transformers_acts_on_its_own_model_alone(in_turn, script, monkeypatch):
    plain = modeling_llama.apply_rotary_pos_emb
    calls = 0

    def doubled(q, k, *rest):
        nonlocal calls
        calls += 1
        q, k = plain(q, k, *rest)
        return 2 * q, k

    class Liger(types.ModuleType):
        @staticmethod
        def apply_liger_kernel_to_llama(**_):
            modeling_llama.apply_rotary_pos_emb = doubled

    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", Liger("liger_kernel.transformers"))
    none, liger, elementwise = trial(script, "none", "liger", "elementwise").rows(in_turn=in_turn)
    assert not liger["same gradients"]
    assert elementwise["same gradients"]
    assert none["same gradients"]
    forwards = 1 + 1 + 2 + 2  # the first, to warm up, to be timed, and to count bytes
    assert calls == LAYERS * forwards
    assert modeling_llama.apply_rotary_pos_emb is plain


@pytest.mark.slow
@pytest.mark.parametrize("in_turn", [False, True])
def test_where_none_fails_others_are_measured_and_compared_with_nothing(in_turn, script):
    base = script["Trial"]

    class Broken(base):
        def _train(self, row):
            training = super()._train(row)
            if row["way"] == "none":
                raise torch.OutOfMemoryError("no memory")
            yield from training

    none, elementwise = trial({**script, "Broken": Broken}, "none", "elementwise", kind="Broken").rows(in_turn=in_turn)
    assert none["error"] == "OutOfMemoryError: no memory"
    assert "error" not in elementwise
    assert elementwise["ms a step"] > 0
    assert [elementwise[key] for key in ("of none's", "same loss", "same gradients")] == [None] * 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "gpt2"], r"argument --models: invalid choice: 'gpt2' \(choose from .*gpt2-xl"),
        (
            ["--ways", "elementwize+graph"],
            "argument --ways: expected one of gradient-checkpointing, .*mean 'elementwise'",
        ),
        (["--steps", "0"], "expected --steps of at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(arguments, complaint, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["host_time.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        script["main"]()
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(complaint, captured.err)
