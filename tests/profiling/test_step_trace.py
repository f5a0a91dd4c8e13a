"""The parts of a training step sum to the step, and are what they should be for models that can be counted by hand."""

from contextlib import nullcontext

import models
import pytest
import tiny
import torch
from tiers import slow
from tiny import HIDDEN, TOKENS, decoder, next_token_loss, rule, rules, token_ids
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import recompute
from recompute.errors import ModelError
from recompute.profiling.dry_run import dry_run

FLOAT = 4

POLICIES = {
    "none": None,
    "checkpoint": rules(rule("*DecoderLayer")),
    "hook": rules(rule("*DecoderLayer", "recompute", via="hook")),
    "kernel": rules(rule(["*DecoderLayer", "*RMSNorm"], "recompute", via="kernel")),
    "mixed": rules(
        {"match": "layers.0", "action": "checkpoint"}, {"match": "layers.2", "action": "recompute", "via": "hook"}
    ),
}


def tiny_step(policy=None, layers=3, optimizer=AdamW, *, whole=False, **options):
    """The second step of a tiny decoder under a policy: plans are cached, optimizer states are there."""
    model = decoder(layers=layers)
    ids = token_ids()
    regions = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    applied = nullcontext() if policy is None else recompute.apply(model, policy)
    with dry_run(model, ids, loss=loss, optimizer=optimizer) as run, applied:
        run.step(regions)
        return run.step(None if whole else regions, **options)


def peak_of(parts, gradients, optimizer_peak_nbytes):
    """By the time line that ``cost_table`` describes."""
    held = [part.held_nbytes for part in parts]
    moments = [sum(gradients) + optimizer_peak_nbytes]
    for index, part in enumerate(parts):
        moments.append(sum(held[:index]) + part.forward_peak_nbytes)
        moments.append(sum(held[:index]) + part.backward_peak_nbytes + sum(gradients[index + 1 :]))
    return max(moments)


def timeline(spans):
    return peak_of(spans.parts, [part.gradient_nbytes for part in spans.parts], spans.optimizer_peak_nbytes)


@pytest.mark.parametrize("name", POLICIES)
def test_the_parts_sum_to_the_whole(name):
    spans = tiny_step(POLICIES[name], counted=True)
    assert [part.path for part in spans.parts] == ["", "layers.0", "layers.1", "layers.2", ""]
    assert timeline(spans) == spans.peak_nbytes > 0
    seconds = tiny_step(POLICIES[name], timed=True)
    assert all(part.forward_seconds > 0 and part.backward_seconds > 0 for part in seconds.parts)
    assert seconds.seconds > seconds.optimizer_seconds > 0
    assert (seconds.peak_nbytes, spans.seconds) == (0, 0)


def test_a_step_without_regions_is_one_part():
    apart, spans = (tiny_step(POLICIES["mixed"], counted=True, whole=whole) for whole in (False, True))
    assert [part.path for part in spans.parts] == [""]
    assert timeline(spans) == spans.peak_nbytes == apart.peak_nbytes
    seconds = tiny_step(POLICIES["mixed"], timed=True, whole=True)
    (part,) = seconds.parts
    assert min(part.forward_seconds, part.backward_seconds, seconds.optimizer_seconds) > 0


def test_gradients_are_left_behind_where_their_parameters_are():
    spans = tiny_step(counted=True)
    model = decoder()
    layer = sum(parameter.nbytes for parameter in model.layers[0].parameters())
    embedding, *layers, head = [part.gradient_nbytes for part in spans.parts]
    assert layers == [layer] * 3
    loss = 2 * FLOAT  # and its gradient, which live until backward ends
    assert head == model.lm_head.weight.nbytes + model.norm.weight.nbytes + loss
    assert embedding == model.embed_tokens.weight.nbytes - loss


@pytest.mark.parametrize("name", ["none", "checkpoint", "hook", "mixed", *slow("kernel")])
def test_a_layer_holds_what_autograd_saves_in_it(name):
    policy = POLICIES[name]
    spans = tiny_step(policy, counted=True)

    def held(layers):
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
    _, _, third, fourth, _ = [part.held_nbytes for part in tiny_step(policy, 3, counted=True).parts]
    assert third == fourth == held(4) - held(3) == held(5) - held(4)


class Stack(nn.Module):
    """Layers that run in the order of ``order``, each as often as it is there."""

    def __init__(self, order, *, differentiable=True):
        super().__init__()
        self.embed = nn.Parameter(torch.ones(TOKENS, HIDDEN), requires_grad=differentiable)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3))
        self.order = order

    def forward(self, scale):
        x = self.embed * scale
        for index in self.order:
            x = self.layers[index](x)
        return x.sum()


def stack_step(order, paths, **options):
    model = Stack(order, **options)
    regions = {path: model.get_submodule(path) for path in paths}
    with dry_run(model, torch.ones(())) as run:
        run.step(regions)
        return run.step(regions, counted=True)


def test_parts_are_in_the_order_in_which_regions_run():
    spans = stack_step((2, 0, 1), ("layers.0", "layers.1", "layers.2"))
    assert [part.path for part in spans.parts] == ["", "layers.2", "layers.0", "layers.1", ""]


def test_where_the_input_needs_no_gradient_backward_ends_with_the_first_region():
    spans = stack_step((0, 1, 2), ("layers.0", "layers.1", "layers.2"), differentiable=False)
    weights = FLOAT * (HIDDEN * HIDDEN + HIDDEN)
    before, *layers, _ = [part.gradient_nbytes for part in spans.parts]
    assert before == 0
    assert layers == pytest.approx([weights] * 3, abs=2 * FLOAT)  # the loss and its gradient, until backward ends
    assert sum(part.gradient_nbytes for part in spans.parts) == 3 * weights
    assert spans.parts[0].backward_peak_nbytes == 0
    assert timeline(spans) == spans.peak_nbytes


@pytest.mark.parametrize(
    ("order", "paths", "message"),
    [
        ((0, 1, 0), ("layers.0", "layers.1"), "layers.0 runs twice"),
        ((0, 1), ("layers.0", "layers.2"), "layers.2 does not run"),
        ((0, 1), ("layers.0", "layers.0.0"), "layers.0.0 runs inside of layers.0"),
        ((0, 1), (), "at least one module"),
    ],
)
def test_regions_that_cannot_be_told_apart_are_refused(order, paths, message):
    with pytest.raises(ModelError, match=message):
        stack_step(order, paths)


def test_a_step_leaves_no_hook_and_no_gradient():
    model = Stack((0, 1, 2))
    before = tiny.snapshot(model)
    with dry_run(model, torch.ones(())) as run:
        for _ in range(2):
            run.step({"layers.1": model.layers[1]}, timed=True)
        assert all(parameter.grad is None for parameter in model.parameters())
    assert tiny.snapshot(model) == before
