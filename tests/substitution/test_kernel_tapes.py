"""Kernels inside of a tape: what ``rerun``, ``keep`` and ``price`` say holds for what kernels run too."""

import models
import pytest
import torch
from engine_testing import module_of
from layer_testing import EVERYTHING, gradients, policy
from models import BATCH, HIDDEN, LENGTH, SHAPE
from tiers import slow
from tiny import assert_same, counted_ops, decoder, rule, rules, token_ids
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

import recompute
from recompute.engine.cut.frontier import frontier
from recompute.estimation.build_model import build, build_fake

TOKENS = BATCH * LENGTH
LAYERS = 1
"""Of most models. Where two have something to do with each other, there are two."""
ROW, LSE = TOKENS * HIDDEN * 4, TOKENS * SHAPE["num_attention_heads"] * 4
ANGLES = 2 * LENGTH * SHAPE["head_dim"] * 4


def three_steps(name, given, **options):
    """In the first a plan is made, which the others follow."""
    model = models.make(name, **options)
    recompute.apply(model, given)
    return [gradients(model, models.batch(name)) for _ in range(3)]


def test_what_triton_ran_comes_back_from_triton(device):
    outcomes = []
    for options in ({}, {"rerun": EVERYTHING, "price": 0}):
        model = models.make("llama", num_hidden_layers=LAYERS).to(device)
        handle = recompute.apply(model, policy(**options))
        batch = {key: value.to(device) for key, value in models.batch("llama").items()}
        outcomes.append([gradients(model, batch) for _ in range(2)])
    assert_same(*outcomes)
    assert handle.plans()["model.layers.0"].dropped_nbytes > 0


def test_backward_runs_six_of_seven_gemms_again():
    counts = []
    for options in ({}, {"rerun": "gemm"}):
        model = models.make("llama", num_hidden_layers=LAYERS)
        recompute.apply(model, policy(**options))
        for _ in range(2):
            loss = model(**models.batch("llama"), use_cache=False).loss
            with counted_ops() as ops:
                loss.backward()
        counts.append((ops["aten.mm"] + ops["aten.addmm"], ops["recompute.rms_norm_backward"]))
    (alone, norms), (again, norms_again) = counts
    assert again - alone == 6 * LAYERS  # all but down, whose output nobody needs
    assert norms == norms_again == 2 * LAYERS  # q, k and v are one node with the norm


def test_the_frontier_is_the_same_on_fake_tensors(tmp_path):
    LlamaConfig(**{**SHAPE, "num_hidden_layers": LAYERS}).save_pretrained(tmp_path)
    given = {"sequence_length": LENGTH, "batch_size": BATCH, "dtype": torch.float32, "device": torch.device("cpu")}

    def frontiers(model, batch):
        handle = recompute.apply(model, policy(rerun=EVERYTHING))
        for _ in range(2):
            model(**batch)
        return [frontier(plan) for plan in handle.plans().values()]

    with build_fake(str(tmp_path), **given) as imaginary:
        found = frontiers(*imaginary)
    assert found == frontiers(*build(str(tmp_path), **given))
    assert [len(points) > 3 for points in found] == [True] * LAYERS


def test_explain_says_which_kernels_and_what_they_keep():
    model = models.make("llama", num_hidden_layers=LAYERS)
    handle = recompute.apply(model, policy(rerun="gemm", keep="recompute.glu_forward", price=2e10))
    gradients(model, models.batch("llama"))
    text = handle.explain(wide=True)
    assert "cheap ops run again and gemm, at 2e+10 bytes a second; recompute.glu_forward kept" in text
    assert "kernel: gated_mlp (silu)" in text
    assert "attention: the rule does not rerun it" in text


def test_where_kernels_do_not_run_the_tape_has_the_ops_of_the_model():
    outcomes = []
    for via in ("hook", "auto"):
        model = models.make("llama", num_hidden_layers=LAYERS)
        handle = recompute.apply(model, policy(via, rerun="gemm"))
        outcomes.append(gradients(model, models.batch("llama")))
        assert {plan.kept_nbytes for plan in handle.plans().values()} == {2 * ROW + LSE + ANGLES}
    assert_same(*outcomes)


def test_parts_are_on_tapes_of_their_own():
    given = rules(
        rule("*MLP", "recompute", via="kernel", rerun="gemm", price=0),
        rule("*Attention", "recompute", via="kernel", rerun="gemm", price=0),
    )
    model, alone = models.make("llama"), models.make("llama")
    handle = recompute.apply(model, given)
    recompute.apply(alone, rules(*({**each, "rerun": [], "price": 1e9} for each in given["rules"])))
    for _ in range(2):
        assert_same(gradients(model, models.batch("llama")), gradients(alone, models.batch("llama")))
    plans = handle.plans()
    assert plans["model.layers.0.mlp"].kept_nbytes == ROW
    assert plans["model.layers.0.self_attn"].kept_nbytes == 2 * ROW + LSE + ANGLES


def test_a_rule_around_layers_takes_their_kernels_onto_its_tape():
    around = rule("LlamaModel", "recompute", via="kernel")
    expected = three_steps("llama", rules(around))
    assert_same(three_steps("llama", rules({**around, "rerun": EVERYTHING, "price": 0})), expected)


def naming(self, x):
    """As a TinyDecoder's attention that names what it gives."""
    return recompute.keep(self.attention(x), "attended")


def test_what_is_kept_by_name_is_not_made_again():
    reruns = {}
    for keep in ((), "attended"):
        model = decoder()
        for layer in model.layers:
            layer.self_attn = module_of(naming, attention=layer.self_attn)
        handle = recompute.apply(
            model, rules(rule("TinyDecoderLayer", "recompute", via="kernel", rerun="gemm", keep=keep))
        )
        for _ in range(2):
            model(token_ids()).sum().backward()
        plan = handle.plans()["layers.0"]
        reruns[bool(keep)] = sum(plan.steps[index].name == "aten.mm" for index in plan.rerun)
        assert ("attended kept" in handle.explain(wide=True)) is bool(keep)
    assert reruns[False] == reruns[True] + 1  # attention's output projection


@pytest.mark.parametrize("name", ["llama", *slow("gemma2", "mixtral")])
def test_every_regenerated_tensor_is_the_dropped_one(name, monkeypatch):
    monkeypatch.setattr("recompute.engine.bit_comparison._verifying", True)
    three_steps(name, policy(rerun=EVERYTHING, price=0))


@pytest.mark.slow
def test_a_checkpoint_inside_runs_as_it_does():
    def checkpointed(self, x):
        return checkpoint(self.attention, x, use_reentrant=False)

    outcomes = []
    for options in ({}, {"rerun": "gemm"}):
        model = decoder()
        for layer in model.layers:
            layer.self_attn = module_of(checkpointed, attention=layer.self_attn)
        recompute.apply(model, rules(rule("TinyDecoderLayer", "recompute", via="kernel", **options)))
        for _ in range(2):
            model.zero_grad()
            model(token_ids()).sum().backward()
        outcomes.append([p.grad for p in model.parameters()])
    assert_same(*outcomes)
