"""LayerNorms by kernels: which modules are found, what stands in for them in models, what is held, and whole layers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import models
import pytest
import torch
import transformers
from models import BATCH, HIDDEN, LENGTH, SHAPE, held
from norm_tables import LAYER_NORMS
from tiers import by_default, slow
from tiny import counted_ops, gradients, rule, rules
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

import recompute
from recompute.errors import PolicyWarning
from recompute.estimation.cuda_semantics import as_on_cuda

TOKENS = BATCH * LENGTH
NORMS = rules(rule("*LayerNorm*", "recompute", via="kernel"))


def stood_in(module: nn.Module) -> nn.Module:
    found = copy.deepcopy(module)
    recompute.apply(found, rules(rule(type(module).__name__, "recompute", via="kernel")))
    return found


@pytest.mark.parametrize("affine", [True, False])
def test_an_input_that_the_module_refuses_is_refused(affine: bool) -> None:
    module = nn.LayerNorm(HIDDEN, elementwise_affine=affine)
    for x in (torch.randn(5, HIDDEN + 1), torch.tensor(1.0)):
        for each in (module, stood_in(module)):
            with pytest.raises(RuntimeError, match=r"normalized_shape=\[32\]"):
                each(x)


def test_parameters_of_another_dtype_are_the_modules_own_business() -> None:
    module = nn.LayerNorm(HIDDEN)
    x = torch.randn(5, HIDDEN).bfloat16()
    with counted_ops() as ops:
        found = gradients(stood_in(module), x)
    assert ops["aten.native_layer_norm"] == 1  # which takes float32 beside bfloat16 on the CPU, and not on CUDA
    assert all(map(torch.equal, found, gradients(module, x)))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        stood_in(module.bfloat16())(x.float())


def test_a_weight_for_each_head_is_broadcast_by_the_module() -> None:
    module = CohereLayerNorm((4, HIDDEN))
    x = torch.randn(5, 4, HIDDEN)
    assert all(map(torch.equal, gradients(stood_in(module), x), gradients(module, x)))


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["torch", *slow("in float32"), "Cohere", *slow("OLMo")])
def test_dtypes_under_the_autocast_of_cuda(kind: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    module = copy.deepcopy(LAYER_NORMS[kind][0]).to(dtype)
    stand_in = stood_in(module)
    with FakeTensorMode(allow_non_fake_inputs=True), as_on_cuda(autocast=torch.bfloat16):
        x = torch.empty(5, HIDDEN, dtype=x_dtype)
        with counted_ops() as ops:
            found = stand_in(x)
        assert found.dtype is module(x).dtype
    assert ops["recompute.layer_norm_forward"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["torch", "in float32", "Cohere", "OLMo"])
def test_autocast_casts_as_it_does_without_a_policy(kind: str, dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    module = copy.deepcopy(LAYER_NORMS[kind][0]).to("cuda", dtype)
    x = torch.randn(5, HIDDEN, device="cuda", dtype=x_dtype)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = gradients(stood_in(module), x), gradients(module, x)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    torch.testing.assert_close(found, expected)


def outcome(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


FAMILIES = {"gpt2": 5, "bert": 6, "vit": 5, "whisper": 12, "gpt_neox": 5, "cohere": 3, "olmo": 5}
"""How many LayerNorms run in each model's forward."""


def make(name: str, **options: Any) -> nn.Module:
    if name in models.FAMILIES:
        return models.make(name, **options)
    torch.manual_seed(0)
    kind = {"gpt_neox": "GPTNeoX", "cohere": "Cohere", "olmo": "Olmo", "stablelm": "StableLm"}[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **options})
    return transformers.AutoModelForCausalLM.from_config(config).train()


def batch_of(name: str) -> dict[str, Tensor]:
    return models.batch(name if name in models.FAMILIES else "llama")


def float64_error(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(((one.double() - other).norm() / other.norm().clamp_min(1e-6)).item() for one, other in pairs)


@pytest.mark.parametrize("name", by_default(list(FAMILIES), "gpt2", "whisper", "cohere", "olmo"))
def test_kernels_stand_in_for_every_norm_of_a_model(name: str) -> None:
    model, plain, exact, batch = make(name), make(name), make(name).double(), batch_of(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)  # no class is left to hooks
        recompute.apply(model, NORMS)
    wide = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    with counted_ops() as ops:
        found = outcome(model, batch)
    assert ops["recompute.layer_norm_forward"] >= FAMILIES[name]
    assert ops["recompute.layer_norm_backward"] == FAMILIES[name]
    assert "aten.native_layer_norm" not in ops
    without, truth = outcome(plain, batch), outcome(exact, wide)
    assert float64_error(found, truth) <= 2 * float64_error(without, truth)


def test_a_norms_output_that_a_linear_saves_is_dropped() -> None:
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN))
    plain = copy.deepcopy(model)
    x = torch.randn(TOKENS, HIDDEN)
    assert held(plain, lambda: plain(x)) == 3 * x.nbytes + 2 * TOKENS * 4  # x, and the norm's input and output
    handle = recompute.apply(model, NORMS)
    assert held(model, lambda: model(x)) == 2 * x.nbytes + 2 * TOKENS * 4
    assert handle.stats().dropped_nbytes == x.nbytes
    torch.testing.assert_close(gradients(model, x), gradients(plain, x))
