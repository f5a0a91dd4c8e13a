"""One table: which ops each rule lets run again, in eager code and in what ``torch.compile`` makes of it."""

import functools
from collections import Counter

import pytest
import torch
from tiers import slow
from tiny import rules
from torch import nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

import recompute


class Ops(nn.Module):
    """One op of each kind, whose output the op behind it saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 16))
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        y = (x @ self.weight).sin()
        y = torch.bmm(y[None, :, :2], y[None, :2])[0].sin()
        y = self.convolution(y[None])[0].sin()
        heads = y.view(1, 16, 2, 8).transpose(1, 2)
        heads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)[0]
        y = heads.transpose(1, 2).reshape(16, 16).sin()
        y = y.exp2().sin()
        y = recompute.keep((y + self.weight).erf(), "router").sin()
        return (torch.full_like(y, 2.0) * self.weight * y).sin()


GEMM, CONVOLUTION, ATTENTION = "aten.mm", "aten.convolution", "aten._scaled_dot_product_flash_attention_for_cpu"
CHEAP, THIN, NAMED, FACTORY = "aten.exp2", "aten.bmm", "aten.erf", "aten.full_like"
COSTLY = {GEMM, CONVOLUTION, ATTENTION}
ALL = {*COSTLY, CHEAP, THIN, NAMED, FACTORY}
HOOK = {"action": "recompute", "via": "hook"}

# On purpose, eager and compiled code differ in one thing: a tape keeps what a factory makes, as something that it does
# not see may fill it (a Triton kernel, NumPy); in compiled code all that writes to it is an op of the graph.
TABLE = [
    # the rule, and what runs again in eager code, and in compiled code
    ({"action": "keep"}, set(), set()),
    ({"action": "checkpoint"}, ALL, ALL),
    ({"action": "checkpoint", "keep": "attention"}, ALL - {ATTENTION, FACTORY}, ALL - {ATTENTION}),
    ({"action": "checkpoint", "keep": ["aten.mm", "router"]}, ALL - {GEMM, NAMED, FACTORY}, ALL - {GEMM, NAMED}),
    (HOOK, {CHEAP, THIN, NAMED}, {CHEAP, THIN, NAMED, FACTORY}),
    ({**HOOK, "keep": ["gemm", "router"]}, {CHEAP}, {CHEAP, FACTORY}),
    ({**HOOK, "rerun": "gemm"}, {CHEAP, THIN, NAMED, GEMM}, {CHEAP, THIN, NAMED, GEMM, FACTORY}),
    ({**HOOK, "rerun": ["gemm", "convolution", "attention"], "price": 0.0}, ALL - {FACTORY}, ALL),
    (
        {**HOOK, "rerun": ["gemm", "attention"], "keep": ["convolution", "aten.exp2"], "price": 0.0},
        {GEMM, THIN, ATTENTION, NAMED},
        {GEMM, THIN, ATTENTION, NAMED, FACTORY},
    ),
    ({**HOOK, "rerun": ["gemm", "convolution", "attention"], "price": 1e20}, set(), set()),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class CountOps(TorchDispatchMode):
    """Counts ops, also one that a compiler has wrapped so that it runs again with the random state of its forward."""

    __module__ = "recompute.testing"  # the engine trusts it then, as it does torch's own modes, and shows it all
    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        inner = args[1] if isinstance(op, HigherOrderOperator) else op  # of run_with_rng_state(state, op, *args)
        self.counts[str(inner.overloadpacket)] += 1
        return op(*args, **(kwargs or {}))


def backward_ops(fields, *, compiled=False):
    """How often each op runs in a backward of ``Ops`` under a rule."""
    torch.manual_seed(0)
    model = nn.Sequential(Ops())
    recompute.apply(model, rules({"match": "0", **fields}))
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        loss = model(torch.rand(16, 16)).sum()
    with CountOps() as mode:
        loss.backward()
    return mode.counts


@functools.cache
def plain_ops():
    return backward_ops({"action": "keep"})


@pytest.mark.parametrize(
    ("fields", "eager", "compiled"),
    [*TABLE[:2], *slow(*TABLE[2:4]), TABLE[4], *slow(TABLE[5]), TABLE[6], *slow(*TABLE[7:])],
    ids=[str(fields) for fields, *_ in TABLE],
)
def test_what_runs_again(fields, eager, compiled):
    plain = plain_ops()
    assert ALL & {*(backward_ops(fields) - plain)} == eager
    assert ALL & {*(backward_ops(fields, compiled=True) - plain)} == compiled
