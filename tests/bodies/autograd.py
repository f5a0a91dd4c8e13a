"""What forward does with autograd: spans without gradients, gradients inside, hooks, and custom Functions."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Body, nothing
from engine_testing import HIDDEN, RMSNorm, function_of, its_result, no_tensors
from torch import nn
from torch.autograd import Function, forward_ad
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import recompute

RAN = []
"""What Functions ran, so that nothing may run twice."""


def parts():
    return {
        "norm": RMSNorm(),
        "layer_norm": nn.LayerNorm(HIDDEN),
        "linear": nn.Linear(HIDDEN, HIDDEN),
        "weight": nn.Parameter(torch.rand(HIDDEN)),
        "frozen": nn.Parameter(torch.rand(HIDDEN), requires_grad=False),
        "options": Options(),
        "recipe": Recipe(Factors(0.5, Mode.FAST)),
        "packed": Packed(torch.rand(1, HIDDEN), requires_grad=False),
    }


# Spans and gradients


def slope(x):
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(leaf.sin().exp().sum(), leaf)[0]


def inner_gradient(self, x):
    with torch.enable_grad():
        y = self.norm(x).exp()
        (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    return y * gradient.sin()


def gradient_of_what_is_kept(self, x):
    y = recompute.keep(x.exp())
    (gradient,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    return gradient.cos()


def tangent(self, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(self.norm(forward_ad.make_dual(x.exp(), x.cos())).sin()).tangent.clone().exp()


def under_hooks(self, x):
    y = self.norm(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
        y = y.exp().sin()
    return y.cos()


def under_a_checkpoint(self, x):
    y = checkpoint(lambda x: F.dropout(self.norm(x), 0.5).exp(), x * 2, use_reentrant=False)
    return F.dropout(y, 0.5).sin()


def hooked(self, x):
    y = self.linear(self.norm(x))
    y.register_hook(lambda gradient: gradient * 2)
    return F.gelu(y).exp()


def autocast_on_and_off(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        x = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            x = self.linear(x.float())
    with torch.autocast("cpu", dtype=torch.float16):
        return self.linear(x).exp().float()


def without_gradients(self, x):
    with torch.no_grad():
        size = self.linear(x).abs().amax()
    return F.gelu(self.linear(x) / size)


def under_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        y = self.linear(x)
    return F.gelu(y.float())


def mixed(self, x):
    y = self.norm(x).exp()
    with torch.no_grad():
        z = y.sin()
    return y, y.detach(), z, (y > 1).float(), z * self.norm.weight


def of(forward, captured=None, **options):
    return Body(forward, parts, captured=captured, **options)


class Doubled(Function):
    """Says how it runs under ``vmap``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


decorated = recompute.recompute(lambda x: x.exp().sin())


def vmapped_with_an_array(self, x):
    return torch.func.vmap(lambda row: self.norm(row) * torch.as_tensor(np.ones(HIDDEN, np.float32)))(x.exp()).sin()


GRADIENTS = {
    "no_grad": of(lambda self, x: x.exp() * torch.no_grad()(lambda: self.norm(x).abs().amax(-1, keepdim=True))()),
    "detach": of(lambda self, x: (self.norm(x).detach() + x).exp().sin()),
    "straight through": of(lambda self, x: (x + (self.norm(x).round() - x).detach()).exp().sin()),
    "detached and required anew": of(lambda self, x: slope(self.norm(x)) * x.exp()),
    "grad inside of no_grad": of(
        lambda self, x: x.exp() * torch.no_grad()(torch.enable_grad()(lambda: slope(self.norm(x))))()
    ),
    "all but the end": of(lambda self, x: (self.norm(x.detach()).detach() * x).sin()),
    "a gradient": of(inner_gradient),
    "a gradient of what is kept": of(gradient_of_what_is_kept, drops=False),
    "a tangent": of(tangent, captured="forward-mode differentiation"),
    "vmap": of(lambda self, x: torch.func.vmap(lambda row: self.norm(row).sin())(x.exp()), captured=True),
    "vmap that drops out": of(
        lambda self, x: torch.func.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(x).exp(), captured=True
    ),
    "vmap of a row times an array": of(vmapped_with_an_array, captured="runs other ops"),
    "a Function under vmap": of(lambda self, x: torch.func.vmap(Doubled.apply)(self.norm(x)).exp().sin()),
    "a Function that gives back what nothing has read": of(
        lambda self, x: Same.apply(x).norm(dim=-1, keepdim=True).exp() * self.norm.weight
    ),
    "a decorated function": of(lambda self, x: (decorated(self.norm(x).cos()) * decorated(x)).tanh()),
    "a functional gradient": of(
        lambda self, x: torch.func.grad(lambda y: self.norm(y).sin().sum())(x) * self.norm(x).exp().sin()
    ),
    "a functional product": of(lambda self, x: torch.func.vjp(torch.sin, x)[1](x.exp())[0] * self.norm(x).exp()),
    "jvp": of(lambda self, x: torch.func.jvp(lambda y: self.norm(y).sin(), (x.exp(),), (x.cos(),))[1].exp()),
    "jvp without a trace": of(lambda self, x: torch.func.jvp(lambda y: self.layer_norm(y), (x,), (x.cos(),))[1].exp()),
    "hooks on saved tensors": of(under_hooks),
    "torch's checkpoint": of(under_a_checkpoint),
    "torch's checkpoint alone": of(
        lambda self, x: checkpoint(lambda z: F.gelu(self.linear(z)), x, use_reentrant=False), drops=False
    ),
    "a hook": of(hooked),
    "autocast, on and off": of(autocast_on_and_off),
    "autocast in captured code": of(under_autocast, captured=True),
    "no_grad in captured code": of(without_gradients, captured=True),
    "some results without": of(mixed),
    "what is kept": of(lambda self, x: F.gelu(recompute.keep(F.gelu(self.linear(x))))),
    "a weight twice": of(lambda self, x: self.linear(F.gelu(self.linear(x)) + self.linear(x * 2)), captured=True),
}

# Custom Functions: each is one call, which runs as in eager code


class Scale(Function):
    """Saves what it is given. Nothing may trace it: it asks for values."""

    @staticmethod
    def forward(ctx, x, w):
        RAN.append("forward")
        assert x.data_ptr() != 0
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        RAN.append("backward")
        x, w = ctx.saved_tensors
        wants_x, wants_w = ctx.needs_input_grad
        return gradient * w if wants_x else None, (gradient * x).sum(0) if wants_w else None


Exp = function_of(lambda x: x.exp(), once_differentiable(lambda gradient, y: gradient * y), saves=its_result)


class Split(Function):
    """Several outputs, of which one takes no gradient, and which save nothing but a number."""

    @staticmethod
    def forward(x, factor, parts):
        return x * factor + parts[0], x.argmax(-1), x.sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor, ctx.width = inputs[1], inputs[0].shape[-1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, first, _, last):
        assert first is not None
        gradient = first * ctx.factor
        return gradient if last is None else gradient + last.unsqueeze(-1).expand(-1, ctx.width), None, None


def over_what_was_saved(gradient, a, b):
    """As Triton kernels do it: backward writes its gradients over what was saved, unseen."""
    first, second = gradient * b, gradient * a
    a.numpy()[:], b.numpy()[:] = first.numpy(), second.numpy()
    return a, b


Reverse = function_of(lambda x: x.view_as(x), lambda gradient: -gradient, saves=no_tensors)
Same = function_of(lambda x: x, lambda gradient: gradient, saves=no_tensors)
Transposed = function_of(*[lambda x: x.t().contiguous().t()] * 2, saves=no_tensors)
InMemory = function_of(lambda a, b: a * b, over_what_was_saved)
Widened = function_of(lambda x, w: x * w, lambda gradient, x, w: ((gradient * w).double(), gradient * x))
"""Gradients of another dtype and another shape than what they belong to, which autograd makes fit."""


class Dropped(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mask = torch.rand_like(x) > 0.25
        return x * ctx.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.mask


class UnderAutocast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Nested(Function):
    """Runs another Function, and autograd, inside of it."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            ctx.graph = given, Exp.apply(given).sin()
        return ctx.graph[1].detach()

    @staticmethod
    def backward(ctx, gradient):
        given, result = ctx.graph
        return torch.autograd.grad(result, given, gradient, retain_graph=True)[0]


class Options:
    def __init__(self):
        self.factor = torch.rand(HIDDEN)


class Configured(Function):
    """Takes an object that no graph knows, with a tensor in it."""

    @staticmethod
    def forward(ctx, x, options, others):
        ctx.options = options
        return x * options.factor + len(others)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.options.factor, None, None


class Mode(str, Enum):
    FAST = "fast"


class Factors(NamedTuple):
    factor: float
    mode: Mode


@dataclass(frozen=True)
class Recipe:
    """Torch's frontend makes another one of these, which equals it."""

    factors: Factors
    dtype: torch.dtype = torch.float32


class Scaled(Function):
    """Takes constants in classes of their own, as those for float8 do."""

    @staticmethod
    def forward(ctx, x, factors, recipe, mode):
        assert (type(factors), type(recipe), type(mode)) == (Factors, Recipe, Mode)
        assert mode is recipe.factors.mode
        ctx.factor = factors.factor * recipe.factors.factor
        return x.to(recipe.dtype) * ctx.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None, None, None


class Packed(nn.Parameter):
    """A frozen parameter of a class of its own, as those of 4 bits are."""


class Twice(Function):
    """Reads what it saved, an input, an intermediate and its own result, again and again."""

    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(x, x.sin(), result)
        return result

    @staticmethod
    def backward(ctx, grad):
        x, _, result = ctx.saved_tensors
        again, sine, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return grad * x * sine * result * ctx.saved_tensors[0] * ctx.saved_tensors[1]


InPlace = function_of(lambda x: x.mul_(2), lambda g: g * 2, saves=no_tensors, name="InPlace", is_dirty=True)
bound_early = Scale.apply


class NotDifferentiable(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.round()
        ctx.mark_non_differentiable(y)
        return y


LIBRARY = torch.library.Library("recompute_functions", "DEF")


def composite(function):
    """An op that torch shows as the ops which it calls, as those of libraries for quantization are."""
    LIBRARY.define(f"{function.__name__}(Tensor x, Tensor w) -> Tensor")
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.recompute_functions, function.__name__)


@composite
def scaled(x, w):
    """Each Function is followed by what saves tensors, also of its own."""
    y = Split.apply(Scale.apply(x.exp(), w), 0.5, (w.detach(),))[0]
    with torch.no_grad():
        size = Scale.apply(y, w).abs()
    return y.view_as(y) * y.sigmoid() * size * NotDifferentiable.apply(y * 4) * w


@composite
def scaled_last(x, w):
    return Exp.apply(x.sin() * w)


Looked = function_of(
    lambda x: x, lambda gradient, largest: gradient * largest, saves=lambda y, x: (x.abs().amax(),), hides=True
)
"""Looks at what it gives back."""


@composite
def looked_at(x, w):
    return Looked.apply(x.sin()) * w


def splits(self, h):
    first, best, total = Split.apply(h, 0.5, (self.weight.detach(),))
    return first.sigmoid() * total.unsqueeze(-1) + best.unsqueeze(-1)


def scale_without_gradients(self, h):
    with torch.no_grad():
        scale = Scale.apply(h, self.weight)
    return h.sigmoid() * scale


FORWARDS = {
    "saves its inputs": lambda self, h: Scale.apply(h, self.weight).sigmoid() * h.tanh(),
    "a frozen weight": lambda self, h: Scale.apply(h, self.frozen).sigmoid(),
    "frozen values": lambda self, h: Scale.apply(self.frozen.tanh().expand(h.shape), self.weight).sigmoid() * h,
    "bound to another name": lambda self, h: bound_early(h, self.weight).sigmoid(),
    "saves its output": lambda self, h: Exp.apply(h).sigmoid() * 2,
    "several outputs": splits,
    "an output that nobody reads": lambda self, h: Split.apply(h, 0.5, (self.weight.detach(),))[0].sigmoid(),
    "gives back a view": lambda self, h: Reverse.apply(h).sigmoid() * h,
    "gives back what it is given": lambda self, h: Same.apply(h).sigmoid() * h,
    "gives back its gradient": lambda self, h: (h + Same.apply(h.tanh())).sigmoid(),
    "writes over what it saved": lambda self, h: InMemory.apply(self.linear(h), self.linear(h).sigmoid()).tanh(),
    "draws": lambda self, h: F.dropout(Dropped.apply(h), 0.5).sigmoid(),
    "gradients that do not fit": lambda self, h: Widened.apply(h, self.weight).sigmoid(),
    "others inside of it": lambda self, h: Nested.apply(h).sigmoid(),
    "other layouts": lambda self, h: self.linear(Transposed.apply(h.sigmoid())).tanh(),
    "one tensor twice": lambda self, h: InMemory.apply(h, h.clone()) + InMemory.apply(h.tanh(), h.tanh()),
    "one after the other": lambda self, h: Scale.apply(Exp.apply(Scale.apply(h, self.weight)), self.weight).tanh(),
    "without gradients": scale_without_gradients,
    "autocast": lambda self, h: UnderAutocast.apply(h, self.linear.weight).sigmoid(),
    "objects": lambda self, h: Configured.apply(h, self.options, [h]).sigmoid() + Configured.apply(h, self.options, []),
    "constants": lambda self, h: Scaled.apply(h, self.recipe.factors, self.recipe, Mode.FAST).sigmoid(),
    "a parameter of a class of its own": lambda self, h: Scale.apply(h, self.packed.view(-1)).sigmoid(),
    "inside of an op": lambda self, h: scaled(h, self.weight).sigmoid(),
    "an op that ends with one": lambda self, h: scaled_last(h, self.weight) * h,
    "first and last": lambda self, h: Scale.apply(h, self.weight),
    "reads what it saved again": lambda self, h: Twice.apply(h.sigmoid()).tanh(),
}
IS_TOLD_LATE = ("gives back what it is given", "gives back its gradient")  # when the graph is taken: they run no op
WRITES_WHAT_IT_SAVED = ("writes over what it saved", "one tensor twice")


def in_a_block(function, **options):
    return Body(
        lambda self, x: x + self.linear(function(self, self.linear(x).tanh())).exp(),
        parts,
        start=lambda module: RAN.clear(),
        state=lambda module: RAN.count("forward"),  # of what runs in forward, nothing runs again
        ways=("recompute",),
        **options,
    )


FUNCTIONS = {
    **{
        name: in_a_block(
            each, captured=None if name in IS_TOLD_LATE else True, backwards=1 if name in WRITES_WHAT_IT_SAVED else 2
        )
        for name, each in FORWARDS.items()
    },
    "gives an op what it was given": in_a_block(
        lambda self, h: looked_at(h, self.weight).sigmoid(), captured="inside of another op returns what it was given"
    ),
    "in place": in_a_block(
        lambda self, h: InPlace.apply(self.linear(h)).sin(), captured="InPlace writes to one of its arguments"
    ),
}
CHECKPOINTED = {
    f"{name}, run again": body._replace(ways=("checkpoint",), start=nothing, state=nothing)
    for name, body in FUNCTIONS.items()
}
FUNCTIONS |= CHECKPOINTED
