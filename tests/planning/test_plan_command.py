"""`recompute plan`, from a profile made by hand, and on a tiny model from end to end."""

import json

import pytest
import tables
import torch
from typer.testing import CliRunner

import recompute
from recompute import load_policy
from recompute.cli import app
from recompute.estimation.build_model import build
from recompute.planning import solver
from recompute.planning.make_plan import plan
from recompute.planning.plan import frontier_table
from recompute.planning.prediction import predict
from recompute.profiling.cost_table import Profile

TINY = "model: {hidden_size: 64, intermediate_size: 172, layers: 4, heads: 4, kv_heads: 2}\n"
SMALL = ("--seq-len", 64, "--dtype", "float32", "--device", "cpu")


def run(*arguments):
    """The exit code, stdout and stderr of `recompute plan`."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "profile.json"
    tables.transformer(8, capacity=4000).save(path)
    return path


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_a_plan_of_a_profile_is_printed_and_written(table, tmp_path):
    out = tmp_path / "plan.yaml"
    code, printed, told = run("--profile", table, "--budget", "1600B", "--out", out)
    expected = plan(tables.transformer(8, capacity=4000), budget=1600)
    assert (code, printed) == (0, f"{expected}\n")
    assert f"written: {out}" in told
    assert load_policy(out) == expected.policy
    assert not out.with_suffix(".png").exists()


def test_a_stage_of_a_pipeline_is_planned(table):
    several = ("--microbatches", 8, "--microbatches-in-flight", 4)
    code, printed, _ = run("--profile", table, "--budget", "2600B", *several)
    profile = tables.transformer(8, capacity=4000)
    expected = plan(profile, budget=2600, microbatches=8, microbatches_in_flight=4)
    assert (code, printed.split("To use it: --out ")[0]) == (0, f"{expected}\n")
    code, _, told = run("--profile", table, "--budget", "2600B", "--microbatches-in-flight", 4)
    assert code == 2
    assert "expected at most the 1 microbatches" in told


def test_json_is_one_object_alone(table):
    code, printed, _ = run("--profile", table, "--budget", "40%", "--json", "--frontier")
    document = json.loads(printed)
    assert (code, document["budget_bytes"]) == (0, 1600)
    assert document["predicted_peak_bytes"] <= 1600
    assert load_policy(document["policy"]).rules
    assert len(document["frontier"]) > 3


def test_the_frontier_is_a_table(table, tmp_path):
    code, printed, _ = run("--profile", table, "--budget", "1600B", "--frontier", "--out", tmp_path / "p.yaml")
    found = plan(tables.transformer(8, capacity=4000), budget=1600, frontier=True)
    assert (code, printed) == (0, f"{found}\n\n{frontier_table(found)}\n")


def test_what_is_not_allowed_is_not_chosen(table):
    flags = ("--allow", "keep", "--allow", "hook", "--allow", "checkpoint")
    _, printed, _ = run("--profile", table, "--budget", "1.8KiB", "--json", *flags)
    ways = {(rule["action"], rule.get("via")) for rule in json.loads(printed)["policy"]["rules"]}
    assert ways
    assert ways <= {("recompute", "hook"), ("checkpoint", None)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "much"), "a budget of 'much' cannot be read"),
        (("--budget", "500B"), "is below static memory (parameters, optimizer states, the batch), which is 1000 B"),
        (("--budget", "1010B"), "cannot be met: every plan needs at least "),
        (("--budget", "1GiB", "--allow", "kernle"), "found 'kernle' (did you mean 'kernel'?)"),
        (("--budget", "1GiB", "--verify"), "--verify runs the plan, which needs --model"),
        (("--budget", "1GiB", "--model", "tiny.yaml"), "expected --model or --profile"),
        (("--budget", "1GiB", "--gpu", "H200"), "--gpu calculates the profile of --model"),
        (("--budget", "1GiB", "--gpu", "4080"), "found '4080' (did you mean 'RTX 4090'?)"),
        (("--budget", "1GiB", "--gpu-memory", "24GiB"), "--gpu-tflops, --gpu-bandwidth are missing"),
        (("--budget", "1GiB", "--optimizer", "lion"), "optimizer: expected one of adamw, "),
        (("--budget", "1GiB", "--sharding", "fdsp", "--devices", "2"), "found 'fdsp' (did you mean 'fsdp2'?)"),
        (("--budget", "1GiB", "--devices", "2"), "found 2 devices with sharding none"),
        (("--budget", "1GiB", "--sharding", "fsdp", "--devices", "2"), "--sharding fsdp2 is calculated for a GPU"),
        (("--budget", "1GiB", "--out", "/dev/null/plan.yaml"), "expected a file that can be written"),
        (("--budget", "1GiB", "--save-profile", "/dev/null/p.json"), "expected a file that can be written"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(table, arguments, message):
    code, printed, told = run("--profile", table, *arguments)
    assert (code, printed) == (2, "")
    assert told.startswith("recompute: ")
    assert message in told
    assert "Traceback" not in told


def test_a_bad_profile_is_told_by_file_and_line(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(tables.transformer().model_dump_json(indent=1).replace('"held_nbytes": 10,', '"held_nbytes": -1,'))
    code, _, told = run("--profile", path, "--budget", "1GiB")
    assert code == 2
    assert f"recompute: {path}:" in told
    assert "held_nbytes" in told
    assert run("--budget", "1GiB")[0] == 2


@pytest.mark.slow
def test_from_a_model_to_a_plan_that_holds(tiny, tmp_path):
    saved = tmp_path / "profile.json"
    code, printed, told = run("--model", tiny, *SMALL, "--budget", "1GiB", "--json", "--save-profile", saved)
    assert code == 0, told
    assert json.loads(printed)["predicted_peak_bytes"] <= 1 << 30
    profile = Profile.load(saved)
    assert [place.layer for place in profile.places] == [None, 0, 1, 2, 3, None]

    most = predict(profile, tuple(0 for _ in profile.places)).peak_nbytes
    least = solver.floor(profile).prediction.peak_nbytes
    budget = (most + least) // 2
    flags = ("--profile", saved, "--model", tiny, *SMALL, "--budget", f"{budget}B", "--verify", "--json")
    out = tmp_path / "plan.yaml"
    code, printed, told = run(*flags, "--out", out)
    assert code == 0, told
    document = json.loads(printed)
    final = document["rounds"][-1]
    assert final["measured_peak_nbytes"] <= budget
    assert final["measured_peak_nbytes"] == pytest.approx(document["predicted_peak_bytes"], rel=0.03)

    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    model, batch = build(str(tiny), sequence_length=64, batch_size=1, **options)
    ruled = {row["path"] for row in document["choices"] if row["choice"] != "keep"}
    assert ruled
    with recompute.apply(model, out) as handle:
        text = handle.explain(wide=True)
        assert "model.layers.*" in text
        model(**batch).loss.backward()


def test_a_share_of_no_device_is_told_before_anything_is_measured(tiny):
    code, printed, told = run("--model", tiny, *SMALL, "--budget", "90%")
    assert (code, printed) == (2, "")
    assert "the capacity of the device is not known" in told
    assert "ways to run the regions" not in told


@pytest.mark.slow
def test_a_plan_says_what_it_was_calculated_for(tiny, tmp_path):
    out = tmp_path / "deep" / "plan.yaml"
    shared = ("--gpu", "h200", "--sharding", "fsdp", "--devices", 2, "--dtype", "bf16", "--frontier", "--out", out)
    code, printed, told = run("--model", tiny, "--seq-len", 64, "--budget", "50%", *shared)
    assert code == 0, told
    calculated = "214,592 parameters, bfloat16 calculated for each of 2 H200 under fsdp2; input_ids 1x64"
    assert calculated in printed.splitlines()[0]
    assert calculated in load_policy(out).description
    assert "without communication between devices" in printed
    assert "the profile was calculated, not measured" in printed


@pytest.mark.slow
def test_progress_is_told_on_stderr_in_lines(tiny):
    code, printed, told = run("--model", tiny, "--seq-len", 64, "--budget", "50%", "--gpu", "rtx4090")
    assert code == 0, told
    lines = told.splitlines()
    assert lines[:2] == ["recompute: loading torch and transformers", "recompute: building the model"]
    jobs = [line.split(": ")[-1] for line in lines if "ways to run the regions" in line]
    assert jobs
    assert jobs == sorted(set(jobs), key=lambda job: int(job.split(" of ")[0]))
    assert "assignments" not in printed
