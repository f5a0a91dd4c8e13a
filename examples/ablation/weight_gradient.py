"""Four ways to add up the gradient of an RMSNorm's weight, over the number of tokens:

    python examples/ablation/weight_gradient.py --out results/weight-gradient

The gradient of the weight is a sum over all tokens, of which each program of a kernel has some. In "two stages", which
are the library's, each program writes its sum, and a second kernel adds these up. In "one stage" a program has some
columns of all tokens. With "atomics" programs add their sums to one row, in whatever order they come. "torch" writes
the products and adds them up by ``Tensor.sum``. The report has the time, the bandwidth (both inputs read once), the
error against float64, and whether ten runs gave the same bits. Without a GPU only the references run, on few tokens.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

# Python looks in a script's folder first, and kernels.py there is not the `kernels` that transformers looks for.
HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]

# ruff: noqa: E402
import torch
from tabulate import tabulate
from torch import Tensor

from recompute import counters
from recompute.counters import resolve_device
from recompute.diagnostics.comparing_runs import relative_error, same_bits
from recompute.kernels import launch
from recompute.kernels.norm_ops import OPS

sys.path.append(str(HERE))
from kernel_benchmark.timing import Clock

if launch.triton is not None:
    from recompute.kernels.launch import tl

TOKENS = (128, 512, 2048, 8192, 32_768, 131_072, 262_144)
EPS = 1e-6
RUNS = 10
"""Runs whose bits are compared."""
PROGRAMS_EACH = 4
"""Programs with atomics for each multiprocessor."""


@launch.jit
def _one_stage(dy, x, rstd, dweight, M, H, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program p adds up the columns from p * COLUMNS on, over all rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, M, ROWS):
        rows = start + tl.arange(0, ROWS)
        sums += _products(dy, x, rstd, rows, columns, M, H)
    tl.store(dweight + columns, tl.sum(sums, axis=0).to(dweight.dtype.element_ty), mask=columns < H)


@launch.jit
def _atomics(dy, x, rstd, dweight, M, H, P, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program p of P adds up the rows p, p + P, …, a block of columns at a time, and adds that to ``dweight``."""
    for first in range(0, H, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(tl.program_id(0) * ROWS, M, P * ROWS):
            rows = start + tl.arange(0, ROWS)
            sums += _products(dy, x, rstd, rows, columns, M, H)
        tl.atomic_add(dweight + columns, tl.sum(sums, axis=0), mask=columns < H)


@launch.jit
def _products(dy, x, rstd, rows, columns, M, H):
    """dy times what the norm has normalized, which Llama's rounds to the dtype of x."""
    mask = (rows < M)[:, None] & (columns < H)[None, :]
    at = rows.to(tl.int64)[:, None] * H + columns[None, :]
    r = tl.load(rstd + rows, mask=rows < M, other=0.0)
    normalized = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * r[:, None]
    normalized = normalized.to(x.dtype.element_ty).to(tl.float32)
    return tl.load(dy + at, mask=mask, other=0.0).to(tl.float32) * normalized


def two_stages(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    _, dweight, _ = OPS["llama"].backward(dy, x, weight, None, None, rstd, "llama", False, True, False, None)
    assert dweight is not None
    return dweight


def one_stage(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    dweight = torch.empty_like(weight)
    (tokens, width), columns = x.shape, 32
    launch.run(_one_stage, -(-width // columns), dy, x, rstd, dweight, tokens, width, ROWS=128, COLUMNS=columns)
    return dweight


def atomics(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    tokens, width = x.shape
    dweight = torch.zeros(width, dtype=torch.float32, device=x.device)
    programs = min(PROGRAMS_EACH * launch.multiprocessors(x.device), -(-tokens // 4))
    launch.run(_atomics, programs, dy, x, rstd, dweight, tokens, width, programs, ROWS=4, COLUMNS=1024)
    return dweight.to(weight.dtype)


def by_torch(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Tensor:
    normalized = (x.float() * rstd[:, None]).to(x.dtype)
    return (dy * normalized).sum(0, dtype=torch.float32).to(weight.dtype)


WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "two stages": two_stages,
    "one stage": one_stage,
    "atomics": atomics,
    "torch": by_torch,
}
NEED_TRITON = ("one stage", "atomics")


@dataclass(frozen=True)
class Measured:
    way: str
    tokens: int
    width: int
    seconds: float | None = None
    gb_per_second: float | None = None
    gradient_error: float | None = None
    """Relative to the norm of the gradient in float64."""
    has_same_bits: bool | None = None
    """In ``RUNS`` runs."""
    error: str = ""


def inputs(tokens: int, width: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    dy, x = torch.randn(2, tokens, width, device=device, generator=generator).to(dtype)
    weight = torch.ones(width, device=device, dtype=dtype)
    return dy, x, weight, OPS["llama"].forward(x, None, weight, None, EPS, "llama")[-1]


def measure(way: str, tokens: int, width: int, dtype: torch.dtype, clock: Clock) -> Measured:
    given = inputs(tokens, width, dtype, clock.device, 0)
    dy, x, _, rstd = given
    if way in NEED_TRITON and not launch.uses_triton(dy):
        return Measured(way, tokens, width, error="needs Triton and a GPU")
    function = WAYS[way]
    found = [function(*given) for _ in range(RUNS)]
    expected = (dy.double() * (x.double() * rstd.double()[:, None]).to(dtype).double()).sum(0)
    nbytes = dy.nbytes + x.nbytes
    sets = range(clock.sets(nbytes))
    calls = [partial(function, *inputs(tokens, width, dtype, clock.device, seed)) for seed in sets]
    seconds, _ = clock.seconds(calls)
    return Measured(
        way,
        tokens,
        width,
        seconds,
        nbytes / seconds / 1e9,
        relative_error([found[0]], [expected]),
        all(same_bits(each, found[0]) for each in found),
    )


def markdown(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    rows = [Measured(**row) for row in results["rows"]]
    lines = [
        [
            f"{row.tokens:,}",
            f"{row.width:,}",
            row.way,
            *(
                [row.error, "", "", ""]
                if row.seconds is None or row.gb_per_second is None or row.gradient_error is None
                else [
                    f"{row.seconds * 1e6:.1f}",
                    f"{row.gb_per_second:,.0f}",
                    f"{row.gradient_error:.1e}",
                    "yes" if row.has_same_bits else "no",
                ]
            ),
        ]
        for row in rows
    ]
    headers = ["tokens", "width", "way", "µs", "GB/s", "error", f"same bits in {RUNS} runs"]
    where = f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, {machine['date'][:10]}, {results['dtype']}"
    return f"`{results['command']}` on {where}.\n\n{tabulate(lines, headers, 'github', disable_numparse=True)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/weight-gradient"), help="folder for the results")
    parser.add_argument("--tokens", nargs="+", type=int, help="by default 128 to 262,144 on a GPU, else few")
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 4096, 8192], help="hidden sizes")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = resolve_device(options.device)
    clock = Clock(device, quick=device.type != "cuda")
    tokens = options.tokens or (TOKENS if device.type == "cuda" else TOKENS[:2])
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": counters.describe_machine(device),
        "dtype": options.dtype,
        "rows": [],
    }
    # CUDA graphs, which time short calls, are captured on a stream other than the default one.
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        for width, count, way in product(options.widths, tokens, WAYS):
            results["rows"].append(asdict(measure(way, count, width, getattr(torch, options.dtype), clock)))
            (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "results.md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))


if __name__ == "__main__":
    main()
