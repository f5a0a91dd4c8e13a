"""Reading one YAML document: each kind of mistake has its own error, with file, line and key."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recompute.ablation.ablation_config import AblationConfig
from recompute.errors import PolicyError
from recompute.policy.document import dump_document, load_document, parse_document
from recompute.policy.rules import Policy

KEYS_OF_A_RULE = (
    "match, type, layers, action, via, rerun, keep, price, hold, capture, "
    "compiled, compress, tile, offload, fraction, min_bytes, max_host_bytes"
)


def refusal_of(text, model_class=Policy, kind="policy"):
    with pytest.raises(PolicyError) as caught:
        parse_document(model_class, text, label="p.yaml", kind=kind)
    return str(caught.value)


def file_refusal(path):
    with pytest.raises(PolicyError) as caught:
        load_document(Policy, path, kind="policy")
    return str(caught.value).replace(str(path.parent), "")


def test_a_file_is_read_and_its_errors_name_it_as_it_was_named(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("rules:\n  - match: a\n    action: keep\n    layers: 9-3\n")
    assert file_refusal(path) == (
        "/p.yaml:4:13: rules[0].layers: expected a range from low to high, such as '3-9'; found '9-3'"
    )
    path.write_text("\ufeffrules:\n  - match: a\n    action: keep\n", encoding="utf-8")
    assert load_document(Policy, str(path)).rules[0].match == ("a",)


REFUSED = [
    ("rules:\n- match: a\n  actoin: keep\n  action: keep\n",
        f"3:3: rules[0].actoin: unknown key (did you mean 'action'?); expected one of {KEYS_OF_A_RULE}"),
    ("zzz: 1\nrules: none\n", "1:1: zzz: unknown key; expected one of version, name, description, rules"),
    ("name: [a]\nrules: none", "1:7: name: expected a string; found ['a']"),
    ("rules: 3", "1:8: rules: expected a list; found 3"),
    ("rules: [3]", "1:9: rules[0]: expected a mapping; found 3"),
    ("name:\n\nrules: none", "1:1: name: expected a string; found null"),  # on the line of its key
    ("version: 1.0\nrules: none", "1:10: version: expected an integer; found 1.0"),
    *((text, f"{1 + text.count(chr(10))}:1: expected a policy, which is a mapping; found {found}")
        for text, found in (("[a, b]", "a list"), ("- a", "a list"), ("hello", "'hello'"), ("---\n~", "'~'"))),
    ("name: x\nrules: [a\n",
        "3:1: not valid YAML: while parsing a flow sequence: expected ',' or ']', but got '<stream end>'"),
    (
        "name: x\nrules:\n- match: a\n  action: keep\n  match: b\n",
        '5:3: not valid YAML: while constructing a mapping: found duplicate key "match" with value "b" (original '
        'value: "a")',
    ),
    ("rules: none\n---\nrules: none\n", "3:1: expected one policy a file; found a second document, which starts here"),
    ("rules: none\n1: 2\n", "2:1: 1: expected a string as key; found 1"),
    ("rules: none\nname: '\x07'\n", "2: not valid YAML: the control character '\\x07' has to be escaped"),
    *((text, " expected a policy; found an empty file") for text in ("", "\n\n", "# only a comment\n")),
]  # fmt: skip
A_RULE = "rules:\n- match: a\n  action: recompute\n  "
REFUSED_AS = [
    (A_RULE + "via: kernal", "4:8: rules[0].via: expected 'hook', 'kernel' or 'auto'", "(did you mean 'kernel'?)"),
    ("rules:\n- via: hook\n  match: a\n  action: checkpoint", "2:8: rules[0].via: expected no 'via' ", "'hook'"),
    (A_RULE + "rerun: [gemm, atention]", "4:17: rules[0].rerun[1]: expected 'gemm'", "(did you mean 'attention'?)"),
    (A_RULE + "rerun: [gemm]\n  keep: [attention, gemm]", "5:9: rules[0].keep: ", "found ['attention', 'gemm']"),
    (A_RULE + "price: .inf", "4:10: rules[0].price: expected a number", "found inf"),
    (A_RULE + "keep:\n  - gemm\n  - aten.mm.default", "6:5: rules[0].keep[1]: expected an op", "'aten.mm.default'"),
    ("rules:\n- {action: keep, layers: [0-3, every 0]}", "2:32: rules[0].layers[1]: expected a step", "'every 0'"),
    ("name: x\nrules:\n- match: a", "3:3: rules[0].action: this key is required, and missing", ""),
    ("rules:\n- action: keep", "2:3: rules[0]: expected at least one of", "found {'action': 'keep'}"),
    ("rules:\n\t- action: keep", "2:1: not valid YAML: ", "; indent by spaces, not by tabs"),
    ("version: 2\nrules: none", "1:10: version: expected 1, the only version", "found 2"),
    *((f"rules:\n- action: keep\n  match: {glob}\n", "3:1", "; a value that starts with '*' has to be in quotes")
        for glob in ("**.mlp", "*.mlp", "*")),
    ("rules: none\nname: !!python/object/apply:os.getcwd []\n",
        "2:7: not valid YAML: could not determine a constructor for the tag", ""),
    ("rules: &a [*a]", "1:8: rules[0]: expected a mapping; found [[", ""),
    ("rules: " + "[" * 700, " a value cannot be read: maximum recursion", ""),
]  # fmt: skip
"""What the message begins with after the file, and what it ends with: of most test_policy_rules says all of it."""


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_a_mistake_is_reported_where_it_stands_with_what_is_expected(text, message):
    assert refusal_of(text) == f"p.yaml:{message}"


@pytest.mark.parametrize(("text", "start", "end"), REFUSED_AS, ids=[text[:40] for text, *_ in REFUSED_AS])
def test_so_is_what_a_rule_and_what_yaml_itself_refuse(text, start, end):
    message = refusal_of(text)
    assert message.startswith(f"p.yaml:{start}")
    assert message.endswith(end)


@pytest.mark.parametrize("spelling", ["3.2e10", "3.2E+10", "32_000_000_000", "32000000000.0"])
def test_a_price_is_any_number_of_yaml(spelling):
    text = f"rules:\n- match: a\n  action: recompute\n  price: {spelling}"
    (rule,) = parse_document(Policy, text).rules
    assert rule.price == 3.2e10
    assert type(rule.price) is float


def test_several_mistakes_are_reported_one_a_line_in_the_order_of_the_file():
    message = refusal_of("verson: 1\nrules:\n- mach: x\n  actoin: keep\n- match: 3\n  action: kep\n")
    assert [line.split(": ")[:2] for line in message.splitlines()] == [
        ["p.yaml:1:1", "verson"], ["p.yaml:3:3", "rules[0].action"], ["p.yaml:3:3", "rules[0].mach"],
        ["p.yaml:4:3", "rules[0].actoin"], ["p.yaml:5:10", "rules[1].match"], ["p.yaml:6:11", "rules[1].action"],
    ]  # fmt: skip


def test_anchors_merge_keys_and_dates_are_read_as_people_mean_them():
    policy = parse_document(
        Policy, "name: 2024-02-30\nrules:\n- &mlp {match: '**.mlp', action: recompute}\n- {<<: *mlp, layers: 0-3}\n"
    )
    assert policy.name == "2024-02-30"
    assert policy.rules[1].match == policy.rules[0].match
    assert policy.rules[1].layers[0].selects(3, 4)


def test_what_is_no_file_of_text_says_so(tmp_path):
    gone, folder, latin = (tmp_path / name for name in ("gone.yaml", "policies", "latin.yaml"))
    folder.mkdir()
    latin.write_bytes(b"rules: none\nname: caf\xe9\n")
    assert file_refusal(gone) == "/gone.yaml: cannot be read as a policy file: No such file or directory"
    assert file_refusal(folder) == "/policies: cannot be read as a policy file: Is a directory"
    assert file_refusal(latin) == "/latin.yaml:2: expected UTF-8 text; found byte 0xe9"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " expected a configuration; found an empty file"),
        ("dtype: float23", "1:8: dtype: expected 'float32', 'bfloat16' or 'autocast'; found 'float23' "
            "(did you mean 'float32'?)"),
        ("model: {hidden_size: 0}", "1:22: model.hidden_size: expected greater than 0; found 0"),
        ("model: {hidden_siz: 1}", "1:9: model.hidden_siz: unknown key (did you mean 'hidden_size'?); expected one of "
            "hidden_size, intermediate_size, layers, heads, kv_heads"),
        ("longest_sequence: {}", "1:19: longest_sequence.budget: this key is required, and missing"),
        ("longest_sequence: {budget: [3]}",
            "1:28: longest_sequence.budget: expected a string or an integer; found [3]"),
    ],
)  # fmt: skip
def test_a_configuration_gets_the_same_errors_without_a_word_of_policies(text, message):
    assert refusal_of(text, AblationConfig, "configuration") == f"p.yaml:{message}"


@given(
    st.text(st.sampled_from("rules:match action-keep[]{}&*!'\"|>#%@\n\t0123456789.,~<\\\x00é"), max_size=60) | st.text()
)
def test_any_text_is_read_or_refused_but_never_anything_else(text):
    with contextlib.suppress(PolicyError):
        assert isinstance(parse_document(Policy, text), Policy)


@given(st.text(st.characters()))
def test_any_string_survives_being_written_and_read(text):
    assert parse_document(Policy, dump_document({"rules": "none", "name": text})).name == text
