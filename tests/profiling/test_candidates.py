"""Which ways to run a region are measured: those that prices give, a few between them by limits of bytes, no more."""

import functools
from itertools import pairwise

import models
import pytest
from tiers import by_default
from tiny import rule, rules

import recompute
from recompute.policy.loading import load_policy
from recompute.profiling import candidates
from recompute.profiling.candidates import candidates_of, recomputing_rule, rerunning_rule

FAMILIES = by_default(["llama", "gpt2", "gemma2", "bert"], "llama", "gpt2")
WHOLE = by_default(["llama", "gpt2", "gemma2"], "llama", "gpt2")
"""Those whose layers have kernels for more than norms."""
LAYER = ["*Layer", "*Block"]
ANY = rerunning_rule("kernel")["rerun"]
ON_A_TAPE = ["gpt2", "gemma2", "bert"]  # whatever the rule says


@functools.cache
def planned(name, via):
    """The plan of a layer under a rule by which everything may run again."""
    model = models.make(name, num_hidden_layers=1)
    handle = recompute.apply(model, rules(rule(LAYER, **rerunning_rule(via))))
    for _ in range(2):  # kernels learn in the first forward what reads a norm
        model(**models.batch(name))
    return list(handle.plans().values())[-1]


def ways(name, *, kernels=True):
    by_kernels = planned(name, "kernel") if kernels else None
    taped = name in ON_A_TAPE
    return candidates_of(planned(name, "hook"), by_kernels, "kernel" if kernels else None, on_a_tape=taped)


def test_an_mlp_in_tiles_is_offered_with_attention_kept_and_run_again():
    plans = planned("llama", "hook"), planned("llama", "kernel")
    usual, tiled = (candidates_of(*plans, "kernel", in_tiles=in_tiles) for in_tiles in (None, "kernel"))
    added = [one for one in tiled if one not in usual]
    assert [(one.rule or {}).get("tile") for one in added] == [candidates.TILE] * 3
    assert [(one.rule or {}).get("rerun") for one in added] == [None, ["gemm", "convolution"], ANY]
    assert min(tiled, key=lambda one: one.predicted_nbytes) is added[-1]


def told_by(key, found, via):
    return [one for one in found if one.rule is not None and key in one.rule and one.rule.get("via") == via]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_there_are_few_and_limits_fill_the_room_that_prices_leave(name, kernels):
    found = ways(name, kernels=kernels)
    by_price = [told_by("price", found, via) for via in ("hook", "kernel")]
    by_limit = [told_by("hold", found, via) for via in ("hook", "kernel")]
    assert max(map(len, by_price)) <= 8
    count = sum(map(len, by_price))
    assert 0 < sum(map(len, by_limit)) <= max(12 - count, 4)
    assert len(found) <= 5 + max(12, count + 4)
    if kernels:
        assert by_limit[0] == []  # those of hooks are missed least
    assert len({one.name for one in found}) == len(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_limits_take_no_point_from_prices(name, monkeypatch):
    found = ways(name)
    monkeypatch.setattr(candidates, "finer_frontier", lambda plan: ())
    assert [one for one in found if "hold" not in (one.rule or {})] == ways(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_two_hold_about_the_same_by_the_same_means(name):
    found = ways(name)
    for via in ("hook", "kernel"):
        some = [one for one in found if (one.rule or {}).get("via") == via and one.rule != recomputing_rule(via)]
        assert len(some) > 2
        for more, less in pairwise(some):
            assert more.predicted_nbytes > 1.01 * less.predicted_nbytes


@pytest.mark.parametrize("name", WHOLE)
def test_limits_are_where_most_is_lost_without_them(name):
    """The widest gap that prices leave is narrower with them."""

    def widest(found):
        held = [one.predicted_nbytes for one in found if (one.rule or {}).get("via") == "kernel"]
        return max(more - less for more, less in pairwise(sorted(held, reverse=True)))

    found = ways(name)
    assert widest(found) < widest([one for one in found if "hold" not in (one.rule or {})])


@pytest.mark.parametrize("name", by_default(["llama", "gpt2", "gemma2"], "llama"))
def test_a_rule_holds_what_was_predicted_also_when_it_was_written_to_a_file(name):
    some = [one for one in ways(name) if (one.rule or {}).get("via") == "kernel"]
    assert len(some) >= 5
    for one in some:
        policy = load_policy(rules(rule(LAYER, **(one.rule or {}))))
        assert ("hold" in policy.to_yaml()) == ("hold" in (one.rule or {}))
        model = models.make(name, num_hidden_layers=1)
        handle = recompute.apply(model, load_policy(policy.model_dump(mode="json")))
        for _ in range(2):
            model(**models.batch(name))
        if name in ON_A_TAPE or {"hold", "price"} & (one.rule or {}).keys():
            assert list(handle.plans().values())[-1].kept_nbytes == one.predicted_nbytes
