"""Regions among other machinery: hooks, torch's checkpoint, replicas, threads, functional transforms, decorators."""

import engine_testing
import pytest
import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, INSIDE, POLICIES, TOKENS, RMSNorm, Stack, bits, holding, module_of, policy, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import recompute
from recompute.counters import step_memory
from recompute.engine.tape.frame import TapeFrame
from recompute.engine.tape.recorder import Tape

NESTED = policy(("layers.*", "checkpoint"), ("**.norm*", "recompute"), ("**.mlp", "recompute"))


@pytest.mark.parametrize("rules", [POLICIES["checkpoint"], NESTED], ids=["checkpoint", "nested"])
def test_a_vectorized_backward_that_would_draw_again_is_refused(rules):
    model, x = Stack(count=1, p=0.5), tokens()
    model.layers[0].attention = model.layers[0].attention.q
    recompute.apply(model, rules)
    with pytest.raises(RuntimeError, match="random operations inside of vmap"):
        torch.autograd.grad(model(x), x, torch.randn(3, TOKENS, HIDDEN), is_grads_batched=True)


KEPT = {"rules": [{"match": "inside", "action": "keep"}, *policy(("norm", "recompute"))["rules"]]}


@pytest.mark.parametrize("rules", [INSIDE, policy(("norm", "recompute")), KEPT], ids=["inside", "beside", "kept"])
def test_a_forward_takes_functional_gradients_for_which_nothing_is_dropped(rules):
    """torch.func takes none while saved-tensor hooks are set, so ours are taken off for that time."""
    inside = module_of(lambda self, x: torch.func.grad(lambda x: x.sin().sum())(x) * x)
    model = module_of(lambda self, x: self.inside(self.norm(x)), inside=inside, norm=RMSNorm())
    engine_testing.assert_step_as_without(model, rules, tokens(), drops=False)


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
    engine_testing.assert_step_as_without(model, policy(("inside", "recompute")), x)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    methods = (Tape.__torch_dispatch__, Tape.see, TapeFrame.follow, TapeFrame.run, TapeFrame.run_planned)
    assert [method.__name__ for method in methods if entries(method.__code__)] == []


def test_torch_compile_takes_functional_gradients_when_policies_have_been_applied():
    recompute.apply(nn.Sequential(RMSNorm()), {"rules": [{"match": "0", "action": "recompute", "via": "hook"}]})
    x = tokens()
    for take in (torch.func.grad(lambda x: x.sin().sum()), torch.func.jacrev(torch.sin)):
        assert bits(torch.compile(take, backend="eager", fullgraph=True)(x[0])) == bits(take(x[0]))


@engine_testing.both_actions
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
