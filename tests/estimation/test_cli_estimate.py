"""`recompute estimate`: of a configuration, without its weights."""

import importlib
import json
import re
from unittest.mock import Mock

import models
import pytest
import transformers
from test_cli import recompute
from typer.testing import CliRunner

from recompute.cli import app
from recompute.errors import ModelError
from recompute.estimation import model_estimator
from recompute.estimation.check_paths import check_source


@pytest.fixture
def config(tmp_path):
    transformers.LlamaConfig(**models.SHAPE).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def printed(*arguments):
    """The exit code of `recompute estimate`, and what it printed to stdout alone."""
    result = CliRunner().invoke(app, ["estimate", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_prints_tables(config, monkeypatch):
    monkeypatch.setattr(model_estimator, "ADVISED", ())
    code, output = printed("--config", config, "--seq-len", 32, "--policy", "full", "--dtype", "float32")
    assert code == 0, output
    assert "input_ids 1x32, labels 1x32\nfloat32, adamw, one device, policy full, full loss" in output
    assert "highest moments" in output
    assert "Peak: " in output


@pytest.mark.slow
def test_json_is_one_object_of_what_was_asked_for(config):
    """Also as people type it."""
    flags = ("--seq-len", 32, "--batch-size", 2, "--optimizer", "SGD", "--sharding", "ZeRO-1", "--devices", 2, "--json")
    flags += ("--microbatches", 8, "--microbatches-in-flight", 4)
    code, output = printed("--model", config, *flags, "--dtype", "bf16")
    assert code == 0, output
    found = json.loads(output)
    asked = {"batch": "input_ids 2x32, labels 2x32", "optimizer": "sgd", "sharding": "zero1", "dtype": "bfloat16"}
    assert found.items() >= asked.items()
    assert found["static_bytes"]["optimizer"] == 0
    assert (found["microbatches"], found["microbatches_in_flight"]) == (8, 4)
    assert found["peak_bytes"] > found["activation_bytes"] > found["activation_bytes_per_layer"] > 0


@pytest.mark.slow
def test_the_exit_code_says_whether_it_fits(config):
    code, output = printed("--model", config, "--seq-len", 32, "--gpu", "h100", "--gpu-memory", "80MiB")
    assert code == 0, output
    assert re.search(r"Fits H100: .* of 80\.0 MiB\. At sequence 32, the largest batch is \d\d+; at batch 1, ", output)
    code, output = printed("--model", config, "--seq-len", 32, "--gpu-memory", "64MiB", "--json")
    fit = json.loads(output)["fit"]
    assert code == 1
    assert fit["fits"] is False
    assert fit["largest_batch"] == fit["longest_sequence"] == 0
    assert fit["peak_nbytes"] > fit["capacity_nbytes"] == 64 << 20


def test_a_factory_is_called_once_as_its_batch_is_its_own(tmp_path, monkeypatch):
    made = "import torch\nmade = []\ndef make():\n    made.append(torch.nn.Linear(8, 8))\n"
    made += "    return made[0], torch.ones(4, 8)\n"
    (tmp_path / "own_batch.py").write_text(made, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    code, output = printed("--model", "own_batch:make", "--gpu", "h100")
    assert code == 0, output
    assert "The model brings its own batch" in output
    assert len(importlib.import_module("own_batch").made) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--optimizer", "adamwfused"), "recompute: optimizer: expected one of adamw, "),
        (("--sharding", "zero4"), "found 'zero4' (did you mean 'zero"),
        (("--devices", "2"), "devices: found 2 devices with sharding none"),
        (("--policy", "hok"), "no preset and no file is named 'hok' (did you mean 'hook'?)"),
        (("--dtype", "bf61"), "recompute: dtype: expected one of bfloat16, "),
        (("--gpu", "H2000"), "found 'H2000' (did you mean 'H200'?)"),
        (("--config", "gone.json"), "gone.json: there is no such file"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(flags, message, config):
    code, output = recompute("estimate", "--config", config, *flags)
    assert code == 2
    assert message in output


# A path at which there is no configuration is told in a line, and before torch is imported


def written(folder, text, name="config.json"):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def config_text(**changes):
    return json.dumps({**transformers.LlamaConfig(**models.SHAPE).to_dict(), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", ":1:1: not valid JSON: expecting value; expected an ablation's .yaml file, "),
        ('{"model_type": ', ":1:16: not valid JSON: the file ends"),
        (b"\xff\xfe", ":1: expected UTF-8 text; found byte 0xff"),
        ("[1]", "expected a JSON object with a model_type; found a list"),
        ("{}", "expected a model_type, .*; found {}"),
        ('{"hidden_size": 8}', "expected a model_type, .*; found keys hidden_size"),
        ('{"model_type": 3}', "expected a model_type"),
    ],
)
def test_what_is_no_configuration_is_told(text, message, tmp_path):
    path = written(tmp_path, text)
    for source in (str(path), str(tmp_path)):
        with pytest.raises(ModelError) as caught:
            check_source(source)
        assert str(caught.value).startswith(str(path))
        for part in message.split(".*"):
            assert part in str(caught.value)
        assert "\n" not in str(caught.value)


def test_what_is_not_there_is_told_and_a_name_is_left_to_hugging_face(tmp_path):
    for source in ("gone.json", "gone.yaml", f"{tmp_path}/gone", "./gone", "a/b/c", "gone/"):
        with pytest.raises(ModelError, match="there is no such file or folder"):
            check_source(source)
    with pytest.raises(ModelError, match="found a folder without a config"):
        check_source(str(tmp_path))
    check_source("gpt2")
    check_source("meta-llama/Llama-3.1-8B")
    check_source(str(written(tmp_path, config_text())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "The hidden size (30) is not a multiple of the number of attention heads (4). Correct"),
        ({"hidden_size": "large"}, "Field 'hidden_size' expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError: "),
        ({"hidden_act": "sillu"}, "KeyError: 'sillu'"),
        ({"model_type": "lama"}, "model type `lama`"),
    ],
)
@pytest.mark.parametrize("command", ["estimate", "explain", "plan"])
def test_what_transformers_refuses_is_told_in_a_line(command, changes, message, tmp_path):
    path = written(tmp_path, config_text(**changes))
    asked = {
        "estimate": ["estimate"],
        "explain": ["explain", "hook"],
        "plan": ["plan", "--budget", "1GiB", "--gpu", "h100"],
    }
    code, output = recompute(*asked[command], "--model", path, "--seq-len", 16)
    *_, line = output.splitlines()
    assert code == 2
    assert line.startswith(f"recompute: {path}: transformers ")
    assert message in line
    assert "Traceback" not in output


def test_a_name_that_transformers_cannot_fetch_is_told_in_a_line(monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", Mock(side_effect=OSError("No connection")))
    code, output = recompute("explain", "hook", "--model", "Llama-3.1-8B")
    assert code == 2
    assert re.search("no file or folder has this name.*name: No connection. Give a name", output)
