"""`recompute doctor`: what is in the way of a run, and what to type against it, as estimates have it."""

import json
from dataclasses import replace
from pathlib import Path

import models
import pytest
import torch
import transformers
from test_cli import recompute as command
from tiers import slow
from typer.testing import CliRunner

import recompute
from recompute.cli import app
from recompute.estimation import model_estimator
from recompute.estimation.build_model import build_fake
from recompute.estimation.estimate import estimator_of
from recompute.estimation.estimate_options import EstimateOptions
from recompute.estimation.estimate_result import Estimate, EstimateSettings
from recompute.estimation.gpus import find_gpu, read_gpu
from recompute.estimation.static_memory import StaticBytes
from recompute.planning import doctor_command, longest_sequences
from recompute.planning.doctor_command import Diagnosis, Remedy
from recompute.planning.prediction import predict
from recompute.policy.loading import load_policy
from recompute.profiling.roofline import op_seconds

GIB, CPU = 2**30, torch.device("cpu")
GPU = find_gpu("RTX 4090")
SHAPE = {**models.SHAPE, "hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096, "num_hidden_layers": 2}
DEEP = {**SHAPE, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
LENGTH = 512


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), SHAPE)


def saved(folder, shape):
    transformers.LlamaConfig(**shape).save_pretrained(folder)
    return folder / "config.json"


def diagnose(config, memory="23GiB", **options):
    asked = EstimateOptions("bfloat16", options.pop("optimizer", "adamw"), "none", 1, "full", **options)
    given = {"gpu": read_gpu("rtx4090", memory=memory), "batch_size": 1, "seq_len": LENGTH}
    return doctor_command.diagnose(str(config), asked, progress=lambda what, done, total: None, **given)


def estimated(config, remedy):
    """The peak that ``recompute.estimate`` has for the changes of a remedy."""
    options = {}
    for change in remedy.changes:
        if change == "a chunked cross-entropy":
            options["loss"] = "chunked"
        elif change.startswith("fsdp2"):
            options |= {"sharding": "fsdp2", "devices": remedy.devices}
        else:
            name, _, value = change.partition(" ")
            options[name] = value
    return recompute.estimate(str(config), seq_len=LENGTH, gpu=GPU.name, advise=False, **options).peak_bytes


@pytest.mark.parametrize(
    ("shape", "share", "way", "devices", "presets"),
    [
        (SHAPE, 0.75, "logits", 1, ["full"]),
        *slow(
            (SHAPE, 0.75, "logits", 1, doctor_command.PRESETS),
            (SHAPE, 1.0, "logits", 1, doctor_command.PRESETS),
            (DEEP, 0.6, "static memory", 2, doctor_command.PRESETS),
            (DEEP, 0.01, "static memory", 0, doctor_command.PRESETS),
        ),
    ],
)
def test_what_to_type_fits_and_is_what_estimates_say(shape, share, way, devices, presets, tmp_path, monkeypatch):
    """0 devices: no number of them does."""
    monkeypatch.setattr(doctor_command, "PRESETS", presets)
    config = saved(tmp_path, shape)
    plain = recompute.estimate(str(config), seq_len=LENGTH, gpu=GPU.name, advise=False)
    capacity = int(share * plain.peak_bytes)
    found = diagnose(config, f"{capacity}B")
    assert found.now.peak_bytes == plain.peak_bytes
    assert found.fits == (share == 1)
    assert found.in_the_way == way
    assert bool(devices) <= len(found.remedies) <= 3
    assert [each.seconds for each in found.remedies] == sorted(each.seconds for each in found.remedies)
    assert {each.devices for each in found.remedies} == ({devices} if devices else set())
    for each in found.remedies:
        assert each.peak_nbytes == estimated(config, each) <= capacity
    assert (found.by_adapters is not None) == (devices == 2)


@pytest.mark.parametrize("policy", [None, *slow("full")])
def test_the_seconds_of_many_layers_are_those_of_a_few(policy, tmp_path, monkeypatch):
    config = saved(tmp_path, DEEP)
    options = EstimateOptions("bfloat16", "adamw", "none", 1, "full")

    def seconds():
        sizes = (1, LENGTH, None, GPU.name, lambda *ran: op_seconds(*ran, GPU))
        with estimator_of(str(config), options, *sizes) as estimator:
            return estimator.seconds(options, policy and load_policy(policy))

    by_few = seconds()
    monkeypatch.setattr(model_estimator, "find_stacks", lambda *given, **how: [])
    assert by_few == pytest.approx(seconds(), rel=1e-9)


@pytest.mark.slow
def test_a_step_takes_the_seconds_that_a_plan_of_it_takes(config):
    found = diagnose(config)
    with build_fake(str(config), sequence_length=LENGTH, batch_size=1, dtype=torch.bfloat16, device=CPU) as given:
        table = recompute.profile(*given, device=GPU)
    as_it_is = predict(table, (0,) * len(table.places))
    assert found.seconds == pytest.approx(as_it_is.step_seconds, rel=0.01)


@pytest.mark.parametrize("host", ["1GiB", *slow("64MiB")])
def test_the_longest_sequence_takes_what_estimates_of_it_say(host, tmp_path, monkeypatch):
    """On a host of 64 MiB what travels is what binds."""
    monkeypatch.setattr(longest_sequences, "LENGTHS", (4096, 8192))
    config, room = saved(tmp_path, {**SHAPE, "num_hidden_layers": 1}), 1 << 30
    gpu = read_gpu("rtx4090", memory=f"{room}B")
    asked = {"gpu": gpu, "batch_size": 1, "seq_len": 512, "longest": True, "host": host}
    options = EstimateOptions("bfloat16", "adamw", "none", 1, "full")
    found = doctor_command.diagnose(str(config), options, progress=lambda *told: None, **asked)
    assert [row.seq_len for row in found.rows] == sorted((row.seq_len for row in found.rows), reverse=True)
    assert {row.policy for row in found.rows} == {"auto", "full", "long", "long, attention again"}
    limit = {"1GiB": 512, "64MiB": 32}[host] << 20
    for row in found.rows:
        assert row.peak_nbytes <= room
        assert row.host_nbytes <= limit
        assert bool(row.host_nbytes) == row.policy.startswith("long")
        if row.policy == "full":  # the others' sequences are shorter than a tile of long, or have larger blocks
            again = recompute.estimate(str(config), seq_len=row.seq_len, policy="full", gpu=GPU.name, advise=False)
            assert again.peak_bytes == pytest.approx(row.peak_nbytes, rel=0.02)
    told = str(found)
    assert "The longest sequence on one RTX 4090 with 1.00 GiB, if half of" in told
    assert all(f"{row.seq_len:,}" in told for row in found.rows)


@pytest.mark.slow
def test_half_a_million_tokens_are_as_measured(monkeypatch):
    examples = Path(__file__).parents[2] / "examples"
    results = examples / "ablation" / "results" / "half-million-tokens-h200" / "results.json"
    measured = json.loads(results.read_text(encoding="utf-8"))
    (row,) = measured["rows"]
    ways = [("longest", load_policy(str(examples / "policies" / "longest.yaml")))]
    monkeypatch.setattr(longest_sequences, "_policies", lambda: iter(ways))
    options = EstimateOptions("bfloat16", "adamw", "none", 1, "full", lora=measured["lora"]).read()
    config, room = transformers.LlamaConfig(**measured["model"]), row["peak_bytes"]

    def estimator(length):
        return estimator_of(config, options, 1, length, None, "H200", lambda *ran: op_seconds(*ran, GPU))

    gpu = find_gpu("H200")._replace(capacity_nbytes=room)
    (found,) = longest_sequences.longest_sequences(estimator, options, gpu, 1 << 40, lambda *told: None).rows
    assert found.seq_len == pytest.approx(row["sequence_length"], rel=0.03)
    assert found.host_nbytes / found.seq_len == pytest.approx(row["offloaded_bytes"] / row["sequence_length"], rel=0.01)


def example(**changes):
    """A step of 30 GiB on a card of 23: 12 of weights, gradients and states, 6 of logits, 14 of activations."""
    static = StaticBytes(4 * GIB, 4 * GIB, 4 * GIB, {})
    settings = EstimateSettings("Llama, 8 parameters", "input_ids 1x8", "bfloat16", "adamw", "none", 1, "none", "full")
    parts = {"parameters": 4 * GIB, "optimizer states": 4 * GIB, "logits": 6 * GIB, "activations": 16 * GIB}
    now = Estimate(settings, static, 0, 0, (), 0, {"backward of the loss": 30 * GIB}, parts, ())
    remedies = (Remedy(("policy auto",), 1, 20 * GIB, 0.9), Remedy(("policy full",), 1, 15 * GIB, 1.3))
    return replace(Diagnosis(GPU, now, 1.0, remedies), **changes)


def test_it_reads_aloud():
    assert (
        str(example())
        == """\
Llama, 8 parameters; input_ids 1x8; bfloat16, adamw.

Without changes, a step does not fit one RTX 4090: its peak is 30.00 GiB (backward of the loss), and the GPU has \
23.00 GiB.
Static memory: 12.00 GiB (parameters 4.00 GiB, gradients 4.00 GiB, optimizer states 4.00 GiB).
Also held at the peak: logits 6.00 GiB, activations 16.00 GiB.
The largest obstacle: activations.

what to change, fastest first         peak    ms a step    time against now
-------------------------------  ---------  -----------  ------------------
policy auto                      20.00 GiB          900               0.90x
policy full                      15.00 GiB        1,300               1.30x

To use a policy: recompute.apply(model, "auto"), or recompute_policy="auto" for a Trainer.
Times are calculated for the RTX 4090 by its data sheet, without communication between GPUs.
To choose a policy for each layer: recompute plan --budget 100% with the same options."""
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"remedies": ()}, "No policy, no other optimizer and no sharding makes it fit. Shorten the sequence."),
        ({"remedies": (Remedy(("optimizer adamw-8bit",), 1, 20 * GIB, 1.0),)},
            "No policy alone makes it fit. Another optimizer does."),
        ({"remedies": (Remedy(("fsdp2 over 4 devices",), 4, 20 * GIB, 1.0),)},
            "No policy makes it fit one GPU. Sharding does: it takes 4 GPUs under FSDP2"),
        ({"by_adapters": Remedy(("--lora 16 --base nf4", "policy full"), 1, 13 * GIB, 1.4)},
            "Adapters fit one GPU: --lora 16 --base nf4 and policy full take 13.00 GiB."),
        ({"gpu": GPU._replace(capacity_nbytes=11 * GIB)},
            "The largest obstacle: static memory, which alone is too much."),
        ({"gpu": GPU._replace(capacity_nbytes=31 * GIB)}, "The largest part: activations."),
        ({"remedies": (Remedy(("a chunked cross-entropy",), 1, 20 * GIB, 1.0),)},
            "To use a chunked cross-entropy: the rule {type: head, action: recompute, via: kernel} in a policy."),
    ],
)  # fmt: skip
def test_each_finding_is_a_sentence(changes, told):
    assert told in str(example(**changes))


@pytest.mark.parametrize(
    ("card", "memory", "code"),
    [(("--gpu-tflops", 165, "--gpu-bandwidth", "1008GB/s"), "23GiB", 0), *slow((("--gpu", "rtx4090"), "40MiB", 1))],
)
def test_the_exit_code_says_whether_it_fits(card, memory, code, config, monkeypatch):
    monkeypatch.setattr(doctor_command, "PRESETS", ["full"] if code == 0 else doctor_command.PRESETS)
    asked = ("doctor", "--model", config, "--seq-len", LENGTH, *card, "--gpu-memory", memory, "--json")
    result = CliRunner().invoke(app, [str(each) for each in asked])
    found = json.loads(result.stdout)
    assert result.exit_code == code
    assert found["fits"] == (code == 0)
    assert found["remedies"][0].keys() == {"changes", "devices", "peak_nbytes", "seconds"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--gpu", "H2000"), "found 'H2000' (did you mean 'H200'?)"),
        (("--gpu", "h200", "--optimizer", "adamwfused"), "recompute: optimizer: expected one of adamw, "),
        (("--gpu", "h200", "--host", "1GiB"), "--host has an effect only with --longest"),
        (("--gpu", "h200", "--longest", "--host", "1GiBs"), "--host: expected something like 128GiB; found '1GiBs'"),
        (("--gpu", "h200", "--longest", "--model", "own:make"), "the peak of this model does not depend on --seq-len"),
        (("--gpu", "h200", "--base", "nf4"), "base 'nf4' has an effect only with adapters"),
        (("--gpu", "h200", "--model", "gone.json"), "gone.json: there is no such file"),
        *([] if torch.cuda.is_available() else [((), "this machine has no CUDA device. Name one")]),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(flags, message, config):
    code, output = command("doctor", "--model", config, *flags)
    assert (code, message in output) == (2, True), output
