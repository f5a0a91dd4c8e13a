"""What a policy says of itself: stats, warnings, the first table of explain; and which layers ``layers`` means."""

import functools
import time

import pytest
import tiny
import torch
from tiny import HIDDEN, TOKENS, TinyRMSNorm, decoder, gradients, of_one_more, rule, rules, snapshot, token_ids, train
from torch import nn

import recompute
from recompute.attach.explain import Stats
from recompute.diagnostics.timeline import Timeline


def test_stats_count_the_bytes_that_are_dropped():
    model = decoder()
    handle = recompute.apply(model, "hook")
    assert handle.stats() == Stats()
    train(model, steps=1)
    first = handle.stats()
    stats = of_one_more(lambda: train(model, steps=1), handle)
    assert (first.frames, first.dropped_nbytes, first.kept_nbytes) == (
        stats.frames, stats.dropped_nbytes, stats.kept_nbytes
    )  # fmt: skip
    row, hidden, inner = TOKENS * 4, TOKENS * HIDDEN * 4, TOKENS * tiny.INTERMEDIATE * 4
    # Of a norm the root a row, the normalized values and, as projections save them, the scaled ones; of an MLP the
    # activation and the product.
    assert stats.dropped_nbytes == 5 * (row + 2 * hidden) + 2 * (2 * inner)
    assert stats.dropped_tensors == 5 * 3 + 2 * 2
    # A norm's input; gate and up. An MLP's input is a norm's output, which comes back anyway.
    assert stats.kept_nbytes == 5 * hidden + 2 * (2 * inner)
    # pow, mean, add, rsqrt and two mul of a norm; silu and mul of an MLP. No module runs again.
    assert stats.regenerations == 5 * 6 + 2 * 2
    # Of the six ops of a norm three give a row of values, three one number a row.
    assert stats.regenerated_nbytes == 5 * (3 * hidden + 3 * row) + 2 * (2 * inner)
    assert stats.frames == 7
    assert stats.regenerating_seconds is None


class Chain(nn.Linear):
    """Autograd saves the input, what tanh returns and what sin returns."""

    def forward(self, x):
        return super().forward(x).tanh().sin().cos()


def test_a_rule_holds_whatever_other_rules_said_of_the_same_ops_before():
    x = torch.randn(TOKENS, HIDDEN)
    for _ in range(2):
        for options, kept in (({}, 2), ({"rerun": "gemm"}, 1), ({"keep": "aten.sin"}, 3), ({"keep": "aten.tanh"}, 2)):
            module = Chain(HIDDEN, HIDDEN)
            handle = recompute.apply(module, rules(rule("Chain", "recompute", via="hook", **options)))
            step = functools.partial(gradients, module, x)
            step()
            stats = of_one_more(step, handle)
            nbytes = TOKENS * HIDDEN * 4
            assert (stats.kept_nbytes, stats.dropped_nbytes) == (kept * nbytes, (3 - kept) * nbytes)


class Slow(nn.Module):
    """Takes a while."""

    def forward(self, x):
        time.sleep(_A_WHILE)
        return x.exp().exp()


_A_WHILE = 0.02


def test_stats_time_what_backward_runs_again():
    model = nn.Sequential(Slow(), nn.Sequential(Slow()))
    handle = recompute.apply(model, rules(rule("Sequential", "checkpoint"), rule("Slow", "checkpoint")))
    x = torch.ones(TOKENS, requires_grad=True)
    model(x).sum().backward()
    assert handle.stats().regenerating_seconds is None
    handle.time_regeneration()
    assert handle.stats().regenerating_seconds == 0
    before = handle.stats()
    loss = model(x).sum()
    assert (handle.stats() - before).regenerating_seconds == 0
    began = time.perf_counter()
    loss.backward()
    step = handle.stats() - before
    # The second Slow runs again as part of what is around it, and once more by itself: each is timed once.
    assert step.regenerations >= 3
    assert 3 * _A_WHILE <= step.regenerating_seconds <= time.perf_counter() - began
    assert step.regenerated_nbytes > 0


def test_a_checkpoint_regenerates_the_bytes_that_autograd_saved_and_a_timeline_shows_all_that_it_makes():
    model = decoder()
    handle = recompute.apply(model, "full")
    before = handle.stats()
    with Timeline(model) as timeline:
        tiny.next_token_loss(model, token_ids()).backward()
    step = handle.stats() - before
    assert step.regenerated_nbytes == step.dropped_nbytes
    assert step.regenerated_nbytes < sum(each.nbytes for each in timeline.tensors if each.phase == "regeneration")


def test_stats_stay_when_the_policy_is_gone():
    model = decoder()
    with recompute.apply(model, "hook") as handle:
        train(model)
        inside = handle.stats()
        explained = handle.explain(wide=True)
    assert inside.frames > 0
    assert handle.stats() == inside
    assert handle.stats().removed > inside.removed
    first, note, *rest = handle.explain(wide=True).splitlines()
    assert [first, *rest] == explained.splitlines()
    assert note.startswith("This policy was removed")
    assert repr(handle).endswith("on 8 modules, removed>")


@pytest.mark.parametrize(
    ("action", "options", "expected"),
    [
        ("recompute", {"via": "hook", "rerun": "gemm", "keep": "aten.mul"}, "run again and gemm; aten.mul kept"),
        ("recompute", {"via": "kernel"}, "kernel: rms_norm"),
        ("recompute", {"via": "kernel", "offload": True}, "kernel: rms_norm (llama casting); cheap ops"),
        ("recompute", {"via": "auto"}, "kernel: rms_norm (llama casting) on CUDA, else cheap ops run again"),
    ],
)
def test_explain_says_how_the_model_itself_comes_back(action, options, expected):
    handle = recompute.apply(TinyRMSNorm(), rules(rule("TinyRMSNorm", action, **options)))
    (row,) = (line for line in handle.explain(wide=True).splitlines() if "rules[0]" in line)
    assert expected in row


def test_layers_are_those_of_the_nearest_module_list():
    def stage(count):
        return nn.ModuleDict(
            {"blocks": nn.ModuleList(nn.Sequential(TinyRMSNorm(), nn.Dropout(0.1)) for _ in range(count))}
        )

    def governed(layers):
        nested = nn.ModuleList([nn.ModuleList([TinyRMSNorm(), TinyRMSNorm()])])
        model = nn.ModuleDict({"stages": nn.ModuleList(map(stage, (2, 3))), "nested": nested})
        plain = snapshot(model)
        recompute.apply(model, rules(rule("TinyRMSNorm", layers=layers)))
        return [name for name, module in model.named_modules() if type(module) is not plain[name][0]]

    stages = [f"stages.{stage}.blocks.{block}.0" for stage, count in ((0, 2), (1, 3)) for block in range(count)]
    assert governed("0-9") == [*stages, "nested.0.0", "nested.0.1"]
    assert governed("last 1") == [stages[1], stages[4], "nested.0.1"]
    assert governed(2) == [stages[4]]
    assert governed("every 2") == [stages[0], stages[2], stages[4], "nested.0.0"]
