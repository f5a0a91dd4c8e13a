"""Beside Linears that are no plain ones, as those of float8, NF4 and 8 bits, no preset asks for a rule."""

import copy
import itertools
import warnings

import pytest
import torch
from tiers import by_default
from tiny import Adapter, TinyDecoder, assert_same, rule, rules, train
from torch import Tensor, nn
from torch.nn import functional as F

import recompute
from recompute.errors import PolicyWarning


class Product(torch.autograd.Function):
    """A product of rounded operands, which holds what it is given, as torchao's for float8 does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(_rounded(x), _rounded(weight))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows, rounded = x.reshape(-1, x.shape[-1]), _rounded(gradient)
        dweight = rounded.reshape(len(rows), -1).t() @ _rounded(rows) if ctx.needs_input_grad[1] else None
        return rounded @ _rounded(weight), dweight


def _rounded(tensor):
    return tensor.to(torch.bfloat16).to(tensor.dtype)


class RoundedLinear(nn.Linear):
    """As torchao's ``Float8Linear``."""

    def forward(self, x):
        return Product.apply(x, self.weight)


class Codes(Tensor):
    """A weight that is held as codes of 8 bits, as torchao's ``NF4Tensor`` is of 4."""

    codes: Tensor

    @staticmethod
    def __new__(cls, weight):
        return Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype, device=weight.device)

    def __init__(self, weight):
        self.codes = (weight * 100).round().to(torch.int8)

    def values(self):
        return self.codes.float() / 100

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            return Product.apply(args[0], args[1].values())
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return copy.copy(args[0])
        raise NotImplementedError(function)

    def __copy__(self):
        return Codes(self.values())

    def __deepcopy__(self, memo):
        return Codes(self.values())


class ByteLinear(nn.Module):
    """As bitsandbytes': a frozen weight of bytes beside its scale."""

    def __init__(self, linear):
        super().__init__()
        self.weight = nn.Parameter((linear.weight.detach() * 100).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return Product.apply(x, self.weight.float() / 100)


def _rounded_linear(linear):
    made = RoundedLinear(linear.in_features, linear.out_features, bias=False)
    made.weight = linear.weight
    return made


def _coded(linear):
    linear.weight = nn.Parameter(Codes(linear.weight.detach()), requires_grad=False)
    return linear


def _adapted(linear):
    """As PEFT's: a base that may be anything, and a small product that trains."""
    adapter = Adapter(linear)
    adapter.base = ByteLinear(linear)
    return adapter


LINEARS = {
    "a Function": _rounded_linear,
    "a weight of codes": _coded,
    "a weight of bytes": ByteLinear,
    "an adapter": _adapted,
}


def decoder(kind, where):
    """where: what the path of a Linear has in it."""
    torch.manual_seed(0)
    model = TinyDecoder(layers=1)
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and path.startswith("layers") and where in path:
            around, _, name = path.rpartition(".")
            setattr(model.get_submodule(around), name, LINEARS[kind](module))
    return model.train()


POLICIES = {
    "elementwise": "elementwise",
    "auto": "auto",
    "kernel": "kernel",
    "layers by kernels": rules(rule("block", "recompute", via="kernel")),
    "all by kernels": rules(rule(["block", "head", "*Norm*"], "recompute", via="kernel")),
}


@pytest.mark.parametrize("steps", [2, pytest.param(5, marks=pytest.mark.slow)])  # the last run as captured code
@pytest.mark.parametrize("kind", LINEARS)
@pytest.mark.parametrize("policy", by_default(list(POLICIES), "elementwise", "auto", "all by kernels"))
def test_steps_have_the_gradients_that_they_have_without_a_policy(policy, kind, steps):
    for where in ("", "self_attn", "mlp") if steps > 2 else ("",):
        model, plain = decoder(kind, where), decoder(kind, where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)  # of rules for which there is no kernel
            recompute.apply(model, POLICIES[policy])
        found, expected = train(model, steps=steps), train(plain, steps=steps)
        if policy == "elementwise":
            assert_same(found, expected)
        for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            assert (one - other).norm() <= 0.01 * other.norm(), where


def test_the_kernels_of_norms_stand_in_beside_such_linears():
    handle = recompute.apply(decoder("a Function", ""), POLICIES["layers by kernels"])
    assert "kernel: rms_norm (llama casting)" in handle.explain()
