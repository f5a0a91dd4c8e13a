"""Dispatch modes and torch's settings: what they see, what they count, and what is in force; bodies.around has more."""

import itertools
import random
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from bodies.around import ALTERING, SETTINGS, settings
from engine_testing import bits, both_actions, fresh, governing, holding, policy, tokens
from tiny import assert_as_under, decoder, train
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import recompute
from recompute.engine import recipe_book, region_statistics, scopes
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.tape.recorder import TapeRegion
from recompute.errors import UnsupportedError
from recompute.policy.meaning import meaning_of

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


# Under a tape, which is a dispatch mode, forward is bit for bit what it is without, whatever else is in force


def _autocast():
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def _autocast_and(other):
    with _autocast(), other():
        yield


AROUND = {
    "nothing": nullcontext,
    "autocast": _autocast,
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast and no_grad": lambda: _autocast_and(torch.no_grad),
    "autocast and inference mode": lambda: _autocast_and(torch.inference_mode),
}
UNSTEADY = ("empty", "new_empty", "linalg.lstsq", "jiterator")
"""Their results, or parts of them, are memory as it was, or they need CUDA."""
ROUNDS_OTHERWISE = ("linalg.svdvals", "linalg.cond", "linalg.eigvalsh", "norm.nuc")
"""Of what takes no gradients, torch computes vectors too, as soon as any mode is on: another LAPACK routine."""
CAST_INSIDE = {
    *("nn.functional.bilinear", "linalg.pinv", "linalg.pinv.hermitian"),
    *("einsum", "tensordot", "cov", "corrcoef", "linalg.matrix_power", "linalg.multi_dot"),  # under inference mode
}
"""All ops of torch of which a mode changed a sample under autocast, in torch 2.13."""


CHEAP_OPS = op_policy(meaning_of(recompute.Rule(match="**", action="recompute", via="hook")))


def name_of(info):
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def outcome(function, args, kwargs, around, tape):
    """The bits of all results and gradients, or the error."""
    args, kwargs = fresh((args, kwargs))
    torch.manual_seed(0)

    def inside(*args, **kwargs):
        with AROUND[around]():
            return function(*args, **kwargs)

    try:
        result = (
            TapeRegion(RegionStatistics("the sample"), CHEAP_OPS).run(inside, args, kwargs)
            if tape
            else inside(*args, **kwargs)
        )
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        found = [bits(leaf) for leaf in results]
        ends = [leaf for leaf in results if leaf.requires_grad and "inference" not in around]
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if ends and leaves:
            grads = torch.autograd.grad(ends, leaves, [torch.ones_like(end) for end in ends], allow_unused=True)
            found += [bits(grad) for grad in grads]
    except (RuntimeError, NotImplementedError, TypeError, IndexError, ValueError) as error:
        return [type(error)]
    return found


def sampled():
    """Those ops that are known to need something, and some others."""
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds

    infos = [info for info in op_db if torch.float32 in info.dtypes and not name_of(info).startswith(UNSTEADY)]
    known = [info for info in infos if name_of(info) in CAST_INSIDE]
    assert {name_of(info) for info in known} == CAST_INSIDE
    return known + random.Random(0).sample([info for info in infos if info not in known], 30)


@pytest.mark.slow
def test_a_sample_of_torchs_ops_under_autocast_and_other_modes():
    different = []
    for info in sampled():
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), 1):
            for around in AROUND:
                call = (info.op, (sample.input, *sample.args), sample.kwargs, around)
                if outcome(*call, tape=True) != outcome(*call, tape=False):
                    different.append((name_of(info), around))
    assert [found for found in different if found[0] not in ROUNDS_OTHERWISE] == []


@pytest.mark.parametrize("around", ["no_grad", "autocast and no_grad"])
def test_fast_paths_of_torchs_attention_in_eval_mode(around):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    for function, args in ((attention, (x, x, x)), (layer, (x,))):
        call = (function, args, {}, around)
        assert outcome(*call, tape=True) == outcome(*call, tape=False)


@both_actions
def test_what_cannot_be_told_apart_is_refused(action):
    for function in (torch.pinverse, lambda x: torch.linalg.pinv(x, rtol=1e-6)):
        model = holding(lambda self, x: function(x.float()))  # noqa: B023
        recompute.apply(model, policy(("inside", action)))
        with _autocast(), pytest.raises(UnsupportedError, match=r"^in inside.*pinverse.*enabled=False"):
            model(tokens())
        model(tokens()).sum().backward()
