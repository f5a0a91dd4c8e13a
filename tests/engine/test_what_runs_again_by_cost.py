"""An op runs again if the bytes that it brings back cost few seconds each, whatever kind of op it is."""

import copy

import pytest
import torch
from engine_testing import assert_same, module_of, outcome
from tiny import counted_ops, of_one_more
from torch import nn

import recompute

TOKENS, HEADS, SIZE = 96, 16, 8
HIDDEN = HEADS * SIZE
SQUARE_NBYTES = HEADS * TOKENS * TOKENS * 4


def attention(self, x):
    """As eager code writes it out."""
    q, k, v = (one.unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for one in self.qkv(x).chunk(3, -1))
    scores = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(self.mask, float("-inf"))
    shares = scores.softmax(-1, torch.float32).to(x.dtype)
    return self.out((shares @ v).transpose(0, 1).flatten(1))


def attention_by_hand():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return module_of(attention, qkv=nn.Linear(HIDDEN, 3 * HIDDEN), out=nn.Linear(HIDDEN, HIDDEN), mask=mask)


def biased(self, x):
    """Attention's scores, added to a bias of the positions by the GEMM that makes them, as in BLOOM."""
    heads = x.unflatten(-1, (HEADS, SIZE)).transpose(0, 1)
    return self.positions.baddbmm(heads, heads.transpose(1, 2)).softmax(-1)


def adapter(self, x):
    return self.up(self.down(x)).sin()


def per_head(self, x):
    """RMSNorm of each head, as in Qwen3."""
    heads = x.unflatten(-1, (-1, self.size))
    return heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)


def linear(columns, rows):
    return nn.Linear(columns, rows, bias=False)


def then_sin(columns, rows):
    return module_of(lambda self, x: self.linear(x).sin(), linear=linear(columns, rows))


# What runs, a tensor that it is given, an op, and how often that runs again.
CASES = {
    "attention's scores, and not what is summed over tokens": (attention_by_hand, (TOKENS, HIDDEN), "aten.bmm", 1),
    "scores and a bias in one": (
        lambda: module_of(biased, positions=torch.rand(HEADS, 1, TOKENS)), (TOKENS, HIDDEN), "aten.baddbmm", 1,
    ),
    "attention's projections": (attention_by_hand, (TOKENS, HIDDEN), "aten.addmm", 0),
    "LoRA's way up, and not its way down": (
        lambda: module_of(adapter, down=linear(64, 4), up=linear(4, 64)), (TOKENS, 64), "aten.mm", 1,
    ),
    "a router": (lambda: then_sin(64, 4), (TOKENS, 64), "aten.mm", 0),
    "a square weight": (lambda: then_sin(64, 64), (256, 64), "aten.mm", 0),
    "sums over so many that they take long": (lambda: then_sin(128, 512), (256, 128), "aten.mm", 0),
    "a mean over many": (lambda: module_of(per_head, size=128), (TOKENS, 256), "aten.mean", 0),
    "a mean over few": (lambda: module_of(per_head, size=4), (TOKENS, 256), "aten.mean", 1),
}  # fmt: skip


def under(model, **options):
    rules = [{"match": "**", "action": "recompute", "via": "hook", **options}]
    return recompute.apply(model, {"rules": rules})


def backward_ops(model, *shape):
    for _ in range(2):  # what is best to hold is known after the first step
        loss = model(torch.rand(shape, requires_grad=True)).sum()
    with counted_ops() as counts:
        loss.backward()
    return dict(counts)


def times_again(model, shape, op, **options):
    plain = backward_ops(copy.deepcopy(model), *shape).get(op, 0)
    under(model, **options)
    return backward_ops(model, *shape).get(op, 0) - plain


@pytest.mark.parametrize(("make", "shape", "op", "times"), CASES.values(), ids=CASES)
def test_what_runs_again(make, shape, op, times):
    torch.manual_seed(0)
    assert times_again(make(), shape, op) == times


@pytest.mark.parametrize("keep", ["gemm", "aten.bmm"])
def test_a_rule_that_keeps_gemms_keeps_thin_ones(keep):
    assert times_again(attention_by_hand(), (TOKENS, HIDDEN), "aten.bmm", keep=keep) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_written_out_holds_nothing_of_tokens_by_tokens_and_changes_no_bit(dtype):
    torch.manual_seed(0)
    plain = attention_by_hand().to(dtype)
    model, x = copy.deepcopy(plain), torch.rand(TOKENS, HIDDEN, dtype=dtype, requires_grad=True)
    with under(model) as handle:
        for _ in range(7):  # as ops, and then as captured code
            assert_same(outcome(model, x), outcome(plain, x))
        assert "1 of 1 run as captured code" in handle.explain()
        assert of_one_more(lambda: outcome(model, x), handle).kept_nbytes < SQUARE_NBYTES * dtype.itemsize / 4
