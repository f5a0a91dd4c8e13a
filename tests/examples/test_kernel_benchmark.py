"""The benchmark of the kernels: its ways compute the same, and its files hold every row, a missing peer's too."""

import ast
import functools
import importlib
import io
import json
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "ablation"
RUN_ANYWHERE = ("recompute", "recompute, 1 GiB of logits", "recompute, all logits", "eager", "aten fused")


@pytest.fixture
def benchmark_module(monkeypatch):
    """Imports a module of the benchmark by name, as the script does: its folder is on the path."""
    monkeypatch.syspath_prepend(FOLDER)
    return lambda name: importlib.import_module(f"kernel_benchmark.{name}")


def benchmark(out, *arguments):
    """Runs the benchmark quickly with these arguments; returns what results.json then holds, and what was printed."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(FOLDER)
        patch.setattr(sys, "argv", ["kernels.py", "--quick", "--out", str(out), *arguments])
        runpy.run_path(str(FOLDER / "kernels.py"), run_name="__main__")
    return json.loads((out / "results.json").read_text(), parse_constant=pytest.fail), printed.getvalue()


@pytest.fixture
def run(tmp_path):
    return functools.partial(benchmark, tmp_path)


class Whole(NamedTuple):
    """A run of these ops, or of all."""

    ops: tuple[str, ...]
    folder: Path
    results: dict[str, Any]
    printed: str


@pytest.fixture(
    scope="module",
    params=[
        ("gated_mlp", "mlp", "linear_jsd", "linear_total_variation"),
        pytest.param((), marks=pytest.mark.slow, id="all"),
    ],
)
def whole(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmark")
    return Whole(request.param, folder, *benchmark(folder, *(["--ops", *request.param] if request.param else [])))


def test_every_op_is_measured_told_and_written(whole, benchmark_module):
    ops, folder, results, printed = whole
    ways, timing = benchmark_module("ways"), benchmark_module("timing")
    assert list(results["ops"]) == [*(ops or (*ways.WAYS, timing.HOST))]
    markdown = (folder / "results.md").read_text()
    for op, result in results["ops"].items():
        assert f"\n## {op}\n" in markdown
        assert f"\n{op} " in printed
        assert result["machine"]["torch"] == torch.__version__
        assert all(f" {row['way']} " in markdown and f" {row['way']} " in printed for row in result["rows"])
        assert all(row["failure"] is None for row in result["rows"] if row["way"] in (ways.EAGER, ways.FUSED))
        assert all((row["seconds"] is None) == (row["failure"] is not None) for row in result["rows"])
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")
    if ops:
        return
    told = {(row["measure"], row["size"], row["way"]) for row in results["ops"][timing.HOST]["rows"]}
    assert told == {
        (direction, op, way)
        for direction in ("forward", "forward + backward")
        for op, computed in ways.WAYS.items()
        for way in computed
        if way != ways.COMPILED
    }


def test_the_ways_compute_the_same(whole, benchmark_module):
    benchmarks = benchmark_module("cases").BENCHMARKS
    for op in whole.ops or benchmarks:
        for measure in benchmarks[op].measures:
            rows = [row for row in whole.results["ops"][op]["rows"] if row["measure"] == measure.name]
            found = {row["way"]: row["errors"] for row in rows if row["way"] in RUN_ANYWHERE and not row["failure"]}
            assert set(found) == set(measure.ways) & set(RUN_ANYWHERE)
            for errors in found.values():
                assert list(errors) == list(measure.results)
                for name, error in errors.items():
                    assert error <= 1.1 * found["eager"][name] + 1e-5, (op, measure.name, errors)
            most = 0.1 if op == "linear_total_variation" else 1e-2  # its gradient is of signs
            assert all(error < most for error in found["eager"].values()), (op, measure.name)


def test_bytes_held_are_those_of_the_formula(whole):
    intermediate = 256
    held = {row["way"]: row["held_bytes_per_token"] for row in whole.results["ops"]["gated_mlp"]["rows"]}
    assert held["recompute"] == 4 * intermediate
    assert held["eager"] == 8 * intermediate
    held = {row["way"]: row["held_bytes_per_token"] for row in whole.results["ops"]["mlp"]["rows"]}
    assert held["recompute"] == 2 * intermediate
    assert held["eager"] == 4 * intermediate
    assert held["recompute, up in 8 bits"] == pytest.approx(intermediate + intermediate / 128 * 4, abs=0.1)


def test_a_peer_that_is_missing_is_a_row_that_says_so(run, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("liger_kernel.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    results, printed = run("--ops", "swiglu")
    rows = [row for row in results["ops"]["swiglu"]["rows"] if row["way"] == "Liger"]
    assert len(rows) == 3
    for row in rows:
        assert "liger_kernel" in row["failure"]
        assert row["failure"] in printed
        assert row["failure"] in (tmp_path / "results.md").read_text()


def test_measuring_one_op_again_keeps_the_others(run):
    before, _ = run("--ops", "geglu", "swiglu")
    assert list(before["ops"]) == ["swiglu", "geglu"]
    after, printed = run("--ops", "swiglu")
    assert list(after["ops"]) == ["swiglu", "geglu"]
    assert after["ops"]["geglu"] == before["ops"]["geglu"]
    assert after["ops"]["swiglu"]["command"].endswith("--ops swiglu")
    assert "geglu" not in printed


def test_sizes_alone_are_measured_of_the_ops_that_have_them(benchmark_module):
    timing, benchmarks = benchmark_module("timing"), benchmark_module("cases").BENCHMARKS
    clock = timing.Clock(torch.device("cuda"), quick=False, sizes_alone=["8192x4096x151936"])
    measured = {op: timing.sizes_of(benchmark, clock) for op, benchmark in benchmarks.items()}
    heads = {op for op in benchmarks if op.startswith("linear_")}
    assert measured == {op: [(8192, 4096, 151936)] if op in heads else [] for op in benchmarks}
    assert all((8192, 4096, 151936) in benchmarks[op].compiled for op in heads)


def test_a_cell_tells_what_is_known(benchmark_module):
    tables = benchmark_module("tables")
    blank = dict.fromkeys([key for key, _ in tables.COLUMNS.values()] + ["failure", "in_graph"])
    rows = [
        {**blank, "measure": "forward", "seconds": 2e-5, "of_copy": 0.9712, "errors": {"y": 1e-3, "dx": None}},
        {**blank, "measure": "forward", "seconds": 2e-2, "errors": {}, "in_graph": False},
        {**blank, "measure": "forward", "errors": {}, "failure": "ValueError: no"},
    ]
    assert tables.cells(rows) == [
        ["measure", "time", "of copy", "errors", "note"],
        ["forward", "20.0 µs", "97.1%", "y 1.0e-03, dx nan", ""],
        ["forward", "20.00 ms", "", "", "waits for the GPU"],
        ["forward", "", "", "", "ValueError: no"],
    ]


def test_the_script_does_nothing_as_a_module():
    """Its name is that of a package which transformers imports where it finds one."""
    tree = ast.parse((FOLDER / "kernels.py").read_text())
    imported = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imported
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


@pytest.mark.gpu
def test_what_waits_for_the_gpu_is_not_put_in_a_graph(benchmark_module):
    clock = benchmark_module("timing").Clock(torch.device("cuda"), quick=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.rand(1 << 20, device="cuda")
        seconds, in_graph = clock.seconds([lambda: (x + 1,)])
        assert in_graph
        assert seconds > 0
        assert clock.seconds([lambda: (x + x.max().item(),)])[1] is False
