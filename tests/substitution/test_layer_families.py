"""Kernels in the layers of many families: what stands in, that no layer holds more than its tape, and the gradients."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import models
import pytest
import torch
import transformers
from layer_testing import PLAIN, causal, outcome
from models import BATCH, INTERMEDIATE, LAYERS, LENGTH, SHAPE
from tiers import by_default, slow
from tiny import assert_same, counted_ops, rule, rules
from torch import nn

import recompute
from recompute.counters import step_memory
from recompute.errors import PolicyWarning

TOKENS = BATCH * LENGTH
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
DROPOUT = dict.fromkeys(NO_DROPOUT, 0.1)
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": INTERMEDIATE}


@dataclass(frozen=True)
class Family:
    build: Callable[[], nn.Module]
    mlps: str = ""
    """The op of its MLPs' backward; "": they are no modules, or the kernels know none that computes them."""
    kind: str = "llama"
    """Whose batches it takes."""
    last_norm: int = 8
    """Bytes a token that kernels of norms hold which lie outside of layers, mostly the last one. By hooks these hold
    none."""
    stacks: int = 1
    """2 for an encoder and a decoder with as many layers each."""


OPT = {
    "vocab_size": models.VOCABULARY, "hidden_size": models.HIDDEN, "word_embed_proj_dim": models.HIDDEN,
    "ffn_dim": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": 64,
    "activation_function": "gelu",
}  # fmt: skip
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # by default both are 0.1
BART = {key: value for key, value in models.WHISPER_SHAPE.items() if not key.startswith(("num_mel", "max_"))}


def bart():
    config = transformers.BartConfig(**BART, max_position_embeddings=64, dropout=0.1)
    return transformers.BartForConditionalGeneration(config)


UNGATED, GATED = "activation_backward_", "glu_backward_"
FAMILIES = {
    "gpt2": Family(lambda: models.make("gpt2", **NO_DROPOUT), UNGATED, kind="gpt2"),
    "gpt2 with dropout": Family(lambda: models.make("gpt2", **DROPOUT), UNGATED, kind="gpt2"),
    "gpt_neox": Family(causal("GPTNeoX", **PLAIN), UNGATED),
    "gpt_neox, one after the other": Family(causal("GPTNeoX", **PLAIN, use_parallel_residual=False), UNGATED),
    "phi": Family(causal("Phi", **SHAPE), UNGATED),
    "starcoder2": Family(causal("Starcoder2", **SHAPE, residual_dropout=0.0, embedding_dropout=0.0), UNGATED),
    "falcon": Family(causal("Falcon", **PLAIN, **FALCON), UNGATED),
    "falcon with one norm": Family(causal("Falcon", **PLAIN, ffn_hidden_size=INTERMEDIATE), UNGATED),
    "falcon, one after the other": Family(
        causal("Falcon", **PLAIN, ffn_hidden_size=INTERMEDIATE, parallel_attn=False, alibi=True), UNGATED
    ),
    "vit": Family(lambda: models.make("vit"), UNGATED, kind="vit"),
    "vit with dropout": Family(lambda: models.make("vit", hidden_dropout_prob=0.1), UNGATED, kind="vit"),
    "cohere": Family(causal("Cohere", **SHAPE), GATED),
    "gemma2": Family(lambda: models.make("gemma2"), GATED, "gemma2", 4),
    "gemma3": Family(lambda: models.make("gemma3"), GATED, "gemma3", 4),
    "phi3 with dropout": Family(lambda: models.make("phi3", resid_pdrop=0.1), GATED, "phi3", 4),
    "nemotron": Family(causal("Nemotron", **SHAPE), UNGATED, last_norm=0),
    "opt": Family(causal("OPT", **OPT, dropout=0.0)),
    "opt with dropout": Family(causal("OPT", **OPT, dropout=0.1)),
    "opt, post-norm": Family(causal("OPT", **OPT, dropout=0.1, do_layer_norm_before=False), last_norm=0),
    "whisper": Family(lambda: models.make("whisper"), kind="whisper", last_norm=24, stacks=2),
    "bart with dropout": Family(bart, kind="t5", last_norm=16, stacks=2),
    "t5": Family(lambda: models.make("t5", dropout_rate=0.0), GATED, kind="t5", last_norm=8, stacks=2),
    "t5 with dropout": Family(lambda: models.make("t5", dropout_rate=0.1), kind="t5", last_norm=8, stacks=2),
    "bert": Family(lambda: models.make("bert", **NO_BERT_DROPOUT), kind="bert", last_norm=16),
    "bert with dropout": Family(lambda: models.make("bert", hidden_dropout_prob=0.1), kind="bert", last_norm=16),
}


def make(name):
    torch.manual_seed(0)
    return FAMILIES[name].build().train()


def layers(via, **options):
    return rules(rule(["*Layer", "*Block", "*LayerNorm*", "*RMSNorm*"], "recompute", via=via, **options))


def batch_of(name, **shape):
    kind = FAMILIES[name].kind
    return {**models.batch(kind, **shape), **({} if kind in ("vit", "bert") else {"use_cache": False})}


def under(name, given, steps=8):
    """The model after some steps under a policy, in which its layers have settled."""
    model = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # of norms that have no kernel
        handle = recompute.apply(model, given)
    for _ in range(steps):
        outcome(model, batch_of(name))
    return model, handle


@functools.cache
def settled(name, via):
    """Shared by tests that change nothing about the model."""
    return under(name, layers(via), 10)


def held_by(model, name):
    return step_memory(lambda: model(**batch_of(name)).loss, torch.device("cpu")).activation_bytes_held


def tokens(name):
    return BATCH * (37 if FAMILIES[name].kind == "vit" else LENGTH)


each_family = pytest.mark.parametrize("name", by_default(list(FAMILIES), "gpt_neox"))


@each_family
def test_kernels_hold_what_the_tape_holds(name):
    (by_hooks, _), (by_kernels, handle) = (settled(name, via) for via in ("hook", "kernel"))
    assert f"{LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)
    assert held_by(by_kernels, name) == held_by(by_hooks, name) + FAMILIES[name].last_norm * tokens(name)


@each_family
def test_the_kernels_run(name):
    family, (model, _) = FAMILIES[name], settled(name, "kernel")
    with counted_ops() as ops:
        outcome(model, batch_of(name))
    assert any(f"recompute.{norm}_norm_backward" in ops for norm in ("rms", "layer")) is (name != "nemotron")
    assert ("aten.native_layer_norm" in ops) is (name == "nemotron")  # whose norm adds 1 to its weight
    for op in ("activation_backward_", "glu_backward_", "glu_backward"):
        assert ops.get(f"recompute.{op}", 0) == (LAYERS * family.stacks if op == family.mlps else 0)


@pytest.mark.parametrize("name", by_default(list(FAMILIES), "cohere"))
def test_gradients_are_the_models_up_to_rounding(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # of norms that have no kernel
        recompute.verify(make(name), batch_of(name, seed=1), policy=layers("kernel"))


@each_family
def test_captured_layers_give_the_bits_of_those_on_the_tape(name):
    (captured, handle), (taped, of_tape) = settled(name, "kernel"), under(name, layers("kernel", capture=False), 4)
    assert f"{LAYERS} of {LAYERS} run as captured code" in handle.explain(wide=True)
    assert_same(outcome(captured, batch_of(name)), outcome(taped, batch_of(name)))
    plans, others = (
        {path: plan.kept_nbytes for path, plan in each.plans().items() if "norm" not in path}
        for each in (handle, of_tape)
    )
    assert plans == others


@pytest.mark.slow
@pytest.mark.parametrize("name", ["starcoder2", "gpt2", "gpt_neox", "falcon", "cohere", "gemma3", "opt", "bert"])
def test_a_tape_that_runs_gemms_again_gives_the_bits_of_the_kernels_alone(name):
    outcomes, bytes_held = [], []
    for options in ({}, {"rerun": ["gemm"]}, {"rerun": ["gemm", "attention"], "price": 0}):
        model, _ = under(name, layers("kernel", **options, capture=False), 3)
        outcomes.append(outcome(model, batch_of(name)))
        bytes_held.append(held_by(model, name))
    assert_same(outcomes[1], outcomes[0])
    assert_same(outcomes[2], outcomes[0])
    assert bytes_held[0] > bytes_held[1] + LAYERS * TOKENS * INTERMEDIATE * 4
    assert bytes_held[1] > bytes_held[2]


def test_on_the_cpu_auto_leaves_them_to_the_tape():
    model, handle = under("starcoder2", layers("auto"), 2)
    assert "kernel: layer_norm on CUDA, else" in handle.explain(wide=True)
    assert_same(*(outcome(each, batch_of("starcoder2")) for each in (model, make("starcoder2"))))


@pytest.mark.slow
def test_dropout_that_begins_after_the_policy_drops():
    """Also where its probability stands in the config."""
    model, plain = make("falcon"), make("falcon")
    recompute.apply(model, layers("kernel"))
    for steps in range(7):
        if steps == 5:
            for each in (model, plain):
                each.config.hidden_dropout = 0.5
        found, expected = (outcome(each, batch_of("falcon")) for each in (model, plain))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_neox", *slow("gpt2", "starcoder2", "cohere", "opt", "bert", "t5")])
def test_autocast_casts_as_it_does_without_a_policy(name):
    model, plain = make(name), make(name)
    recompute.apply(model, layers("kernel"))
    outcomes = (outcome(each, batch_of(name), autocast=True) for each in (model, plain))
    for value, other in zip(*outcomes, strict=True):
        assert value.dtype is other.dtype
        assert (value - other).norm() <= 0.05 * other.norm() + 1e-6
