"""Plans use the budget that they are given, as layers have ways to run that hold little more or less than others.

The profile is calculated for an H200, so what is predicted here is arithmetic and no clock's word.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.estimation.gpus import GPUS
from recompute.planning import solver
from recompute.planning.allowed_ways import only_allowed
from recompute.planning.microbatches import with_microbatches
from recompute.policy.document import parse_document
from recompute.policy.rules import Policy
from recompute.profiling import candidates, regions

pytestmark = pytest.mark.slow

CONFIG = LlamaConfig(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=8192,
)
LENGTH = 8192
HIDDEN_STATE_NBYTES = LENGTH * CONFIG.hidden_size * 2
WITH_KERNELS = ["keep", "hook", "kernel", "checkpoint"]


def profiled(config=CONFIG, **options):
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.config.use_cache = False
    ids = torch.zeros(1, LENGTH, dtype=torch.int64)
    return recompute.profile(model, {"input_ids": ids, "labels": ids}, device="H200", **options)


@pytest.fixture(scope="module")
def profile():
    return profiled()


def without(profile, key):
    """The profile without the choices whose rules have this key."""
    return profile.with_choices(lambda region: [each for each in region.choices if key not in (each.rule or {})])


def budgets_of(profile, count=12):
    """At equal distances between the least that there is a plan for and the most that makes one faster."""
    least, most = (found.prediction.peak_nbytes for found in (solver.floor(profile), solver.solve(profile, 1 << 50)))
    assert most > 1.02 * least
    return (least + (most - least) * number // (count + 1) for number in range(1, count + 1))


def unused(profile, budgets):
    """The share of each budget that its plan does not use."""
    return [1 - solver.solve(profile, budget).prediction.peak_nbytes / budget for budget in budgets]


@pytest.mark.parametrize(("in_flight", "at_most", "average"), [(1, 0.025, 0.008), (4, 0.03, 0.0135)])
def test_little_of_a_budget_is_left_also_with_few_layers(profile, in_flight, at_most, average):
    fine = only_allowed(with_microbatches(profile, 4, in_flight), WITH_KERNELS)
    budgets = list(budgets_of(coarse := without(fine, "hold")))
    left, left_by_prices = unused(fine, budgets), unused(coarse, budgets)
    assert max(left) <= at_most < max(left_by_prices)
    assert sum(left) <= min(sum(left_by_prices), average * len(budgets))


@pytest.mark.parametrize("kernels", [False, True])
def test_the_written_policy_holds_what_the_plan_said(kernels):
    """An estimate runs a step of it. Where two ways meet, what is at the border may be alive once or twice."""
    profile = profiled(kernels=kernels)
    told = 0
    for budget in list(budgets_of(only_allowed(profile, WITH_KERNELS)))[2::3]:
        found = recompute.plan(profile, budget=budget, allowed=WITH_KERNELS)
        text = found.to_yaml()
        policy = parse_document(Policy, text)
        assert policy == found.policy
        told += "hold: " in text
        estimate = recompute.estimate(CONFIG, policy=policy, seq_len=LENGTH, advise=False)
        peak = max(estimate.moments.values())
        assert abs(found.predicted_peak_bytes - peak) <= HIDDEN_STATE_NBYTES + 0.002 * peak
    assert told > 1


def test_memory_that_layers_have_no_use_for_holds_the_heads_logits():
    """What is held need not be made again. The norm before the head gets no limit, which would be one of a tape."""
    config = LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1, "vocab_size": 128 * 1024})
    profile = profiled(config)
    spare, tight = (
        recompute.plan(profile, budget=budget) for budget in (1 << 40, solver.floor(profile).prediction.peak_nbytes)
    )
    logits_nbytes = LENGTH * config.vocab_size * 2

    def rules(plan):
        return {path: rule for rule in plan.policy.rules for path in rule.match if not path.startswith("model.layers")}

    hold = rules(spare)["lm_head"].hold
    assert hold is not None
    assert 0 <= hold - logits_nbytes <= 0.01 * logits_nbytes
    assert rules(spare)["model.norm"].hold is rules(tight)["lm_head"].hold is None
    one_product = 2 * LENGTH * config.vocab_size * config.hidden_size / (0.75 * GPUS["H200"].half_flops)
    assert 0.9 * one_product < tight.predicted_step_seconds - spare.predicted_step_seconds < one_product
    estimate = recompute.estimate(config, policy=spare.policy, seq_len=LENGTH, advise=False)
    assert spare.predicted_peak_bytes == pytest.approx(max(estimate.moments.values()), rel=0.002)


def test_mlps_in_tiles_fit_a_budget_that_nothing_else_does(monkeypatch):
    for module in (candidates, regions):
        monkeypatch.setattr(module, "TILE", LENGTH // 8)
    width = 8 * CONFIG.hidden_size
    config = LlamaConfig(**{**CONFIG.to_dict(), "intermediate_size": width, "num_hidden_layers": 7})
    profile = profiled(config)
    least, others = (solver.floor(each).prediction.peak_nbytes for each in (profile, without(profile, "tile")))
    assert least < others
    wide, tiled = (
        min(
            choice.backward_peak_nbytes
            for choice in profile.regions[1].choices
            if ("tile" in (choice.rule or {})) is way
        )
        for way in (False, True)
    )
    assert wide - tiled > LENGTH * width * 2  # a tensor as wide as the MLP
    plan = recompute.plan(profile, budget=least)
    assert LENGTH // 8 in {rule.tile for rule in plan.policy.rules if "layers" in str(rule.match)}
    estimate = recompute.estimate(config, policy=plan.policy, seq_len=LENGTH, advise=False)
    assert plan.predicted_peak_bytes == pytest.approx(max(estimate.moments.values()), rel=0.005)
