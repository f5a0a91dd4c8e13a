"""What decides whether a body runs as captured code: where its outputs' graphs lead, and what it is kept from."""

import ctypes
import threading

import torch
import torch.nn.functional as F
from corpus import Body, linear, norm
from engine_testing import HIDDEN
from torch import nn

from bodies.around import changing


def leads_nowhere(self, x):
    y = F.gelu(self.linear(x))
    with torch.no_grad():
        view = y.view(x.shape)
    return view * 2 + 1  # torch gives it a graph, which goes nowhere


def gives_a_view_made_without_gradients(self, x):
    y, z = F.gelu(self.linear(x)), self.linear(x * 2)
    with torch.no_grad():
        view = z.view(x.shape)
    return [y, view]


LOCK, FACTORS = threading.Lock(), {"half": 0.5}


@torch.compiler.disable
def halved(x, factor=None):
    with LOCK:  # as where a table of implementations is read
        factor = FACTORS["half"] if factor is None else factor
    return F.gelu(x) * factor


@torch.compiler.disable(recursive=False)
def activated(self, x):
    return F.silu(self.linear(x))


@torch.compiler.disable
def kept_from_compilers(self, x):
    """As some packages keep what they launch from compilers."""
    return halved(halved(activated(self, x)), factor=0.25)


def asks_for_a_class(self, x):
    """As PEFT's DoRA does."""
    return x if type(self.linear.weight).__module__.startswith("torchao.") else F.gelu(self.linear(x))


def overlapping(self, x):
    both = F.gelu(self.linear(x))
    return both[:, : HIDDEN // 2 + 1], both[:, HIDDEN // 2 :]


def saves_in_two_ways(self, x):
    rows = len(x)
    return F.linear(x, self.w)[:, :rows] * self.w[:rows, :rows] + (self.w * self.w).mul(self.w)[:rows, :rows]


@torch.library.custom_op("recompute_captures::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


squared.register_fake(torch.empty_like)


def unseen(ctx, gradient):
    """As a kernel that is launched by hand: no op tells that it writes."""
    result = torch.empty_like(gradient)
    to = (ctypes.c_float * result.numel()).from_address(result.data_ptr())
    to[:] = (gradient * ctx.saved_tensors[0] * 2).flatten().tolist()
    return result


squared.register_autograd(unseen, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
SELECTED = {
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x[torch.nonzero(x[:, 0])].squeeze(1),
    "unique": lambda x: x.sum(-1) * torch.unique(x.round(), return_inverse=True)[1].sum(-1),
    "masked_select": lambda x: x.masked_select(x < 0.5),
}
COMPILED = torch.compile(lambda x: x.sin().exp(), backend="aot_eager", fullgraph=True)
CAPTURES = {
    "an output whose graph reaches no input": Body(
        leads_nowhere, linear, drops=False, captured="none of its outputs depends on an input"
    ),
    "an output that is a view made without gradients": Body(gives_a_view_made_without_gradients, linear),
    "what is kept from compilers": Body(kept_from_compilers, linear, captured=True),
    "where the class of a parameter is from": Body(asks_for_a_class, linear, captured=True),
    "a custom op whose backward runs a kernel": Body(
        lambda self, x: squared(self.linear(x)).exp().sin(), linear, captured="may do more than call ops"
    ),
    "how often a parameter was written to": Body(
        lambda self, x: F.gelu(self.linear(x)) * float(self.linear.weight._version),
        linear,
        start=lambda module: [torch.no_grad()(module.linear.weight.mul_)(2.0) for _ in range(module.step // 6)],
        captured="it computes a Python number",
    ),
    "a default dtype that it changes": Body(changing, captured="its forward changes torch's settings"),
    "a parameter that autograd saves in two ways": Body(
        saves_in_two_ways,
        lambda: {"w": nn.Parameter(torch.rand(HIDDEN, HIDDEN))},
        captured="twice: as it is, and as a view",
    ),
    "outputs that overlap": Body(overlapping, linear, captured="two of its outputs overlap in memory"),
    "a higher-order operator and compiled code": Body(
        lambda self, x: COMPILED(torch.cond(x.sum() > 0, torch.sin, torch.cos, (x * 2,))), drops=False
    ),
    **{
        f"a shape by {name}": Body(lambda self, x, select=select: select(self.norm(x)).exp().sin(), norm)
        for name, select in SELECTED.items()
    },
}
