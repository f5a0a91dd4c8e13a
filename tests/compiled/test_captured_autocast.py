"""Captured regions under autocast, whose casts of parameters are shared by all who read these in its span."""

import functools
from contextlib import nullcontext

import models
import pytest
import torch
import torch.nn.functional as F
from capture_testing import ROWS, SIZE, STEPS_TO_SETTLE, Around, Twins, a_block, body, fresh, linear, stepping, tokens
from engine_testing import RMSNorm, assert_same, loss_of
from tiers import by_default, slow
from torch import nn

import recompute
from recompute import counters


def bfloat16(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def under_autocast(x, forward=None, *, inside=False, **options):
    """A step whose forward runs under autocast; inside: and its backward, too."""
    around = functools.partial(bfloat16, **options)
    call = forward or (lambda module, x: module(x))
    return stepping(x, call, forward=around, backward=around if inside else nullcontext)


def around(inside):
    return Around(inside, before=linear(), after=linear())


def mlp():
    """Reads its input in two products, and a weight in two, too."""
    forward = lambda self, x: self.down(F.silu(self.gate(x)) * self.up(x)) + self.up(x)  # noqa: E731
    return body(forward, gate=linear(), up=nn.Linear(SIZE, SIZE, bias=False), down=linear())


def products():
    """Each kind of a convolution, and of a product."""

    def forward(self, x):
        rows = F.gelu(self.line(x.unsqueeze(1))).transpose(0, 1)
        y = torch.bmm(F.gelu(self.plane(rows)), self.mixed)
        y = F.gelu(self.volume(y.reshape(1, 1, 2, 2, SIZE))).reshape(ROWS, SIZE)
        return y * (y @ self.vector).unsqueeze(1)

    parts = {"mixed": nn.Parameter(torch.randn(1, SIZE, SIZE)), "vector": nn.Parameter(torch.randn(SIZE))}
    kinds = {"line": nn.Conv1d(1, 2, 3, padding=1), "plane": nn.Conv2d(2, 1, 3, padding=1)}
    return body(forward, **parts, **kinds, volume=nn.Conv3d(1, 1, 3, padding=1))


INSIDE = {"block": a_block, "norm": RMSNorm, "mlp": mlp, "products": products}


@pytest.mark.parametrize("action", ["recompute", *slow("checkpoint")])
@pytest.mark.parametrize("inside", by_default(INSIDE, "mlp", "products"))
def test_regions_are_captured_and_give_the_bits_of_eager(inside, action):
    x = tokens(grad=False)
    rules = {"rules": [{"match": "inside", "action": action}]}
    Twins(around(inside()), rules).settle(under_autocast(x))


@pytest.mark.parametrize("is_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("caches", [True, False], ids=["cache", "no cache"])
def test_wherever_backward_runs_and_whatever_is_cached(x, is_inside, caches):
    twins = Twins(around(mlp())).settle(under_autocast(x, inside=is_inside, cache_enabled=caches))
    twins.step(under_autocast(x, inside=not is_inside))  # it moves into autocast, or out of it
    twins.step(under_autocast(x, inside=is_inside))


def test_another_autocast_has_code_of_its_own(x):
    in_float16 = stepping(x, forward=functools.partial(torch.autocast, "cpu", torch.float16))
    twins = Twins(around(a_block())).settle(under_autocast(x))
    twins.settle(in_float16)
    assert twins.runs_code(under_autocast(x)) == 1
    assert twins.runs_code(in_float16) == 1


SHARED = {
    "the region, twice": lambda module, x: module(x) + module(x.flip(0)),
    "other code, before": lambda module, x: F.linear(x, module.inside.up.weight) + module(x),
    "other code, afterwards": lambda module, x: F.linear(module(x), module.inside.up.weight),
}


@pytest.mark.parametrize("forward", SHARED.values(), ids=SHARED)
def test_a_cast_is_shared_with_all_who_read_the_parameter(x, forward):
    """Its gradients are added up in bfloat16, and only then cast: other bits than those of two casts."""
    twins = Twins(around(mlp())).settle(under_autocast(x))
    assert twins.runs_code(under_autocast(x, forward)) >= 1


def test_a_leaf_is_cast_once_and_what_was_computed_wherever_it_is_read(x):
    twins = Twins(Around(mlp())).settle(under_autocast(x))
    of_a_product = under_autocast(x, lambda module, given: module(given * 1.0))
    twins.step(of_a_product)
    twins.settle(of_a_product)
    twins.step(under_autocast(x))


@pytest.mark.parametrize("way", ["a second backward", "differentiated gradients", "one output's gradient"])
def test_other_backwards(x, way):
    def step(module):
        given = fresh(x)
        with bfloat16():
            loss = loss_of(module(given))
        wanted = [given, *module.parameters()]
        if way == "a second backward":
            loss.backward(retain_graph=True)
            loss.backward()
            return [given.grad]
        if way == "one output's gradient":
            return [*torch.autograd.grad(loss, [module.inside.up.weight])]
        gradients = torch.autograd.grad(loss, wanted, create_graph=True)
        return [*torch.autograd.grad(sum(each.square().sum() for each in gradients), wanted, allow_unused=True)]

    twins = Twins(around(a_block())).settle(under_autocast(x))
    if way == "differentiated gradients":
        with pytest.warns(recompute.errors.PolicyWarning, match="create_graph=True"):
            plain, under = (step(module) for module in (twins.plain, twins.under))
        for expected, found in zip(plain, under, strict=True):
            if expected is not None:
                assert (found - expected).norm() <= 0.02 * expected.norm()  # both round to bfloat16
    else:
        twins.step(step)


def test_a_region_holds_no_cast_of_a_weight():
    """Autograd would hold each weight in bfloat16 until backward. A cast is cheap: it is made again."""
    width = 64
    x = torch.randn(4, width, requires_grad=True)
    held = {}
    for options in ({"action": "keep"}, {"capture": False}, {}):
        model = nn.Sequential(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8))))
        recompute.apply(model, {"rules": [{"match": "0", "action": "recompute", **options}]}, strict=False)
        step = under_autocast(x)
        for _ in range(STEPS_TO_SETTLE):
            step(model)

        def loss(model=model):
            with bfloat16():
                return model(x).float().sum()

        held[str(options)] = counters.step_memory(loss, torch.device("cpu")).activation_bytes_held
    plain, taped, captured = held.values()
    assert plain - taped >= 8 * width * width * 2
    assert captured <= taped


@pytest.mark.parametrize("policy", by_default(["elementwise", "full", "hook", "auto"], "elementwise"))
@pytest.mark.parametrize("name", by_default(["llama", "gpt2", "mixtral"], "llama"))
def test_whole_models_train_as_without_a_policy(name, policy):
    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        found = []
        for _ in range(8):
            with bfloat16():
                loss = model(**models.batch(name)).loss
            loss.backward()
            found += [loss.detach(), *[each.grad.clone() for each in model.parameters() if each.grad is not None]]
            optimizer.step()
            optimizer.zero_grad()
        return found

    expected = trained(models.make(name))
    model = models.make(name)
    handle = recompute.apply(model, policy)
    assert_same(dict(enumerate(trained(model))), dict(enumerate(expected)))
    assert "captured code" in str(handle.explain(wide=True))
