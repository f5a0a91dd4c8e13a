"""Estimates of steps whose regions run as captured code: the same bytes as on tensors with values."""

import gc

import models
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

import recompute
from recompute.compiled.captured_function import CapturedFrame
from recompute.compiled.generated import generated_kernel
from recompute.compiled.generated.generated_kernel import GeneratedKernel
from recompute.compiled.generated.switch import generating_on
from recompute.counters import memory_trace
from recompute.estimation import model_estimator
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
    return models.make("llama", use_cache=False)


def with_lora(model):
    adapted = ["q_proj", "down_proj"]
    return peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=4, target_modules=adapted))


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class KeepingBlock(Block):
    def forward(self, x):
        self.last = super().forward(x)
        self.seen = x.detach() * 2
        return self.last


class LiteralBlock(Block):
    def forward(self, x):
        y = self.norm(x).clone()
        y[..., 0] = 0
        return x + self.down(F.gelu(self.up(y)))


class TurnsBlock(Block):
    def forward(self, x):
        y = super().forward(x)
        return (y, y.detach()) if self.index % 2 else y


class FunctionBlock(Block):
    def forward(self, x):
        return x + Gated.apply(self.up(self.norm(x)), self.down.weight)


class AskingBlock(Block):
    """Captured it would hold less: it asks whether it is compiled."""

    def forward(self, x):
        y = self.norm(x)
        return x if torch.compiler.is_compiling() else x + self.down(F.gelu(self.up(y)))


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.gate = x.sigmoid()
        ctx.save_for_backward(x, weight)
        return (x * ctx.gate) @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        product, gated = gradient @ weight, (x * ctx.gate).flatten(0, -2)
        return product * (ctx.gate + x * ctx.gate * (1 - ctx.gate)), gradient.flatten(0, -2).t() @ gated


class Stack(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.head = nn.Embedding(models.VOCABULARY, 32), nn.Linear(32, models.VOCABULARY)
        self.layers = nn.ModuleList(map(block, range(2)))

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return ImageClassifierOutput(loss=F.cross_entropy(self.head(x)[0], labels[0]))


def measured(model, policy, told, steps=STEPS):
    """Held after forward, and the peaks of forward and backward, of the step after so many."""
    model.train()
    with recompute.apply(model, policy) as handle:
        for _ in range(steps):
            model(**BATCH).loss.backward()
            model.zero_grad()
        assert told in handle.explain(wide=True)
        gc.collect()
        with memory_trace(CPU) as trace:
            loss = model(**BATCH).loss
            trace.mark("forward")
            loss.backward()
            trace.mark("backward")
        model.zero_grad()
    return trace.held_nbytes["forward"], trace.span_peak_nbytes["forward"], trace.span_peak_nbytes["backward"]


def estimated(model, policy, number=0):
    """The same of a late step, or of a first one: 1 is on tapes, 2 is as code with ATen's kernels."""
    with on_fake_tensors(model, BATCH) as (fake, given):
        estimator = ModelEstimator(ModelAndBatch(fake, given, "a model"), None)
        step = estimator.steps(load_policy(policy), autocast=False)[number]
    peaks = [0, 0]
    for moment in step.moments:
        is_backward = moment.name.startswith("backward")
        peaks[is_backward] = max(peaks[is_backward], moment.peak_nbytes(lambda nbytes: nbytes))
    return sum(step.held.values()), *peaks


def assert_estimated(model, policy, told="2 of 2 run as captured code"):
    assert_close(estimated(model, policy), measured(model, policy, told))


def assert_close(found, real):
    assert all(abs(one - other) <= UNSEEN for one, other in zip(found, real, strict=True)), (found, real)


@pytest.mark.parametrize(
    ("policy", "adapt"), [("elementwise", with_lora), ("full", nn.Module.float), ("hook", nn.Module.float)]
)
def test_a_step_is_estimated_as_its_code_runs(policy, adapt):
    assert_estimated(adapt(llama()), policy)


@pytest.mark.parametrize("policy", ["elementwise", "full", "auto"])
def test_the_first_steps_are_estimated_as_their_tapes_run(policy):
    found, later = estimated(llama(), policy, 1), estimated(llama(), policy)
    assert_close(found, measured(llama(), policy, "", steps=1))
    assert max(found) != max(later)


@pytest.mark.parametrize("block", [KeepingBlock, LiteralBlock, TurnsBlock, FunctionBlock])
def test_blocks_are_estimated_as_their_code_runs(block):
    assert_estimated(Stack(block), "elementwise", "of 2 run as captured code")


def test_a_block_that_asks_whether_it_is_compiled_is_estimated_uncaptured():
    assert_estimated(Stack(AskingBlock), "elementwise", "its forward asks whether torch.compile traces it")


def test_where_captured_code_fails_without_values_its_modules_are_estimated(monkeypatch):
    uncaptured = {"version": 1, "rules": [{"type": "*Block", "action": "recompute", "capture": False}]}
    expected = estimated(Stack(Block), uncaptured)
    monkeypatch.setattr(CapturedFrame, "run", lambda frame: 1 / 0)
    assert estimated(Stack(Block), "elementwise") == expected


def test_a_block_that_cannot_be_captured_is_soon_given_up(monkeypatch):
    run, steps = model_estimator.run_step, []
    monkeypatch.setattr(model_estimator, "run_step", lambda *given, **more: (run(*given, **more), steps.append(0)))
    monkeypatch.setattr(Block, "forward", lambda block, x, whole=Block.forward: (whole(block, x), object()))
    estimated(Stack(Block), "elementwise")
    assert 0 < len(steps) < 6


def test_generated_kernels_are_estimated_with_what_they_allocate(monkeypatch):
    """Nothing is launched here: the tensors that kernels are given and fill count, and not their values."""
    monkeypatch.setattr(generated_kernel, "run", lambda *given, **settings: None)
    monkeypatch.setattr(GeneratedKernel, "_agrees", lambda *given: True)
    with generating_on("cpu"):
        assert_estimated(with_lora(llama()), "auto")


def test_dropout_in_generated_kernels_is_estimated_where_there_is_no_gpu():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=models.VOCABULARY, use_cache=False)
    found = recompute.estimate(transformers.GPT2LMHeadModel(config), batch=BATCH, policy="auto", advise=False)
    assert found.peak_bytes > found.static_bytes.total
