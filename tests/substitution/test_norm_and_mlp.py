"""What a module computes is read off its forward: the real classes are recognized, near misses are not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tiny import TinyRMSNorm, gradients, rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

import recompute
from recompute.errors import PolicyWarning
from recompute.kernels.gated_mlp import gated_mlp
from recompute.substitution.feed_forward import find_kernel_mlp
from recompute.substitution.norm import find_norm

HIDDEN, INTERMEDIATE, TOKENS = 32, 48, 40

SHAPE: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_attention_heads": 4}
MLPS = [
    (llama.LlamaMLP, transformers.LlamaConfig),
    (mistral.MistralMLP, transformers.MistralConfig),
    (qwen2.Qwen2MLP, transformers.Qwen2Config),
    (qwen3.Qwen3MLP, transformers.Qwen3Config),
    (gemma.GemmaMLP, transformers.GemmaConfig),
]


@pytest.mark.parametrize(("cls", "config"), MLPS)
def test_finds_the_mlps_there_are(cls: type[nn.Module], config: type[Any]) -> None:
    mlp = cls(config(**SHAPE))
    found = find_kernel_mlp(mlp)
    assert found is not None
    assert [linear.name for _, linear in found.linears] == ["gate_proj", "up_proj", "down_proj"]
    assert found.activation == ("gelu_tanh" if cls is gemma.GemmaMLP else "silu")


def test_finds_gate_and_up_in_one_linear() -> None:
    mlp = phi3.Phi3MLP(transformers.Phi3Config(**SHAPE, pad_token_id=0))
    found = find_kernel_mlp(mlp)
    assert found is not None
    assert {part: linear.name for part, linear in found.linears} == {"gate": "gate_up_proj", "down": "down_proj"}


class HandWritten(nn.Module):
    """An MLP as Meta's Llama, torchtitan and many loops of one's own have it, with a function for its activation."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w3 = (nn.Linear(HIDDEN, 24, bias=False) for _ in range(2))
        self.w2, self.w13 = nn.Linear(24, HIDDEN, bias=False), nn.Linear(HIDDEN, 48)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def halves(self: Any, x: Tensor) -> Tensor:
    gate, up = self.w13(x).chunk(2, dim=-1)
    return self.w2(F.silu(gate) * up)


def written_out(self: Any, x: Tensor) -> Tensor:
    gate = self.w1(x)
    return self.w2(0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * self.w3(x))


WITH_FUNCTIONS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "silu": (lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)), "gated_mlp (silu)"),
    "the gate behind": (lambda self, x: self.w2(self.w3(x) * F.silu(self.w1(x))), "gated_mlp (silu)"),
    "gelu of tanh": (
        lambda self, x: self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x)),
        "gated_mlp (gelu_tanh)",
    ),
    "halves": (halves, "gated_mlp (silu)"),
    "written out": (written_out, "gated_mlp (gelu_tanh)"),
    "not gated": (lambda self, x: self.w2(F.gelu(self.w1(x))), "mlp (gelu)"),
    "squared": (lambda self, x: self.w2(F.relu(self.w1(x)).square()), "mlp (relu2)"),
}


@pytest.mark.parametrize(("compute", "kernel"), WITH_FUNCTIONS.values(), ids=WITH_FUNCTIONS)
def test_an_activation_may_be_a_function(compute: Callable[[Any, Tensor], Tensor], kernel: str) -> None:
    plain, module = HandWritten(compute).double(), HandWritten(compute).double()
    handle = recompute.apply(module, rules(rule("HandWritten", "recompute", via="kernel")))
    assert f"kernel: {kernel}" in str(handle.explain(wide=True))
    for seed in range(6):  # the last of them as captured code
        x = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(gradients(module, x), gradients(plain, x))
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: self.w2(F.silu(x @ self.w1.weight.t()) * self.w3(x)),
        lambda self, x: self.w2(F.silu(self.w1(x) + 1) * self.w3(x)),
        lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x) * 2),
        lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x.tanh())),
        lambda self, x: self.w2(F.silu(F.silu(self.w1(x))) * self.w3(x)),
        lambda self, x: self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x)),
        lambda self, x: self.w2(F.leaky_relu(self.w1(x)) * self.w3(x)),
        lambda self, x: self.w2(self.w1(x) * torch.sigmoid(self.w3(x))),
        lambda self, x: self.w2(F.gelu(self.w1(x)) + F.gelu(self.w3(x))),
    ],
)
def test_what_only_looks_like_an_activation_of_gate_runs_as_it_is(compute: Callable[[Any, Tensor], Tensor]) -> None:
    plain, module = HandWritten(compute), HandWritten(compute)
    assert find_kernel_mlp(module) is None
    with pytest.warns(PolicyWarning, match="no kernel computes what HandWritten does"):
        recompute.apply(module, rules(rule("HandWritten", "recompute", via="kernel")))
    x = torch.randn(5, HIDDEN)
    assert all(torch.equal(*pair) for pair in zip(gradients(module, x), gradients(plain, x), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("cls", "config"), MLPS[:-1])
def test_a_kernel_gives_what_the_mlp_it_stands_in_for_gives(
    cls: type[nn.Module], config: type[Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    mlp = cls(config(**SHAPE))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.mul_(20)
    x = torch.randn(TOKENS, HIDDEN)
    exact = gradients(copy.deepcopy(mlp).double(), x.double())
    mlp, x = mlp.to(dtype), x.to(dtype)
    weights = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
    results, references = gradients(lambda x: gated_mlp(x, *weights), x), gradients(mlp, x)
    for result, reference, truth in zip(results, references, exact, strict=True):
        error, eagers = ((value.double() - truth).norm() for value in (result, reference))
        assert error <= 1.05 * eagers + torch.finfo(dtype).eps * truth.norm() / 8


def norm_of(forward: Callable[..., Tensor], **attributes: Any) -> nn.Module:
    module = type("SomeNorm", (TinyRMSNorm,), {"forward": forward})(HIDDEN)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_finds_mlps_by_the_flow_of_data_and_not_by_names() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.gate_proj, self.w, self.nonlinearity = (*(nn.Linear(4, 4) for _ in range(3)), nn.SiLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.w(self.gate_proj(x) * self.nonlinearity(self.up_proj(x)))

    found = find_kernel_mlp(Renamed())
    assert found is not None
    assert {part: linear.name for part, linear in found.linears} == {"gate": "up_proj", "up": "gate_proj", "down": "w"}


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (nn.SiLU(), "silu"),
        (transformers.activations.ACT2FN["silu"], "silu"),
        (transformers.activations.ACT2FN["swish"], "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu_python"], "gelu"),
        (transformers.activations.ACT2FN["gelu_fast"], "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu"], "gelu"),
        (transformers.activations.ACT2FN["gelu_pytorch_tanh"], "gelu_tanh"),
        (nn.SiLU(inplace=True), None),
        (transformers.activations.ACT2FN["gelu_new"], "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu_accurate"], "gelu_tanh"),
        (transformers.activations.ACT2FN["gelu_python_tanh"], "gelu_tanh"),
        (transformers.activations.ACT2FN["quick_gelu"], "quick_gelu"),
        (nn.ReLU(), "relu"),
        (transformers.activations.ACT2FN["relu2"], "relu2"),
        (transformers.activations.ACT2FN["gelu_10"], None),
        (nn.ReLU(inplace=True), None),
        (nn.ReLU6(), None),
        (nn.LeakyReLU(), None),
        (nn.Sigmoid(), None),
        (nn.Mish(), None),
        (nn.Sequential(nn.SiLU(), nn.SiLU()), None),
        (nn.Sequential(nn.SiLU(), nn.Dropout(0.1)), None),
        (nn.Identity(), None),
        (norm_of(lambda self, x: F.silu(x) * 2), None),
        (norm_of(lambda self, x: F.silu(x * 2)), None),
        (norm_of(lambda self, x: F.silu(x) if self.training else x), None),
        (norm_of(lambda self, x: F.relu(x).pow(2)), "relu2"),
        (norm_of(lambda self, x: F.relu(x).pow(3)), None),
        (norm_of(lambda self, x: x * torch.sigmoid(x * 1.7)), None),
        (norm_of(lambda self, x: torch.square(x)), None),
        (norm_of(lambda self, x: F.silu(x).clamp_(max=7)), None),
        (norm_of(lambda self, x: (y := F.silu(x), y.clamp_(max=7))[0]), None),
        (norm_of(lambda self, x: (x.clamp_(max=7), F.silu(x))[1]), None),
        (norm_of(torch.no_grad()(lambda self, x: F.silu(x))), None),
        (norm_of(lambda self, x: F.silu(x if type(x) is not Tensor else 2 * x)), None),
    ],
    ids=lambda value: repr(value) if isinstance(value, nn.Module) else "",
)
def test_an_activation_is_what_it_computes(activation: nn.Module, expected: str | None) -> None:
    found = find_kernel_mlp(nn.Sequential(nn.Linear(8, HIDDEN), activation, nn.Linear(HIDDEN, 8)))
    assert (None if found is None else found.activation) == expected


CONSTANT, GENERATOR = torch.ones(HIDDEN), torch.Generator()


class Constants(TinyRMSNorm):
    """Uses what a trace makes attributes of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * CONSTANT + torch.rand(x.shape, generator=GENERATOR))


def test_constants_of_a_trace_do_not_stay_on_the_module() -> None:
    module = Constants(HIDDEN)
    before = vars(module).keys() | set()
    for find in (find_norm, find_kernel_mlp):
        assert not find(module)
        assert vars(module).keys() == before
