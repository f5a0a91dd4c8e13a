"""Models on fake tensors are those that would be built on real ones."""

import models
import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from recompute.estimation.build_model import build, build_fake


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**models.SHAPE), Qwen3Config(**models.SHAPE, tie_word_embeddings=True)],
    ids=lambda config: config.model_type,
)
def test_weights_are_shared_on_fake_tensors_where_they_are_on_real_ones(config):
    options = {"sequence_length": 8, "batch_size": 1, "dtype": torch.float32}
    real, _ = build(config, device=torch.device("cpu"), **options)
    with build_fake(config, device=torch.device("cpu"), **options) as (fake, _):
        shapes = {name: parameter.shape for name, parameter in fake.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in real.named_parameters()}
