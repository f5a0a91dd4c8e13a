"""What runs again costs few seconds for its bytes, and runs once, however many read it."""

import copy
import functools
from contextlib import nullcontext

import pytest
import torch
from engine_testing import HIDDEN, Census, assert_same, bits, holding, module_of, outcome, policy, tokens, twins_of
from tiers import by_default, one_in
from tiny import counted_ops, of_one_more
from torch import nn

import recompute
from recompute.engine.bit_comparison import verifying

TOKENS, HEADS, SIZE = 96, 16, 8
WIDTH = HEADS * SIZE
SQUARE_NBYTES = HEADS * TOKENS * TOKENS * 4


def attention(self, x):
    """As eager code writes it out."""
    q, k, v = (one.unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for one in self.qkv(x).chunk(3, -1))
    scores = (q @ k.transpose(1, 2) / SIZE**0.5).masked_fill(self.mask, float("-inf"))
    shares = scores.softmax(-1, torch.float32).to(x.dtype)
    return self.out((shares @ v).transpose(0, 1).flatten(1))


def attention_by_hand():
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return module_of(attention, qkv=nn.Linear(WIDTH, 3 * WIDTH), out=nn.Linear(WIDTH, WIDTH), mask=mask)


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
    "attention's scores, and not what is summed over tokens": (attention_by_hand, (TOKENS, WIDTH), "aten.bmm", 1),
    "scores and a bias in one": (
        lambda: module_of(biased, positions=torch.rand(HEADS, 1, TOKENS)), (TOKENS, WIDTH), "aten.baddbmm", 1,
    ),
    "attention's projections": (attention_by_hand, (TOKENS, WIDTH), "aten.addmm", 0),
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
    assert times_again(attention_by_hand(), (TOKENS, WIDTH), "aten.bmm", keep=keep) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_written_out_holds_nothing_of_tokens_by_tokens_and_changes_no_bit(dtype):
    torch.manual_seed(0)
    plain = attention_by_hand().to(dtype)
    model, x = copy.deepcopy(plain), torch.rand(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    with under(model) as handle:
        for _ in range(7):  # as ops, and then as captured code
            assert_same(outcome(model, x), outcome(plain, x))
        assert "1 of 1 run as captured code" in handle.explain()
        assert of_one_more(lambda: outcome(model, x), handle).kept_nbytes < SQUARE_NBYTES * dtype.itemsize / 4


TAPE = policy(("inside", "recompute"))


NOT_COUNTED = ("detach", "alias", "clone", "equal", "view", "reshape", "as_strided")


class Counted(Census):
    """Counts the ops, but copies, views and comparisons, whoever runs them, and knows what memory they made."""

    __module__ = Census.__module__
    ops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops += not any(word in str(function) for word in NOT_COUNTED)
        return super().__torch_dispatch__(function, types, args, kwargs)


def repeated(step):
    return lambda x, count: functools.reduce(lambda x, _: step(x), range(count), x)


def _all_before(x, count):
    values = [x]
    for _ in range(count):
        values.append(torch.stack(values).sin().sum(0))
    return values[-1]


_diamonds = repeated(lambda x: x.sin() * x.tanh())
SHAPES = {
    "diamonds": _diamonds,
    "four branches": repeated(lambda x: torch.stack([x.sin(), x.cos(), x.tanh(), x.sigmoid()]).mean(0)),
    "a chain": repeated(lambda x: x.sin().exp()),
    "all that came before": _all_before,
    "views": repeated(lambda x: x.t().sin().t() * x[:].tanh()),
    "in place": repeated(lambda x: (x.sin() * 2).add_(x.cos()).tanh()),
}
ENDINGS = {
    "another op": (lambda y: y.sigmoid() * y, lambda y: y.exp() * y),
    "more ops": (lambda y: y.sin(), lambda y: y.sin().exp() * y),
    "fewer ops": (lambda y: y.sin().exp() * y, lambda y: y.sin()),
}
every_shape = pytest.mark.parametrize("shape", one_in(2, SHAPES))
verified = pytest.mark.parametrize("verify", by_default({"": False, "verified": True}, ""))


def branching(shape, endings):
    """A model whose region goes on as ``model.inside.turn`` says."""
    return holding(lambda self, x: endings[self.turn](shape(self.linear(x), 5)), linear=nn.Linear(HIDDEN, HIDDEN))


def run(model, turn, x):
    model.inside.turn = turn
    with Counted() as counted:
        result = model(x)
    return result, counted


def gradients(model, result, x):
    with Counted() as counted:
        found = torch.autograd.grad(result.sum(), [x, *model.parameters()], retain_graph=True)
    return [bits(grad) for grad in found], counted.ops


@every_shape
@verified
@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_a_frame_that_leaves_its_plan_and_each_backward_run_every_op_again_at_most_once(shape, ending, verify):
    (model, plain), x = twins_of(branching(shape, ending)), tokens(HIDDEN, HIDDEN)
    handle = recompute.apply(model, TAPE)
    with verifying() if verify else nullcontext():
        for turn in (0, 1, 0, 1):
            expected, forward = run(plain, turn, x)
            expected_gradients, backward = gradients(plain, expected, x)
            result, counted = run(model, turn, x)
            assert counted.ops <= 2 * forward.ops
            if not verify:
                assert counted.alive_nbytes() <= forward.alive_nbytes(), "what came back on the way is not held"
            assert bits(result) == bits(expected)
            for _ in range(2):
                found, ops = gradients(model, result, x)
                assert found == expected_gradients
                assert ops <= backward + forward.ops
    assert handle.stats().dropped_nbytes > 0


@every_shape
@verified
def test_a_graph_that_nobody_wants_costs_nothing(shape, verify):
    """One result is abandoned before the frame leaves its plan, another one after the frame."""

    def body(self, x):
        y = self.linear(x)
        shape(y, 4)
        other = shape(y + 1, 5)
        return (other.exp() * other if self.turn else other.sin()), shape(y + 2, 4)

    (model, plain), x = twins_of(holding(body, linear=nn.Linear(HIDDEN, HIDDEN))), tokens(HIDDEN, HIDDEN)
    recompute.apply(model, TAPE)
    with verifying() if verify else nullcontext():
        for turn in (0, 0, 1, 1):
            (expected, _), forward = run(plain, turn, x)
            expected_gradients, backward = gradients(plain, expected, x)
            (result, _), counted = run(model, turn, x)
            assert counted.ops <= 2 * forward.ops
            found, ops = gradients(model, result, x)
            assert found == expected_gradients
            assert ops <= backward + forward.ops


def test_a_gradient_taken_inside_of_a_frame_that_follows_its_plan_runs_every_op_again_at_most_once():
    def forward(self, x):
        y = _diamonds(self.linear(x), 5)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.exp() * slope

    (model, plain), x = twins_of(holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))), tokens(HIDDEN, HIDDEN)
    recompute.apply(model, TAPE)
    for _ in range(3):
        expected, ops = run(plain, 0, x)
        result, counted = run(model, 0, x)
        assert counted.ops <= 2 * ops.ops
        assert gradients(model, result, x)[0] == gradients(plain, expected, x)[0]
