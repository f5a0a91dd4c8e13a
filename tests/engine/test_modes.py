"""Dispatch modes and torch's settings: what they see, what they count, and what is in force; bodies.around has more."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from bodies.around import ALTERING, SETTINGS, settings
from engine_testing import bits, governing, tokens
from tiny import assert_as_under, decoder, train
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import recompute
from recompute.engine import recipe_book, region_statistics, scopes

REGIONS = {
    "recompute": recompute.recompute,
    "checkpoint": recompute.recompute(policy=governing({"action": "checkpoint"}, "**")),
}
every_region = pytest.mark.parametrize("region_of", REGIONS.values(), ids=REGIONS)


class Count(TorchDispatchMode):
    """Counts ops, as modes of others do."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += 1
        return op(*args, **(kwargs or {}))


@every_region
def test_a_mode_that_counts_sees_in_forward_what_it_would_see_and_in_backward_what_runs_again(region_of):
    def chain(x):
        return (x.sin() * x.cos()).exp() * x.t().t() * x[:4].exp().sum()

    def counts(function):
        forward, backward = 0, Count()
        for _ in range(2):
            x = tokens()
            with Count() as ops, saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                y = function(x)
            forward += ops.count  # before it is in force again, around what a checkpoint runs again
            with backward:
                y.sum().backward()
        return forward, backward.count

    plain, ours = counts(chain), counts(region_of(chain))
    assert ours[0] == plain[0]
    assert ours[1] > plain[1]


@pytest.mark.parametrize("kind", ALTERING.values(), ids=ALTERING)
def test_what_ops_that_know_themselves_gave_is_not_what_a_mode_made_of_it(kind):
    x = tokens()

    def gradient(scope):
        torch.manual_seed(0)
        with scopes.RecipeScope(region_statistics.RegionStatistics("a test")) if scope else nullcontext(), kind():
            y = x.sin()
            if scope:
                recipe_book.record(y, torch.sin, x)
            z = y.exp() * y.cos()
        return bits(torch.autograd.grad(z.sum(), x)[0])

    assert gradient(True) == gradient(False)


@every_region
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_what_runs_again_runs_under_the_settings_of_its_forward(region_of, setting):
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.cos.default:
                seen.append(settings())
            return op(*args, **(kwargs or {}))

    with setting():
        y = region_of(lambda x: x.exp().cos() * x)(tokens())
        in_forward = settings()
    before = settings()
    assert before != in_forward
    with Sees():
        y.sum().backward()
    assert seen[0] == in_forward
    assert settings() == before


KEPT = {"rules": [{"match": "**.mlp", "action": "keep"}, {"match": "layers.*", "action": "recompute", "via": "hook"}]}


@pytest.mark.parametrize("policy", ["elementwise", "hook", "full", "auto", "kernel", KEPT], ids=str)
def test_a_forward_without_saved_tensor_hooks_runs_as_without_a_policy_and_says_so_once(policy):
    scopes._goes_without.cache_clear()
    plain, ours = decoder(layers=1), decoder(layers=1)
    recompute.apply(ours, policy)
    with disable_saved_tensors_hooks("no hooks here"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        expected, found = train(plain), train(ours)
    scopes._goes_without.cache_clear()
    assert len([each for each in caught if "saved-tensor hooks are disabled" in str(each.message)]) == 1
    assert_as_under(policy, found, expected)


@every_region
def test_a_backward_without_saved_tensor_hooks_leaves_them_disabled(region_of):
    result = region_of(lambda x: x.exp().cos() * x)(tokens())
    with disable_saved_tensors_hooks("no hooks here"):
        result.sum().backward()
        assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() == "no hooks here"
