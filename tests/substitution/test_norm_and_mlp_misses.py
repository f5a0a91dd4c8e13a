"""What is nearly a gated MLP is not taken for one, and a stand-in takes what its module takes."""

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


def noting_its_activation(self: Any, x: Tensor) -> Tensor:
    self.last = self.act_fn(self.gate_proj(x))
    return self.down_proj(self.last * self.up_proj(x))


def without_gradients_of_the_gate(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x))


def product(self: Any, x: Tensor) -> Tensor:
    return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


NO_MLPS: dict[str, Callable[..., Any]] = {
    "dropped": lambda self, x: self.down_proj(F.dropout(product(self, x), 0.1, self.training)),
    "dropped in training": lambda self, x: self.down_proj(
        F.dropout(product(self, x), 0.1) if self.training else product(self, x)
    ),
    "dropped by a module": lambda self, x: self.dropout(self.down_proj(product(self, x))),
    "of another input": lambda self, x, y: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(y)),
    "of a changed input": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x + 1)),
    "scaled": lambda self, x: self.down_proj(product(self, x) * 0.5),
    "scaled gate": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x) * 0.5) * self.up_proj(x)),
    "scaled output": lambda self, x: self.down_proj(product(self, x)) * 0.5,
    "residual": lambda self, x: x + self.down_proj(product(self, x)),
    "added": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x)),
    "twice activated": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x))),
    "product activated": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x) * self.up_proj(x))),
    "rounded": lambda self, x: self.down_proj(product(self, x).to(torch.bfloat16).float()),
    "clamped": lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=7.0) * self.up_proj(x)),
    "clamped in place": lambda self, x: self.down_proj(
        (gate := self.act_fn(self.gate_proj(x)), gate.clamp_(max=0.1))[0] * self.up_proj(x)
    ),
    "calling up once more": lambda self, x: (self.up_proj(x), self.down_proj(product(self, x)))[
        1
    ],  # it may count calls
    "noting its activation": noting_its_activation,
    "without gradients of the gate": without_gradients_of_the_gate,
}


def test_what_the_misses_nearly_are_is_one() -> None:
    assert (
        find_kernel_mlp(mlp_of(lambda self, x: self.down_proj(product(self, x)), dropout=nn.Dropout(0.1))) is not None
    )


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("forward", one_in(2, NO_MLPS))
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
