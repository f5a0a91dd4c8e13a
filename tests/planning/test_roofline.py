"""A profile without the device: what it says is arithmetic, and the model needs no memory."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

import recompute
from recompute.errors import ModelError
from recompute.planning import roofline
from recompute.planning.profile_table import Choice, Profile

H200 = roofline.DEVICES["H200"]
FLOPS, BANDWIDTH = 0.75 * H200.half_flops, 0.85 * H200.bandwidth


def profiled(layers: int = 1) -> Profile:
    with torch.device("meta"):
        model = models.make("llama", torch.bfloat16, num_hidden_layers=layers)
    model.config.use_cache = False
    return recompute.profile(model, models.batch("llama"), device="H200")


def ways(profile: Profile, region: int) -> dict[str, Choice]:
    return {choice.name: choice for choice in profile.regions[region].choices}


def test_an_op_takes_its_arithmetic_or_its_traffic() -> None:
    def seconds(op: object, *args: object) -> float:
        return roofline.op_seconds(op, args, {}, op(*args), H200)  # type: ignore[operator]

    large, small = (torch.empty(size, size, dtype=torch.bfloat16, device="meta") for size in (8192, 64))
    aten = torch.ops.aten
    assert seconds(aten.mm.default, large, large) == pytest.approx(2 * 8192**3 / FLOPS)
    assert seconds(aten.mm.default, small, small) == pytest.approx(3 * 2 * 64**2 / BANDWIDTH)
    assert seconds(aten.mm.default, large.float(), large.float()) == pytest.approx(
        2 * 8192**3 / 0.75 / H200.float_flops
    )
    assert seconds(aten.exp.default, large) == pytest.approx(2 * 2 * 8192**2 / BANDWIDTH)
    assert seconds(aten.t.default, large) == 0
    query = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    flash = aten._scaled_dot_product_flash_attention.default
    whole, causal = (seconds(flash, query, query, query, 0.0, is_causal) for is_causal in (False, True))
    assert whole == pytest.approx(4 * 8 * 8192**2 * 128 / FLOPS) == 2 * causal


def test_it_says_what_it_is_and_offers_what_the_device_has() -> None:
    profile = profiled()
    assert profile.source == "roofline"
    assert profile.machine["gpu"] == "H200"
    assert profile.capacity_nbytes == H200.capacity_nbytes
    assert [place.region for place in profile.places] == [0, 1, 2]
    layer, head = ways(profile, 1), ways(profile, 2)
    assert {"keep", "hook", "kernel", "checkpoint"} <= layer.keys()
    assert head.keys() == {"keep", "kernel"}
    assert layer["checkpoint"].held_nbytes < layer["hook"].held_nbytes < layer["keep"].held_nbytes
    assert layer["checkpoint"].backward_seconds == pytest.approx(
        layer["keep"].backward_seconds + layer["keep"].forward_seconds, rel=0.05
    )
    assert layer["kernel"].forward_seconds < layer["keep"].forward_seconds
    assert profile.optimizer_seconds > 0
    assert profile.optimizer_peak_nbytes > 0


def test_the_real_model_is_left_alone() -> None:
    model = models.make("llama", num_hidden_layers=1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    recompute.profile(model.eval(), models.batch("llama"), device="A100", kernels=False)
    assert not model.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_bad_input_is_named() -> None:
    with pytest.raises(ModelError, match=r"expected one of H200, H100, .*; found 'h200' \(did you mean 'H200'\?\)"):
        recompute.profile(nn.Linear(2, 2), torch.ones(1, 2), device="h200")
    with pytest.raises(ValueError, match="none of Linear's parameters requires a gradient"):
        recompute.profile(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), device="H200")
