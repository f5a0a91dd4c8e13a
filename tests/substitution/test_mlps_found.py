"""What an MLP computes is read off its forward: those there are get kernels that err no more, near misses get none."""

import copy
import functools
import math
import warnings

import pytest
import tiny
import torch
import transformers
from layer_testing import PLAIN, hook, theirs
from models import BATCH, GPT2_SHAPE, HIDDEN, INTERMEDIATE, LENGTH, SHAPE
from tiers import by_default, one_in, slow
from tiny import TinyMLP, TinyRMSNorm, assert_same, counted_ops, gradients, of_one_more, rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

import recompute
from recompute.errors import PolicyWarning
from recompute.substitution.feed_forward import find_kernel_mlp
from recompute.substitution.norm import find_norm

TOKENS = BATCH * LENGTH
ArceeMLP, CLIPMLP, FalconMLP, FalconLinear, GPT2MLP, GPTNeoXMLP, NemotronMLP = theirs(
    *("arcee.ArceeMLP", "clip.CLIPMLP", "falcon.FalconMLP", "falcon.FalconLinear", "gpt2.GPT2MLP"),
    *("gpt_neox.GPTNeoXMLP", "nemotron.NemotronMLP"),
)
Phi3MLP, PhiMLP, Starcoder2MLP, ViTMLP, GemmaMLP = theirs(
    *("phi3.Phi3MLP", "phi.PhiMLP", "starcoder2.Starcoder2MLP", "vit.ViTMLP", "gemma.GemmaMLP")
)
LLAMAS = theirs("llama.LlamaMLP", "mistral.MistralMLP", "qwen2.Qwen2MLP", "qwen3.Qwen3MLP")
GATED, PACKED, W = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", None, "down_proj"), ("w1", "w3", "w2")


class Made(nn.Module):
    """An MLP with functions in forward, as Meta's Llama, torchtitan and many loops of one's own have it."""

    def __init__(self, forward):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 24, bias=False) for _ in range(2))
        self.w2, self.w13 = nn.Linear(24, HIDDEN, bias=False), nn.Linear(HIDDEN, 48)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


class Ungated(nn.Module):
    def __init__(self, forward, **parts):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(HIDDEN, 40), nn.GELU(), nn.Linear(40, HIDDEN)
        self.p, self.run = 0.1, forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def as_it_is(self, x):
    return self.down(self.act(self.up(x)))


def gpt2(**options):
    return GPT2MLP(INTERMEDIATE, transformers.GPT2Config(**{**GPT2_SHAPE, "resid_pdrop": 0.0, **options}))


def starcoder2(**options):
    return Starcoder2MLP(transformers.Starcoder2Config(**SHAPE, **{"residual_dropout": 0.0, **options}))


def falcon():
    return FalconMLP(transformers.FalconConfig(**PLAIN, ffn_hidden_size=INTERMEDIATE, bias=True))


def of(cls, activation="gelu"):
    config = transformers.PretrainedConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, hidden_act=activation)
    config.mlp_bias, config.hidden_activation = False, activation
    return lambda: cls(config)


def halves(self, x):
    gate, up = self.w13(x).chunk(2, dim=-1)
    return self.w2(F.silu(gate) * up)


def written_out(self, x):
    gate = self.w1(x)
    return self.w2(0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * self.w3(x))


HAND_WRITTEN = {
    "silu": (lambda self, x: self.w2(F.silu(self.w1(x)) * self.w3(x)), W, "silu"),
    "the gate behind": (lambda self, x: self.w2(self.w3(x) * F.silu(self.w1(x))), W, "silu"),
    "gelu of tanh": (lambda self, x: self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x)), W, "gelu_tanh"),
    "gate and up renamed": (lambda self, x: self.w2(self.w1(x) * F.silu(self.w3(x))), ("w3", "w1", "w2"), "silu"),
    "halves": (halves, ("w13", None, "w2"), "silu"),
    "written out": (written_out, W, "gelu_tanh"),
    "not gated": (lambda self, x: self.w2(F.gelu(self.w1(x))), (None, "w1", "w2"), "gelu"),
    "squared": (lambda self, x: self.w2(F.relu(self.w1(x)).square()), (None, "w1", "w2"), "relu2"),
}
FOUND = {
    **{cls.__name__: (of(cls, "silu"), GATED, "silu") for cls in LLAMAS},
    "Gemma": (of(GemmaMLP, "gelu_pytorch_tanh"), GATED, "gelu_tanh"),
    "Phi 3": (of(Phi3MLP, "silu"), PACKED, "silu"),
    "GPT-2": (gpt2, (None, "c_fc", "c_proj"), "gelu_tanh"),
    "GPT-NeoX": (of(GPTNeoXMLP), (None, "dense_h_to_4h", "dense_4h_to_h"), "gelu"),
    "Phi": (of(PhiMLP, "gelu_new"), (None, "fc1", "fc2"), "gelu_tanh"),
    "Starcoder 2": (starcoder2, (None, "c_fc", "c_proj"), "gelu_tanh"),
    "Falcon": (falcon, (None, "dense_h_to_4h", "dense_4h_to_h"), "gelu"),
    "Nemotron": (of(NemotronMLP, "relu2"), (None, "up_proj", "down_proj"), "relu2"),
    "Arcee": (of(ArceeMLP, "relu2"), (None, "up_proj", "down_proj"), "relu2"),
    "ViT": (of(ViTMLP), (None, "fc1", "fc2"), "gelu"),
    "CLIP": (of(CLIPMLP, "quick_gelu"), (None, "fc1", "fc2"), "quick_gelu"),
    "Sequential": (lambda: nn.Sequential(nn.Linear(HIDDEN, 40), nn.ReLU(), nn.Dropout(0.0), nn.Linear(40, HIDDEN)),
                   (None, "0", "3"), "relu"),
    **{name: (functools.partial(Made, forward), *found) for name, (forward, *found) in HAND_WRITTEN.items()},
}  # fmt: skip
"""How an MLP is built, the names of its gate, up and down, and its activation."""
DEFAULT = ("LlamaMLP", "Phi 3", "GPT-2", "Falcon", "Sequential", "the gate behind", "halves", "written out", "squared")
"""Usual Linears, one for gate and up, a Conv1D, a Linear of the model's own, and MLPs without a class of their own."""


def made(build):
    """With weights of which every term counts."""
    module, generator = build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return module.train()


def by_kernels(module, **options):
    return recompute.apply(module, rules(rule(type(module).__name__, "recompute", via="kernel", **options)))


def stood_in(module, what="mlp (", **options):
    found = copy.deepcopy(module)
    assert f"kernel: {what}" in by_kernels(found, **options).explain(wide=True)
    return found


@pytest.mark.parametrize("known", by_default(FOUND, *DEFAULT))
def test_an_mlp_is_found_by_the_flow_of_data_and_not_by_names(known):
    build, parts, activation = known
    module = build()
    found = find_kernel_mlp(module)
    names = {part: name for part, name in zip(("gate", "up", "down"), parts, strict=True) if name is not None}
    assert {part: linear.name for part, linear in found.linears} == names
    assert (found.activation, found.is_gated) == (activation, parts[0] is not None)
    weights, biases = found.operands(module)
    for (part, name), weight in zip(names.items(), [each for each in weights if each is not None], strict=True):
        linear = module.get_submodule(name)
        assert torch.equal(weight, linear.weight.t() if isinstance(linear, Conv1D) else linear.weight)
        assert biases[f"{part}_bias"] is linear.bias


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("known", by_default(FOUND, *DEFAULT))
def test_its_kernel_errs_no_more_than_the_mlp(known, dtype):
    build, parts, activation = known
    module = made(build)
    x = torch.randn(3, 40, HIDDEN, generator=torch.Generator().manual_seed(0))
    exact = gradients(copy.deepcopy(module).double(), x.double())
    module, x = module.to(dtype), x.to(dtype)
    stand_in = stood_in(module, f"{'mlp' if parts[0] is None else 'gated_mlp'} ({activation})")
    for _ in range(6):  # the last of them as captured code
        found = gradients(stand_in, x)
    for value, peer, truth in zip(found, gradients(module, x), exact, strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, peer.shape)
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        assert error <= 1.05 * eagers + torch.finfo(dtype).eps * truth.norm() / 8


def product(self, x):
    return self.act_fn(self.gate_proj(x)) * self.up_proj(x)


def gated_noting_its_activation(self, x):
    self.last = self.act_fn(self.gate_proj(x))
    return self.down_proj(self.last * self.up_proj(x))


def without_gradients_of_the_gate(self, x):
    with torch.no_grad():
        gate = self.act_fn(self.gate_proj(x))
    return self.down_proj(gate * self.up_proj(x))


NOT_GATED_MLPS = {
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
    "calling up once more": lambda self, x: (self.up_proj(x), self.down_proj(product(self, x)))[1],  # it may count
    "noting its activation": gated_noting_its_activation,
    "without gradients of the gate": without_gradients_of_the_gate,
}
NOT_UNGATED_MLPS = {
    "an activation behind": lambda self, x: self.act(as_it_is(self, x)),
    "twice activated": lambda self, x: self.down(self.act(self.act(self.up(x)))),
    "dropped": lambda self, x: self.down(F.dropout(self.act(self.up(x)), self.p, self.training)),
    "dropped by name": lambda self, x: self.down(F.dropout(self.act(self.up(x)), p=self.p, training=self.training)),
    "dropped anyway": lambda self, x: self.down(F.dropout(self.act(self.up(x)), p=self.p)),
    "dropped twice": lambda self, x: self.dropout(self.dropout(as_it_is(self, x))),
    "dropped inside by a module": lambda self, x: self.down(self.dropout(self.act(self.up(x)))),
    "scaled": lambda self, x: self.down(self.act(self.up(x)) * 0.5),
    "without up": lambda self, x: self.down(self.act(x)),
}
NOT_HAND_WRITTEN = {
    "by a product": lambda self, x: self.w2(F.silu(x @ self.w1.weight.t()) * self.w3(x)),
    "in place": lambda self, x: self.w2(F.silu(self.w1(x), inplace=True) * self.w3(x)),
    "another activation": lambda self, x: self.w2(F.leaky_relu(self.w1(x)) * self.w3(x)),
    "a GLU": lambda self, x: self.w2(self.w1(x) * torch.sigmoid(self.w3(x))),
}


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Squared(FalconLinear):
    def forward(self, x):
        return x @ self.weight.T + self.bias * self.bias


class Narrow(Conv1D):
    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf, 1)


def gated(forward):
    module = type("Some", (TinyMLP,), {"forward": forward})()
    module.dropout = nn.Dropout(0.1)
    return module


def of_linear(linear):
    return nn.Sequential(linear, nn.SiLU(), nn.Linear(5, 3))


OTHER_PARTS = [
    {"act": nn.Tanh()}, {"act": nn.ReLU(inplace=True)}, {"act": nn.Dropout(0.0)},
    {"up": nn.Bilinear(HIDDEN, HIDDEN, 40)}, {"down": nn.Identity()}, {"down": nn.Sequential(nn.Linear(40, HIDDEN))},
]  # fmt: skip
MISSES = {
    **{f"gated: {name}": gated(forward) for name, forward in NOT_GATED_MLPS.items()},
    **{name: Ungated(forward, dropout=nn.Dropout(0.1)) for name, forward in NOT_UNGATED_MLPS.items()},
    **{f"parts: {parts}": Ungated(as_it_is, **parts) for parts in OTHER_PARTS},
    **{type(each).__name__: of_linear(each) for each in (Scaled(3, 5), Squared(3, 5), Narrow(5, 3))},
}


@pytest.mark.parametrize("training", [True, *slow(False)])
@pytest.mark.parametrize("module", one_in(6, MISSES))
def test_what_is_nearly_an_mlp_is_none(module, training):
    assert find_kernel_mlp(module.train(training)) is None


def test_what_the_misses_nearly_are_is_one():
    for linear in (nn.Linear(3, 5), FalconLinear(3, 5), Conv1D(5, 3)):
        assert find_kernel_mlp(of_linear(linear)) is not None
    assert find_kernel_mlp(gated(lambda self, x: self.down_proj(product(self, x)))) is not None
    assert find_kernel_mlp(Ungated(as_it_is, dropout=nn.Dropout(0.1))) is not None


@pytest.mark.parametrize("forward", NOT_HAND_WRITTEN.values(), ids=NOT_HAND_WRITTEN)
def test_a_miss_runs_as_it_is(forward):
    module = Made(forward)
    plain = copy.deepcopy(module)
    assert find_kernel_mlp(module) is None
    with pytest.warns(PolicyWarning, match="no kernel replaces Made"):
        by_kernels(module)
    x = torch.randn(5, HIDDEN)
    assert_same(gradients(module, x), gradients(plain, x))


def activation_of(forward):
    return type("SomeActivation", (nn.Module,), {"forward": forward})()


ACTIVATIONS = {
    "silu": [nn.SiLU(), ACT2FN["silu"], ACT2FN["swish"]],
    "gelu": [nn.GELU(), ACT2FN["gelu"], ACT2FN["gelu_python"]],
    "gelu_tanh": [
        nn.GELU("tanh"),
        *(ACT2FN[f"gelu_{name}"] for name in ("fast", "pytorch_tanh", "new", "accurate", "python_tanh")),
    ],
    "quick_gelu": [ACT2FN["quick_gelu"]],
    "relu": [nn.ReLU()],
    "relu2": [ACT2FN["relu2"], activation_of(lambda self, x: F.relu(x).pow(2))],
    None: [
        *(nn.SiLU(inplace=True), ACT2FN["gelu_10"], nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(), nn.Sigmoid()),
        *(nn.Mish(), nn.Sequential(nn.SiLU(), nn.SiLU()), nn.Sequential(nn.SiLU(), nn.Dropout(0.1)), nn.Identity()),
        activation_of(lambda self, x: F.silu(x) * 2),
        activation_of(lambda self, x: F.silu(x * 2)),
        activation_of(lambda self, x: F.silu(x) if self.training else x),
        activation_of(lambda self, x: F.relu(x).pow(3)),
        activation_of(lambda self, x: x * torch.sigmoid(x * 1.7)),
        activation_of(lambda self, x: torch.square(x)),
        activation_of(lambda self, x: F.silu(x).clamp_(max=7)),
        activation_of(lambda self, x: (y := F.silu(x), y.clamp_(max=7))[0]),
        activation_of(lambda self, x: (x.clamp_(max=7), F.silu(x))[1]),
        activation_of(torch.no_grad()(lambda self, x: F.silu(x))),
        activation_of(lambda self, x: F.silu(x if type(x) is not Tensor else 2 * x)),
    ],
}


EACH = {f"{name} {index}": (name, each) for name, some in ACTIVATIONS.items() for index, each in enumerate(some)}


@pytest.mark.parametrize("known", one_in(8, EACH))
def test_an_activation_is_what_it_computes(known):
    expected, module = known
    found = find_kernel_mlp(nn.Sequential(nn.Linear(8, HIDDEN), module, nn.Linear(HIDDEN, 8)))
    assert (None if found is None else found.activation) == expected


CONSTANT, GENERATOR = torch.ones(HIDDEN), torch.Generator()


class Constants(TinyRMSNorm):
    """Uses what a trace makes attributes of its module."""

    def forward(self, x):
        return super().forward(x * CONSTANT + torch.rand(x.shape, generator=GENERATOR))


def test_constants_of_a_trace_do_not_stay_on_the_module():
    module = Constants(HIDDEN)
    before = vars(module).keys() | set()
    for find in (find_norm, find_kernel_mlp):
        assert not find(module)
        assert vars(module).keys() == before


# What stands in


def dropped_by_a_module(self, x):
    return self.dropout(as_it_is(self, x))


@pytest.mark.parametrize("capture", [True, *slow(False)])
def test_a_dropout_of_the_output_draws_what_it_draws_without_a_policy(capture):
    """And what is held of its mask is up to the tape around the kernel, as it is without one."""
    plain = Ungated(dropped_by_a_module, dropout=nn.Dropout(0.5))
    assert find_kernel_mlp(plain).dropout == "dropout"
    model, by_hooks, x = copy.deepcopy(plain), copy.deepcopy(plain), torch.randn(400, HIDDEN)
    of_hooks = recompute.apply(by_hooks, rules(rule("Ungated", "recompute", via="hook", capture=capture)))
    state = torch.get_rng_state()
    handle = by_kernels(model, capture=capture)
    assert torch.equal(torch.get_rng_state(), state)
    assert "kernel: mlp (gelu); cheap ops run again" in handle.explain(wide=True)
    for _ in range(6):
        for seed in range(2):
            outputs, expected, _ = (gradients(each, x, seed=seed) for each in (model, plain, by_hooks))
            assert torch.equal(outputs[0] == 0, expected[0] == 0)
            torch.testing.assert_close(outputs, expected)
    kept, kept_by_hooks = ([plan.kept_nbytes for plan in each.plans().values()] for each in (handle, of_hooks))
    assert kept == kept_by_hooks


def with_dropout():
    return Ungated(dropped_by_a_module, dropout=nn.Dropout(0.5))


@pytest.mark.parametrize("make", [functools.partial(gpt2, resid_pdrop=0.5), *slow(with_dropout)])
def test_an_mlp_of_sequences_with_dropout_is_captured_with_the_kernels_bits(make):
    torch.manual_seed(0)
    code = make()
    kernels, x = copy.deepcopy(code), torch.randn(BATCH, LENGTH, HIDDEN)
    handle, _ = (by_kernels(each, capture=capture) for each, capture in ((code, True), (kernels, False)))

    def step(mlp, seed):
        mlp.zero_grad()
        given = x.clone().requires_grad_()
        torch.manual_seed(seed)
        output = mlp(given)
        output.sum().backward()
        return [output.detach(), *(each.grad.clone() for each in (given, *mlp.parameters()) if each.grad is not None)]

    for seed in range(8):
        assert_same(step(code, seed), step(kernels, seed))
    assert "1 of 1 run as captured code" in handle.explain(wide=True)


CHANGES = {
    "a hook on up": (gpt2, lambda mlp: hook(mlp.c_fc)),
    "a hook on the dropout": (gpt2, lambda mlp: hook(mlp.dropout)),
    "another activation": (gpt2, lambda mlp: setattr(mlp, "act", nn.Tanh())),
    "another Linear": (gpt2, lambda mlp: setattr(mlp, "c_proj", nn.Linear(INTERMEDIATE, HIDDEN, bias=False))),
    "an adapter": (gpt2, lambda mlp: setattr(mlp, "c_fc", nn.Sequential(mlp.c_fc, nn.Tanh()))),
    "a dropout": (gpt2, lambda mlp: setattr(mlp.dropout, "p", 0.5)),
    "a dropout by a number": (starcoder2, lambda mlp: setattr(mlp, "residual_dropout", 0.5)),
    "the activation itself": (lambda: Ungated(as_it_is), lambda mlp: setattr(mlp.act, "approximate", "tanh")),
}


@pytest.mark.parametrize("changed", one_in(3, CHANGES))
def test_what_comes_after_the_policy_is_not_passed_over(changed):
    build, change = changed
    plain = made(build)
    stand_in, x = stood_in(plain), torch.randn(7, HIDDEN)
    with counted_ops() as ops:
        stand_in(x)
    assert ops["recompute.activation_forward"] == 1
    for each in (plain, stand_in):
        torch.manual_seed(0)
        change(each)
    assert_same(gradients(stand_in, x), gradients(plain, x))


def test_gradients_of_transposed_weights_are_not_copied():
    stand_in = stood_in(made(gpt2))
    with counted_ops() as ops:
        stand_in(torch.randn(7, HIDDEN)).sum().backward()
    assert "aten.clone" not in ops
    assert {p.grad.stride() for p in stand_in.parameters() if p.dim() == 2} == {(HIDDEN, 1), (INTERMEDIATE, 1)}


def test_a_dropout_that_drops_nothing_is_not_counted_with_one_that_does():
    def counted(dropout):
        module = made(gpt2)
        module.dropout.p = dropout
        handle = by_kernels(module)
        return of_one_more(lambda: module(torch.randn(TOKENS, HIDDEN, requires_grad=True) * 1), handle).kept_nbytes

    assert counted(0.5) > TOKENS * (HIDDEN + INTERMEDIATE) * 4 == counted(0.0)


# How forward is called


class WithoutSignature(nn.Module):
    forward = staticmethod(torch.sin)


class Preset(nn.Module):
    def scaled(self, x, scale):
        return x.tanh() * scale

    forward = functools.partialmethod(scaled, scale=2.0)


@pytest.mark.parametrize("via", ["hook", "auto"])
@pytest.mark.parametrize("cls", [WithoutSignature, Preset])
def test_a_forward_of_any_kind_can_be_looked_at(cls, via):
    assert find_norm(cls()) is None
    assert find_kernel_mlp(cls()) is None
    module, x = cls(), torch.randn(5)
    recompute.apply(module, rules(rule(cls.__name__, "recompute", via=via)))
    torch.testing.assert_close(gradients(module, x), gradients(cls(), x))


def weighted(weight):
    norm = TinyRMSNorm()
    norm.weight = nn.Parameter(weight)
    return norm


def of_class(base, forward):
    return type("Some", (base,), {"forward": forward})()


norm, mlp = TinyRMSNorm.forward, TinyMLP.forward
CALLS = {
    "argument": (of_class(TinyRMSNorm, lambda self, x, more=None: norm(self, x)), lambda module, x: module(x, None)),
    "keywords": (of_class(TinyRMSNorm, lambda self, x, **options: norm(self, x)), lambda module, x: module(x, layer=3)),
    "keyword only": (of_class(TinyRMSNorm, lambda self, *, x: norm(self, x)), lambda module, x: module(x=x)),
    "option": (of_class(TinyMLP, lambda self, x, scale=None: mlp(self, x)), lambda module, x: module(x, scale=2.0)),
    "one weight": (weighted(torch.full((1,), 0.7)), lambda module, x: module(x)),
    "scalar weight": (weighted(torch.tensor(0.7)), lambda module, x: module(x)),
    "weight a row": (weighted(torch.rand(3, tiny.HIDDEN)), lambda module, x: module(x)),
}


@pytest.mark.parametrize("via", ["hook", *slow("kernel"), "auto"])
@pytest.mark.parametrize(("module", "call"), CALLS.values(), ids=CALLS)
def test_whatever_stands_in_can_be_called_alike(module, call, via):
    plain, module = module, copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # that no kernel computes it, or nothing does
        recompute.apply(module, rules(rule(type(module).__name__, "recompute", via=via)))
    x = torch.randn(5, 3, tiny.HIDDEN)
    torch.testing.assert_close(gradients(lambda x: call(module, x), x), gradients(lambda x: call(plain, x), x))
