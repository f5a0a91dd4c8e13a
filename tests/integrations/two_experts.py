"""Two processes that share experts out: tokens travel to the process that has their expert, and back."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from engine_testing import HIDDEN, Attention, GatedMLP, RMSNorm
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from two_parts import seen_by_one

EXPERTS, CHOSEN, TOKENS = 4, 2, 24


class Experts(nn.Module):
    """Half of the experts, each of which is given the tokens that chose it, whichever process they are of."""

    def __init__(self, world_size):
        super().__init__()
        self.world_size = world_size
        self.experts = nn.ModuleList(GatedMLP() for _ in range(EXPERTS // world_size))

    def forward(self, tokens, counts):
        """tokens: sorted by their experts. counts: of each expert's tokens."""
        of_others = _now(all_to_all_single(counts, None, None, dist.group.WORLD))
        given = counts.view(self.world_size, -1).sum(1).tolist()
        taken = of_others.view(self.world_size, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, taken, given, dist.group.WORLD)
        parts = arrived.split(of_others.tolist())  # by the process that they come from, and by expert
        done = [self.experts[index % len(self.experts)](part) for index, part in enumerate(parts)]
        return all_to_all_single_autograd(torch.cat(done), given, taken, dist.group.WORLD)


def _now(tensor):
    return tensor.wait() if hasattr(tensor, "wait") else tensor


class ExpertsLayer(nn.Module):
    """A decoder layer whose router is noisy."""

    def __init__(self, world_size):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.attention = Attention()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.mlp = Experts(world_size)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.routed(self.norm2(x))

    def routed(self, x):
        scores = self.router(x * (0.9 + 0.2 * torch.rand_like(x))).softmax(-1)
        weights, chosen = scores.topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        routed = self.mlp(x[order // CHOSEN], counts)
        found = torch.empty_like(routed).index_copy(0, order, routed)
        return (found.view(-1, CHOSEN, HIDDEN) * weights.unsqueeze(-1)).sum(1)


def model_of(world_size):
    """Each process has other experts, and the same of all else."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.layers = nn.Sequential(ExpertsLayer(world_size), ExpertsLayer(world_size))
    model.forward = model.layers.forward
    torch.manual_seed(1 + dist.get_rank())
    for layer in model.layers:
        for parameter in layer.mlp.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


def train(rules):
    weights = torch.linspace(0.5, 1.5, TOKENS * HIDDEN).view(TOKENS, HIDDEN)
    given = lambda step: nullcontext(torch.randn(TOKENS, HIDDEN, requires_grad=True))  # noqa: E731
    return seen_by_one(model_of(2), rules, given, lambda out: (out * weights).sum())
