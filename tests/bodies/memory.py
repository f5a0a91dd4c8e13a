"""Views and aliases of what goes into a region and comes out of it, and tensors that are written to."""

import torch
import torch.nn.functional as F
from corpus import Body, always, both, linear, norm, where_products_run_again
from engine_testing import HIDDEN, TOKENS, function_of
from torch import nn

import recompute

# What a region gives back of what it is given

ALIASES = {
    name: Body(lambda self, x, alias=alias: alias(x), drops=False)
    for name, alias in {
        "itself": lambda x: x,
        "view": lambda x: x.view(-1, HIDDEN),
        "transposed": lambda x: x.t(),
        "transposed twice": lambda x: x.t().t(),
        "slice": lambda x: x[1:],
        "chunks": lambda x: x.chunk(2, -1),
        "detached": lambda x: x.detach(),
        "dropout of nothing": lambda x: F.dropout(x, 0.0),
        "among others": lambda x: (x.exp().sin(), x, x.cos()),
    }.items()
}

# Saved views: of what is dropped, of what is given, and of a parameter

SAVED = {
    "itself": lambda y: y,
    "view": lambda y: y.view(2, -1, 4),
    "transposed": lambda y: y.t(),
    "permuted": lambda y: y.view(2, -1, 4).permute(2, 0, 1),
    "slice with an offset": lambda y: y[1:4, 2:],
    "strided slice": lambda y: y[::2, ::3],
    "row": lambda y: y[3],
    "last chunk": lambda y: y.chunk(3)[2],
    "expanded": lambda y: y[2:3].expand(5, -1),
    "expanded from a number": lambda y: y[2, 3].expand(3, 4),
    "overlapping": lambda y: y.unfold(1, 3, 1),
    "overlapping as strided": lambda y: y.as_strided((5, 4), (3, 1), 2),
    "diagonal": lambda y: y.diagonal(1),
    "number": lambda y: y[2, 3],
    "unsqueezed": lambda y: y[:, None].squeeze(1),
    "complex": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)),
    "conjugate": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)).conj(),
    "imaginary part": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)).imag,
    "bytes": lambda y: y.detach().view(torch.int32).float().log1p(),
    "empty": lambda y: y[:0],
    "detached": lambda y: y.detach(),
}


def by_a_hash(gradient, saved):
    layout = [*saved.shape, *saved.stride(), saved.is_conj()]
    wide = torch.view_as_real(saved.resolve_conj()) if saved.is_complex() else saved.float()
    return gradient * wide.sum().sin() * sum((index + 1) * each for index, each in enumerate(layout)), None


Keeps = function_of(lambda x, saved: x.clone(), by_a_hash, saves=lambda result, x, saved: (saved,))
"""Saves a tensor as it is given it, and multiplies by a hash of what it is given back, and by its layout."""


def saving(view):
    """A view that a custom Function saves, another op does, and others do of what the region gives."""

    def forward(self, x):
        whole = x.exp().mul(2.0)
        y = Keeps.apply(x.cos(), view(whole))
        y = Keeps.apply(Keeps.apply(y, view(x)), view(self.weight.view(TOKENS, HIDDEN)))
        seen = view(whole)
        return y.sin(), view(whole * 0.5), (seen.abs().sin() * seen.abs().sum()).sum()

    return Body(forward, lambda: {"weight": nn.Parameter(torch.linspace(0, 2, TOKENS * HIDDEN))})


ODD = {
    "transposed": lambda y: y.t().contiguous().t(),
    "slice of more": lambda y: torch.cat([y, y], -1)[:, 1 : HIDDEN + 1],
    "expanded": lambda y: y[:1].sin().expand(TOKENS, -1),
    "with an offset": lambda y: torch.cat([y, y])[TOKENS:],
}
PRODUCTS = {
    "y y*": lambda y: y * y.conj(),
    "y* sin y": lambda y: y.conj() * y.sin(),
    "re im": lambda y: y.real * y.imag,
    "im y*": lambda y: y.conj().imag.sin() * y.imag,
    "as real": lambda y: torch.view_as_real(y.resolve_conj()).sin(),
}


def of_odd_layout(source):
    """What comes back of an output of odd layout is seen as it is, transposed, strided and in part."""
    return Body(
        lambda self, x: [
            SAVED[name](source(self.norm(x))) for name in ("itself", "transposed", "strided slice", "row")
        ],
        norm,
    )


def complex_numbers(use, conjugated):
    def forward(self, x):
        y = torch.complex(x, x.cos()).exp()
        y = y.conj() if conjugated else y
        used = use(y)
        return used * (y.conj().abs()[..., None] if used.dim() == 3 else y.conj().abs())

    return Body(forward)


def turned(self, x):
    """As rotary embeddings do it: backward reads conjugates, which torch does not compute before they are read."""
    pairs = torch.view_as_complex(self.linear(x).view(-1, HIDDEN // 2, 2))
    spun = pairs * torch.polar(torch.ones(HIDDEN // 2), torch.arange(HIDDEN / 2))
    return torch.view_as_real(spun * spun.conj() + pairs.conj()).flatten(1).exp().sin()


def jagged(layout):
    def forward(self, x):
        nested = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 2], layout=layout)
        return torch.cat(self.linear(nested).relu().unbind()).sin()

    return forward


def gives_other_data(self, x):
    """Plain autograd goes on to use the new data, which running again would not bring back."""
    hidden = x.detach() * 2
    product = x * hidden
    hidden.data = torch.ones_like(hidden)
    return product + x.sin()


def at_a_place(by):
    return Body(lambda self, x: (self.linear(x) * by(x)).exp().sin(), linear, lambda x: (torch.cat([x, x])[TOKENS:],))


VIEWS = {
    **{name: saving(each) for name, each in SAVED.items()},
    **{f"of an output that is {name}": of_odd_layout(each) for name, each in ODD.items()},
    **{
        f"complex: {name}{' of a conjugate' if conjugated else ''}": complex_numbers(each, conjugated)
        for name, each in PRODUCTS.items()
        for conjugated in (False, True)
    },
    "complex: rotary": Body(turned, linear, captured=True),
    "chunks for several": Body(lambda self, x: (lambda a, b, c, d: (a @ b.t()).sin() @ (c * d))(*x.exp().chunk(4, -1))),
    "in a nested tensor": Body(jagged(torch.strided), linear),
    "in a jagged tensor": Body(jagged(torch.jagged), linear),
    "of a sparse tensor": Body(
        lambda self, x: torch.sparse.mm((x.detach() @ x.detach().t() > 0).float().to_sparse(), x.exp()).sin()
    ),
    "in another place of its storage": at_a_place(lambda x: x.detach().as_strided((TOKENS, HIDDEN), (HIDDEN, 1), 0)),
    "as another dtype": at_a_place(lambda x: x.view(torch.int32) % 2 == 0),
    "of new data": Body(gives_other_data, ways=("checkpoint",), drops=False),
}

# Written to, inside of a region and afterwards


def after_use(self, x):
    y = self.linear(self.norm(x))
    z = (y * 3).exp()
    y.add_(5.0)
    return z.sin() * y.sin()


def slice_after_use(self, x):
    y = self.linear(self.norm(x))
    z = (y[1:] * 3).exp()
    y[2:].mul_(2.0)
    return z.sin() * y[1:].sin()


def sum_in_place(self, x):
    total = torch.zeros_like(x)
    for _ in range(3):
        total.add_(self.norm(x + total).exp())
    return total.tanh_().sin()


def on_its_own(self, x):
    y = self.linear(x)
    y.mul_(2).add_(1)
    y[0] = 1.0
    z = F.relu(y, inplace=True).clone()
    z[:, 1:3] *= 2
    return self.linear(F.gelu(z))


def put_together(self, x):
    y = self.linear(x)
    both = y.new_empty(TOKENS, HIDDEN + 2)
    both[:, 2:].copy_(y.exp())
    both[:, :2].copy_(x[:1, :2])
    return both.sin() * both


def lists_in_place(self, x):
    y = self.linear(x)
    values = [y * 2, y.sin()]
    torch._foreach_exp_(values)
    z = values[0].tanh() * values[1]
    torch._foreach_add_(values, 1.0)
    return z.sin() + values[0] * 2


def afterwards(forward, change, **options):
    """A result that is written to before backward."""
    return Body(
        forward,
        both,
        between=lambda module, given, result: change(result),
        is_saved=False,
        changes_result=True,
        **options,
    )


def late(forward, read=lambda module: OUTSIDE, **options):
    """A tensor that the region reaches in one way or another; autograd saves none of these."""
    between = lambda module, *_: read(module).add_(1.0)  # noqa: E731
    return Body(forward, start=start_outside, between=between, may_refuse=always, **options)


def block(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x) * self.weight)))


def parts_of_a_block():
    up, down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
    return {"norm": nn.LayerNorm(HIDDEN), "up": up, "down": down, "weight": nn.Parameter(torch.rand(HIDDEN))}


def now_and_then(change, forward=block, parts=parts_of_a_block, **options):
    """``change(module, argument, result)`` comes before backward in the first step, and in one that runs as code."""
    return Body(
        forward,
        parts,
        lambda x: (x * 1.0,),
        between=lambda module, given, result: change(module, given[0], result) if module.step in (0, 6) else None,
        is_saved=False,
        captured=True,
        **options,
    )


def replace_data(*names):
    def change(module, x, y):
        for name in names:
            parameter = module.get_parameter(name)
            parameter.data = parameter.data * 2 + 1

    return change


PARAMETERS = ("weight", "norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
NOW_AND_THEN = {
    "its input": now_and_then(lambda m, x, y: x.mul_(2)),
    "a weight": now_and_then(lambda m, x, y: m.up.weight.mul_(2)),
    "a weight of a product": now_and_then(lambda m, x, y: m.weight.mul_(2)),
    "a weight of a norm": now_and_then(lambda m, x, y: m.norm.weight.mul_(2)),
    "a view of a weight": now_and_then(lambda m, x, y: m.down.weight[0].zero_()),
    "its result": now_and_then(lambda m, x, y: y.mul_(2)),
    "a part of its result": now_and_then(lambda m, x, y: y[1:].zero_()),
    "a bias of a product": now_and_then(lambda m, x, y: m.up.bias.mul_(2), may_refuse=where_products_run_again),
    **{
        f"the data of {name}": now_and_then(replace_data(name), may_refuse=where_products_run_again)
        for name in PARAMETERS
    },
    "the data of all parameters": now_and_then(replace_data(*PARAMETERS), may_refuse=where_products_run_again),
    **{
        f"a result that {name} saved": now_and_then(
            lambda m, x, y: y.mul_(2),
            lambda self, x, function=function: function(self.linear(x)),
            linear,
            drops=False,
            changes_result=True,
        )
        for name, function in {
            "sigmoid": torch.sigmoid,
            "tanh": torch.tanh,
            "exp": torch.exp,
            "softmax": lambda x: x.softmax(-1).view(2, -1),
        }.items()
    },
}

OUTSIDE = torch.linspace(0, 1, HIDDEN)
MODULE = nn.Linear(HIDDEN, HIDDEN)
WEIGHT = nn.Parameter(torch.linspace(0, 1, HIDDEN))


def start_outside(module):
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in (OUTSIDE, WEIGHT, MODULE.bias, MODULE.weight):
            tensor.copy_(torch.rand(tensor.shape))


CHANGES = {
    **{f"{name}, now and then": body for name, body in NOW_AND_THEN.items()},
    "a costly result after its use": Body(after_use, both),
    "a slice of it": Body(slice_after_use, both),
    "in a chain": Body(lambda self, x: (self.norm(x) * 2).mul_(3.0).add_(1.0).exp_().sin(), norm),
    "a sum": Body(sum_in_place, norm),
    "its own, in captured code": Body(on_its_own, linear, captured=True),
    "memory that copies fill": Body(put_together, linear, captured=True),
    # Not as a checkpoint: its first frame is under a mode, and there torch counts no write of such an op.
    "in lists": Body(lists_in_place, linear, drops=False, ways=("recompute",)),
    "its input, on the tape": Body(
        lambda self, x: self.linear(x.mul_(2)).exp().sin(),
        linear,
        lambda x: (x * 1.0,),
        captured=False,
        ways=("recompute",),
    ),
    "its input, by relu": Body(
        lambda self, x: self.linear(F.relu(x, inplace=True)).sigmoid(), linear, lambda x: (x * 1.0,), drops=False
    ),
    "a tensor of an argument": Body(
        lambda self, x, rows: ((x * rows[0].clone()).exp(), rows[0].mul_(3.0))[0].sin(),
        given=lambda x: (x, [torch.ones(TOKENS, HIDDEN)]),
        drops=False,
    ),
    "what it saved": Body(lambda self, x: x.sigmoid().mul_(2.0).sin(), drops=False),
    "a result by a view": afterwards(lambda self, x: (self.norm(x).exp().sin() + x).t(), lambda y: y.add_(1.0)),
    "a result by relu": afterwards(lambda self, x: self.norm(x).exp().sin() * 2, lambda y: y.relu_()),
    "an argument that it did not save": Body(
        lambda self, x: (x + 1.0).exp().sin(),
        given=lambda x: (x * 1.0,),
        between=lambda module, given, result: given[0].add_(1.0),
        may_refuse=always,
    ),
    "a result that its op saved": afterwards(lambda self, x: self.norm(x).sigmoid(), lambda y: y.mul_(2.0)),
    "a part of such a result": afterwards(lambda self, x: self.norm(x).exp(), lambda y: y[0].zero_()),
    "a result that it keeps": afterwards(
        lambda self, x: (kept := recompute.keep(self.norm(x)), kept.exp() * kept), lambda y: y[0].add_(1.0)
    ),
    "a product of batches": afterwards(
        lambda self, x: (product := x.expand(2, -1, -1) @ self.linear.weight, product.sin()),
        lambda y: y[0].add_(1.0),
        drops=False,
    ),
    "a parameter that is replaced": Body(
        lambda self, x: (x * self.scale).exp().sin(),
        start=lambda module: setattr(module, "scale", nn.Parameter(torch.linspace(0, 1, HIDDEN))),
        between=lambda module, *_: setattr(module, "scale", nn.Parameter(torch.ones(HIDDEN))),
        may_refuse=always,
    ),
    "an attribute": late(
        lambda self, x: (x + self.plain).exp().sin(),
        lambda module: module.plain,
        parts=lambda: {"plain": torch.linspace(0, 1, HIDDEN)},
    ),
    "a module in a list": late(
        lambda self, x: self.unseen[0](x).exp().sin(),
        lambda module: module.unseen[0].bias,
        parts=lambda: {"unseen": [nn.Linear(HIDDEN, HIDDEN)]},
    ),
    "a parameter that is an argument": late(
        lambda self, x, w: (x + w).exp().sin(), lambda module: WEIGHT, given=lambda x: (x, WEIGHT)
    ),
    "a module that is an argument": late(
        lambda self, x, m: m(x).exp().sin(), lambda module: MODULE.bias, given=lambda x: (x, MODULE)
    ),
    "a tensor of a global": late(lambda self, x: (x + OUTSIDE).exp().sin()),
    "a tensor of a closure": late((lambda w: lambda self, x: (x + w).exp().sin())(OUTSIDE)),
    "a tensor in a list of a closure": late((lambda ws: lambda self, x: (x + ws[0]).exp().sin())([OUTSIDE])),
    "a default": late(lambda self, x, w=OUTSIDE: (x + w).exp().sin()),
}
