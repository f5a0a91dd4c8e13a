"""`recompute explain` and `recompute verify`: of a model that a file describes, without its weights."""

import re
from pathlib import Path

import models
import pytest
import torch
import transformers
from test_cli import TINY, recompute
from tiers import slow
from torch._subclasses.fake_tensor import FakeTensor
from transformers import masking_utils

from recompute import apply
from recompute.errors import ModelError
from recompute.estimation.build_model import build, build_fake
from recompute.estimation.factories import describe
from recompute.substitution import norm as kernel_module

ROOT = Path(__file__).resolve().parents[1]
LLAMA_8B = ROOT / "examples" / "ablation" / "llama-8b.yaml"
OPTIONS = {"sequence_length": 24, "batch_size": 2, "dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


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
def test_explain_says_what_a_real_run_says(policy, tiny):
    model, batch = build(tiny, **OPTIONS)
    real = f"{describe(model, batch)}\n\n{explained(model, batch, policy)}\n"
    flags = ("--seq-len", 24, "--batch-size", 2, "--dtype", "float32", "--device", "cpu", "--wide")
    assert recompute("explain", policy, "--model", tiny, *flags) == (0, real)


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


def test_building_leaves_random_state_and_defaults_alone(tmp_path, tiny):
    find, state = masking_utils.find_packed_sequence_indices, torch.get_rng_state()
    for source in (tiny, described("llama", tmp_path / "llama")):
        torch.set_rng_state(state)
        build(source, **{**OPTIONS, "dtype": torch.bfloat16})
        with pytest.raises(ZeroDivisionError), build_fake(source, **OPTIONS):
            raise ZeroDivisionError
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() is torch.float32
        assert masking_utils.find_packed_sequence_indices is find


def test_what_depends_on_values_is_refused(tiny):
    with (
        pytest.raises(ModelError, match=r"tiny\.yaml: its forward depends on the values of tensors"),
        build_fake(tiny, **OPTIONS) as (_, batch),
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


def test_cuda_is_explained_where_there_is_none(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, output = recompute("explain", "auto", "--model", tiny, "--seq-len", 8, "--device", "cuda", "--wide")
    assert code == 0, output
    assert "bfloat16 as on cuda, which is not here; input_ids 1x8" in output
    assert re.search(r"kernel: rms_norm \(llama casting\) on CUDA, else ", output)
    assert re.search(r"aten\._scaled_dot_product_(cudnn|flash|efficient)_attention ", output), output
    assert "flash_attention_for_cpu" not in output


def test_explain_needs_a_model():
    code, output = recompute("explain", "hook")
    assert code == 2
    assert "--model" in output


def test_a_warning_is_one_line_without_code(tiny, tmp_path):
    path = tmp_path / "policy.yaml"
    rules = "rules: [{type: block, action: checkpoint}, {match: 'model.layer.*', action: checkpoint}]\n"
    path.write_text(rules, encoding="utf-8")
    code, output = recompute("explain", path, "--model", tiny, "--seq-len", 8)
    assert code == 0
    (line,) = [line for line in output.splitlines() if "warning" in line.lower()]
    assert line.startswith("recompute: warning: policy ")
    assert "'model.layer.*' is the path of no module" in line


def test_a_policy_that_governs_nothing_is_no_success(tiny, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("name: mine\nrules: [{type: Gone, action: checkpoint}]\n", encoding="utf-8")
    for command, expected in (("explain", 2), ("verify", 1)):
        code, output = recompute(command, path, "--model", tiny, "--seq-len", 8, "--device", "cpu")
        assert code == expected
        assert "recompute: policy mine governs no module of " in output
    code, output = recompute("verify", "none", "--model", tiny, "--seq-len", 8, "--device", "cpu")
    assert code == 0
    assert "dropped: 0 tensors" in output


def test_verify_exits_with_1_where_nothing_was_dropped(tiny, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("rules: [{match: lm_head, action: recompute, via: hook}]\n", encoding="utf-8")
    code, output = recompute("verify", path, "--model", tiny, "--seq-len", 8, "--device", "cpu")
    assert code == 1
    assert "governs lm_head, but on this batch nothing was dropped, offloaded or compressed there" in output


def test_verify_reports_and_exits_with_0(tiny):
    code, output = recompute("verify", "elementwise", "--model", tiny, "--device", "cpu", "--seq-len", 16)
    assert code == 0
    title, verdict, *memory = output.splitlines()
    assert title.endswith("float32 on cpu; input_ids 1x16, labels 1x16")
    assert verdict == "policy elementwise: outputs and 21 gradients equal those without it, bit for bit"
    assert [line.partition(":")[0] for line in memory] == ["dropped", "kept"]


def test_verify_exits_with_1_where_gradients_differ(tiny, monkeypatch):
    right = kernel_module.rms_norm
    monkeypatch.setattr(kernel_module, "rms_norm", lambda *args: right(*args) * 1.0001)  # less than attaching looks for
    code, output = recompute("verify", "kernel", "--model", tiny, "--device", "cpu", "--seq-len", 16)
    assert code == 1
    assert "recompute: under policy kernel:\n2 of 2 outputs differ from those without it\n" in output
    assert "21 of 21 gradients differ" in output
