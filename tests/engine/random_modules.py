"""Modules built from lists of steps, which hypothesis draws.

A step takes two of the last four values and adds one or more. Every step accepts any values, so every list of steps is
a program; whether autograd accepts it is another matter, and part of what is compared.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy
import torch
from random_ops import MOST_ELEMENTS, OPS, PARTS, REPEATABLE, WIDTH, Call, own, rows
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

KEPT_VALUES = 4
BLOCKS = ("module", "loop", "branch", "no_grad", "autocast", "torch's checkpoint")
"""Steps with a body."""


class Step(NamedTuple):
    """One step of a program: ``x`` and ``y`` say which values it takes, the newest being 0."""

    op: str
    x: int = 0
    y: int = 1
    body: tuple[Step, ...] = ()
    rule: str = ""  # of a step that is a module


class Surroundings(NamedTuple):
    """What all modules of one model share."""

    generator: torch.Generator
    python: random.Random
    numpy: numpy.random.Generator
    shared: nn.Module
    outside: tuple[Tensor, Tensor]
    lent: list[tuple[Tensor, int]] | None
    """If not None: what regions hold without a copy, by the version that it had when they ended."""


class Program(nn.Module):
    """Runs its steps from two values, one of them a keyword argument; returns the last values, nested."""

    def __init__(self, steps, rule, around):
        super().__init__()
        self.steps = steps
        self.rule = rule
        self.generator, self.python, self.numpy = around.generator, around.python, around.numpy
        self.outside = lambda: around.outside
        self.lent = around.lent
        if any(step.op == "shared linear" for _, step in flattened(steps)):
            self.shared = around.shared
        self.borrowed = torch.ones(())  # or, in a module inside another one, a value of that one
        self.parts = nn.ModuleDict()
        for key, step in flattened(steps):
            if step.op == "module":
                self.parts[key] = Program(step.body, step.rule, around)
            elif step.op in PARTS:
                self.parts[key] = PARTS[step.op]()

    def forward(self, x, *, extra=None, branch=False):
        values = self._run(self.steps, "", [x if extra is None else extra, x], branch)
        if self.rule not in ("", "keep"):
            self.lend(x, self.borrowed, *self.parameters(), *([] if extra is None else [extra]))
        return {"last": values[-1], "others": (values[-2], [values[-3] if len(values) > 2 else None])}

    def lend(self, *tensors):
        """These are what they are until backward, or the region may refuse to run again."""
        if self.lent is not None:
            self.lent += [(tensor, tensor._version) for tensor in tensors]

    def _run(self, steps, prefix, values, branch):
        for index, step in enumerate(steps):
            x, y = (values[-1 - number % len(values)] for number in (step.x, step.y))
            key = f"{prefix}{index}"
            if step.op in BLOCKS:
                found = self._run_block(step, key, [y, x], branch)
            else:
                found = OPS[step.op](Call(x, y, self.parts._modules.get(key), self))
            new = [value for value in tree_leaves(found) if isinstance(value, Tensor)]
            new.sort(key=torch.is_floating_point)  # the newest is what is used most
            values = [*values, *(value if value.numel() <= MOST_ELEMENTS else rows(value) for value in new)]
            values = values[-KEPT_VALUES:]  # others die, and their memory is used again
        return values

    def _run_block(self, step, key, values, branch):
        if step.op == "module":
            module = self.parts[key]
            module.borrowed = values[0]
            return module(values[1], extra=values[0] * 0.5, branch=branch)
        prefix = f"{key}_"
        if step.op == "branch":
            return self._run(step.body, prefix, values, branch) if branch else values[1] * 0.5
        if step.op == "loop":
            for _ in range(2):
                values = self._run(step.body, prefix, values, branch)
            return values
        if step.op == "no_grad":
            with torch.no_grad():
                return self._run(step.body, prefix, values, branch)
        if step.op == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return self._run(step.body, prefix, values, branch)
        return checkpoint(self._run, step.body, prefix, values, branch, use_reentrant=False)[-1]


def parse(code, names, rules):
    """The program that ``code`` stands for, two bytes a step; all code stands for one.

    The first byte picks from ``names``, 0 being no step at all and the last ones the end of a body. Of the second byte,
    the lowest bits are operands, and the highest a nested module's rule.
    """
    bodies = [[]]
    opened = []

    def close():
        body = tuple(bodies.pop())
        bodies[-1].append(opened.pop()._replace(body=body))

    for number, operands in zip(code[::2], code[1::2], strict=False):
        name = "" if number == 0 else [*names, "end", "end"][number % (len(names) + 2)]
        is_inside_checkpoint = any(step.op == "torch's checkpoint" for step in opened)
        if is_inside_checkpoint and name not in (*REPEATABLE, "", "end"):
            name = REPEATABLE[number % len(REPEATABLE)]
        step = Step(name, operands & 3, operands >> 2 & 3)
        if name == "end":
            if opened:
                close()
        elif name in BLOCKS and len(opened) < 2:
            opened.append(step._replace(rule=rules[(operands >> 4) % len(rules)] if name == "module" else ""))
            bodies.append([])
        elif name and name not in BLOCKS:
            bodies[-1].append(step)
    while opened:
        close()
    return tuple(bodies[0])


def is_repeatable(steps):
    return all(step.op in (*REPEATABLE, *BLOCKS) and is_repeatable(step.body) for step in steps)


def flattened(steps, prefix=""):
    """The steps of one module, with those in its blocks, by their keys."""
    for index, step in enumerate(steps):
        yield f"{prefix}{index}", step
        if step.op in BLOCKS and step.op != "module":
            yield from flattened(step.body, f"{prefix}{index}_")


class Model(nn.Module):
    """A program, what comes before it and what comes after."""

    def __init__(self, steps, rule, before, after, watched=False):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.before, self.after = before, after
        self.around = Surroundings(
            torch.Generator().manual_seed(0),
            random.Random(0),
            numpy.random.default_rng(0),
            nn.Linear(WIDTH, WIDTH),
            (torch.rand(WIDTH, requires_grad=True), torch.rand(WIDTH)),
            [] if watched else None,
        )
        self.inside = Program(steps, rule, self.around)

    def forward(self, x, extra, branch):
        if self.before == "free":
            x = x + 0.5
        elif self.before == "saved":
            x = x.exp()
        found = self.inside(x, extra=extra, branch=branch)
        if self.after == "output":
            last = found["last"]
            if last.is_floating_point() and own(last) is last:
                last.mul_(0.5)
        elif self.after == "parameter":
            with torch.no_grad():
                for parameter in self.inside.parameters():
                    parameter.mul_(0.9)
        return found, x.sin()

    def changes_what_was_lent(self):
        """Whether an argument or a parameter of a region has been changed after it ran, or a tensor it was to keep."""
        return any(tensor._version != version for tensor, version in self.around.lent or ())
