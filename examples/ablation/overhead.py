"""What regenerating costs the CPU, beside torch's own ways: python examples/ablation/overhead.py --json overhead.json

Every figure is the median of what a way adds to the same code run plain, in rounds that take all ways in turn. Tensors
are so small that on CUDA only launching takes time. On the CPU, ops that run again also take the time to compute.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import mmap
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Python looks in a script's folder first, and kernels.py there is not the `kernels` that transformers looks for.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent]

# ruff: noqa: E402
import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import recompute
from recompute import counters

Forward = Callable[[], Tensor]
"""Runs a region once."""
Row = dict[str, Any]

_ATEN = torch.ops.aten
SAVED_OPS = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
CHAIN = 32  # so many ops in a region, from which the cost of one follows
CALLS = 4  # so many calls for each reading of the clock


class DoNothing(TorchDispatchMode):
    """The least that a recorder of ops can cost."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def under_policy(module: nn.Module, **rule: Any) -> nn.Module:
    """`module` itself, as the only module of a model to which a policy of that rule is applied."""
    recompute.apply(nn.ModuleDict({"region": module}), {"rules": [{"match": "region", **rule}]})
    return module


def under_mode(module: nn.Module) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        with DoNothing():
            return module(*args, **kwargs)

    return run


def torch_checkpoint(module: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return partial(checkpoint, module, use_reentrant=False, **options)


PLAIN, MODE = "plain", "do-nothing dispatch mode"
CAPTURED, TAPE = "recompute, captured", "recompute, tape"
CHECKPOINT, SELECTIVE = "torch checkpoint", "torch selective checkpoint"
WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    PLAIN: lambda module: module,
    MODE: under_mode,
    CAPTURED: partial(under_policy, action="recompute", via="hook"),
    TAPE: partial(under_policy, action="recompute", via="hook", capture=False),
    "checkpoint, captured": partial(under_policy, action="checkpoint"),
    "checkpoint": partial(under_policy, action="checkpoint", capture=False),
    CHECKPOINT: torch_checkpoint,
    SELECTIVE: partial(torch_checkpoint, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS)),
}


class Chain(nn.Module):
    """`length` times the same op, on one tensor."""

    def __init__(self, op: Callable[[Tensor], Tensor], length: int) -> None:
        super().__init__()
        self.op, self.length = op, length

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.length):
            x = self.op(x)
        return x


class Scaled(torch.autograd.Function):
    """A custom Function, as kernels of others are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def by_torch_func(x: Tensor, weight: Tensor) -> Tensor:
    return torch.func.vmap(torch.mul, in_dims=(0, None))(x, weight)


@torch.compiler.disable
def not_compiled(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


INSIDE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ops alone": torch.mul,
    "a custom autograd.Function": Scaled.apply,
    "torch.func": by_torch_func,
    "torch.compiler.disable": not_compiled,
}


class TinyLayer(nn.Module):
    """A small MLP with `inside` in its middle."""

    def __init__(self, inside: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inside, self.weight = inside, nn.Parameter(torch.rand(32))
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inside(self.up(self.norm(x)), self.weight)
        return x + self.down(nn.functional.gelu(hidden.tanh() * hidden.sigmoid()))


def forwards(module: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Forward]:
    """`module` on these arguments in each way, every one with a copy of its own."""
    return {name: partial(attach(copy.deepcopy(module)), *args, **kwargs) for name, attach in WAYS.items()}


def decoder_layer(device: torch.device) -> dict[str, Forward]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    layer = LlamaDecoderLayer(config, layer_idx=0).to(device)
    hidden = torch.randn(1, 16, config.hidden_size, device=device, requires_grad=True)
    positions = torch.arange(hidden.shape[1], device=device)[None]
    rotary = LlamaRotaryEmbedding(config).to(device)(hidden, positions)
    return forwards(layer, hidden, position_embeddings=rotary)


def step(forward: Forward, gradient: Tensor) -> None:
    torch.autograd.backward(forward(), gradient)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def added_seconds(ways: Mapping[str, Forward], repeats: int, device: torch.device) -> dict[str, tuple[float, float]]:
    """The CPU seconds that a call takes plain, and what each other way adds: in forward, and in a whole step."""
    clock = partial(counters.wall_seconds, device) if device.type == "cuda" else counters.thread_seconds

    def seconds(run: Callable[[], Any]) -> float:
        start = clock()
        results = [run() for _ in range(CALLS)]  # freed after the clock is read, as training frees them in backward
        taken = clock() - start
        del results
        return taken / CALLS

    gradient = torch.ones_like(ways[PLAIN]())
    runs = {name: (forward, partial(step, forward, gradient)) for name, forward in ways.items()}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with without_garbage_collection():
        for index in range(-3, repeats):  # the first to warm up, and be captured
            for name, (forward, whole) in runs.items():
                taken = seconds(forward), seconds(whole)
                if index >= 0:
                    rounds[name].append(taken)
    plain = rounds[PLAIN]
    added = {
        name: [(one[0] - base[0], one[1] - base[1]) for one, base in zip(taken, plain, strict=True)]
        for name, taken in rounds.items()
    }
    added[PLAIN] = plain
    return {name: tuple(map(statistics.median, zip(*taken, strict=True))) for name, taken in added.items()}


def cost_of_parts(repeats: int, device: torch.device) -> list[Row]:
    """Microseconds that each way adds for a region, for an op in it, and for a tensor that autograd saves there.

    In the figures of a whole step, the part for a saved tensor includes bringing it back.
    """
    x = torch.rand(16, device=device, requires_grad=True)
    # Sine saves its input. Autograd detaches an output that an op saves, which a mode would see as one op more.
    regions = Chain(torch.neg, 0), Chain(torch.neg, CHAIN), Chain(torch.sin, CHAIN)
    empty, ops, saves = (added_seconds(forwards(region, x), repeats, device) for region in regions)
    rows = []
    for name in (name for name in WAYS if name != PLAIN):
        row: Row = {"way": name}
        for index, when in enumerate(("forward", "step")):
            row |= {
                f"region, {when}": empty[name][index] * 1e6,
                f"op, {when}": (ops[name][index] - empty[name][index]) / CHAIN * 1e6,
                f"saved tensor, {when}": (saves[name][index] - ops[name][index]) / CHAIN * 1e6,
            }
        rows.append(row)
    mode = next(row for row in rows if row["way"] == MODE)
    for row in rows:
        row["op, forward / mode"] = row["op, forward"] / mode["op, forward"]
    return rows


def cost_of_a_layer(ways: Mapping[str, Forward], repeats: int, device: torch.device) -> list[Row]:
    """Microseconds that each way adds to a decoder layer, and that as a multiple of what torch's two ways add."""
    added = added_seconds(ways, repeats, device)
    rows = []
    for name, taken in added.items():
        row: Row = {"way": name}
        for index, when in enumerate(("forward", "step")):
            row[f"{when}, added"] = None if name == PLAIN else taken[index] * 1e6
            row[f"{when}, whole"] = (taken[index] + (0 if name == PLAIN else added[PLAIN][index])) * 1e6
            for peer, short in ((SELECTIVE, "selective"), (CHECKPOINT, "checkpoint")):
                row[f"{when} / {short}"] = None if name == PLAIN else taken[index] / added[peer][index]
        rows.append(row)
    return rows


def cost_by_what_is_inside(repeats: int, device: torch.device) -> list[Row]:
    """What each way takes for a tiny layer, as a multiple of plain, by what is in the layer: forward, and a step."""
    x = torch.rand(4, 16, device=device, requires_grad=True)
    rows = []
    for case, inside in INSIDE.items():
        added = added_seconds(forwards(TinyLayer(inside).to(device), x), repeats, device)
        row: Row = {"in the layer": case}
        for name in (CAPTURED, TAPE, CHECKPOINT, SELECTIVE):
            for index, when in enumerate(("forward", "step")):
                row[f"{name}, {when}"] = 1 + added[name][index] / added[PLAIN][index]
        rows.append(row)
    return rows


def growth(ways: Mapping[str, Forward], steps: int, device: torch.device) -> list[Row]:
    """What `steps` steps leave behind: memory while garbage collection is off, and Python's blocks after it ran."""
    rows = []
    for name, forward in ways.items():
        whole = partial(step, forward, torch.ones_like(forward()))
        for _ in range(20):
            whole()
        with without_garbage_collection():
            nbytes, blocks = memory_nbytes(device), sys.getallocatedblocks()
            for _ in range(steps):
                whole()
            row = {"way": name, "KiB": (memory_nbytes(device) - nbytes) / 1024}
            row["Python blocks"] = sys.getallocatedblocks() - blocks
            gc.collect()
            row["blocks that stay"] = sys.getallocatedblocks() - blocks
        rows.append(row)
    return rows


def memory_nbytes(device: torch.device) -> int:
    """Bytes allocated on a GPU; on the CPU those of the process that are in memory, where Linux tells, else 0."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=60, help="rounds of measuring, of which the medians are taken")
    parser.add_argument("--steps", type=int, default=1000, help="training steps after which memory must not have grown")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    options = parser.parse_args()

    torch.set_num_threads(1)  # work that other threads do is not on this one's clock
    torch.manual_seed(0)
    device = torch.device(options.device)
    layer = decoder_layer(device)
    tables = {
        "CPU microseconds added": cost_of_parts(options.repeats, device),
        "CPU microseconds of a Llama decoder layer": cost_of_a_layer(layer, options.repeats, device),
        "CPU time of a tiny layer, over plain": cost_by_what_is_inside(options.repeats, device),
        f"Growth in {options.steps} steps of that layer": growth(layer, options.steps, device),
    }
    machine = counters.describe_machine(device)
    for title, rows in tables.items():
        print(f"{title}\n\n{tabulate(rows, 'keys', 'github', floatfmt='.2f', missingval='-')}\n")
    print(", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))
    if options.json:
        results = {"command": shlex.join(sys.argv), "machine": machine, "tables": tables}
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
