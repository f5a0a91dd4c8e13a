"""What a step of a random module may do: ops that accept tensors of any shape and dtype."""

import ctypes
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from engine_testing import function_of, its_result
from torch import Tensor, nn

import recompute

WIDTH, MOST_ELEMENTS = 4, 96


class Call(NamedTuple):
    """What an op is given: two values, the part of the module that is this step's own, and the module."""

    x: Tensor
    y: Tensor
    part: Any
    program: Any


def floating(x):
    return x if x.is_floating_point() else (x % 7).float() * 0.2


def rows(x, dtype=torch.float32):
    """``x`` seen, if it can be, as a matrix of WIDTH columns and at least two rows."""
    x = floating(x)
    x = x if dtype is None else x.to(dtype)
    if x.dim() == 2 and x.shape[1] == WIDTH and x.shape[0] > 1:
        return x
    flat = x.reshape(-1)
    count = min(flat.numel(), MOST_ELEMENTS) // WIDTH
    return flat[: count * WIDTH].reshape(count, WIDTH) if count > 1 else flat.sum().expand(2, WIDTH)


def like(y, x):
    """``y``, or one element of it, so that it can be broadcast to the shape of ``x``."""
    shape, other = tuple(x.shape), tuple(y.shape)
    fits = len(other) <= len(shape) and all(b in (a, 1) for a, b in zip(reversed(shape), reversed(other), strict=False))
    return y if fits else y.reshape(-1)[0] if y.numel() else y.sum()


def own(x):
    """``x``, or a copy of it if it may not be changed: a leaf's memory, or an element that is several."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    base = x if x._base is None else x._base
    return x.clone() if (base.is_leaf and base.requires_grad) or extent < x.numel() else x


def flat(x):
    return x.reshape(-1)


def at_least(dims, x):
    while x.dim() < dims:
        x = x.unsqueeze(0)
    return x


def numbers(x, below, count=None):
    """Indices from 0 to ``below`` that depend on the values of ``x``."""
    found = (rows(x).detach().nan_to_num(0.0, 0.0, 0.0) * 8).long().abs() % below
    return found.reshape(-1)[:count]


class Cube(torch.autograd.Function):
    """In PyTorch alone; reads what it saved twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, square := x * x)
        return square * x

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        _, square = ctx.saved_tensors
        return gradient * (square + x * x + x * x)


def sine_by_numpy(x):
    """Fills its output where no dispatcher sees it."""
    y = torch.empty(x.shape)
    numpy.sin(x.numpy(), out=y.numpy())
    return y


def copied_by_address(x):
    """Memory that is saved under another shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    ctypes.memmove(y.data_ptr(), x.data_ptr(), y.nbytes)
    return y.view(-1)


Numpy = function_of(sine_by_numpy, lambda gradient, y: gradient * (1 - y * y), saves=its_result)
ByAddress = function_of(
    lambda x: x.contiguous().tanh(),
    lambda gradient, y: gradient * (1 - y.tanh().square()).view(gradient.shape),
    saves=lambda y, x: (copied_by_address(x),),
)


TanhInPlace = function_of(lambda x: x.tanh_(), lambda g, y: g * (1 - y * y), saves=its_result, is_dirty=True)


Stash = function_of(
    lambda x, y: x * y.sigmoid(),
    lambda gradient, factor: (gradient * factor, None),
    saves=lambda result, x, y: (y.sigmoid(),),
    hides=True,
)


def unseen(c):
    buffer = torch.empty(c.x.shape)
    buffer.numpy()[...] = c.y.detach().float().mean().numpy()
    return floating(c.x) * buffer


def out_argument(c):
    with torch.no_grad():
        buffer = torch.empty(0)
        torch.exp(rows(c.y).clamp(max=1.0), out=buffer.resize_(rows(c.y).shape))
    return rows(c.x) * like(buffer, rows(c.x))


def inner_gradient(c):
    with torch.enable_grad():
        z = rows(c.x).detach().requires_grad_()
        (gradient,) = torch.autograd.grad((z.sin() * z).sum(), z)
    return rows(c.x) * gradient


def keep(c, name=None):
    x = c.x.clone()  # as what a replay has in its place is no leaf, by which later steps would go
    c.program.lend(x)
    return recompute.keep(x, name)


def heads(x):
    return rows(x)[:2].reshape(1, 2, 2, 2)


def set_item(c):
    x = at_least(1, own(c.x))
    if x.shape[0] > 0:
        x[0] = flat(c.y).sum().to(x.dtype)
    return x


def bits(c):
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return c.x.view(kinds[c.x.element_size()]) if c.x.is_floating_point() else c.x


def flip_a_bit(c):
    """Through another dtype's view."""
    x = own(c.x)
    found = bits(c._replace(x=x.detach()))
    found.logical_not_() if found.dtype is torch.bool else found.bitwise_xor_(1)
    return x


def in_place(change):
    """An op that changes its first value, given the second with a shape and dtype that it can be changed by."""

    def op(c):
        x = own(floating(c.x))
        change(x, like(c.y, x).to(x.dtype))
        return x

    return op


def linear():
    return nn.Linear(WIDTH, WIDTH)


VIEWS = {
    "view": lambda c: c.x.view(-1) if c.x.is_contiguous() else c.x.reshape(-1),
    "transpose": lambda c: at_least(2, c.x).transpose(0, -1),
    "slice": lambda c: at_least(1, c.x)[1:] if at_least(1, c.x).shape[0] > 1 else c.x,
    "columns": lambda c: at_least(2, c.x)[..., ::2],
    "expand": lambda c: rows(c.x, None).unsqueeze(0).expand(2, -1, -1),
    "chunk": lambda c: at_least(1, c.x).chunk(2, -1),
    "unbind": lambda c: at_least(1, c.x).unbind(0)[:3] if c.x.numel() else c.x,
    "select": lambda c: c.x.select(-1, -1) if c.x.dim() and c.x.shape[-1] else c.x,
    "unfold": lambda c: rows(c.x).unfold(-1, 2, 1),
    "diagonal": lambda c: rows(c.x).diagonal(),
    "detach": lambda c: c.x.detach(),
    "alias": lambda c: c.x.view_as(c.x),
}
IN_PLACE = {
    "mul_": in_place(lambda x, y: x.mul_(0.5)),
    "mul_ by y": in_place(lambda x, y: x.mul_(y)),
    "add_": in_place(lambda x, y: x.add_(y)),
    "copy_": in_place(lambda x, y: x.copy_(y)),
    "tanh_": in_place(lambda x, y: x.tanh_()),
    "relu_": in_place(lambda x, y: x.relu_()),
    "masked_fill_": in_place(lambda x, y: x.masked_fill_(y > 0.2, 0.25)),
    "add_ to a slice": in_place(lambda x, y: at_least(1, x)[..., :1].add_(1.0)),
    "mul_ of a transpose": in_place(lambda x, y: at_least(2, x).transpose(0, 1).mul_(0.5)),
    "mul_ of a detached": in_place(lambda x, y: x.detach().mul_(0.5)),
    "mul_ without gradients": in_place(lambda x, y: torch.no_grad()(x.mul_)(0.5)),
    "zero_": in_place(lambda x, y: x.zero_()),
    "set item": set_item,
    "flip a bit": flip_a_bit,
    "clone": lambda c: c.x.clone(),
    "change a copy": lambda c: rows(c.x).clone().mul_(2.0).add_(like(rows(c.y), rows(c.x))).sigmoid_(),
    "dropout_": in_place(lambda x, y: F.dropout(x, 0.4, training=True, inplace=True)),
}
VALUES = {
    "add": lambda c: c.x + like(c.y, c.x),
    "mul": lambda c: c.x * like(c.y, c.x),
    "div": lambda c: floating(c.x) / (1 + like(floating(c.y), c.x).abs()),
    "where": lambda c: torch.where(c.x > 0, c.x, like(c.y, c.x).to(c.x.dtype)),
    "outer": lambda c: flat(c.x)[:4, None] * flat(c.y)[:3],
    "exp": lambda c: floating(c.x).clamp(max=1.0).exp(),
    "tanh": lambda c: floating(c.x).tanh(),
    "sigmoid": lambda c: floating(c.x).sigmoid(),
    "gelu": lambda c: F.gelu(floating(c.x)),
    "silu": lambda c: F.silu(floating(c.x)),
    "softmax": lambda c: floating(c.x).softmax(-1),
    "layer norm": lambda c: c.part(rows(c.x)),
    "rms norm": lambda c: c.part(rows(c.x)),
    "sum": lambda c: floating(c.x).sum(-1),
    "mean": lambda c: floating(c.x).mean(0, keepdim=True) if c.x.dim() else c.x,
    "std and mean": lambda c: torch.var_mean(rows(c.x), 0),
    "logsumexp": lambda c: rows(c.x).logsumexp(-1),
    "maximum": lambda c: rows(c.x).max(-1),
    "cat": lambda c: torch.cat([flat(floating(c.x)), flat(floating(c.y))])[:MOST_ELEMENTS],
    "stack": lambda c: torch.stack([rows(c.x), like(rows(c.y), rows(c.x)).expand_as(rows(c.x))]),
    "ones": lambda c: torch.ones(2, WIDTH) * rows(c.x)[0],
    "outside": lambda c: rows(c.x) * c.program.outside()[0] + c.program.outside()[1],
    "borrowed": lambda c: rows(c.x) + like(rows(c.program.borrowed), rows(c.x)) * 0.5,
    "keep": lambda c: keep(c),
    "keep by name": lambda c: keep(c, "named"),
}
DTYPES = {
    "bfloat16 and back": lambda c: floating(c.x).bfloat16().to(floating(c.x).dtype),
    "bfloat16": lambda c: floating(c.x).bfloat16(),
    "half": lambda c: floating(c.x).half(),
    "double": lambda c: floating(c.x).double(),
    "float": lambda c: c.x.float(),
    "integer": lambda c: numbers(c.x, 5),
    "bits": bits,
    "bits and back": lambda c: floating(c.x) * bits(c).view(c.x.dtype),
    "half of the bits": lambda c: rows(c.x).contiguous().view(torch.bfloat16),
    "greater": lambda c: c.x > 0.1,
}
RANDOM = {
    "dropout": lambda c: F.dropout(floating(c.x), 0.4, training=True),
    "dropout of rows": lambda c: F.dropout1d(rows(c.x), 0.4, training=True),
    "rand_like": lambda c: floating(c.x) * torch.rand_like(floating(c.x)),
    "bernoulli": lambda c: c.x * torch.bernoulli(torch.full(c.x.shape, 0.6), generator=c.program.generator),
    "bernoulli_": lambda c: c.x * torch.empty(c.x.shape).bernoulli_(0.6),
    "normal": lambda c: c.x + torch.randn(c.x.shape, generator=c.program.generator),
    "uniform_": lambda c: rows(c.x) + rows(c.y).clone().uniform_(generator=c.program.generator)[:1],
    "randperm": lambda c: rows(c.x)[:, torch.randperm(WIDTH)],
    "randint": lambda c: rows(c.x)[torch.randint(2, (3,), generator=c.program.generator)],
    "rrelu": lambda c: F.rrelu(rows(c.x), training=True),
    "python's": lambda c: floating(c.x) * c.program.python.random(),
    "numpy's": lambda c: floating(c.x) * c.program.numpy.random(),
}
INDEXING = {
    "index_select": lambda c: rows(c.x).index_select(0, numbers(c.y, 2, 3)),
    "gather": lambda c: rows(c.x).gather(0, numbers(c.y, 2).view(-1, WIDTH)),
    "mask": lambda c: floating(c.x)[c.x > 0],
    "rows by number": lambda c: rows(c.x)[numbers(c.y, 2, 5)],
    "embedding": lambda c: c.part(numbers(c.x, 3, 4)),
    "topk": lambda c: rows(c.x).topk(2),
    "sort": lambda c: rows(c.x).sort(-1),
    "one hot": lambda c: F.one_hot(rows(c.x).argmax(-1), WIDTH) * rows(c.x),
    "index_add": lambda c: rows(c.x).index_add(0, numbers(c.y, 2, 2), rows(c.y)[:2]),
    "index_put_": lambda c: rows(c.x).clone().index_put_((numbers(c.y, 2, 2),), rows(c.y)[0]),
    "scatter_": lambda c: rows(c.x).clone().scatter_(1, numbers(c.y, WIDTH, 2).view(1, -1), 0.5),
    "cumsum": lambda c: rows(c.x).cumsum(0),
    "pad": lambda c: F.pad(rows(c.x), (0, 0, 1, 0)),
    "nonzero": lambda c: rows(c.x)[: len((rows(c.y) > 0).nonzero()) % 2 + 1],
}
COSTLY = {
    "linear": lambda c: c.part(rows(c.x)),
    "shared linear": lambda c: c.program.shared(rows(c.x)),
    "linear in bfloat16": lambda c: F.linear(rows(c.x).bfloat16(), c.part.weight.bfloat16()),
    "matmul": lambda c: rows(c.x) @ rows(c.y).t(),
    "bmm": lambda c: torch.bmm(heads(c.x)[0], heads(c.y)[0]),
    "einsum": lambda c: torch.einsum("ij,kj->ik", rows(c.x), rows(c.y)),
    "attention": lambda c: F.scaled_dot_product_attention(heads(c.x), heads(c.y), heads(c.x)),
    "attention with dropout": lambda c: F.scaled_dot_product_attention(*[heads(c.x)] * 3, dropout_p=0.3),
    "attention in two dimensions": lambda c: F.scaled_dot_product_attention(*[heads(c.x)[0, 0]] * 3, is_causal=True),
    "convolution": lambda c: c.part(rows(c.x).unsqueeze(1)),
    "batch norm": lambda c: c.part(rows(c.x)),
}
FUNCTIONS = {
    "function": lambda c: Cube.apply(rows(c.x)),
    "function by numpy": lambda c: Numpy.apply(rows(c.x)),
    "function by address": lambda c: ByAddress.apply(rows(c.x)),
    "function in place": in_place(lambda x, y: TanhInPlace.apply(x)),
    "function's stash": lambda c: Stash.apply(rows(c.x), like(rows(c.y), rows(c.x))),
    "unseen": unseen,
    "out argument": out_argument,
    "inner gradient": inner_gradient,
}
MENUS = {
    "values": VALUES,
    "views": VIEWS,
    "in place": IN_PLACE,
    "dtypes": DTYPES,
    "random": RANDOM,
    "indexing": INDEXING,
    "costly": COSTLY,
    "functions": FUNCTIONS,
}
OPS = {name: op for menu in MENUS.values() for name, op in menu.items()}
PARTS = {
    "linear": linear,
    "linear in bfloat16": linear,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "embedding": lambda: nn.Embedding(3, WIDTH),
    "convolution": lambda: nn.Conv1d(1, 2, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
}
REPEATABLE = (*VALUES, *VIEWS, *DTYPES, *INDEXING, "dropout", "rand_like", "linear", "matmul", "function")
"""What torch's checkpoint can run again: it changes nothing, and draws from no generator of its own."""
