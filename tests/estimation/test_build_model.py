"""Whole models of many families, trained under policies over their layers: bit for bit as without, in less memory."""

import functools
import gc
import operator

import pytest
import torch
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


@pytest.fixture(autouse=True)
def no_garbage_collection():
    """So that memory which only the collector frees counts as held."""
    gc.disable()
    yield
    gc.enable()


def and_held_nbytes(forward):
    """The loss, and how many bytes it holds: by the allocator's own events, of all tensors."""
    with memory_trace(torch.device("cpu")) as trace:
        loss = forward()
        trace.mark("forward")
    return loss, trace.held_nbytes["forward"]


def training(name, precision, policy, **options):
    """What three steps lead to, by name, and the bytes held after forward in each."""
    dtype, autocast = PRECISIONS[precision]
    family = FAMILIES[name]
    model = make(name, dtype, **family.dropout, **options)
    if policy is not None:
        recompute.apply(model, {"rules": [{"type": list(family.layers), **POLICIES[policy]}]})
    optimizer = OPTIMIZERS.get(name, OPTIMIZERS["others"])(model.parameters())
    found = {}
    held = []
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for step, (size, length) in enumerate(SHAPES):
        inputs = {
            key: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for key, tensor in batch(name, step, size, length).items()
        }

        def forward(inputs=inputs):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return model(**inputs).loss

        loss, nbytes = and_held_nbytes(forward)
        loss.backward()
        held.append(nbytes)
        found[f"loss {step}"] = loss.detach()
        for path, parameter in model.named_parameters():
            found[f"gradient {step} of {path}"] = None if parameter.grad is None else parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"final {path}": tensor for path, tensor in (*model.named_parameters(), *model.named_buffers())}
    found["random stream"] = torch.get_rng_state()
    assert not torch.equal(found["random stream"], before)  # every family draws
    return found, held


@pytest.fixture(scope="module")
def trained():
    """``training``, once for each set of arguments."""
    return functools.cache(training)


def is_same(one, other):
    if one is None or other is None:
        return one is other
    return one.dtype is other.dtype and torch.equal(one, other)


def assert_same_in_less_memory(found, expected):
    (values, held), (plain_values, plain_held) = found, expected
    assert values.keys() == plain_values.keys()
    different = [key for key in values if not is_same(values[key], plain_values[key])]
    assert not different
    assert all(map(operator.lt, held, plain_held)), (held, plain_held)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", by_default(list(PRECISIONS), "float32"))
@pytest.mark.parametrize("name", MODELS)
def test_three_steps_are_bitwise_those_without_and_hold_less(name, precision, policy, trained):
    assert_same_in_less_memory(trained(name, precision, policy), trained(name, precision, None))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_attention_written_in_python(name, policy, trained):
    eager = functools.partial(trained, name, "float32", attn_implementation="eager")
    assert_same_in_less_memory(eager(policy), eager(None))


@pytest.mark.parametrize("policy", ["checkpoint", "rerun"])
@pytest.mark.parametrize("name", MODELS)
def test_what_may_run_gemms_again_holds_less(name, policy, trained):
    (_, less), (_, more) = trained(name, "float32", policy), trained(name, "float32", "recompute")
    assert all(map(operator.lt, less, more)), (less, more)
