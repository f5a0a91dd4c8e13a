"""Compiled layers under a policy, shared out by two processes: values, memory, and collectives."""

import functools
from typing import NamedTuple

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from models import held
from tiny import decoder, next_token_loss, rule, rules, token_ids
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recompute

WAYS = {"fsdp": (2, 1), "tensor parallel, then fsdp": (1, 2)}
"""The sizes of the mesh: data, tensor."""
LAYER = "TinyDecoderLayer"
POLICIES = {
    "none": None,
    "hooks": rules(rule(LAYER, "recompute", via="hook")),
    "a price": rules(rule(LAYER, "recompute", via="hook", rerun="gemm", price=1e11)),
}
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


class Seen(NamedTuple):
    """What one process saw."""

    values: list[Tensor]
    """The loss, and what it has of each gradient."""
    held_nbytes: int
    collectives: list[int]
    """In each graph: forward's and backward's."""


def train(way, name, compiled):
    """Tensor parallel, policy, compile, fully_shard: in the order of torchtitan."""
    torch.compiler.reset()
    model = decoder()
    mesh = init_device_mesh("cpu", WAYS[way], mesh_dim_names=("data", "tensor"))
    layers = list(model.layers)
    if "tensor" in way:
        plan = {**dict.fromkeys(_COLUMNS, ColwiseParallel()), **dict.fromkeys(_ROWS, RowwiseParallel())}
        for layer in layers:
            parallelize_module(layer, mesh["tensor"], plan)
    if (policy := POLICIES[name]) is not None:
        recompute.apply(model, policy)
    graphs = []
    if compiled:
        backend = aot_autograd(
            fw_compiler=lambda graph, _: graphs.append(graph) or graph,
            bw_compiler=lambda graph, _: graphs.append(graph) or graph,
            partition_fn=min_cut_rematerialization_partition,
        )
        for layer in layers:
            layer.compile(fullgraph=True, backend=backend)
    for part in (*layers, model):
        fully_shard(part, mesh=mesh["data"])
    losses = []
    for _ in range(2):  # the first one compiles
        model.zero_grad()
        losses.append(next_token_loss(model, token_ids()))
        losses[-1].backward()
    gradients = [parameter.grad._local_tensor for parameter in model.parameters()]
    held_nbytes = held(model, lambda: next_token_loss(model, token_ids()))
    return Seen([losses[-1].detach(), *gradients], held_nbytes, [_collectives(graph) for graph in graphs])


def _collectives(graph):
    targets = [str(node.target) for node in graph.graph.nodes]
    return sum("c10d" in target and "wait" not in target for target in targets)


@functools.cache
def seen(processes, way, name, compiled):
    return processes.run(train, way, name, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_compiled_layers_that_are_shared_out(two_processes, way, name):
    cases = ("none", True), (name, False), (name, True)  # the first one that shares tensors compiles each layer anew
    for plain, eager, found in zip(*(seen(two_processes, way, *case) for case in cases), strict=True):
        torch.testing.assert_close(found.values, eager.values)
        torch.testing.assert_close(found.values, plain.values)
        assert 0.9 * eager.held_nbytes <= found.held_nbytes <= eager.held_nbytes
        assert found.held_nbytes < plain.held_nbytes
        assert len(found.collectives) == 2  # graphs, of all layers
        assert set(found.collectives) == set(plain.collectives)  # none runs again
        assert ("tensor" in way) == (sum(plain.collectives) > 0)
