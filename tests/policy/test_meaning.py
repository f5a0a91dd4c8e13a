"""What each rule asks of the engine: the whole table, and what follows for who asks."""

import pytest

from recompute.errors import PolicyError
from recompute.policy.meaning import Kernels, Meaning, Mechanism, meaning_of
from recompute.policy.rules import PRICE, REPEATABLE, Rule

RECOMPUTE = {"drops_outputs": True, "extends_inward": True}
ATTENTION = frozenset(["attention"])

TABLE = [
    ({"action": "keep"}, Meaning(Mechanism.KEEP, "everything is kept")),
    ({"action": "checkpoint"},
        Meaning(Mechanism.CHECKPOINT, "its Python runs again from its inputs", REPEATABLE, price=0.0, capture=True)),
    ({"action": "checkpoint", "keep": ["attention", "router"], "capture": False}, Meaning(Mechanism.TAPE,
        "all ops run again; attention, router kept", REPEATABLE, ATTENTION | {"router"}, price=0.0)),
    ({"action": "recompute"},
        Meaning(Mechanism.TAPE, "cheap ops run again", kernels=Kernels.ON_CUDA, capture=True, **RECOMPUTE)),
    ({"action": "recompute", "via": "kernel"},
        Meaning(Mechanism.TAPE, "cheap ops run again", kernels=Kernels.EVERYWHERE, capture=True, **RECOMPUTE)),
    ({"action": "recompute", "via": "hook", "rerun": ["gemm", "convolution"], "keep": "aten.mm", "price": 2e12},
        Meaning(Mechanism.TAPE, "cheap ops run again and gemm, convolution, at 2e+12 bytes a second; aten.mm kept",
        frozenset(["gemm", "convolution"]), frozenset(["aten.mm"]), 2e12, capture=True, **RECOMPUTE)),
    ({"action": "recompute", "via": "hook", "rerun": "gemm", "hold": "448MiB", "keep": "aten.mm"},
        Meaning(Mechanism.TAPE, "cheap ops run again and gemm, so that at most 448.0 MiB are held; aten.mm kept",
        frozenset(["gemm"]), frozenset(["aten.mm"]), hold=448 << 20, capture=True, **RECOMPUTE)),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "meaning"), TABLE, ids=[str(fields) for fields, _ in TABLE])
def test_what_a_rule_means(fields, meaning):
    found = meaning_of(Rule(match="**", **fields))
    assert found == meaning
    assert found.note == meaning.note


def test_where_a_rule_applies_is_no_part_of_its_meaning():
    assert meaning_of(Rule(match="a", action="keep")) == meaning_of(Rule(type="B", layers=1, action="keep"))


def test_a_tape_never_runs_a_collective_again():
    assert {"gemm", "convolution", "attention"} == REPEATABLE
    with pytest.raises(PolicyError, match="rerun: expected 'gemm', 'convolution' or 'attention'; found 'collective'"):
        Rule(match="**", action="recompute", rerun="collective")


@pytest.mark.parametrize(
    ("fields", "drops", "is_exact", "tapes_kernels"),
    [
        ({"action": "keep"}, False, True, False),
        ({"action": "checkpoint"}, True, True, True),
        ({"action": "checkpoint", "keep": "attention"}, True, True, True),
        ({"action": "recompute", "via": "hook"}, True, True, False),
        ({"action": "recompute", "via": "auto"}, True, False, False),
        ({"action": "recompute", "via": "kernel"}, True, False, False),
        ({"action": "recompute", "rerun": "gemm"}, True, False, True),
        ({"action": "recompute", "keep": "attention"}, True, False, True),
        ({"action": "recompute", "price": 2 * PRICE}, True, False, True),
        ({"action": "recompute", "hold": 0}, True, False, True),
    ],
)
def test_what_follows_from_a_meaning(fields, drops, is_exact, tapes_kernels):
    meaning = meaning_of(Rule(match="**", **fields))
    assert (meaning.has_effect, meaning.is_exact, meaning.tapes_kernels) == (drops, is_exact, tapes_kernels)
