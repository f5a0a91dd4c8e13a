"""Two processes with a gloo group between them, and what they train: with DDP and FSDP2, all of it or adapters."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing import get_context

import torch
import torch.distributed as dist
from engine_testing import Stack, bits, loss_of, tokens
from tiny import Adapter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import recompute

STEPS, MICRO_BATCHES = 2, 2


class TwoProcesses:
    """Runs a function in both processes at once, or in ``count`` of them."""

    def __init__(self, folder, count=2):
        context = get_context("spawn")
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


def full():
    torch.manual_seed(0)
    return Stack(count=2)


def adapted():
    """Nothing is trained but adapters of queries and values, and one norm in the middle."""
    model = full().requires_grad_(False)
    for layer in model.layers:
        layer.attention.q, layer.attention.v = Adapter(layer.attention.q), Adapter(layer.attention.v)
    model.layers[1].norm1.requires_grad_(True)
    return model


MODELS = {"full": full, "adapted": adapted}


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


def _synchronized(model, now):
    """Whether the backward inside exchanges gradients. A static graph must, from the first one on."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if now or model.static_graph else model.no_sync()
    model.set_requires_gradient_sync(now)
    return nullcontext()


def _train(model, wrap):
    """Gradients and weights of each step, and the random stream at the end."""
    model = wrap(model)
    torch.manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(STEPS):
        for batch in range(MICRO_BATCHES):
            with _synchronized(model, now=batch == MICRO_BATCHES - 1):
                loss_of(model(tokens(grad=False))).backward()
        found += [_local(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *map(_local, model.parameters()), bits(torch.get_rng_state())]


def _local(tensor):
    return bits(tensor.to_local() if hasattr(tensor, "to_local") else tensor)


def trains_as_without(which, how, rules, first):
    """Whether gradients and weights are bit for bit those without the policy, how many there are, and bytes dropped.

    first: what is put on first, "policy" or "wrapper".
    """
    expected = _train(MODELS[which](), lambda model: distributed(model, how))
    handles = []

    def wrap(model):
        if first == "policy":
            handles.append(recompute.apply(model, rules))
            return distributed(model, how)
        wrapped = distributed(model, how)
        handles.append(recompute.apply(model, rules))
        return wrapped

    found = _train(MODELS[which](), wrap)
    return found == expected, len(expected), handles[0].stats().dropped_nbytes
