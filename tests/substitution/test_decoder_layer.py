"""Which decoder layers are a norm, attention, a norm and an MLP with two residual sums: by what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import GPT2_SHAPE, SHAPE
from tiers import one_in, slow
from tiny import HIDDEN as TINY_HIDDEN
from tiny import TinyAttention, TinyDecoderLayer, TinyMLP, TinyRMSNorm, gradients, rule, rules
from torch import Tensor, nn

import recompute
from recompute.substitution.layer_formula import PreNormLayer, find_pre_norm_layer


def layer_of(name: str, **options: Any) -> nn.Module:
    shape = {key: value for key, value in SHAPE.items() if name != "GPTNeoX" or "kv" not in key}
    config = getattr(transformers, f"{name}Config")(**shape, **options)
    return transformers.AutoModel.from_config(config).layers[0]


PLAIN = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3", "Mixtral", "Qwen2Moe", "Qwen3Moe"]


@pytest.mark.parametrize("name", PLAIN)
def test_finds_the_layers_there_are(name: str) -> None:
    found = find_pre_norm_layer(layer_of(name))
    assert found is not None
    parts = (found.norm, found.attention, found.mlp_norm, found.mlp, found.output)
    assert parts == ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp", 0)
    assert found.takes_more


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3Text"])
def test_finds_norms_behind_attention_and_mlp(name: str) -> None:
    found = find_pre_norm_layer(layer_of(name))
    assert found is not None
    assert (found.norm, found.after_attention) == ("input_layernorm", "post_attention_layernorm")
    assert (found.mlp_norm, found.after_mlp) == ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    assert not found.is_parallel


PARALLEL: dict[str, tuple[str, set[str]]] = {
    "GPTNeoX": ("post_attention_layernorm", {"attention", "mlp"}),
    "Phi": ("input_layernorm", {"attention", "mlp"}),
    "Cohere": ("input_layernorm", {"stream", "attention"}),
}
"""The norm of the MLP, and what the layer adds first."""


@pytest.mark.parametrize("name", PARALLEL)
def test_finds_layers_whose_mlp_reads_x(name: str) -> None:
    found = find_pre_norm_layer(layer_of(name))
    assert found is not None
    assert (found.norm, found.mlp, found.output) == ("input_layernorm", "mlp", 0)
    assert (found.mlp_norm, found.added_first) == PARALLEL[name]
    assert found.is_parallel


def test_finds_a_layer_that_may_attend_to_an_encoder() -> None:
    """Where it does, it runs its own code."""
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**{**GPT2_SHAPE, "n_layer": 1}, **dropouts, add_cross_attention=True)
    for each in (config, transformers.GPT2Config(**GPT2_SHAPE)):
        found = find_pre_norm_layer(transformers.AutoModel.from_config(each).h[0])
        assert found is not None
        assert (found.attention, found.absent) == ("attn", "encoder_hidden_states")
        x, states = torch.ones(1), torch.ones(2)
        assert found.takes((x,), {})
        assert found.takes((x, None, None, None), {"use_cache": False})
        assert not found.takes((x, None, None, states), {})
        assert not found.takes((x,), {"encoder_hidden_states": states})
    model, plain = (_with_encoder(config) for _ in range(2))
    handle = recompute.apply(model, rules(rule(["GPT2Block", "LayerNorm"], "recompute", via="kernel")))
    ids, states = torch.ones(1, 3, dtype=torch.int64), torch.randn(1, 4, 32, dtype=torch.float64)
    for _ in range(5):
        for given in ({}, {"encoder_hidden_states": states}):
            outputs = [each(ids, **given, use_cache=False).last_hidden_state for each in (model, plain)]
            torch.testing.assert_close(*outputs)
            gradients = [
                torch.autograd.grad(output.square().sum(), list(each.parameters()), allow_unused=True)
                for output, each in zip(outputs, (model, plain), strict=True)
            ]
            torch.testing.assert_close(*gradients)
    assert "kernel: add_layer_norm" in handle.explain(wide=True)


def _with_encoder(config: Any) -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).double()


@pytest.mark.parametrize("name", ["Olmo2", "Granite"])
def test_leaves_layers_that_compute_something_else(name: str) -> None:
    assert find_pre_norm_layer(layer_of(name)) is None


def test_a_dropout_counts_as_long_as_it_drops() -> None:
    found = find_pre_norm_layer(layer_of("Phi3", resid_pdrop=0.1))
    assert found is not None
    assert (found.after_attention, found.after_mlp) == (
        "resid_attn_dropout",
        "resid_mlp_dropout",
    )  # which run as they are
    assert not found.dropouts
    assert find_pre_norm_layer(layer_of("GPTNeoX", hidden_dropout=0.1)) is None
    layer = layer_of("Phi3")
    found = find_pre_norm_layer(layer)
    assert found is not None
    assert found.is_as_found(layer)
    layer.resid_mlp_dropout.p = 0.5
    assert not found.is_as_found(layer)


def test_a_dropout_of_another_module_counts_as_well() -> None:
    def dropped(self: Any, x: Tensor, mask: Any, cache: Any) -> Tensor:
        h = self.others[0](self.b(self.a(x), mask)) + x
        return self.d(self.c(h)) + h

    layer = Layer(dropped)
    layer.others = nn.ModuleList([nn.Dropout(0.0)])
    found = find_pre_norm_layer(layer)
    assert found is not None
    assert found.is_as_found(layer)
    layer.others[0].p = 0.5
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


def with_norms_behind(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = x + self.c(self.b(self.a(x), mask)[0])
    return self.c(self.d(self.a(h))) + h


def with_a_norm_behind_attention(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.a(self.b(self.a(x), mask)[0]) + x
    return h + self.d(self.c(h))


def test_finds_parallel_layers_and_norms_behind_whatever_their_parts_are_called() -> None:
    found = find_pre_norm_layer(Layer(parallel))
    assert found is not None
    assert (found.norm, found.attention, found.mlp_norm, found.mlp) == ("a", "b", "c", "d")
    assert found.added_first == {"stream", "attention"}
    x, attended, computed = torch.tensor([1e8, -1e8, 1.0])
    assert found.sum(x, attended, computed) == 1
    found = find_pre_norm_layer(Layer(with_norms_behind))
    assert found is not None
    assert (found.after_attention, found.after_mlp, found.output) == ("c", "c", 0)
    found = find_pre_norm_layer(Layer(with_a_norm_behind_attention))
    assert found is not None
    assert (found.after_attention, found.after_mlp) == ("a", None)


def second_norm_first(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    y = self.c(x)
    return x + self.b(self.a(x), mask) + self.d(y)


def added_to_the_mlp(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    attended = self.b(self.a(x), mask)
    computed = self.d(self.c(x))
    computed += attended[0]
    return x + computed, attended[1]


def test_finds_layers_as_falcons() -> None:
    found = find_pre_norm_layer(Layer(second_norm_first))
    assert found is not None
    assert found.norms_first
    found = find_pre_norm_layer(Layer(added_to_the_mlp))
    assert found is not None
    assert (found.norms_first, found.sums_in_place, found.output, found.returned_too) == (False, True, 0, 1)
    x, attended, computed = torch.tensor([1.0, 1e8, -1e8])
    assert found.sum(x, attended, computed) == 1
    assert computed == 0


def last_of_three_returned(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    attended, _, indices = self.b(self.a(x), mask)
    h = attended + x
    return self.d(self.c(h)) + h, indices


def first_of_three(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    attended, _, _ = self.b(self.a(x), mask)
    h = attended + x
    return self.d(self.c(h)) + h


def test_attention_may_have_as_many_outputs_as_the_layer_takes() -> None:
    """As that of GLM-5, which returns the tokens that it chose to attend to."""
    for forward, returned_too in ((last_of_three_returned, 2), (first_of_three, None)):
        found = find_pre_norm_layer(Layer(forward))
        assert found is not None
        assert (found.output, found.returned_too) == (0, returned_too)


class ChoosingAttention(TinyAttention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None, x.argmax(-1)


class ChoosingLayer(TinyDecoderLayer):
    self_attn: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = ChoosingAttention()

    def forward(self, hidden_states: Tensor) -> Any:
        attended, _, chosen = self.self_attn(self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), chosen


def test_a_layer_may_return_the_last_output_of_attention() -> None:
    torch.manual_seed(0)
    plain = ChoosingLayer()
    layer, x = copy.deepcopy(plain), torch.randn(2, 6, TINY_HIDDEN)
    handle = recompute.apply(layer, rules(rule("ChoosingLayer", "recompute", via="kernel")))
    assert "kernel: norm_linears, residual_mlp" in handle.explain(wide=True)
    for _ in range(6):
        assert torch.equal(layer(x)[1], plain(x)[1])
        torch.testing.assert_close(gradients(lambda x: layer(x)[0], x), gradients(lambda x: plain(x)[0], x))


def weights_returned_if_there_are_any(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    attended, weights = self.b(self.a(x), mask)
    h = attended + x
    return self.d(self.c(h)) + h if weights is None else (self.d(self.c(h)) + h, weights)


def added_and_read(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    """What it reads is no longer what the MLP gave."""
    computed = other = self.d(self.c(x))
    computed += self.b(self.a(x), mask)
    return x + self.b(self.a(x), mask) + other


def added_to_x(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    attended = self.b(self.a(x), mask)
    x += attended
    return x + self.d(self.c(x))


def added_behind(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    computed = self.d(self.c(x))
    computed += x
    return computed + self.b(self.a(x), mask)


def the_norm_returned(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    y = self.a(x)
    h = self.b(y, mask)[0] + x
    return self.d(self.c(h)) + h, y


def attention_returned_twice(self: Layer, x: Tensor, mask: Any, cache: Any) -> Any:
    y = self.a(x)
    h = self.b(y, mask)[0] + x
    return self.d(self.c(h)) + h, self.b(y, cache)[1]


def parallel_of_the_sum(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    attended = self.b(self.a(x), mask)
    return x + attended + self.d(self.c(attended))


def parallel_without_the_stream(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    attended = self.b(self.a(x), mask)
    return attended + attended + self.d(self.c(x))


def parallel_in_place(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    computed = self.b(self.a(x), mask)
    computed += self.d(self.c(x))
    return x + computed


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


def halved_in_place(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    h.mul_(0.5)
    return self.d(self.c(h)) + h


def attending_without_gradients(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    with torch.no_grad():
        attended = self.b(self.a(x), mask)
    h = attended + x
    return self.d(self.c(h)) + h


def attending_without_autocast(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
        attended = self.b(self.a(x), mask)
    h = attended + x
    return self.d(self.c(h)) + h


def doubling_gradients(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    if isinstance(h, Tensor) and h.requires_grad:
        h.register_hook(lambda gradient: gradient * 2)
    return self.d(self.c(h)) + h


def masked_by_a_tensor(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    h = h * mask if isinstance(mask, Tensor) else h
    return self.d(self.c(h)) + h


STREAMS: list[Tensor] = []


def noting_the_stream(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    STREAMS.append(h)
    return self.d(self.c(h)) + h


def probing_the_stream(self: Layer, x: Tensor, mask: Any, cache: Any) -> Tensor:
    h = self.b(self.a(x), mask) + x
    self.a(h)
    return self.d(self.c(h)) + h


MISSES = [
    weights_returned_if_there_are_any,
    halved_in_place,
    attending_without_gradients,
    attending_without_autocast,
    doubling_gradients,
    masked_by_a_tensor,
    noting_the_stream,
    probing_the_stream,
    added_and_read,
    added_to_x,
    added_behind,
    the_norm_returned,
    attention_returned_twice,
    parallel_of_the_sum,
    parallel_without_the_stream,
    parallel_in_place,
    scaled,
    without_a_norm,
    masked,
    in_training_only,
    constant_argument,
    two_results,
]


@pytest.mark.parametrize("forward", one_in(2, {forward.__name__: forward for forward in MISSES}))
def test_leaves_near_misses(forward: Callable[..., Any]) -> None:
    assert find_pre_norm_layer(Layer(forward)) is None


def test_takes_the_output_of_attention_that_the_layer_takes() -> None:
    found = find_pre_norm_layer(Layer(second_of_several))
    assert found is not None
    assert found.output == 1
    x = torch.ones(1)
    given, attend = found.split((x,), {"mask": 3})
    assert given is x
    assert attend(lambda *args, **kwargs: (0, (args, kwargs)), x) == (((x, 3), {}), None)  # type: ignore[arg-type]


def outcome(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return [*gradients(layer, x), *torch.autograd.grad(layer(x).sum(), list(layer.parameters()), allow_unused=True)]


@pytest.mark.parametrize(
    "attention", [TinyMLP, *slow(TinyRMSNorm, nn.Identity), TinyDecoderLayer], ids=lambda cls: cls.__name__
)
@pytest.mark.parametrize("norm", [TinyRMSNorm, *slow(lambda: nn.LayerNorm(TINY_HIDDEN))], ids=["RMSNorm", "LayerNorm"])
def test_kernels_may_stand_in_for_what_has_attentions_place(
    attention: Callable[[], nn.Module], norm: Callable[[], nn.Module]
) -> None:
    layer = TinyDecoderLayer()
    layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm = norm(), attention(), norm()  # type: ignore[assignment]
    plain, x = copy.deepcopy(layer), torch.randn(2, 6, TINY_HIDDEN)
    handle = recompute.apply(layer, rules(rule("TinyDecoderLayer", "recompute", via="kernel")))
    assert ("kernel: norm_linears" if norm is TinyRMSNorm else "kernel: add_layer_norm") in handle.explain(wide=True)
    for _ in range(2):
        torch.testing.assert_close(outcome(layer, x), outcome(plain, x))


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = TinyRMSNorm(), TinyRMSNorm()
        self.attention, self.mlp = TinyAttention(), TinyMLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x)) + self.mlp(self.mlp_norm(x))


def test_parallel_layers_with_rms_norms_have_kernels_for_their_parts_alone() -> None:
    torch.manual_seed(0)
    module = Parallel()
    model = copy.deepcopy(module)
    handle = recompute.apply(model, rules(rule("Parallel", "recompute", via="kernel")))
    assert "kernel: rms_norm" in handle.explain(wide=True)
    assert "kernel: gated_mlp" in handle.explain(wide=True)
    assert "norm_linears" not in handle.explain(wide=True)
    x = torch.randn(2, 6, TINY_HIDDEN)
    torch.testing.assert_close(gradients(model, x), gradients(module, x))
