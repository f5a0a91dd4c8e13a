"""A Trainer in two processes under a policy: with DDP, FSDP2 and DeepSpeed."""

import importlib.util

import pytest
from tiers import by_default
from trainer_testing import in_two_processes


@pytest.mark.slow
def test_ddp(tmp_path):
    """Losses as without, and one accuracy, of the tokens of both."""
    assert in_two_processes("two_trainers.py", str(tmp_path)).count("two trainers agree") == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", by_default(["fsdp2", "zero2", "zero3"], "fsdp2"))
def test_sharded(way, tmp_path):
    """Losses and norms of gradients as without, and less held."""
    if way != "fsdp2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    printed = in_two_processes("two_sharded_trainers.py", way, str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert printed.count("two trainers agree") == 2
