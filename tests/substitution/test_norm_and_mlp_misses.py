"""What is nearly a norm or nearly a gated MLP is not taken for one, and a stand-in takes what its module takes."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiers import one_in, slow
from tiny import HIDDEN, TinyMLP, TinyRMSNorm, gradients, rule, rules
from torch import Tensor, nn
from torch.nn import functional as F

import recompute
from recompute.errors import PolicyWarning
from recompute.substitution import norm
from recompute.substitution.feed_forward import find_kernel_mlp
from recompute.substitution.norm import find_norm


def norm_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    return made_of(TinyRMSNorm, forward, attributes)


def mlp_of(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    return made_of(TinyMLP, forward, attributes)


def made_of(base: type[nn.Module], forward: Callable[..., Any], attributes: dict[str, Any]) -> nn.Module:
    module = type("Some", (base,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def llama_like(self: Any, x: Tensor) -> Tensor:
    return TinyRMSNorm.forward(self, x)


def mean_subtracted(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x - x.mean(-1, keepdim=True))


def with_bias(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x) + self.bias


def with_sqrt(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def eps_outside(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * (torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) + self.eps)).to(x.dtype)


def no_eps(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True))).to(x.dtype)


def other_dimension(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + self.eps)).to(x.dtype)


def summed(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def cubed(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(3).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def with_another_power(self: Any, x: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.pow(h.pow(2).mean(-1, keepdim=True) + self.eps, -0.25) * self.weight.float()).type_as(x)


def weight_and_no_rounding(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps))


def weight_before_the_root(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return ((self.weight * h) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def in_low_precision(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def in_double_precision(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float64)
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rounded_to_bfloat16(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(torch.bfloat16)


def gain_from_two(self: Any, x: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return (h * (2.0 + self.weight.float())).type_as(x)


def numbers_in_each_others_place(self: Any, x: Tensor) -> Tensor:
    gain = 1e-6 + self.weight.float()
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1.0)
    return (h * gain).type_as(x)


def squared_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight * llama_like(self, x)


def with_dropout(self: Any, x: Tensor) -> Tensor:
    return F.dropout(llama_like(self, x), 0.1, self.training)


def in_place(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h *= torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)  # writes into x, where that is float32
    return self.weight * h.to(x.dtype)


def dropping_when_it_trains(self: Any, x: Tensor) -> Tensor:
    return F.dropout(llama_like(self, x), 0.1) if self.training else llama_like(self, x)


def branching_on_values(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x) if x.abs().max() > 0 else x


def branching_on_shape(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x) if x.shape[0] > 1 else x


def with_a_residual(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return llama_like(self, x + residual)


def two_outputs(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return llama_like(self, x), x


def noting_its_variance(self: Any, x: Tensor) -> Tensor:
    self.variance = x.pow(2).mean(-1, keepdim=True)  # which a stand-in would not note
    return llama_like(self, x)


NOTED: list[Tensor] = []


def noting_its_output_elsewhere(self: Any, x: Tensor) -> Tensor:
    y = llama_like(self, x)
    NOTED.append(y)
    return y


def clamped_in_place(self: Any, x: Tensor) -> Tensor:
    y = llama_like(self, x)
    y.clamp_(-0.5, 0.5)  # what this returns nobody reads
    return y


def without_gradient_of_the_root(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    with torch.no_grad():
        root = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight * (h * root).to(x.dtype)


def without_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
        return llama_like(self, x)


def asking_for_gradients(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x) if torch.is_grad_enabled() else x


def asking_for_autocast(self: Any, x: Tensor) -> Tensor:
    return x if torch.is_autocast_enabled("cpu") else llama_like(self, x)


def doubling_tensors(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x * 2 if isinstance(x, Tensor) else x)


def doubling_long_tensors(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x * 2 if isinstance(x, Tensor) and x.shape[0] == 12345 else x)


def doubling_what_is_a_tensor(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x * 2 if torch.is_tensor(x) else x)


def shifting_what_has_one_type(self: Any, x: Tensor) -> Tensor:
    return llama_like(self, x + 1 if type(x) is Tensor else x)


def layer_norm_with_other_signs(self: Any, x: Tensor) -> Tensor:
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    h = torch.sub(other=h, input=mean) * torch.rsqrt(variance + self.eps)
    return (self.weight.float() * h).type_as(x)


@torch.fx.wrap
def rsqrt(x: Tensor) -> Tensor:
    """Bears an op's name, and is another function."""
    return 2 * torch.rsqrt(x)


def with_a_function_of_an_ops_name(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    return self.weight * (h * rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def over_two_dimensions(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-2:], None, self.eps)


def over_all_but_the_first(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[1:], None, self.eps)


def with_the_width_of_another_dimension(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[0],), None, self.eps)


def with_one_plus_the_weight(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (HIDDEN,), 1 + self.weight, self.eps)


NO_NORMS = [
    over_two_dimensions,
    over_all_but_the_first,
    with_the_width_of_another_dimension,
    with_one_plus_the_weight,
    mean_subtracted,
    with_bias,
    with_sqrt,
    eps_outside,
    no_eps,
    other_dimension,
    summed,
    cubed,
    with_another_power,
    weight_and_no_rounding,
    weight_before_the_root,
    in_low_precision,
    in_double_precision,
    rounded_to_bfloat16,
    gain_from_two,
    numbers_in_each_others_place,
    squared_weight,
    with_dropout,
    in_place,
    dropping_when_it_trains,
    branching_on_values,
    branching_on_shape,
    with_a_residual,
    two_outputs,
    noting_its_variance,
    noting_its_output_elsewhere,
    clamped_in_place,
    without_gradient_of_the_root,
    without_autocast,
    asking_for_gradients,
    asking_for_autocast,
    doubling_tensors,
    doubling_long_tensors,
    doubling_what_is_a_tensor,
    shifting_what_has_one_type,
    layer_norm_with_other_signs,
    with_a_function_of_an_ops_name,
]


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("forward", one_in(2, {forward.__name__: forward for forward in NO_NORMS}))
def test_what_is_nearly_a_norm_is_none(forward: Callable[..., Any], training: bool) -> None:
    module = norm_of(forward, bias=nn.Parameter(torch.ones(HIDDEN))).train(training)
    assert find_norm(module) is None


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm((2, HIDDEN)),
        nn.RMSNorm((2, HIDDEN), eps=1e-6),
        nn.GroupNorm(1, HIDDEN),
        nn.Identity(),
        nn.SiLU(),
        nn.Linear(HIDDEN, HIDDEN),
    ],
    ids=repr,
)
def test_another_module_is_no_norm(module: nn.Module) -> None:
    assert find_norm(module) is None


def dropped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training))


def dropped_in_training(self: Any, x: Tensor) -> Tensor:
    hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
    return self.down_proj(F.dropout(hidden, 0.1) if self.training else hidden)


def dropped_by_a_module(self: Any, x: Tensor) -> Tensor:
    return self.dropout(self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def of_another_input(self: Any, x: Tensor, y: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(y))


def of_a_changed_input(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1))


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 0.5)


def scaled_gate(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x) * 0.5) * self.up_proj(x))


def scaled_output(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5


def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def added(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


def twice_activated(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


def product_activated(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x)))


def rounded(self: Any, x: Tensor) -> Tensor:
    return self.down_proj((self.act_fn(self.gate_proj(x)) * self.up_proj(x)).to(torch.bfloat16).float())


def clamped(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x))


def noting_its_activation(self: Any, x: Tensor) -> Tensor:
    self.last = self.act_fn(self.gate_proj(x))
    return self.down_proj(self.last * self.up_proj(x))


def clamped_in_place_too(self: Any, x: Tensor) -> Tensor:
    gate = self.act_fn(self.gate_proj(x))
    gate.clamp_(max=0.1)
    return self.down_proj(gate * self.up_proj(x))


def without_gradients_of_the_gate(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x))


def calling_up_once_more(self: Any, x: Tensor) -> Tensor:
    self.up_proj(x)  # which may count its calls
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


NO_MLPS = [
    clamped_in_place_too,
    without_gradients_of_the_gate,
    calling_up_once_more,
    dropped,
    dropped_in_training,
    dropped_by_a_module,
    of_another_input,
    of_a_changed_input,
    scaled,
    scaled_gate,
    scaled_output,
    residual,
    added,
    twice_activated,
    product_activated,
    rounded,
    clamped,
    noting_its_activation,
]


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("forward", one_in(2, {forward.__name__: forward for forward in NO_MLPS}))
def test_what_is_nearly_a_gated_mlp_is_none(forward: Callable[..., Any], training: bool) -> None:
    assert find_kernel_mlp(mlp_of(forward, dropout=nn.Dropout(0.1)).train(training)) is None


def with_another_argument(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return llama_like(self, x)


def with_keywords(self: Any, x: Tensor, **options: Any) -> Tensor:
    return llama_like(self, x)


def with_an_option(self: Any, x: Tensor, scale: float | None = None) -> Tensor:
    return TinyMLP.forward(self, x)


def by_name(self: Any, *, x: Tensor) -> Tensor:
    return llama_like(self, x)


class WithoutSignature(nn.Module):
    forward = staticmethod(torch.sin)


class Preset(nn.Module):
    def scaled(self, x: Tensor, scale: float) -> Tensor:
        return x.tanh() * scale

    forward = functools.partialmethod(scaled, scale=2.0)


@pytest.mark.parametrize("via", ["hook", "auto"])
@pytest.mark.parametrize("cls", [WithoutSignature, Preset])
def test_a_forward_of_any_kind_can_be_looked_at(cls: type[nn.Module], via: str) -> None:
    assert find_norm(cls()) is None
    assert find_kernel_mlp(cls()) is None
    module, x = cls(), torch.randn(5)
    recompute.apply(module, rules(rule(cls.__name__, "recompute", via=via)))
    torch.testing.assert_close(gradients(module, x), gradients(cls(), x))


def as_it_is(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("via", ["hook", "kernel", "auto"])
@pytest.mark.parametrize(
    ("module", "call"),
    [
        (norm_of(with_another_argument), lambda module, x: module(x, None)),
        (norm_of(with_keywords), lambda module, x: module(x, layer=3)),
        (norm_of(by_name), lambda module, x: module(x=x)),
        (mlp_of(with_an_option), lambda module, x: module(x, scale=2.0)),
        (norm_of(llama_like, weight=nn.Parameter(torch.full((1,), 0.7))), as_it_is),
        (norm_of(llama_like, weight=nn.Parameter(torch.tensor(0.7))), as_it_is),
        (norm_of(llama_like, weight=nn.Parameter(torch.rand(3, HIDDEN))), as_it_is),
    ],
    ids=["argument", "keywords", "keyword only", "option", "one weight", "scalar weight", "weight a row"],
)
def test_whatever_stands_in_can_be_called_alike(
    module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], via: str
) -> None:
    plain, module = module, copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # that no kernel computes it, or nothing does
        recompute.apply(module, rules(rule("Some", "recompute", via=via)))
    x = torch.randn(5, 3, HIDDEN)
    found = gradients(lambda x: call(module, x), x)
    torch.testing.assert_close(found, gradients(lambda x: call(plain, x), x))


@pytest.mark.parametrize(("module", "traces"), [(nn.Linear(8, 8), 0), (nn.Hardswish(), 1)])
def test_what_is_no_norm_takes_one_trace_or_none(
    module: nn.Module, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    formula_of = norm.formula_of
    monkeypatch.setattr(norm, "formula_of", lambda *given: taken.append(given) or formula_of(*given))
    assert find_norm(module) is None
    assert len(taken) == traces
