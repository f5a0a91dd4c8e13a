"""`recompute estimate`: of a configuration, without its weights."""

import importlib
import json
import re

import models
import pytest
import transformers
from test_cli import recompute
from typer.testing import CliRunner

from recompute.cli import app
from recompute.estimation import model_estimator


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
