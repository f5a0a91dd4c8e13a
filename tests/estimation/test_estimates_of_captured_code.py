"""Estimates of steps whose regions run as captured code: the same bytes as on tensors with values."""

import gc

import models
import peft
import pytest
import torch
import transformers
from torch import nn

import recompute
from recompute.compiled.generated import generated_kernel
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.switch import generating_on
from recompute.counters import memory_trace
from recompute.estimation.model_and_batch import ModelAndBatch, on_fake_tensors
from recompute.estimation.model_estimator import ModelEstimator
from recompute.policy.loading import load_policy

CPU = torch.device("cpu")
STEPS = 7
"""By then regions run as captured code, and the checks of their first calls are over."""
IDS = torch.arange(128)[None] % models.VOCABULARY
BATCH = {"input_ids": IDS, "labels": IDS}
UNSEEN = 256
"""Bytes of scalars that a policy, or torch, makes beside the model's tensors."""


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**models.SHAPE, use_cache=False))


def with_lora(model):
    return peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=4, target_modules="all-linear"))


def measured(model, policy):
    """Held after forward, and the peaks of forward and backward, of a late step."""
    model.train()
    with recompute.apply(model, policy) as handle:
        for _ in range(STEPS):
            model(**BATCH).loss.backward()
            model.zero_grad()
        assert "2 of 2 run as captured code" in handle.explain(wide=True)
        gc.collect()
        with memory_trace(CPU) as trace:
            loss = model(**BATCH).loss
            trace.mark("forward")
            loss.backward()
            trace.mark("backward")
        model.zero_grad()
    return trace.held_nbytes["forward"], trace.span_peak_nbytes["forward"], trace.span_peak_nbytes["backward"]


def estimated(model, policy):
    with on_fake_tensors(model, BATCH) as (fake, given):
        step = ModelEstimator(ModelAndBatch(fake, given, "a model"), None).step(load_policy(policy), autocast=False)
    peaks = [0, 0]
    for moment in step.moments:
        is_backward = moment.name.startswith("backward")
        peaks[is_backward] = max(peaks[is_backward], moment.peak_nbytes(lambda nbytes: nbytes))
    return sum(step.held.values()), *peaks


def assert_estimated(model, policy):
    found, real = estimated(model, policy), measured(model, policy)
    assert all(abs(one - other) <= UNSEEN for one, other in zip(found, real, strict=True)), (found, real)


@pytest.mark.parametrize(
    ("policy", "adapt"), [("elementwise", with_lora), ("full", nn.Module.float), ("hook", nn.Module.float)]
)
def test_a_step_is_estimated_as_its_code_runs(policy, adapt):
    assert_estimated(adapt(llama()), policy)


def test_generated_kernels_are_estimated_with_what_they_allocate(monkeypatch):
    """Nothing is launched here: the tensors that kernels are given and fill count, and not their values."""
    monkeypatch.setattr(generated_kernel, "run", lambda *given, **settings: None)
    monkeypatch.setattr(GeneratedKernel, "_agrees", lambda *given: True)
    with generating_on("cpu"):
        assert_estimated(with_lora(llama()), "auto")


def test_dropout_in_generated_kernels_is_estimated_where_there_is_no_gpu():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=models.VOCABULARY, use_cache=False)
    found = recompute.estimate(transformers.GPT2LMHeadModel(config).train(), batch=BATCH, policy="auto")
    assert found.peak_bytes > found.static_bytes.total
