"""MLPs without a gate by kernels: which modules are found, and what stands in for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from models import BATCH, GPT2_SHAPE, HIDDEN, INTERMEDIATE, LENGTH, SHAPE, held
from tiers import by_default, slow
from tiny import assert_same, counted_ops, gradients, of_one_more, rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.arcee.modeling_arcee import ArceeMLP
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.falcon.modeling_falcon import FalconLinear, FalconMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2MLP
from transformers.models.vit.modeling_vit import ViTMLP
from transformers.pytorch_utils import Conv1D

import recompute
from recompute.substitution.feed_forward import find_kernel_mlp

TOKENS = BATCH * LENGTH
PLAIN = {key: value for key, value in SHAPE.items() if key not in ("num_key_value_heads", "head_dim")}
CONFIG = transformers.PretrainedConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, hidden_act="gelu")
CONFIG.mlp_bias = False


def gpt2(**options: Any) -> nn.Module:
    return GPT2MLP(INTERMEDIATE, transformers.GPT2Config(**{**GPT2_SHAPE, "resid_pdrop": 0.0, **options}))


def starcoder2(**options: Any) -> nn.Module:
    return Starcoder2MLP(transformers.Starcoder2Config(**SHAPE, **{"residual_dropout": 0.0, **options}))


def of(cls: type[nn.Module], activation: str = "gelu") -> nn.Module:
    config = copy.deepcopy(CONFIG)
    config.hidden_act = activation
    return cls(config)


FOUND: dict[str, tuple[Callable[[], nn.Module], tuple[str, str], str]] = {
    "GPT-2": (gpt2, ("c_fc", "c_proj"), "gelu_tanh"),
    "GPT-NeoX": (lambda: of(GPTNeoXMLP), ("dense_h_to_4h", "dense_4h_to_h"), "gelu"),
    "Phi": (lambda: of(PhiMLP, "gelu_new"), ("fc1", "fc2"), "gelu_tanh"),
    "Starcoder 2": (starcoder2, ("c_fc", "c_proj"), "gelu_tanh"),
    "Falcon": (
        lambda: FalconMLP(transformers.FalconConfig(**PLAIN, ffn_hidden_size=INTERMEDIATE, bias=True)),
        ("dense_h_to_4h", "dense_4h_to_h"),
        "gelu",
    ),
    "Nemotron": (lambda: of(NemotronMLP, "relu2"), ("up_proj", "down_proj"), "relu2"),
    "Arcee": (lambda: of(ArceeMLP, "relu2"), ("up_proj", "down_proj"), "relu2"),
    "ViT": (lambda: of(ViTMLP), ("fc1", "fc2"), "gelu"),
    "CLIP": (lambda: of(CLIPMLP, "quick_gelu"), ("fc1", "fc2"), "quick_gelu"),
    "Sequential": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, 40), nn.ReLU(), nn.Dropout(0.0), nn.Linear(40, HIDDEN)),
        ("0", "3"),
        "relu",
    ),
}
each_found = pytest.mark.parametrize(
    ("build", "parts", "activation"),
    [
        pytest.param(
            *found, id=name, marks=() if name in ("GPT-2", "Falcon", "CLIP", "Sequential") else pytest.mark.slow
        )
        for name, found in FOUND.items()
    ],
)
"""By default a Conv1D, a Linear of the model's own, usual Linears, and an MLP without a class of its own."""


def made(build: Callable[[], nn.Module]) -> nn.Module:
    """With weights of which every term counts."""
    module, generator = build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.train()


def stood_in(module: nn.Module, **options: Any) -> nn.Module:
    found = copy.deepcopy(module)
    handle = recompute.apply(found, rules(rule(type(module).__name__, "recompute", via="kernel", **options)))
    assert "kernel: mlp (" in handle.explain(wide=True)
    return found


@each_found
def test_finds_the_mlps_there_are(build: Callable[[], nn.Module], parts: tuple[str, str], activation: str) -> None:
    module = build()
    found = find_kernel_mlp(module)
    assert found is not None
    assert (found.activation, found.is_gated) == (activation, False)
    for name, (weight, bias) in zip(parts, _weights(found, module), strict=True):
        linear = module.get_submodule(name)
        transposed = isinstance(linear, Conv1D)
        assert torch.equal(weight, linear.weight.t() if transposed else linear.weight)
        assert bias is linear.bias


def _weights(found: Any, module: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    operands = found.operands(module)
    assert operands is not None
    (up, down), biases = operands
    return [(up, biases["up_bias"]), (down, biases["down_bias"])]


@each_found
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
def test_the_kernel_gives_what_the_mlp_gives(
    build: Callable[[], nn.Module], parts: tuple[str, str], activation: str, dtype: torch.dtype
) -> None:
    module = made(build)
    x = torch.randn(3, 40, HIDDEN, generator=torch.Generator().manual_seed(0))
    exact = gradients(copy.deepcopy(module).double(), x.double())
    module, x = module.to(dtype), x.to(dtype)
    for value, peer, truth in zip(gradients(stood_in(module), x), gradients(module, x), exact, strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, peer.shape)
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        assert error <= 1.05 * eagers + torch.finfo(dtype).eps * truth.norm() / 8


class MLP(nn.Module):
    def __init__(self, forward: Callable[..., Any], **parts: nn.Module):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(HIDDEN, 40), nn.GELU(), nn.Linear(40, HIDDEN)
        self.p, self.run = 0.1, forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def as_it_is(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.up(x)))


def dropped_by_a_module(self: Any, x: Tensor) -> Tensor:
    return self.dropout(as_it_is(self, x))


def noting_its_activation(self: Any, x: Tensor) -> Tensor:
    self.last = self.act(self.up(x))
    return self.down(self.last)


MISSES: dict[str, Callable[..., Tensor]] = {
    "an activation behind": lambda self, x: self.act(as_it_is(self, x)),
    "twice activated": lambda self, x: self.down(self.act(self.act(self.up(x)))),
    "dropped": lambda self, x: self.down(F.dropout(self.act(self.up(x)), self.p, self.training)),
    "dropped by name": lambda self, x: self.down(F.dropout(self.act(self.up(x)), p=self.p, training=self.training)),
    "dropped anyway": lambda self, x: self.down(F.dropout(self.act(self.up(x)), p=self.p)),
    "dropped twice": lambda self, x: self.dropout(self.dropout(as_it_is(self, x))),
    "dropped inside by a module": lambda self, x: self.down(self.dropout(self.act(self.up(x)))),
    "scaled": lambda self, x: self.down(self.act(self.up(x)) * 0.5),
    "residual": lambda self, x: x + as_it_is(self, x),
    "without up": lambda self, x: self.down(self.act(x)),
    "noting its activation": noting_its_activation,
}


@pytest.mark.parametrize("forward", MISSES.values(), ids=MISSES)
def test_what_is_nearly_an_mlp_is_none(forward: Callable[..., Tensor]) -> None:
    assert find_kernel_mlp(MLP(forward, dropout=nn.Dropout(0.1))) is None


def test_what_the_misses_nearly_are_is_one() -> None:
    assert find_kernel_mlp(MLP(as_it_is, dropout=nn.Dropout(0.1))) is not None


@pytest.mark.parametrize("capture", [True, *slow(False)])
def test_a_dropout_of_the_output_draws_what_it_draws_without_a_policy(capture: bool) -> None:
    """And what is held of its mask is up to the tape around the kernel, as it is without one."""
    plain = MLP(dropped_by_a_module, dropout=nn.Dropout(0.5))
    found = find_kernel_mlp(plain)
    assert found is not None
    assert found.dropout == "dropout"
    model, by_hooks, x = copy.deepcopy(plain), copy.deepcopy(plain), torch.randn(400, HIDDEN)
    of_hooks = recompute.apply(by_hooks, rules(rule("MLP", "recompute", via="hook", capture=capture)))
    state = torch.get_rng_state()
    handle = recompute.apply(model, rules(rule("MLP", "recompute", via="kernel", capture=capture)))
    assert torch.equal(torch.get_rng_state(), state)
    assert "kernel: mlp (gelu); cheap ops run again" in handle.explain(wide=True)
    for _ in range(6):
        for seed in range(2):
            outputs, expected, _ = (gradients(each, x, seed=seed) for each in (model, plain, by_hooks))
            assert torch.equal(outputs[0] == 0, expected[0] == 0)
            torch.testing.assert_close(outputs, expected)
    kept, kept_by_hooks = ([plan.kept_nbytes for plan in each.plans().values()] for each in (handle, of_hooks))
    assert kept == kept_by_hooks


@pytest.mark.parametrize(
    "make",
    by_default(
        {
            "Linear": lambda: MLP(dropped_by_a_module, dropout=nn.Dropout(0.5)),
            "Conv1D": lambda: gpt2(resid_pdrop=0.5),
        },
        "Conv1D",
    ),
)
def test_an_mlp_of_sequences_with_dropout_is_captured_with_the_kernels_bits(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    code = make()
    kernels, x = copy.deepcopy(code), torch.randn(BATCH, LENGTH, HIDDEN)
    handle, _ = (
        recompute.apply(each, rules(rule("*MLP", "recompute", via="kernel", capture=capture)))
        for each, capture in ((code, True), (kernels, False))
    )

    def step(mlp: nn.Module, seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        mlp.zero_grad()
        given = x.clone().requires_grad_()
        output = mlp(given)
        output.sum().backward()
        return [output.detach(), *(each.grad.clone() for each in (given, *mlp.parameters()) if each.grad is not None)]

    for seed in range(8):
        assert_same(step(code, seed), step(kernels, seed))
    assert "1 of 1 run as captured code" in handle.explain(wide=True)


@pytest.mark.parametrize(
    "parts",
    [
        {"act": nn.Tanh()},
        {"act": nn.ReLU(inplace=True)},
        {"act": nn.Dropout(0.0)},
        {"up": nn.Bilinear(HIDDEN, HIDDEN, 40)},
        {"down": nn.Identity()},
        {"down": nn.Sequential(nn.Linear(40, HIDDEN))},
    ],
    ids=repr,
)
def test_an_mlp_of_other_parts_is_none(parts: dict[str, nn.Module]) -> None:
    assert find_kernel_mlp(MLP(as_it_is, **parts)) is None


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Squared(FalconLinear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias * self.bias


class Narrow(Conv1D):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf, 1)


@pytest.mark.parametrize(
    ("one", "other"),
    [(nn.Linear(3, 5), Scaled(3, 5)), (FalconLinear(3, 5), Squared(3, 5)), (Conv1D(5, 3), Narrow(5, 3))],
    ids=["Linear", "FalconLinear", "Conv1D"],
)
def test_what_is_nearly_a_linear_is_none(one: nn.Module, other: nn.Module) -> None:
    assert find_kernel_mlp(nn.Sequential(one, nn.SiLU(), nn.Linear(5, 3))) is not None
    assert find_kernel_mlp(nn.Sequential(other, nn.SiLU(), nn.Linear(5, 3))) is None


def test_dropout_that_begins_after_the_policy_drops() -> None:
    for build, change in (
        (gpt2, lambda mlp: setattr(mlp.dropout, "p", 0.5)),
        (starcoder2, lambda mlp: setattr(mlp, "residual_dropout", 0.5)),
    ):
        plain = made(build)
        stand_in = stood_in(plain)
        x = torch.randn(7, HIDDEN)
        with counted_ops() as ops:
            stand_in(x)
        assert ops["recompute.activation_forward"] == 1
        for each in (plain, stand_in):
            change(each)
        assert_same(gradients(stand_in, x), gradients(plain, x))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "a hook on up": lambda mlp: mlp.c_fc.register_forward_hook(lambda module, args, output: output * 1.5),
    "a hook on the dropout": lambda mlp: mlp.dropout.register_forward_hook(lambda module, args, output: output * 1.5),
    "another activation": lambda mlp: setattr(mlp, "act", nn.Tanh()),
    "another Linear": lambda mlp: setattr(mlp, "c_proj", nn.Linear(INTERMEDIATE, HIDDEN, bias=False)),
    "an adapter": lambda mlp: setattr(mlp, "c_fc", nn.Sequential(mlp.c_fc, nn.Tanh())),
}


@pytest.mark.parametrize("change", by_default(CHANGES, "a hook on up", "another activation", "an adapter"))
def test_what_comes_after_the_policy_is_not_passed_over(change: Callable[[nn.Module], Any]) -> None:
    plain = made(gpt2)
    stand_in, x = stood_in(plain), torch.randn(7, HIDDEN)
    for each in (plain, stand_in):
        torch.manual_seed(0)
        change(each)
    assert_same(gradients(stand_in, x), gradients(plain, x))


def test_an_activation_that_becomes_another_is_not_passed_over() -> None:
    plain = MLP(as_it_is)
    stand_in, x = stood_in(plain), torch.randn(7, HIDDEN)
    for each in (plain, stand_in):
        each.act.approximate = "tanh"  # type: ignore[assignment, union-attr]
    assert_same(gradients(stand_in, x), gradients(plain, x))


def test_gradients_of_transposed_weights_are_not_copied() -> None:
    stand_in = stood_in(made(gpt2))
    with counted_ops() as ops:
        stand_in(torch.randn(7, HIDDEN)).sum().backward()
    assert "aten.clone" not in ops
    assert {p.grad.stride() for p in stand_in.parameters() if p.dim() == 2} == {(HIDDEN, 1), (INTERMEDIATE, 1)}  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
@pytest.mark.parametrize("name", ["GPT-2", *slow("Starcoder 2")])
def test_what_kernels_save_is_what_autograd_holds_less(name: str, dtype: torch.dtype) -> None:
    module = made(FOUND[name][0]).to(dtype)
    x = torch.randn(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)

    def run() -> Tensor:
        return module(x * 1)

    plain = held(module, run)
    handle = recompute.apply(module, rules(rule(type(module).__name__, "recompute", via="kernel")))
    stats = of_one_more(run, handle)
    holds = held(module, run)
    assert holds == stats.kept_nbytes == TOKENS * (HIDDEN + INTERMEDIATE) * dtype.itemsize
    assert stats.eager_nbytes == plain >= holds + TOKENS * INTERMEDIATE * dtype.itemsize


def test_a_dropout_that_drops_nothing_is_not_counted_with_one_that_does() -> None:
    def counted(dropout: float) -> int:
        module = made(gpt2)
        module.dropout.p = dropout
        handle = recompute.apply(module, rules(rule("GPT2MLP", "recompute", via="kernel")))
        return of_one_more(lambda: module(torch.randn(TOKENS, HIDDEN, requires_grad=True) * 1), handle).kept_nbytes

    assert counted(0.5) > TOKENS * (HIDDEN + INTERMEDIATE) * 4 == counted(0.0)


@pytest.mark.slow
def test_a_layer_compiles_with_kernels_in_its_place() -> None:
    module = made(gpt2)
    compiled = torch.compile(stood_in(module), backend="aot_eager", fullgraph=True)
    x = torch.randn(7, HIDDEN)
    torch.testing.assert_close(gradients(compiled, x), gradients(module, x))
