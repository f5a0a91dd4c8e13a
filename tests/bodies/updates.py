"""Modules that write to buffers and read them nowhere else, as norms do to their statistics; and near misses."""

import torch
import torch.nn.functional as F
from corpus import Body, linear
from engine_testing import HIDDEN, TOKENS, RMSNorm
from torch import nn

from bodies.autograd import Doubled, vmapped_with_an_array

WRITES = "it writes to one of its inputs"


def block(self, x):
    """As in ResNets and their kin: pooling, with channels last, changes strides in place."""
    y = x.view(1, TOKENS, 2, -1).contiguous(memory_format=torch.channels_last)
    y = self.act(self.norm1(self.conv1(y)))
    y = y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid()
    y = self.norm2(self.conv2(y))
    y += x.view(1, TOKENS, 2, -1)
    return F.relu(y, inplace=True).view(TOKENS, HIDDEN).exp()


def parts_of_a_block():
    convolutions = {name: nn.Conv2d(TOKENS, TOKENS, 1, bias=False) for name in ("conv1", "conv2", "gate")}
    norms = {"norm1": nn.BatchNorm2d(TOKENS), "norm2": nn.BatchNorm2d(TOKENS)}
    return convolutions | norms | {"act": nn.SiLU(inplace=True)}


def updating(update, size=HIDDEN, then=lambda self, y: y.exp().sin(), **options):
    def forward(self, x):
        y = self.norm(self.linear(x))
        update(self, y)
        return then(self, y)

    def parts():
        buffers = {"average": torch.zeros(size), "other": torch.zeros(size), "count": torch.zeros((), dtype=torch.long)}
        return linear() | {"norm": RMSNorm(), "buffers": buffers}

    return Body(forward, parts, **{"captured": True, **options})


def mean_of(y):
    return y.detach().mean(0)


def with_a_norm():
    return linear() | {"norm": nn.BatchNorm1d(HIDDEN)}


def takes_a_gradient(self, y):
    self.average.copy_(y[0])


def let_go(module, *_):
    module.average = module.average.detach()


UPDATES = {
    "a block of a ResNet": Body(block, parts_of_a_block, captured=True),
    "a norm twice": Body(
        lambda self, x: self.norm(self.norm(self.linear(x)).sin()).exp(),
        with_a_norm,
        captured=True,
    ),
    "a norm in evaluation mode": Body(
        lambda self, x: self.norm(self.linear(x)).exp().sin(),
        with_a_norm,
        start=lambda module: module.norm.eval(),
        captured=True,
    ),
    "an average and a counter": updating(lambda self, y: (self.average.lerp_(mean_of(y), 0.1), self.count.add_(1))),
    "a part of an average": updating(lambda self, y: self.average[1:].mul_(0.9).add_(mean_of(y)[1:])),
    "a copy": updating(lambda self, y: self.average.copy_(mean_of(y))),
    "what it has read": updating(
        lambda self, y: self.average.lerp_(mean_of(y - self.average), 0.1), captured=f"{WRITES}, and reads it"
    ),
    "what it reads then": updating(
        lambda self, y: self.average.add_(1.0),
        then=lambda self, y: (y * self.average).exp(),
        captured=f"{WRITES}, and reads it",
    ),
    "what it returns": updating(
        lambda self, y: self.count.add_(1),
        then=lambda self, y: (y.exp().sin(), self.count),
    ),
    "two tensors at once": updating(
        lambda self, y: torch._foreach_add_([self.average, self.other], 1.0), captured=WRITES
    ),
    "a large one": updating(lambda self, y: self.average.add_(y.detach().sum()), size=20_000, captured=f"{WRITES}, by"),
    "beside a Function": updating(
        lambda self, y: self.count.add_(1),
        then=lambda self, y: Doubled.apply(y).exp(),
        captured=f"{WRITES}, and calls a custom Function",
    ),
    "before torch.compile's graph departs": Body(
        lambda self, x: (self.count.add_(1), vmapped_with_an_array(self, x))[1],
        lambda: {"norm": RMSNorm(), "buffers": {"count": torch.zeros((), dtype=torch.long)}},
        captured="runs other ops",
    ),
    "a value that takes a gradient": updating(
        takes_a_gradient,
        between=let_go,
        captured="it writes a value that takes a gradient",
        drops=False,
        together=True,
        ways=("recompute",),  # a checkpoint's second run leaves its graph on the buffer, as torch's does
    ),
}
