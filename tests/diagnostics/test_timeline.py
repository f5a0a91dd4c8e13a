"""A timeline holds what lives, when, and of which module; what it writes says the same."""

import gc
import json
from collections import defaultdict

import pytest
import torch
from tiny import INTERMEDIATE, TOKENS, decoder, next_token_loss, token_ids, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import recompute
from recompute.counters import step_memory
from recompute.diagnostics.timeline import Timeline
from recompute.engine.fake_mode import FakeMode
from recompute.estimation.fake_tensors import fake_copy

CPU = torch.device("cpu")


def timeline_of(model, ids=None):
    ids = token_ids() if ids is None else ids
    with Timeline(model) as timeline:
        torch.autograd.backward(next_token_loss(model, ids))
    return timeline


def alive_at(timeline, seconds, phase):
    return sum(
        held.nbytes
        for held in timeline.tensors
        if held.phase == phase and held.made < seconds and (held.freed is None or held.freed >= seconds)
    )


@pytest.mark.parametrize("policy", ["none", "elementwise", "full"])
def test_the_peak_is_what_the_allocator_counts_but_for_what_ops_take_inside(policy):
    model = decoder()
    with recompute.apply(model, policy):
        train(model, steps=2)
        ids = token_ids()
        measured = step_memory(lambda: next_token_loss(model, ids), CPU)
        model.zero_grad()
        timeline = timeline_of(model)
    # The state of the CPU's generator, which a checkpoint puts back after its second run, is made by no op.
    states = torch.get_rng_state().nbytes if policy == "full" else 0
    assert 0.95 * (measured.peak_bytes - states) <= timeline.peak_nbytes <= measured.peak_bytes
    assert timeline.backward is not None
    assert alive_at(timeline, timeline.backward, "forward") <= measured.activation_bytes_held


def test_what_a_policy_drops_is_gone_when_backward_begins_and_comes_back_in_it():
    model = decoder()
    train(model, steps=1)
    plain = timeline_of(model)
    with recompute.apply(model):
        train(model, steps=1)
        lean = timeline_of(model)
    assert plain.backward is not None
    assert lean.backward is not None
    assert alive_at(lean, lean.backward, "forward") < 0.75 * alive_at(plain, plain.backward, "forward")
    assert {held.phase for held in plain.tensors} == {"forward", "backward"}
    regenerated = [held for held in lean.tensors if held.phase == "regeneration"]
    assert sum(held.nbytes for held in regenerated) > 0
    assert all(held.made >= lean.backward for held in regenerated)
    assert {held.path.split(".")[0] for held in regenerated} >= {"layers"}
    assert any(span.phase == "regeneration" for span in lean.spans)


@pytest.mark.parametrize("whose", ["ours", "torch's"])
def test_modules_that_run_again_are_regeneration(whose):
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 5), nn.Tanh()))
    if whose == "ours":
        recompute.apply(model, {"name": "one", "rules": [{"match": "1", "action": "checkpoint"}]})
    x = torch.ones(2, 3, requires_grad=True)
    with Timeline(model) as timeline:
        y = model(x) if whose == "ours" else checkpoint(model[1], model[0](x), use_reentrant=False)
        y.sum().backward()
    again = [held for held in timeline.tensors if held.phase == "regeneration"]
    assert [(held.path, held.shape) for held in again if held.shape == (2, 5)] == [("1.0", (2, 5)), ("1.1", (2, 5))]


def test_each_tensor_is_of_the_module_that_made_it_also_in_backward():
    model = decoder()
    train(model, steps=1)
    timeline = timeline_of(model)
    wide = [held for held in timeline.tensors if held.nbytes == 4 * TOKENS * INTERMEDIATE]
    of_layer = [held for held in wide if held.path.startswith("layers.1.")]
    made = [held.path.removeprefix("layers.1.mlp") for held in of_layer if held.phase == "forward"]
    assert made == [".gate_proj", ".act_fn", ".up_proj", ""]
    order = [held.path.split(".mlp")[0] for held in wide if held.phase == "backward"]
    assert order == sorted(order, reverse=True)
    assert set(order) == {"layers.0", "layers.1"}
    assert all(held.freed is not None for held in wide)  # nothing of it outlives the step


def test_on_tensors_without_values_it_is_the_same():
    model = decoder()
    real = timeline_of(model)
    with FakeMode():
        copy = fake_copy(model, torch.float32)
        fake = timeline_of(copy, torch.empty(token_ids().shape, dtype=torch.int64))
    assert fake.peak_nbytes == real.peak_nbytes
    assert [(held.path, held.shape, held.phase) for held in fake.tensors if held.phase == "forward"] == [
        (held.path, held.shape, held.phase) for held in real.tensors if held.phase == "forward"
    ]


def saved(timeline, path):
    timeline.save(path)
    kinds = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        kinds[event["ph"]].append(event)
    return kinds


def test_a_saved_trace_says_what_was_recorded(tmp_path):
    model = decoder()
    recompute.apply(model)
    train(model, steps=1)
    timeline = timeline_of(model)
    events = saved(timeline, tmp_path / "step.json")
    assert all(event["ts"] >= 0 for kind in "XCbe" for event in events[kind])
    # Modules are slices that nest; what backward does is named.
    names = [event["name"] for event in events["X"]]
    assert {"TinyDecoder", "layers.0", "layers.1.mlp", "layers.1.mlp.down_proj (backward)"} <= set(names)
    layer, mlp = (next(e for e in events["X"] if e["name"] == name) for name in ("layers.0", "layers.0.mlp"))
    assert layer["ts"] <= mlp["ts"]
    assert mlp["ts"] + mlp["dur"] <= layer["ts"] + layer["dur"]
    # A slice for each tensor, from when it was made to when it was freed.
    began, ended = ({event["id"]: event for event in events[kind]} for kind in "be")
    assert began.keys() == ended.keys()
    assert began.keys() == {i for i, held in enumerate(timeline.tensors) if 4096 * held.nbytes >= timeline.peak_nbytes}
    for number, event in began.items():
        held = timeline.tensors[number]
        assert (event["args"]["bytes"], event["args"]["module"]) == (held.nbytes, held.path)
        assert event["ts"] <= ended[number]["ts"]
        assert event["name"] == ended[number]["name"]
    # The counter's largest value is the peak; at the end it is what outlives the block: nothing but gradients may.
    counts = [sum(event["args"].values()) for event in sorted(events["C"], key=lambda event: event["ts"])]
    assert max(counts) == timeline.peak_nbytes
    assert min(counts) == 0
    assert counts[-1] == sum(held.nbytes for held in timeline.tensors if held.freed is None)


def test_a_plot_shows_modules_what_came_back_and_when_backward_began():
    model = decoder()
    recompute.apply(model)
    train(model, steps=1)
    figure = timeline_of(model).plot()
    (axes,) = figure.axes
    labels = axes.get_legend_handles_labels()[1]
    assert {"layers.*.mlp.gate_proj", "regenerated", "made in backward"} <= set(labels)
    assert [text.get_text() for text in axes.texts] == ["backward"]
    assert "at the peak" in axes.get_title()


def test_a_block_that_fails_leaves_modules_as_they_were():
    call = nn.Module.__call__
    model = decoder()
    with pytest.raises(RuntimeError), Timeline(model):
        model(torch.ones(2))
    assert nn.Module.__call__ is call
    train(model, steps=1)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "elementwise", "auto", "full"])
def test_on_cuda_it_counts_nearly_all_that_the_allocator_does_and_stats_time_the_device(policy):
    device = torch.device("cuda")
    config = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **config)).to(device, torch.bfloat16)
    ids = torch.randint(0, 512, (2, 512), device=device)
    with recompute.apply(model, policy) as handle:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        gc.collect()  # what earlier tests have left would be freed as this measures
        measured = step_memory(lambda: model(input_ids=ids, labels=ids).loss, device)
        handle.time_regeneration()
        before = handle.stats()
        with Timeline(model) as timeline:
            model(input_ids=ids, labels=ids).loss.backward()
        step = handle.stats() - before
    assert 0.9 * measured.peak_bytes <= timeline.peak_nbytes <= measured.peak_bytes
    layers = {f"model.layers.{index}" for index in range(4)}
    assert {".".join(held.path.split(".")[:3]) for held in timeline.tensors if held.phase == "backward"} >= layers
    assert step.regenerating_seconds is not None
    assert (step.regenerating_seconds > 0) == (step.regenerations > 0)
    assert step.regenerations > 0 or policy not in ("elementwise", "full")
    assert step.regenerating_seconds < timeline.seconds


def test_what_was_offloaded_is_seen_to_come_back():
    model = decoder()
    handle = recompute.apply(model, {"rules": [{"match": "layers.*", "action": "offload", "min_bytes": 0}]})
    train(model, steps=2)
    before = handle.stats()
    timeline = timeline_of(model)
    offloaded = (handle.stats() - before).offloaded_nbytes
    came_back = sum(held.nbytes for held in timeline.tensors if held.phase == "offloading")
    assert 0 < came_back < offloaded  # what the last layer holds has not left
    assert not any(held.phase == "regeneration" for held in timeline.tensors)


def test_what_compressing_takes_is_no_regeneration():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(128, 64, requires_grad=True)
    handle = recompute.apply(model, {"rules": [{"type": "Sequential", "action": "compress"}]})
    model(x).sum().backward()
    before = handle.stats()
    with Timeline(model) as timeline:
        model(x).sum().backward()
    step = handle.stats() - before
    assert timeline.backward is not None
    compressing = [held for held in timeline.tensors if held.phase == "compression"]
    assert 0 < step.codes_nbytes <= alive_at(timeline, timeline.backward, "compression")
    assert step.compressed_nbytes <= sum(held.nbytes for held in compressing if held.made > timeline.backward)
    assert {held.phase for held in timeline.tensors} == {"forward", "backward", "compression"}
