"""The house: floors, what the wheel holds, whose ``kernels`` is imported, what importing costs."""

import ast
import configparser
import functools
import graphlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import recompute

ROOT = Path(__file__).resolve().parents[1]

FOLDERS = (
    "__main__",
    "cli",
    "cli_parts",
    "integrations",
    "ablation",
    "planning",
    "diagnostics",
    "profiling",
    "estimation",
    "attach",
    "substitution",
    "compiled",
    "kernels",
    "engine.host",
    "engine.checkpoint",
    "engine.tape",
    "engine",
    "engine.cut",
    "policy",
    "units",
    "counters",
    "files",
    "errors",
    "source_files",
)
"""From the top: a folder imports from those further down alone."""
KERNELS_KNOW = (
    "recompute.engine.compression",
    "recompute.engine.recipe_book",
    "recompute.engine.thread_state",
    "recompute.errors",
    "recompute.kernels",
)


def modules():
    """Every module of the project by its dotted name; links are followed where they stand for a package's folder."""
    found = {}
    for folder, package in ((ROOT / "recompute", "recompute"), (ROOT / "kernels", "recompute.kernels")):
        for directory, _, files in os.walk(folder):
            for file in files:
                if file.endswith(".py"):
                    parts = (*(Path(directory) / file).relative_to(folder).with_suffix("").parts,)
                    name = ".".join([package, *(part for part in parts if part != "__init__")])
                    found[name] = Path(directory) / file
    return found


MODULES = modules()


@functools.cache
def parsed(name):
    return ast.parse(MODULES[name].read_text())


@functools.cache
def imports(name):
    """What a module imports, by whether a function imports it as it runs."""
    found, pending = {True: set(), False: set()}, [(parsed(name), False)]
    while pending:
        node, is_inside = pending.pop()
        if isinstance(node, ast.Import):
            found[is_inside].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import on line {node.lineno}"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found[is_inside].update(module if module in MODULES else str(node.module) for module in submodules)
        else:
            is_inside = is_inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            pending += [(each, is_inside) for each in ast.iter_child_nodes(node)]
    return found


def all_imports(name):
    return set().union(*imports(name).values())


HIDDEN_IMPORTS = {
    # torch, transformers and matplotlib take seconds to import. The command line, recompute.estimate and recompute.plan
    # check what they were given before they wait for that.
    "recompute.cli": ("recompute",),
    "recompute.cli_parts": ("recompute",),
    "recompute.ablation.ablation_config": ("peft",),
    "recompute.compiled.frontend": ("bitsandbytes",),
    "recompute.estimation.adapt_model": ("peft",),
    "recompute.estimation.estimate": (
        "recompute.estimation.model_and_batch",
        "recompute.estimation.model_estimator",
        "recompute.estimation.attention_choice",
        "recompute.substitution.formulas",
    ),
    "recompute.planning.make_plan": ("recompute.planning.plan_verification", "recompute.profiling.profile_model"),
    "recompute.planning.doctor_command": (
        "torch",
        "recompute.engine.host.host_memory",
        "recompute.profiling.roofline",
    ),
    "recompute.planning.plan_command": (
        "torch",
        "recompute.estimation.build_model",
        "recompute.profiling.profile_model",
    ),
    # Parts of torch that it does not load itself, which only what is compiled or wrapped needs.
    "recompute.compiled": ("torch",),
    "recompute.kernels.word_shards": ("torch",),
    "recompute.integrations.training": ("torch",),
    # A tape's first cut needs it, and `import recompute` does not.
    "recompute.engine.cut.minimum_cut": ("networkx",),
    # A kernel loads Triton, so it is imported where one stands in.
    "recompute.substitution": ("recompute.kernels",),
}
"""What functions of a module, or of a folder's modules, may import as they run, and why. All else is at the top."""


def is_ours(target):
    return target.split(".")[0] == "recompute"


def folder(name):
    """The place in ``FOLDERS`` of the one that a module is in. The package's own names count as the command line."""
    if name == "recompute":
        return FOLDERS.index("cli")
    entries = [entry for entry in FOLDERS if f"{name}.".startswith(f"recompute.{entry}.")]
    assert entries, f"{name} is in no folder of this table: give it one here and in recompute/README.md"
    return FOLDERS.index(max(entries, key=len))


def test_each_folder_imports_only_from_below():
    assert len(MODULES) > 20
    wrong = [
        f"{name} imports {target}"
        for name in MODULES
        for target in filter(is_ours, all_imports(name))
        if folder(target) < folder(name)
        or (folder(name) == folder("recompute.kernels") and not is_known_to_kernels(target))
    ]
    assert wrong == []


def test_no_import_hides_in_a_function():
    wrong = [
        f"{name} imports {target} in a function"
        for name in MODULES
        for target in imports(name)[True]
        if not any(is_inside(name, place) and is_inside(target, allowed) for place, allowed in HIDDEN_PAIRS)
    ]
    assert wrong == []


HIDDEN_PAIRS = [(place, target) for place, targets in HIDDEN_IMPORTS.items() for target in targets]


def is_inside(name, package):
    return f"{name}.".startswith(f"{package}.")


def is_known_to_kernels(target):
    return target.startswith(KERNELS_KNOW)


def test_no_two_modules_import_each_other():
    needs = {name: set(filter(is_ours, all_imports(name))) for name in MODULES}
    order = list(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError with the modules of a cycle
    first = order.index("recompute.engine.cut.minimum_cut")
    assert first < order.index("recompute.engine.tape.recorder") < order.index("recompute.attach.apply")


def test_no_file_and_no_folder_has_the_name_of_another_of_a_public_function_or_of_the_standard_library():
    names = [name.split(".")[-1] for name in MODULES]
    assert [name for name in set(names) if names.count(name) > 1] == []
    assert not set(names) & sys.stdlib_module_names
    folders = {name for entry in FOLDERS for name in entry.split(".")}
    assert folders.isdisjoint({*recompute.__all__} - {"errors"})


MOST_LINES = {"recompute": 37_850, "kernels": 5_770, "tests": 42_510}
"""What the house may have, in hundreds of lines as it is now. A change that needs more says what for."""
LONG_FUNCTIONS = {"cross_entropy_rows._gradient_kernel"}
MANY_PARAMETERS = {
    "ablate.ablate",
    "activation._backward_kernel",
    "cli.doctor",
    "cli.estimate",
    "cli.plan",
    "cross_entropy_rows._gradient_kernel",
    "cross_entropy_rows._statistics_kernel",
    "divergence_rows._divergence_gradient_kernel",
    "divergence_rows._sums_kernel",
    "estimate.estimate",
    "linear_cross_entropy.linear_cross_entropy",
    "linear_divergence.linear_divergence",
    "linear_log_probs.linear_log_probs",
    "make_plan.plan",
    "norm_kernels._backward_kernel",
    "norm_kernels._dots_kernel",
    "norm_kernels._forward_kernel",
    "norm_kernels._wide_forward_kernel",
    "rope._kernel",
    "rules.__init__",
}
SHARED_NAMES = {
    *("RecomputeCallback", "ablate", "arguments_of", "cast", "conclude", "copy_of", "describe"),
    *("differentiate", "estimate", "frontier", "is_foreign", "kernel_of", "nbytes_of", "plan", "recompute"),
    *("record", "register", "run", "shortened", "solve", "static_nbytes", "table", "tables", "under", "verify"),
    *("verify_plan", "watch"),
}
"""What is larger than the house allows, or has the name of another. These tables may only shrink."""


def functions():
    for name in MODULES:
        for node in ast.walk(parsed(name)):
            if isinstance(node, ast.FunctionDef):
                yield f"{name.split('.')[-1]}.{node.name}", node


@pytest.mark.parametrize("folder", MOST_LINES)
def test_a_folder_has_no_more_lines_than_it_had(folder):
    files = [Path(place) / file for place, _, names in os.walk(ROOT / folder) for file in names]
    lines = sum(len(file.read_text().splitlines()) for file in files if file.suffix == ".py")
    assert MOST_LINES[folder] / 2 < lines <= MOST_LINES[folder]


def test_no_file_has_over_400_lines_and_no_other_function_over_60_or_12_parameters():
    assert [name for name, path in MODULES.items() if len(path.read_text().splitlines()) > 400] == []
    assert {name for name, node in functions() if lines_of(node) > 60} <= LONG_FUNCTIONS
    assert {name for name, node in functions() if count_of_parameters(node) > 12} <= MANY_PARAMETERS


def lines_of(node):
    """Those beside the docstring, which has examples."""
    first = node.body[0]
    documented = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) else 0
    return (node.end_lineno or 0) - node.lineno + 1 - documented


def count_of_parameters(node):
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def test_a_public_name_is_defined_once():
    """Of functions and classes at the top of a module."""
    names = [
        node.name
        for name in MODULES
        for node in parsed(name).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} <= SHARED_NAMES


@pytest.mark.parametrize(
    "name",
    [
        "recompute.policy",
        "recompute.errors",
        "recompute.engine.cut.minimum_cut",
        "recompute.planning.solver",
        "recompute.estimation.gpus",
        "recompute.estimation.check_paths",
        "recompute.estimation.static_memory",
    ],
)
def test_plain_data_and_tables_know_no_torch(name):
    found = [module for module in MODULES if module == name or module.startswith(f"{name}.")]
    assert found
    roots = {target.split(".")[0] for module in found for target in all_imports(module)}
    assert not roots & {"torch", "triton", "transformers"}


def test_whatever_is_imported_is_a_dependency():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    lines = "\n".join(
        [setup["options"]["install_requires"], extras["peers"], extras["lightning"], extras["peft"]]
    ).split("\n")
    # Each of these distributions has the name of what is imported, but for dashes and for ruamel.yaml.
    asked_for = {re.split("[<>=;.]", line)[0].strip().replace("-", "_") for line in lines}
    asked_for |= {"axolotl", "torchtitan"}  # they import the file of recompute.integrations that needs them
    asked_for |= {"bitsandbytes"}  # whose layer calls what needs it
    asked_for |= {"markdown_it", "pydantic_core"}  # the latter by pydantic, which needs just the one it was made with
    roots = {target.split(".")[0] for name in MODULES for target in all_imports(name)} - {"recompute"}
    assert roots - asked_for <= sys.stdlib_module_names


def test_folders_that_are_linked_are_no_packages_of_their_own():
    for name in ("kernels", "policies"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "recompute" / name).is_symlink()
        assert os.readlink(ROOT / "recompute" / name) == f"../{name}"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder of an sdist and of the wheel built of it, from a copy of the tree: this one is not written to."""
    folder = tmp_path_factory.mktemp("distributions")
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "tests", "results")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--outdir", folder, folder / "tree"]
    if int(importlib.metadata.version("setuptools").split(".")[0]) >= 77:  # what pyproject.toml asks for; else fetch it
        command.append("--no-isolation")
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("torch_recompute-*.whl")
    return zipfile.Path(path)


def test_the_sdist_has_no_links_and_all_that_its_wheel_holds(distributions, wheel):
    """The tree has links, which some systems and tools do not follow."""
    (path,) = distributions.glob("torch_recompute-*.tar.gz")
    with tarfile.open(path) as sdist:
        assert [entry.name for entry in sdist if not entry.isfile() and not entry.isdir()] == []
        names = {entry.name.partition("/")[2] for entry in sdist}
    held = {name for name in wheel.root.namelist() if ".dist-info/" not in name and name[-1] != "/"}
    assert {f"editable/{name}" for name in held} <= names
    assert {"README.md", "setup.cfg", "setup.py", "pyproject.toml"} <= names


def test_the_page_of_the_wheel_is_the_readme_without_what_leads_nowhere_there(wheel):
    (metadata,) = [entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info")]
    page = (metadata / "METADATA").read_text(encoding="utf-8").partition("\n\n")[2]
    assert [target for target in re.findall(r"\]\(([^)]*)\)", page) if not target.startswith("https://")] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall("^#+ .*$", page, re.MULTILINE) == re.findall("^#+ .*$", readme, re.MULTILINE)
    assert re.findall("^```(?:.*\n)+?```$", page, re.MULTILINE) == re.findall(
        "^```(?:.*\n)+?```$", readme, re.MULTILINE
    )


def test_the_wheel_holds_the_package_whole_and_nothing_else(wheel):
    top = {entry.name for entry in wheel.iterdir() if not entry.name.endswith(".dist-info")}
    assert top == {"recompute"}
    held = {name for name in wheel.root.namelist() if ".dist-info/" not in name and name[-1] != "/"}
    expected = {f"{'/'.join(name.split('.'))}.py" for name in MODULES}
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    expected -= {f"{'/'.join(name.split('.'))}.py" for name in packages}
    expected |= {f"{'/'.join(name.split('.'))}/__init__.py" for name in packages}
    expected |= {f"recompute/policies/{path.name}" for path in (ROOT / "policies").glob("*.yaml")}
    assert held == expected | {"recompute/py.typed", "recompute/ablation/page.html"}


BARE = """
import sys, torch, recompute
from torch import nn
from recompute.kernels.rms_norm import rms_norm
from recompute.policy.loading import preset_names
assert recompute.__file__.startswith(sys.argv[1])
assert set(preset_names()) >= {"none", "full", "elementwise", "auto"}
block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
rule = recompute.Rule(match="0", action="recompute")
handle = recompute.apply(nn.ModuleList([block]), recompute.Policy(rules=[rule]))
block(torch.ones(4, 8)).sum().backward()
assert handle.stats().dropped_nbytes > 0
"""


@pytest.mark.slow
def test_the_wheel_works_where_the_tree_is_not(wheel, tmp_path):
    """In an environment of its own, which has the dependencies of this one and no package that is installed here."""
    venv.create(tmp_path / "bare", with_pip=False)
    scripts = tmp_path / "bare" / ("Scripts" if os.name == "nt" else "bin")
    python = str(scripts / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel.root.filename)], check=True)
    (site,) = (tmp_path / "bare").rglob("site-packages")
    others = [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(others))  # nothing of their own .pth files, as an editable install
    run(BARE, str(tmp_path / "bare"), folder=tmp_path, python=python)
    for words in (["--help"], ["policies"], ["policies", "auto"]):
        done = subprocess.run(
            [scripts / "recompute", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "estimate" in done.stdout or "auto" in done.stdout


def run(script, *arguments, path=None, folder=ROOT, python=sys.executable):
    """Run ``script`` in a fresh interpreter that sees ``path`` and its own working folder; returns what it printed."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": "" if path is None else str(path), "HF_HUB_OFFLINE": "1"}
    command = [python, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


LLAMA = """
import sys, torch, transformers, importlib.util
from transformers.utils import import_utils
shape = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
assert model(torch.zeros(1, 4, dtype=torch.long)).logits.shape == (1, 4, 64)
import recompute
with recompute.apply(model, "hook"):
    model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
import kernels
print(import_utils.is_kernels_available(), getattr(kernels, "__file__", None), import_utils.KERNELS_MIN_VERSION)
"""

STAND_IN = """
__version__ = "{version}"
def use_kernel_forward_from_hub(name, *args, **kwargs):
    return lambda cls: cls
def use_kernelized_func(*names, **kwargs):
    return lambda cls: cls
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {{"__init__": lambda self, *args, **kwargs: None}})
"""


@pytest.mark.slow
def test_hugging_face_runs_from_the_root_with_its_kernels_and_without(tmp_path):
    available, file, version = run(LLAMA).split()
    if "kernels" not in {distribution.name for distribution in importlib.metadata.distributions()}:
        assert (available, file) == ("False", "None")  # our folder is a namespace at most, which is no package
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(STAND_IN.format(version=version))
    metadata = tmp_path / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    assert run(LLAMA, path=tmp_path).split() == ["True", str(package / "__init__.py"), version]


TYPED = """
import recompute
from recompute.kernels.rms_norm import rms_norm
from torch import nn

@recompute.recompute
class Bare(nn.Module): ...

@recompute.recompute(policy="elementwise")
class Block(nn.Module):
    def width(self) -> int: return 3

@recompute.recompute
def name(number: int) -> str: return str(number)

reveal_type(rms_norm)
reveal_type(recompute.__version__)
reveal_type(Bare())
reveal_type(Block().width())
reveal_type(name)
reveal_type(recompute.recompute(nn.Linear(1, 1)))
"""


@pytest.mark.slow
def test_mypy_sees_types_in_an_editable_install(tmp_path):
    pytest.importorskip("mypy")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "results"))
    build = "from setuptools import build_meta; print(build_meta.build_editable('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    (link,) = [entry for entry in zipfile.Path(wheel).iterdir() if entry.name.endswith(".pth")]
    place = Path(link.read_text().strip())  # a folder, and no code: type checkers run none
    assert [entry.name for entry in place.iterdir()] == ["recompute"]
    (tmp_path / "snippet.py").write_text(TYPED)
    known = ["--config-file", ROOT / "setup.cfg", "--cache-dir", ROOT / ".mypy_cache"]  # of torch, which takes minutes
    command = [sys.executable, "-m", "mypy", *known, "snippet.py"]
    environment = {**os.environ, "MYPYPATH": str(place)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    kernel, *others = re.findall('Revealed type is "(.*)"', done.stdout)
    assert kernel.startswith("def (x: torch._tensor.Tensor, weight: torch._tensor.Tensor | None")
    assert others == ["str", "snippet.Bare", "int", "def (number: int) -> str", "torch.nn.modules.linear.Linear"]


def test_the_public_names():
    assert recompute.__all__ == sorted(recompute.__all__)
    now = {"Policy", "Rule", "apply", "errors", "keep", "load_policy", "recompute", "verify"}
    later = {"ablate", "estimate", "profile", "plan"}
    assert now <= set(recompute.__all__) <= now | later
    for name in recompute.__all__:
        assert getattr(recompute, name) is not None
        assert name == "errors" or callable(getattr(recompute, name))


@pytest.mark.slow
def test_the_command_line_loads_torch_only_where_it_is_used():
    """It answers in milliseconds, and judges what it was given before it waits for torch, which takes seconds."""
    heavy = "torch transformers triton matplotlib"
    run(
        "import sys, recompute, recompute.cli;"
        "from recompute.estimation import capacity, estimate_command, gpus;"
        "from recompute.planning import plan_command;"
        "recompute.load_policy('hook'), recompute.Policy, recompute.estimate, recompute.plan;"
        "assert not set(sys.argv[1:]) & set(sys.modules), set(sys.argv[1:]) & set(sys.modules);"
        "assert set(recompute.__all__) <= set(dir(recompute));"
        "assert not hasattr(recompute, 'aply');"
        "import torch; from recompute import recompute as decorate; assert decorate is recompute.recompute",
        *heavy.split(),
    )


def test_importing_does_nothing_else_nor_does_a_policy_load_transformers_and_no_op_needs_triton():
    """``kernels``, which is Hugging Face's name, is no module of ours. One process says it all: each takes seconds."""
    heavy = "matplotlib networkx transformers typer rich triton.language"
    heavy += " recompute.kernels.launch recompute.ablation.run_ablation recompute.ablation.ablate"
    run(
        "import kernels, importlib.util;"
        "assert kernels.__file__ is None;"
        "assert importlib.util.find_spec('kernels').loader is None or not importlib.util.find_spec('kernels').origin;"
        "import sys, torch;"
        "numpy = torch.Tensor.numpy;"
        "before = set(sys.modules); state = torch.get_rng_state();"
        "hooks = torch._C._autograd._top_saved_tensors_default_hooks(True);"
        "import recompute;"
        "new = set(sys.modules) - before;"
        "assert not new & set(sys.argv[1:]), new & set(sys.argv[1:]);"
        "assert not torch.cuda.is_initialized();"
        "assert torch.Tensor.numpy is numpy;"
        "assert torch.equal(state, torch.get_rng_state());"
        "assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32;"
        "assert hooks is None and torch._C._autograd._top_saved_tensors_default_hooks(True) is None;"
        "sys.modules['triton'] = None;"
        "recompute.apply(torch.nn.Sequential(torch.nn.LayerNorm(4)), 'elementwise');"
        "assert 'transformers' not in sys.modules;"
        "import recompute.kernels.rms_norm as ours;"
        "assert ours.__name__ == 'recompute.kernels.rms_norm';"
        "from recompute.kernels.gated_mlp import gated_mlp;"
        "x, w = (torch.ones(rows, 4, requires_grad=True) for rows in (2, 4));"
        "gated_mlp(ours.rms_norm(x, w[0]), w, w, w).sum().backward();"
        "assert x.grad.shape == x.shape",
        *heavy.split(),
    )
