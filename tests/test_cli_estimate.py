"""`recompute estimate`: of a configuration, without its weights."""

from __future__ import annotations

import json
from pathlib import Path

import models
import pytest
import transformers
from test_cli import recompute


@pytest.fixture
def config(tmp_path: Path) -> Path:
    transformers.LlamaConfig(**models.SHAPE).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_prints_tables(config: Path) -> None:
    code, output = recompute("estimate", "--config", config, "--seq-len", 32, "--policy", "full", "--dtype", "float32")
    assert code == 0, output
    assert "input_ids 1x32, labels 1x32\nfloat32, adamw, one device, policy full, full loss" in output
    assert "highest moments" in output
    assert "Peak: " in output


def test_json_is_one_object_of_what_was_asked_for(config: Path) -> None:
    flags = ("--seq-len", 32, "--batch-size", 2, "--optimizer", "sgd", "--sharding", "zero1", "--devices", 2, "--json")
    code, output = recompute("estimate", "--model", config, *flags)
    assert code == 0, output
    found = json.loads(output)
    assert (found["batch"], found["optimizer"], found["sharding"]) == ("input_ids 2x32, labels 2x32", "sgd", "zero1")
    assert found["static_bytes"]["optimizer"] == 0
    assert found["peak_bytes"] > found["activation_bytes"] > found["activation_bytes_per_layer"] > 0


def test_sweep_prints_a_table_and_writes_a_plot(config: Path, tmp_path: Path) -> None:
    flags = ("--config", config, "--seq-len", 16, "--sweep", "--out", tmp_path / "out")
    code, output = recompute("estimate", *flags)
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()[2:14]]
    assert [(line[0], line[1]) for line in lines] == [(b, s) for b in "124" for s in ("8", "16", "32", "64")]
    assert (tmp_path / "out" / "estimate.png").read_bytes().startswith(b"\x89PNG")
    code, output = recompute("estimate", *flags, "--json")
    assert [each["seq_len"] for each in json.loads(output)] == [8, 16, 32, 64] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--optimizer", "adamwfused"), "recompute: optimizer: expected one of adamw, "),
        (("--sharding", "zero4"), "found 'zero4' (did you mean 'zero"),
        (("--devices", "2"), "devices: 2 of them with sharding none"),
        (("--policy", "hok"), "no preset and no file is named 'hok' (did you mean 'hook'?)"),
        (("--config", "gone.json"), "gone.json: cannot be read as the configuration of a model: there is no such file"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(flags: tuple[str, ...], message: str, config: Path) -> None:
    code, output = recompute("estimate", "--config", config, *flags)
    assert code == 2
    assert message in output
