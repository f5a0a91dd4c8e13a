"""Stacks with a plugin point: the files of examples/stacks train small, by the packages where these are installed.

Elsewhere stand-ins have what the files use of axolotl 0.19, torchtitan 0.3 and LLaMA-Factory 0.9.5.
"""

import importlib.util
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ruamel.yaml import YAML
from trainer_testing import logged, model, trained
from transformers import TrainerCallback

import recompute
from recompute.errors import PolicyError, UnsupportedError

STACKS = Path(__file__).parents[2] / "examples" / "stacks"


class BasePlugin:
    """Of axolotl: it calls these, of each plugin."""

    def register(self, cfg): ...
    def get_input_args(self): ...
    def add_callbacks_pre_trainer(self, cfg, model):
        return []


class FullAC:
    """Of torchtitan: a configuration builds the class that it is nested in, which is then applied to the model."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True
        owner: ClassVar[Any] = None

        def build(self, *, dump_folder):
            return self.owner(self)

    def __init__(self, config):
        self.config = config

    def __init_subclass__(cls):
        cls.Config.owner = cls


def run_exp(args=None, callbacks=None):
    """Of LLaMA-Factory: trains as ``sys.argv`` says, with these callbacks."""


STAND_INS = {
    "axolotl.integrations.base": {"BasePlugin": BasePlugin},
    "torchtitan.distributed.activation_checkpoint": {"FullAC": FullAC},
    "torchtitan.models.llama3": {"config_registry": SimpleNamespace(llama3_8b=SimpleNamespace)},
    "llamafactory.train.tuner": {"run_exp": run_exp},
}


@pytest.fixture(autouse=True)
def stacks(monkeypatch):
    """Puts a stand-in where a package is missing."""
    missing = {name for name in STAND_INS if importlib.util.find_spec(name.split(".")[0]) is None}
    for name in missing:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(".".join(parts[:count])))
        vars(sys.modules[name]).update(STAND_INS[name])
    for name in ("axolotl", "torchtitan"):
        monkeypatch.delitem(sys.modules, f"recompute.integrations.{name}", raising=False)


def yaml_of(name):
    return YAML(typ="safe").load((STACKS / name).read_text(encoding="utf-8"))


def plugin_of(keys):
    module, _, name = keys["plugins"][0].rpartition(".")
    plugin = getattr(importlib.import_module(module), name)()
    plugin.register(keys)
    return plugin


def test_axolotl_trains_under_the_policy_of_its_keys(tmp_path):
    keys = yaml_of("axolotl.yaml")
    plugin = plugin_of(keys)
    module, _, name = plugin.get_input_args().rpartition(".")
    assert {"recompute_policy", "recompute_kwargs"} == getattr(sys.modules[module], name).model_fields.keys()
    trainer = trained(tmp_path, *plugin.add_callbacks_pre_trainer(keys, model()), max_steps=1)
    assert logged(trainer, "token_accuracy")  # without logits, as the keys say
    assert all(nbytes > 0 for nbytes in logged(trainer, "recompute_dropped_nbytes"))


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ({"recompute_policy": "elementwse"}, PolicyError, "elementwise"),
        ({"recompute_kwargs": {"logit": False}}, PolicyError, "logits"),
        ({"gradient_checkpointing": True}, UnsupportedError, "gradient_checkpointing=False"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else None,
)
def test_axolotl_hears_of_a_wrong_key_before_a_model_is_loaded(keys, error, words):
    with pytest.raises(error, match=words):
        plugin_of({**yaml_of("axolotl.yaml"), **keys})


def test_a_job_of_torchtitan_trains_the_same_bits_and_holds_less(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(STACKS)
    monkeypatch.delitem(sys.modules, "torchtitan_job", raising=False)
    config = importlib.import_module("torchtitan_job").llama3_8b()
    decoder, plain = model(), model()
    config.activation_checkpoint.build(dump_folder=str(tmp_path)).apply(decoder)
    ids = torch.arange(16)[None]
    for each in (decoder, plain):
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, one), (other_name, other) in zip(decoder.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(one.grad, other.grad)
    assert recompute.apply(decoder, "none", replace=True).policy.name == "none"  # there was a policy to replace


def test_llamafactory_is_given_the_callback_and_checkpoints_nothing(monkeypatch):
    given = []
    tuner = importlib.import_module("llamafactory.train.tuner")
    monkeypatch.setattr(tuner, "run_exp", lambda args=None, callbacks=None: given.extend(callbacks))
    runpy.run_path(str(STACKS / "train_with_llamafactory.py"), run_name="__main__")
    (callback,) = given
    assert isinstance(callback, TrainerCallback)
    assert (callback.policy.name, callback._options.logits) == ("auto", False)
    assert yaml_of("llamafactory.yaml")["disable_gradient_checkpointing"] is True  # else it is on


def test_accelerates_configuration_shards_by_fsdp2_and_checkpoints_nothing():
    config = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file(
        str(STACKS / "accelerate-fsdp2.yaml")
    )
    assert config.num_processes == 8 * config.num_machines == 16
    assert (config.fsdp_config["fsdp_version"], config.fsdp_config["fsdp_activation_checkpointing"]) == (2, False)
