"""Which rule governs which module, and why a rule governs none."""

from __future__ import annotations

import pytest
from engine_testing import calls

from recompute.policy.matching import ModuleEntry, assign, unmatched_rules
from recompute.policy.rules import Policy, Rule


def decoder(layers: int = 4, prefix: str = "model.") -> list[ModuleEntry]:
    """The modules of a decoder, as plain data."""
    modules = [ModuleEntry("", "Toy", None, None), ModuleEntry(f"{prefix}layers", "ModuleList", None, None)]
    for index in range(layers):
        modules += (
            ModuleEntry(f"{prefix}layers.{index}{tail}", type_name, index, layers)
            for tail, type_name in [
                ("", "ToyDecoderLayer"),
                (".mlp", "ToyMLP"),
                (".mlp.up_proj", "Linear"),
                (".self_attn", "ToyAttention"),
                (".input_layernorm", "ToyRMSNorm"),
            ]
        )
    return [*modules, ModuleEntry(f"{prefix}norm", "ToyRMSNorm", None, None)]


def governed(rule: Rule, modules: list[ModuleEntry] | None = None) -> list[str]:
    return list(assign(Policy(rules=[rule]), decoder() if modules is None else modules))


def complaints(*rules: Rule, modules: list[ModuleEntry] | None = None) -> list[str]:
    modules = decoder() if modules is None else modules
    policy = Policy(rules=rules or "none")
    return unmatched_rules(policy, modules, assign(policy, modules))


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("mlp", "mlp", True),
        ("mlp", "a.mlp", False),
        ("mlp", "mlp.a", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("*", "", False),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.c", False),
        ("a.*.c", "a.b.b.c", False),
        ("layer_*", "layer_3", True),
        ("layer_*", "layer_", True),
        ("layer_*", "layer", False),
        ("*_proj", "mlp.up_proj", False),
        ("layer_?", "layer_3", True),
        ("layer_?", "layer_33", False),
        ("a?b", "a.b", False),
        ("**", "", True),
        ("**", "a.b.c", True),
        ("**.mlp", "mlp", True),
        ("**.mlp", "a.b.mlp", True),
        ("**.mlp", "a.xmlp", False),
        ("**.mlp", "a.mlp.b", False),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("a.**", "ab", False),
        ("a.**.d", "a.d", True),
        ("a.**.d", "a.b.c.d", True),
        ("a.**.d", "a.bd", False),
        ("**.a.**.b.**", "x.a.y.b.z", True),
        ("**.a.**.b.**", "b.a", False),
        ("a+b(c", "a+b(c", True),
        ("a.b", "axb", False),
    ],
)
def test_a_glob_over_paths(glob, path, matches):
    assert governed(Rule(match=glob, action="keep"), [ModuleEntry(path, "T", None, None)]) == [path] * matches


def test_a_list_of_globs_matches_what_any_of_them_does():
    assert governed(Rule(match=["*.norm", "**.3.mlp"], action="keep")) == ["model.layers.3.mlp", "model.norm"]


def test_a_type_glob_matches_the_whole_name_of_the_class():
    assert governed(Rule(type="ToyRMS*", layers=0, action="keep")) == ["model.layers.0.input_layernorm"]
    assert governed(Rule(type="RMSNorm", action="keep")) == []
    assert len(governed(Rule(type=["*MLP", "*Attention"], action="keep"))) == 8


def test_match_and_type_and_layers_have_to_hold_together():
    rule = Rule(match="**.layers.**", type="*Norm", layers=["first 1", "last 1"], action="keep")
    assert governed(rule) == ["model.layers.0.input_layernorm", "model.layers.3.input_layernorm"]


def test_layers_select_no_module_outside_of_a_list():
    assert "model.norm" not in governed(Rule(layers="0-999", action="keep"))
    assert len(governed(Rule(layers="0-999", action="keep"))) == 20


def test_the_first_rule_that_matches_wins_and_the_unmatched_are_absent():
    policy = Policy(
        rules=[
            Rule(match="**.0.mlp", action="keep"),
            Rule(type="*MLP", action="recompute"),
            Rule(match="**.mlp", action="checkpoint"),
        ]
    )
    assert assign(policy, decoder(layers=3)) == {
        "model.layers.0.mlp": 0,
        "model.layers.1.mlp": 1,
        "model.layers.2.mlp": 1,
    }


def test_a_policy_without_rules_governs_nothing_and_complains_of_nothing():
    assert assign(Policy(rules="none"), decoder()) == {}
    assert complaints() == []


def test_rules_that_govern_something_raise_no_complaint():
    assert complaints(Rule(type="*MLP", action="recompute"), Rule(match="*.norm", action="recompute")) == []


def test_a_glob_that_matches_no_path_gets_the_nearest_paths():
    assert complaints(Rule(match="**.mpl", action="keep"))[0].startswith(
        "rules[0] governs no module: match '**.mpl' is the path of no module; nearest: 'model.layers.0.mlp'"
    )


def test_a_glob_for_the_model_with_a_head_gets_the_paths_of_the_model_without():
    assert (
        "; nearest: 'layers.0.mlp'"
        in complaints(Rule(match="model.layers.*.mlp", action="keep"), modules=decoder(prefix=""))[0]
    )


def test_a_glob_for_another_architecture_gets_the_paths_that_end_alike():
    assert complaints(Rule(match="transformer.h.*.mlp", action="keep"))[0].endswith("; nearest: 'model.layers.0.mlp'")


def test_a_glob_like_no_path_gets_no_suggestion():
    assert complaints(Rule(match="zzz", action="keep")) == [
        "rules[0] governs no module: match 'zzz' is the path of no module"
    ]


def test_a_type_of_no_module_gets_the_nearest_classes():
    assert complaints(Rule(type="*MPL", action="keep")) == [
        "rules[0] governs no module: type '*MPL' is the class of no module; nearest: 'ToyMLP'"
    ]
    assert complaints(Rule(type="ToyRMSNrom", action="keep"))[0].endswith("; nearest: 'ToyRMSNorm'")


def test_a_type_found_only_at_other_paths_is_told_what_is_at_these():
    assert complaints(Rule(match="**.self_attn", type="*MLP", action="keep")) == [
        "rules[0] governs no module: no module at match '**.self_attn' has type '*MLP'; found 'ToyAttention'"
    ]


def test_layers_beyond_the_last_are_told_how_many_there_are():
    assert complaints(Rule(type="*MLP", layers=["16-31", 40], action="keep")) == [
        "rules[0] governs no module: layers '16-31, 40' selects none of the 4 layers"
    ]


def test_layers_of_what_is_in_no_list_are_told_so():
    assert complaints(Rule(match="model.norm", layers="first 4", action="keep")) == [
        "rules[0] governs no module: layers 'first 4' selects nothing: what the rule matches is in no list of layers"
    ]


def test_a_rule_that_comes_too_late_is_told_which_came_before():
    rules = [
        Rule(match="**.layers.0.**", action="keep"),
        Rule(match="**.layers.**", action="keep"),
        Rule(type="ToyMLP", action="recompute"),
    ]
    assert complaints(*rules) == [
        "rules[2] governs no module: the modules it matches (4) are already governed by rules[0], rules[1]"
    ]


def test_each_rule_that_governs_nothing_gets_one_message():
    messages = complaints(
        Rule(match="nowhere", action="keep"), Rule(type="*MLP", action="keep"), Rule(type="Gone", action="keep")
    )
    assert [message.split()[0] for message in messages] == ["rules[0]", "rules[2]"]


def test_two_thousand_modules_and_five_rules_take_less_than_100_thousand_calls():
    modules = [
        ModuleEntry(f"model.layers.{layer}.block.part_{part}", f"Toy{part}", layer, 100)
        for layer in range(100)
        for part in range(20)
    ]
    policy = Policy(
        rules=[
            Rule(match="**.layers.*.**.gone", action="keep"),
            Rule(type=["*MLP", "*Norm"], action="keep"),
            Rule(match="model.*.*.*.part_1?", layers=["every 2", "last 4"], action="keep"),
            Rule(match=["**.nothing", "*.layers.*.block.part_9"], action="keep"),
            Rule(match="**.part_*", type="Toy?", action="keep"),
        ]
    )
    assert len(assign(policy, modules)) == 52 * 10 + 100 * 10
    assert calls(lambda: assign(policy, modules)) < 100_000  # about 11 ms
