"""What the examples here share: they train a Llama twice, without and with a policy, and compare every rank's steps.

Each rank has a batch of its own, of the same size whatever the number of GPUs. Under tensor parallelism all ranks share
one. With --also full torch-checkpoint, say, they train under other policies and under what others offer, too, and print
what that takes. From the files that they write with --out on one GPU and on more, this makes a table of weak scaling:

torchrun --nproc-per-node 1 examples/distributed/ddp.py --large --out 1.json
torchrun --nproc-per-node 2 examples/distributed/ddp.py --large --out 2.json
python examples/distributed/comparing.py 1.json 2.json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from recompute.ablation.peers import BASELINE, is_peer, under
from recompute.counters import describe_machine, memory_trace
from recompute.diagnostics.comparing_runs import deterministic
from recompute.errors import PolicyError
from recompute.estimation.storage_tracker import StorageTrace
from recompute.policy.loading import load_policy, preset_names, preset_path

Wrap = Callable[[LlamaForCausalLM, DeviceMesh], nn.Module]

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 256}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}  # Llama 1B
SMALL_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LARGE_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}
_LONG = ("gradients", "weights")  # compared, and not written down


class Run:
    """A model in training on this rank, under a policy or a peer until ``stack`` is closed."""

    def __init__(
        self,
        wrap: Wrap,
        mesh: DeviceMesh,
        way: str,
        stack: ExitStack,
        *,
        is_large: bool,
        shares_batch: bool,
        backend: str | None,
        shape: tuple[int, int],
    ):
        torch.manual_seed(0)
        self.device = torch.device(
            mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None
        )
        config = LlamaConfig(use_cache=False, **(LARGE | LARGE_HEADS if is_large else SMALL | SMALL_HEADS))
        with self.device:
            model = LlamaForCausalLM(config).to(torch.bfloat16 if is_large else torch.float32)
        # The policy may come before or after the wrapper: it changes no names and leaves the wrapper's hooks alone.
        self.handle = stack.enter_context(under(way, model))
        self.is_compiled = backend is not None
        for layer in model.model.layers if self.is_compiled else ():
            layer.compile(fullgraph=True, backend=backend)
        self.model = wrap(model, mesh)
        # One group each, as no fused step takes tensors of both kinds.
        kinds: dict[type, list[nn.Parameter]] = {}
        for parameter in self.model.parameters():
            kinds.setdefault(DTensor if isinstance(parameter, DTensor) else nn.Parameter, []).append(parameter)
        self.optimizer = torch.optim.AdamW([{"params": parameters} for parameters in kinds.values()], lr=1e-4)
        self.shape = shape
        # Ranks that have parts of one model share a batch and its random numbers. Other ranks have their own.
        torch.manual_seed(1 if shares_batch else 1 + dist.get_rank())

    def loss(self) -> torch.Tensor:
        ids = torch.randint(0, 256, self.shape, device=self.device)
        return self.model(input_ids=ids, labels=ids).loss

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def results(self, steps: int) -> dict[str, Any]:
        """Losses, gradients and weights, by deterministic algorithms; and collectives, memory and time."""
        losses, gradients = [], []
        with deterministic(self.device.type == "cuda"):
            for _ in range(steps):
                loss = self.loss()
                loss.backward()
                losses.append(loss.item())
                gradients.append([sum_of_bits(parameter.grad) for parameter in self.model.parameters()])
                self.optimizer.step()
                self.optimizer.zero_grad()
        weights = [sum_of_bits(parameter) for parameter in self.model.parameters()]
        with profile() as profiled:
            self.loss().backward()
        # By the backend's events: an op that a dispatch mode sees has two of its own.
        names = (event.name().partition(":") for event in profiled.kineto_results.events())
        collectives = Counter(name for backend, _, name in names if backend == dist.get_backend())
        held_nbytes, peak_nbytes = self._memory()
        times = []
        for _ in range(2 + max(steps, 5)):
            self._synchronize()
            start = time.perf_counter()
            self.step()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return {
            "losses": losses,
            "gradients": gradients,
            "weights": weights,
            "collectives": dict(collectives),
            "held_bytes": held_nbytes,
            "peak_bytes": peak_nbytes,
            "step_ms": 1e3 * statistics.median(times[2:]),
            "captured": [] if self.handle is None else _captured(self.handle.explain(wide=True)),
        }

    def _memory(self) -> tuple[int, int]:
        """Bytes held after forward, and at the peak, of the step with the least, as gloo's threads free tensors late.

        The profiler of the CPU's allocator does not see what those threads free. So on CPUs storages are counted
        instead; except for compiled code, which would run op by op if ops were watched.
        """
        traces = self.device.type == "cuda" or self.is_compiled
        found = []
        for _ in range(3):
            with memory_trace(self.device) if traces else StorageTrace() as trace:
                loss = self.loss()
                trace.mark("forward")
                loss.backward()
            found.append((trace.held_nbytes["forward"], trace.peak_nbytes))
        return min(found)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def _captured(explanation: str) -> list[str]:
    """The lines of ``explain()`` that say how many regions run as captured code, and why others do not."""
    return [line for line in explanation.splitlines() if "run as captured code" in line]


def sum_of_bits(tensor: torch.Tensor | None) -> int:
    """A sum over the bits of this rank's part of a tensor, which differs if a single bit differs."""
    if tensor is None:
        return 0
    part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().contiguous()
    return int(part.view({2: torch.int16, 4: torch.int32}[part.element_size()]).sum(dtype=torch.int64))


def compare(doc: str, wrap: Wrap, policy: str, *, shares_batch: bool = False) -> None:
    """Train under the policy and without, print what differs, and exit with 1 if it is not what it should be."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--policy", default=policy, help="a preset's name, or the path of a policy file")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="the shape of Llama 1B, bf16")
    parser.add_argument("--sequence", type=int, help="tokens; by default 4096 with --large, else 128, of four each")
    parser.add_argument(
        "--also", nargs="+", default=[], type=known_way, metavar="WAY", help="policies or peers to measure beside it"
    )
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the decoder layers")
    parser.add_argument(
        "--tolerance", type=float, help="relative, of losses; else bits are compared, gradients' and weights' too"
    )
    parser.add_argument("--out", type=Path, help="where to write a JSON record")
    options = parser.parse_args()
    if options.sequence is None:
        options.sequence = 4096 if options.large else 128
    if options.sequence < 2:
        parser.error(f"--sequence: expected 2 tokens or more, to predict one from another; got {options.sequence}")
    shape = (1 if options.large else 4, options.sequence)
    if options.compile and shares_batch:
        parser.error("--compile: layers are compiled once they are shared out, and here that is done after the policy")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    results: dict[str, dict[str, Any]] = {}
    ways = {"without": BASELINE, "with": options.policy, **{way: way for way in options.also}}
    for name, way in ways.items():
        if options.compile:
            torch.compiler.reset()
        kind = {"is_large": options.large, "shares_batch": shares_batch, "backend": options.compile, "shape": shape}
        with ExitStack() as stack:
            run = Run(wrap, mesh, way, stack, **kind)
            results[name] = run.results(options.steps)
        del run
        gc.collect()
    tolerance = options.tolerance
    if tolerance is None:  # compiled code rounds in its own way
        tolerance = 0.0 if options.compile is None else 1e-2 if options.large else 1e-4
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, results)
    wrong = sorted({what for rank in ranks for what in _wrong(rank["without"], rank["with"], tolerance)})
    if dist.get_rank() == 0:
        _show(ranks, wrong, f"losses (to {tolerance})" if tolerance else "losses, gradients, weights")
        if options.out is not None:
            record = {
                "command": " ".join(["torchrun", f"--nproc-per-node {len(ranks)}", *sys.argv]),
                "machine": describe_machine(torch.device(device)),
                "example": Path(sys.argv[0]).stem,
                "shape": ("Llama 1B, {} x {} tokens, bf16" if options.large else "tiny, {} x {} tokens").format(*shape),
                "compiled": options.compile,
                "batch": "of all ranks" if shares_batch else "of each rank",
                "world_size": len(ranks),
                "policy": _text_of(options.policy),
                "wrong": wrong,
                "ranks": [
                    {name: {k: v for k, v in found.items() if k not in _LONG} for name, found in rank.items()}
                    for rank in ranks
                ],
            }
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    sys.exit(1 if wrong else 0)


def known_way(name: str) -> str:
    if not is_peer(name):
        try:
            load_policy(name)
        except PolicyError as error:
            raise argparse.ArgumentTypeError(f"expected a peer, as torch-checkpoint, or a policy: {error}") from error
    return name


def _text_of(policy: str) -> str:
    """The text of the policy's file, so that records made with an older version of the file can be told apart."""
    path = preset_path(policy) if policy in preset_names() else Path(policy)
    return path.read_text(encoding="utf-8")


def _wrong(without: dict[str, Any], governed: dict[str, Any], tolerance: float) -> list[str]:
    """What is wrong on a rank. Gradients and weights are compared where losses are to be equal."""
    exact = ("collectives",) if tolerance else (*_LONG, "collectives")
    differ = [f"{what} differ" for what in exact if without[what] != governed[what]]
    if not all(map(partial(math.isclose, rel_tol=tolerance), without["losses"], governed["losses"])):
        differ.append("losses differ")
    return differ + [
        f"{what} are not saved" for what in ("held_bytes", "peak_bytes") if governed[what] >= without[what]
    ]


def _show(ranks: list[dict[str, dict[str, Any]]], wrong: list[str], compared: str) -> None:
    without, governed, *others = ranks[0].values()
    print(f"{len(ranks)} ranks; rank 0 without and with the policy:")
    print(f"losses       {' '.join(f'{loss:.6f}' for loss in without['losses'])}")
    print(f"             {' '.join(f'{loss:.6f}' for loss in governed['losses'])}")
    for what in ("held", "peak"):
        before, after = without[f"{what}_bytes"] / 2**20, governed[f"{what}_bytes"] / 2**20
        print(f"{what}         {before:.1f} MiB, {after:.1f} MiB ({after / before:.2f}x)")
    print(f"a step       {without['step_ms']:.1f} ms, {governed['step_ms']:.1f} ms")
    for name, found in zip(list(ranks[0])[2:], others, strict=True):
        print(f"{name:12} {found['step_ms']:.1f} ms a step, {found['peak_bytes'] / 2**20:.1f} MiB at the peak")
    print(f"collectives  {without['collectives']}, {governed['collectives']}")
    for line in governed["captured"]:
        print(f"captured     {line}")
    print("wrong: " + "; ".join(wrong) if wrong else f"{compared} and collectives are equal on all ranks")


def scaling(records: list[dict[str, Any]]) -> str:
    """A table of records of one example: times of the slowest rank, the most bytes of any rank, and weak scaling.

    Efficiency is the step time on the fewest GPUs, divided by that on the row's number of GPUs.
    """
    kinds = {tuple(map(record.get, ("example", "shape", "compiled", "batch", "policy"))) for record in records}
    if len(kinds) > 1 or not all(record["batch"] == "of each rank" for record in records):
        raise SystemExit("expected records of one example, shape and policy, in which each rank has its own batch")
    rows, first = [], {}
    for record in sorted(records, key=lambda record: record["world_size"]):
        most = {
            (name, what): max(rank[name][what] for rank in record["ranks"])
            for name, what in product(("without", "with"), ("step_ms", "peak_bytes"))
        }
        first = first or most
        plain, governed = (first[name, "step_ms"] / most[name, "step_ms"] for name in ("without", "with"))
        rows.append(
            (
                record["world_size"],
                *(f"{most[name, 'step_ms']:.1f}" for name in ("without", "with")),
                *(f"{most[name, 'peak_bytes'] / 2**30:.2f}" for name in ("without", "with")),
                *(f"{ratio:.3f}" for ratio in (plain, governed, governed / plain)),
                "; ".join(record["wrong"]) or "no",
            )
        )
    columns = "ranks, ms a step, under the policy, peak GiB, under the policy"
    headers = f"{columns}, efficiency, under the policy, by that without, wrong".split(", ")
    return tabulate(rows, headers, "github", disable_numparse=True)


if __name__ == "__main__":
    print(scaling([json.loads(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]))
