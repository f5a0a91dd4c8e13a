"""Two processes that share a sequence out by functional collectives, whose results are waited for where they are read.

Tokens are exchanged for heads before attention and back after it, and gathered before an MLP of which each has a part.
"""

import warnings
from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_testing import HIDDEN, RMSNorm, bits
from torch import nn
from torch.distributed import _functional_collectives as collectives
from two_parts import Collectives

import recompute

TOKENS, STEPS = 4, 6


class ExchangingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def exchange(self, x):
        """(batch, heads, tokens, head size): all tokens of some heads, or some tokens of all heads."""
        parts = x.unflatten(1, (2, -1)).movedim(1, 0).contiguous()
        return collectives.all_to_all_single_autograd(parts, None, None, dist.group.WORLD).movedim(0, 2).flatten(2, 3)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (self.exchange(each(y).unflatten(-1, (2, -1)).transpose(1, 2)) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(self.exchange(attended.transpose(1, 2)).flatten(-2))
        whole = collectives.all_gather_tensor_autograd(self.norm2(x), 1, dist.group.WORLD)
        part = collectives.reduce_scatter_tensor_autograd(self.down(F.silu(self.up(whole))), "sum", 1, dist.group.WORLD)
        return x.sin() + part  # the sine runs before anything waits for the part


def _run(rules):
    """The output and the gradients of each step, the collectives of its forward and of all of it, and the handle."""
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.Sequential(ExchangingLayer(), ExchangingLayer())
    handle = None if rules is None else recompute.apply(model, rules)
    values = []
    for step in range(STEPS):
        x = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        with Collectives() if step == STEPS - 1 else nullcontext() as seen:
            out = model.layers(x)
            forward = Counter(seen.counts) if seen else None
            (out.square() + out).sum().backward()
        values += [bits(out.detach()), *(bits(parameter.grad) for parameter in model.parameters())]
        model.zero_grad()
    return values, [forward, seen.counts], handle


def exchanges_as_without(rules):
    """Whether all bits are those without a policy, the collectives without one and under it, and ``explain``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 has other names for two of them
        plain, counted, _ = _run(None)
        values, counts, handle = _run(rules)
    return len(plain) > 100 and values == plain, counted, counts, str(handle.explain())
