"""What goes into a region and what comes out of it: any object, and objects with a state of their own."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from engine_testing import (
    HIDDEN,
    INSIDE,
    TOKENS,
    RMSNorm,
    Setting,
    assert_as_plain,
    assert_step_as_without,
    bits,
    both_actions,
    every_rule,
    every_setting,
    holding,
    leaves,
    loss_of,
    no_garbage_collection,
    policed,
    tokens,
    weak,
)
from tiers import one_in, slow
from torch import Tensor, nn
from torch.nested import nested_tensor
from torch.nn.utils.rnn import pack_padded_sequence

import recompute
from recompute.errors import MutationError, PolicyWarning


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


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: Tensor
    nested: tuple[Batch, ...] = ()


class Checked(Pair):
    """A named tuple that looks at what it is given, as ``PackedSequence`` does."""

    def __new__(cls, left: Tensor, right: Tensor) -> Checked:
        assert left.shape == right.shape
        return super().__new__(cls, left, right)


class Labelled(tuple):  # type: ignore[type-arg]
    """A tuple with an attribute and a constructor of its own."""

    label: Tensor

    def __new__(cls, first: Tensor, *, label: Tensor) -> Labelled:
        made = super().__new__(cls, (first, first * 2))
        made.label = label
        return made


@dataclasses.dataclass
class Derived:
    """Derives a field from another in its constructor, and has one without a value."""

    hidden: Tensor
    total: Tensor = dataclasses.field(init=False)
    unset: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        assert isinstance(self.hidden, Tensor)
        self.total = self.hidden * 3


@dataclasses.dataclass
class Guarded:
    """Takes no values but tensors, and refuses to be copied."""

    hidden: Tensor

    def __setattr__(self, name: str, value: Any) -> None:
        assert isinstance(value, Tensor)
        object.__setattr__(self, name, value)

    def __copy__(self) -> Guarded:
        raise RuntimeError("there is but one")


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    hidden: Tensor


class Unpicklable:
    """An object that refuses to be copied."""

    def __init__(self, scale: Tensor):
        self.scale = scale

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("this belongs to its process")


class Registered:
    """A container that pytrees know, which looks at what it is made of."""

    def __init__(self, *items: Tensor):
        assert len({item.shape for item in items}) == 1
        self.items = items


torch.utils._pytree.register_pytree_node(
    Registered, lambda made: (list(made.items), None), lambda items, _: Registered(*items)
)


class Like:
    """No tensor, but torch's functions take it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*[arg.tensor if isinstance(arg, Like) else arg for arg in args], **(kwargs or {}))


class Tagged(Tensor):
    """A tensor with an attribute."""

    tag: float

    @staticmethod
    def of(tensor: Tensor, tag: float) -> Tagged:
        made = tensor.as_subclass(Tagged)
        made.tag = tag
        return made


class Settings:
    def __init__(self, scale: float):
        self.scale = scale


# Kinds of arguments and results


def _endless(x: Tensor) -> list[Any]:
    made: list[Any] = [x * 2]
    made.append(made)
    return made


def double(x: Tensor) -> Tensor:
    return x * 2


ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, Callable[..., Any]]]] = {
    "tensor": lambda x: (x * 3, lambda v: v.sin()),
    "tuple": lambda x: ((x, (x * 2, None)), lambda v: v[0] * v[1][0]),
    "list": lambda x: ([x, [x * 2]], lambda v: v[0] * v[1][0]),
    "dict": lambda x: ({"a": x, "b": {"c": x * 2}}, lambda v: v["a"] * v["b"]["c"]),
    "ordered dict": lambda x: (OrderedDict(a=x, b=x * 2), lambda v: v["a"] * v["b"]),
    "default dict": lambda x: (defaultdict(list, a=[x]), lambda v: v["a"][0].sin()),
    "deque": lambda x: (deque([x, x * 2]), lambda v: v[0] * v[1]),
    "named tuple": lambda x: (Pair(x, None), lambda v: v.left.sin()),
    "dataclass": lambda x: (Batch(x, extra={"w": x * 2}), lambda v: v.hidden * v.extra["w"]),
    "frozen dataclass": lambda x: (Frozen(x, (Batch(x * 2),)), lambda v: v.scale * v.nested[0].hidden),
    "checked named tuple": lambda x: (Checked(x, x * 2), lambda v: v.left * v.right),
    "tuple with an attribute": lambda x: (Labelled(x, label=x * 2), lambda v: v[0] * v[1] * v.label),
    "packed sequence": lambda x: (pack_padded_sequence((x * 2)[:, None], [TOKENS]), lambda v: v.data.sin()),
    "result of an op": lambda x: ((x * 2).max(0), lambda v: v.values * v.indices),
    "dataclass that derives a field": lambda x: (Derived(x * 2), lambda v: v.hidden * v.total),
    "dataclass that guards its fields": lambda x: (Guarded(x * 2), lambda v: v.hidden.sin()),
    "dataclass in slots": lambda x: (Slotted(x * 2), lambda v: v.hidden.sin()),
    "registered container": lambda x: (Registered(x * 2, x * 3), lambda v: v.items[0] * v.items[1]),
    "object that cannot be copied": lambda x: (Unpicklable(x * 2), lambda v: v.scale.sin()),
    "user dict": lambda x: (UserDict(a=x * 2), lambda v: v["a"].sin()),
    "namespace": lambda x: (SimpleNamespace(a=x * 2), lambda v: v.a.sin()),
    "mapping proxy": lambda x: (MappingProxyType({"a": x * 2}), lambda v: v["a"].sin()),
    "like a tensor": lambda x: (Like(x * 2), lambda v: torch.mul(v, 2.0)),
    "list within itself": lambda x: (_endless(x), lambda v: v[1][1][0].sin()),
    "nested": lambda x: (nested_tensor([x[:2].detach(), x[2:].detach()]), lambda v: v.unbind()[0].sum()),
    "nested, jagged": lambda x: (
        nested_tensor([x[:2].detach(), x[2:].detach()], layout=torch.jagged, requires_grad=True) * 2,
        lambda v: v.sin().values().sum(),
    ),
    "object": lambda x: (Settings(2.0), lambda v: v.scale),
    "number": lambda x: (3, lambda v: v),
    "bool": lambda x: (True, lambda v: 2.0 if v else 1.0),
    "string": lambda x: ("sin", lambda v: 2.0 if v == "sin" else 1.0),
    "none": lambda x: (None, lambda v: 2.0 if v is None else 1.0),
    "enum": lambda x: (Color.RED, lambda v: 2.0 if v is Color.RED else 1.0),
    "callable": lambda x: (double, lambda v: v(2.0)),
    "dtype": lambda x: (torch.float32, lambda v: torch.ones((), dtype=v)),
    "device": lambda x: (torch.device("cpu"), lambda v: torch.ones((), device=v)),
    "size": lambda x: (x.shape, lambda v: torch.ones(v)),
    "slice": lambda x: (slice(None), lambda v: torch.ones(TOKENS)[v].sum()),
    "integers": lambda x: (torch.arange(TOKENS), lambda v: torch.ones(TOKENS)[v][:, None]),
    "mask": lambda x: (torch.arange(TOKENS)[:, None] > 2, lambda v: v.float() + 1),
    "number tensor": lambda x: (torch.tensor(2.0, requires_grad=True), lambda v: v.exp()),
    "empty": lambda x: (torch.empty(0, HIDDEN, requires_grad=True), lambda v: v.exp().sum()),
    "sparse": lambda x: (torch.eye(TOKENS).to_sparse(), lambda v: torch.sparse.mm(v, torch.ones(TOKENS, HIDDEN))),
    "double": lambda x: (x.double(), lambda v: v.sin().float()),
    "transposed": lambda x: ((x * 2).t(), lambda v: v.exp().t()),
    "expanded": lambda x: ((x[:1] * 2).expand(TOKENS, -1), lambda v: v.exp()),
    "overlapping": lambda x: ((x * 2).flatten().as_strided((TOKENS, HIDDEN), (1, 1)), lambda v: v.exp()),
}


@every_rule
@pytest.mark.parametrize("given", ["positional", *slow("keyword")])
@pytest.mark.parametrize("kind", one_in(2, list(ARGUMENTS)))
def test_an_argument_comes_back_as_it_was_whatever_it_is(rules: dict[str, Any], kind: str, given: str) -> None:
    make, use = ARGUMENTS[kind], ARGUMENTS[kind](tokens())[1]
    inside = holding(
        lambda self, x, value=None, *, offset=0.0: (self.norm(x).exp() * use(value) + offset).sin(), norm=RMSNorm()
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = inside.inside

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(0)
            value = make(x)[0]
            return self.inside(x, value, offset=1.0) if given == "positional" else self.inside(x=x, value=value)

    stats = assert_as_plain(Model(), rules, tokens())
    assert stats.regenerations >= 2
    assert stats.dropped_nbytes > 0


def test_a_subclass_of_tensor_comes_back_with_its_attributes() -> None:
    model, x = holding(lambda self, x, v: (x.exp() * v * v.tag).sin()), tokens()
    given = Tagged.of(torch.rand(HIDDEN), 3.0)
    (expected,) = torch.autograd.grad(model(x, given).sum(), x)
    policed(model)
    (found,) = torch.autograd.grad(model(x, given).sum(), x)
    assert bits(found.as_subclass(Tensor)) == bits(expected.as_subclass(Tensor))


@both_actions
def test_an_lstm_takes_a_packed_sequence(action: str) -> None:
    model, x = holding(lambda self, packed: self.lstm(packed)[0].data, lstm=nn.LSTM(HIDDEN, HIDDEN)), tokens()

    def grads() -> list[Any]:
        result = model(pack_padded_sequence(torch.stack([x, x.sin()], 1), [TOKENS, 2]))
        return [bits(grad) for grad in torch.autograd.grad(result.sum(), [x, *model.parameters()])]

    expected = grads()
    policed(model, action)
    assert grads() == expected


def test_one_list_passed_twice_is_one_list_again() -> None:
    def forward(self: Any, x: Tensor, first: list[float], second: list[float]) -> Tensor:
        first.append(3.0)
        return (x * second[-1]).exp().sin()

    model, x = holding(forward), tokens()
    (expected,) = torch.autograd.grad(model(x, *([[1.0]] * 2)).sum(), x)
    policed(model)
    (found,) = torch.autograd.grad(model(x, *([[1.0]] * 2)).sum(), x)
    assert bits(found) == bits(expected)


ONCE: dict[str, Callable[[Tensor], Any]] = {
    "generator": lambda x: (scale for scale in (2.0, 3.0)),
    "zip": lambda x: zip([2.0], strict=True),
    "iterator": lambda x: iter([2.0, 3.0]),
}


@pytest.mark.parametrize("kind", ONCE)
def test_an_argument_that_can_be_used_but_once_leaves_the_region_as_it_is(kind: str) -> None:
    def forward(self: Any, x: Tensor, values: Any) -> Tensor:
        first = next(values)
        return (x * (first[0] if isinstance(first, tuple) else first)).exp().sin()

    model, x = holding(forward), tokens()
    (expected,) = torch.autograd.grad(model(x, ONCE[kind](x)).sum(), x)
    policed(model)
    with pytest.warns(PolicyWarning, match=r"inside .* nothing is dropped there: an argument, .* used up"):
        result = model(x, ONCE[kind](x))
    assert bits(torch.autograd.grad(result.sum(), x)[0]) == bits(expected)


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda y: (y.sin(), (y.exp(), None), 3, "s"),
    "list": lambda y: [y.sin(), [y.exp()]],
    "dict": lambda y: {"a": y.sin(), "b": {"c": y.exp()}},
    "dataclass": lambda y: (Batch(y.sin(), extra={"w": y.exp()}), y.cos()),
    "named tuple": lambda y: Pair(y.sin(), None),
    "twice the same": lambda y: (y, y),
    "views of one": lambda y: y.sin().chunk(2),
    "slice": lambda y: y.sin()[1:, ::2],
    "transposed": lambda y: y.exp().t(),
    "number": lambda y: y.sin().sum(),
    "empty": lambda y: (y.sin()[:0], y.exp()),
    "detached": lambda y: (y.sin().detach(), y.exp()),
    "complex": lambda y: torch.complex(y, y).exp(),
    "conjugate": lambda y: torch.complex(y.sin(), y).exp().conj(),
    "no gradient": lambda y: (y.argmax(), y > 0, y.exp()),
    "tensor": lambda y: y.sin(),
    "none": lambda y: (None, y.sin()),
    "dict with a list": lambda y: {"a": y.sin(), "b": {"c": [y.exp(), None]}},
    "int, callable and string": lambda y: (3, double, "text", y.sin()),
    "twice the same beside another": lambda y: (y, y, y.sin()),
    "without gradient": lambda y: (y.argmax(), y > 0, y.detach(), y.exp()),
}


@every_rule
@pytest.mark.parametrize("kind", one_in(2, list(RESULTS)))
def test_a_result_is_what_it_is_without_the_policy_whatever_it_is(rules: dict[str, Any], kind: str) -> None:
    model = holding(lambda self, x: RESULTS[kind](self.norm(x).cos()), norm=RMSNorm())
    assert_step_as_without(model, rules, tokens())
    x = tokens()
    plain = model(x)
    recompute.apply(model, rules)
    result = model(x)
    assert type(result) is type(plain)
    for found, expected in zip(leaves(result), leaves(plain), strict=True):
        assert found is expected or type(found) is type(expected) is Tensor


@both_actions
def test_a_region_that_returns_nothing_or_no_tensor(action: str) -> None:
    for result in (None, 3, (), "text"):
        model = policed(holding(lambda self, x, result=result: (x.exp(), result)[1]), action)
        assert model(tokens()) == result


# Stateful arguments


class Cache:
    """Keys of the tokens so far, as decoders pass from call to call."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0

    def update(self, key: Tensor) -> Tensor:
        self.keys.append(key)
        self.length += len(key)
        return torch.cat(self.keys)

    def clear(self) -> None:
        self.keys.clear()
        self.length = 0


class BareCache:
    """The same, in slots alone."""

    __slots__ = ("keys", "length")

    __init__, update, clear = Cache.__init__, Cache.update, Cache.clear  # type: ignore[assignment]


class DictCache(dict):  # type: ignore[type-arg]
    """The same, in a dict."""

    def update(self, key: Tensor) -> Tensor:  # type: ignore[override]
        self["keys"] = [*self.get("keys", []), key]
        return torch.cat(self["keys"])

    def clear(self) -> None:
        super().clear()

    @property
    def length(self) -> int:
        return sum(map(len, self.get("keys", [])))


CACHES = {"object": Cache, "slots": BareCache, "dict": DictCache}


def attend(self: Any, x: Tensor, cache: Any) -> Tensor:
    keys = cache.update((x * 2).exp().sigmoid())
    return ((x @ keys.t()).softmax(-1) @ keys).sin()


@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
def test_a_cache_that_forward_appends_to_is_as_long_in_regeneration_as_it_was(kind: Callable[[], Any]) -> None:
    model, x = holding(attend), tokens()

    def grads() -> list[Any]:
        cache = kind()
        result = model(x, cache) + model(x.cos(), cache)
        length = cache.length
        found = torch.autograd.grad(result.sum(), x)
        assert cache.length == length == 2 * TOKENS
        return [bits(grad) for grad in found]

    expected = grads()
    policed(model)
    assert grads() == expected


@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
def test_a_cache_cleared_before_backward_stays_empty(kind: Callable[[], Any]) -> None:
    model, x, cache = holding(attend), tokens(), kind()
    (expected,) = torch.autograd.grad(model(x, cache).sum(), x)
    cache.clear()
    policed(model)
    result = model(x, cache)
    cache.clear()
    (found,) = torch.autograd.grad(result.sum(), x)
    assert bits(found) == bits(expected)
    assert cache.length == 0


def test_a_graph_whose_tensors_are_in_a_cache_dies_with_the_cache() -> None:
    model, x = policed(holding(attend)), tokens()
    with no_garbage_collection() as engine_objects:
        cache = Cache()
        result = model(x, cache)
        reference = weak(cache.keys[0])
        del result, cache
        assert reference.expired()
        assert engine_objects() == {}


@pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)
def test_what_stands_for_a_cache_goes_by_reference_count(kind: Callable[[], Any]) -> None:
    model, x = policed(holding(attend)), tokens()
    with no_garbage_collection():
        cache = kind()
        first = model(x, cache)
        reference = weak(first)
        cache.update(first)  # so that what the second region was given holds it
        second = model(x, cache)
        second.sum().backward()
        del first, second, cache
        assert reference.expired()


class Connected:
    """What arguments may also carry: things that cannot be copied, or that must not be."""

    def __init__(self) -> None:
        self.log = logging.getLogger("recompute.tests")
        self.lock = threading.Lock()
        self.stream = open(__file__)  # noqa: SIM115
        self.local = threading.local()
        self.scale = 2.0


def test_an_argument_that_cannot_be_copied_is_passed_as_it_is() -> None:
    model, x, given = holding(lambda self, x, given: (x * given.scale).exp().sin()), tokens(), Connected()
    logging.getLogger("recompute.tests").addHandler(logging.NullHandler())
    before = dict(vars(given.log))
    (expected,) = torch.autograd.grad(model(x, given).sum(), x)
    policed(model)
    (found,) = torch.autograd.grad(model(x, given).sum(), x)
    given.stream.close()
    assert bits(found) == bits(expected)
    assert {name: id(value) for name, value in vars(given.log).items()} == {
        name: id(value) for name, value in before.items()
    }


def test_a_singleton_argument_is_not_written_to() -> None:
    class Single:
        """Copies of it are itself, as for loggers, modules' registries, process groups."""

        def __init__(self) -> None:
            self.entries = [1.0]

        def __copy__(self) -> Single:
            return self

    single = Single()
    entries = single.entries
    model, x = policed(holding(lambda self, x, single: (x * single.entries[0]).exp().sin())), tokens()
    model(x, single).sum().backward()
    assert single.entries is entries


def test_a_tensor_of_an_object_argument_mutated_before_backward_is_refused() -> None:
    cache = Cache()
    cache.keys.append(torch.ones(2, HIDDEN))
    model, x = policed(holding(attend)), tokens()
    result = model(x, cache)
    cache.keys[0].mul_(2.0)
    with pytest.raises(MutationError, match="a tensor in an argument, a Cache"):
        result.sum().backward()


def test_a_container_argument_changed_after_forward_is_used_as_it_was() -> None:
    def forward(self: Any, x: Tensor, options: dict[str, Any]) -> Tensor:
        return (x.exp() * options["scales"][0]).sin()

    model, x = holding(forward), tokens()

    def grads() -> Any:
        options: dict[str, Any] = {"scales": [2.0]}
        result = model(x, options)
        options["scales"][0] = 5.0
        return bits(torch.autograd.grad(result.sum(), x)[0])

    expected = grads()
    policed(model)
    assert grads() == expected


def test_an_object_argument_changed_after_forward_is_used_as_it_was() -> None:
    model, x = holding(lambda self, x, settings: (x.exp() * settings.scale).sin()), tokens()

    def grads() -> Any:
        settings = Settings(2.0)
        result = model(x, settings)
        settings.scale = 5.0
        return bits(torch.autograd.grad(result.sum(), x)[0])

    expected = grads()
    policed(model)
    assert grads() == expected


def test_inputs_graphs_are_not_kept_by_a_region_that_does_not_need_them() -> None:
    model, x = (
        policed(holding(lambda self, x: x.detach().exp() * self.scale, scale=nn.Parameter(torch.ones(())))),
        tokens(),
    )
    with no_garbage_collection():
        before = x.exp()
        reference = weak(before)
        result = model((before * before).cos())
        del before
        assert reference.expired()
        result.sum().backward()
    assert x.grad is None


def test_loss_of_a_region_with_two_inputs_of_which_one_is_unused() -> None:
    model = holding(lambda self, x, unused=None: x.exp().sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model.inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, x.cos()) + self.inside(x, unused=x.cos())

    assert_as_plain(Model(), INSIDE, tokens())
    assert loss_of(model(tokens())).requires_grad


@every_setting
def test_a_decorated_function_takes_and_gives_them_all_at_once(setting: Setting) -> None:
    x, weight = tokens(), tokens(HIDDEN)

    def function(
        x: Tensor, table: dict[str, Any], act: Callable[..., Any], *rest: Any, name: str, **others: Any
    ) -> Any:
        y = getattr(torch, name)(act(x) * table["weight"]) * rest[0]
        return {"y": y.exp(), "batch": Batch(y.sin() * others["batch"].hidden), "name": name, "none": rest[1]}

    def run(function: Callable[..., Any]) -> list[Any]:
        found = function(x, {"weight": weight}, double, 3, None, name="cos", batch=Batch(x * 2))
        loss = found["y"].sum() + found["batch"].hidden.sum()
        assert (found["name"], found["none"]) == ("cos", None)
        return [bits(grad) for _ in range(2) for grad in torch.autograd.grad(loss, [x, weight], retain_graph=True)]

    policy = {"rules": [{"type": "function", **setting}]}
    assert run(recompute.recompute(function, policy=policy)) == run(function)
