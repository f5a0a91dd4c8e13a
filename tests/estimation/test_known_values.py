"""Shapes that depend on values: experts written by hand, inputs of floats, images among tokens, adapters."""

import sys

import models
import pytest
import torch
import transformers
from engine_testing import module_of
from torch import nn

import recompute
from recompute.engine.fake_mode import FakeMode
from recompute.estimation.build_model import build, build_fake
from recompute.estimation.fake_tensors import fake_batch

TOKENS, WIDTH, EXPERTS = 64, 16, 4


def of_experts(self, x):
    """A layer of experts that hands out tokens in one of the ways that people write."""
    weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
    return self.route(self.experts, x, weights, chosen).pow(2).mean()


def by_where(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, places = torch.where(chosen == number)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
    return out


def by_masks(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        mask = (chosen == number).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
    return out


def by_one_hot(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    masks = nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in masks.sum((-1, -2)).nonzero()[:, 0].tolist():
        places, rows = torch.where(masks[number])
        out = out.index_add(0, rows, experts[number](x[rows]) * weights[rows, places, None])
    return out


def by_counts(experts, x, weights, chosen):
    order = chosen.flatten().argsort()
    parts = x[order // 2].split(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())
    return torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)])


@pytest.mark.parametrize("route", [by_where, by_masks, by_one_hot, by_counts])
@pytest.mark.parametrize("policy", [None, "full"])
def test_experts_get_tokens_evenly(route, policy):
    experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)) for _ in range(EXPERTS))
    model = module_of(of_experts, gate=nn.Linear(WIDTH, EXPERTS), experts=experts, route=route)
    seen = []
    for expert in model.experts:
        expert[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    found = recompute.estimate(model, batch=torch.randn(TOKENS, WIDTH), policy=policy, advise=False)
    assert set(seen) == {TOKENS * 2 // EXPERTS}
    assert "tokens divided evenly among experts" in found.settings.assumed
    assert "the batch's floats in bfloat16" in found.settings.assumed
    assert "divided evenly" in str(found)


def test_values_follow_writes_and_views():
    with FakeMode():
        numbers = torch.arange(6)
        before = numbers + 1
        numbers.view(2, 3)[0].add_(10)
        assert numbers.tolist() == [10, 11, 12, 3, 4, 5]
        assert before.tolist() == [1, 2, 3, 4, 5, 6]
        given = fake_batch(torch.tensor([0, 3, 0, 5]))
        assert given.nonzero().shape == (2, 1)
        assert torch.randn(4, 7)[given > 0].shape == (2, 7)
        given.copy_(torch.randn(4).long())  # of what is written now nothing is known
        with pytest.raises(Exception, match="nonzero"):
            given.nonzero()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)),
        nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), nn.LayerNorm(8)),
    ],
    ids=["convolutions", "linear"],
)
def test_float_inputs_are_cast_as_a_training_loop_casts_them(model):
    x = torch.randn(2, 3, 8, 8)
    cast, given = (recompute.estimate(model, batch=each, advise=False) for each in (x, x.bfloat16()))
    assert cast.peak_bytes == given.peak_bytes
    assert given.settings.batch == "batch 2x3x8x8"
    assert not given.settings.assumed
    assert not recompute.estimate(model, batch=x, dtype="bfloat16-autocast", advise=False).settings.assumed


WHISPER = transformers.WhisperConfig(**models.WHISPER_SHAPE, architectures=["WhisperForConditionalGeneration"])
LLAVA = transformers.LlavaConfig(
    text_config={"model_type": "llama", **models.SHAPE},
    vision_config={"model_type": "clip_vision_model", "projection_dim": 32, **models.VIT_SHAPE},
    image_token_index=10,
    architectures=["LlavaForConditionalGeneration"],
)


@pytest.mark.parametrize(
    ("config", "length", "batch", "assumed"),
    [
        (WHISPER, 16, "input_features 1x8x64, labels 1x16", ""),
        (LLAVA, 64, "pixel_values 1x3x24x24, input_ids 1x64, labels 1x64", "an image in each sequence"),
        (LLAVA, 8, "input_ids 1x8, labels 1x8", "tokens without images"),
    ],
)
def test_the_batch_has_what_the_model_takes_and_says_what_not(config, length, batch, assumed):
    found = recompute.estimate(config, seq_len=length, advise=False)
    assert found.settings.batch == batch
    assert assumed in "; ".join(found.settings.assumed)


ADAPTED = """
import torch
from torch import nn

class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.low = base, nn.Linear(8, 8)
        self.also = [base.weight.view(-1)]  # somebody refers to it
        self.to(base.weight.device).to(torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.low(x)

def make():
    return nn.Sequential(Adapter(nn.Linear(8, 8)), Adapter(nn.Linear(8, 8))), torch.randn(4, 8)
"""


def test_adapters_move_where_a_factory_makes_them(tmp_path, monkeypatch):
    (tmp_path / "adapted.py").write_text(ADAPTED)
    monkeypatch.syspath_prepend(tmp_path)
    whole = nn.Module._apply
    found = recompute.estimate("adapted:make", advise=False)
    sys.modules.pop("adapted")
    assert found.static_bytes.parameters == 4 * (64 + 8) * 2
    assert nn.Module._apply is whole


@pytest.mark.parametrize(
    "config",
    [transformers.LlamaConfig(**models.SHAPE), transformers.Qwen3Config(**models.SHAPE, tie_word_embeddings=True)],
    ids=lambda config: config.model_type,
)
def test_weights_are_shared_on_fake_tensors_where_they_are_on_real_ones(config):
    options = {"sequence_length": 8, "batch_size": 1, "dtype": torch.float32}
    real, _ = build(config, device=torch.device("cpu"), **options)
    with build_fake(config, device=torch.device("cpu"), **options) as (fake, _):
        shapes = {name: parameter.shape for name, parameter in fake.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in real.named_parameters()}
