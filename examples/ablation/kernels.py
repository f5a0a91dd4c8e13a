"""How fast the kernels are beside their peers, in one run: python examples/ablation/kernels.py --out results/kernels

Every way goes through autograd, except for our backwards that regenerate an output, which are called as autograd would
call them. A time is the median of replays of a CUDA graph. The graph uses several sets of inputs, enough to overflow
the L2 several times. A way that waits for the GPU cannot be in a graph, and is timed in plain calls. Bandwidth counts
each tensor once, and is compared with that of a copy of as many bytes. An error is ‖a - b‖ / ‖b‖, where b is the result
of the eager formula in float32. A way that fails or is not installed is a row that says why. Without a GPU the
references run, on small tensors.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = ("liger-kernel", "cut-cross-entropy", "quack-kernels", "trl")


def main() -> None:
    # Not above: transformers loads any module `kernels` that it finds, and this file's folder is on the path.
    import torch
    from kernel_benchmark import tables
    from kernel_benchmark.timing import OPS, Clock, rows
    from rich.console import Console

    from recompute import counters

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/kernels"), help="folder for results.json, .md, .png")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS, help="measure these; keep others' rows in --out")
    parser.add_argument("--sizes", nargs="+", default=(), help="on a GPU: of these alone, as 8192x4096x151936")
    parser.add_argument("--quick", action="store_true", help="small tensors, few repeats, and no torch.compile")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(device, quick=options.quick, sizes_alone=options.sizes)
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)
    if device.type == "cpu":
        console.print("No GPU: the references run, on small tensors.")
    file = options.out / "results.json"
    ops = json.loads(file.read_text(encoding="utf-8"))["ops"] if file.exists() else {}
    machine = {**counters.describe_machine(device), "peers": {name: installed(name) for name in PEERS}}
    # The default stream cannot be captured, and backward runs on the stream that forward ran on.
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        for name in options.ops:
            found = [asdict(row) for row in rows(name, clock)]
            ops[name] = {"command": shlex.join(sys.argv), "machine": machine, "rows": found}
            console.print(tables.terminal(name, found))
            results = {"ops": {name: ops[name] for name in OPS if name in ops}}
            tables.write(results, options.out)
    tables.plot(results).savefig(options.out / "results.png")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
