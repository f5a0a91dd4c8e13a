"""What modules are made of: statistics, flags, parameters frozen, swapped, sharded, lazy, borrowed or updated."""

import pytest
import torch
import torch.nn.functional as F
from bodies.modules import averages
from engine_testing import (
    HIDDEN,
    INSIDE,
    TOKENS,
    Holder,
    assert_as_without,
    assert_step_as_without,
    bits,
    both_actions,
    function_of,
    governing,
    holding,
    loss_of,
    module_of,
    policed,
    policy,
    set_by,
    tokens,
    twins_of,
    weak,
)
from tiny import counted_ops
from torch import nn

import recompute
from recompute.errors import MutationError, UnsupportedError

# Statistics and flags


class Counting(nn.Module):
    """Changes a buffer in those runs only in which it is told to."""

    def __init__(self, size=HIDDEN):
        super().__init__()
        self.register_buffer("seen", torch.ones(size))
        self.linear, self.counts = nn.Linear(HIDDEN, HIDDEN), False

    def forward(self, x):
        if self.counts:
            self.seen.add_(1.0)
        return (self.linear(x) * self.seen.mean()).exp().sin()


def test_a_large_buffer_that_changes_between_forward_and_backward_is_refused_by_name():
    model = policed(holding(lambda self, x: self.part(x), part=Counting(1 << 15)))
    for _ in range(2):
        result = model(tokens())
        model.inside.part.seen.add_(1.0)
        with pytest.raises(MutationError, match=r"part\.seen.* modified in place between forward and backward"):
            result.sum().backward()


def test_small_buffers_that_nobody_changes_are_copied_once_for_all_runs():
    model, x = policed(holding(lambda self, x: self.part(x), part=Counting())), tokens()
    with counted_ops() as counts:
        for _ in range(3):
            model(x).sum().backward()
    assert counts["aten.clone"] == 1


def test_freezing_a_weight_between_forward_and_backward_changes_nothing():
    def run(model):
        first = model.inside.first.weight.requires_grad_(True)
        loss = loss_of(model(x))
        first.requires_grad_(False)
        return torch.autograd.grad(loss, [x, *model.inside.second.parameters()])

    parts, x = {name: nn.Linear(HIDDEN, HIDDEN) for name in ("first", "second")}, tokens(HIDDEN, HIDDEN)
    assert_as_without(holding(lambda self, x: self.second(self.first(x).exp()), **parts), INSIDE, run)


SavesTheWeightItself = function_of(
    lambda x, weight: x @ weight.t(), lambda gradient, x, weight: (gradient @ weight, gradient.t() @ x)
)
"""A linear layer that saves no view of its weight, which would keep the gathered memory alive."""


class Sharded(nn.Module):
    """A linear layer whose weight exists only while it runs, as sharding optimizers do it."""

    def __init__(self, how):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.shard, self.how = self.weight.detach().clone(), how
        self.references = []
        self.register_forward_pre_hook(lambda module, args: module.gather())
        self.register_forward_hook(lambda module, args, result: module.free())
        self.register_full_backward_pre_hook(lambda module, gradient: module.gather())
        self.free()

    def gather(self):
        if self.how == "data":
            self.weight.data = self.shard.clone()
            self.references.append(weak(self.weight))
        else:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.weight):
                self.weight.untyped_storage().resize_(self.shard.untyped_storage().nbytes())
                self.weight.copy_(self.shard)

    def free(self):
        if self.how == "data":
            self.weight.data = torch.empty(0)
        else:
            self.weight.untyped_storage().resize_(0)

    def forward(self, x):
        return SavesTheWeightItself.apply(x, self.weight)


@pytest.mark.parametrize("how", ["data", "storage"])
@pytest.mark.parametrize("which", ["the layer", "around the layer"])
def test_weights_that_are_gathered_for_each_run_and_freed_after_it(how, which):
    """How ZeRO-3 (``param.data``) and FSDP2 (the storage) keep memory down: both run under torch's checkpoint."""
    inside = holding(lambda self, x: self.linear(x.exp()).sin(), linear=Sharded(how))
    linear, x = inside.inside.linear, tokens()

    def run():
        result = inside(x)
        held = [reference for reference in linear.references if not reference.expired()]
        assert not held, "a gathered weight is freed after forward"
        grads = torch.autograd.grad(result.sum(), x)
        linear.free()
        return [bits(grad) for grad in grads]

    expected = run()
    path = "inside.linear" if which == "the layer" else "inside"
    recompute.apply(inside, policy((path, "checkpoint")))
    assert run() == expected


def test_lazy_modules_are_refused_until_they_have_their_shapes():
    model, x = holding(lambda self, x: self.linear(x).sin(), linear=nn.LazyLinear(4)), tokens()
    with pytest.raises(UnsupportedError, match=r"inside\.linear.*uninitialized parameters.*Run the model once"):
        policed(model)
    model(x)
    assert_step_as_without(model, INSIDE, x)


def weighted(end=lambda y: y):
    """Uses one weight as it is, and another by a view."""
    part = module_of(
        lambda self, x: (self.linear(x.exp()) * torch.cos(x)).sin() + self.scale * x.sin(),
        scale=nn.Parameter(torch.rand(HIDDEN)),
        linear=nn.Linear(HIDDEN, HIDDEN),
    )
    return holding(lambda self, x: end(self.part(x)), part=part)


def replace(parameter):
    parameter.data = torch.rand_like(parameter)


CHANGES = {
    "data": replace,
    "data twice": lambda each: (replace(each), replace(each)),  # perhaps by what lies where the original lay
    "swapped": lambda each: torch.utils.swap_tensors(each, nn.Parameter(torch.rand_like(each))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["linear.weight", "linear.bias", "scale"])
def test_a_checkpoint_refuses_a_parameter_whose_data_has_been_replaced_and_names_it(name, change):
    model = policed(weighted())
    for _ in range(2):
        result = model(tokens())
        CHANGES[change](model.get_parameter(f"inside.part.{name}"))
        with pytest.raises(
            MutationError, match=rf"^in inside \(Body\): part\.{name}, .* other data \(parameter\.data = "
        ):
            result.sum().backward()


def test_data_that_is_put_back_before_backward_or_replaced_by_itself_is_no_change():
    model = policed(weighted())
    x, part = tokens(), model.inside.part
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    result = model(x)
    old = part.linear.weight.data
    part.linear.weight.data = torch.rand_like(old)
    part.linear.weight.data = old
    model.to("cpu").float()
    assert bits(torch.autograd.grad(result.sum(), x)[0]) == bits(expected)


@both_actions
def test_moving_a_model_by_swapping_its_parameters_works_after_a_step(action):
    """``Module.to`` may do so, and refuses parameters that anything refers to weakly."""
    model, x = policed(weighted(), action), tokens()
    model(x).sum().backward()
    with set_by(torch.__future__.set_swap_module_params_on_conversion, True, False):
        model.double()
    (found,) = torch.autograd.grad(model(x.double()).sum(), x)
    assert found.dtype is torch.float32


def norms_by_hand(self, x):
    """Writes to its statistics by a kernel that counts no version, and only in later runs."""
    self.runs += 1
    return F.batch_norm(x, self.mean, self.variance, training=True) if self.runs > 3 else x * 2


def with_statistics(forward):
    module = module_of(forward, runs=0)
    module.register_buffer("mean", torch.zeros(HIDDEN))
    module.register_buffer("variance", torch.ones(HIDDEN))
    return module


@pytest.mark.parametrize("capture", [False, True], ids=["not captured", "captured"])
@pytest.mark.parametrize("forward", [None, norms_by_hand, averages])
def test_a_buffer_that_forward_writes_but_whose_value_is_the_same_at_first_is_written_once(forward, capture):
    norm = nn.BatchNorm1d(HIDDEN) if forward is None else with_statistics(forward)
    governed, plain = twins_of(Holder(nn.Sequential(norm, nn.Tanh())))
    recompute.apply(governed, governing({"action": "checkpoint", "capture": capture}))
    other = tokens()
    for step in range(7):
        x = torch.zeros(TOKENS, HIDDEN, requires_grad=True) if step < 3 else tokens()
        found = []
        for model in (plain, governed):
            loss = model(x).sum()
            model(other).sum().backward()  # between the other's forward and its backward
            found.append([*torch.autograd.grad(loss, x), *model.buffers()])
        assert [*map(bits, found[0])] == [*map(bits, found[1])], f"step {step}"


# Parameters whose memory a library gives them for each use: they are held by the object that they are


def gradient_of_managed(action, *, is_partitioned):
    """The gradient of the input where the weight gets other memory after forward, and the plain one."""
    model = holding(lambda self, x: torch.exp(x @ self.linear.weight.t()), linear=nn.Linear(HIDDEN, HIDDEN))
    weight, x = model.inside.linear.weight, tokens()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    recompute.apply(model, policy(("inside", action)))
    if is_partitioned:
        weight.ds_id = 0
    result = model(x).sum()
    before = weight.data
    weight.data = before.clone()
    before.zero_()
    (found,) = torch.autograd.grad(result, x)
    return found, expected


@both_actions
def test_backward_reads_a_managed_parameter_where_its_memory_is_then(action):
    found, expected = gradient_of_managed(action, is_partitioned=True)
    assert bits(found) == bits(expected)


def test_backward_reads_any_other_parameter_where_its_memory_was():
    found, expected = gradient_of_managed("recompute", is_partitioned=False)
    assert bits(found) != bits(expected), "as in plain PyTorch, which holds the memory of a view"
