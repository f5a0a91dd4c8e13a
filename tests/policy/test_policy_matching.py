"""Which rule governs which module, and why a rule governs none."""

import pytest
from engine_testing import calls

from recompute.policy.matching import ModuleEntry, assign, unmatched_rules
from recompute.policy.rules import Policy, Rule


def decoder(layers=4, prefix="model."):
    """The modules of a decoder, as plain data."""
    modules = [ModuleEntry("", "Toy", None, None), ModuleEntry(f"{prefix}layers", "ModuleList", None, None)]
    for index in range(layers):
        modules += (
            ModuleEntry(f"{prefix}layers.{index}{tail}", type_name, index, layers)
            for tail, type_name in [
                ("", "ToyDecoderLayer"), (".mlp", "ToyMLP"), (".mlp.up_proj", "Linear"),
                (".self_attn", "ToyAttention"), (".input_layernorm", "ToyRMSNorm"),
            ]
        )  # fmt: skip
    return [*modules, ModuleEntry(f"{prefix}norm", "ToyRMSNorm", None, None)]


def keeping(**selects):
    return Rule(**selects, action="keep")


def governed(rule, modules=None):
    return list(assign(Policy(rules=[rule]), decoder() if modules is None else modules))


def complaints(*rules, modules=None):
    modules = decoder() if modules is None else modules
    policy = Policy(rules=rules or "none")
    return unmatched_rules(policy, modules, assign(policy, modules))


GLOBS = {
    "mlp": (["mlp"], ["a.mlp", "mlp.a"]),
    "*": (["a"], ["a.b", ""]),
    "a.*.c": (["a.b.c"], ["a.c", "a.b.b.c"]),
    "layer_*": (["layer_3", "layer_"], ["layer"]),
    "*_proj": ([], ["mlp.up_proj"]),
    "layer_?": (["layer_3"], ["layer_33"]),
    "a?b": ([], ["a.b"]),
    "**": (["", "a.b.c"], []),
    "**.mlp": (["mlp", "a.b.mlp"], ["a.xmlp", "a.mlp.b"]),
    "a.**": (["a", "a.b.c"], ["ab"]),
    "a.**.d": (["a.d", "a.b.c.d"], ["a.bd"]),
    "**.a.**.b.**": (["x.a.y.b.z"], ["b.a"]),
    "a+b(c": (["a+b(c"], []),
    "a.b": ([], ["axb"]),
}
"""Each with paths that it matches, and paths that it does not."""


@pytest.mark.parametrize(("glob", "paths"), GLOBS.items(), ids=GLOBS)
def test_a_glob_over_paths(glob, paths):
    matched, others = paths
    for path in (*matched, *others):
        found = governed(keeping(match=glob), [ModuleEntry(path, "T", None, None)])
        assert found == [path] * (path in matched), path


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
    rules = [keeping(type="Toy?LP", layers=3), keeping(match="**.2.mlp")]
    rules += [Rule(type="*MLP", layers="2-3", action="recompute"), Rule(match="**.layers.*.mlp", action="checkpoint")]
    found = assign(Policy(rules=rules), decoder(layers=4))
    assert found == {f"model.layers.{layer}.mlp": rule for layer, rule in enumerate([3, 3, 1, 0])}


def test_a_policy_without_rules_governs_nothing_and_complains_of_nothing():
    assert assign(Policy(rules="none"), decoder()) == {}
    assert complaints() == []


NEAREST = "; nearest: 'model.layers.0.mlp'"
LATE = [keeping(match="**.layers.0.**"), keeping(match="**.layers.**"), Rule(type="ToyMLP", action="recompute")]
COMPLAINTS = {
    "a glob that matches no path": (
        [keeping(match="**.mpl")], f"match '**.mpl' is the path of no module{NEAREST}",
    ),
    "a glob for another architecture": (
        [keeping(match="transformer.h.*.mlp")], f"match 'transformer.h.*.mlp' is the path of no module{NEAREST}",
    ),
    "a glob like no path": ([keeping(match="zzz")], "match 'zzz' is the path of no module"),
    "a type of no module": ([keeping(type="*MPL")], "type '*MPL' is the class of no module; nearest: 'ToyMLP'"),
    "a misspelt type": (
        [keeping(type="ToyRMSNrom")], "type 'ToyRMSNrom' is the class of no module; nearest: 'ToyRMSNorm'",
    ),
    "a type found at other paths alone": (
        [keeping(match="**.self_attn", type="*MLP")],
        "no module at match '**.self_attn' has type '*MLP'; found 'ToyAttention'",
    ),
    "layers beyond the last": (
        [keeping(type="*MLP", layers=["16-31", 40])], "layers '16-31, 40' selects none of the 4 layers",
    ),
    "layers of what is in no list": (
        [keeping(match="model.norm", layers="first 4")],
        "layers 'first 4' selects nothing: the modules that the rule matches are in no list of layers",
    ),
    "a rule that comes too late": (
        LATE, "the modules it matches (4) are already governed by rules[0], rules[1]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "complaint"), COMPLAINTS.values(), ids=COMPLAINTS)
def test_a_rule_that_governs_nothing_says_why_with_the_nearest_that_there_is(rules, complaint):
    (found,) = complaints(*rules)
    assert found.startswith(f"rules[{len(rules) - 1}] governs no module: {complaint}")
    assert "nearest" in complaint or found.endswith(complaint)


def test_a_glob_for_the_model_with_a_head_gets_the_paths_of_the_model_without():
    (found,) = complaints(keeping(match="model.layers.*.mlp"), modules=decoder(prefix=""))
    assert "; nearest: 'layers.0.mlp'" in found


def test_rules_that_govern_something_raise_no_complaint():
    assert complaints(Rule(type="*MLP", action="recompute"), Rule(match="*.norm", action="recompute")) == []


def test_each_rule_that_governs_nothing_gets_one_message():
    messages = complaints(keeping(match="nowhere"), keeping(type="*MLP"), keeping(type="Gone"))
    assert [message.split()[0] for message in messages] == ["rules[0]", "rules[2]"]


def test_two_thousand_modules_and_five_rules_take_less_than_100_thousand_calls():
    modules = [
        ModuleEntry(f"model.layers.{layer}.block.part_{part}", f"Toy{part}", layer, 100)
        for layer in range(100)
        for part in range(20)
    ]
    rules = [
        *(keeping(match="**.layers.*.**.gone"), keeping(type=["*MLP", "*Norm"])),
        keeping(match="model.*.*.*.part_1?", layers=["every 2", "last 4"]),
        keeping(match=["**.nothing", "*.layers.*.block.part_9"]),
        keeping(match="**.part_*", type="Toy?"),
    ]
    policy = Policy(rules=rules)
    assert len(assign(policy, modules)) == 52 * 10 + 100 * 10
    assert calls(lambda: assign(policy, modules)) < 100_000  # about 11 ms
