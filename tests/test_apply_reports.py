"""What a policy says of itself: stats, explain, warnings; and which layers ``layers`` means."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from tiny import (
    HIDDEN,
    INTERMEDIATE,
    TOKENS,
    TinyRMSNorm,
    assert_same,
    counted_ops,
    decoder,
    gradients,
    next_token_loss,
    rule,
    rules,
    snapshot,
    token_ids,
    train,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import recompute
from recompute.errors import PolicyWarning


def test_stats_count_the_bytes_that_are_dropped() -> None:
    model = decoder()
    handle = recompute.apply(model, "hook")
    assert handle.stats() == type(handle.stats())(*[0] * 5)
    next_token_loss(model, token_ids()).backward()
    norm = TOKENS * 4 + 2 * TOKENS * HIDDEN * 4  # rsqrt a row; the normalized and the scaled values, one storage each
    mlp = 2 * TOKENS * INTERMEDIATE * 4  # the activation and the product
    stats = handle.stats()
    assert stats.dropped_nbytes == 5 * norm + 2 * mlp
    assert stats.dropped_tensors == 5 * 3 + 2 * 2
    assert (stats.frames, stats.regenerations, stats.kept_nbytes) == (7, 7, 0)
    next_token_loss(model, token_ids()).backward()
    assert handle.stats().dropped_nbytes == 2 * stats.dropped_nbytes


def test_stats_stay_when_the_policy_is_gone() -> None:
    model = decoder()
    with recompute.apply(model, "hook") as handle:
        train(model)
        inside = handle.stats()
        explained = handle.explain()
    assert inside.frames > 0
    assert handle.stats() == inside
    assert handle.explain() == explained


def test_explain_says_which_module_got_which_rule_and_what_it_drops() -> None:
    model = decoder()
    handle = recompute.apply(
        model,
        {
            "name": "mixed",
            "rules": [
                {"match": "layers.0", "action": "checkpoint"},
                {"match": "layers.*.self_attn", "action": "keep"},
                {"type": "TinyRMSNorm", "action": "recompute", "via": "hook"},
                {"type": "TinyMLP", "action": "recompute", "via": "kernel"},
            ],
        },
    )
    rows = {line.split()[0]: line for line in handle.explain().splitlines() if "rules[" in line}
    assert "mixed" in handle.explain()
    assert {key: row.split("rules[")[1][0] for key, row in rows.items()} == {
        "layers.*": "0",
        "layers.*.self_attn": "1",
        "layers.*.input_layernorm": "2",
        "layers.*.post_attention_layernorm": "2",
        "norm": "2",
        "layers.*.mlp": "3",
    }
    assert rows["layers.*.mlp"].split()[1] == "2"
    assert "kernel" in rows["layers.*.mlp"]
    assert "hook" in rows["norm"]
    next_token_loss(model, token_ids()).backward()
    norm = TOKENS * 4 + 2 * TOKENS * HIDDEN * 4
    row = next(line for line in handle.explain().splitlines() if line.startswith("norm "))
    assert row.split()[-2:] == [f"{norm:,}", "0"]


@pytest.mark.parametrize(
    ("action", "options", "expected"),
    [("checkpoint", {}, "inputs"), ("recompute", {"via": "hook"}, "hook"), ("recompute", {"via": "kernel"}, "kernel")],
)
def test_explain_says_how_the_model_itself_comes_back(action: str, options: dict[str, Any], expected: str) -> None:
    handle = recompute.apply(TinyRMSNorm(), rules(rule("TinyRMSNorm", action, **options)))
    (row,) = (line for line in handle.explain().splitlines() if "rules[0]" in line)
    assert expected in row


def test_a_norms_output_that_three_projections_save_dies_and_comes_back_once() -> None:
    model = decoder()
    outputs: list[StorageWeakRef] = []
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(lambda _, __, output: outputs.append(StorageWeakRef(output.untyped_storage())))
    recompute.apply(model, "hook")
    loss = next_token_loss(model, token_ids())
    assert len(outputs) == 5
    assert all(output.expired() for output in outputs)
    with counted_ops() as forward:
        next_token_loss(decoder(), token_ids())
    with counted_ops() as backward:
        loss.backward()
    assert backward["aten.rsqrt"] == forward["aten.rsqrt"] == 5
    assert backward["aten.silu"] == 2
    assert len(outputs) == 5  # regenerating does not call the user's hooks


def test_layers_are_those_of_the_nearest_module_list() -> None:
    class Stage(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(TinyRMSNorm(), nn.Dropout(0.1)) for _ in range(count))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(Stage(count) for count in (2, 3))
            self.nested = nn.ModuleList([nn.ModuleList([TinyRMSNorm(), TinyRMSNorm()])])

        def forward(self, x: Tensor) -> Tensor:
            return x

    def governed(layers: Any) -> list[str]:
        model = Staged()
        plain = snapshot(model)
        recompute.apply(model, rules(rule("TinyRMSNorm", layers=layers)))
        return [name for name, module in model.named_modules() if type(module) is not plain[name][0]]

    stages = [f"stages.{stage}.blocks.{block}.0" for stage, count in ((0, 2), (1, 3)) for block in range(count)]
    assert governed("0-9") == [*stages, "nested.0.0", "nested.0.1"]
    assert governed("last 1") == [stages[1], stages[4], "nested.0.1"]
    assert governed(2) == [stages[4]]
    assert governed("every 2") == [stages[0], stages[2], stages[4], "nested.0.0"]


def test_a_module_list_may_have_other_children() -> None:
    class Stack(nn.ModuleList):
        def __init__(self) -> None:
            super().__init__([TinyRMSNorm(), TinyRMSNorm()])
            self.final = TinyRMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            return self.final(self[1](self[0](x)))

    model = Stack()
    plain = copy.deepcopy(model)
    recompute.apply(model, rules(rule("TinyRMSNorm", "recompute", via="hook")))
    x = torch.randn(3, HIDDEN)
    assert_same(gradients(model, x), gradients(plain, x))


def caught(policy: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        recompute.apply(decoder(), policy)
    assert all(message.category is PolicyWarning for message in messages)
    assert all(message.filename == __file__ for message in messages)  # where the user's call stands
    return messages


@pytest.mark.parametrize("preset", ["none", "full", "alternate", "hook", "kernel"])
def test_a_preset_that_fits_warns_of_nothing(preset: str) -> None:
    assert caught(preset) == []


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"match": "layer.*.mlp", "action": "checkpoint"}, r"rules\[0\].*'layer\.\*\.mlp'.*'layers\.0\.mlp'"),
        ({"type": "TinyRmsNorm", "action": "checkpoint"}, r"rules\[0\].*'TinyRmsNorm'.*'TinyRMSNorm'"),
        ({"type": "TinyMLP", "layers": "7-9", "action": "checkpoint"}, r"rules\[0\].*7-9.*2 layers"),
        ({"type": "Embedding", "layers": 0, "action": "checkpoint"}, r"rules\[0\].*no ModuleList"),
        ({"type": "Embedding", "action": "recompute"}, r"rules\[0\].*Embedding.*checkpoint"),
        ({"type": "TinyAttention", "action": "recompute", "via": "kernel"}, r"rules\[0\].*TinyAttention"),
        ({"type": "SiLU", "action": "recompute", "via": "kernel"}, r"rules\[0\].*no kernel.*SiLU.*hook"),
    ],
    ids=lambda value: str(value.get("type", value.get("match"))) if isinstance(value, dict) else "",
)
def test_a_rule_without_effect_warns(policy: dict[str, Any], expected: str) -> None:
    messages = caught({"name": "mine", "rules": [policy]})
    texts = {str(message.message).replace("\n", " ") for message in messages}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("policy mine")
    assert re.search(expected, text)


def test_a_rule_that_an_earlier_one_hides_warns() -> None:
    (message,) = caught(rules(rule("Tiny*"), {"match": "layers.0", "action": "checkpoint"}))
    assert "rules[1]" in str(message.message)
    assert "already governed by rules[0]" in str(message.message)
