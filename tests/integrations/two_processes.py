"""Two processes with a gloo group between them, and models that they share out by DDP and FSDP2."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel


class TwoProcesses:
    """Runs a function in both processes at once, or in ``count`` of them."""

    def __init__(self, folder, count=2):
        context = get_context("forkserver")  # whose server imports for all
        context.set_forkserver_preload(["recompute", "torch.distributed.fsdp", "torch.distributed.tensor.experimental"])
        ranks = context.Queue()
        for rank in range(count):
            ranks.put(rank)
        arguments = ranks, f"file://{folder / 'store'}", count
        self._count = count
        self._pool = ProcessPoolExecutor(count, mp_context=context, initializer=_join, initargs=arguments)

    def run(self, function, *arguments):
        """What ``function(*arguments)`` returns in each, by rank."""
        futures = [self._pool.submit(_together, function, *arguments) for _ in range(self._count)]
        results = dict(future.result(timeout=600) for future in futures)
        return [results[rank] for rank in range(self._count)]

    def close(self):
        self._pool.shutdown(cancel_futures=True)


def _join(ranks, store, count):
    torch.set_num_threads(1)
    wait = timedelta(seconds=300)
    dist.init_process_group("gloo", init_method=store, rank=ranks.get(), world_size=count, timeout=wait)


def _together(function, *arguments):
    dist.barrier()  # until all have come here, none can take the other's call
    return dist.get_rank(), function(*arguments)


def distributed(model, how, mesh=None):
    ddp = {"static graph": {"static_graph": True}, "unused parameters": {"find_unused_parameters": True}}
    if how.startswith("ddp"):
        return DistributedDataParallel(model, **ddp.get(how.removeprefix("ddp, "), {}))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp = {"weights stay gathered": {"reshard_after_forward": False}, "mixed precision": {"mp_policy": half}}
    options = {"mesh": mesh or init_device_mesh("cpu", (2,)), **fsdp.get(how.removeprefix("fsdp, "), {})}
    for layer in getattr(model, "model", model).layers:
        for part in (layer.self_attn, layer.mlp) if how == "fsdp of parts" else ():
            fully_shard(part, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def synchronized(model, now):
    """Whether the backward inside exchanges gradients. A static graph must, from the first one on."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now or model.static_graph else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    return nullcontext()
