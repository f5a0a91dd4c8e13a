"""Tensors that change in place: inside of a captured region, and between its forward and its backward."""

import pytest
import torch
import torch.nn.functional as F
from capture_testing import SIZE, Around, Block, Twins, body, captured_twins, fresh, linear, train
from engine_testing import loss_of
from tiers import by_default

LARGE = 1 << 18
"""Elements of a buffer that is not copied."""


def between(x, change):
    """A step in which ``change(module, input, output)`` happens between forward and backward, and is taken back."""

    def step(module):
        given = fresh(x)
        z = given * 1
        y = module.inside(z)
        before = [(p, p.data, p.detach().clone()) for p in module.parameters()]
        with torch.no_grad():
            change(module, z, y)
        try:
            loss_of(y).backward()
        finally:
            with torch.no_grad():
                for parameter, data, copy in before:
                    parameter.data = data
                    data.copy_(copy)
        return [y, given.grad]

    return step


def assert_both_refuse(twins, step):
    for module in (twins.plain, twins.under):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|modified in place"):
            step(module)


REFUSED = {
    "input": lambda m, x, y: x.mul_(2),
    "weight": lambda m, x, y: m.inside.up.weight.mul_(2),
    "weight of a product": lambda m, x, y: m.inside.weight.mul_(2),
    "view of a weight": lambda m, x, y: m.inside.down.weight[0].zero_(),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_what_plain_pytorch_refuses_is_refused(x, change):
    twins = captured_twins(Block(), x)
    assert_both_refuse(twins, between(x, change))
    assert twins.runs_code(train(x)) == 1


@pytest.mark.parametrize("activation", [torch.sigmoid, torch.tanh, torch.exp, lambda x: F.softmax(x, -1).view(2, -1)])
def test_an_output_that_the_region_keeps_may_not_change(x, activation):
    forward = lambda self, x: activation(self.lin(x))  # noqa: E731
    twins = Twins(Around(body(forward, lin=linear()))).settle(train(x))
    assert_both_refuse(twins, between(x, lambda m, x, y: y.mul_(2)))


PERMITTED = {
    "output": lambda m, x, y: y.mul_(2),
    "bias": lambda m, x, y: m.inside.up.bias.mul_(2),
    "part of an output": lambda m, x, y: y[1:].zero_(),
}


@pytest.mark.parametrize("change", PERMITTED.values(), ids=PERMITTED)
def test_what_plain_pytorch_permits_is_right(x, change):
    twins = captured_twins(Block(), x)
    for _ in range(2):
        assert twins.runs_code(between(x, change)) == 1


@pytest.mark.parametrize(
    "name",
    by_default(
        ["weight", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias", "all of them"],
        "weight",
        "norm.bias",
        "up.weight",
        "all of them",
    ),
)
def test_the_data_of_a_parameter_is_replaced_before_backward(x, name):
    """Autograd reads what is new, but where it has saved a view; what runs again reads what was there."""

    def change(module, x, y):
        names = [each for each, _ in module.inside.named_parameters()] if name == "all of them" else [name]
        for each in names:
            parameter = module.inside.get_parameter(each)
            parameter.data = parameter.data * 2 + 1

    twins = captured_twins(Block(), x)
    for _ in range(2):
        assert twins.runs_code(between(x, change)) == 1


@pytest.mark.parametrize("size", [SIZE, LARGE], ids=["small", "large"])
def test_buffers(x, size):
    """Plain PyTorch minds a change of one that it saved, and of no other."""
    reads = body(lambda self, x: F.gelu(self.lin(x) + self.shift[:SIZE]), lin=linear())
    saves = body(lambda self, x: F.gelu(self.lin(x)) * self.shift[:SIZE], lin=linear())

    def change(module, x, y):
        module.inside.shift.add_(1)

    for module in (reads, saves):
        module.register_buffer("shift", torch.rand(size))
    twins = captured_twins(reads, x)
    for _ in range(2):
        assert twins.runs_code(between(x, change)) == 1
    assert_both_refuse(captured_twins(saves, x), between(x, change))
