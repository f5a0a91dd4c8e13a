"""Two processes that share a sequence: torch's ``context_parallel``, with its ring of attention on the CPU.

Torch's ring takes the attention ops of CUDA alone. ``HANDLERS`` let it take the CPU's op, too. All else is torch's own
code: the patched ``scaled_dot_product_attention``, the DTensors, the exchange of keys and values.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, GatedMLP, RMSNorm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from two_parts import Collectives

import recompute

_aten = torch.ops.aten
LENGTH, STEPS = 16, 5


def _mesh_and_locals(args):
    first = next(arg for arg in args if isinstance(arg, DTensor))
    return first.device_mesh, [arg.to_local() if isinstance(arg, DTensor) else arg for arg in args], first.placements


def _forward(op, args, kwargs):
    given = (*args, *(0.0, False)[len(args) - 3 :])
    mesh, (query, key, value, dropout, is_causal), placements = _mesh_and_locals(given)
    found = rings._templated_ring_attention(
        mesh.get_group(), 2, op, query=query, key=key, value=value, is_causal=is_causal, dropout_p=dropout
    )
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)


def _backward(op, args, kwargs):
    mesh, (gradient, query, key, value, out, logsumexp, dropout, is_causal), placements = _mesh_and_locals(args)
    found = rings._templated_ring_attention_backward(
        mesh.get_group(), 2, op, grad_out=gradient, grad_out_name="grad_out", query=query, key=key, value=value,
        out=out, logsumexp=logsumexp, is_causal=is_causal, dropout_p=dropout,
    )  # fmt: skip
    return tuple(DTensor.from_local(each, mesh, placements, run_check=False) for each in found)


HANDLERS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}


class CausalAttention(nn.Module):
    """Two heads, in the layout that context parallelism shares out: sequences in the third dimension."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (2, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class CausalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = CausalAttention(), GatedMLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def stack():
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.Sequential(CausalLayer(), CausalLayer())
    model.forward = model.layers.forward
    return model


def batch(step):
    return torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(step))


def loss_of(out):
    """A sum over tokens, in whatever order and on whichever rank they are."""
    return (out.square() + out).sum()


class SharedSequence(NamedTuple):
    """What one process saw."""

    values: list[Tensor]
    """Outputs and gradients of each step, of this rank's part of the sequence."""
    collectives: tuple[Counter[str], Counter[str]]
    """Of a step's forward, and of all of it."""
    dropped_nbytes: int


def train(rules):
    model = stack()
    handle = recompute.apply(model, rules) if rules is not None else None
    mesh = init_device_mesh("cpu", (2,))
    values = []
    rings.custom_ops.update(HANDLERS)
    try:
        for step in range(STEPS):
            x = batch(step)
            with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
                assert x.shape[1] == LENGTH // 2
                with Collectives() as seen:
                    out = model(x)
                    forward = Counter(seen.counts)
                    loss_of(out).backward()
            values += [out.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            model.zero_grad()
    finally:
        for op in HANDLERS:
            del rings.custom_ops[op]
    return SharedSequence(values, (forward, seen.counts), handle.stats().dropped_nbytes if handle else 0)


def gradients_of_whole_sequence():
    """Those of the first step, where nobody shares the sequence."""
    model = stack()
    loss_of(model(batch(0))).backward()
    return [parameter.grad for parameter in model.parameters()]
