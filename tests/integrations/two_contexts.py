"""Two processes that share a sequence: torch's ``context_parallel``, with its ring of attention on the CPU.

Torch's ring takes the attention ops of CUDA alone. ``HANDLERS`` let it take the CPU's op, too. All else is torch's own
code: the patched ``scaled_dot_product_attention``, the DTensors, the exchange of keys and values.
"""

from contextlib import contextmanager

import torch
from engine_testing import HIDDEN, Stack
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as rings
from two_parts import seen_by_one

_aten = torch.ops.aten
LENGTH = 16


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


def stack():
    """Its attention sees no later tokens, so that it matters which part of a sequence a process has."""
    torch.manual_seed(0)
    model = Stack(2, p=0.0)
    for layer in model.layers:
        layer.attention.is_causal = True
    return model


def batch(step):
    return torch.randn(2, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(step))


def loss_of(out):
    """A sum over tokens, in whatever order and on whichever rank they are."""
    return (out.square() + out).sum()


def train(rules):
    mesh = init_device_mesh("cpu", (2,))

    @contextmanager
    def part(step):
        x = batch(step)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x}):
            assert x.shape[1] == LENGTH // 2
            yield x

    rings.custom_ops.update(HANDLERS)
    try:
        return seen_by_one(stack(), rules, part, loss_of)
    finally:
        for op in HANDLERS:
            del rings.custom_ops[op]


def gradients_of_whole_sequence():
    """Those of the first step, where nobody shares the sequence."""
    model = stack()
    loss_of(model(batch(0))).backward()
    return [parameter.grad for parameter in model.parameters()]
