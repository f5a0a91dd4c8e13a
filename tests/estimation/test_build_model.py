"""Whole models of many families, trained under policies over their layers: bit for bit as without, in less memory."""

import functools
import operator

import pytest
import torch
from engine_testing import assert_same, no_garbage_collection
from models import FAMILIES, batch, make
from tiers import by_default, slow

import recompute
from recompute.counters import memory_trace

POLICIES = {  # over whole layers
    "checkpoint": {"action": "checkpoint"},
    "rerun": {"action": "recompute", "via": "hook", "rerun": ["gemm", "convolution"]},
    "recompute": {"action": "recompute", "via": "hook"},
}
MODELS = ["mixtral", "t5", "convnet", *slow("llama", "qwen3", "gemma3", "qwen3_moe", "gpt2", "bert", "vit", "whisper")]
WRITTEN_OUT = ["llama eager", *slow("t5 eager")]
"""Models whose attention is written in Python."""
PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "autocast": (torch.float32, True),
}
OPTIMIZERS = {
    "convnet": functools.partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
    "others": functools.partial(torch.optim.AdamW, lr=1e-2),
}
SHAPES = [(4, 32), (5, 24), (4, 32)]  # batch and length of each step: what is known of one does not fit the next


@functools.cache
def trained(name, precision, policy):
    """What three steps lead to, by name, and the bytes held after forward in each."""
    name, _, attention = name.partition(" ")
    (dtype, autocast), family = PRECISIONS[precision], FAMILIES[name]
    model = make(name, dtype, **family.dropout, **({"attn_implementation": attention} if attention else {}))
    if policy is not None:
        recompute.apply(model, {"rules": [{"type": list(family.layers), **POLICIES[policy]}]})
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["others"])(model.parameters())
    found, held = {}, []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for step, (size, length) in enumerate(SHAPES):
        given = batch(name, step, size, length)
        inputs = {key: each.to(dtype) if each.is_floating_point() else each for key, each in given.items()}
        with (
            no_garbage_collection(),  # so that memory which only the collector frees counts as held
            memory_trace(torch.device("cpu")) as trace,
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(**inputs).loss
            trace.mark("forward")
        held.append(trace.held_nbytes["forward"])
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"gradient {step} of {path}": parameter.grad for path, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"final {path}": tensor for path, tensor in (*model.named_parameters(), *model.named_buffers())}
    found["random stream"] = torch.get_rng_state()
    assert not torch.equal(found["random stream"], before)  # every family draws
    return found, held


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", by_default(list(PRECISIONS), "float32"))
@pytest.mark.parametrize("name", [*MODELS, *WRITTEN_OUT])
def test_three_steps_are_bitwise_those_without_and_hold_less(name, precision, policy):
    (values, held), (plain_values, plain_held) = (trained(name, precision, each) for each in (policy, None))
    assert_same(values, plain_values)
    assert all(map(operator.lt, held, plain_held)), (held, plain_held)


@pytest.mark.parametrize("policy", ["checkpoint", "rerun"])
@pytest.mark.parametrize("name", MODELS)
def test_what_may_run_gemms_again_holds_less(name, policy):
    (_, less), (_, more) = trained(name, "float32", policy), trained(name, "float32", "recompute")
    assert all(map(operator.lt, less, more)), (less, more)
