"""A Trainer, Hugging Face's and Lightning's, in two processes under a policy: with DDP, FSDP2 and DeepSpeed."""

import importlib.util

import pytest
from trainer_testing import in_two_processes

WAYS = ["ddp", "fsdp2", "zero2", "zero3", "lightning, ddp", "lightning, fsdp2"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_without_and_hold_less(way, tmp_path):
    if way.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    visible = {} if way == "ddp" or way.startswith("lightning") else {"CUDA_VISIBLE_DEVICES": ""}
    assert in_two_processes("two_trainings.py", way, str(tmp_path), **visible).count("two trainings agree") == 2
