"""What goes into a region and what comes out of it: any object, and objects with a state of their own."""

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from corpus import Body, linear, norm
from engine_testing import HIDDEN, TOKENS
from torch import Tensor, nn
from torch.nested import nested_tensor
from torch.nn.utils.rnn import pack_padded_sequence

from bodies.modules import CONTAINERS


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Tensor
    right: Tensor | None


@dataclasses.dataclass
class Batch:
    hidden: Tensor
    mask: Tensor | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    scale: Tensor
    nested: tuple[Batch, ...] = ()


class Labelled(tuple):
    """A tuple with an attribute and a constructor of its own."""

    label: Tensor

    def __new__(cls, first, *, label):
        made = super().__new__(cls, (first, first * 2))
        made.label = label
        return made


@dataclasses.dataclass
class Derived:
    """Derives a field from another in its constructor, and has one without a value."""

    hidden: Tensor
    total: Tensor = dataclasses.field(init=False)
    unset: Tensor = dataclasses.field(init=False)

    def __post_init__(self):
        assert isinstance(self.hidden, Tensor)
        self.total = self.hidden * 3


@dataclasses.dataclass
class Guarded:
    """Takes no values but tensors, and is called."""

    hidden: Tensor

    def __call__(self):
        return self.hidden.sin()

    def __setattr__(self, name, value):
        assert isinstance(value, Tensor)
        object.__setattr__(self, name, value)


class Registered:
    """A container that pytrees know, which looks at what it is made of."""

    def __init__(self, *items):
        assert len({item.shape for item in items}) == 1
        self.items = items


torch.utils._pytree.register_pytree_node(
    Registered, lambda made: (list(made.items), None), lambda items, _: Registered(*items)
)


class Like:
    """No tensor, but torch's functions take it."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*[arg.tensor if isinstance(arg, Like) else arg for arg in args], **(kwargs or {}))


class Tagged(Tensor):
    """A tensor with an attribute, which takes part in no dispatch: only its type says what it is."""

    tag: float

    @staticmethod
    def of(tensor, tag):
        made = tensor.as_subclass(Tagged)
        made.tag = tag
        return made


class Connected:
    """What cannot be copied, or must not be, nor what it has; code may ask for it by itself."""

    def __init__(self):
        self.log, self.lock, self.local = logging.getLogger("recompute.tests"), threading.Lock(), threading.local()
        self.stream = SimpleNamespace(close=threading.Event())
        self.scale = 2.0

    def __reduce_ex__(self, protocol):
        raise RuntimeError("this belongs to its process")


CONNECTED = Connected()


class AttributeDict(dict):
    """Its keys are attributes, and there are no others: to ask for one is a KeyError."""

    __getattr__ = dict.__getitem__


class Node:
    """A tree whose nodes know their parent."""

    def __init__(self, parent, children):
        self.parent = parent
        self.children = [Node(self, 0) for _ in range(children)]
        self.scale = 2.0


def endless(x):
    made = [x * 2]
    made.append(made)
    return made


def double(x):
    return x * 2


def packed(x):
    return pack_padded_sequence((x * 2)[:, None], [TOKENS])


KINDS = {
    "tensor": (lambda x: x * 3, lambda v: v.sin()),
    "tuple": (lambda x: (x, (x * 2, None)), lambda v: v[0] * v[1][0]),
    "list": (lambda x: [x, [x * 2]], lambda v: v[0] * v[1][0]),
    "dict": (lambda x: {"a": x, "b": {"c": x * 2}}, lambda v: v["a"] * v["b"]["c"]),
    "ordered dict": (lambda x: OrderedDict(a=x, b=x * 2), lambda v: v["a"] * v["b"]),
    "default dict": (lambda x: defaultdict(list, a=[x]), lambda v: v["a"][0].sin()),
    "deque": (lambda x: deque([x, x * 2]), lambda v: v[0] * v[1]),
    "named tuple": (lambda x: Pair(x, None), lambda v: v.left.sin()),
    "dataclass": (lambda x: Batch(x, extra={"w": x * 2}), lambda v: v.hidden * v.extra["w"]),
    "frozen dataclass in slots": (lambda x: Frozen(x, (Batch(x * 2),)), lambda v: v.scale * v.nested[0].hidden),
    "tuple with an attribute": (lambda x: Labelled(x, label=x * 2), lambda v: v[0] * v[1] * v.label),
    "packed sequence": (packed, lambda v: v.data.sin()),
    "result of an op": (lambda x: (x * 2).max(0), lambda v: v.values * v.indices),
    "dataclass that derives a field": (lambda x: Derived(x * 2), lambda v: v.hidden * v.total),
    "dataclass that guards its fields": (lambda x: Guarded(x * 2), lambda v: v()),
    "registered container": (lambda x: Registered(x * 2, x * 3), lambda v: v.items[0] * v.items[1]),
    "object that cannot be copied": (lambda x: CONNECTED, lambda v: v.scale if v is CONNECTED else 1.0),
    "dict with its keys as attributes": (lambda x: AttributeDict(a=x * 2), lambda v: v.a.sin()),
    "user dict": (lambda x: UserDict(a=x * 2), lambda v: v["a"].sin()),
    "namespace": (lambda x: SimpleNamespace(a=x * 2), lambda v: v.a.sin()),
    "mapping proxy": (lambda x: MappingProxyType({"a": x * 2}), lambda v: v["a"].sin()),
    "like a tensor": (lambda x: Like(x * 2), lambda v: torch.mul(v, 2.0)),
    "subclass of tensor": (lambda x: Tagged.of(torch.ones(HIDDEN), 3.0), lambda v: (v * v.tag).as_subclass(Tensor)),
    "list within itself": (endless, lambda v: v[1][1][0].sin()),
    "nested": (lambda x: nested_tensor([x[:2].detach(), x[2:].detach()]), lambda v: v.unbind()[0].sum()),
    "nested, jagged": (
        lambda x: nested_tensor([x[:2].detach(), x[2:].detach()], layout=torch.jagged, requires_grad=True) * 2,
        lambda v: v.sin().values().sum(),
    ),
    "object": (lambda x: SimpleNamespace(scale=2.0), lambda v: v.scale),
    "number": (lambda x: 3, lambda v: v),
    "bool": (lambda x: True, lambda v: 2.0 if v else 1.0),
    "string": (lambda x: "sin", lambda v: 2.0 if v == "sin" else 1.0),
    "none": (lambda x: None, lambda v: 2.0 if v is None else 1.0),
    "enum": (lambda x: Color.RED, lambda v: 2.0 if v is Color.RED else 1.0),
    "callable": (lambda x: double, lambda v: v(2.0)),
    "dtype": (lambda x: torch.float32, lambda v: torch.ones((), dtype=v)),
    "device": (lambda x: torch.device("cpu"), lambda v: torch.ones((), device=v)),
    "size": (lambda x: x.shape, lambda v: torch.ones(v)),
    "slice": (lambda x: slice(None), lambda v: torch.ones(TOKENS)[v].sum()),
    "integers": (lambda x: torch.arange(TOKENS), lambda v: torch.ones(TOKENS)[v][:, None]),
    "mask": (lambda x: torch.arange(TOKENS)[:, None] > 2, lambda v: v.float() + 1),
    "number tensor": (lambda x: torch.tensor(2.0, requires_grad=True), lambda v: v.exp()),
    "empty": (lambda x: torch.empty(0, HIDDEN, requires_grad=True), lambda v: v.exp().sum()),
    "sparse": (lambda x: torch.eye(TOKENS).to_sparse(), lambda v: torch.sparse.mm(v, torch.ones(TOKENS, HIDDEN))),
    "double": (lambda x: x.double(), lambda v: v.sin().float()),
    "complex": (lambda x: torch.complex(x, 2 * x).conj(), lambda v: (v * v.exp()).imag),
    "conjugated": (lambda x: x.conj(), lambda v: torch.complex(v, v).conj().imag.sin()),
    "transposed": (lambda x: (x * 2).t(), lambda v: v.exp().t()),
    "expanded": (lambda x: (x[:1] * 2).expand(TOKENS, -1), lambda v: v.exp()),
    "overlapping": (lambda x: (x * 2).flatten().as_strided((TOKENS, HIDDEN), (1, 1)), lambda v: v.exp()),
}


def kind(number, make, use):
    """Every second kind of argument is passed by its name."""

    def forward(self, x, value=None, *, offset=0.0):
        return (self.norm(x).exp() * use(value) + offset).sin()

    def given(x):
        return {"value": make(x), "x": x, "offset": 1.0} if number % 2 else (x, make(x))

    return Body(forward, norm, given)


def same_twice(self, x, first, second):
    first.append(3.0)
    return (x * second[-1]).exp().sin()


def through_a_tree(self, x, tree, again):
    tree.scale += 1.0
    same = tree.children[0].parent is tree and again is tree
    return (x * tree.children[0].parent.scale * (1.0 if same else 5.0)).exp().sin()


def is_parameter(self, x, weight):
    return (x.exp() * weight).sin() * (2.0 if isinstance(weight, nn.Parameter) else 3.0)


def shared(forward, make, between, seen, **options):
    """Is given one object in both calls of a step, which changes once more before backward, and is ``seen`` then."""
    one = []
    return Body(
        forward,
        given=lambda x: (x, one[0]),
        start=lambda module: one.__setitem__(slice(None), [make()]),
        between=lambda module, given, result: between(given[1]),
        state=lambda module: seen(one[0]),
        **options,
    )


def filled(make, change):
    return shared(lambda self, x, value: (change(value), x * len(str(value)))[1].exp().sin(), make, change, str)


WEIGHT = nn.Parameter(torch.linspace(0, 1, HIDDEN))
ARGUMENTS = {
    **{name: kind(number, *each) for number, (name, each) in enumerate(KINDS.items())},
    **{f"{name} that forward fills": filled(*each) for name, each in CONTAINERS.items()},
    "one list twice": Body(same_twice, given=lambda x: (x, *[[1.0]] * 2)),
    "one tensor twice": Body(
        lambda self, a, b: (a.exp() * (2.0 if a is b else 3.0)).sin(), given=lambda x: (x, x), captured=True
    ),
    "one tensor thrice": Body(
        lambda self, x: self.attention(x, x, x)[0],
        lambda: {"attention": nn.MultiheadAttention(HIDDEN, 2, batch_first=True)},
        lambda x: (x[None],),
    ),
    "an object whose parts refer to each other": Body(through_a_tree, given=lambda x: (x, *[Node(None, 3)] * 2)),
    "a parameter": Body(is_parameter, given=lambda x: (x, WEIGHT)),
    "a packed sequence of an LSTM": Body(
        lambda self, given: self.lstm(given)[0].data,
        lambda: {"lstm": nn.LSTM(HIDDEN, HIDDEN)},
        lambda x: (pack_padded_sequence(torch.stack([x, x.sin()], 1), [TOKENS, 2]),),
    ),
    "a container that changes afterwards": Body(
        lambda self, x, options: (x.exp() * options["scales"][0]).sin(),
        given=lambda x: (x, {"scales": [2.0]}),
        between=lambda module, given, result: given[1]["scales"].__setitem__(0, 5.0),
    ),
    "an object that changes afterwards": Body(
        lambda self, x, settings: (x.exp() * settings.scale).sin(),
        given=lambda x: (x, SimpleNamespace(scale=2.0)),
        between=lambda module, given, result: setattr(given[1], "scale", 5.0),
    ),
    "two inputs of which one is unused": Body(
        lambda self, x, unused=None: x.exp().sin(), given=lambda x: (x, x.cos()), captured=True
    ),
    "tensors in an object of the users": Body(
        lambda self, batch: F.gelu(self.linear(batch.hidden)) * batch.extra["scale"],
        linear,
        lambda x: (Batch(x, extra={"scale": 0.5}),),
        captured=True,
    ),
}

GIVEN_BACK = {
    "tensor": lambda y: y.sin(),
    "tuple": lambda y: (y.sin(), (y.exp(), None), 3, "s"),
    "list": lambda y: [y.sin(), [y.exp()]],
    "dict": lambda y: {"a": y.sin(), "b": {"c": [y.exp(), None]}},
    "dataclass": lambda y: (Batch(y.sin(), extra={"w": y.exp()}), y.cos()),
    "named tuple": lambda y: Pair(y.sin(), None),
    "number": lambda y: y.sin().sum(),
    "complex": lambda y: torch.complex(y, y).exp(),
    "conjugate": lambda y: torch.complex(y.sin(), y).exp().conj(),
    "callable": lambda y: (3, double, "text", y.sin()),
    "nested": lambda y: (y.sin(), None, {"a": [3, y.shape[0]], "b": F.gelu(y)}),
    "twice the same": lambda y: (y, y, y.sin()),
    "views": lambda y: y.sin().chunk(2),
    "views of two": lambda y: (y.sin().view(2, -1), y.exp()[1:]),
    "slice": lambda y: y.sin()[1:, ::2],
    "transposed": lambda y: y.exp().t(),
    "expanded": lambda y: y.sin()[:1].expand(3, HIDDEN),
    "empty": lambda y: (y.sin()[:0], y.exp()),
    "detached": lambda y: (y.sin().detach(), y.exp()),
    "integers": lambda y: (y.argmax(-1), y > 0, y.exp()),
}
MAY_BE_CAPTURED = ("nested", "twice the same", "views of two", "expanded", "detached", "integers")


def giving(function, captured):
    return Body(lambda self, x: function(self.norm(x).cos()), norm, captured=captured)


RESULTS = {
    **{name: giving(each, True if name in MAY_BE_CAPTURED else None) for name, each in GIVEN_BACK.items()},
    **{
        f"nothing that takes gradients: {result!r}": Body(
            lambda self, x, result=result: (x.exp(), result)[1], drops=False
        )
        for result in (None, 3, (), "text")
    },
}


class Cache:
    """Keys of the tokens so far, as decoders pass from call to call."""

    def __init__(self):
        self.keys = []
        self.length = 0

    def update(self, key):
        self.keys.append(key)
        self.length += len(key)
        return torch.cat(self.keys)

    def clear(self):
        self.keys.clear()
        self.length = 0


class BareCache:
    """The same, in slots alone."""

    __slots__ = ("keys", "length")

    __init__, update, clear = Cache.__init__, Cache.update, Cache.clear


class DictCache(dict):
    """The same, in a dict."""

    def update(self, key):
        self["keys"] = [*self.get("keys", []), key]
        return torch.cat(self["keys"])

    @property
    def length(self):
        return sum(map(len, self.get("keys", [])))


KINDS_OF_CACHES = {"object": Cache, "slots": BareCache, "dict": DictCache}


def attend(self, x, cache):
    keys = cache.update((x * 2).exp().sigmoid())
    return ((x @ keys.t()).softmax(-1) @ keys).sin()


CACHES = {
    f"{name}{' that is cleared' if clears else ''}": shared(
        attend,
        make,
        lambda cache, clears=clears: cache.clear() if clears else None,
        lambda cache: cache.length,
        together=True,
    )
    for name, make in KINDS_OF_CACHES.items()
    for clears in (False, True)
}
