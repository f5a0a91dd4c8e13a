"""What the tests of captured regions share: a module under a policy beside its plain twin, driven step by step."""

import copy
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from bodies.memory import block, parts_of_a_block
from corpus import counting
from engine_testing import RMSNorm, assert_same, fresh, leaves, loss_of, module_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import recompute
from recompute.attach.runners import region_in

SIZE = 8
ROWS = 4
STEPS_TO_SETTLE = 6
"""Three by the tape, one more that is recorded, one that is watched; and one that runs as code."""
WATCHED_STEPS = 2
"""In so many more steps it turns out what a custom Function's backward writes to."""
NODE = "CapturedFunctionBackward"


def rule(match="inside", **options):
    return {"rules": [{"match": match, "action": "recompute", "via": "hook", **options}]}


class Around(nn.Module):
    """A module around ``inside``, which so has a path, and whose output others save."""

    def __init__(self, inside, *, before=None, after=None):
        super().__init__()
        self.before = before or nn.Identity()
        self.inside = inside
        self.after = after or nn.Identity()

    def forward(self, x, *args, **kwargs):
        return self.after(self.inside(self.before(x), *args, **kwargs))


class DroppingBlock(nn.Module):
    """A block with dropout, a flag and a number, which may be given a mask."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)
        self.dropout, self.scale, self.is_scaled = nn.Dropout(0.25), 1.5, True

    def forward(self, x, mask=None):
        y = self.down(F.gelu(self.up(self.norm(x))))
        if self.is_scaled:
            y = y * self.scale
        if mask is not None:
            y = y * mask
        return x + self.dropout(y)


def a_block():
    """Reads its input twice, as residual connections do."""
    return module_of(block, **parts_of_a_block())


class Layer(nn.Module):
    """A layer of a decoder, without attention."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.mixer = nn.Linear(SIZE, SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, 2 * SIZE), nn.GELU(), nn.Linear(2 * SIZE, SIZE))

    def forward(self, x):
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Layers(nn.Module):
    def __init__(self, count=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linear():
    return nn.Linear(SIZE, SIZE)


body = module_of
"""A module that runs ``forward(self, *args)``; ``parts`` become its attributes."""


def tokens(*shape, grad=True, dtype=torch.float32):
    return torch.randn(*(shape or (ROWS, SIZE)), dtype=dtype, requires_grad=grad)


def state_of(module):
    """Parameters, their gradients and the buffers of a module."""
    found = {}
    for name, parameter in module.named_parameters():
        found[name] = parameter.detach().clone()
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
    return found | {name: buffer.clone() for name, buffer in module.named_buffers()}


def train(*inputs, seed=0, **kwargs):
    """A step: forward and backward of ``loss_of`` on copies of the inputs; gradients pile up in the parameters."""

    def step(module):
        given = fresh(inputs)
        named = fresh(kwargs)
        torch.manual_seed(seed)
        result = module(*given, **named)
        loss_of(result).backward()
        found = {f"output {index}": leaf for index, leaf in enumerate(leaves(result))}
        both = tree_leaves((given, named))
        return found | {f"input {i}": leaf.grad for i, leaf in enumerate(both) if isinstance(leaf, Tensor)}

    return step


def stepping(x, call=lambda module, x: module(x), *, forward=nullcontext, backward=nullcontext):
    """A step of ``call`` on a copy of ``x``, with these around its forward and its backward."""

    def step(module):
        given = fresh(x)
        torch.manual_seed(0)
        with forward():
            y = call(module, given)
        with backward():
            loss_of(y).backward()
        return [y, given.grad]

    return step


class Twins:
    """``module`` under a policy, and a copy of it in plain eager."""

    def __init__(self, module, rules=None):
        self.plain = copy.deepcopy(module)
        self.under = module
        self.handle = recompute.apply(module, rules or rule())

    @classmethod
    def captured(cls, module, *inputs, rules=None, **kwargs):
        """Twins of ``Around(module)`` that run as code on ``inputs``."""
        return cls(Around(module, before=linear(), after=linear()), rules).settle(train(*inputs, **kwargs))

    @property
    def regions(self):
        regions = [region_in(attachment.runner) for attachment in self.handle._attachments]
        return [region for region in regions if region is not None]

    @property
    def is_captured(self):
        return bool(self.regions) and all(region.is_captured for region in self.regions)

    @property
    def why_not(self):
        return "; ".join(region.failure for region in self.regions if not region.is_captured)

    def settle(self, step, *, captured=True):
        """Run a step until the tape has settled and its code runs; ``captured``: whether it should."""
        self.steps(step, STEPS_TO_SETTLE)
        self.steps(step, WATCHED_STEPS if captured and not self.is_captured else 0)
        if captured:
            assert self.is_captured, self.why_not
            assert self.runs_code(step) == len(self.regions), self.why_not
        else:
            assert not self.is_captured
        return self

    def runs_code(self, step):
        """How many regions run as code in a step, which is compared too."""
        with counting() as count:
            self.step(step)
        return count()

    def steps(self, step, count):
        for _ in range(count):
            self.step(step)

    def step(self, step):
        """Run a step on both, and compare all that there is to see."""
        self.both(lambda module: module.zero_grad())
        expected = observed(self.plain, step)
        found = observed(self.under, step)
        assert_same(found, expected)
        return found

    def both(self, change):
        """Change both models."""
        for module in (self.plain, self.under):
            change(module)


def observed(module, step):
    result = step(module)
    found = dict(result) if isinstance(result, dict) else {f"value {i}": leaf for i, leaf in enumerate(leaves(result))}
    return found | state_of(module) | {"random state": torch.get_rng_state()}
