"""What custom Functions write to: what one only reads comes back by ops that run again, whatever others do."""

import copy
import ctypes
from typing import Any

import pytest
import torch
from corpus import nothing
from engine_testing import assert_same, holding, outcome, tokens, weak
from tiers import by_default
from torch import nn
from torch.autograd import Function

import recompute
from recompute.engine.tape.function_writes import FIRST_RUNS, checksum
from recompute.engine.tape.functions import make_whole

STEPS = 12


class Turn:
    """Which step it is. No graph depends on it."""

    step = 0


def write(target, values):
    """As a kernel does: no version tells."""
    assert values.is_contiguous()
    ctypes.memmove(target.data_ptr(), values.data_ptr(), target.nbytes)


def write_at(step):
    return lambda ctx, x: write(x, x * 2) if Turn.step == step else None


def save(ctx, x):
    ctx.save_for_backward(x.t())


def overwrite_what_was_saved(ctx):
    for tensor in (*ctx.saved_tensors, *getattr(ctx, "held", ())):
        write(tensor.t() if tensor.t().is_contiguous() else tensor, torch.rand(tensor.numel()))


def read_what_was_saved(ctx):
    assert all(tensor.isfinite().all() for tensor in ctx.saved_tensors)


ACTS = {
    "reads": (nothing, read_what_was_saved, True),
    "hands an address to a kernel": (lambda ctx, x: x.data_ptr(), read_what_was_saved, True),
    "hands memory out": (lambda ctx, x: x.numpy().sum(), read_what_was_saved, False),
    "writes unseen": (lambda ctx, x: write(x, x * 2), read_what_was_saved, False),
    "moves what is there": (lambda ctx, x: write(x, x.flip(0).contiguous()), read_what_was_saved, False),
    "writes in its second run": (write_at(1), read_what_was_saved, False),
    "writes in its last run, by an op": (
        lambda ctx, x: x.mul_(2) if Turn.step == STEPS - 1 else None, read_what_was_saved, False,
    ),
    "saves": (save, read_what_was_saved, True),
    "saves, and writes there": (save, overwrite_what_was_saved, False),
    "saves, and writes there in its second run": (
        save, lambda ctx: overwrite_what_was_saved(ctx) if Turn.step == 1 else None, False,
    ),
    "holds": (lambda ctx, x: setattr(ctx, "held", [x.view(-1)]), overwrite_what_was_saved, False),
}  # fmt: skip


def function_that(act, act_in_backward=read_what_was_saved):
    class Acts(Function):
        given: Any

        @staticmethod
        def forward(ctx, x):
            act(ctx, x)
            Acts.given = weak(x)
            return x.cumsum(0)

        @staticmethod
        def backward(ctx, gradient):
            saved = sum(tensor.sum() for tensor in ctx.saved_tensors)
            act_in_backward(ctx)
            return gradient * (2 + saved)

    make_whole(Acts)  # it is found by its code, which is the same each time that this is called
    return Acts


@pytest.mark.filterwarnings("ignore:The given NumPy array")
@pytest.mark.parametrize("capture", by_default({"by the tape": False, "captured": True}, "captured"))
@pytest.mark.parametrize(("act", "act_in_backward", "comes_back"), ACTS.values(), ids=ACTS)
def test_what_a_function_leaves_as_it_is_comes_back(act, act_in_backward, comes_back, capture):
    """What comes before the Function and what comes after it read the same tensor."""
    function = function_that(act, act_in_backward)

    def forward(self, x):
        h = self.lin(x).sigmoid() * 3
        before = h.tanh()
        return function.apply(h) * h.sin() + before

    plain = holding(forward, lin=nn.Linear(8, 8))
    under, x = copy.deepcopy(plain), tokens(6, 8)
    with recompute.apply(under, {"rules": [{"match": "inside", "action": "recompute", "capture": capture}]}):
        for Turn.step in range(STEPS):
            assert_same(outcome(under, x), outcome(plain, x))
        y = under(x)
        assert function.given.expired() is comes_back
    del y


def test_a_sum_of_bytes_tells_any_word_and_any_order():
    memory = torch.randint(0, 256, (8 * (1 << 18) + 8 * 5 + 3,), dtype=torch.uint8)
    known = {checksum(memory)}
    for position in (0, 9, 8 * (1 << 18) + 1, -1):
        other = memory.clone()
        other[position] += 1
        known.add(checksum(other))
    words = memory[: 8 * (1 << 18)].view(torch.int64)
    known |= {checksum(words.flip(0).view(torch.uint8)), checksum(words.view(torch.uint8))}
    assert len(known) == 7


def test_what_was_learned_in_the_first_runs_is_not_compared_again(monkeypatch):
    sums = []
    real = checksum
    monkeypatch.setattr(
        "recompute.engine.tape.function_writes.checksum", lambda memory: (sums.append(memory), real(memory))[1]
    )
    function = function_that(nothing)
    module = holding(lambda self, x: function.apply(x.sin()).exp())
    recompute.apply(module, {"rules": [{"match": "inside", "action": "recompute", "capture": False}]})
    for _ in range(FIRST_RUNS + 3):
        module(tokens(6, 8)).sum().backward()
    assert 0 < len(sums) <= 2 * FIRST_RUNS
