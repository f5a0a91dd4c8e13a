"""Rules and policies made in Python: what they accept, hold, write and refuse."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recompute.policy
from recompute.errors import PolicyError
from recompute.policy.document import parse_document
from recompute.policy.loading import load_policy
from recompute.policy.rules import FAMILIES, PRICE, REPEATABLE, LayerSpan, Policy, Rule, is_op_name, is_tensor_name


def refusal_of(make, /, **values) -> str:
    with pytest.raises(PolicyError) as caught:
        make(**values)
    return str(caught.value)


def selected(selector, count: int) -> list[int]:
    span = LayerSpan.parse(selector)
    return [index for index in range(count) if span.selects(index, count)]


anything = st.text(st.characters())
part = st.text(st.characters(blacklist_characters=".*?[]{}"), min_size=1) | st.sampled_from(["*", "**", "a?_*"])
path_glob = st.lists(part, min_size=1, max_size=4).map(".".join)
number = st.integers(0, 999)
selector = (
    number
    | number.map(str)
    | st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    | number.map(lambda n: f"every {n + 1}")
    | st.tuples(number, number).map(lambda pair: f"every {pair[0] + 1} from {pair[1]}")
    | number.map(lambda n: f"first {n + 1}")
    | number.map(lambda n: f"last {n + 1}")
)
families = st.sampled_from(FAMILIES)
word = st.text(st.characters(categories=["L"]) | st.sampled_from("_07"), min_size=1, max_size=9).filter(
    str.isidentifier
)
op_name = st.tuples(word, word).map(".".join)
tensor_name = word.filter(is_tensor_name) | st.sampled_from(["null", "true", "off", "_", "class"])


def one_or_more(item):
    return item | st.lists(item, max_size=3)


how_much = st.fixed_dictionaries({"price": st.floats(0, allow_infinity=False) | st.integers(0, 10**20)}) | (
    st.fixed_dictionaries({"hold": st.none() | st.integers(0, 2**50) | number.map("{}MiB".format)})
)


@st.composite
def rules(draw) -> Rule:
    action = draw(st.sampled_from(["keep", "recompute", "checkpoint"]))
    rerun = draw(one_or_more(st.sampled_from(sorted(REPEATABLE)))) if action == "recompute" else ()
    keepable = families.filter(lambda family: family not in rerun) | op_name | tensor_name
    return Rule(
        match=draw(path_glob | st.lists(path_glob, min_size=1, max_size=3)),
        type=draw(st.lists(part | st.just("block"), max_size=2)),
        layers=draw(st.none() | selector | st.lists(selector, min_size=1, max_size=3)),
        action=action,
        via=draw(st.sampled_from(["hook", "kernel", "auto"])) if action == "recompute" else "auto",
        rerun=rerun,
        keep=draw(one_or_more(keepable)) if action != "keep" else (),
        **draw(how_much) if action == "recompute" else {},
        capture=draw(st.booleans()) or action == "keep",
    )


policies = st.builds(
    Policy, name=anything, description=anything, rules=st.just("none") | st.lists(rules(), min_size=1, max_size=3)
)


@given(policies)
def test_every_policy_survives_a_round_trip_through_yaml(policy):
    assert parse_document(Policy, policy.to_yaml()) == policy


@given(policies)
def test_every_policy_survives_a_round_trip_through_a_dict_a_copy_and_a_pickle(policy):
    assert load_policy(policy.model_dump()) == policy
    assert copy.deepcopy(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(copy.deepcopy(policy)) == hash(policy)


def test_yaml_holds_what_was_said_as_it_was_spelled_and_no_defaults():
    policy = Policy(
        name="mine",
        rules=[
            Rule(match="**.mlp", layers=["0-3", 7, "last 2"], action="recompute", via="kernel", rerun=["gemm"]),
            Rule(type=["*Norm", "Dropout"], layers="every 2 from 1", action="checkpoint", keep=["aten.mm", "logits"]),
        ],
    )
    assert policy.to_yaml() == (
        "version: 1\n"
        "name: mine\n"
        "rules:\n"
        "- match: '**.mlp'\n"
        "  layers:\n"
        "  - 0-3\n"
        "  - 7\n"
        "  - last 2\n"
        "  action: recompute\n"
        "  via: kernel\n"
        "  rerun: gemm\n"
        "- type:\n"
        "  - '*Norm'\n"
        "  - Dropout\n"
        "  layers: every 2 from 1\n"
        "  action: checkpoint\n"
        "  keep:\n"
        "  - aten.mm\n"
        "  - logits\n"
    )


def test_one_glob_and_a_list_of_one_are_the_same_rule():
    assert Rule(match="a", action="keep") == Rule(match=["a"], action="keep")
    assert Rule(match="a", action="keep").match == ("a",)


def test_a_rule_that_says_only_what_it_needs_gets_the_defaults():
    rule = Rule(type="*MLP", action="recompute")
    assert (rule.match, rule.layers, rule.via, rule.rerun, rule.keep) == ((), None, "auto", (), ())
    assert repr(rule) == (
        "Rule(match=(), type=('*MLP',), layers=None, action='recompute', via='auto', rerun=(), keep=(), "
        "price=10000000000.0, hold=None, capture=True, compiled=True, compress=False, tile=None, offload=False, "
        "fraction=1.0, min_bytes=1048576, max_host_bytes=None, to='host', path=None)"
    )


def test_a_rule_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Rule(match="a", action="keep").action = "recompute"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (3, [3]),
        ("3", [3]),
        ("2-4", [2, 3, 4]),
        ("2 - 4", [2, 3, 4]),
        ("5-5", [5]),
        ("4-15", [4, 5, 6, 7]),
        ("every 2", [0, 2, 4, 6]),
        ("every 3 from 1", [1, 4, 7]),
        ("first 3", [0, 1, 2]),
        ("last 3", [5, 6, 7]),
        ("first 99", list(range(8))),
        ("last 99", list(range(8))),
        (8, []),
        ("every 2 from 8", []),
    ],
)
def test_a_layer_selector_names_these_of_eight_layers(selector, expected):
    assert selected(selector, 8) == expected


def test_the_last_layers_depend_on_how_many_there_are():
    assert selected("last 2", 4) == [2, 3]
    assert selected("last 2", 40) == [38, 39]


@pytest.mark.parametrize("value", ["fifth", "0-", "every", "every 2 from", "last", "1.5", 1.5, True, "0-3, 7", ""])
def test_what_is_no_layer_selector_is_refused_with_the_forms_there_are(value):
    message = refusal_of(Rule, layers=value, action="keep")
    assert message.startswith(
        "Rule: layers: expected a layer number, or '0-15', 'every 2', 'every 2 from 1', 'first 4' or "
        "'last 4', or a list of these; found "
    )


@pytest.mark.parametrize(
    ("value", "expectation"),
    [
        ("5-2", "expected a range from low to high, such as '2-5'; found '5-2'"),
        (-1, "expected layer numbers from 0 up ('last 1' is the last layer); found -1"),
        ("-3", "expected layer numbers from 0 up ('last 1' is the last layer); found '-3'"),
        ("every 0", "expected a step of at least 1; found 'every 0'"),
        ("last 0", "expected at least 1 layer, such as 'last 1'; found 'last 0'"),
        ("first 0", "expected at least 1 layer, such as 'first 1'; found 'first 0'"),
    ],
)
def test_a_layer_selector_that_can_select_nothing_is_refused(value, expectation):
    assert refusal_of(Rule, layers=value, action="keep") == f"Rule: layers: {expectation}"


def test_an_empty_list_of_layers_is_refused():
    assert refusal_of(Rule, layers=[], action="keep").endswith("or a list of these; found []")


def test_the_wrong_item_of_a_list_of_layers_is_named():
    assert refusal_of(Rule, layers=["0-3", "9-5"], action="keep").startswith("Rule: layers[1]: ")


def test_a_misspelt_key_of_a_rule_in_python_names_the_nearest():
    assert refusal_of(Rule, mach="**.mlp", action="keep") == (
        "Rule: mach: unknown key (did you mean 'match'?); expected one of match, type, layers, action, via, rerun, "
        "keep, price, hold, capture, compiled, compress, tile, offload, fraction, min_bytes, max_host_bytes, to, path"
    )


def test_an_unknown_action_in_python_names_the_nearest():
    assert refusal_of(Rule, match="a", action="checkpont") == (
        "Rule: action: expected 'keep', 'recompute', 'checkpoint', 'offload' or 'compress'; found 'checkpont' "
        "(did you mean 'checkpoint'?)"
    )


def test_a_missing_action_is_required():
    assert refusal_of(Rule, match="a") == "Rule: action: this key is required, and missing"


def test_a_rule_has_to_select_by_something():
    assert refusal_of(Rule, action="keep") == (
        "Rule: expected at least one of match, type and layers; found {'action': 'keep'}"
    )


@pytest.mark.parametrize("action", ["keep", "checkpoint"])
def test_via_belongs_to_recompute_only(action):
    assert refusal_of(Rule, match="a", action=action, via="hook") == (
        f"Rule: via: expected no 'via' beside action '{action}': it belongs to action 'recompute'; found 'hook'"
    )


def test_compressing_belongs_to_recompute_and_its_tensors_may_travel():
    assert refusal_of(Rule, match="a", action="checkpoint", compress=True) == (
        "Rule: compress: expected no 'compress' beside action 'checkpoint': it belongs to action 'recompute'; "
        "found true"
    )
    rule = Rule(match="a", action="compress", offload=True, fraction=0.5)
    assert (rule.offload, rule.fraction) == (True, 0.5)


def test_tiles_are_of_tokens_and_need_a_kernel():
    assert Rule(match="a", action="recompute", tile=16384).tile == 16384
    assert refusal_of(Rule, match="a", action="recompute", tile=0) == (
        "Rule: tile: expected a number of tokens from 1 up, such as 16384; found 0"
    )
    assert refusal_of(Rule, match="a", action="checkpoint", tile=8) == (
        "Rule: tile: expected no 'tile' beside action 'checkpoint': it belongs to action 'recompute'; found 8"
    )
    assert refusal_of(Rule, match="a", action="recompute", via="hook", tile=8) == (
        "Rule: tile: expected no 'tile' beside 'via: hook', by which a module runs as it is written; found 8"
    )


def test_sizes_of_offloading_are_read_as_people_write_them():
    rule = Rule(match="a", action="offload", fraction=0.5, min_bytes="64KiB", max_host_bytes="40GB")
    assert (rule.min_bytes, rule.max_host_bytes) == (64 << 10, 40 * 10**9)
    assert Rule(match="a", action="checkpoint", offload=True, min_bytes=0).min_bytes == 0
    text = Policy(rules=[rule]).to_yaml()
    assert "fraction: 0.5" in text
    assert "max_host_bytes: 40GB" in text
    assert "min_bytes: 64KiB" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 0}, "Rule: fraction: expected a share above 0 and up to 1, such as 0.5; found 0"),
        ({"fraction": 1.5}, "Rule: fraction: expected a share above 0 and up to 1, such as 0.5; found 1.5"),
        ({"min_bytes": "1 parsec"}, "Rule: min_bytes: expected a size such as '40GiB', '512MiB' or '40GB'"),
        ({"max_host_bytes": "50%"}, "Rule: max_host_bytes: expected a size such as '40GiB', '512MiB' or '40GB'"),
        ({"to": "tape"}, "Rule: to: expected 'host' or 'disk'; found 'tape'"),
        ({"path": "/scratch"}, "Rule: path: expected no 'path' beside 'to: host'"),
        ({"to": "disk"}, "Rule: expected a 'path' beside 'to: disk'"),
        ({"via": "hook"}, "Rule: via: expected no 'via' beside action 'offload'"),
        ({"offload": True}, "Rule: offload: expected no 'offload' beside action 'offload'"),
    ],
)
def test_what_offloading_cannot_mean_is_refused(options, message):
    assert refusal_of(Rule, match="a", action="offload", **options).startswith(message)


@pytest.mark.parametrize("key", [{"fraction": 0.5}, {"min_bytes": 0}, {"max_host_bytes": 1}, {"to": "disk"}])
@pytest.mark.parametrize("action", ["keep", "recompute", "checkpoint"])
def test_keys_of_offloading_need_it(action, key):
    (name,) = key
    assert refusal_of(Rule, match="a", action=action, **key).startswith(
        f"Rule: {name}: expected no {name!r} here: it belongs to action 'offload', or beside 'offload: true'"
    )


def test_rerun_and_keep_are_tuples_and_one_word_is_a_list_of_one():
    rule = Rule(match="a", action="recompute", rerun="gemm", keep=["attention", "aten._softmax", "router_logits"])
    assert rule.rerun == ("gemm",)
    assert rule.keep == ("attention", "aten._softmax", "router_logits")
    assert Rule(match="a", action="checkpoint", keep="attention").keep == ("attention",)


@pytest.mark.parametrize("value", ["gem", "aten.mm", 3, None, [["gemm"]]])
def test_only_a_family_can_be_rerun(value):
    assert ": expected 'gemm', 'convolution' or 'attention'; found " in refusal_of(
        Rule, match="a", action="recompute", rerun=value
    )


@pytest.mark.parametrize("action", ["keep", "checkpoint"])
def test_rerun_belongs_to_recompute_only(action):
    assert refusal_of(Rule, match="a", action=action, rerun="gemm") == (
        f"Rule: rerun: expected no 'rerun' beside action '{action}': it belongs to action 'recompute'; found 'gemm'"
    )


def test_keep_belongs_to_what_drops_tensors():
    assert refusal_of(Rule, match="a", action="keep", keep=["aten.mm"]) == (
        "Rule: keep: expected no 'keep' beside action 'keep': it belongs to action 'recompute' or 'checkpoint'; "
        "found ['aten.mm']"
    )


@pytest.mark.parametrize("value", [-1, -1e-9, float("inf"), float("nan"), 10**400, True, "1e9", None, [1.0]])
def test_a_price_is_a_finite_number_from_0_up(value):
    assert refusal_of(Rule, match="a", action="recompute", price=value).startswith(
        "Rule: price: expected a number from 0 up: the bytes that may be held to save a second, such as 3.2e10; found "
    )


@pytest.mark.parametrize("action", ["keep", "checkpoint"])
def test_a_price_belongs_to_recompute_only(action):
    assert refusal_of(Rule, match="a", action=action, price=0) == (
        f"Rule: price: expected no 'price' beside action '{action}': it belongs to action 'recompute'; found 0"
    )


def test_a_rule_that_is_not_to_be_captured_says_so():
    policy = Policy(rules=[Rule(match="a", action="recompute", capture=False)])
    assert policy.to_yaml().endswith("- match: a\n  action: recompute\n  capture: false\n")


def test_what_keeps_everything_is_never_captured():
    assert refusal_of(Rule, match="a", action="keep", capture=False) == (
        "Rule: capture: expected no 'capture' beside action 'keep': it belongs to action 'recompute' or 'checkpoint'; "
        "found false"
    )


def test_a_price_is_written_unless_it_is_the_default():
    policy = Policy(rules=[Rule(match="a", action="recompute", price=3.2e25)])
    assert policy.to_yaml().endswith("- match: a\n  action: recompute\n  price: 3.2e+25\n")
    assert "price" not in Policy(rules=[Rule(match="a", action="recompute", price=PRICE)]).to_yaml()


def test_hold_is_a_size_and_is_written_as_people_write_it():
    for spelling, nbytes, written in (
        ("448MiB", 448 << 20, "448MiB"),
        ("1.5 GiB", 1536 << 20, "1536MiB"),
        (3 << 40, 3 << 40, "3072GiB"),
        (1000, 1000, "1000B"),
        ("40GB", 40 * 10**9, "40GB"),
        (0, 0, "0B"),
        ("0MiB", 0, "0B"),
    ):
        rule = Rule(match="a", action="recompute", hold=spelling)
        assert rule.hold == nbytes
        assert Policy(rules=[rule]).to_yaml().endswith(f"- match: a\n  action: recompute\n  hold: {written}\n")


def test_what_is_no_size_cannot_be_held():
    assert refusal_of(Rule, match="a", action="recompute", hold="much") == (
        "Rule: hold: expected a size such as '40GiB', '512MiB' or '40GB', or bytes as '9000B'; found 'much'"
    )
    assert refusal_of(Rule, match="a", action="checkpoint", hold="1GiB") == (
        "Rule: hold: expected no 'hold' beside action 'checkpoint': it belongs to action 'recompute'; found '1GiB'"
    )


def test_a_rule_says_a_price_or_what_to_hold_but_not_both():
    assert refusal_of(Rule, match="a", action="recompute", price=0, hold="1GiB") == (
        "Rule: hold: expected 'price' or 'hold', not both: each of them says how much runs again; found '1GiB'"
    )


def test_empty_lists_say_nothing_beside_any_action():
    assert Rule(match="a", action="keep", rerun=[], keep=[]) == Rule(match="a", action="keep")


def test_a_family_is_rerun_or_kept_but_not_both():
    assert refusal_of(Rule, match="a", action="recompute", rerun=["gemm"], keep=["attention", "gemm"]) == (
        "Rule: keep: expected 'gemm' in 'rerun' or in 'keep', not in both; found ['attention', 'gemm']"
    )
    Rule(match="a", action="recompute", rerun="gemm", keep="aten.mm")


@pytest.mark.parametrize(
    "op", ["aten.mm.default", "torch.ops.aten.mm", "aten::mm", "aten.", ".mm", "aten..mm", "aten. mm", "aten.*"]
)
def test_an_op_is_kept_by_its_namespace_and_name(op):
    assert refusal_of(Rule, match="a", action="recompute", keep=op) == (
        f"Rule: keep: expected an op as 'namespace.name', without an overload, such as 'aten.mm'; found '{op}'"
    )


@pytest.mark.parametrize("value", ["", "router-logits", "router logits", "2nd", "*", 3, None, True, ["a"]])
def test_what_nothing_could_bear_as_a_name_cannot_be_kept(value):
    assert refusal_of(Rule, match="a", action="recompute", keep=[value]).startswith(
        "Rule: keep[0]: expected a family (gemm, convolution, attention, collective), an op such as 'aten.mm', "
        "the name of a tensor (letters, digits and '_'), or a list of these; found "
    )


def test_a_word_close_to_a_family_names_a_tensor():
    assert Rule(match="a", action="recompute", keep="attenton").keep == ("attenton",)


@given(families | op_name | tensor_name)
def test_a_word_in_keep_has_one_meaning(text):
    assert [text in FAMILIES, is_op_name(text), is_tensor_name(text)].count(True) == 1


@pytest.mark.parametrize(
    ("glob", "expectation"),
    [
        ("", "expected a glob such as '**.mlp', or a list of globs; found ''"),
        (7, "expected a glob such as '**.mlp', or a list of globs; found 7"),
        (None, "expected a glob such as '**.mlp', or a list of globs; found null"),
        ("a..b", "expected a name, '*' or '**' between the dots of a glob, not an empty part; found 'a..b'"),
        (".a", "expected a name, '*' or '**' between the dots of a glob, not an empty part; found '.a'"),
        (
            "a**b",
            "expected '**' alone between dots, as in 'a.**.b': it stands for whole parts of a path; found 'a**b'",
        ),
        (
            "a[0-3]",
            "expected a glob of '*', '**', '?' and plain text; '[' has no meaning here; found 'a[0-3]'",
        ),
        ("{a,b}", "expected a glob of '*', '**', '?' and plain text; '{' has no meaning here; found '{a,b}'"),
    ],
)
def test_a_bad_glob_is_refused_with_what_a_glob_may_be(glob, expectation):
    assert refusal_of(Rule, match=glob, action="keep") == f"Rule: match: {expectation}"


def test_a_class_is_named_without_its_module():
    assert refusal_of(Rule, type="torch.nn.LayerNorm", action="keep") == (
        "Rule: type: expected the name of a class without its module, such as 'LayerNorm'; found 'torch.nn.LayerNorm'"
    )


def test_a_mistake_inside_a_policy_is_located_by_its_whole_key():
    message = refusal_of(Policy, rules=[{"match": "a", "action": "keep"}, {"match": ["a", "b..c"], "action": "keep"}])
    assert message.startswith("Policy: rules[1].match[1]: expected a name")


def test_all_mistakes_are_reported_at_once():
    message = refusal_of(Policy, version=2, nam="x", rules=[{"match": "a"}])
    assert [line.split(": ")[1] for line in message.splitlines()] == ["version", "rules[0].action", "nam"]


@pytest.mark.parametrize(
    ("version", "expectation"),
    [
        (2, "expected 1, the only version of this format that this release reads; found 2"),
        (True, "expected an integer; found true"),
        ("1", "expected an integer; found '1'"),
    ],
)
def test_only_version_1_is_read(version, expectation):
    assert refusal_of(Policy, version=version, rules="none") == f"Policy: version: {expectation}"


def test_policies_need_no_torch():
    """With a bare package in the place of recompute/__init__.py, which is free to need torch."""
    package = Path(recompute.policy.__file__).parents[1]
    script = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "sys.modules['recompute'] = types.ModuleType('recompute')\n"
        f"sys.modules['recompute'].__path__ = [{str(package)!r}]\n"
        "from recompute.policy import loading, matching\n"
        "print(loading.load_policy('full').name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "full\n"
