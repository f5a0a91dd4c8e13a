"""Each example runs, and shows what it is there to show."""

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from sweep_testing import EXAMPLES, assert_falls
from tiers import slow
from transformers import LlamaForCausalLM

from recompute import load_policy
from recompute.diagnostics.comparing_runs import relative_error
from recompute.policy.loading import preset_path
from recompute.units import humanize

LOSSES = ("dpo", "kto", "orpo", "simpo", "grpo", "distillation")


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("policy", ["kernel", *slow("elementwise", "none", "full", "hook", "auto")])
def test_train_llama(policy, tmp_path, output_of):
    output = output_of("train_llama.py", "--policy", policy, "--steps", 2, "--timeline", tmp_path / "step.json")
    assert_falls(output, 2)
    assert f"policy {policy}\n" in output
    before, after = map(float, re.findall(r"([\d.]+) MiB (?:without|under)", output))
    assert after == before if policy == "none" else after < 0.75 * before
    regenerated = re.search(r"regenerated_nbytes=(\d+)", output)
    assert regenerated is not None
    assert (regenerated[1] == "0") == (policy == "none")
    assert (tmp_path / "step.png").stat().st_size > 0
    assert '"what the policy adds"' in (tmp_path / "step.json").read_text(encoding="utf-8")


def test_losses_are_the_same_of_logits_and_without(tmp_path, output_of):
    out, ways = tmp_path / "losses.json", ("plain", "on lazy logits", "ours")
    shape = ("--shape", "4", "16", "32", "64", "--steps", "1")
    output_of("losses/compare.py", *shape, "--ways", *ways, "--out", out)
    rows = read(out)["rows"]
    values = {(row["loss"], row["way"]): row["value"] for row in rows}
    for loss in {row["loss"] for row in rows}:
        expected = values[loss, "plain"]
        assert [values[loss, way] for way in ways] == pytest.approx([expected] * 3, rel=1e-3), loss


@pytest.mark.parametrize("arguments", [["distillation", "--top-k"], *([each] for each in LOSSES)], ids=" ".join)
def test_a_loss_falls_and_no_logits_are_made(arguments, monkeypatch, output_of):
    name, *options = arguments
    if not options:  # where a teacher sends a few words, it has made logits
        monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    output = output_of(f"losses/{name}.py", *options)
    assert_falls(output, 5)
    source = (EXAMPLES / "losses" / f"{name}.py").read_text(encoding="utf-8")
    assert source.count("\n") < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ORPO", "CPO", "SFT", "DPO", "KTO"])
def test_trls_trainers_learn_without_logits(name, output_of):
    pytest.importorskip("trl")
    output = output_of("losses/with_trl.py", name)
    assert_falls(output, 5)
    assert (EXAMPLES / "losses" / "with_trl.py").read_text(encoding="utf-8").count("\n") < 60


def test_decorate_module(output_of):
    output = output_of("decorate_module.py")
    held = re.findall(r"^(a \w+): ([\d,]+) bytes held without, ([\d,]+) with$", output, re.MULTILINE)
    assert [what for what, *_ in held] == ["a class", "a module", "a function"]
    for _, before, after in held:
        assert int(after.replace(",", "")) < int(before.replace(",", ""))


@pytest.mark.slow
def test_estimate_against_measured(tmp_path, output_of):
    pytest.importorskip("bitsandbytes")
    output = output_of("estimate_against_measured.py", "--tiny", "--out", tmp_path)
    results = read(tmp_path / "estimates.json")
    assert [row["policy"] for row in results["rows"] if not row["form"]] == ["none", "full", "elementwise"]
    assert [row["form"].partition(",")[0] for row in results["rows"][3:]] == ["LoRA"] * 5 + ["float8"] * 2
    columns = {"held", "forward", "backward", "optimizer", "peak", "first steps"}
    for row in results["rows"]:
        assert set(row["estimated"]) == set(row["measured"]) == columns
        assert min(row["measured"].values()) > 0
    assert "| tiny" in output


def test_train_with_trainer(monkeypatch, tmp_path, output_of):
    monkeypatch.chdir(EXAMPLES.parent)
    short = (*f"--output_dir {tmp_path} --max_steps 2 --logging_steps 1 --use_cpu --report_to none".split(),)
    policy = ("--recompute_policy", "examples/policies/trainer.yaml", "--recompute_kwargs", '{"logits": false}')
    found = []
    for switch in ((), policy):
        output = output_of("train_with_trainer.py", *short, *switch)
        found.append(dict(re.findall(r"^(\w+): ([\d.,]+)$", output, re.MULTILINE)))
    plain, policed = found
    assert float(policed["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-5)
    new = {f"recompute_{what}_nbytes" for what in ("dropped", "eager", "kept", "regenerated")}
    new |= {"token_accuracy", "mean_token_accuracy"}
    assert policed.keys() - plain.keys() == new
    dropped, kept = (int(policed[f"recompute_{fate}_nbytes"].replace(",", "")) for fate in ("dropped", "kept"))
    assert dropped > kept


def test_train_with_lightning(output_of):
    found = []
    for policy in ("none", "elementwise"):
        output = output_of("train_with_lightning.py", "--policy", policy, "--steps", 2, "--accelerator", "cpu")
        found.append(dict(re.findall(r"^(\w+): ([\d.,]+)$", output, re.MULTILINE)))
    plain, policed = found
    assert float(policed["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-5)
    assert {"token_accuracy", "mean_token_accuracy"} <= policed.keys()
    dropped, kept = (float(policed[f"recompute_{fate}_nbytes"].replace(",", "")) for fate in ("dropped", "kept"))
    assert dropped > 0.5 * kept


def test_loss_curves(tmp_path, output_of):
    """On the CPU two exact runs are the same, and one that compresses is not."""
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: {hidden_size: 128, intermediate_size: 320, layers: 1, heads: 4, kv_heads: 2}\n"
        "sequence_lengths: [32]\nbatch_size: 2\ndevice: cpu\n"
    )
    arguments = ("none", "elementwise", "compress", "--config", config, "--steps", "4", "--out", tmp_path)
    output_of("ablation/loss_curves.py", *arguments)
    results = read(tmp_path / "results.json")
    none, elementwise, compress = (run["losses"] for run in results["runs"])
    assert none == elementwise
    assert none[0] == pytest.approx(compress[0])
    assert none != compress == pytest.approx(none, rel=1e-2)
    assert (tmp_path / "results.png").stat().st_size > 0
    assert "| compress" in (tmp_path / "results.md").read_text()


def test_scale(tmp_path):
    script = runpy.run_path(str(EXAMPLES / "ablation" / "scale.py"))
    rows = [
        asdict(script["estimated"](script["Case"]("Llama 3.2 1B", "fsdp2", 8, loss=loss))) for loss in script["LOSSES"]
    ]
    whole, chunked = rows
    assert chunked["peak_bytes"] < whole["peak_bytes"] - whole["logits_bytes"] / 2
    assert sum(whole["parts"].values()) == whole["peak_bytes"]
    machine = {"torch": "2", "transformers": "5", "date": "2026-01-01"}
    report = script["Report"]({"command": "scale.py", "machine": machine, "rows": rows})
    saved = 1 - chunked["peak_bytes"] / whole["peak_bytes"]
    assert f"{saved:.0%}" in report.markdown()
    report.plot().savefig(tmp_path / "results.png")


@pytest.mark.slow
def test_hook_against_kernel(tmp_path, output_of):
    arguments = ("--ops", "RMSNorm", "cross-entropy", "--tokens", "64", "--widths", "128", "--steps", "1")
    output_of(
        "ablation/hook_against_kernel.py",
        *arguments,
        "--out",
        str(tmp_path),
    )
    rows = {(row["op"], row["way"]): row for row in read(tmp_path / "results.json")["rows"]}
    held = {way: rows["RMSNorm", way]["held_nbytes"] for way in ("eager", "hook", "tape", "kernel")}
    assert held["hook"] == held["tape"] == held["kernel"] < held["eager"] / 2
    assert "do not come back" in rows["cross-entropy", "hook"]["error"]
    assert rows["cross-entropy", "kernel"]["error"] == ""
    assert "## RMSNorm, width 128" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "results.png").stat().st_size > 0


def test_each_way_to_add_up_a_weight_gradient_gives_it(device):
    script = runpy.run_path(str(EXAMPLES / "ablation" / "weight_gradient.py"), run_name="weight_gradient")
    dy, x, _, rstd = given = script["inputs"](150, 40, torch.float32, torch.device(device), 0)
    expected = (dy.double() * x.double() * rstd.double()[:, None]).sum(0)
    for name, way in script["WAYS"].items():
        if name not in script["NEED_TRITON"] or script["launch"].uses_triton(x):
            assert relative_error([way(*given)], [expected]) < 1e-5, name


def test_weight_gradient(tmp_path, output_of):
    output_of("ablation/weight_gradient.py", "--tokens", 64, "--widths", 128, "--out", tmp_path)
    rows = {row["way"]: row for row in read(tmp_path / "results.json")["rows"]}
    assert list(rows) == ["two stages", "one stage", "atomics", "torch"]
    assert rows["two stages"]["has_same_bits"]
    assert rows["two stages"]["gradient_error"] < 0.01
    assert "| torch" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_long_context(tmp_path, output_of):
    policies = [str(EXAMPLES / "policies" / "long-on-device.yaml"), "long"]
    lengths = ("--sequence", 64, 128, "--steps", 1, "--lora", 4, "--warmup", 1, "--out", tmp_path)
    output_of("ablation/long_context.py", *policies, *lengths)
    rows = read(tmp_path / "results.json")["rows"]
    assert [(row["way"], row["sequence_length"]) for row in rows] == [(way, n) for n in (64, 128) for way in policies]
    assert all(row["error"] is None and row["loss"] > 0 and len(row["all_seconds"]) == 2 for row in rows)
    assert all(row["step_seconds"] == row["all_seconds"][1] for row in rows)
    losses = {(row["way"], row["sequence_length"]): row["loss"] for row in rows}
    assert all(losses[policies[0], length] == losses[policies[1], length] for length in (64, 128))


def test_the_policies_of_examples_are_sound():
    for path in (EXAMPLES / "policies").glob("*.yaml"):
        assert load_policy(path).name == path.stem


DISTRIBUTED = ["ddp", "fsdp2", "shared_sequence", "tensor_parallel"]


def run_distributed(name, *arguments, ranks=2, on_gpus=False):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(EXAMPLES / "distributed" / f"{name}.py")
    hidden = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}  # gloo, wherever this runs
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden}
    return subprocess.run(
        [sys.executable, *command, script, *arguments],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    """Runs an example that does not fail, and returns its record and what it prints."""

    def run(name, *arguments, **where):
        out = tmp_path / "deep" / "record.json"
        done = run_distributed(name, *arguments, "--out", str(out), **where)
        assert done.returncode == 0, done.stderr
        return read(out), done.stdout

    return run


def ranks_by_nccl():
    return {"ranks": min(2, torch.cuda.device_count()), "on_gpus": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed(name, recorded):
    record, printed = recorded(name)
    assert "losses, gradients, weights and collectives are equal on all ranks" in printed
    assert record["world_size"] == len(record["ranks"]) == 2
    for rank in record["ranks"]:
        assert rank["with"]["losses"] == rank["without"]["losses"]
        assert rank["with"]["collectives"] == rank["without"]["collectives"] != {}
        assert rank["with"]["held_bytes"] < 0.9 * rank["without"]["held_bytes"]
        assert rank["with"]["peak_bytes"] < rank["without"]["peak_bytes"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_by_nccl(name, recorded):
    record, _ = recorded(name, **ranks_by_nccl())
    assert record["machine"]["gpu"]
    assert record["wrong"] == []


@pytest.mark.slow
def test_every_way_to_share_the_words_of_a_head_gives_the_same(recorded):
    ways = recorded("../losses/shared_words")[0]["ways"]
    assert len(ways) == 7
    assert all(0 <= error < 5e-3 for way in ways.values() for error in way["errors"].values())


@pytest.mark.slow
def test_distributed_layers_can_be_compiled(recorded):
    record, printed = recorded("fsdp2", "--compile", "aot_eager_decomp_partition")
    assert "losses (to 0.0001) and collectives are equal on all ranks" in printed
    for rank in record["ranks"]:
        assert rank["with"]["held_bytes"] < 0.5 * rank["without"]["held_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_distributed_on_one_rank(name, recorded):
    """What weak scaling is measured against."""
    record, _ = recorded(name, "--policy", "full", ranks=1)
    assert record["policy"] == preset_path("full").read_text(encoding="utf-8")
    assert (record["world_size"], record["example"], record["wrong"]) == (1, name, [])
    assert record["ranks"][0]["with"]["peak_bytes"] < record["ranks"][0]["without"]["peak_bytes"]


@pytest.mark.slow
def test_a_shared_sequence_has_the_loss_of_the_whole_one(recorded):
    records = [recorded("shared_sequence", ranks=ranks)[0]["ranks"] for ranks in (1, 2)]
    assert all("3 of 3 run as captured code" in rank["with"]["captured"][0] for rank in records[1])
    (whole,), parts = ([rank["with"]["losses"] for rank in ranks] for ranks in records)
    means = [sum(losses) / 2 for losses in zip(*parts, strict=True)]
    assert means == pytest.approx(whole, rel=1e-4)


def check_pipeline(record, printed, in_flight):
    """Gradients are the same bits, and each stage's peak is within its budget and what was predicted, to 6%."""
    assert "losses, gradients and weights are equal on all stages" in printed
    stages = record["stages"]
    assert [stage["in_flight"] for stage in stages] == in_flight
    assert len({stage["budget_bytes"] for stage in stages}) == 1
    for stage in stages:
        assert stage["wrong"] == []
        assert stage["with"]["losses"] == stage["without"]["losses"]
        measured = stage["with"]["peak_bytes"]
        assert stage["predicted_bytes"] <= stage["budget_bytes"]
        assert 0.94 * stage["predicted_bytes"] <= measured <= 1.02 * stage["predicted_bytes"]
    most = 1 if record["machine"]["gpu"] else 0.9  # on a GPU most of either are cuBLAS's workspaces
    assert stages[0]["with"]["peak_bytes"] < most * stages[0]["without"]["peak_bytes"]


@pytest.mark.slow
def test_pipeline(recorded):
    check_pipeline(*recorded("pipeline", "--steps", "2"), [2, 1])


@pytest.mark.gpu
def test_pipeline_by_nccl(recorded):
    check_pipeline(*recorded("pipeline", **ranks_by_nccl()), [2, 1][-ranks_by_nccl()["ranks"] :])


def test_compare_policies(tmp_path, output_of):
    output = output_of("compare_policies.py", "--out", tmp_path)
    for policy in ("none", "elementwise", "blocks again", "torch-checkpoint"):
        assert re.search(f"^{policy} .*✓ bitwise +✓ bitwise$", output, re.MULTILINE)
    files = {"results.json", "results.md", "results.png", "memory.png", "times.png", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} == files


PLANNED = """
model: {hidden_size: 64, intermediate_size: 172, layers: 3, heads: 2, kv_heads: 1}
sequence_lengths: [128]
batch_size: 4
device: cpu
"""


@pytest.mark.slow
def test_plans_hold_and_are_set_beside_uniform_policies(tmp_path, capsys):
    script = runpy.run_path(str(EXAMPLES / "ablation" / "plans.py"))
    script["main"].__globals__["STEPS"] = 1
    (tmp_path / "tiny.yaml").write_text(PLANNED, encoding="utf-8")
    script["main"](tmp_path / "tiny.yaml", tmp_path, 3, False, None)
    results = read(tmp_path / "results.json")
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
    assert f"plan: {humanize(plans[0]['peak_bytes'])}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_what_a_rank_has_may_be_held_in_8_bits(name, tmp_path, recorded):
    policy = tmp_path / "codes.yaml"
    policy.write_text('rules: [{match: "**.layers.*", action: recompute, via: hook, compress: true}]\n')
    _, printed = recorded(name, "--policy", str(policy), "--tolerance", "5e-2")
    assert "losses (to 0.05) and collectives are equal on all ranks" in printed


@pytest.mark.slow
def test_distributed_examples_measure_what_others_offer_beside_a_policy(recorded):
    record, printed = recorded("fsdp2", "--also", "torch-checkpoint", "elementwise")
    (first, _) = record["ranks"]
    assert list(first) == ["without", "with", "torch-checkpoint", "elementwise"]
    assert first["torch-checkpoint"]["peak_bytes"] < first["elementwise"]["peak_bytes"] < first["without"]["peak_bytes"]
    assert re.search(r"^torch-checkpoint [\d.]+ ms a step, [\d.]+ MiB at the peak$", printed, re.MULTILINE)
    assert "expected a peer, as torch-checkpoint, or a policy" in run_distributed("fsdp2", "--also", "torch").stderr


def test_weak_scaling(tmp_path, output_of):
    """Of four ranks, the slowest counts."""

    def write(ranks, plain_ms, policed_ms, **fields):
        plain, policed = ({"step_ms": ms, "peak_bytes": 2**30} for ms in (plain_ms, policed_ms))
        found = [{"without": plain, "with": policed}] * ranks
        found[0] = {"without": {**plain, "step_ms": 1.0}, "with": policed} if ranks > 1 else found[0]
        shared = {"example": "ddp", "shape": "tiny", "batch": "of each rank", "policy": "", "wrong": [], **fields}
        path = tmp_path / f"{ranks}.json"
        path.write_text(json.dumps({"world_size": ranks, "ranks": found, **shared}), encoding="utf-8")
        return str(path)

    def table(*records):
        return output_of("distributed/comparing.py", *records)

    last = table(write(4, 100.0, 125.0), write(1, 80.0, 90.0)).splitlines()[-1]
    cells = ["4", "100.0", "125.0", "1.00", "1.00", "0.800", "0.720", "0.900", "no"]
    assert [cell.strip() for cell in last.strip("|").split("|")] == cells
    with pytest.raises(SystemExit, match="records of one example"):
        table(write(1, 80.0, 90.0), write(4, 100.0, 125.0, example="fsdp2"))


@pytest.mark.slow
def test_distributed_examples_fail_where_a_policy_does_nothing(tmp_path):
    (tmp_path / "none.yaml").write_text("version: 1\nname: none\nrules: none\n", encoding="utf-8")
    done = run_distributed("ddp", "--policy", str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert "wrong: held_bytes are not saved" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["elementwise", *slow("full", "kernel")])
def test_compile_llama(policy, output_of):
    output = output_of("compile_llama.py", "--policy", policy, "--backend", "aot_eager_decomp_partition")
    held = re.findall(r"^(\w+): ([\d.]+) MiB .* ([\d.]+) MiB", output, re.MULTILINE)
    assert [code for code, *_ in held] == ["eager", "compiled"]
    for _, before, after in held:
        assert float(after) < 0.75 * float(before)


def test_every_example_is_run_here():
    run_here = {"train_llama.py", "compile_llama.py", "decorate_module.py", "estimate_against_measured.py"}
    run_here |= {"train_with_trainer.py", "train_with_lightning.py", "compare_policies.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run_here
    shared = {"comparing.py"}
    distributed = shared | {f"{name}.py" for name in (*DISTRIBUTED, "pipeline")}
    assert {path.name for path in EXAMPLES.glob("distributed/*.py")} == distributed


def test_the_figure_of_whole_peaks_says_what_the_results_add_up_to(tmp_path):
    script = runpy.run_path(str(EXAMPLES / "ablation" / "whole_peaks.py"), run_name="whole_peaks")
    parts = {"parameter_bytes": 2**30, "gradient_bytes": 2**30, "optimizer_bytes": 2**31, "peak_bytes": 2**31}
    figure = script["plot"]([{"policy": "none", "step_seconds": 0.25, **parts}])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["6.0 GiB, 250 ms a step"]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 1.0, 2.0, 2.0]
    figure.savefig(tmp_path / "whole-peaks.png")
