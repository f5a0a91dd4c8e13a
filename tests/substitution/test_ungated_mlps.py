"""MLPs without a gate by kernels: which modules are found, what stands in for them in models, and what is held then."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from models import BATCH, GPT2_SHAPE, HIDDEN, INTERMEDIATE, LAYERS, LENGTH, SHAPE, held
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
from recompute.counters import step_memory
from recompute.errors import PolicyWarning
from recompute.substitution.feed_forward import UngatedMLP, find_gated_mlp, find_kernel_mlp, find_linear

TOKENS = BATCH * LENGTH
ROW = TOKENS * HIDDEN * 4
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


FOUND: dict[str, tuple[Callable[[], nn.Module], UngatedMLP, str]] = {
    "GPT-2": (gpt2, UngatedMLP("c_fc", "c_proj", "act"), "gelu_tanh"),
    "GPT-NeoX": (lambda: of(GPTNeoXMLP), UngatedMLP("dense_h_to_4h", "dense_4h_to_h", "act"), "gelu"),
    "Phi": (lambda: of(PhiMLP, "gelu_new"), UngatedMLP("fc1", "fc2", "activation_fn"), "gelu_tanh"),
    "Starcoder 2": (starcoder2, UngatedMLP("c_fc", "c_proj", "act"), "gelu_tanh"),
    "Falcon": (
        lambda: FalconMLP(transformers.FalconConfig(**PLAIN, ffn_hidden_size=INTERMEDIATE, bias=True)),
        UngatedMLP("dense_h_to_4h", "dense_4h_to_h", "act"),
        "gelu",
    ),
    "Nemotron": (lambda: of(NemotronMLP, "relu2"), UngatedMLP("up_proj", "down_proj", "act_fn"), "relu2"),
    "Arcee": (lambda: of(ArceeMLP, "relu2"), UngatedMLP("up_proj", "down_proj", "act_fn"), "relu2"),
    "ViT": (lambda: of(ViTMLP), UngatedMLP("fc1", "fc2", "activation_fn"), "gelu"),
    "CLIP": (lambda: of(CLIPMLP, "quick_gelu"), UngatedMLP("fc1", "fc2", "activation_fn"), "quick_gelu"),
    "Sequential": (
        lambda: nn.Sequential(nn.Linear(HIDDEN, 40), nn.ReLU(), nn.Dropout(0.0), nn.Linear(40, HIDDEN)),
        UngatedMLP("0", "3", "1"),
        "relu",
    ),
}
each_found = pytest.mark.parametrize(("build", "parts", "activation"), FOUND.values(), ids=FOUND)


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
    assert "kernel: mlp (" in handle.explain()
    return found


@each_found
def test_finds_the_mlps_there_are(build: Callable[[], nn.Module], parts: UngatedMLP, activation: str) -> None:
    module = build()
    found = find_kernel_mlp(module)
    assert found is not None
    assert (found.parts, found.activation, found.is_gated) == (parts, activation, False)
    assert find_gated_mlp(module) is None
    for name, (weight, bias) in zip((parts.up, parts.down), _weights(found, module), strict=True):
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_what_the_mlp_gives(
    build: Callable[[], nn.Module], parts: UngatedMLP, activation: str, dtype: torch.dtype
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


def twice_activated(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.act(self.up(x))))


def dropped(self: Any, x: Tensor) -> Tensor:
    return self.down(F.dropout(self.act(self.up(x)), self.p, self.training))


def dropped_by_name(self: Any, x: Tensor) -> Tensor:
    return self.down(F.dropout(self.act(self.up(x)), p=self.p, training=self.training))


def dropped_anyway(self: Any, x: Tensor) -> Tensor:
    return self.down(F.dropout(self.act(self.up(x)), p=self.p))


def dropped_by_a_module(self: Any, x: Tensor) -> Tensor:
    return self.dropout(as_it_is(self, x))


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.up(x)) * 0.5)


def residual(self: Any, x: Tensor) -> Tensor:
    return x + as_it_is(self, x)


def without_up(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(x))


def noting_its_activation(self: Any, x: Tensor) -> Tensor:
    self.last = self.act(self.up(x))
    return self.down(self.last)


MISSES = [
    twice_activated,
    dropped,
    dropped_by_name,
    dropped_anyway,
    dropped_by_a_module,
    scaled,
    residual,
    without_up,
    noting_its_activation,
]


@pytest.mark.parametrize("forward", MISSES)
def test_what_is_nearly_an_mlp_is_none(forward: Callable[..., Tensor]) -> None:
    assert find_kernel_mlp(MLP(as_it_is, dropout=nn.Dropout(0.1))) is not None
    assert find_kernel_mlp(MLP(forward, dropout=nn.Dropout(0.1))) is None


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


def test_linears_are_found_by_their_formula() -> None:
    for module, transposed in ((nn.Linear(3, 5), False), (FalconLinear(3, 5), False), (Conv1D(5, 3), True)):
        found = find_linear(module)
        assert found is not None
        assert (found.cls, found.weight, found.bias, found.is_transposed) == (
            type(module),
            "weight",
            "bias",
            transposed,
        )
        weight, bias = found.operands(module)  # type: ignore[misc]
        assert (tuple(weight.shape), bias) == ((5, 3), module.bias)
    assert find_linear(FalconLinear(3, 5, bias=False)).bias is None  # type: ignore[union-attr]
    for other in (Scaled(3, 5), Squared(3, 5), Narrow(5, 3), nn.Embedding(3, 5), nn.Tanh()):
        assert find_linear(other) is None


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


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_comes_after_the_policy_is_not_passed_over(change: Callable[[nn.Module], Any]) -> None:
    plain = made(gpt2)
    stand_in, x = stood_in(plain), torch.randn(7, HIDDEN)
    for each in (plain, stand_in):
        torch.manual_seed(0)
        change(each)
    assert_same(gradients(stand_in, x), gradients(plain, x))


def test_gradients_of_transposed_weights_are_not_copied() -> None:
    stand_in = stood_in(made(gpt2))
    with counted_ops() as ops:
        stand_in(torch.randn(7, HIDDEN)).sum().backward()
    assert "aten.clone" not in ops
    assert {p.grad.stride() for p in stand_in.parameters() if p.dim() == 2} == {(HIDDEN, 1), (INTERMEDIATE, 1)}  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["GPT-2", "Starcoder 2"])
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


def causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": INTERMEDIATE}
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (lambda: models.make("gpt2", **NO_DROPOUT), "gpt2"),
    "gpt2 with dropout": (lambda: models.make("gpt2"), "gpt2"),
    "gpt_neox": (causal("GPTNeoX", **PLAIN), "llama"),
    "gpt_neox, one after the other": (causal("GPTNeoX", **PLAIN, use_parallel_residual=False), "llama"),
    "phi": (causal("Phi", **SHAPE), "llama"),
    "starcoder2": (causal("Starcoder2", **SHAPE, residual_dropout=0.0, embedding_dropout=0.0), "llama"),
    "falcon": (causal("Falcon", **PLAIN, **FALCON), "llama"),
    "nemotron": (causal("Nemotron", **SHAPE), "llama"),
    "arcee": (causal("Arcee", **SHAPE), "llama"),
    "vit": (lambda: models.make("vit"), "vit"),
}
"""Builds a model; and whose batches it takes."""
WITHOUT_MLP_KERNEL = {"gpt2 with dropout"}
WHOLE = {"gpt_neox, one after the other": 2, "starcoder2": 2, "vit": 2}
"""The models whose LayerNorm layers are taken as a whole, and the LayerNorms of a layer."""
LAYERS_ALONE = rules(rule(["*Layer", "*Block"], "recompute", via="kernel"))


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def layers(via: str, **options: Any) -> dict[str, Any]:
    return rules(rule(["*Layer", "*Block", "*LayerNorm*", "*RMSNorm*"], "recompute", via=via, **options))


def batch_of(name: str) -> dict[str, Any]:
    kind = MODELS[name][1]
    return {**models.batch(kind), **({} if kind == "vit" else {"use_cache": False})}


def outcome(model: nn.Module, name: str) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**batch_of(name)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def under(name: str, given: dict[str, Any], steps: int = 8) -> tuple[nn.Module, Any]:
    """The model after some steps under a policy, in which its layers have settled."""
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # of norms that have no kernel
        handle = recompute.apply(model, given)
    for _ in range(steps):
        outcome(model, name)
    return model, handle


@functools.cache
def settled(name: str, via: str) -> tuple[nn.Module, Any]:
    """Shared by tests that change nothing about the model."""
    return under(name, layers(via))


def held_by(model: nn.Module, name: str) -> int:
    return step_memory(lambda: model(**batch_of(name)).loss, torch.device("cpu")).activation_bytes_held


each_model = pytest.mark.parametrize("name", by_default(list(MODELS), "gpt2", "starcoder2", "falcon"))


@each_model
def test_kernels_never_hold_more_than_the_tape(name: str) -> None:
    """But for two numbers a token of the last norm, or one of an RMSNorm, which no layer's tape holds."""
    (by_hooks, _), (by_kernels, handle) = (settled(name, via) for via in ("hook", "kernel"))
    assert f"{LAYERS} of {LAYERS} run as captured code" in handle.explain()
    tokens = BATCH * 37 if name == "vit" else TOKENS
    assert held_by(by_kernels, name) <= held_by(by_hooks, name) + 2 * 4 * tokens + arcee_rows(name)


def arcee_rows(name: str) -> int:
    """A layer with RMSNorms runs on no tape, and holds a number a row for each of its norms."""
    return LAYERS * 2 * TOKENS * 4 if name == "arcee" else 0


@pytest.mark.parametrize("name", by_default([each for each in MODELS if each != "arcee"], "starcoder2"))
def test_nor_do_they_where_layers_are_not_captured(name: str) -> None:
    by_hooks, by_kernels = (under(name, layers(via, capture=False), 3)[0] for via in ("hook", "kernel"))
    tokens = BATCH * 37 if name == "vit" else TOKENS
    assert held_by(by_kernels, name) <= held_by(by_hooks, name) + 2 * 4 * tokens


@each_model
def test_the_kernels_run_and_give_the_models_gradients(name: str) -> None:
    plain, (model, handle) = make(name), settled(name, "kernel")
    with counted_ops() as ops:
        found = outcome(model, name)
    mlps = 0 if name in WITHOUT_MLP_KERNEL else LAYERS
    assert ops.get("recompute.activation_backward_", 0) == mlps
    assert "aten.gelu_backward" not in ops or not mlps
    assert ("kernel: mlp (" in handle.explain()) is (mlps > 0)
    if name in WHOLE:
        assert "kernel: add_layer_norm" in handle.explain()
        assert ops["recompute.add_layer_norm_forward"] >= LAYERS
        assert ops["recompute.layer_norm_backward"] == WHOLE[name] * LAYERS + 1
    tolerance = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(found, outcome(plain, name), **tolerance)


@pytest.mark.parametrize("name", ["starcoder2", *slow("vit", "gpt_neox, one after the other")])
def test_captured_layers_give_the_bits_of_those_on_the_tape(name: str) -> None:
    (captured, handle), (taped, of_tape) = settled(name, "kernel"), under(name, layers("kernel", capture=False), 3)
    assert f"{LAYERS} of {LAYERS} run as captured code" in handle.explain()
    assert_same(outcome(captured, name), outcome(taped, name))
    plans, others = (
        {path: plan.kept_nbytes for path, plan in each.plans().items() if "norm" not in path}
        for each in (handle, of_tape)
    )
    assert plans == others


@pytest.mark.parametrize("name", ["starcoder2", *slow("gpt2", "gpt_neox", "falcon", "arcee")])
def test_a_tape_that_runs_gemms_again_gives_the_bits_of_the_kernels_alone(name: str) -> None:
    outcomes, bytes_held = [], []
    for options in ({}, {"rerun": ["gemm"]}, {"rerun": ["gemm", "attention"], "price": 0}):
        model, _ = under(name, layers("kernel", **options, capture=False), 3)
        outcomes.append(outcome(model, name))
        bytes_held.append(held_by(model, name))
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])
    assert bytes_held[0] > bytes_held[1] + LAYERS * TOKENS * INTERMEDIATE * 4
    assert bytes_held[1] > bytes_held[2]


@pytest.mark.parametrize("name", ["starcoder2", *slow("gpt2", "falcon")])
def test_a_tile_of_tokens_at_a_time_holds_no_intermediate(name: str) -> None:
    given = [layers("kernel", **options) for options in ({"capture": False}, {"tile": 8})]  # which is not captured
    (whole, _), (tiled, handle) = (under(name, each, 3) for each in given)
    assert "8 tokens at a time" in handle.explain()
    torch.testing.assert_close(outcome(tiled, name), outcome(whole, name))
    assert held_by(whole, name) - held_by(tiled, name) >= LAYERS * TOKENS * INTERMEDIATE * 4


def test_a_rule_that_compresses_holds_what_up_gives_in_8_bits() -> None:
    """On a layer's tape and by the kernel of the MLP alone."""
    numbers = 1 << 13
    for type_name in ("GPTNeoXLayer", "GPTNeoXMLP"):
        kept = []
        for compress in (False, True):
            torch.manual_seed(0)
            model = causal(
                "GPTNeoX", **{**PLAIN, "intermediate_size": numbers // TOKENS}, use_parallel_residual=False
            )()
            handle = recompute.apply(model, rules(rule(type_name, "recompute", via="kernel", compress=compress)))
            assert ("what dense_h_to_4h gives in 8 bits" in handle.explain()) is compress
            loss = [model.train()(**batch_of("gpt_neox")).loss for _ in range(2)][-1]
            loss.backward()
            kept.append(held_by(model, "gpt_neox"))
        codes = numbers + numbers // 128 * 4
        assert kept[0] - kept[1] == pytest.approx(LAYERS * (numbers * 4 - codes), abs=16)


def test_on_the_cpu_auto_leaves_them_to_the_tape() -> None:
    model, handle = under("starcoder2", layers("auto"), 2)
    assert "kernel: mlp (gelu_tanh) on CUDA, else" in handle.explain()
    assert_same(outcome(model, "starcoder2"), outcome(make("starcoder2"), "starcoder2"))


def test_verify_knows_that_kernels_round_in_their_own_way() -> None:
    recompute.verify(make("starcoder2"), batch_of("starcoder2"), policy=layers("kernel"))


@pytest.mark.parametrize("name", ["gpt2", *slow("starcoder2")])
def test_autocast_casts_as_it_does_without_a_policy(name: str) -> None:
    model, plain = make(name), make(name)
    recompute.apply(model, layers("kernel"))
    outcomes = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(**batch_of(name)).loss
        loss.backward()
        outcomes.append([loss.detach(), *(p.grad for p in each.parameters())])
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).norm() <= 0.05 * other.norm() + 1e-6


@pytest.mark.slow
def test_a_layer_compiles_with_kernels_in_its_place() -> None:
    module = made(gpt2)
    compiled = torch.compile(stood_in(module), backend="aot_eager", fullgraph=True)
    x = torch.randn(7, HIDDEN)
    torch.testing.assert_close(gradients(compiled, x), gradients(module, x))
