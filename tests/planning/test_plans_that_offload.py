"""Plans that offload: which choices are derived, what the host has room for, and whether the bytes are as predicted."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import models
import pytest
import tables
import tiny
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_solver import every_within_the_host, profiles
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import recompute
from recompute import load_policy
from recompute.engine.host.host_memory import default_limit
from recompute.errors import BudgetError, PolicyError
from recompute.integrations import distributed
from recompute.planning import cheapest_walk, solver
from recompute.planning.allowed_ways import only_allowed
from recompute.planning.make_plan import plan
from recompute.planning.plan_verification import MeasuredStep, corrected
from recompute.planning.prediction import choices_of, predict
from recompute.planning.solver import solve
from recompute.profiling import profile_model
from recompute.profiling.cost_table import HostLink, Place, Profile
from recompute.profiling.dry_run import dry_run
from recompute.profiling.offloaded_choices import with_offloading
from recompute.profiling.regions import policy_from_rules

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def holding(*storages, held=None, rule=None, seconds=3.0):
    nbytes = sum(storages) if held is None else held
    return tables.choice("keep" if rule is None else "way", rule, seconds, nbytes, nbytes, nbytes, storages=storages)


def of_one_region(*choices, layers=4, **options):
    places = [Place(path=f"layers.{i}", region=0, layer=i) for i in range(layers)]
    return tables.profile([tables.region("Layer", *choices)], places, **options)


def derived(*choices, bandwidth=100.0):
    (region,) = with_offloading(of_one_region(*choices, link=tables.link(bandwidth))).regions
    return {choice.name: choice for choice in region.choices if choice not in choices}


@pytest.mark.parametrize(("held", "moved"), [(100, [100, 70, 60, 50, 30, 20]), (70, [70, 40, 30, 20])], ids=str)
def test_the_largest_storages_leave_as_far_as_they_fit_into_the_share(held, moved):
    """Of storages of 100 bytes. Where the region holds 70, the others are not its own, whichever: they free nothing."""
    found = derived(holding(40, 30, 20, 10, held=held))
    shares = ("", "three quarters ", "five eighths ", "half ", "three eighths ", "a quarter ")[: len(moved)]
    assert [*found] == [f"keep, {share}offloaded" for share in shares]
    assert [choice.moved_nbytes for choice in found.values()] == moved
    assert all(choice.held_nbytes == held for choice in found.values())


def test_shares_that_move_alike_are_one():
    assert [choice.moved_nbytes for choice in derived(holding(60, 40)).values()] == [100, 60, 40]
    assert derived(holding(60, 40), bandwidth=1e9).keys() == derived(holding(60, 40)).keys()


def test_what_is_little_beside_what_another_choice_holds_is_not_offloaded():
    little = holding(2, rule=tables.HOOK)
    assert [name for name in derived(holding(60, 40), little) if name.startswith("way")] == []
    assert [name for name in derived(little)] == ["way, offloaded"]


def test_a_region_takes_as_long_as_its_ops_or_its_copies():
    slow = derived(holding(100, seconds=3.0), bandwidth=50.0)["keep, offloaded"]  # 1 s of forward, 2 of backward
    assert (slow.forward_seconds, slow.backward_seconds) == pytest.approx((2.0, 2.1))
    fast = derived(holding(100, seconds=3.0), bandwidth=200.0)["keep, offloaded"]
    assert (fast.forward_seconds, fast.backward_seconds) == pytest.approx((1.025, 2.025))


def test_each_rule_offloads_what_it_holds():
    checkpoint = holding(50, rule=tables.CHECKPOINT)
    found = derived(holding(40, 30, 20, 10), checkpoint)
    assert found["keep, offloaded"].rule == {"action": "offload"}
    assert found["keep, half offloaded"].rule == {"action": "offload", "fraction": 0.5}
    assert found["way, offloaded"].rule == {"action": "checkpoint", "offload": True}


def test_nothing_is_derived_without_a_link_or_sizes_and_nothing_twice():
    assert with_offloading(of_one_region(holding(40, 30))).regions[0].choices == (holding(40, 30),)
    assert derived(tables.choice("keep", None, 1.0, 100, 100, 100)) == {}
    once = with_offloading(of_one_region(holding(40, 30), link=tables.link()))
    assert with_offloading(once) == once


def layered(**options):
    """Layers whose copies are hidden up to half of what they hold, and an embedding and a head around them."""
    layer = tables.region(
        "Layer",
        holding(40, 30, 20, 10),
        tables.choice("hook", tables.HOOK, 4.0, 50, 90, 100),
        tables.choice("checkpoint", tables.CHECKPOINT, 5.0, 10, 60, 130, storages=[10]),
        gradient=20,
    )
    places = [
        Place(path="", region=0),
        *(Place(path=f"model.layers.{i}", region=1, layer=i) for i in range(6)),
        Place(path="lm_head", region=2),
    ]
    regions = [tables.EMBEDDING, layer, tables.HEAD]
    return tables.profile(regions, places, static=1000, **{"link": tables.link(50.0), **options})


def test_a_plan_offloads_where_that_is_faster_and_says_so(tmp_path):
    found = plan(layered(), budget=1600)
    without = plan(layered(link=None), budget=1600)
    assert found.predicted_step_seconds < without.predicted_step_seconds
    assert found.predicted_peak_bytes <= 1600
    assert without.offloaded_bytes == 0 < found.offloaded_bytes
    text = str(found)
    assert f"{found.offloaded_bytes} B offloaded" in text
    assert "| offloaded   |" in text
    assert "offloaded" not in str(without)
    document = json.loads(found.to_json())
    assert document["offloaded_bytes"] == found.offloaded_bytes
    assert sum(row["offloaded_bytes"] for row in document["choices"]) == found.offloaded_bytes
    assert found.policy.description.endswith(f"ms a step, {found.offloaded_bytes} B offloaded")
    found.save(tmp_path / "plan.yaml")
    policy = load_policy(tmp_path / "plan.yaml")
    assert policy == found.policy
    assert any(rule.action == "offload" or rule.offload for rule in policy.rules)


def test_nothing_is_offloaded_where_memory_is_to_spare():
    found = plan(layered(), budget="1GiB")
    assert (found.offloaded_bytes, found.policy.rules) == (0, ())


@pytest.mark.parametrize(
    ("allowed", "ways"),
    [
        (["keep", "hook", "kernel", "checkpoint"], {"keep", "hook", "checkpoint"}),
        (["offload"], {"keep, offloaded", "keep, half offloaded"}),
        (["hook", "offload"], {"hook", "keep, offloaded", "keep, half offloaded"}),
        (["checkpoint", "offload"], {"checkpoint", "checkpoint, offloaded", "keep, offloaded"}),
    ],
)
def test_only_what_is_allowed_is_offloaded(allowed, ways):
    left = {choice.name for choice in only_allowed(with_offloading(layered()), allowed).regions[1].choices}
    assert ways <= left
    if "offload" not in allowed:
        assert left == ways
        for budget in (1500, 1600, 1800):
            assert plan(layered(), budget=budget, allowed=allowed).offloaded_bytes == 0
    if "keep" not in allowed:
        assert "keep" not in left


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_no_more_is_offloaded_than_the_host_has_room_for(share):
    free = plan(layered(), budget=1500)
    room = int(share * free.offloaded_bytes)
    bound = plan(layered(link=tables.link(50.0, host=room)), budget=1500)
    none = plan(layered(link=None), budget=1500)
    assert (bound.offloaded_bytes > 0) == (share > 0)
    assert bound.offloaded_bytes <= room
    assert free.predicted_step_seconds < bound.predicted_step_seconds <= none.predicted_step_seconds


def test_it_is_said_that_the_host_has_too_little_room():
    with pytest.raises(BudgetError, match=r"every plan offloads at least .*, and the host has room for 7 B"):
        plan(layered(link=tables.link(50.0, host=7)), budget=1600, allowed=["offload"])


@given(profiles(), st.integers(0, 120))
def test_a_step_too_large_to_solve_exactly_stays_within_the_host_and_the_budget(profile, budget):
    """Beyond some number of states only the first places offload: not the fastest, but found wherever there is one."""
    possible = [a for a in every_within_the_host(profile) if predict(profile, a).peak_nbytes <= budget]
    assume(possible)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cheapest_walk, "_MOST_STATES", 0)
        found = solve(profile, budget)
    assert found.assignment in possible
    assert found.prediction.step_seconds >= solve(profile, budget).prediction.step_seconds - 1e-10


def test_a_correction_counts_what_leaves_when_the_next_place_has_run():
    profile = with_offloading(layered())
    names = [choice.name for choice in profile.regions[1].choices]
    index = names.index("keep, half offloaded")
    assignment = (0, *[index] * 5, 0, 0)
    measured = [tables.part(c.held_nbytes, c.forward_peak_nbytes, c.backward_peak_nbytes) for c in
                choices_of(profile, assignment)]  # fmt: skip
    for i in range(2, 6):  # forward of each ends with 50 bytes less, which the one before it has moved
        measured[i] = replace(measured[i], held_nbytes=measured[i].held_nbytes - 50)
    before = predict(profile, assignment)
    step = MeasuredStep(before.peak_nbytes, before.step_seconds, tuple(measured))
    assert corrected(profile, assignment, step) == profile
    more = MeasuredStep(before.peak_nbytes + 7, before.step_seconds, tuple(measured))
    assert predict(corrected(profile, assignment, more), assignment).peak_nbytes == before.peak_nbytes + 7


def test_a_profile_is_read_with_and_without_a_link(tmp_path):
    for link in (None, HostLink(out_bandwidth=5e10, back_bandwidth=4e10, host_nbytes=10**12)):
        layered(link=link).save(tmp_path / "profile.json")
        assert Profile.load(tmp_path / "profile.json") == layered(link=link)
    text = (tmp_path / "profile.json").read_text().replace('"moved_nbytes": 0', '"moved_nbytes": 10000', 1)
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(PolicyError, match="expected moved_nbytes of at most held_nbytes"):
        Profile.load(tmp_path / "profile.json")


RECORDED = ROOT / "examples/ablation/results/plans-8b-h200/profile.json"


def offloaded_at_the_least_peak(profile):
    return plan(profile, budget=solver.floor(profile).prediction.peak_nbytes).offloaded_bytes


def test_a_profile_from_before_there_were_links_gives_plans_that_do_not_offload(tmp_path):
    document = json.loads(RECORDED.read_text(encoding="utf-8"))
    del document["link"]
    for region in document["regions"]:
        for choice in region["choices"]:
            del choice["moved_nbytes"], choice["storages"]
    (tmp_path / "profile.json").write_text(json.dumps(document), encoding="utf-8")
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.link is None
    assert with_offloading(profile) == profile
    assert offloaded_at_the_least_peak(profile) == 0


def test_a_profile_that_knows_its_link_gives_plans_that_offload():
    profile = Profile.load(RECORDED)
    assert profile.link is not None
    assert offloaded_at_the_least_peak(profile) > 0


def test_ranks_agree_on_the_slowest_link_and_on_what_each_may_offload(monkeypatch):
    one = of_one_region(holding(40, 30), link=tables.link(100.0, host=50))
    other = of_one_region(holding(40, 20, 5, held=80), link=tables.link(80.0, host=60))
    monkeypatch.setattr(distributed, "_gathered", lambda *_: [one.model_dump(), other.model_dump()])
    agreed = distributed.agree(one)
    assert agreed.link == tables.link(80.0, host=50)
    assert (agreed.regions[0].choices[0].held_nbytes, agreed.regions[0].choices[0].storages) == (80, (40, 20, 5))
    without = other.model_copy(update={"link": None}).model_dump()
    monkeypatch.setattr(distributed, "_gathered", lambda *_: [one.model_dump(), without])
    assert distributed.agree(one).link is None


IDS = torch.randint(0, tiny.VOCABULARY, (512, 32), generator=torch.Generator().manual_seed(0))
"""So many that what a layer holds is not too small to be offloaded."""


def loss(logits):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


class Linked(NamedTuple):
    """A model on a CPU that is said to have a host, over a link that takes no time, and its profile.

    Offloading is a plain copy there.
    """

    model: nn.Module
    profile: Profile


@pytest.fixture(scope="module")
def linked():
    link = HostLink(out_bandwidth=1e30, back_bandwidth=1e30, host_nbytes=default_limit())
    model = tiny.decoder(layers=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_model, "measure_link", lambda device: link)
        return Linked(model, recompute.profile(model, IDS, loss=loss, steps=1))


@pytest.mark.slow
def test_a_plan_that_offloads_runs_and_its_peak_is_as_predicted(linked):
    """Times are measured, so what is chosen may differ. But it offloads, since nothing else is allowed."""
    most = predict(linked.profile, (0,) * len(linked.profile.places)).peak_nbytes
    options = {"profile": linked.profile, "loss": loss, "allowed": ["offload"]}
    found = recompute.plan(linked.model, IDS, budget=most - 1, **options)
    assert found.offloaded_bytes > 0
    assert {choice.name.partition(",")[0] for choice in choices_of(found.profile, found.assignment)} == {"keep"}
    assert {rule.action for rule in found.policy.rules} == {"offload"}
    assert found.predicted_peak_bytes == found.rounds[-1].measured_peak_nbytes < most
    assert not found.is_over_budget
    recompute.verify(linked.model, IDS, policy=found.policy, loss=loss)


@pytest.mark.slow
def test_the_peaks_of_mixed_plans_that_offload_are_right_to_the_byte(linked):
    profile = with_offloading(linked.profile)
    ways = profile.regions[1].choices
    offloading = [i for i, choice in enumerate(ways) if choice.moved_nbytes]
    assert {name.partition(",")[0] for name in (ways[i].name for i in offloading)} >= {"keep", "hook", "checkpoint"}
    draw = random.Random(0)
    assignments = [(0, *draw.choices(offloading, k=4), 0) for _ in range(4)]
    assignments += [(0, *draw.choices([*offloading, *range(len(ways))], k=4), 0) for _ in range(4)]
    for assignment in assignments:
        choices = choices_of(profile, assignment)
        rules = {place.path: choice.rule for place, choice in zip(profile.places, choices, strict=True) if place.path}
        with (
            dry_run(linked.model, IDS, loss=loss) as run,
            recompute.apply(linked.model, policy_from_rules(rules)) as handle,
        ):
            regions = {place.path: linked.model.get_submodule(place.path) for place in profile.places[1:-1]}
            run.settle(handle)
            peak = run.static_nbytes + run.step(regions, counted=True).peak_nbytes
        assert predict(profile, assignment).peak_nbytes == peak, [choice.name for choice in choices]


def test_a_cpu_has_no_link():
    assert profile_model.measure_link(CPU) is None


@pytest.mark.gpu
def test_a_link_is_measured():
    link = profile_model.measure_link(torch.device("cuda"))
    assert link is not None
    assert link.out_bandwidth > 0 < link.back_bandwidth
    assert link.host_nbytes > 0


@pytest.mark.slow
def test_a_gpu_that_is_not_here_offloads_where_its_link_is_fast_enough():
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}
    with torch.device("meta"):
        model = models.make("llama", torch.bfloat16, num_hidden_layers=8, num_key_value_heads=8, **shape)
    model.config.use_cache = False
    ids = torch.zeros(1, 8192, dtype=torch.long, device="meta")
    profile = recompute.profile(model, {"input_ids": ids, "labels": ids}, device="H200", optimizer=SGD)
    assert profile.link is not None
    assert profile.link.out_bandwidth == profile.link.back_bandwidth == 0.75 * 64e9
    without = profile.model_copy(update={"link": None})
    gains = []
    for point in solver.frontier(without):
        budget = point.prediction.peak_nbytes
        found = plan(profile, budget=budget)
        gains.append(plan(without, budget=budget).predicted_step_seconds - found.predicted_step_seconds)
        assert found.predicted_peak_bytes <= budget
        assert (found.offloaded_bytes > 0) == (gains[-1] > 0)
    assert gains[0] == 0
    assert max(gains) > 0
