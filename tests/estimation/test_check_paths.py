"""A path at which there is no configuration of a model is told in a line, and before torch is imported."""

import json
import re
from unittest.mock import Mock

import models
import pytest
import transformers
from test_cli import recompute

from recompute.errors import ModelError
from recompute.estimation.check_paths import check_source


def written(folder, text, name="config.json"):
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def config(**changes):
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
    check_source(str(written(tmp_path, config())))


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
    path = written(tmp_path, config(**changes))
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
