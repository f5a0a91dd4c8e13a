"""A first run that leaves things elsewhere than it found them: where it runs again, they are where it found them."""

import torch
from corpus import Body, linear
from engine_testing import HIDDEN, bits, function_of, no_tensors
from torch import Tensor, nn


class Codes:
    """What has codes, as a quantized weight does, or will have them once it has run."""

    codes: Tensor | None = None


def move(owner, target):
    """Move the codes in the first run, as an int8 layer of bitsandbytes does, and calibrate them in later ones."""
    if owner.codes is not None:
        target.codes, owner.codes = owner.codes, None
    else:
        target.codes = target.codes + 1.0
    return target.codes


def move_and_delete(owner, target):
    if hasattr(owner, "codes"):
        target.codes = owner.codes
        del owner.codes
    else:
        target.codes = target.codes + 1.0
    return target.codes


def count(owner):
    owner.runs = getattr(owner, "runs", 0.0) + 1.0
    return owner.runs


def count_by_name(owner):
    setattr(owner, "runs", getattr(owner, "runs", 0.0) + 1.0)  # noqa: B010
    return owner.runs


def count_in_place(owner):
    owner.codes += 1.0
    return owner.codes.clone()


def quantized(tensor):
    tensor.codes, tensor.inner = torch.tensor(3.0), Codes()
    tensor.inner.codes = torch.tensor(4.0)
    return tensor


Counts = function_of(lambda x, store: x * count(store), lambda gradient: (gradient, None), saves=no_tensors)
PLACES = {
    "moved from a parameter to an object": lambda self, x: move(self.weight, self.store),
    "moved from a parameter to the module": lambda self, x: move(self.weight, self),
    "moved from a buffer": lambda self, x: move(self.buffer, self.store),
    "moved from a tensor": lambda self, x: move(self.tensor, self.store),
    "moved from a tensor in a list": lambda self, x: move(self.tensors[0], self.store),
    "moved from an object on a parameter": lambda self, x: move(self.weight.inner, self.store),
    "moved from a parameter that is given": lambda self, x: move(self.given, self.store),
    "moved from a tensor that is given": lambda self, x: move(x, self),
    "deleted from a parameter": lambda self, x: move_and_delete(self.weight, self.store),
    "deleted from a tensor": lambda self, x: move_and_delete(self.tensor, self.store),
    "made on an object": lambda self, x: count(self.store),
    "made on an object by its name": lambda self, x: count_by_name(self.store),
    "made by a custom Function": lambda self, x: Counts.apply(x, self.store),
    "made on a parameter": lambda self, x: count(self.bare),
    "changed in place on a parameter": lambda self, x: count_in_place(self.weight),
}
GIVEN = []


def frozen():
    return nn.Parameter(torch.ones(()), requires_grad=False)


def of_a_place(scale):
    def forward(self, x, given):
        self.given = given
        return (self.linear(x) * scale(self, x)).tanh()

    def parts():
        owners = {"tensor": quantized(torch.ones(())), "tensors": [quantized(torch.ones(()))], "store": Codes()}
        return {**linear(), "codes": None, **owners, "buffers": {"buffer": quantized(torch.ones(()))}}

    def others_come(module):
        """In the places of those that ran first."""
        if module.step % 2 == 0:
            module.weight, module.bare, GIVEN[:] = quantized(frozen()), frozen(), [quantized(frozen())]

    return Body(forward, parts, lambda x: (quantized(x * 1.0), GIVEN[0]), others_come, drops=False)


class IntoMainGrad(torch.autograd.Function):
    """As Megatron's and Transformer Engine's Linears, which find in forward where they add in backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.weight, ctx.total = w, w.main_grad  # under hooks, what is saved has no attributes
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        (x,), w = ctx.saved_tensors, ctx.weight
        dw = (gradient * x).sum(0)
        ctx.total.add_(dw)
        w.was_added = True
        return gradient * w, dw


def into_main_grad(self, x):
    return x + self.linear(IntoMainGrad.apply(self.linear(x.sin()).tanh(), self.weight).sigmoid())


def start_main_grad(module):
    module.weight.main_grad, module.weight.was_added = torch.zeros(HIDDEN), False


FIRST_RUNS = {
    **{name: of_a_place(each) for name, each in PLACES.items()},
    "a function of other ops under the mode of a first run": Body(lambda self, x: x.sin() * x.sin().quantile(0.3, 0)),
    "a sum that backward adds to, call by call": Body(
        into_main_grad,
        lambda: {**linear(), "weight": nn.Parameter(torch.rand(HIDDEN))},
        start=start_main_grad,
        state=lambda module: (bits(module.weight.main_grad), module.weight.was_added),
        captured=True,
    ),
}
