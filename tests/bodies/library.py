"""Ops of other libraries: what they draw is drawn again, whether they say so or not, and their effects happen once."""

import random
from contextlib import contextmanager

import numpy as np
import torch
from corpus import OWN_PYTHON, OWN_TORCH, Body
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

RUNS = []
now = 0
"""The step that runs."""


def fresh():
    return torch.Generator().manual_seed(int(torch.randint(1000, ())))


DRAWS = {
    "torch": torch.rand_like,
    "python": lambda x: random.random(),
    "numpy": lambda x: np.random.randn(),
    "several": lambda x: torch.rand_like(x) * random.random() * np.random.rand(),
    "own": lambda x: torch.rand(x.shape, generator=OWN_TORCH),
    "own_of_python": lambda x: OWN_PYTHON.random(),
    "made_inside": lambda x: torch.rand(x.shape, generator=fresh()),
    "seeded": lambda x: (torch.manual_seed(3), torch.rand_like(x))[1],
    **{f"from_step_{step}": lambda x, step=step: torch.rand_like(x) if now >= step else 1.5 for step in (1, 6)},
    **{f"numpy_from_step_{step}": lambda x, step=step: np.random.rand() if now >= step else 1.5 for step in (1, 6)},
}


def library_op(name, function, result="Tensor", **options):
    op = torch.library.custom_op(
        f"recompute_library::{name}", function, mutates_args=(), schema=f"(Tensor x) -> {result}", **options
    )
    op.register_fake(lambda x: torch.empty_like(x) if result == "Tensor" else 1 if result == "int" else None)
    if result == "Tensor":
        op.register_autograd(backward, setup_context=saves_its_output)
    return op


def backward(ctx, gradient):
    return gradient * ctx.saved_tensors[0]


def saves_its_output(ctx, inputs, output):
    ctx.save_for_backward(output)


def drawing(draw):
    return lambda x: x * draw(x)


def noting(name, gives):
    return lambda x: (RUNS.append(name), gives(x))[1]


NOISE = {name: library_op(name, drawing(draw)) for name, draw in DRAWS.items()}
LIBRARY = torch.library.Library("recompute_library", "FRAGMENT")
LIBRARY.define("implemented(Tensor x) -> Tensor")
LIBRARY.impl("implemented", drawing(DRAWS["several"]), "CompositeExplicitAutograd")
torch.library.register_autograd("recompute_library::implemented", backward, setup_context=saves_its_output)
NOISE["implemented"] = torch.ops.recompute_library.implemented
NOISE["tagged"] = library_op("tagged", drawing(DRAWS["several"]), tags=(torch.Tag.nondeterministic_seeded,))
EFFECTS = {
    "registered": library_op("registered", noting("registered", lambda x: x * 2)),
    "gives nothing": library_op("nothing", noting("gives nothing", lambda x: None), "()"),
    "gives a number": library_op("number", noting("gives a number", lambda x: 1), "int"),
}


@contextmanager
def registered():
    handle = _register_effectful_op(torch.ops.recompute_library.registered.default, _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()


def start(module):
    global now
    now = module.step
    RUNS.clear()


def of_an_effect(kind, late, **options):
    """``late``: the effect happens in every fifth call, from the fourth one on."""

    def forward(self, x):
        self.runs += 1
        h = x.sigmoid()
        if late and self.runs % 5 != 4:
            return (h.exp() * x).tanh()
        result = EFFECTS[kind](h if kind == "registered" else h.detach())
        return ((result if isinstance(result, Tensor) else h).exp() * x).tanh()

    spans = {"around": registered, "around_backward": registered} if kind == "registered" else {}
    return Body(forward, lambda: {"runs": 0}, start=start, state=lambda module: list(RUNS), **spans, **options)


# A checkpoint runs Python again. Of effects that are not registered it sees those of its first run.
LATE = [("gives nothing", True), ("gives a number", False), ("gives a number", True)]
LIBRARIES = {
    **{
        f"draws by {name}": Body(lambda self, x, op=op: (op(x.sigmoid()).exp() * x).tanh(), start=start)
        for name, op in NOISE.items()
    },
    **{f"{kind}{' late' if late else ''}": of_an_effect(kind, late, ways=("recompute",)) for kind, late in LATE},
    **{
        f"{kind}{' late' if late else ''}, also in a checkpoint": of_an_effect(kind, late)
        for kind, late in [("registered", False), ("registered", True), ("gives nothing", False)]
    },
    "registered, in the middle": Body(
        lambda self, x: EFFECTS["registered"](x.sigmoid().exp().sin()).exp().sin(),
        start=start,
        state=lambda module: list(RUNS),
        around=registered,
        around_backward=registered,
    ),
}
