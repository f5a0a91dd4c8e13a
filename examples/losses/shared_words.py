"""A head whose words ranks share: time and peak beside gathered logits and torch's loss_parallel.

torchrun --nproc-per-node 2 examples/losses/shared_words.py --out shared-words.json

Forward and backward of head and loss, in bfloat16. The peak is what is allocated beside hidden states and weights, of
the rank with the most. Errors are relative, of the first 512 tokens, beside gathered logits in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from recompute.counters import describe_machine
from recompute.kernels.linear_cross_entropy import linear_cross_entropy
from recompute.kernels.linear_log_probs import linear_log_probs

LARGE, SMALL = (8192, 4096, 128256), (64, 32, 640)


class Gather(torch.autograd.Function):
    """Logits of all words, from each rank's; the gradient of each rank's own."""

    @staticmethod
    def forward(ctx, logits):
        ctx.width = logits.shape[1]
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        first = dist.get_rank() * ctx.width
        return gradient[:, first : first + ctx.width].contiguous()


class Copied(torch.autograd.Function):
    """Hidden states that every rank has: their gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx, hidden):
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient := gradient.contiguous())
        return gradient


def gathered(hidden, weight):
    return Gather.apply(F.linear(Copied.apply(hidden), weight)).float()


def gathered_cross_entropy(hidden, weight, target, mesh):
    return F.cross_entropy(gathered(hidden, weight), target)


def gathered_log_probs(hidden, weight, target, mesh):
    log_p = gathered(hidden, weight).log_softmax(-1)
    return log_p.gather(1, target[:, None])[:, 0].mean() - 0.01 * (log_p.exp() * log_p).sum(-1).mean()


def parallel_cross_entropy(hidden, weight, target, mesh):
    whole = DTensor.from_local(hidden, mesh, [Replicate()])
    logits = F.linear(whole, DTensor.from_local(weight, mesh, [Shard(0)]))
    return F.cross_entropy(logits.float(), distribute_tensor(target, mesh, [Replicate()]))


def our_cross_entropy(hidden, weight, target, mesh, **options):
    return linear_cross_entropy(hidden, weight, target, group=mesh.get_group(), **options)


def our_log_probs(hidden, weight, target, mesh, **options):
    log_probs, entropy = linear_log_probs(hidden, weight, target, entropy=True, group=mesh.get_group(), **options)
    return log_probs.mean() + 0.01 * entropy.mean()


WAYS = {
    "cross-entropy, ours": our_cross_entropy,
    "cross-entropy, ours, all logits held": partial(our_cross_entropy, logits_bytes=float("inf")),
    "cross-entropy, gathered logits": gathered_cross_entropy,
    "cross-entropy, loss_parallel": parallel_cross_entropy,
    "log-probabilities and entropy, ours": our_log_probs,
    "log-probabilities and entropy, ours, all logits held": partial(our_log_probs, logits_bytes=float("inf")),
    "log-probabilities and entropy, gathered logits": gathered_log_probs,
}


def step(way, hidden, weight, target, mesh):
    def run():
        with loss_parallel() if way is parallel_cross_entropy else torch.enable_grad():
            loss = way(hidden, weight, target, mesh)
            return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    return run


def measured(run, device):
    if device.type != "cuda":
        return {"loss": float(run()[0])}
    for _ in range(2):
        loss = run()[0]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    peak = torch.tensor(float(torch.cuda.max_memory_allocated() - before), device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    took = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    middle = torch.tensor(sorted(took)[4], device=device)
    dist.all_reduce(middle, dist.ReduceOp.MAX)
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return {"ms": middle.item(), "extra_peak_nbytes": int(peak.item()), "loss": float(loss)}


def main() -> None:
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", type=int, nargs=3, default=LARGE if on_cuda else SMALL, help="tokens hidden words")
    parser.add_argument("--out", type=Path, help="where to write JSON")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo", device_id=device if on_cuda else None)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (ranks,))
    tokens, width, words = options.shape
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, generator=generator).bfloat16().requires_grad_()
    head = (0.02 * torch.randn(words, width, device=device, generator=generator)).bfloat16()
    weight = nn.Parameter(head.chunk(ranks)[rank].clone())
    target = torch.randint(words, (tokens,), device=device, generator=generator)
    del head
    few = hidden[:512].detach().requires_grad_(), weight, target[:512]
    wide = few[0].detach().float().requires_grad_(), weight.detach().float().requires_grad_(), few[2]
    exact = {
        name.partition(",")[0]: step(way, *wide, mesh)()
        for name, way in WAYS.items()
        if name.endswith("gathered logits")
    }
    rows = {}
    for name, way in WAYS.items():
        found = step(way, *few, mesh)()
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
        pairs = zip(("loss", "dhidden", "dweight"), whole, exact[name.partition(",")[0]], strict=True)
        errors = {value: float((one.float() - other).norm() / other.norm()) for value, one, other in pairs}
        del found, whole
        rows[name] = {**measured(step(way, hidden, weight, target, mesh), device), "errors": errors}
        if rank == 0:
            took = f"{rows[name]['ms']:.2f} ms, {rows[name]['extra_peak_nbytes'] / 2**30:.2f} GiB, " if on_cuda else ""
            print(f"{name}: {took}off by {max(errors.values()):.1e}", flush=True)
    if rank == 0 and options.out is not None:
        record = {
            "command": f"torchrun --nproc-per-node {ranks} {shlex.join(sys.argv)}",
            "machine": describe_machine(device),
            "shape": options.shape,
            "dtype": "bfloat16",
            "ranks": ranks,
            "ways": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
