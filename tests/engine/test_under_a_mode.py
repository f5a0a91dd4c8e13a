"""Under a tape, which is a dispatch mode, forward is bit for bit what it is without, whatever else is in force."""

import itertools
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch
from engine_testing import bits, both_actions, fresh, holding, policy, tokens
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recompute
from recompute.engine.cut.op_policy import op_policy
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.tape.recorder import TapeRegion
from recompute.errors import UnsupportedError
from recompute.policy.meaning import meaning_of


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
