"""Norms that ask for the dtype of their weight, as T5's: they have kernels where input and weight have one dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from tiers import slow
from tiny import HIDDEN, TinyDecoder, TinyDecoderLayer, TinyRMSNorm, counted_ops, rule, rules, token_ids
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

import recompute
from recompute.substitution.norm import KernelRMSNorm, find_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def norm_of(cls: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    norm = cls(HIDDEN, eps=1e-3)
    with torch.no_grad():
        norm.weight += torch.randn(HIDDEN) * 0.3
    return norm.to(dtype)


def tokens(dtype: torch.dtype) -> Tensor:
    return torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)


def kernels_run(module: nn.Module, x: Tensor) -> int:
    with counted_ops() as ops:
        module(x)
    return ops.get("recompute.rms_norm_forward", 0)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x", [torch.float32, torch.bfloat16])
def test_where_input_and_weight_have_two_dtypes_the_norm_runs_as_it_is(weight: torch.dtype, x: torch.dtype) -> None:
    """There it rounds elsewhere than any kernel does, and returns the dtype of its weight, or the wider one."""
    module, plain = norm_of(T5LayerNorm, weight), norm_of(T5LayerNorm, weight)
    recompute.apply(module, rules(rule("T5LayerNorm", "recompute", via="kernel")))
    assert kernels_run(module, tokens(x)) == (weight is x)
    result, reference = module(tokens(x)), plain(tokens(x))
    assert result.dtype is reference.dtype
    assert torch.equal(result, reference)


def test_a_norm_that_is_cast_after_the_policy_keeps_its_kernel() -> None:
    module = norm_of(T5LayerNorm)
    recompute.apply(module, rules(rule("T5LayerNorm", "recompute", via="kernel")))
    module.to(torch.bfloat16)
    assert kernels_run(module, tokens(torch.bfloat16)) == 1
    assert torch.equal(module(tokens(torch.bfloat16)), norm_of(T5LayerNorm, torch.bfloat16)(tokens(torch.bfloat16)))


class Asking(TinyRMSNorm):
    def __init__(self, compute: Callable[..., Any]):
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def normalized(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)


def of_its_input(self: Any, x: Tensor) -> Tensor:
    h = normalized(self, x)
    return self.weight * (h if x.dtype == self.weight.dtype == torch.float32 else h.to(self.weight.dtype))


def in_bfloat16_alone(self: Any, x: Tensor) -> Tensor:
    return self.weight * (normalized(self, x).to(x.dtype) if self.weight.dtype == torch.bfloat16 else x)


def of_no_dtype(self: Any, x: Tensor) -> Tensor:
    return self.weight * normalized(self, x)


def of_what_it_computes(self: Any, x: Tensor) -> Tensor:
    h = normalized(self, x)
    return self.weight * (h if h.dtype == self.weight.dtype else h.to(self.weight.dtype))


FOUND: dict[str, tuple[Callable[..., Tensor], tuple[torch.dtype, ...]]] = {
    "of its input": (of_its_input, (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    "of what it computes": (of_what_it_computes, (torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    "no question, and nothing rounded": (of_no_dtype, (torch.float32, torch.float64)),
}


@pytest.mark.parametrize("question", FOUND)
def test_a_question_counts_by_what_it_decides(question: str) -> None:
    """Not by how it is asked."""
    compute, dtypes = FOUND[question]
    module = Asking(compute)
    assert find_norm(module) == KernelRMSNorm("weight", 1e-6, "llama", frozenset(dtypes))


def test_it_has_a_kernel_in_the_dtypes_in_which_it_is_a_norm() -> None:
    module = Asking(in_bfloat16_alone)
    assert find_norm(module) is None
    assert find_norm(module.to(torch.bfloat16)) == KernelRMSNorm("weight", 1e-6, "llama", frozenset([torch.bfloat16]))


def with_another_weight_in_half(self: Any, x: Tensor) -> Tensor:
    h = normalized(self, x)
    return self.weight * (h.to(x.dtype) if self.weight.dtype == torch.float16 else 2 * h)


def rounded_to_another(self: Any, x: Tensor) -> Tensor:
    return self.weight * (normalized(self, x).to(torch.float16) if self.weight.dtype == torch.bfloat16 else x)


@pytest.mark.parametrize("compute", [with_another_weight_in_half, rounded_to_another])
def test_in_other_dtypes_than_its_own_it_need_be_no_norm(compute: Callable[..., Any]) -> None:
    module = Asking(compute)
    assert all(find_norm(module.to(dtype)) is None for dtype in (torch.bfloat16, torch.float32))


class OfADevice(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x if x.device.type == "meta" else normalized(self, x).to(x.dtype))


class OfABuffer(TinyRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        h = normalized(self, x)
        return self.weight * (h if self.table.dtype == torch.int8 else h.to(x.dtype))


@pytest.mark.parametrize("cls", [OfADevice, OfABuffer])
def test_a_norm_that_asks_for_more_than_the_dtypes_of_input_and_weight_is_none(cls: type[nn.Module]) -> None:
    assert find_norm(cls()) is None


def test_where_what_is_normalized_is_rounded_to_the_inputs_dtype_the_weight_may_have_any() -> None:
    module = Asking(lambda self, x: normalized(self, x).to(x.dtype) * self.weight)
    norm = find_norm(module)
    assert norm == KernelRMSNorm("weight", 1e-6, "llama")
    for dtype in DTYPES[:3]:
        assert torch.equal(norm.compute(tokens(dtype), module.weight), module(tokens(dtype)))


def test_a_norm_beside_other_parameters_is_none() -> None:
    """Of their dtypes nothing is known."""
    module = Asking(of_its_input)
    module.other = nn.Parameter(torch.ones(2))
    assert find_norm(module) is None


class T5Like(TinyRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return of_its_input(self, hidden_states)


class Wide(nn.Module):
    """A model whose attention gives float32, whatever it is given."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.attention = layer, layer.self_attn
        layer.self_attn = type("Widened", (nn.Module,), {"forward": lambda _, x: self.attention(x).float()})()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def layer_of(norm: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    layer = TinyDecoderLayer()
    layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
    return layer


def test_where_attention_gives_a_wider_dtype_the_second_norm_rounds_as_it_does_without_a_policy() -> None:
    """The sum has two dtypes then: the norm reads float32, and rounds to the bfloat16 of its weight."""
    model, plain = (Wide(layer_of(T5Like).bfloat16()) for _ in range(2))
    recompute.apply(model, rules(rule("TinyDecoderLayer", "recompute", via="kernel")))
    seen: list[Tensor] = []
    for each in (model, plain):
        each.layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
        each(torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert [each.dtype for each in seen] == [torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(*seen)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
def test_a_t5_trains_with_them_in_mixed_precision_too(dtype: torch.dtype) -> None:
    """Its stream is float32 under autocast, as the weights of its norms are."""
    outcomes = []
    for policy in (None, rules(rule("T5Block", "recompute", via="kernel"))):
        model = models.make("t5", dropout_rate=0.0)
        if policy is not None:
            handle = recompute.apply(model, policy)
            assert "rms_norm (llama casting)" in handle.explain(wide=True)
        with counted_ops() as ops, torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            loss = model(**models.batch("t5")).loss
            loss.backward()
        assert (ops.get("recompute.rms_norm_forward", 0) > 0) is (policy is not None)
        outcomes.append([loss.detach(), *(each.grad for each in model.parameters())])
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).norm() <= (0.05 if dtype is torch.bfloat16 else 1e-5) * other.norm() + 1e-6


def test_they_compile() -> None:
    model = TinyDecoder(1)
    model.layers[0] = layer_of(T5Like)
    recompute.apply(model, rules(rule("T5Like", "recompute", via="kernel")))
    expected = model(token_ids())
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(token_ids()), expected)
