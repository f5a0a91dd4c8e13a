"""A profile without the device: what it says is arithmetic, and the model needs no memory."""

from functools import partial

import models
import pytest
import torch
from torch import nn
from torch.optim import AdamW

import recompute
from recompute.errors import EstimateError, ModelError, PlanError
from recompute.estimation.build_model import build_fake
from recompute.estimation.gpus import GPUS
from recompute.planning.prediction import Moment, moments, predict
from recompute.profiling import roofline

H200 = GPUS["H200"]
FLOPS, BANDWIDTH = 0.75 * H200.half_flops, 0.85 * H200.bandwidth


def profiled(layers=1):
    with torch.device("meta"):
        model = models.make("llama", torch.bfloat16, num_hidden_layers=layers)
    model.config.use_cache = False
    return recompute.profile(model, models.batch("llama"), device="H200")


def ways(profile, region):
    return {choice.name: choice for choice in profile.regions[region].choices}


def test_an_op_takes_its_arithmetic_or_its_traffic():
    def seconds(op, *args):
        return roofline.op_seconds(op, args, {}, op(*args), H200)  # type: ignore[operator]

    wide, small = (torch.empty(size, size, dtype=torch.bfloat16, device="meta") for size in (8192, 64))
    aten = torch.ops.aten
    assert seconds(aten.mm.default, wide, wide) == pytest.approx(2 * 8192**3 / FLOPS)
    assert seconds(aten.mm.default, small, small) == pytest.approx(3 * 2 * 64**2 / BANDWIDTH)
    assert seconds(aten.mm.default, wide.float(), wide.float()) == pytest.approx(2 * 8192**3 / 0.75 / H200.float_flops)
    assert seconds(aten.exp.default, wide) == pytest.approx(2 * 2 * 8192**2 / BANDWIDTH)
    assert seconds(aten.t.default, wide) == 0
    query = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    flash = aten._scaled_dot_product_flash_attention.default
    whole, causal = (seconds(flash, query, query, query, 0.0, is_causal) for is_causal in (False, True))
    assert whole == pytest.approx(4 * 8 * 8192**2 * 128 / FLOPS) == 2 * causal


@pytest.mark.slow
def test_a_head_takes_all_of_its_matrix_products():
    """Three of the logits' size. A fourth makes them again, but for a quarter, held in the weight's gradient."""
    tokens, hidden, vocabulary = 4096, 2048, 4 * 8448
    with torch.device("meta"):
        # The head's backward runs the ops of the layer again that make its output: of such widths no matrix products.
        widths = {"intermediate_size": hidden, "num_attention_heads": 16, "head_dim": hidden // 16}
        sizes = {"hidden_size": hidden, "vocab_size": vocabulary, "num_hidden_layers": 1, **widths}
        model = models.make("llama", torch.bfloat16, **sizes)
    model.config.use_cache = False
    profile = recompute.profile(model, models.batch("llama", size=1, length=tokens), device="H200")
    one = 2 * tokens * hidden * vocabulary / FLOPS
    head = ways(profile, 2)
    for name, products in {"kernel": 3.75, "kernel, holding the logits": 3}.items():
        seconds = head[name].forward_seconds + head[name].backward_seconds
        assert products * one < seconds < 1.12 * products * one  # its other kernels move the logits


@pytest.mark.slow
def test_it_says_what_it_is_and_offers_what_the_device_has():
    profile = profiled()
    assert profile.source == "roofline"
    assert profile.machine["gpu"] == "H200"
    assert "bfloat16 calculated for H200; input_ids" in profile.model
    assert profile.model in recompute.plan(profile, budget="100%").policy.description
    assert profile.capacity_nbytes == H200.capacity_nbytes
    assert [place.region for place in profile.places] == [0, 1, 2]
    layer, head = ways(profile, 1), ways(profile, 2)
    assert {"keep", "hook", "kernel", "checkpoint"} <= layer.keys()
    assert head.keys() == {"keep", "kernel"}
    assert layer["checkpoint"].held_nbytes < layer["hook"].held_nbytes < layer["keep"].held_nbytes
    backward, forward = layer["hook"].backward_seconds, layer["hook"].forward_seconds
    assert backward < layer["checkpoint"].backward_seconds <= backward + forward
    assert 0 < layer["kernel"].forward_seconds <= layer["hook"].forward_seconds < layer["keep"].forward_seconds
    assert profile.optimizer_seconds > 0
    assert profile.optimizer_peak_nbytes > 0


def test_the_first_steps_take_more_than_captured_code():
    """A tape holds one wide tensor more. So do ATen's kernels, in turn, and what they are given."""
    layers = [nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model, x = nn.Sequential(*layers), torch.empty(8192, 32)
    profile = recompute.profile(model, x, device="H200", match="*", kernels=False, optimizer=partial(AdamW, fused=True))
    by_hooks = (0, *[list(ways(profile, 1)).index("hook")] * 4, 0)
    steady, first = (predict(each, by_hooks).peak_nbytes for each in (profile, profile.from_the_start()))
    policy = {"version": 1, "rules": [{"match": "*", "action": "recompute"}]}
    options = {"dtype": "float32", "optimizer": "adamw-fused", "gpu": "H200", "advise": False}
    estimated = recompute.estimate(model, batch=x, policy=policy, **options)
    wide = 4 * 8192 * 128
    assert estimated.first_steps_peak_bytes - estimated.peak_bytes == pytest.approx(2 * wide, rel=0.01)
    assert first - steady == pytest.approx(2 * wide, rel=0.01)


@pytest.mark.slow
def test_the_real_model_is_left_alone():
    model = models.make("llama", num_hidden_layers=1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    recompute.profile(model.eval(), models.batch("llama"), device="A100", kernels=False)
    assert not model.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_figures_stand_for_a_gpu_and_half_the_bandwidth_takes_longer():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.empty(2, 64)
    usual, slow = (
        recompute.profile(model, batch, device=gpu, match="0").optimizer_seconds
        for gpu in (H200, H200._replace(bandwidth=H200.bandwidth / 2))
    )
    assert slow == pytest.approx(2 * usual)


def test_adamw_is_torchs_choice_on_cuda():
    """``foreach`` there: its sums over all parameters are alive at once. On other devices torch loops over them."""
    model, batch = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))), torch.empty(2, 64)

    def peak(**options):
        make = partial(torch.optim.AdamW, **options)
        return recompute.profile(model, batch, device="H200", match="0", optimizer=make).optimizer_peak_nbytes

    assert peak() == peak(foreach=True) > 2 * peak(foreach=False) > peak(fused=True) == 0


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_one_of_several_devices_takes_what_estimate_says(sharding):
    config = models.make("llama", num_hidden_layers=3, vocab_size=8192).config
    with build_fake(
        config, sequence_length=64, batch_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
    ) as given:
        profile = recompute.profile(*given, device="H200", sharding=sharding.upper(), devices=4, kernels=False)
    shared = {"batch_size": 4, "seq_len": 64, "sharding": sharding, "devices": 4, "advise": False}
    expected = recompute.estimate(config, **shared)
    as_it_is = tuple(0 for _ in profile.places)
    peaks = {moment: peak for moment, peak in moments(profile, as_it_is)}
    highest = max(peak for moment, peak in peaks.items() if moment.kind != "optimizer step")
    estimated = max(peak for name, peak in expected.moments.items() if name != "optimizer step")
    assert highest == pytest.approx(estimated, rel=0.002)
    assert peaks[Moment("optimizer step")] == pytest.approx(expected.moments["optimizer step"], rel=0.002)
    assert profile.machine["devices"] == 4
    assert f"calculated for each of 4 H200 under {sharding}" in profile.model
    assert "without communication between devices" in recompute.plan(profile, budget="100%").note


def test_what_is_not_here_is_not_measured():
    with pytest.raises(EstimateError, match=r"sharding: fsdp2 is calculated .* cannot be measured in one process"):
        recompute.profile(nn.Linear(2, 2), torch.ones(1, 2), sharding="fsdp", devices=2)
    with pytest.raises(EstimateError, match="found 2 devices with sharding none"):
        recompute.profile(nn.Linear(2, 2), torch.ones(1, 2), device="H200", devices=2)
    with pytest.raises(PlanError, match="verify=True runs the plan on this machine"):
        recompute.plan(nn.Linear(2, 2), torch.ones(1, 2), budget="1GiB", device="H200", verify=True)


def test_bad_input_is_named():
    with pytest.raises(ModelError, match=r"expected one of H200, H100, .*; found 'h2000' \(did you mean 'H200'\?\)"):
        recompute.profile(nn.Linear(2, 2), torch.ones(1, 2), device="h2000")
    with pytest.raises(ModelError, match="none of Linear's parameters requires a gradient"):
        recompute.profile(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), device="H200")
