"""Regions among other machinery: hooks, torch's checkpoint, replicas, threads, functional transforms, decorators."""

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    INSIDE,
    POLICIES,
    TOKENS,
    RMSNorm,
    Stack,
    assert_step_as_without,
    bits,
    both_actions,
    holding,
    loss_of,
    module_of,
    policy,
    tokens,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import recompute
from recompute.counters import step_memory
from recompute.engine.tape.frame import TapeFrame
from recompute.engine.tape.recorder import Tape

NESTED = policy(("layers.*", "checkpoint"), ("**.norm*", "recompute"), ("**.mlp", "recompute"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_in_the_middle_of_a_region(reentrant):
    def forward(self, x):
        y = checkpoint(lambda x: F.dropout(self.norm(x), 0.5).exp(), x * 2, use_reentrant=reentrant)
        return F.dropout(y, 0.5).sin()

    model, x = holding(forward, norm=RMSNorm()), tokens()

    def grads():
        torch.manual_seed(1)
        model.zero_grad()
        x.grad = None
        loss_of(model(x)).backward()
        return [bits(tensor.grad) for tensor in (x, *model.parameters())]

    expected = grads()
    recompute.apply(model, policy(("inside", "checkpoint"), ("inside.norm", "recompute")))
    assert grads() == expected


@pytest.mark.parametrize("rules", [*POLICIES.values(), NESTED], ids=[*POLICIES, "nested"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("way", ["is_grads_batched", "vmap"])
def test_a_vectorized_backward_gives_the_plain_gradients_or_is_refused(rules, p, way):
    model, x = Stack(count=1, p=p), tokens()
    model.layers[0].attention = model.layers[0].attention.q
    directions = torch.randn(3, TOKENS, HIDDEN)

    def grads():
        torch.manual_seed(0)
        result = model(x)
        if way == "is_grads_batched":
            return bits(torch.autograd.grad(result, x, directions, is_grads_batched=True)[0])
        backward = lambda direction: torch.autograd.grad(result, x, direction, retain_graph=True)[0]  # noqa: E731
        return bits(torch.func.vmap(backward)(directions))

    expected = grads()
    recompute.apply(model, rules)
    if p > 0 and way == "is_grads_batched" and rules is not POLICIES["recompute"]:  # below it an older vmap
        with pytest.raises(RuntimeError, match="random operations inside of vmap"):
            grads()
    else:
        assert grads() == expected


@pytest.mark.parametrize("rules", [INSIDE, policy(("norm", "recompute"))], ids=["in a region", "beside a region"])
def test_a_forward_takes_functional_gradients_for_which_nothing_is_dropped(rules):
    """torch.func takes none while saved-tensor hooks are set, so ours are taken off for that time."""

    class Inner(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda x: x.sin().sum())(x) * x

    model, x = module_of(lambda self, x: self.inside(self.norm(x)), inside=Inner(), norm=RMSNorm()), tokens()
    expected = bits(torch.autograd.grad(model(x).sum(), x)[0])
    keeping = {"rules": [{"match": "inside", "action": "keep"}, *policy(("norm", "recompute"))["rules"]]}
    for each in (rules, keeping):
        with recompute.apply(model, each):
            for _ in range(2):
                assert bits(torch.autograd.grad(model(x).sum(), x)[0]) == expected


def test_hooks_of_others_are_not_taken_off_for_functional_gradients():
    model, x = holding(lambda self, x: torch.func.grad(lambda x: x.sin().sum())(x) * x), tokens()
    with (
        recompute.apply(model, INSIDE),
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        model(x)


def test_torch_compile_takes_no_code_of_a_tape_for_what_it_calls_itself():
    """What breaks a graph inside of a region runs with torch's frontend switched on, and shows its ops to the tape."""

    @torch.compiler.disable(recursive=False)
    def skipped(x):
        return x.exp()

    compiled = torch.compile(lambda x: skipped(x.sin()).cos(), backend="eager")
    model, x = holding(lambda self, x: self.norm(compiled(self.norm(x))).cos(), norm=RMSNorm()), tokens()
    assert_step_as_without(model, policy(("inside", "recompute")), x)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    methods = (Tape.__torch_dispatch__, Tape.see, TapeFrame.follow, TapeFrame.run, TapeFrame.run_planned)
    assert [method.__name__ for method in methods if entries(method.__code__)] == []


def test_torch_compile_takes_functional_gradients_when_policies_have_been_applied():
    recompute.apply(nn.Sequential(RMSNorm()), {"rules": [{"match": "0", "action": "recompute", "via": "hook"}]})
    x = tokens()
    for take in (torch.func.grad(lambda x: x.sin().sum()), torch.func.jacrev(torch.sin)):
        assert bits(torch.compile(take, backend="eager", fullgraph=True)(x[0])) == bits(take(x[0]))


def test_functional_gradients_in_a_kept_part_of_a_region_leave_the_rest_to_the_region():
    part = module_of(
        lambda self, x: torch.func.grad(lambda x: self.linear(x).sin().sum())(x) * self.norm(x),
        **{"linear": nn.Linear(HIDDEN, HIDDEN), "norm": RMSNorm()},
    )
    forward = lambda self, x: self.after(self.part(self.before(x).exp()).sin())  # noqa: E731
    model, x = holding(forward, part=part, before=RMSNorm(), after=RMSNorm()), tokens()
    for action in ("recompute", "checkpoint"):
        for nested in ([], [{"match": "**.norm", "action": "recompute", "via": "hook"}]):
            rules = [{"match": "inside.part", "action": "keep"}, *policy(("inside", action))["rules"]]
            assert assert_step_as_without(model, {"rules": [*nested, *rules]}, x).dropped_tensors > 0


@both_actions
@pytest.mark.parametrize("where", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_a_model_on_tensors_without_values(where, action):
    with where():
        parts = {"linear": nn.Linear(HIDDEN, HIDDEN), "batch": nn.BatchNorm1d(HIDDEN), "norm": RMSNorm()}
        model = holding(lambda self, x: F.dropout(self.norm(self.batch(self.linear(x))), 0.5).exp().sin(), **parts)
        recompute.apply(model, policy(("inside.norm", action), ("inside", "checkpoint")))
        x = tokens()
        for _ in range(2):
            model(x).sum().backward()
        assert x.grad.shape == x.shape


def attend():
    """No weights, so that ``recompute`` takes it for cheap; but it runs GEMMs."""
    return module_of(lambda self, x: (x @ x.t()).softmax(-1) @ x)


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("inner", [nn.ReLU(inplace=True), attend()], ids=["in place", "costly"])
def test_what_a_region_inside_cannot_drop_is_dropped_by_the_checkpointed_one_around_it(inner):
    model, x = holding(lambda self, x: self.inner(x * 2).exp().sin(), inner=inner), tokens()

    def held(*rules):
        with recompute.apply(model, policy(*rules)):
            model(x)
            return step_memory(lambda: model(x).sum(), torch.device("cpu")).activation_bytes_held

    assert held(("inside.inner", "recompute"), ("inside", "checkpoint")) == held(("inside", "checkpoint"))
