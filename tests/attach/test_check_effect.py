"""A policy that does nothing to a model says so: by an error if that is all of it, else by one warning a cause."""

import re
import warnings

import pytest
from engine_testing import calls, module_of
from tiers import by_default, slow
from tiny import TinyMLP, assert_same, decoder, rule, rules, snapshot, train
from torch import nn

import recompute
from recompute.errors import NoEffectError, PolicyError, PolicyWarning
from recompute.policy.loading import load_policy, preset_names
from recompute.policy.rules import Policy


def warned(policy, model=None, *, strict=True):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recompute.apply(decoder(layers=4) if model is None else model, policy, strict=strict)
    assert all(each.category is PolicyWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def plain():
    """Has nothing that repeats, no norm and no activation."""
    return module_of(lambda self, x: self.other(self.one(x)), one=nn.Linear(4, 4), other=nn.Linear(4, 4))


@pytest.mark.parametrize("preset", ["full", "alternate", "hook", "kernel", "elementwise", "auto"])
def test_a_preset_that_governs_nothing_is_an_error_that_says_how_to_go_on(preset):
    model = plain()
    before = snapshot(model)
    with pytest.raises(NoEffectError, match=r"(?s)governs no module of Body.*rules\[0\].*strict=False"):
        recompute.apply(model, preset)
    assert snapshot(model) == before
    assert len(warned(preset, model, strict=False)) == 1
    assert issubclass(NoEffectError, PolicyError)


@pytest.mark.parametrize("policy", ["none", rules(rule("Gone", "keep")), {"rules": "none"}], ids=str)
def test_a_policy_that_is_to_drop_nothing_is_no_error(policy):
    model, plain = decoder(), decoder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)  # of a rule for no module
        recompute.apply(model, policy)
    assert_same(train(model), train(plain))


PAST = {"2-9": "2-9", "last 99": "last 99", "first 5": "first 5", (0, 4): "4", (1, "every 2 from 4"): "every 2 from 4"}
KERNEL = {"action": "recompute", "via": "kernel"}
WARNED = [
    (rules(rule("TinyMLP"), rule("Gone")), [r"rules\[1\]"]),
    (rules(rule("TinyMLP", "keep"), rule("Gone")), [r"rules\[1\]"]),
    (rules(rule("Tiny*"), {"match": "layers.0", "action": "keep"}), [r"rules\[1\].*already governed by rules\[0\]"]),
    (rules({"match": "layer.*.mlp", "action": "checkpoint"}), [r"rules\[0\].*'layer\.\*\.mlp'.*'layers\.0\.mlp'"]),
    (rules(rule("TinyRmsNorm")), [r"rules\[0\].*'TinyRmsNorm'.*'TinyRMSNorm'"]),
    (rules(rule("TinyMLP", layers="7-9")), [r"rules\[0\].*7-9.*4 layers"]),
    (rules(rule("Embedding", layers=0)), [r"rules\[0\].*no list of layers"]),
    (rules({"type": "TinyAttention", **KERNEL}), [r"rules\[0\].*TinyAttention"]),
    (rules({"type": "SiLU", **KERNEL}), [r"rules\[0\].*no kernel.*SiLU.*hook"]),
    (rules({"match": "layers.**", "type": ["TinyAttention", "SiLU"], **KERNEL}),
        [r"rules\[0\]: no kernel replaces TinyAttention, SiLU, so hooks regenerate there"]),
    (rules(rule("TinyMLP", "recompute", keep="aten.softmax")),
        [r"rules\[0\]: keep: no op is called aten\.softmax\. explain\(\).*'aten\._softmax'"]),
    (rules(rule("TinyMLP", keep=["aten.mm", "aten.mmm"])), [r"no op is called aten\.mmm\."]),
    *((rules(rule("block", layers=[*layers] if isinstance(layers, tuple) else layers)),
        [rf"rules\[0\]: layers '{spelled}' exceeds the 4 layers of the model$"]) for layers, spelled in PAST.items()),
    *((rules(rule("block", layers=layers)), [])
        for layers in ("0-3", "last 4", "first 4", 3, "every 9", "every 2 from 3")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "messages"), WARNED, ids=lambda value: str(value)[:70] if type(value) is dict else ""
)
def test_a_rule_without_effect_or_with_another_than_it_seems_to_have_warns_once(policy, messages):
    found = [message.replace("\n", " ") for message in warned({"name": "mine", **policy}, strict=False)]
    assert [bool(re.search(rf"^policy mine.*{each}", text)) for text, each in zip(found, messages, strict=True)] == [
        True
    ] * len(messages)


@pytest.mark.parametrize("preset", by_default(preset_names(), "full", "hook", "kernel"))
def test_a_preset_that_fits_warns_of_nothing(preset):
    assert warned(preset, decoder()) == []


def test_a_word_near_block_is_told_of_it():
    with pytest.raises(NoEffectError, match="type 'blocks' is the class of no module; nearest: 'block'"):
        recompute.apply(decoder(), rules(rule("blocks")))


def test_where_there_is_no_head_it_says_what_one_is():
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    with pytest.raises(
        NoEffectError, match="type 'head' finds no head: no module is called lm_head, and no Linear has"
    ):
        recompute.apply(model, rules(rule("head")))
    with pytest.raises(NoEffectError, match="type 'heads' is the class of no module; nearest: 'head'"):
        recompute.apply(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)), rules(rule("heads")))


def test_block_is_told_from_a_class_of_that_name():
    class block(nn.Module):
        def forward(self, x):
            return x

    handle = recompute.apply(nn.Sequential(block(), TinyMLP(), decoder()), rules(rule("block")))
    assert {attachment.path for attachment in handle._attachments} == {"2.layers.0", "2.layers.1"}


def test_layers_of_one_rule_may_be_for_the_longer_of_two_stacks():
    model = nn.ModuleDict({"encoder": decoder(layers=4), "decoder": decoder(layers=2)})
    assert warned(rules(rule("block", layers="2-3")), model) == []
    assert len(warned(rules(rule("block", layers="2-4")), nn.ModuleDict({"one": decoder(layers=4)}))) == 1


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("attn", "attention"),
        *slow(("attenion", "attention"), ("conv", "convolution"), ("mm", "aten.mm")),
        *slow(("gem", "gemm"), ("gemms", "gemm"), ("collectives", "collective"), ("bmm", "aten.bmm")),
    ],
)
def test_a_kept_word_that_looks_like_a_family_or_an_op_is_asked_about(word, meant):
    (message,) = warned(rules(rule("block", "recompute", keep=word), rule("TinyRMSNorm", "recompute", keep=[word])))
    assert re.search(
        rf"rules\[0\], rules\[1\]: keep: {word} is read as a tensor's name.*Did you mean '{meant}'\?", message
    )


NAMES = ["gate", "logits", "attention_output", "gemma_scale", "angle", "x", "c"]
OPS = ["aten._softmax", "aten.mm", "recompute.glu_forward", "softmax"]


@pytest.mark.parametrize("word", ["router_logits", "attention", *slow(*NAMES, *OPS)])
def test_a_kept_word_that_looks_like_none_is_a_tensors_name_and_one_that_is_there_is_that(word):
    assert warned(rules(rule("block", "recompute", keep=word))) == []


@pytest.mark.parametrize("make", [lambda given: load_policy({"rules": given}), lambda given: Policy(rules=given)])
def test_no_rules_have_to_be_meant(make):
    with pytest.raises(PolicyError, match=r"rules: expected at least one rule, or the word none.*found "):
        make([])
    assert make("none").rules == ()
    assert make("none") == make("none").model_validate(make("none").model_dump())
    assert "rules: none" in make("none").to_yaml()


@pytest.mark.parametrize("glob", ["layers.{}.mlp", "**.{}.mlp", "layers.*.x{}", "**.x{}*"])
def test_many_rules_take_time_in_proportion_and_one_warning(glob):
    """Twenty thousand took 102 seconds, and 19,996 warnings."""
    messages = []

    def calls_for(count):
        policy = load_policy(
            {"rules": [rule("TinyRMSNorm"), *({"match": glob.format(i), "action": "keep"} for i in range(count))]}
        )
        return calls(lambda: messages.extend(warned(policy)))

    calls_for(10)  # what is done once
    few, many = calls_for(75), calls_for(300)
    assert many < 5 * few
    assert len(messages) == 3
    assert re.search(r"29\d more of the 301 rules govern no module$", messages[-1])
    assert messages[-1].count("governs no module") == 5
