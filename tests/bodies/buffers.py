"""Buffers that a region changes, as averages and counters do, and reads before or after that."""

import itertools

import torch
import torch.nn.functional as F
from corpus import Body
from engine_testing import HIDDEN, module_of
from torch import nn


def average(self, y):
    self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))


def count(self, y):
    self.count += 1
    self.average.add_(self.count)


def first_of_a_view(self, y):
    self.average[: HIDDEN // 2].add_(y.detach().mean())
    self.average.view(2, -1)[1].mul_(0.5)


def lazily(self, y):
    if self.lazy is None:
        self.lazy = torch.zeros(HIDDEN)
    self.lazy.add_(y.detach().mean(0))
    self.average = self.lazy


UPDATES = {
    "mul_ and add_": average,
    "a counter": count,
    "copy_": lambda self, y: self.average.copy_(y.detach().mean(0)),
    "views": first_of_a_view,
    "lerp_": lambda self, y: self.average.lerp_(y.detach().mean(0), 0.1),
    "index_put_": lambda self, y: self.average.index_put_((torch.tensor([0, 3]),), y.detach()[0, 2:4]),
    ".data": lambda self, y: self.average.data.mul_(0.5).add_(y.detach().mean(0)),
    "_foreach_add_": lambda self, y: torch._foreach_add_([self.average, self.other], 1.0),
    "made by the first frame": lazily,
    "a new tensor": lambda self, y: setattr(self, "average", self.average * 0.9 + 0.1 * y.detach().mean(0)),
    # Written by a kernel whose schema does not say so, and that counts no version.
    "running statistics": lambda self, y: F.batch_norm(y.detach(), self.average, self.other, training=True),
    "zero_ and fill_": lambda self, y: (self.average.zero_(), self.average.fill_(0.5)),
    "out=": lambda self, y: torch.mul(self.average, 0.5, out=self.average),
}


def reads(self, y):
    """Saves nothing of the buffer, and much that comes back from it."""
    z = ((y - self.average) / 2).exp() + self.count
    return z.sin() * y.sin() + z.tanh() * z.sigmoid()


def reads_a_part(self, y):
    z = (y[:, 1:] - self.average[1:]).exp() + self.count
    return z.sin() * z.tanh() + z.sigmoid()


def saves(self, y):
    z = (y * self.average).exp()
    return z.sin() * z.tanh()


def updating(update, use, is_before, dtype=torch.float32, **options):
    def forward(self, x):
        y = self.linear(x.to(dtype))
        if is_before and self.training:
            update(self, y)
        result = use(self, y)
        if not is_before and self.training:
            update(self, y)
        return result.float()

    def parts():
        """One buffer is a view of others' memory."""
        memory, number = torch.rand(3, HIDDEN, dtype=dtype), torch.zeros((), dtype=torch.long)
        buffers = {"average": memory[0], "other": torch.ones(HIDDEN, dtype=dtype), "count": number}
        return {"linear": nn.Linear(HIDDEN, HIDDEN).to(dtype), "lazy": None, "buffers": buffers}

    return Body(forward, parts, ways=("recompute",), drops=False, **options)


def change_outside(module, given, result):
    module.average.mul_(0.5)
    module.average.numpy()[:] *= 0.5  # which no version counts
    module.count.add_(1)


def of_tensors(self, x, given):
    first, second = given or self.lookup(self)
    first.add_(1.0)
    z = ((self.linear(x) - first) / 3).exp() + second
    second.sub_(0.5)
    return z.sin() * z.tanh() + (first - z).sigmoid()


OWNED = []


def elsewhere(kind):
    """Tensors without gradients that are no buffers, which live somewhere else, or are given."""

    def parts():
        OWNED[:] = torch.ones(HIDDEN), torch.zeros(HIDDEN)
        other = module_of(lambda self: None, tensors=list(OWNED))
        lookup = {
            "a list": lambda module: module.tensors,
            "another module": lambda module: other.tensors,
            "a global": lambda module: OWNED,
        }
        return {"linear": nn.Linear(HIDDEN, HIDDEN), "tensors": list(OWNED), "lookup": lookup.get(kind)}

    return Body(
        of_tensors, parts, lambda x: (x, OWNED if kind == "an argument" else []), ways=("recompute",), drops=False
    )


USES = (reads, reads_a_part, saves)
BACKWARDS = {
    "": {},
    ", in one backward": {"together": True},
    ", changed outside": {"between": change_outside},
    ", in eval now and then": {"start": lambda module: module.train(module.step % 2 == 0)},
}
BUFFERS = {
    **{
        f"{name}, {use.__name__} {'after' if is_before else 'before'} it{how}": updating(
            update, use, is_before, **options
        )
        for (name, update), use, is_before, (how, options) in itertools.product(
            UPDATES.items(), USES, (True, False), BACKWARDS.items()
        )
    },
    **{
        f"of {dtype}, {use.__name__}": updating(average, use, True, dtype)
        for dtype in (torch.bfloat16, torch.float64)
        for use in USES
    },
    **{
        f"no buffer, but in {kind}": elsewhere(kind) for kind in ("a list", "another module", "an argument", "a global")
    },
}
