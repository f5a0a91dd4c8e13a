"""Rules and policies made in Python: what they accept, hold, write and refuse."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute.errors import PolicyError
from recompute.policy.document import parse_document
from recompute.policy.loading import load_policy
from recompute.policy.rules import FAMILIES, PRICE, REPEATABLE, LayerSpan, Policy, Rule, is_op_name, is_tensor_name


def refusal_of(make, /, *unnamed, **values):
    with pytest.raises(PolicyError) as caught:
        make(*unnamed, **values)
    return str(caught.value)


def selected(selector, count):
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
def rules(draw):
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
        "fraction=1.0, min_bytes=1048576, max_host_bytes=None)"
    )


def test_a_rule_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Rule(match="a", action="keep").action = "recompute"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (3, [3]), ("3", [3]), ("2-4", [2, 3, 4]), ("2 - 4", [2, 3, 4]), ("5-5", [5]), ("4-15", [4, 5, 6, 7]),
        ("every 2", [0, 2, 4, 6]), ("every 3 from 1", [1, 4, 7]), ("first 3", [0, 1, 2]), ("last 3", [5, 6, 7]),
        ("first 99", list(range(8))), ("last 99", list(range(8))), (8, []), ("every 2 from 8", []),
    ],
)  # fmt: skip
def test_a_layer_selector_names_these_of_eight_layers(selector, expected):
    assert selected(selector, 8) == expected


def test_the_last_layers_depend_on_how_many_there_are():
    assert selected("last 2", 4) == [2, 3]
    assert selected("last 2", 40) == [38, 39]


def test_sizes_of_offloading_are_read_as_people_write_them():
    rule = Rule(match="a", action="offload", fraction=0.5, min_bytes="64KiB", max_host_bytes="40GB")
    assert (rule.min_bytes, rule.max_host_bytes) == (64 << 10, 40 * 10**9)
    assert Rule(match="a", action="checkpoint", offload=True, min_bytes=0).min_bytes == 0
    text = Policy(rules=[rule]).to_yaml()
    assert "fraction: 0.5" in text
    assert "max_host_bytes: 40GB" in text
    assert "min_bytes: 64KiB" in text


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"rerun": "gemm", "keep": ["attention", "aten._softmax", "router_logits"]}, {"rerun": ("gemm",)}),
        ({"keep": ["attention", "aten._softmax"]}, {"keep": ("attention", "aten._softmax")}),
        ({"action": "checkpoint", "keep": "attention"}, {"keep": ("attention",)}),
        ({"keep": "attenton"}, {"keep": ("attenton",)}),  # close to a family, it names a tensor
        ({"rerun": "gemm", "keep": "aten.mm"}, {"keep": ("aten.mm",)}),
        ({"action": "keep", "rerun": [], "keep": []}, {"rerun": (), "keep": ()}),  # which say nothing
        ({"action": "compress", "offload": True, "fraction": 0.5}, {"offload": True, "fraction": 0.5}),
        ({"tile": 16384}, {"tile": 16384}),
    ],
    ids=str,
)
def test_a_rule_holds_what_it_was_given(values, kept):
    rule = Rule(**{"match": "a", "action": "recompute", **values})
    assert {key: getattr(rule, key) for key in kept} == kept


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"capture": False}, "capture: false"),
        ({"price": 3.2e25}, "price: 3.2e+25"),
        ({"price": PRICE}, "action: recompute"),  # the default
        *(
            ({"hold": spelling}, f"hold: {written}")
            for spelling, written in {
                "448MiB": "448MiB", "1.5 GiB": "1536MiB", 3 << 40: "3072GiB", 1000: "1000B", "40GB": "40GB", 0: "0B",
                "0MiB": "0B",
            }.items()
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_rule_says_is_written_as_people_write_it(values, line):
    text = Policy(rules=[Rule(match="a", action="recompute", **values)]).to_yaml()
    assert text.splitlines()[-1] == f"  {line}"
    assert parse_document(Policy, text) == Policy(rules=[Rule(match="a", action="recompute", **values)])


@given(families | op_name | tensor_name)
def test_a_word_in_keep_has_one_meaning(text):
    assert [text in FAMILIES, is_op_name(text), is_tensor_name(text)].count(True) == 1


ONLY = "expected no {key!r} beside action {action!r}: it belongs to action 'recompute'; found {found}"
GLOB = "expected a glob such as '**.mlp', or a list of globs; found "
PLAIN = "expected a glob of '*', '**', '?' and plain text; "
EMPTY_PART = "expected a name, '*' or '**' between the dots of a glob, not an empty part; found "
SHARE = "expected a share above 0 and up to 1, such as 0.5; found "
OP = "expected an op as 'namespace.name', without an overload, such as 'aten.mm'; found "
SIZE = "expected a size such as '40GiB', '512MiB' or '40GB'"
OF_OFFLOADING = "expected no {!r} here: it belongs to action 'offload', or beside 'offload: true'"
REFUSED = [
    ({"layers": "5-2"}, "layers: expected a range from low to high, such as '2-5'; found '5-2'"),
    ({"layers": -1}, "layers: expected layer numbers from 0 up ('last 1' is the last layer); found -1"),
    ({"layers": "-3"}, "layers: expected layer numbers from 0 up ('last 1' is the last layer); found '-3'"),
    ({"layers": "every 0"}, "layers: expected a step of at least 1; found 'every 0'"),
    ({"layers": "last 0"}, "layers: expected at least 1 layer, such as 'last 1'; found 'last 0'"),
    ({"layers": "first 0"}, "layers: expected at least 1 layer, such as 'first 1'; found 'first 0'"),
    ({"layers": ["0-3", "9-5"]}, "layers[1]: expected a range from low to high, such as '5-9'; found '9-5'"),
    (
        {"mach": "**.mlp"},
        "mach: unknown key (did you mean 'match'?); expected one of match, type, layers, action, via, rerun, keep, "
        "price, hold, capture, compiled, compress, tile, offload, fraction, min_bytes, max_host_bytes",
    ),
    (
        {"action": "checkpont"},
        "action: expected 'keep', 'recompute', 'checkpoint', 'offload' or 'compress'; found 'checkpont' "
        "(did you mean 'checkpoint'?)",
    ),
    *(
        ({"action": action, key: found}, f"{key}: " + ONLY.format(key=key, action=action, found=text))
        for action in ("keep", "checkpoint")
        for key, found, text in (
            ("via", "hook", "'hook'"), ("rerun", "gemm", "'gemm'"), ("price", 0, "0"), ("hold", "1GiB", "'1GiB'"),
            ("tile", 8, "8"), ("compress", True, "true"),
        )
    ),
    *(
        (
            {key: found},
            f"{key}: expected no {key!r} beside action 'keep': it belongs to action 'recompute' or 'checkpoint'; "
            f"found {text}",
        )
        for key, found, text in (("keep", ["aten.mm"], "['aten.mm']"), ("capture", False, "false"))
    ),
    ({"action": "recompute", "tile": 0}, "tile: expected a number of tokens from 1 up, such as 16384; found 0"),
    (
        {"action": "recompute", "via": "hook", "tile": 8},
        "tile: expected no 'tile' beside 'via: hook', which runs a module as it is written; found 8",
    ),
    ({"action": "recompute", "hold": "much"}, f"hold: {SIZE}, or bytes as '9000B'; found 'much'"),
    (
        {"action": "recompute", "price": 0, "hold": "1GiB"},
        "hold: expected 'price' or 'hold', not both: each of them says how much runs again; found '1GiB'",
    ),
    (
        {"action": "recompute", "rerun": ["gemm"], "keep": ["attention", "gemm"]},
        "keep: expected 'gemm' in 'rerun' or in 'keep', not in both; found ['attention', 'gemm']",
    ),
    *(
        ({"action": "recompute", "keep": op}, f"keep: {OP}'{op}'")
        for op in (
            *("aten.mm.default", "torch.ops.aten.mm", "aten::mm", "aten.", ".mm", "aten..mm", "aten. mm", "aten.*"),
        )
    ),
    ({"match": ""}, f"match: {GLOB}''"),
    ({"match": 7}, f"match: {GLOB}7"),
    ({"match": None}, f"match: {GLOB}null"),
    ({"match": "a..b"}, f"match: {EMPTY_PART}'a..b'"),
    ({"match": ".a"}, f"match: {EMPTY_PART}'.a'"),
    (
        {"match": "a**b"},
        "match: expected '**' alone between dots, as in 'a.**.b': it stands for whole parts of a path; found 'a**b'",
    ),
    ({"match": "a[0-3]"}, f"match: {PLAIN}'[' has no meaning here; found 'a[0-3]'"),
    ({"match": "{a,b}"}, f"match: {PLAIN}'{{' has no meaning here; found '{{a,b}}'"),
    (
        {"type": "torch.nn.LayerNorm"},
        "type: expected the name of a class without its module, such as 'LayerNorm'; found 'torch.nn.LayerNorm'",
    ),
    ({"action": "offload", "fraction": 0}, f"fraction: {SHARE}0"),
    ({"action": "offload", "fraction": 1.5}, f"fraction: {SHARE}1.5"),
]  # fmt: skip
"""Of a rule that matches 'a' and keeps, with these values beside or in their place."""
A_SELECTOR = (
    "layers: expected a layer number, or '0-15', 'every 2', 'every 2 from 1', 'first 4' or 'last 4', or a list of "
    "these; found "
)
A_NAME = (
    "keep[0]: expected a family (gemm, convolution, attention, collective), an op such as 'aten.mm', the name of a "
    "tensor (letters, digits and '_'), or a list of these; found "
)
A_PRICE = "price: expected a number from 0 up: the bytes that may be held to save a second, such as 3.2e10; found "
REFUSED_AS = [
    *(({"layers": value}, A_SELECTOR)
        for value in ("fifth", "0-", "every", "every 2 from", "last", "1.5", 1.5, True, "0-3, 7", "", [])),
    *(({"action": "recompute", "keep": [value]}, A_NAME)
        for value in ("", "router-logits", "router logits", "2nd", "*", 3, None, True, ["a"])),
    *(({"action": "recompute", "price": value}, A_PRICE)
        for value in (-1, -1e-9, float("inf"), float("nan"), 10**400, True, "1e9", None, [1.0])),
    *(({"action": "recompute", "rerun": value}, "rerun") for value in ("gem", "aten.mm", 3, None, [["gemm"]])),
    *(({"action": action, key: value}, f"{key}: {OF_OFFLOADING.format(key)}")
        for action in ("keep", "recompute", "checkpoint")
        for key, value in {"fraction": 0.5, "min_bytes": 0, "max_host_bytes": 1}.items()),
    ({"action": "offload", "min_bytes": "1 parsec"}, f"min_bytes: {SIZE}"),
    ({"action": "offload", "max_host_bytes": "50%"}, f"max_host_bytes: {SIZE}"),
    ({"action": "offload", "via": "hook"}, "via: expected no 'via' beside action 'offload'"),
    ({"action": "offload", "offload": True}, "offload: expected no 'offload' beside action 'offload'"),
]  # fmt: skip
"""What the message begins with."""


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[repr(values) for values, _ in REFUSED])
def test_what_a_rule_cannot_mean_is_refused_by_its_key(values, message):
    assert refusal_of(Rule, **{"match": "a", "action": "keep", **values}) == f"Rule: {message}"


@pytest.mark.parametrize(("values", "message"), REFUSED_AS, ids=[repr(values)[:60] for values, _ in REFUSED_AS])
def test_so_is_what_is_no_value_of_its_key(values, message):
    found = refusal_of(Rule, **{"match": "a", "action": "keep", **values})
    assert found.startswith(f"Rule: {message}")
    if message == "rerun":
        assert ": expected 'gemm', 'convolution' or 'attention'; found " in found


def test_what_a_rule_needs_is_asked_for():
    assert refusal_of(Rule, match="a") == "Rule: action: this key is required, and missing"
    assert refusal_of(Rule, action="keep") == (
        "Rule: expected at least one of match, type and layers; found {'action': 'keep'}"
    )
    assert refusal_of(Rule, "block", action="keep") == (
        "Rule: expected values with keywords, such as match=, type=, layers=, action=; found 'block' without one. "
        "Write its keyword before it"
    )


def test_mistakes_inside_a_policy_are_reported_at_once_each_located_by_its_whole_key():
    message = refusal_of(Policy, rules=[{"match": "a", "action": "keep"}, {"match": ["a", "b..c"], "action": "keep"}])
    assert message.startswith("Policy: rules[1].match[1]: expected a name")
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
