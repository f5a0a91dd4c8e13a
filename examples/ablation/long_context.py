"""A whole model at long sequences: peak memory and time of a training step, under policies and Liger with checkpointing

    python examples/ablation/long_context.py liger+checkpointing examples/policies/long-on-device.yaml long \\
        --sequence 32768 65536 --out results/long-context

On a GPU it is Llama 3 8B with its vocabulary, in bfloat16 with fused AdamW, one sequence of random tokens; else a small
one. With --lora the model is frozen, and adapters of all its Linears are trained. With fewer --layers a step is shorter
and holds less in host memory. Under torchrun the sequence is shared out over GPUs, and rows are rank 0's:

    torchrun --nproc-per-node 2 examples/ablation/long_context.py examples/policies/longest.yaml --lora 16 \
        --sequence 1048576 --layers 4 --steps 1

It writes results.json and results.md. A way that runs out of memory is a row that says so, and is not tried with the
longer sequences that follow.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import recompute
from recompute import counters
from recompute.attach.apply import AppliedPolicy
from recompute.errors import HostMemoryError
from recompute.units import humanize, parse_budget

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
from shared_sequence import wrap

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
PEER = "liger+checkpointing"
WARMUP_LENGTH = 4096
"""Tokens of the first step, which makes the optimizer's states and compiles kernels."""


@dataclass(frozen=True)
class Row:
    """Peaks have everything in them: parameters, gradients and the optimizer's states as well. They are one rank's."""

    way: str
    sequence_length: int
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    step_seconds: float | None = None
    """The median of the steps that are timed."""

    all_seconds: list[float] | None = None
    """Of each step of this length."""

    all_peak_bytes: list[int] | None = None
    """Likewise. Those of the first steps are higher, while layers are captured."""

    offloaded_bytes: int = 0
    """Of one step."""
    loss: float | None = None
    error: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", help=f"{PEER}, presets, or paths of policy files")
    parser.add_argument("--sequence", nargs="+", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2, help="that are timed")
    parser.add_argument(
        "--warmup", type=int, default=6, help="steps before them, after a short one; policies capture layers in these"
    )
    parser.add_argument(
        "--memory", type=parse_budget, help="the most that torch may take of the GPU's, as of a smaller GPU: 79GiB"
    )
    parser.add_argument("--layers", type=int, help="of the model's, if not all")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, in bfloat16, alone")
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    options = parser.parse_args()
    device = counters.resolve_device("auto")
    is_shared = "WORLD_SIZE" in os.environ  # by torchrun
    if is_shared:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(device_id=device if device.type == "cuda" else None)
    if options.memory is not None and device.type == "cuda":
        capacity = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(options.memory / capacity)
    shape = LLAMA_8B if device.type == "cuda" else SMALL
    shape = shape | {"num_hidden_layers": options.layers or shape["num_hidden_layers"]}
    results: dict[str, Any] = {
        "command": (f"torchrun --nproc-per-node {dist.get_world_size()} " if is_shared else "") + shlex.join(sys.argv),
        "machine": counters.describe_machine(device),
        "model": shape,
        "lora": options.lora,
        "ranks": dist.get_world_size() if is_shared else 1,
        "rows": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    exhausted = set()
    for length in sorted(options.sequence):
        for way in options.ways:
            if way in exhausted:
                continue
            row = measured(way, length, options, device, shape)
            if row.error is not None:
                exhausted.add(way)
            results["rows"].append(asdict(row))
            if is_shared and dist.get_rank():
                continue
            print(row, flush=True)
            (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            (options.out / "results.md").write_text(markdown(results), encoding="utf-8")
    if is_shared:
        dist.destroy_process_group()


def measured(way: str, length: int, options: argparse.Namespace, device: torch.device, shape: dict[str, int]) -> Row:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return _measured(way, length, options, device, shape)
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        if dist.is_initialized():  # other ranks wait for this one
            raise
        return Row(way, length, error=str(error).partition(".")[0])


def _measured(way: str, length: int, options: argparse.Namespace, device: torch.device, shape: dict[str, int]) -> Row:
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=length, use_cache=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    if options.lora is not None:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=options.lora, lora_alpha=2 * options.lora, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    tokens = torch.randint(shape["vocab_size"], (1, length), device=device)
    if way != PEER:
        handle = recompute.apply(model, way)
        if dist.is_initialized():
            model = wrap(model, init_device_mesh(device.type, (dist.get_world_size(),)))
        return _trained(model, handle, way, tokens, options)
    from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

    before = dict(vars(modeling_llama))
    apply_liger_kernel_to_llama(model=model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        return _trained(model, None, way, tokens, options)
    finally:
        vars(modeling_llama).update(before)  # Liger changes it for all models


def _trained(
    model: nn.Module, handle: AppliedPolicy | None, way: str, tokens: Tensor, options: argparse.Namespace
) -> Row:
    device, on_cuda = tokens.device, tokens.is_cuda
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5, fused=True)
    seconds, peaks, loss = [], [], 0.0
    for step in range(1 + options.warmup + options.steps):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        batch = tokens if step else tokens[:, :WARMUP_LENGTH]
        before = None if handle is None else handle.stats()
        start = counters.wall_seconds(device)
        optimizer.zero_grad()
        result = model(input_ids=batch, labels=batch).loss
        result.backward()
        optimizer.step()
        seconds.append(counters.wall_seconds(device) - start)
        mean = result.detach().clone()
        if dist.is_initialized():  # each rank has its share
            dist.all_reduce(mean.div_(dist.get_world_size()))
        loss = mean.item()
        if on_cuda:
            peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return Row(
        way,
        tokens.shape[1],
        *(map(max, zip(*peaks[1:], strict=True)) if peaks else (None, None)),
        statistics.median(seconds[-options.steps :]),
        seconds[1:],
        [allocated for allocated, _ in peaks[1:]],
        0 if handle is None or before is None else (handle.stats() - before).offloaded_nbytes,
        loss,
    )


def markdown(results: dict[str, Any]) -> str:
    rows = [
        (
            row["sequence_length"],
            row["way"],
            row["error"] or ("" if row["peak_bytes"] is None else humanize(row["peak_bytes"])),
            "" if row["reserved_bytes"] is None else humanize(row["reserved_bytes"]),
            "" if row["step_seconds"] is None else f"{row['step_seconds']:.2f}",
            humanize(row["offloaded_bytes"]),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
        )
        for row in results["rows"]
    ]
    headers = ("tokens", "way", "peak", "reserved", "seconds a step", "offloaded", "loss")
    machine = results["machine"]
    return (
        f"{tabulate(rows, headers, 'github', disable_numparse=True)}\n\n{machine['gpu'] or machine['cpu']}, torch "
        f"{machine['torch']}, {machine['date'][:10]}.\n\n`{results['command']}`\n"
    )


if __name__ == "__main__":
    main()
