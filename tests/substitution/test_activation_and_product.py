"""Activations and the products behind them, in MLPs that no kernel computes as a whole: what is fused, and what not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import BATCH, HIDDEN, INTERMEDIATE, LENGTH, held
from tiers import by_default, slow
from tiny import assert_same, counted_ops, of_one_more, rule, rules
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

import recompute
from recompute.errors import PolicyWarning
from recompute.kernels.swiglu import swiglu

TOKENS = BATCH * LENGTH
X = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """A norm and an MLP, which is a module of its own."""

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), Gated(run, **parts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Gated(nn.Module):
    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, INTERMEDIATE), nn.Linear(HIDDEN, INTERMEDIATE)
        self.down, self.act = nn.Linear(INTERMEDIATE, HIDDEN), nn.SiLU()
        self.both = nn.Linear(HIDDEN, 2 * INTERMEDIATE)
        self.run, self.p = run, 0.25
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def with_dropout(self: Any, x: Tensor) -> Tensor:
    """As T5's."""
    return self.down(F.dropout(self.act(self.gate(x)) * self.up(x), self.p, self.training))


def with_numbers(self: Any, x: Tensor) -> Tensor:
    """As Falcon-H1's."""
    return self.down(self.up(x) * self.act(self.gate(x) * 0.6)) * 0.4


def clamped(self: Any, x: Tensor) -> Tensor:
    """As DeepSeek V4's."""
    return self.down(self.act(self.gate(x).clamp(max=0.5)) * self.up(x).clamp(min=-0.5, max=0.5))


def the_gate_second(self: Any, x: Tensor) -> Tensor:
    """As Moonshine's."""
    up, gate = self.both(x).chunk(2, dim=-1)
    return self.down(self.act(gate) * up)


def asking_for_a_dtype(self: Any, x: Tensor) -> Tensor:
    """As T5's: the trace ends there."""
    product = self.act(self.gate(x)) * self.up(x)
    return self.down(product.to(self.down.weight.dtype) if product.dtype != self.down.weight.dtype else product)


def in_float32(self: Any, x: Tensor) -> Tensor:
    return self.down((self.act(self.gate(x).float()) * self.up(x).float()).type_as(x))


FUSED = [with_dropout, with_numbers, clamped, the_gate_second, asking_for_a_dtype, in_float32]
fused = pytest.mark.parametrize("run", by_default({each.__name__: each for each in FUSED}, "with_dropout", "clamped"))


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


def under(module: nn.Module, via: str = "kernel", **options: Any) -> tuple[nn.Module, Any]:
    found = copy.deepcopy(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # where nothing in it has a kernel
        return found, recompute.apply(found, rules(rule("Layer", "recompute", via=via, **options)))


def kernels_in(module: nn.Module, x: Tensor = X) -> int:
    with counted_ops() as ops:
        gradients(module, x)
    return ops.get("recompute.glu_backward", 0)


class Opaque(nn.Module):
    """A part of an MLP that no kernel computes as a whole for it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()


@pytest.mark.parametrize("activation", ["silu", *slow("gelu", "gelu_new")])
@fused
def test_the_kernel_gives_what_the_mlp_gives(run: Callable[..., Tensor], activation: str) -> None:
    module = made(lambda: Layer(run, act=ACT2FN[activation], opaque=Opaque()))
    found, handle = under(module)
    assert "fused with the product behind it" in handle.explain(wide=True)
    assert kernels_in(found) == 1
    torch.testing.assert_close(gradients(found, X), gradients(module, X))


@pytest.mark.parametrize("activation", ["silu", *slow("gelu", "gelu_new")])
@fused
def test_in_bfloat16_it_is_no_further_from_the_truth(run: Callable[..., Tensor], activation: str) -> None:
    module = made(lambda: Layer(run, act=ACT2FN[activation], opaque=Opaque()))
    module.mlp.p = 0.0
    exact = gradients(copy.deepcopy(module).double(), X.double())
    module, x = module.bfloat16(), X.bfloat16()
    found, _ = under(module)
    assert kernels_in(found, x) == 1
    for value, peer, truth in zip(gradients(found, x), gradients(module, x), exact, strict=True):
        assert (value.dtype, value.shape) == (peer.dtype, peer.shape)
        error, eagers = ((each.double() - truth).norm() for each in (value, peer))
        factor = 1.05 + 3 / value.numel() ** 0.5  # the error of n elements is a sample
        assert error <= factor * eagers + torch.finfo(torch.bfloat16).eps * truth.norm() / 8


def by_hand(self: Any, x: Tensor) -> Tensor:
    return self.down(F.dropout(swiglu(self.gate(x), self.up(x)), self.p, self.training))


@pytest.mark.parametrize("capture", [*slow(False), True])
def test_it_has_the_kernels_own_bits(capture: bool) -> None:
    module = made(lambda: Layer(with_dropout))
    (found, handle), (other, _) = (under(each, capture=capture) for each in (module, made(lambda: Layer(by_hand))))
    for _ in range(7):
        assert_same(gradients(found, X), gradients(other, X))
    assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
    assert kernels_in(found) == 1


@pytest.mark.parametrize("capture", [*slow(False), True])
@fused
def test_it_holds_what_the_tape_holds(run: Callable[..., Tensor], capture: bool) -> None:
    module, x = made(lambda: Layer(run)), X.clone().requires_grad_()
    counts = []
    for via in ("hook", "kernel"):
        found, handle = under(module, via, capture=capture)
        for _ in range(7 if capture else 2):
            gradients(found, X)
        assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
        counts.append(held(found, lambda found=found: found(x * 1)))
        assert of_one_more(lambda found=found: found(x * 1), handle).kept_nbytes == counts[-1]
    assert counts[1] <= counts[0]


def test_without_gradients_it_computes_the_same() -> None:
    module, x = made(lambda: Layer(clamped)).bfloat16(), X.bfloat16()
    found, _ = under(module)
    trained = found(x).detach()
    with torch.no_grad():
        assert torch.equal(found(x), trained)
        assert torch.equal(found.eval()(x), trained)
        assert not torch.equal(module(x), trained)  # which rounds at each step


def read_twice(self: Any, x: Tensor) -> Tensor:
    active = self.act(self.gate(x))
    return self.down(active * self.up(x) + active)


def squared(self: Any, x: Tensor) -> Tensor:
    active = self.act(self.gate(x))
    return self.down(active * active)


def by_a_number(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.gate(x)) * 0.5 + self.up(x))


def called_twice(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.gate(x)) * self.up(x) + self.act(self.up(x)) * 2)


def in_place(self: Any, x: Tensor) -> Tensor:
    active = self.act(self.gate(x))
    active *= self.up(x)
    return self.down(active)


def by_a_column(self: Any, x: Tensor) -> Tensor:
    return self.down(self.act(self.gate(x)) * self.up(x).mean(-1, keepdim=True))


AS_IT_IS: dict[str, tuple[Callable[..., Tensor], nn.Module]] = {
    "read twice": (read_twice, nn.SiLU()),
    "its square": (squared, nn.SiLU()),
    "a product with a number": (by_a_number, nn.SiLU()),
    "called twice": (called_twice, nn.SiLU()),
    "a product in place": (in_place, nn.SiLU()),
    "a product with a column": (by_a_column, ACT2FN["gelu_new"]),
    "an activation in place": (with_dropout, nn.SiLU(inplace=True)),
    "another activation": (with_dropout, nn.Tanh()),
}


@pytest.mark.parametrize("capture", [True, *slow(False)])
@pytest.mark.parametrize("parts", by_default(AS_IT_IS, "a product with a column", "read twice", "a product in place"))
def test_what_is_nearly_that_has_the_bits_that_it_has_without_a_policy(
    parts: tuple[Callable[..., Tensor], nn.Module], capture: bool
) -> None:
    run, activation = parts
    module = made(lambda: Layer(run, act=copy.deepcopy(activation)))
    module.norm = nn.Identity()  # has no kernel
    found, handle = under(module, capture=capture)
    assert ("fused with the product" in handle.explain(wide=True)) is (
        run is by_a_column
    )  # whose width a trace does not tell
    for _ in range(7):
        assert_same(gradients(found, X), gradients(module, X))
    assert ("1 of 1 run as captured code" in handle.explain(wide=True)) is capture
    assert kernels_in(found) == 0


class WithAdapter(nn.Module):
    def __init__(self, linear: nn.Module):
        super().__init__()
        self.base, self.a, self.b = linear, nn.Linear(linear.in_features, 4), nn.Linear(4, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def test_an_mlp_with_adapters_keeps_the_kernel_of_its_product() -> None:
    """No kernel computes it as a whole."""

    def build() -> nn.Module:
        layer = Layer(lambda self, x: self.down(self.act(self.gate(x)) * self.up(x)))
        for name in ("gate", "up", "down"):
            setattr(layer.mlp, name, WithAdapter(getattr(layer.mlp, name)))
        return layer

    module = made(build)
    found, _ = under(module)
    for _ in range(7):
        torch.testing.assert_close(gradients(found, X), gradients(module, X))
    assert kernels_in(found) == 1


def scaled_by(factor: float) -> Callable[..., Any]:
    return lambda module, args, output: output * factor


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the activation": lambda mlp: mlp.act.register_forward_hook(scaled_by(1.5)),
    "a hook before the activation": lambda mlp: mlp.act.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "a hook on the activation's backward": lambda mlp: mlp.act.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 1.5,)
    ),
    "a hook on the MLP's backward": lambda mlp: mlp.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 1.5,)
    ),
    "a hook on up": lambda mlp: mlp.up.register_forward_hook(scaled_by(1.5)),
    "another activation": lambda mlp: setattr(mlp, "act", nn.Tanh()),
    "another form of the activation": lambda mlp: setattr(mlp.act, "approximate", "tanh"),
    "an adapter": lambda mlp: setattr(mlp, "up", WithAdapter(mlp.up)),
    "a narrower up": lambda mlp: setattr(mlp, "up", nn.Linear(HIDDEN, 1)),
    "a forward of its own": lambda mlp: setattr(mlp.act, "forward", torch.tanh),
    "no dropout": lambda mlp: setattr(mlp, "p", 0.0),
}


@pytest.mark.parametrize("when", by_default(["before", "after", "captured"], "captured"))
@pytest.mark.parametrize(
    "change", by_default(CHANGES, "a hook on the activation's backward", "another form of the activation")
)
def test_changes_of_the_parts_are_not_passed_over(change: Callable[[nn.Module], Any], when: str) -> None:
    plain = made(lambda: Layer(with_dropout, act=nn.GELU()))
    module = copy.deepcopy(plain)
    torch.manual_seed(0)
    change(plain.mlp)
    if when == "before":
        torch.manual_seed(0)
        change(module.mlp)
    recompute.apply(module, rules(rule("Layer", "recompute", via="kernel")), strict=False)
    if when == "captured":
        for _ in range(7):
            gradients(module, X)
    if when != "before":
        torch.manual_seed(0)
        change(module.mlp)
    for _ in range(7):
        torch.testing.assert_close(gradients(module, X), gradients(plain, X))


def test_a_rule_that_compresses_leaves_it_to_the_tape() -> None:
    module, x = made(lambda: Layer(with_dropout)), torch.randn(400, HIDDEN)
    steps = []
    for via in ("hook", "kernel"):
        found, handle = under(module, via, compress=True)
        gradients(found, x)
        steps.append(of_one_more(lambda found=found: found(x), handle).kept_nbytes)
    assert steps[0] == steps[1]


def test_on_the_cpu_auto_leaves_it_to_the_tape() -> None:
    module = made(lambda: Layer(with_dropout))
    found, handle = under(module, "auto")
    assert "kernel: silu, fused with the product behind it on CUDA, else" in handle.explain(wide=True)
    for _ in range(7):
        assert_same(gradients(found, X), gradients(module, X))
    assert "1 of 1 run as captured code" in handle.explain(wide=True)


@fused
def test_autocast_casts_as_it_does_without_a_policy(run: Callable[..., Tensor]) -> None:
    module = made(lambda: Layer(run))
    found, _ = under(module)
    outcomes = []
    for each in (found, module):
        for _ in range(7):
            with torch.autocast("cpu", torch.bfloat16):
                outcome = gradients(each, X)
        outcomes.append(outcome)
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).norm() <= 0.02 * other.norm()


def test_triton_gives_what_the_reference_gives(device: str) -> None:
    module = made(lambda: Layer(the_gate_second)).to(device)
    found, _ = under(module)
    torch.testing.assert_close(gradients(found, X.to(device)), gradients(module, X.to(device)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_t5_holds_what_its_tape_holds_with_its_dropout() -> None:
    batch, bytes_held = models.batch("t5"), []
    for via in ("hook", "kernel"):
        model = models.make("t5", dropout_rate=0.1)
        handle = recompute.apply(model, rules(rule("T5Block", "recompute", via=via)))
        for _ in range(8):
            torch.manual_seed(0)
            model(**batch, use_cache=False).loss.backward()
        assert ("gelu_tanh, fused with the product behind it" in handle.explain(wide=True)) is (via == "kernel")
        bytes_held.append(held(model, lambda model=model: model(**batch, use_cache=False).loss))
    assert bytes_held[1] == bytes_held[0]
