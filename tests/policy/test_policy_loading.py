"""Where a policy can come from: a policy, a mapping, a file, a preset."""

import os
from pathlib import Path
from types import MappingProxyType

import pytest

from recompute.errors import PolicyError
from recompute.policy.loading import load_policy, preset_names, preset_path
from recompute.policy.rules import Policy, Rule

POLICY = Policy(name="mine", rules=[Rule(match="**.mlp", action="recompute")])
PRESETS = (
    "the presets are alternate, auto, compress, compress-offload, elementwise, full, hook, kernel, long, none, offload"
)


def refusal_of(source, load=load_policy):
    with pytest.raises(PolicyError) as caught:
        load(source)
    return str(caught.value)


def test_a_policy_is_returned_as_it_is():
    assert load_policy(POLICY) is POLICY


def test_a_mapping_is_a_policy_as_a_file_would_be():
    rule = {"match": "**.mlp", "action": "recompute"}
    assert load_policy({"name": "mine", "rules": [rule]}) == POLICY
    assert load_policy(MappingProxyType({"name": "mine", "rules": [rule]})) == POLICY
    assert load_policy({"name": "mine", "rules": (POLICY.rules[0],)}) == POLICY


def test_a_mistake_in_a_mapping_is_located_by_its_key():
    assert refusal_of({"rules": [{"match": "a", "action": "recompte"}]}) == (
        "policy: rules[0].action: expected 'keep', 'recompute', 'checkpoint', 'offload' or "
        "'compress'; found 'recompte' (did you mean 'recompute'?)"
    )


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
@pytest.mark.parametrize("as_type", [str, Path])
def test_a_path_is_read(tmp_path, suffix, as_type):
    path = tmp_path / f"mine{suffix}"
    path.write_text(POLICY.to_yaml())
    assert load_policy(as_type(path)) == POLICY


def test_a_relative_path_is_read_and_named_in_errors_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("rules:\n- match: a\n  action: kep\n")
    assert refusal_of("mine.yaml").startswith("mine.yaml:3:11: rules[0].action: expected ")


def test_an_empty_file_is_an_empty_policy_file_and_a_directory_is_none(tmp_path):
    (tmp_path / "mine.yaml").touch()
    assert refusal_of(tmp_path / "mine.yaml").endswith("mine.yaml: expected a policy; found an empty file")
    assert refusal_of(tmp_path) == f"{tmp_path}: cannot be read as a policy file: Is a directory"


def test_a_bare_name_is_a_preset_even_beside_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("full").write_text("rules: none")
    assert load_policy("full").name == "full"
    assert load_policy(Path("./full").absolute()).rules == ()


def test_a_path_that_is_a_presets_name_is_that_preset():
    assert load_policy(Path("full")) == load_policy("full")


@pytest.mark.parametrize(
    ("source", "suggestion"),
    [
        ("hok", " (did you mean 'hook'?)"),
        ("xyzzy", ""),
        ("conf/kernal.yaml", " (did you mean 'kernel'?)"),
        (Path("plan.yaml"), ""),
    ],
)
def test_an_unknown_name_or_path_suggests_the_nearest_preset_and_lists_them_all(source, suggestion):
    assert refusal_of(source) == f"no preset and no file is named '{source}'{suggestion}; {PRESETS}"


@pytest.mark.parametrize(("source", "found"), [(None, "None"), (3, "3"), ([POLICY.rules[0]], "[Rule(")])
def test_what_is_no_source_of_a_policy_is_refused(source, found):
    assert refusal_of(source).startswith(
        f"expected a policy: a preset's name, a path, a mapping or a Policy; found {found}"
    )


def test_the_presets_are_the_files_of_the_policies_folder():
    assert preset_names() == (
        *("alternate", "auto", "compress", "compress-offload", "elementwise", "full", "hook", "kernel", "long", "none"),
        "offload",
    )
    folder = Path(__file__).parents[2] / "policies"
    if folder.is_dir():
        assert preset_names() == tuple(sorted(path.stem for path in folder.glob("*.yaml")))


def test_the_file_of_a_preset_can_be_read_and_loaded_by_its_path():
    assert load_policy(preset_path("hook")) == load_policy("hook")
    assert os.access(preset_path("hook"), os.R_OK)


def test_the_file_of_no_preset_is_refused():
    assert refusal_of("ful", preset_path) == f"no preset is named 'ful' (did you mean 'full'?); {PRESETS}"
