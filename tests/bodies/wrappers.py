"""Wrapper subclasses of tensors, as quantized weights are: they are the same if they hold the same."""

import torch
from corpus import Body, always, never, nothing
from engine_testing import HIDDEN, function_of
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Quantized(Tensor):
    """Codes and a scale."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def plain(self):
        return self.codes.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scale)
        unwrap = lambda value: value.plain() if isinstance(value, Quantized) else value  # noqa: E731
        return op(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Flattened(Quantized):
    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return Flattened(inner["codes"], inner["scale"])


ByWrapper = function_of(
    lambda x, weight: x @ weight.plain(),
    lambda gradient, weight: (gradient @ weight.plain().t(), None),
    saves=lambda result, x, weight: (weight,),
)


class Turned(Flattened):
    """Its transpose is another wrapper, which autograd saves."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        if op is torch.ops.aten.t.default:
            return cls(args[0].codes.t(), args[0].scale.t())
        return super().__torch_dispatch__(op, types, args, kwargs)


def turned():
    weight = Turned(torch.randint(-3, 3, (HIDDEN, HIDDEN), dtype=torch.int8), torch.rand(HIDDEN, 1))
    return {"norm": nn.LayerNorm(HIDDEN), "weight": nn.Parameter(weight, requires_grad=False)}


WHERE = {
    "a parameter": lambda weight: {"weight": nn.Parameter(weight, requires_grad=False)},
    "a buffer": lambda weight: {"buffers": {"weight": weight}},
    "an attribute": lambda weight: {"weight": weight},
    "an argument": lambda weight: {},
}
KINDS = {"without a flatten": Quantized, "with a flatten": Flattened}
GIVEN = []


def wrapping(kind, where, between):
    def parts():
        GIVEN[:] = [kind(torch.randint(-3, 3, (HIDDEN, HIDDEN), dtype=torch.int8), torch.rand(HIDDEN, 1))]
        return {"norm": nn.LayerNorm(HIDDEN), **WHERE[where](GIVEN[0])}

    return Body(
        lambda self, x, *weight: x.sin() + ByWrapper.apply(self.norm(x), *(weight or (self.weight,))).tanh(),
        parts,
        lambda x: (x, *(GIVEN if where == "an argument" else [])),
        between=between,
        may_refuse=never if between is nothing else always,
        captured="is not an ordinary strided tensor",
    )


def scaled(module, *_):
    GIVEN[0].scale.mul_(2.0)


WRAPPERS = {
    **{
        f"{kind}, as {where}{how}": wrapping(KINDS[kind], where, between)
        for kind in KINDS
        for where in WHERE
        for how, between in {"": nothing, " whose scale changes": scaled}.items()
    },
    "a parameter's transpose": Body(lambda self, x: (self.norm(x) @ self.weight.t()).exp().sin(), turned),
}
