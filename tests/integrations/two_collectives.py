"""Two processes that share a sequence out by functional collectives, whose results are waited for where they are read.

Tokens are exchanged for heads before attention and back after it, and gathered before an MLP of which each has a part.
"""

import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from engine_testing import HIDDEN, RMSNorm
from torch import nn
from torch.distributed import _functional_collectives as collectives
from two_parts import seen_by_one

TOKENS = 4


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


def train(rules):
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.Sequential(ExchangingLayer(), ExchangingLayer())
    model.forward = model.layers.forward

    def given(step):
        return nullcontext(
            torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 has other names for two of them
        return seen_by_one(model, rules, given, lambda out: (out.square() + out).sum(), steps=6)
