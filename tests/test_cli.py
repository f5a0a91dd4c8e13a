"""The command line trains, reports and exits as it says, and tells mistakes in one message."""

import errno
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import models
import pytest
import torch
import transformers
from tiers import slow
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils
from typer.testing import CliRunner

from recompute import __version__, apply, cli
from recompute.ablation import trials
from recompute.cli import app
from recompute.errors import ModelError
from recompute.estimation.build_model import build, build_fake
from recompute.estimation.factories import describe
from recompute.policy.loading import preset_names, preset_path
from recompute.substitution import norm as kernel_module

TINY = """\
model: {hidden_size: 64, intermediate_size: 172, layers: 2, heads: 4, kv_heads: 2}
policies: [none, full, hook]
peers: []
sequence_lengths: [64]
steps: 2
device: cpu
"""

FACTORY = """\
import torch
from torch import nn

def make():
    layers = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    return nn.Sequential(*layers), torch.randn(4, 8)
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return path


def recompute(*arguments):
    """The exit code, and what was printed to both streams."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def saved(out):
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_ablate_prints_a_table_and_writes_all_files(config, tmp_path):
    out = tmp_path / "deep" / "out"
    code, output = recompute("ablate", config, "--out", out)
    assert code == 0, output
    files = ["results.json", "results.md", "results.png", "memory.png", "times.png", "report.html"]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    assert f"in {out}: {', '.join(files)}" in output
    table = (out / "results.md").read_text(encoding="utf-8")
    for number, policy in enumerate(("none", "full", "hook"), start=1):
        left = r", about \d+ (s|min) left" if number < 3 else ""
        assert re.search(rf"^{policy}, sequence 64: .* ms a step \({number} of 3 done{left}\)$", output, re.MULTILINE)
        assert re.search(rf"^{policy} +", output, re.MULTILINE)
        assert f"| {policy} " in table
    assert saved(out)["complete"]
    assert saved(out)["rows"][2]["losses"] == saved(out)["rows"][0]["losses"]


@pytest.mark.slow
def test_options_replace_what_the_config_says(config, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, " * 10)
    options = ("--policy", "alternate", "--policy", "none", "--peer", "torch-selective", "--steps", 1, "--text", text)
    code, output = recompute("ablate", config, "--out", tmp_path, "--device", "cpu", *options)
    assert code == 0, output
    results = saved(tmp_path)
    assert [row["policy"] for row in results["rows"]] == ["none", "alternate", "torch-selective"]
    assert [len(row["losses"]) for row in results["rows"]] == [1, 1, 1]
    assert results["text"] == {"source": "text.txt", "nbytes": 200}
    assert results["config"]["sequence_lengths"] == [64]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (7200, "2 h")]
)
def test_what_is_left_is_told_in_one_unit(seconds, text):
    assert cli._duration(seconds) == text


@pytest.mark.slow
def test_an_interrupted_matrix_is_resumed_and_compared(config, tmp_path):
    out = tmp_path / "out"
    config.write_text(TINY.replace("[64]", "[16, 32]").replace("steps: 2", "steps: 1\nrepeats: 2"), encoding="utf-8")
    assert recompute("ablate", config, "--out", out)[0] == 0
    code, output = recompute("ablate", config, "--out", out, "--resume")
    assert (code, "ms a step (" in output) == (0, False), output  # all is there: nothing is trained
    assert len(saved(out)["resumed"]) == 1
    code, output = recompute("ablate", config, "--out", out, "--resume", "--steps", 2)
    assert code == 2
    assert "config.steps: results.json has 1, this run 2" in output
    code, output = recompute("ablate", "--compare", out, out)
    assert code == 0
    assert "beyond" not in output


def test_a_failing_policy_gives_exit_code_1_and_leaves_the_other_rows(config, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text("rules: [{type: Convolution, action: recompute}]\n", encoding="utf-8")
    code, output = recompute("ablate", config, "--out", tmp_path, "--policy", other, "--policy", "hook", "--steps", 1)
    assert code == 1
    assert f"{other}, sequence 64: NoEffectError: " in output.replace("\n", " ")
    assert [row["error"] is None for row in saved(tmp_path)["rows"]] == [True, False, True]


def test_ctrl_c_reports_the_rows_so_far(config, tmp_path, monkeypatch):
    under = trials.under

    def interrupt(policy, *others):
        if policy == "hook":
            raise KeyboardInterrupt
        return under(policy, *others)

    monkeypatch.setattr(trials, "under", interrupt)
    monkeypatch.setattr(sys, "argv", ["recompute", "ablate", str(config), "--overwrite", "--steps", "7"])
    code, output = recompute("ablate", config, "--out", tmp_path, "--steps", 1)
    assert code == 130
    assert "interrupted: rows are missing" in output
    (going_on,) = re.findall(r"^to continue: (.*)$", output, re.MULTILINE)
    assert shlex.split(going_on)[-2:] == ["7", "--resume"]
    assert re.search(r"^full +", output, re.MULTILINE)
    assert [row["policy"] for row in saved(tmp_path)["rows"]] == ["none", "full"]
    assert "interrupted" in (tmp_path / "results.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("of_a_factory", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_full_disk_leaves_the_table_and_what_was_written(of_a_factory, later, config, tmp_path, monkeypatch):
    """It fills up when the second row is to be written; later: only then, so that the next row has room again."""
    written = []

    def fill_up(path, data):
        rows = data.count(b'"policy":')
        if path.parent == out and (rows == 2 or (rows != 1 and written and not later)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path.name)
        return write(path, data)

    out, write = tmp_path / "out", Path.write_bytes
    (tmp_path / "filling.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Path, "write_bytes", fill_up)
    what = ("--model", "filling:make", "--peer", "torch-checkpoint") if of_a_factory else (config,)
    code, output = recompute("ablate", *what, "--policy", "full", "--policy", "alternate", "--steps", 1, "--out", out)
    saved_rows = [row["policy"] for row in saved(out)["rows"]]
    assert "Traceback" not in output
    assert output.count("No space left on device. Free some space there, or write to another folder. The training") == 1
    for policy in ("none", "full", "alternate"):
        assert re.search(rf"^{policy} +", output, re.MULTILINE)
    assert (code, "results.md" in output) == (0 if later else 1, later)
    assert (saved_rows[:3] == ["none", "full", "alternate"]) is later
    assert saved(out)["complete"] is later
    if not later:
        assert saved_rows == ["none"]
        assert re.search(r"to continue: .* --resume", output)


def test_a_disk_that_is_full_from_the_beginning_is_told_before_anything_is_trained(config, tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.setattr(trials.Experiment, "row", lambda *_: pytest.fail("trained"))
    code, output = recompute("ablate", config, "--out", tmp_path)
    assert code == 2
    assert output.startswith(f"recompute: {tmp_path}/results.json: cannot be written: No space left on device. ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 0\npolicy: [none]\n", ":2:1: policy: unknown key (did you mean 'policies'?)"),
        ("steps: [1\n", ":2:1: not valid YAML"),
        ("", "expected a configuration; found an empty file"),
    ],
)
def test_a_bad_config_gives_exit_code_2_and_one_message(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    code, output = recompute("ablate", path, "--out", tmp_path / "out")
    assert code == 2
    assert output.startswith(f"recompute: {path}")
    assert message in output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


def test_a_bad_option_gives_exit_code_2_and_names_it(config, tmp_path):
    code, output = recompute("ablate", config, "--peer", "torch-chekpoint")
    assert code == 2
    assert output.startswith("recompute: command line: peers[0]: ")
    assert "did you mean 'torch-checkpoint'?" in output
    code, output = recompute("ablate", tmp_path / "gone.yaml")
    assert (code, "gone.yaml: cannot be read" in output) == (2, True)
    assert recompute("ablate", config, "--device", "tpu")[0] == 2
    code, output = recompute("ablate", config, "--out", "/dev/null/out")
    assert (code, output.partition(" that can")[0]) == (2, "recompute: /dev/null/out: expected a folder")


@pytest.mark.parametrize("of_a_factory", [False, True])
def test_a_policy_that_is_none_is_told_before_anything_is_trained(of_a_factory, config, tmp_path):
    what, policies = ("--model", "a:b") if of_a_factory else (config,), ("--policy", "hook", "--policy", "elementwize")
    code, output = recompute("ablate", *what, *policies, "--out", tmp_path / "out")
    assert code == 2
    assert output.startswith("recompute: no preset and no file is named 'elementwize' (did you mean 'elementwise'?)")
    assert not (tmp_path / "out").exists()


def test_policies_lists_every_preset_and_prints_one():
    code, output = recompute("policies")
    assert code == 0
    for name in preset_names():
        assert re.search(rf"^{name} +\w", output, re.MULTILINE)
    assert recompute("policies", "hook") == (0, preset_path("hook").read_text(encoding="utf-8"))
    code, output = recompute("policies", "hok")
    assert code == 2
    assert output.startswith("recompute: no preset is named 'hok' (did you mean 'hook'?)")


@pytest.mark.parametrize("dtype", ["fp32", "BF16", "half", "float32"])
def test_dtypes_go_by_the_names_that_people_give_them(dtype, config):
    code, output = recompute("explain", "hook", "--model", config, "--seq-len", 16, "--dtype", dtype)
    assert code == 0, output
    assert {"fp32": "float32", "BF16": "bfloat16", "half": "float16"}.get(dtype, dtype) in output.splitlines()[0]


def test_a_dtype_that_is_none_is_told(config):
    code, output = recompute("explain", "hook", "--model", config, "--dtype", "bf61")
    assert code == 2
    assert "expected one of float32, bfloat16" in output
    assert "found 'bf61'" in output


def test_version():
    code, output = recompute("--version")
    assert code == 0
    assert output == f"recompute {__version__}\n"


def test_help_does_not_wait_for_heavy_imports_and_the_profiler_is_silenced_before_torch_reads_that():
    script = (
        "import os, sys; from recompute.cli import app; assert 'torch' not in sys.modules;"
        "app(['--help'], standalone_mode=False);"
        "print('loaded', sorted({'torch', 'transformers', 'matplotlib'} & sys.modules.keys()));"
        "app(['policies'], standalone_mode=False); print(os.environ['KINETO_LOG_LEVEL'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "ablate" in done.stdout
    assert "loaded []" in done.stdout
    assert done.stdout.splitlines()[-1] == "6"


# `recompute explain` and `recompute verify`: of a model that a file describes, without its weights


ROOT = Path(__file__).resolve().parents[1]
LLAMA_8B = ROOT / "examples" / "ablation" / "llama-8b.yaml"
OPTIONS = {"sequence_length": 24, "batch_size": 2, "dtype": torch.float32, "device": torch.device("cpu")}


def described(name, folder, **changes):
    """The folder with the configuration of a tiny model."""
    model = models.make(name)
    model.config.architectures = [type(model).__name__]
    model.config.update(changes)
    model.config.save_pretrained(folder)
    return str(folder)


def explained(model, batch, policy):
    with apply(model, policy) as handle:
        model(**batch)
        return handle.explain(wide=True)


@pytest.mark.parametrize("policy", ["none", "full", *slow("hook", "elementwise", "auto"), "kernel"])
def test_explain_says_what_a_real_run_says(policy, config):
    model, batch = build(str(config), **OPTIONS)
    real = f"{describe(model, batch)}\n\n{explained(model, batch, policy)}\n"
    flags = ("--seq-len", 24, "--batch-size", 2, "--dtype", "float32", "--device", "cpu", "--wide")
    assert recompute("explain", policy, "--model", config, *flags) == (0, real)


def test_a_model_gets_positions_for_the_length_that_is_asked_for(tmp_path):
    source = described("gpt2", tmp_path)
    assert transformers.AutoConfig.from_pretrained(source).max_position_embeddings < 128
    _, batch = build(source, **{**OPTIONS, "sequence_length": 128})
    assert batch["input_ids"].shape == (2, 128)
    code, output = recompute("explain", "full", "--model", source, "--seq-len", 128, "--device", "cpu")
    assert code == 0, output
    assert "input_ids 1x128, labels 1x128" in output


def test_explain_takes_no_memory_for_the_largest_model():
    code, output = recompute("explain", "elementwise", "--model", LLAMA_8B, "--device", "cpu", "--wide")
    assert code == 0
    title, _, policy, _, _, layers, *_ = output.splitlines()
    assert title == "LlamaForCausalLM, 1,746,997,248 parameters, bfloat16 on cpu; input_ids 1x4096, labels 1x4096"
    assert policy == "policy elementwise"
    assert layers.split()[:3] == ["model.layers.*", "8", "LlamaDecoderLayer"]
    # The 94,344 bytes a token of a layer without its elementwise work, and two tables of positions.
    assert f"{94_344 + 2 * 2 * 128:,} a token, 4096 tokens)" in output
    with build_fake(str(LLAMA_8B), **OPTIONS) as (model, batch):
        assert all(isinstance(tensor, FakeTensor) for tensor in (*model.parameters(), *batch.values()))
        assert isinstance(model(**batch).loss, FakeTensor)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("llama", "input_ids 1x4096, labels 1x4096"),
        *slow(*((name, "input_ids 1x4096, labels 1x4096") for name in ("mistral", "gpt2", "bert"))),
        ("t5", "input_ids 1x4096, labels 1x4096"),
        ("vit", "pixel_values 1x3x24x24"),
    ],
)
def test_explain_reads_the_configuration_of_a_hugging_face_model(name, given, tmp_path):
    source = described(name, tmp_path)
    code, output = recompute("explain", "elementwise", "--model", source, "--device", "cpu")
    assert code == 0
    title = output.splitlines()[0]
    assert title.startswith(type(models.make(name)).__name__)
    assert title.endswith(f", bfloat16 on cpu; {given}")
    assert " dropped " in output
    assert recompute("explain", "elementwise", "--model", f"{source}/config.json", "--device", "cpu") == (0, output)


def test_a_configuration_without_a_class_is_of_a_causal_model(tmp_path):
    transformers.LlamaConfig(**models.SHAPE).save_pretrained(tmp_path)
    assert "LlamaForCausalLM" not in (tmp_path / "config.json").read_text(encoding="utf-8")
    model, batch = build(str(tmp_path), **{**OPTIONS, "dtype": torch.float16})
    assert type(model) is transformers.LlamaForCausalLM
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert batch["input_ids"].shape == (2, 24)
    assert model.training
    assert model(**batch).past_key_values is None


def test_building_leaves_random_state_and_defaults_alone(tmp_path, config):
    find, state = masking_utils.find_packed_sequence_indices, torch.get_rng_state()
    for source in (str(config), described("llama", tmp_path / "llama")):
        torch.set_rng_state(state)
        build(source, **{**OPTIONS, "dtype": torch.bfloat16})
        with pytest.raises(ZeroDivisionError), build_fake(source, **OPTIONS):
            raise ZeroDivisionError
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() is torch.float32
        assert masking_utils.find_packed_sequence_indices is find


def test_what_depends_on_values_is_refused(config):
    with (
        pytest.raises(ModelError, match=r"tiny\.yaml: its forward depends on the values of tensors"),
        build_fake(str(config), **OPTIONS) as (_, batch),
    ):
        batch["input_ids"].max().item()


@pytest.mark.parametrize("command", ["explain", "verify"])
@pytest.mark.parametrize(
    ("policy", "source", "message"),
    [
        ("hok", "gone.yaml", "no preset and no file is named 'hok' (did you mean 'hook'?)"),
        ("hook", "gone.yaml", "gone.yaml: there is no such file"),
        ("hook", "gone.json", "gone.json: there is no such file"),
        ("hook", "bad.yaml", "bad.yaml:1:9: model.layer: unknown key (did you mean 'layers'?)"),
        ("hook", "bad.json", "bad.json: transformers"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(command, policy, source, message, tmp_path):
    (tmp_path / "bad.yaml").write_text("model: {layer: 2}\n", encoding="utf-8")
    (tmp_path / "bad.json").write_text('{"model_type": "nothing"}', encoding="utf-8")
    code, output = recompute(command, policy, "--model", tmp_path / source)
    assert code == 2
    assert output.startswith("recompute: ")
    assert message in output


def test_a_name_that_hugging_face_does_not_know_is_told(monkeypatch):
    def unknown(name):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unknown)
    code, output = recompute("explain", "hook", "--model", "nobody/nothing")
    assert code == 2
    assert "nobody/nothing is not a local folder" in output


def test_cuda_is_explained_where_there_is_none(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, output = recompute("explain", "auto", "--model", config, "--seq-len", 8, "--device", "cuda", "--wide")
    assert code == 0, output
    assert "bfloat16 as on cuda, which is not here; input_ids 1x8" in output
    assert re.search(r"kernel: rms_norm \(llama casting\) on CUDA, else ", output)
    assert re.search(r"aten\._scaled_dot_product_(cudnn|flash|efficient)_attention ", output), output
    assert "flash_attention_for_cpu" not in output


def test_explain_needs_a_model():
    code, output = recompute("explain", "hook")
    assert code == 2
    assert "--model" in output


def test_a_warning_is_one_line_without_code(config, tmp_path):
    path = tmp_path / "policy.yaml"
    rules = "rules: [{type: block, action: checkpoint}, {match: 'model.layer.*', action: checkpoint}]\n"
    path.write_text(rules, encoding="utf-8")
    code, output = recompute("explain", path, "--model", config, "--seq-len", 8)
    assert code == 0
    (line,) = [line for line in output.splitlines() if "warning" in line.lower()]
    assert line.startswith("recompute: warning: policy ")
    assert "'model.layer.*' is the path of no module" in line


def test_a_policy_that_governs_nothing_is_no_success(config, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("name: mine\nrules: [{type: Gone, action: checkpoint}]\n", encoding="utf-8")
    for command, expected in (("explain", 2), ("verify", 1)):
        code, output = recompute(command, path, "--model", config, "--seq-len", 8, "--device", "cpu")
        assert code == expected
        assert "recompute: policy mine governs no module of " in output
    code, output = recompute("verify", "none", "--model", config, "--seq-len", 8, "--device", "cpu")
    assert code == 0
    assert "dropped: 0 tensors" in output


def test_verify_exits_with_1_where_nothing_was_dropped(config, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{match: lm_head, action: recompute, via: hook}]\n", encoding="utf-8")
    code, output = recompute("verify", path, "--model", config, "--seq-len", 8, "--device", "cpu")
    assert code == 1
    assert "governs lm_head, but on this batch nothing was dropped, offloaded or compressed there" in output


def test_verify_reports_and_exits_with_0(config):
    code, output = recompute("verify", "elementwise", "--model", config, "--device", "cpu", "--seq-len", 16)
    assert code == 0
    title, verdict, *memory = output.splitlines()
    assert title.endswith("float32 on cpu; input_ids 1x16, labels 1x16")
    assert verdict == "policy elementwise: outputs and 21 gradients equal those without it, bit for bit"
    assert [line.partition(":")[0] for line in memory] == ["dropped", "kept"]


def test_verify_exits_with_1_where_gradients_differ(config, monkeypatch):
    right = kernel_module.rms_norm
    monkeypatch.setattr(kernel_module, "rms_norm", lambda *args: right(*args) * 1.0001)  # less than attaching looks for
    code, output = recompute("verify", "kernel", "--model", config, "--device", "cpu", "--seq-len", 16)
    assert code == 1
    assert "recompute: under policy kernel:\n2 of 2 outputs differ from those without it\n" in output
    assert "21 of 21 gradients differ" in output
