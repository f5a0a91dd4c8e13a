"""Files that a user names: found below ``~``, written as a whole or not at all, and never replaced unasked."""

import errno
import os
import re
from pathlib import Path

import pytest
from test_cli import recompute

from recompute import files, load_policy
from recompute.ablation import results
from recompute.ablation.subjects import load_text
from recompute.errors import PlanError, PolicyError, WriteError
from recompute.files import check_new, check_writable, user_path, write_file
from recompute.policy.rules import Rule

POLICY = "rules: [{type: block, action: checkpoint}]\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_tilde_is_the_users_home_wherever_a_path_is_read(home):
    (home / "mine.yaml").write_text(POLICY, encoding="utf-8")
    (home / "config.json").write_text("{}", encoding="utf-8")
    (home / "results.json").write_text('{"rows": []}', encoding="utf-8")
    assert load_policy("~/mine.yaml").rules[0].action == "checkpoint"
    assert load_text(Path("~/mine.yaml"))[1] == POLICY.encode()
    assert results.load(Path("~")) == {"rows": []}
    for command in (["explain", "full"], ["estimate"], ["plan", "--budget", "1GiB", "--gpu", "h100"]):
        code, output = recompute(*command, "--model", "~/config.json")
        assert (code, f"{home}/config.json: expected a model_type" in output) == (2, True)
    write_file("~/deep/file", "text")
    check_writable("~/folder", error=PlanError, is_folder=True)
    assert (home / "deep" / "file").read_text(encoding="utf-8") == "text"
    assert (home / "folder").is_dir()
    assert user_path("a/~b") == Path("a/~b")


def full(self, data):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_written_is_told_and_leaves_what_was_there(tmp_path, monkeypatch):
    file = tmp_path / "plan.yaml"
    write_file(file, "old")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(WriteError, match=r"plan\.yaml: cannot be written: No space") as caught:
        write_file(file, "new")
    monkeypatch.undo()
    assert "Free some space there, or write to another folder" in str(caught.value)
    assert isinstance(caught.value, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]
    assert file.read_text(encoding="utf-8") == "old"
    with pytest.raises(WriteError, match=r"plan\.yaml/below: cannot be written: .* Make it writable"):
        write_file(file / "below", "new")


def test_a_link_stays_one_and_a_device_is_written_to(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    write_file(link, b"bytes")
    assert link.is_symlink()
    assert (tmp_path / "file").read_bytes() == b"bytes"
    write_file("/dev/null", "text")
    assert not Path("/dev/null").is_file()
    with pytest.raises(WriteError, match="/dev/full: cannot be written: No space left on device"):
        write_file("/dev/full", "text")


def test_where_nothing_can_be_written_is_told(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path, is_folder in ((file / "plan.yaml", False), (file / "results", True), (tmp_path, False)):
        with pytest.raises(PlanError, match=r": expected a (file|folder) that can be written; "):
            check_writable(path, error=PlanError, is_folder=is_folder)
    check_writable(tmp_path / "deep" / "plan.yaml", error=PlanError)
    assert (tmp_path / "deep").is_dir()
    assert not list((tmp_path / "deep").iterdir())


def test_only_files_that_are_there_are_in_the_way(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    with pytest.raises(PlanError, match=r"/a, .*/b are there already\. Do this$"):
        check_new([tmp_path / name for name in "abc"], error=PlanError, others="Do this")
    check_new([tmp_path / "c", tmp_path, "/dev/stdout"], error=PlanError, others="")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ablate", "--out", "{}"], "results.json"),
        (["ablate", "--out", "{}"], "report.html"),
        (["ablate", "--out", "{}", "--resume"], "results.md"),
        (["plan", "--budget", "1GiB", "--model", "gone", "--out", "{}/plan.yaml"], "plan.yaml"),
        (["plan", "--budget", "1GiB", "--model", "gone", "--save-profile", "{}/p.json"], "p.json"),
    ],
)
def test_no_command_replaces_a_file_unasked(command, name, tmp_path):
    (tmp_path / name).write_text("precious", encoding="utf-8")
    code, output = recompute(*(word.format(tmp_path) for word in command))
    assert code == 2
    assert output.startswith(f"recompute: {tmp_path / name} is there already. ")
    assert re.search("Pass .*--overwrite to replace", output)
    assert (tmp_path / name).read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"version": 1,\n "model": {', ":2:12: not valid JSON: the file ends in the middle of the profile"),
        ('{"version": 1,\n "model" 2}', ":2:10: not valid JSON: expecting ':' delimiter"),
        ("hello", ":1:1: not valid JSON: expecting value"),
        ("", ": expected a profile; found an empty file"),
    ],
)
def test_a_broken_profile_is_told_as_json(text, found, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    assert recompute("plan", "--budget", "1GiB", "--profile", path) == (2, f"recompute: {path}{found}\n")


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["explain", "{}", "--model", "gpt2"], "policy"),
        (["ablate", "{}"], "configuration"),
        (["plan", "--budget", "1GiB", "--profile", "{}"], "profile"),
    ],
)
def test_a_file_of_another_kind_is_told_in_a_line(command, kind, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("version: 1\nalpha: {}\nomega: {}\n", encoding="utf-8")
    code, output = recompute(*(word.format(path) for word in command))
    assert code == 2
    assert re.fullmatch(rf"recompute: .*: expected a {kind}, .*; found another file, with alpha, omega\n", output)


@pytest.mark.parametrize("key", ["hold", "min_bytes", "max_host_bytes"])
def test_a_size_in_a_file_has_its_unit_and_in_code_a_number_is_bytes(key, tmp_path):
    path = tmp_path / "mine.yaml"
    rule = {"type": "block", "action": "recompute", "offload": True, key: 448}
    assert getattr(Rule(**rule), key) == getattr(load_policy({"rules": [rule]}).rules[0], key) == 448
    path.write_text(POLICY.replace("checkpoint", f"recompute, offload: true, {key}: 448"), encoding="utf-8")
    with pytest.raises(
        PolicyError, match=rf"{key}: expected a size with its unit, such as '448MiB', or '448B' .* 448$"
    ):
        load_policy(path)
    path.write_text(load_policy({"rules": [rule]}).to_yaml(), encoding="utf-8")
    assert getattr(load_policy(path).rules[0], key) == 448


def test_the_png_of_a_figure_needs_no_file():
    from matplotlib.figure import Figure

    assert files.png_of(Figure()).startswith(b"\x89PNG")
