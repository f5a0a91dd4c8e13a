"""What ``recompute/engine/README.md`` says of files and invariants is so."""

import re
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "recompute" / "engine"
README = (ENGINE / "README.md").read_text()


def test_the_table_has_each_file_once_and_no_other():
    named = re.findall(r"^\| `([\w/]+\.py)` \|", README, re.MULTILINE)
    files = [path.relative_to(ENGINE).as_posix() for path in ENGINE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(named) == sorted(files)


def test_there_are_eleven_invariants_each_with_an_example_and_what_follows():
    sections = re.split(r"^### ", README, flags=re.MULTILINE)[1:]
    assert [int(section.split(".")[0]) for section in sections] == list(range(1, 12))
    for section in sections:
        assert section.count("*Example:*") == section.count("*It follows* that") == 1, section.split("\n")[0]


def test_code_cites_invariants_that_there_are_in_one_form():
    lines = [
        f"{path.name}: {line}"
        for path in ENGINE.parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if "invariant" in line
    ]
    assert lines
    cited = re.compile(r"\binvariants? ([1-9]|1[01])( and ([1-9]|1[01]))?\b(?! and \d)")
    assert [line for line in lines if not cited.search(line)] == []
