"""What a norm computes is read off its forward: the real classes are recognized, and near misses are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_tables import HIDDEN, LAYER_NORMS, LLAMA_LIKE, NORMS, RMS_NORMS, made, norm_of
from tiers import one_in, slow
from tiny import rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

import recompute
from recompute.substitution import norm
from recompute.substitution.norm import KernelRMSNorm, find_norm

TOKENS = 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", one_in(6, list(NORMS)))
def test_a_norm_is_found_as_what_it_computes_and_is_as_it_was(name: str) -> None:
    module, expected = NORMS[name]
    module = copy.deepcopy(module).eval()
    module.register_forward_hook(lambda *_: pytest.fail("it has been run"))
    before = {key: copy.copy(value) for key, value in vars(module).items()}
    with torch.device("cpu"):
        assert find_norm(module) == expected
    assert vars(module) == before
    assert not module.training
    assert find_norm(module.train()) == expected
    assert isinstance(expected, KernelRMSNorm) is (name not in LAYER_NORMS)


def results(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters that are used."""
    x = x.clone().requires_grad_()
    y = module(x)
    found = torch.autograd.grad(y, [x, *module.parameters()], dy.to(y.dtype), allow_unused=True)
    return [y.detach(), *(each for each in found if each is not None)]


class Exact(nn.Module):
    """The formula of an RMSNorm, in float64."""

    def __init__(self, module: nn.Module, found: KernelRMSNorm, dtype: torch.dtype):
        super().__init__()
        self.weight = None if found.weight is None else nn.Parameter(module.weight.detach().double())
        self.found, self.eps = found, found.eps
        if found.eps is None:
            self.eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return h
        return h * (1 + self.weight if self.found.casting == "gemma" else self.weight)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", [*slow(*DTYPES[:1]), *DTYPES[1:2], *slow(*DTYPES[2:])])
@pytest.mark.parametrize("name", one_in(8, list(NORMS)))
def test_its_kernel_errs_no_more_than_the_norm(name: str, dtype: torch.dtype) -> None:
    module, expected = NORMS[name]
    module = copy.deepcopy(module).to(dtype)
    stand_in = copy.deepcopy(module)
    handle = recompute.apply(stand_in, rules(rule(type(module).__name__, "recompute", via="kernel")))
    is_rms = isinstance(expected, KernelRMSNorm)
    assert f"kernel: {'rms' if is_rms else 'layer'}_norm" in handle.explain(wide=True)
    x, dy = torch.randn(2, 5, TOKENS // 5, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = Exact(module, expected, dtype) if is_rms else copy.deepcopy(module).double()
    found, peers, truths = results(stand_in, x, dy), results(module, x, dy), results(exact, x.double(), dy.double())
    if is_rms and expected.casting == "llama":
        assert torch.equal(found[0], peers[0])
    # OLMo's and others' doubles are rounded to float32 on their way.
    slack = torch.finfo(dtype).eps / 8 if is_rms else 2**-20
    for value, peer, truth in zip(found, peers, truths, strict=True):
        assert value.dtype is peer.dtype
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        assert error <= 1.05 * eagers + slack * truth.norm()


@pytest.mark.parametrize(("weight", "x"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("cls", "casting"), RMS_NORMS)
def test_a_kernel_returns_the_dtype_that_the_norm_returns(
    cls: type[nn.Module], casting: str, weight: torch.dtype, x: torch.dtype
) -> None:
    module, found = made(cls).to(weight), KernelRMSNorm("weight", 1e-5, casting)
    value = torch.randn(TOKENS, HIDDEN).to(x)
    result, reference = found.compute(value, module.weight), module(value)
    assert result.dtype is reference.dtype
    torch.testing.assert_close(result, reference)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_an_epsilon_that_nobody_gave_is_that_of_the_dtype_in_which_torch_computes(dtype: torch.dtype) -> None:
    module = nn.RMSNorm(HIDDEN).to(dtype)
    found = find_norm(module)
    assert found == KernelRMSNorm("weight", None, "none")
    # Numbers so small that the epsilon of any other dtype gives others.
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype) * (1e-8 if dtype is torch.float64 else 1e-4)
    torch.testing.assert_close(found.compute(x, module.weight), module(x))


# Near misses


def root(self: Any, h: Tensor) -> Tensor:
    return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)


def llama(self: Any, x: Tensor, by: Callable[[Any, Tensor], Tensor] = root) -> Tensor:
    """What the near misses below nearly are, where ``by`` is ``root``."""
    h = x.to(torch.float32)
    return self.weight * (h * by(self, h)).to(x.dtype)


def in_place(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    h *= root(self, h)  # writes into x, where that is float32
    return self.weight * h.to(x.dtype)


def noting_its_variance(self: Any, x: Tensor) -> Tensor:
    self.variance = x.pow(2).mean(-1, keepdim=True)  # which a stand-in would not note
    return llama(self, x)


def without_gradient_of_the_root(self: Any, x: Tensor) -> Tensor:
    h = x.to(torch.float32)
    with torch.no_grad():
        by = root(self, h)
    return self.weight * (h * by).to(x.dtype)


def without_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
        return llama(self, x)


@torch.fx.wrap
def rsqrt(x: Tensor) -> Tensor:
    """Bears an op's name, and is another function."""
    return 2 * torch.rsqrt(x)


NOTED: list[Tensor] = []
NO_RMS_NORMS: dict[str, Callable[..., Any]] = {
    "over two dimensions": lambda self, x: F.rms_norm(x, x.shape[-2:], None, self.eps),
    "over all but the first": lambda self, x: F.rms_norm(x, x.shape[1:], None, self.eps),
    "with the width of another dimension": lambda self, x: F.rms_norm(x, (x.shape[0],), None, self.eps),
    "with one plus the weight": lambda self, x: F.rms_norm(x, (HIDDEN,), 1 + self.weight, self.eps),
    "mean subtracted": lambda self, x: llama(self, x - x.mean(-1, keepdim=True)),
    "with a bias": lambda self, x: llama(self, x) + self.bias,
    "with sqrt": lambda self, x: (
        self.weight * ((h := x.float()) / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
    ),
    "epsilon outside": lambda self, x: llama(
        self, x, lambda self, h: torch.rsqrt(h.pow(2).mean(-1, keepdim=True)) + self.eps
    ),
    "no epsilon": lambda self, x: llama(self, x, lambda _, h: torch.rsqrt(h.pow(2).mean(-1, keepdim=True))),
    "another dimension": lambda self, x: llama(
        self, x, lambda self, h: torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + self.eps)
    ),
    "summed": lambda self, x: llama(self, x, lambda self, h: torch.rsqrt(h.pow(2).sum(-1, keepdim=True) + self.eps)),
    "cubed": lambda self, x: llama(self, x, lambda self, h: torch.rsqrt(h.pow(3).mean(-1, keepdim=True) + self.eps)),
    "with another power": lambda self, x: (
        (h := x.float()) * torch.pow(h.pow(2).mean(-1, keepdim=True) + self.eps, -0.25) * self.weight.float()
    ).type_as(x),
    "weight and no rounding": lambda self, x: self.weight * ((h := x.to(torch.float32)) * root(self, h)),
    "weight before the root": lambda self, x: ((self.weight * (h := x.float())) * root(self, h)).to(x.dtype),
    "in low precision": lambda self, x: self.weight * (x * root(self, x)),
    "in double precision": lambda self, x: self.weight * ((h := x.to(torch.float64)) * root(self, h)).to(x.dtype),
    "rounded to bfloat16": lambda self, x: self.weight * ((h := x.float()) * root(self, h)).to(torch.bfloat16),
    "gain from two": lambda self, x: ((h := x.float()) * root(self, h) * (2.0 + self.weight.float())).type_as(x),
    "numbers in each other's place": lambda self, x: (
        ((h := x.float()) * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1.0)) * (1e-6 + self.weight.float())
    ).type_as(x),
    "squared weight": lambda self, x: self.weight * llama(self, x),
    "with dropout": lambda self, x: F.dropout(llama(self, x), 0.1, self.training),
    "dropping when it trains": lambda self, x: F.dropout(llama(self, x), 0.1) if self.training else llama(self, x),
    "branching on values": lambda self, x: llama(self, x) if x.abs().max() > 0 else x,
    "branching on shape": lambda self, x: llama(self, x) if x.shape[0] > 1 else x,
    "with a residual": lambda self, x, residual: llama(self, x + residual),
    "two outputs": lambda self, x: (llama(self, x), x),
    "noting its output elsewhere": lambda self, x: (y := llama(self, x), NOTED.append(y))[0],
    "clamped in place": lambda self, x: (y := llama(self, x), y.clamp_(-0.5, 0.5))[0],  # what this returns nobody reads
    "asking for gradients": lambda self, x: llama(self, x) if torch.is_grad_enabled() else x,
    "asking for autocast": lambda self, x: x if torch.is_autocast_enabled("cpu") else llama(self, x),
    "doubling tensors": lambda self, x: llama(self, x * 2 if isinstance(x, Tensor) else x),
    "doubling long tensors": lambda self, x: llama(self, x * 2 if isinstance(x, Tensor) and len(x) == 12345 else x),
    "doubling what is a tensor": lambda self, x: llama(self, x * 2 if torch.is_tensor(x) else x),
    "shifting what has one type": lambda self, x: llama(self, x + 1 if type(x) is Tensor else x),
    "a LayerNorm with other signs": lambda self, x: (
        self.weight.float()
        * (torch.sub(other=(h := x.float()), input=(m := h.mean(-1, keepdim=True))))
        * torch.rsqrt((h - m).pow(2).mean(-1, keepdim=True) + self.eps)
    ).type_as(x),
    "with a function of an op's name": lambda self, x: llama(
        self, x, lambda self, h: rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    ),
    **{each.__name__: each for each in (in_place, noting_its_variance, without_gradient_of_the_root, without_autocast)},
}


def layer(x: Tensor, *parameters: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), *parameters, eps=eps)


def scaled(h: Tensor, centered: Tensor, of: Tensor) -> Tensor:
    return centered * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + 1e-5)


in_float32, written_out = LAYER_NORMS["in float32"][0].run, LAYER_NORMS["written out"][0].run
NO_LAYER_NORMS: dict[str, Callable[..., Any]] = {
    "mean in low precision": lambda self, x: written_out(self, x - x.mean(-1, keepdim=True)),
    "by deviation": lambda self, x: (
        self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.bias
    ),
    "bias after rounding": lambda self, x: in_float32(self, x) + self.bias,
    "weight from zero": lambda self, x: layer(x, self.weight + 1, self.bias),
    "of another shape": lambda self, x: F.layer_norm(x, self.other.shape, self.weight, self.bias, self.eps),
    "over two dimensions of its own": lambda self, x: F.layer_norm(x, (2, HIDDEN), None, None, self.eps),
    "of something else": lambda self, x: layer(x * 2, self.weight, self.bias),
    "in double": lambda self, x: layer(x.double()).type_as(x),
    "cast and not back": lambda self, x: layer(x.float()),
    "parameters as they are": lambda self, x: layer(x.float(), self.weight, self.bias).type_as(x),
    "difference the other way": lambda self, x: (
        scaled(h := x.float(), (m := h.mean(-1, keepdim=True)) - h, h - m) * self.weight.float()
    ).to(x.dtype),
    "uncentered variance": lambda self, x: (
        scaled(h := x.float(), h - h.mean(-1, keepdim=True), h) * self.weight.float()
    ).to(x.dtype),
}
MISSES: dict[str, nn.Module] = {
    **{name: norm_of(forward, bias=nn.Parameter(torch.ones(HIDDEN))) for name, forward in NO_RMS_NORMS.items()},
    **{name: type(LAYER_NORMS["in float32"][0])(forward) for name, forward in NO_LAYER_NORMS.items()},
    "Nemotron's": NemotronLayerNorm1P(HIDDEN),
    "a LayerNorm of two dimensions": nn.LayerNorm((2, HIDDEN)),
    "an RMSNorm of two dimensions": nn.RMSNorm((2, HIDDEN), eps=1e-6),
    **{repr(each): each for each in (nn.GroupNorm(1, HIDDEN), nn.Identity(), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))},
}


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("module", one_in(5, MISSES))
def test_what_is_nearly_a_norm_is_none(module: nn.Module, training: bool) -> None:
    assert find_norm(module.train(training)) is None


WHAT_THEY_NEARLY_ARE: dict[str, Callable[..., Any]] = {
    "by a function": lambda self, x: llama(self, x),
    "by a function of a function": lambda self, x: llama(
        self, x, lambda self, h: torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
    ),
    "in one expression": lambda self, x: self.weight * ((h := x.float()) * root(self, h)).to(x.dtype),
}


@pytest.mark.parametrize("name", WHAT_THEY_NEARLY_ARE)
def test_what_the_misses_nearly_are_is_one(name: str) -> None:
    assert find_norm(norm_of(WHAT_THEY_NEARLY_ARE[name])) == LLAMA_LIKE


@pytest.mark.parametrize(("module", "traces"), [(nn.Linear(8, 8), 0), (nn.Hardswish(), 1)])
def test_what_is_no_norm_takes_one_trace_or_none(
    module: nn.Module, traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    formula_of = norm.formula_of
    monkeypatch.setattr(norm, "formula_of", lambda *given: taken.append(given) or formula_of(*given))
    assert find_norm(module) is None
    assert len(taken) == traces
