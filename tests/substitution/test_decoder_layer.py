"""Which decoder layers are a norm, attention, a norm and an MLP with two residual sums: by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import SHAPE
from torch import Tensor, nn

from recompute.substitution.decoder_layer import PreNormLayer, find_pre_norm_layer


def layer_of(name: str, **options: Any) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**SHAPE, **options)
    return transformers.AutoModel.from_config(config).layers[0]


PLAIN = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "Mixtral", "Qwen2Moe", "Qwen3Moe"]


@pytest.mark.parametrize("name", PLAIN)
def test_finds_the_layers_there_are(name: str) -> None:
    found = find_pre_norm_layer(layer_of(name))
    assert found is not None
    parts = (found.norm, found.attention, found.mlp_norm, found.mlp, found.output)
    assert parts == ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", 0)
    assert found.takes_more


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3Text", "Olmo2", "Granite"])
def test_leaves_layers_that_compute_something_else(name: str) -> None:
    assert find_pre_norm_layer(layer_of(name)) is None


def test_a_dropout_counts_as_long_as_it_drops() -> None:
    assert find_pre_norm_layer(layer_of("Phi3", resid_pdrop=0.1)) is None
    layer = layer_of("Phi3")
    found = find_pre_norm_layer(layer)
    assert found is not None
    assert found.is_as_found(layer)
    layer.resid_mlp_dropout.p = 0.5
    assert not found.is_as_found(layer)


class Layer(nn.Module):
    def __init__(self, forward: Callable[..., Any]):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(3, 3) for _ in range(4))
        self.scale = 2.0
        self.run = forward

    def forward(self, x: Tensor, mask: Any = None, *, cache: Any = None) -> Any:
        return self.run(self, x, mask, cache)


def residual(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask, past=cache) + x
    return self.d(self.c(h)) + h


def test_finds_a_layer_whatever_its_parts_are_called() -> None:
    assert find_pre_norm_layer(Layer(residual)) == PreNormLayer(
        "a", "b", "c", "d", ("x", "mask", "cache"), (None, None), ((0, None), (1, "mask"), ("past", "cache")), False,
        None, (),
    )  # fmt: skip


def parallel(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    return self.d(self.c(x)) + h


def scaled(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) * self.scale + x
    return self.d(self.c(h)) + h


def without_a_norm(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(x, mask) + x
    return self.d(self.c(h)) + h


def masked(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    """A trace goes one way, as its mask is never None."""
    h = self.b(self.a(x), mask) + x
    return h if mask is None else self.d(self.c(h)) + h


def second_of_several(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask)[1] + x
    return self.d(self.c(h)) + h


def in_training_only(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    return self.d(self.c(h)) + h if self.training else h


def constant_argument(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), 1) + x
    return self.d(self.c(h)) + h


def two_results(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    h = self.b(self.a(x), mask) + x
    return self.d(self.c(h)) + h, mask


MISSES = [parallel, scaled, without_a_norm, masked, in_training_only, constant_argument, two_results]


@pytest.mark.parametrize("forward", MISSES, ids=lambda forward: forward.__name__)
def test_leaves_near_misses(forward: Callable[..., Any]) -> None:
    assert find_pre_norm_layer(Layer(forward)) is None


def test_takes_the_output_of_attention_that_the_layer_takes() -> None:
    found = find_pre_norm_layer(Layer(second_of_several))
    assert found is not None
    assert found.output == 1
    x = torch.ones(1)
    given, attend = found.split((x,), {"mask": 3})
    assert given is x
    assert attend(lambda *args, **kwargs: (0, (args, kwargs)), x) == ((x, 3), {})  # type: ignore[arg-type]
