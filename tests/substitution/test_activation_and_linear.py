"""Activations and the Linears that read them, in MLPs whose parts lie apart: what kernels compute, and what not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from models import BATCH, HIDDEN, INTERMEDIATE, LAYERS, LENGTH, held
from tiers import by_default, slow
from tiny import assert_same, counted_ops, of_one_more, rule, rules
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

import recompute
from recompute.kernels.activation_linear import activation_linear
from recompute.substitution.feed_forward import find_activation

TOKENS = BATCH * LENGTH


class Layer(nn.Module):
    """As OPT and others write it: without a module for the MLP."""

    def __init__(self, run: Callable[..., Tensor] | None = None, **parts: nn.Module):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(HIDDEN), nn.GELU()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(INTERMEDIATE, HIDDEN)
        self.p = 0.0
        self.run = run or as_it_is
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def as_it_is(self: Any, x: Tensor) -> Tensor:
    active = F.dropout(self.act(self.fc1(self.norm(x))), p=self.p, training=self.training)
    return x + F.dropout(self.fc2(active), p=self.p, training=self.training)


class Half(nn.Module):
    """The first half of BERT's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(HIDDEN, INTERMEDIATE), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.dense(x))


class Written(Half):
    """The same in ESM: no module computes the activation alone."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class PostNorm(nn.Module):
    def __init__(self, first: type[Half] = Half) -> None:
        super().__init__()
        self.first, self.dense = first(), nn.Linear(INTERMEDIATE, HIDDEN)
        self.dropout, self.norm = nn.Dropout(0.25), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(self.first(x))) + x)


def esm() -> nn.Module:
    return PostNorm(Written)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    torch.manual_seed(0)
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    output = module(x)
    torch.autograd.backward(output, torch.linspace(-1, 2, output.numel()).to(output).view_as(output))
    return [output.detach(), *[each.grad for each in (x, *module.parameters()) if each.grad is not None]]


X = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))


def under(module: nn.Module, via: str = "kernel", **options: Any) -> tuple[nn.Module, Any]:
    found = copy.deepcopy(module)
    return found, recompute.apply(found, rules(rule(type(module).__name__, "recompute", via=via, **options)))


def kernels_in(module: nn.Module, x: Tensor = X) -> int:
    with counted_ops() as ops:
        gradients(module, x)
    assert ops.get("recompute.activation_backward_", 0) == ops.get("recompute.activation_forward", 0)
    return ops.get("recompute.activation_backward_", 0)


ACTIVATIONS = {name: ACT2FN[name] for name in ("gelu", "gelu_new", "quick_gelu", "silu", "relu2", "gelu_fast")}
ACTIVATIONS["bloom"] = BloomGelu()


@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
@pytest.mark.parametrize("activation", by_default(ACTIVATIONS, "gelu", "bloom"))
def test_the_kernel_gives_what_the_layer_gives(activation: nn.Module, dtype: torch.dtype) -> None:
    module = made(lambda: Layer(act=copy.deepcopy(activation)))
    exact = gradients(copy.deepcopy(module).double(), X.double())
    module, x = module.to(dtype), X.to(dtype)
    found, handle = under(module)
    assert "kernel: activation_linear (" in handle.explain(wide=True)
    assert kernels_in(found, x) == 1
    for value, peer, truth in zip(gradients(found, x), gradients(module, x), exact, strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, peer.shape)
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        factor = 1.05 + 3 / value.numel() ** 0.5  # the error of n elements is a sample
        assert error <= factor * eagers + torch.finfo(dtype).eps * truth.norm() / 8


def by_hand(self: Any, x: Tensor) -> Tensor:
    return x + activation_linear(self.fc1(self.norm(x)), self.fc2.weight, self.fc2.bias, "gelu")


@pytest.mark.parametrize("capture", [*slow(False), True])
def test_it_has_the_kernels_own_bits(capture: bool) -> None:
    module = made(Layer)
    (found, handle), (other, _) = under(module, capture=capture), under(made(lambda: Layer(by_hand)), capture=False)
    for _ in range(7):
        assert_same(gradients(found, X), gradients(other, X))
    assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
    assert kernels_in(found, X) == 1


@pytest.mark.parametrize("build", [*slow(Layer), PostNorm, esm])
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
def test_it_holds_what_the_tape_holds(build: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    module, x = made(build).to(dtype), X.to(dtype).requires_grad_()
    counts = []
    for via in ("hook", "kernel"):
        for capture in (False, True):
            found, handle = under(module, via, capture=capture)
            for _ in range(7 if capture else 2):
                gradients(found, X.to(dtype))
            assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
            stats = of_one_more(lambda found=found: found(x * 1), handle)
            counts.append((stats.kept_nbytes, stats.eager_nbytes))
            if not capture:
                assert held(found, lambda found=found: found(x * 1)) == stats.kept_nbytes
    assert len(set(counts)) == 1
    kept, eager = counts[0]
    assert eager - kept >= x.shape[0] * INTERMEDIATE * dtype.itemsize


@pytest.mark.parametrize("capture", [*slow(False), True])
def test_a_linear_and_an_expression_of_it_have_the_bits_of_a_linear_and_a_module(capture: bool) -> None:
    plain = made(esm)
    (found, handle), (other, _) = (under(each, capture=capture) for each in (plain, made(PostNorm)))
    assert "kernel: activation_linear (gelu), with dense" in handle.explain(wide=True)
    for _ in range(7):
        assert_same(gradients(found, X), gradients(other, X))
        torch.testing.assert_close(gradients(found, X), gradients(plain, X))
    assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
    assert kernels_in(found) == 1


class WrittenWithDropout(Written):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(Written.forward(self, x), 0.25, self.training)


class WrittenTwice(Written):
    def forward(self, x: Tensor) -> Tensor:
        return Written.forward(self, x) + 0 * self.dense(x)


class WrittenOtherwise(Written):
    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x * 0.5 * (1.0 + torch.erf(x / 1.4))


class WrittenOfHalf(Written):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x).detach()) + self.dense(x)


@pytest.mark.parametrize("first", [WrittenWithDropout, *slow(WrittenTwice, WrittenOfHalf), WrittenOtherwise])
@pytest.mark.parametrize("capture", [True, *slow(False)])
def test_what_is_nearly_a_linear_and_an_activation_runs_as_it_is(first: type[Half], capture: bool) -> None:
    module = made(lambda: PostNorm(first))
    found, handle = under(module, capture=capture)
    assert "activation_linear" not in handle.explain(wide=True)
    for _ in range(7):
        torch.testing.assert_close(gradients(found, X), gradients(module, X))


def test_without_gradients_it_computes_the_same() -> None:
    module, x = made(lambda: Layer(act=ACT2FN["gelu_new"])).bfloat16(), X.bfloat16()
    found, _ = under(module)
    trained = found(x).detach()
    with torch.no_grad():
        assert torch.equal(found(x), trained)
        assert torch.equal(found.eval()(x), trained)
        assert not torch.equal(module(x), trained)  # which rounds at each step


def scaled(self: Any, x: Tensor) -> Tensor:
    return x + self.fc2(self.act(self.fc1(self.norm(x))) * 0.5)


def read_by_another(self: Any, x: Tensor) -> Tensor:
    active = self.act(self.fc1(self.norm(x)))
    return x + active.mean() + self.fc2(active.contiguous())


def changed_in_place(self: Any, x: Tensor) -> Tensor:
    active = self.act(self.fc1(self.norm(x)))
    active += 1
    return x + self.fc2(active)


def as_a_function(self: Any, x: Tensor) -> Tensor:
    return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def given_to_a_function(self: Any, x: Tensor) -> Tensor:
    """As Mamba's mixers do, whose scan is one. It would take no lazy tensor."""
    active = self.act(self.fc1(self.norm(x)))
    return x + self.fc2(active) + Doubled.apply(active).mean()


class Bilinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * x, self.weight, self.bias)


AS_IT_IS: dict[str, Callable[[], nn.Module]] = {
    "scaled": lambda: Layer(scaled),
    "read by another": lambda: Layer(read_by_another),
    "given to a Function": lambda: Layer(given_to_a_function),
    "changed in place": lambda: Layer(changed_in_place),
    "a function in the place of a module": lambda: Layer(as_a_function),
    "another activation": lambda: Layer(act=nn.Tanh()),
    "ReLU, of which autograd holds the output alone": lambda: Layer(act=nn.ReLU()),
    "an activation in place": lambda: Layer(act=nn.SiLU(inplace=True)),
    "a Linear that does more": lambda: Layer(fc2=Bilinear(INTERMEDIATE, HIDDEN)),
}


@pytest.mark.parametrize("capture", [False, *slow(True)])
@pytest.mark.parametrize(
    "build",
    by_default(
        AS_IT_IS,
        "scaled",
        "given to a Function",
        "changed in place",
        "an activation in place",
        "a Linear that does more",
    ),
)
def test_what_is_nearly_that_runs_as_it_is(build: Callable[[], nn.Module], capture: bool) -> None:
    module = made(build)
    (found, handle), (by_hooks, of_hooks) = (under(module, via, capture=capture) for via in ("kernel", "hook"))
    assert "activation_linear" not in handle.explain(wide=True)
    for _ in range(7 if capture else 2):
        outcome = gradients(found, X)
        with counted_ops() as ops:
            gradients(found, X)
        assert "recompute.activation_forward" not in ops
        torch.testing.assert_close(outcome, gradients(by_hooks, X))
    is_captured = ["1 of 1 run as captured code" in each.explain(wide=True) for each in (handle, of_hooks)]
    assert is_captured[0] == is_captured[1]


def test_a_module_that_returns_an_activation_returns_its_values() -> None:
    """Nobody knows what reads them."""
    module = made(Half)
    found, handle = under(module)
    assert "activation_linear" not in handle.explain(wide=True)
    assert type(found(X)) is Tensor
    assert_same(gradients(found, X), gradients(module, X))


@pytest.mark.parametrize("capture", [*slow(False), True])
def test_a_dropout_in_between_runs_as_it_is_while_it_drops(capture: bool) -> None:
    module = made(Layer)
    found, handle = under(module, capture=capture)
    for p, kernels in ((0.0, 1), (0.5, 0), (0.0, 1)):
        for each in (found, module):
            each.p = p
        for _ in range(7):
            torch.testing.assert_close(gradients(found, X), gradients(module, X))
        assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
        assert kernels_in(found, X) == kernels


class WithAdapter(nn.Module):
    def __init__(self, linear: nn.Module):
        super().__init__()
        self.base, self.a, self.b = linear, nn.Linear(INTERMEDIATE, 4), nn.Linear(4, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def scaled_by(factor: float) -> Callable[..., Any]:
    return lambda module, args, output: output * factor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the activation": lambda layer: layer.act.register_forward_hook(scaled_by(1.5)),
    "a hook before the activation": lambda layer: layer.act.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a hook on the activation's backward": lambda layer: layer.act.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 1.5,)
    ),
    "a hook on fc1": lambda layer: layer.fc1.register_forward_hook(scaled_by(1.5)),
    "a hook on fc2": lambda layer: layer.fc2.register_forward_hook(scaled_by(1.5)),
    "a hook before fc2": lambda layer: layer.fc2.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a hook on fc2's backward": lambda layer: layer.fc2.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 1.5,)
    ),
    "another activation": lambda layer: setattr(layer, "act", nn.Tanh()),
    "an adapter": lambda layer: setattr(layer, "fc2", WithAdapter(layer.fc2)),
    "a parametrization": lambda layer: nn.utils.parametrizations.weight_norm(layer.fc2),
    "one weight for both": lambda layer: setattr(layer.fc2, "weight", nn.Parameter(layer.fc1.weight.detach().t())),
    "a frozen fc2": lambda layer: layer.fc2.requires_grad_(False),
    "a frozen fc1": lambda layer: layer.fc1.requires_grad_(False),
    "a forward of its own": lambda layer: setattr(layer.act, "forward", torch.tanh),
}


@pytest.mark.parametrize("when", by_default(["before", "after", "captured"], "captured"))
@pytest.mark.parametrize("change", by_default(CHANGES, "a hook before fc2"))
def test_changes_of_the_parts_are_not_passed_over(change: Callable[[nn.Module], Any], when: str) -> None:
    plain = made(Layer)
    module = copy.deepcopy(plain)
    torch.manual_seed(0)
    change(plain)
    if when == "before":
        torch.manual_seed(0)
        change(module)
    recompute.apply(module, rules(rule("Layer", "recompute", via="kernel")), strict=False)
    if when == "captured":
        for _ in range(7):
            gradients(module, X)
    if when != "before":
        torch.manual_seed(0)
        change(module)
    for _ in range(7):
        torch.testing.assert_close(gradients(module, X), gradients(plain, X))


@pytest.mark.parametrize("build", [PostNorm, *slow(esm)])
@pytest.mark.parametrize("path", ["first.act", *slow("first", "first.dense", "dense", "norm")])
@pytest.mark.parametrize("captured", [True, *slow(False)])
def test_a_hook_on_the_backward_of_any_module_around_gets_its_gradients(
    path: str, captured: bool, build: Callable[[], nn.Module]
) -> None:
    """For which torch gives a Function what the module is given, and that takes no lazy tensor."""
    plain = made(build)
    module, _ = under(plain)
    for _ in range(7 if captured else 0):
        gradients(module, X)
    for each in (plain, module):
        each.get_submodule(path).register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 1.5,))
    for _ in range(4):
        torch.testing.assert_close(gradients(module, X), gradients(plain, X))


CHANGES_OF_ESM: dict[str, Callable[[Any], Any]] = {
    "a hook on its module": lambda layer: layer.first.register_forward_hook(scaled_by(1.5)),
    "a hook on its Linear": lambda layer: layer.first.dense.register_forward_hook(scaled_by(1.5)),
    "a hook before its Linear": lambda layer: layer.first.dense.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "an adapter": lambda layer: setattr(layer.first, "dense", Widened(layer.first.dense)),
    "another forward": lambda layer: setattr(layer.first, "__class__", WrittenOtherwise),
    "an adapter behind": lambda layer: setattr(layer, "dense", WithAdapter(layer.dense)),
    "a frozen Linear": lambda layer: layer.first.dense.requires_grad_(False),
}


class Widened(nn.Module):
    def __init__(self, linear: nn.Module):
        super().__init__()
        self.base, self.a = linear, nn.Linear(HIDDEN, INTERMEDIATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.a(x)


@pytest.mark.parametrize("when", by_default(["before", "after", "captured"], "captured"))
@pytest.mark.parametrize("change", by_default(CHANGES_OF_ESM, "a hook on its Linear", "an adapter"))
def test_changes_of_a_linear_with_an_activation_are_not_passed_over(
    change: Callable[[nn.Module], Any], when: str
) -> None:
    plain = made(esm)
    module = copy.deepcopy(plain)
    for each in (plain, module) if when == "before" else (plain,):
        torch.manual_seed(0)
        change(each)
    recompute.apply(module, rules(rule("PostNorm", "recompute", via="kernel")), strict=False)
    for _ in range(7 if when == "captured" else 0):
        gradients(module, X)
    if when != "before":
        torch.manual_seed(0)
        change(module)
    for _ in range(7):
        torch.testing.assert_close(gradients(module, X), gradients(plain, X))


def test_one_activation_and_one_linear_may_serve_several_layers() -> None:
    def build() -> nn.Module:
        first = Layer()
        return nn.Sequential(first, Layer(act=first.act, fc2=first.fc2), Layer(act=first.act))

    plain = made(build)
    module = copy.deepcopy(plain)
    handle = recompute.apply(module, rules(rule("Layer", "recompute", via="kernel")))
    for _ in range(7):
        torch.testing.assert_close(gradients(module, X), gradients(plain, X))
    assert "3 of 3 run as captured code" in handle.explain(wide=True)
    assert kernels_in(module, X) == 3


def test_a_rule_that_compresses_leaves_it_to_the_tape() -> None:
    module, x = made(Layer), torch.randn(400, HIDDEN)
    steps = []
    for via in ("hook", "kernel"):
        found, handle = under(module, via, compress=True, keep="gemm")
        with counted_ops() as ops:
            gradients(found, x)
        assert "recompute.activation_forward" not in ops
        step = of_one_more(lambda found=found: found(x), handle)
        assert step.codes_nbytes > 0
        steps.append((step.kept_nbytes, step.codes_nbytes))
    assert steps[0] == steps[1]


def test_on_the_cpu_auto_leaves_it_to_the_tape() -> None:
    module = made(Layer)
    found, handle = under(module, "auto")
    assert "kernel: activation_linear (gelu), with fc2 on CUDA, else" in handle.explain(wide=True)
    for _ in range(7):
        assert_same(gradients(found, X), gradients(module, X))
    assert "1 of 1 run as captured code" in handle.explain(wide=True)


@pytest.mark.slow
def test_autocast_casts_as_it_does_without_a_policy() -> None:
    module = made(Layer)
    found, handle = under(module)
    outcomes = []
    for each in (found, module):
        for _ in range(7):
            with torch.autocast("cpu", torch.bfloat16):
                outcome = gradients(each, X)
        outcomes.append(outcome)
    assert "1 of 1 run as captured code" in handle.explain(wide=True)
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).norm() <= 0.02 * other.norm()


class Rectified(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient, x)


class StraightThrough(Rectified):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Clipped(Rectified):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Rectified.backward(ctx, gradient.clamp(-100, 100))


class Applied(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def test_a_function_is_an_activation_if_its_backward_is_that_ones_too() -> None:
    with FakeTensorMode():  # as an estimate has it
        assert find_activation(BloomGelu()) == "gelu_tanh"
    assert find_activation(Applied(Rectified)) == "silu"
    for function in (StraightThrough, Clipped):
        assert find_activation(Applied(function)) is None
        module = made(lambda function=function: nn.Sequential(nn.Linear(8, 9), Applied(function), nn.Linear(9, 8)))
        found, _ = under(module)
        assert_same(gradients(found, X[:, :8]), gradients(module, X[:, :8]))


BLOOM = {"vocab_size": models.VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4}


@pytest.mark.slow
def test_bloom_is_captured_and_holds_less_than_its_tape() -> None:
    """What a custom Function makes is kept there, and a graph with one is not captured."""
    kept, texts = {}, {}
    for via in ("hook", "kernel"):
        torch.manual_seed(0)
        model = transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM, hidden_dropout=0.1)).train()
        handle = recompute.apply(model, rules(rule("BloomBlock", "recompute", via=via)))
        for _ in range(8):
            model(**models.batch("llama"), use_cache=False).loss.backward()
        kept[via], texts[via] = handle.plans()["transformer.h.0"].kept_nbytes, handle.explain(wide=True)
    assert kept["hook"] - kept["kernel"] == TOKENS * 4 * HIDDEN * 4
    assert f"transformer.h.*: {LAYERS} of {LAYERS} run as captured code" in texts["kernel"]
    assert "kernel: activation_linear (gelu_tanh), with dense_4h_to_h" in texts["kernel"]


@pytest.mark.slow
def test_a_layer_compiles_with_the_compilers_own_kernels() -> None:
    module = made(Layer)
    found, _ = under(module)
    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, X), gradients(module, X))
