"""The pages: every link leads somewhere, every code block runs, every command parses, every figure is the data's.

In the pages, a code block is marked by what stands behind its opening fence:

- ``python``: it runs here, by itself, with the names that ``given`` makes.
- ``python no-run``: it needs several processes. It compiles, and what it imports is there.
- ``sh``: the options of each command are known. The cheap commands run.
- ``yaml``: a policy file, or a list of rules. It loads.
- ``python excerpt`` and ``yaml excerpt``: lines of a file in examples/stacks, which tests run.
- ``text``: what a command prints, or a picture.
"""

import ast
import configparser
import importlib
import inspect
import json
import os
import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from ruamel.yaml import YAML
from test_house import FOLDERS
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from typer.testing import CliRunner

import recompute
from recompute import cli
from recompute.ablation import ablation_report
from recompute.integrations.transformers import RecomputeTrainingArguments
from recompute.policy.loading import load_policy, preset_names
from recompute.policy.rules import Policy

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "examples" / "ablation" / "results"


def _pages():
    for folder, inner, files in os.walk(ROOT):  # which follows no links: a page is met once
        inner[:] = [name for name in inner if not name.startswith(".") and name not in ("build", "dist")]
        yield from (Path(folder, name) for name in files if name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))


PAGES = sorted(_pages())
GUIDES = [page for page in PAGES if "results" not in page.parts]


KINDS = ("python", "python no-run", "python excerpt", "sh", "yaml", "yaml excerpt", "text")


def _name(page):
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    info: str
    text: str

    def __str__(self):
        return f"{_name(self.page)}:{self.line}"


def _blocks(page):
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$", text, re.MULTILINE):
        yield Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2])


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def of_kind(*infos):
    found, slow = (block for block in BLOCKS if block.info in infos), pytest.mark.slow
    return [pytest.param(each, id=str(each), marks=slow if "recompute.profile(" in each.text else ()) for each in found]


def prose(page):
    """The text of a page without its fenced blocks."""
    return re.sub(r"^```.*\n(?:.*\n)*?```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)


def anchors(page):
    """What a link may name behind ``#``, as GitHub makes it of a heading."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_kind_of_block_is_known():
    assert {block.info for block in BLOCKS} <= {*KINDS}
    for page in PAGES:
        fences = re.findall("^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS), _name(page)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page):
    text = re.sub("`[^`\n]*`", "", prose(page))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^]]+\]: (\S+)$", text, re.MULTILINE)
    assert text.count("](") == len(re.findall(r"\]\(([^)\s]+)\)", text)), "a link is broken over two lines"
    for target in targets:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{target} is no file"
        assert not anchor or anchor in anchors(found), f"{target} is no heading of {_name(found)}"


def test_the_readme_fits_a_few_screens():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120] == []


def test_what_is_to_be_read_at_a_sitting_is_short():
    study = ROOT / "examples" / "ablation" / "study" / "README.md"
    assert len(study.read_text(encoding="utf-8").splitlines()) <= 250
    words = (
        (ROOT / "recompute" / "README.md").read_text(encoding="utf-8").partition("## Words")[2].partition("\n## ")[0]
    )
    assert len(re.findall(r"^\| ", words, re.MULTILINE)) <= 1 + 15


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_lines_are_short(page):
    printed = {line for block in _blocks(page) if block.info == "text" for line in block.text.splitlines()}
    lines = set(page.read_text(encoding="utf-8").splitlines()) - printed
    assert [line for line in lines if len(line) > 120] == []


def test_the_table_of_the_house_has_every_folder_in_its_order():
    section = (ROOT / "recompute" / "README.md").read_text(encoding="utf-8").partition("## The house")[2]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    listed = [name.strip("` ").removesuffix(".py") for row in rows for name in row.split(",")]
    assert listed == ["__init__", *dict.fromkeys(entry.split(".")[0] for entry in FOLDERS)]


def test_the_readme_has_the_public_names_and_the_presets():
    text = README.read_text(encoding="utf-8")
    names = re.search(r"The names of `recompute` stay: ([^.]*)\.", text)
    assert names is not None
    assert set(re.findall("`([^`]*)`", names[1])) == set(recompute.__all__)
    table = text.partition("## Presets")[2].partition("\n## ")[0]
    assert set(re.findall("^[|] `([^`]*)`", table, re.MULTILINE)) == set(preset_names())


def test_the_words_are_those_of_the_code():
    section = (ROOT / "recompute" / "README.md").read_text(encoding="utf-8").partition("## Words")[2]
    words = set(re.findall("`([A-Z][A-Za-z]+)`", section.partition("\n## ")[0]))
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "recompute").rglob("*.py")]
    classes = {name for source in sources for name in re.findall(r"^class (\w+)", source, re.MULTILINE)}
    assert words
    assert words <= classes


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What the code blocks take for granted, in a folder of their own.

    A small Llama stands for the reader's model, in training; ``mine.yaml`` is the policy file that policies/README.md
    shows; a trainer is only there to be called.
    """
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, use_cache=False, **shape)
    ids = torch.randint(64, (1, 16))
    mine = next(block.text for block in BLOCKS if block.info == "yaml" and "name: mine" in block.text)
    (tmp_path / "mine.yaml").write_text(mine, encoding="utf-8")
    return {
        "batch": {"input_ids": ids, "labels": ids},
        "dataset": [{"input_ids": ids[0], "labels": ids[0]}],
        "make_model": lambda: LlamaForCausalLM(config),
        "model": LlamaForCausalLM(config).train(),
        "trainer": SimpleNamespace(train=lambda: None),
        "training_arguments": TrainingArguments("out", report_to="none"),
    }


@pytest.mark.filterwarnings("ignore::recompute.errors.PolicyWarning")
@pytest.mark.parametrize("block", of_kind("python"))
def test_code_runs(block, given):
    exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), {"__name__": "page", **given})


def test_the_words_of_explain_are_explained(given):
    guide = (ROOT / "policies" / "README.md").read_text(encoding="utf-8")
    section = guide.partition("## How to read explain")[2].partition("\n## ")[0]
    words = re.findall(r"^\| `([^`]*)` \|", section, re.MULTILINE)
    assert {"rule", "made by", "alive"} <= set(words)
    rule = load_policy("offload").rules[0].model_copy(update={"min_bytes": 0})
    handle = recompute.apply(given["model"], Policy(rules=[rule]))
    given["model"](**given["batch"]).loss.backward()
    explained = handle.explain()
    assert [word for word in words if word not in explained] == []


@pytest.mark.parametrize("block", of_kind("python no-run"))
def test_code_that_does_not_run_here_compiles_and_imports_what_there_is(block):
    tree = ast.parse(block.text)
    assert [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(importlib.import_module(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


@pytest.mark.parametrize("block", of_kind("yaml"))
def test_policies_load(block, tmp_path):
    read = YAML(typ="safe").load(block.text)
    if isinstance(read, list):
        assert len(recompute.load_policy({"rules": read}).rules) == len(read)
    else:
        (tmp_path / "policy.yaml").write_text(block.text, encoding="utf-8")
        assert recompute.load_policy(tmp_path / "policy.yaml").name == read["name"]


@pytest.mark.parametrize("block", of_kind("python excerpt", "yaml excerpt"))
def test_an_excerpt_stands_in_a_file(block):
    files = (ROOT / "examples" / "stacks").iterdir()
    assert [file for file in files if file.is_file() and block.text in file.read_text(encoding="utf-8")]


def commands(block):
    """The words of each line, without comments and without the environment in front."""
    for line in block.text.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            yield words


COMMANDS = typer.main.get_command(cli.app)


def parse(words):
    """Raises if a command of ours does not take these options."""
    COMMANDS.commands[words[1]].make_context(words[1], words[2:])


@pytest.mark.parametrize("block", of_kind("sh"))
def test_commands_are_known(block):
    for words in commands(block):
        for word in words:
            assert not word.startswith(("examples/", "tests/")) or (ROOT / word).exists(), f"{word} is no file"
        if words[0] == "recompute":
            parse(words)
            if words[1] == "policies":
                done = CliRunner().invoke(cli.app, words[1:])
                assert done.exit_code == 0, done.output
        elif words[0] in ("python", "torchrun") and "-m" not in words:
            script = next(word for word in words if word.endswith(".py"))
            known = options_of(ROOT / script)
            given = [word for word in words[words.index(script) :] if word.startswith("--")]
            assert set(given) <= known, f"{script} does not take all of {given}"
        else:
            others = ("torchrun", "accelerate", "axolotl")  # whose options are theirs; files are ours
            assert words[0] in ("pip", "pytest", "ruff", "mypy", *others), f"nothing is known of {words[0]}"


def options_of(script):
    """The options that an example takes, by its source and by that of the example that it imports."""
    source = script.read_text(encoding="utf-8")
    for name in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE):
        for folder in {script.parent, ROOT / "examples" / "architectures"}:  # whose sweep others share
            beside = folder / f"{name}.py"
            source += beside.read_text(encoding="utf-8") if beside.exists() else ""
    options = set(re.findall(r'"(--[a-z-]+)"', source))
    if "RecomputeTrainingArguments" in source:
        options |= {f"--{field.name}" for field in fields(RecomputeTrainingArguments)}
    return options


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_commands_within_sentences_are_known(page):
    for command in re.findall("`(recompute [a-z]+[^`]*)`", prose(page)):
        words = shlex.split(command)
        assert words[1] in COMMANDS.commands, command
        if len(words) > 2:
            parse(words)


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_files_within_sentences_are_there(page):
    """A path is that from the page, from the root, or from the package."""
    for name in re.findall(r"`([\w/.]+\.py)`", prose(page)):
        assert any((folder / name).exists() for folder in (page.parent, ROOT, ROOT / "recompute")), name


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_calls_within_sentences_are_known(page):
    for code in re.findall(r"`([^`]*\brecompute\.\w+\([^`]*\))`", prose(page)):
        calls = [node for node in ast.walk(ast.parse(code.removeprefix("@"))) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func).removeprefix("recompute.")
            keywords = {keyword.arg for keyword in call.keywords}
            assert keywords <= inspect.signature(getattr(recompute, name)).parameters.keys(), code


@pytest.mark.parametrize("page", GUIDES, ids=_name)
def test_what_is_to_be_installed_can_be(page):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    asked_for = re.findall(r'pip install -e "\.\[(\w+)\]"', page.read_text(encoding="utf-8"))
    assert set(asked_for) <= set(setup["options.extras_require"])


def cells(row):
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def table_below(words, *page):
    """The cells of the header and of the rows of the first table below these words of a page of examples."""
    text = ROOT.joinpath("examples", *page, "README.md").read_text(encoding="utf-8")
    shown = re.search(r"(?:^\|.*\n)+", text.partition(words)[2], re.MULTILINE)
    assert shown is not None
    header, _, *rows = map(cells, shown[0].splitlines())
    return header, rows


def results_of(folder, name="results.json"):
    return json.loads((RESULTS / folder / name).read_text(encoding="utf-8"))


def rows_of(folder, model=0, length=None):
    """The rows of one of an ablation's models, by their policies; at one of its lengths, or at the last."""
    rows = results_of(folder)["rows"]
    models = list(dict.fromkeys(row.get("model") for row in rows))
    rows = [row for row in rows if length in (None, row["sequence_length"])]
    return {row["policy"]: row for row in rows if row.get("model") == models[model]}


def test_the_guides_table_is_that_of_the_results():
    header, rows = table_below("## A small Llama on two CPU cores\n", "ablation")
    (_, expected), *_ = ablation_report.tables(list(rows_of("default-cpu").values()))
    assert [header, *rows] == expected


def test_the_table_of_peers_is_that_of_the_results():
    _, lines = table_below("## Beside every peer\n", "ablation", "study")
    names = ["none", "full", "elementwise", "auto", "torch-checkpoint", "torch-compile", "torch-compile-selective"]
    runs = (("against-peers-h200", 0), ("against-peers-h200", 1), ("llama-1b-peers-h200", 0))
    for column, (folder, model) in enumerate(runs, 1):
        rows = rows_of(folder, model)
        for name, line in zip([*names, "liger", "torch-remat"], lines, strict=True):
            if line[column]:
                milliseconds, gib = map(float, line[column].replace("*", "").split(", "))
                assert milliseconds == pytest.approx(rows[name]["step_seconds"] * 1e3, abs=0.51)
                assert gib == pytest.approx(rows[name]["peak_bytes"] / 2**30, abs=0.051)


def test_the_table_of_losses_is_that_of_the_results():
    _, lines = table_below("weights and hidden states:\n")
    rows = results_of("losses-8b-h200")["rows"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    for line in lines:
        measured = {row["way"]: row for row in rows if row["loss"] == line[0].partition(",")[0]}
        expected = [
            f"{row['seconds'] * 1e3:.0f}, {row['extra_peak_nbytes'] / 2**30:.1f}" if (row := measured.get(way)) else ""
            for way in ways
        ]
        assert [cell.replace("*", "") for cell in line[1:]] == expected


def test_the_first_table_is_that_of_the_results():
    rows = [cells(row) for row in re.findall(r"^\|.*$", README.read_text(encoding="utf-8"), re.MULTILINE)[2:10]]
    (_, table), *_ = ablation_report.tables(list(rows_of("against-peers-h200").values()))
    expected = {row[0]: row for row in table}
    assert rows[-1][0] == "torch-remat"
    for name, *shown in rows:
        of_policy = expected[name.split(" ")[0].strip("`")]
        assert shown == [*of_policy[1:4], "" if name == "none" else of_policy[-1]]


def test_the_claims_of_the_first_page_are_those_of_the_results():
    def whole(row):
        parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "peak_bytes")
        return sum(row[part] for part in parts) / 2**30

    def beside(model):
        """What ``auto`` takes of torch's checkpoint: of the time, and of the whole peak."""
        rows = rows_of("against-peers-h200", model)
        one, other = rows["auto"], rows["torch-checkpoint"]
        return f"{one['step_seconds'] / other['step_seconds']:.2f}", f"{whole(one) / whole(other):.2f}"

    def shown(row):
        return row["peak_bytes"] / 2**30, row["step_seconds"] * 1e3

    (time, peak), (other_time, other_peak) = beside(0), beside(1)
    compiled, experts = rows_of("llama-8b-compiled-h200"), rows_of("experts-h200", length=16384)
    (lean, lean_ms), (fast, fast_ms) = shown(experts["auto"]), shown(experts["torch-compile"])
    sharded = results_of("distributed-h200", "fsdp2-auto-16k-4.json")["ranks"]
    with_, without = ([rank[way] for rank in sharded] for way in ("with", "without"))
    gib, ms = ([max(each[key] for each in way) for way in (with_, without)] for key in ("peak_bytes", "step_ms"))
    text = " ".join(README.read_text(encoding="utf-8").split())
    for claim in (
        f"{time} of its time",
        f"`auto` takes {peak} of the whole peak; on OLMo 2, {other_peak} of it at {other_time} of the time",
        f"{lean:.0f} GiB, {lean_ms:.0f} ms; compiled: {fast:.0f}, {fast_ms:.0f}",
        f"{shown(compiled['elementwise+compile'])[0]:.1f} GiB for {shown(compiled['none+compile'])[0]:.1f}, the same",
        f"{gib[0] / 2**30:.0f} GiB for {gib[1] / 2**30:.0f}, {ms[0]:.0f} ms for {ms[1]:.0f}",
    ):
        assert claim in text
