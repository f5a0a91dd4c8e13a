"""What one op policy says of ops that a tape and a compiler treat differently, and who shares one."""

import pytest
import torch

from recompute.engine.cut.op_policy import op_policy
from recompute.policy.meaning import meaning_of
from recompute.policy.rules import Rule

aten = torch.ops.aten


def policy(**fields):
    return op_policy(meaning_of(Rule(match="**", **fields)))


RECOMPUTE = policy(action="recompute", via="hook")
ALL_BUT_SILU = policy(action="checkpoint", keep="aten.silu")
X = torch.ones(2, 2)
STATISTICS = (X, None, None, torch.zeros(2), torch.ones(2), True, 0.1, 1e-5)


@pytest.mark.parametrize(
    ("op", "args", "eager", "compiled"),
    [
        (aten.sin.default, (X,), True, True),
        (aten.native_dropout.default, (X, 0.5, True), True, True),
        (aten.mm.default, (X, X), False, False),
        (aten.nonzero.default, (X,), False, False),  # the shape of its output depends on data
        (aten.index_put.default, (X, [torch.tensor([0])], X[0]), False, False),  # not known to be deterministic
        (torch.ops._c10d_functional.all_reduce.default, (X, "sum", ""), False, False),
        # In eager code a kernel may fill a factory's output unseen. In compiled code all that writes is an op.
        (aten.zeros_like.default, (X,), False, True),
        # A tape runs batch norm again without its statistics (see ``Tape._prepare``); a compiler has made them outputs.
        (aten.native_batch_norm.default, STATISTICS, False, True),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_which_ops_may_run_again(op, args, eager, compiled):
    decision = RECOMPUTE.decide(op)
    assert (decision.reason == "") == eager
    assert RECOMPUTE.decisions[op] is decision
    assert RECOMPUTE.may_rerun_compiled(op, args, {}) == compiled


def test_rules_that_say_the_same_of_ops_share_one_policy():
    assert policy(action="recompute", via="kernel", capture=False) is RECOMPUTE
    assert policy(action="checkpoint", keep=["aten.silu"]) is ALL_BUT_SILU
    assert policy(action="recompute", price=2.0) is not policy(action="recompute", price=3.0)
    assert policy(action="recompute", hold=2) is not policy(action="recompute", hold=3)
    assert policy(action="checkpoint") is not policy(
        action="recompute", rerun=["gemm", "convolution", "attention"], price=0.0
    )
