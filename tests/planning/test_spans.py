"""The parts of a training step sum to the step, and are what they should be for models that can be counted by hand."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from tiny import decoder, next_token_loss, rule, rules, token_ids
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

import recompute
from recompute.planning import profiling
from recompute.planning.rehearsal import rehearsal
from recompute.planning.spans import StepSpans

CPU = torch.device("cpu")
FLOAT = 4
LAYER = [None, "TinyDecoderLayer"]

POLICIES: dict[str, Any] = {
    "none": None,
    "checkpoint": rules(rule("*DecoderLayer")),
    "hook": rules(rule("*DecoderLayer", "recompute", via="hook")),
    "kernel": rules(rule(["*DecoderLayer", "*RMSNorm"], "recompute", via="kernel")),
    "mixed": rules(
        {"match": "layers.0", "action": "checkpoint"}, {"match": "layers.2", "action": "recompute", "via": "hook"}
    ),
}


def tiny_step(policy: Any = None, layers: int = 3, optimizer: Any = AdamW, **options: Any) -> StepSpans:
    """The second step of a tiny decoder under a policy: plans are cached, optimizer states are there."""
    model = decoder(layers=layers)
    ids = token_ids()
    regions = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    applied = nullcontext() if policy is None else recompute.apply(model, policy)
    with rehearsal(model, ids, loss=loss, optimizer=optimizer) as run, applied:
        run.step(regions)
        return run.step(regions, **options)


def timeline(spans: StepSpans) -> int:
    """The peak by the parts, as ``profile_table`` puts them together."""
    held = [part.held_nbytes for part in spans.parts]
    gradients = [part.gradient_nbytes for part in spans.parts]
    moments = [sum(gradients) + spans.optimizer_peak_nbytes]
    for index, part in enumerate(spans.parts):
        moments.append(sum(held[:index]) + part.forward_peak_nbytes)
        moments.append(sum(held[:index]) + part.backward_peak_nbytes + sum(gradients[index + 1 :]))
    return max(moments)


@pytest.mark.parametrize("name", POLICIES)
def test_the_parts_sum_to_the_whole(name: str) -> None:
    memory = profiling.memory_trace(CPU)
    spans = tiny_step(POLICIES[name], memory=memory)
    assert [part.path for part in spans.parts] == ["", "layers.0", "layers.1", "layers.2", ""]
    assert timeline(spans) == spans.peak_nbytes == memory.peak_nbytes > 0
    seconds = tiny_step(POLICIES[name], clock=profiling.clock(CPU))
    assert all(part.forward_seconds > 0 and part.backward_seconds > 0 for part in seconds.parts)
    assert seconds.seconds > seconds.optimizer_seconds > 0
    assert (seconds.peak_nbytes, spans.seconds) == (0, 0)


def test_gradients_are_left_behind_where_their_parameters_are() -> None:
    spans = tiny_step(memory=profiling.memory_trace(CPU))
    model = decoder()
    layer = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    embedding, *layers, head = [part.gradient_nbytes for part in spans.parts]
    assert layers == [layer] * 3
    loss = 2 * FLOAT  # and its gradient, which live until backward ends
    assert head == model.lm_head.weight.nbytes + model.norm.weight.nbytes + loss
    assert embedding == model.embed_tokens.weight.nbytes - loss


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_holds_what_autograd_saves_in_it(name: str) -> None:
    policy = POLICIES[name]
    spans = tiny_step(policy, memory=profiling.memory_trace(CPU))

    def held(layers: int) -> int:
        model = decoder(layers=layers)
        if policy is not None:
            recompute.apply(model, policy)
        ids = token_ids()
        next_token_loss(model, ids).backward()
        model.zero_grad()
        return models.held(model, lambda: next_token_loss(model, ids))

    if name == "mixed":
        checkpoint, plain, hook = [part.held_nbytes for part in spans.parts[1:4]]
        assert checkpoint < hook < plain
        return
    _, _, third, fourth, _ = [
        part.held_nbytes for part in tiny_step(policy, 3, memory=profiling.memory_trace(CPU)).parts
    ]
    assert third == fourth == held(4) - held(3) == held(5) - held(4)
