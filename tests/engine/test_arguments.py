"""What goes into a region and what comes out of it: any object, any layout, aliases, views and stateful arguments."""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    TOKENS,
    RMSNorm,
    assert_as_plain,
    bits,
    holding,
    loss_of,
    no_garbage_collection,
    policed,
    policy,
    tokens,
    weak,
)
from torch import Tensor, nn

import recompute
from recompute.errors import MutationError

INSIDE = policy(("inside", "checkpoint"))
both_actions = pytest.mark.parametrize("action", ["checkpoint", "recompute"])


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


class Settings:
    def __init__(self, scale: float):
        self.scale = scale


# Kinds of arguments and results


def double(x: Tensor) -> Tensor:
    return x * 2


ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, Callable[..., Any]]]] = {
    "tuple": lambda x: ((x, (x * 2, None)), lambda v: v[0] * v[1][0]),
    "list": lambda x: ([x, [x * 2]], lambda v: v[0] * v[1][0]),
    "dict": lambda x: ({"a": x, "b": {"c": x * 2}}, lambda v: v["a"] * v["b"]["c"]),
    "ordered dict": lambda x: (OrderedDict(a=x, b=x * 2), lambda v: v["a"] * v["b"]),
    "default dict": lambda x: (defaultdict(list, a=[x]), lambda v: v["a"][0].sin()),
    "deque": lambda x: (deque([x, x * 2]), lambda v: v[0] * v[1]),
    "named tuple": lambda x: (Pair(x, None), lambda v: v.left.sin()),
    "dataclass": lambda x: (Batch(x, extra={"w": x * 2}), lambda v: v.hidden * v.extra["w"]),
    "frozen dataclass": lambda x: (Frozen(x, (Batch(x * 2),)), lambda v: v.scale * v.nested[0].hidden),
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


@both_actions
@pytest.mark.parametrize("given", ["positional", "keyword"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_an_argument_comes_back_as_it_was_whatever_it_is(kind: str, given: str, action: str) -> None:
    make, use = ARGUMENTS[kind], ARGUMENTS[kind](tokens())[1]
    inside = holding(lambda self, x, value=None: (x.exp() * use(value)).sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = inside.inside

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(0)
            value = make(x)[0]
            return self.inside(x, value) if given == "positional" else self.inside(x, value=value)

    stats = assert_as_plain(Model(), policy(("inside", action)), tokens())
    assert stats.regenerations == 2


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
}


@both_actions
@pytest.mark.parametrize("kind", RESULTS)
def test_a_result_is_what_it_is_without_the_policy_whatever_it_is(kind: str, action: str) -> None:
    assert_as_plain(holding(lambda self, x: RESULTS[kind](x.cos())), policy(("inside", action)), tokens())


@both_actions
def test_a_region_that_returns_nothing_or_no_tensor(action: str) -> None:
    for result in (None, 3, (), "text"):
        model = policed(holding(lambda self, x, result=result: (x.exp(), result)[1]), action)
        assert model(tokens()) == result


# Aliases


class Alias(nn.Module):
    """A region that returns its input or a view of it, between two that save it."""

    def __init__(self, alias: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), RMSNorm()
        self.alias = type("Body", (nn.Module,), {"forward": lambda self, x: alias(x)})()

    def forward(self, x: Tensor) -> Tensor:
        y = self.alias(self.first(x))
        return self.last(y.exp()) * y.sin()


@both_actions
@pytest.mark.parametrize(
    "alias",
    [lambda x: x, lambda x: x.view(-1, HIDDEN), lambda x: x.t().t(), lambda x: x.detach(), lambda x: F.dropout(x, 0.0)],
    ids=["itself", "view", "transposed twice", "detached", "dropout of nothing"],
)
def test_a_region_that_returns_its_input_or_a_view_of_it(alias: Callable[[Tensor], Tensor], action: str) -> None:
    assert_as_plain(Alias(alias), policy(("alias", action), ("last", "recompute")), tokens())


def test_an_input_that_a_region_returns_stays_alive_and_is_not_counted() -> None:
    model = holding(lambda self, x: (x, x.exp()))
    handle = recompute.apply(model, policy(("inside", "recompute")))
    hidden = tokens() * 1.0
    result = model(hidden)[0].sin() + model(hidden)[1]
    assert handle.stats().dropped_nbytes == 2 * TOKENS * HIDDEN * 4  # each call's exponential
    result.sum().backward()


def test_the_same_tensor_passed_thrice_is_one_tensor_again() -> None:
    attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True)
    model = holding(lambda self, x: self.attention(x, x, x)[0], attention=attention)
    assert_as_plain(model, policy(("inside.attention", "checkpoint")), tokens(2, TOKENS, HIDDEN))
    same = holding(lambda self, a, b: (a.exp() * (2.0 if a is b else 3.0)).sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = same.inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, x)

    assert_as_plain(Model(), INSIDE, tokens())


def test_a_parameter_passed_as_an_argument_is_that_parameter_again() -> None:
    def forward(self: Any, x: Tensor, weight: Tensor) -> Tensor:
        return (x.exp() * weight).sin() * (2.0 if isinstance(weight, nn.Parameter) else 3.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(HIDDEN))
            self.inside = holding(forward).inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, self.weight)

    assert_as_plain(Model(), INSIDE, tokens())


# Views of dropped outputs

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "transposed": lambda y: y.t(),
    "slice": lambda y: y[1:4, 2:],
    "strided slice": lambda y: y[::2, ::3],
    "row": lambda y: y[3],
    "expanded": lambda y: y[2:3].expand(5, -1),
    "chunk": lambda y: y.chunk(3)[2],
    "unfolded": lambda y: y.unfold(1, 3, 2),
    "diagonal": lambda y: y.diagonal(1),
    "as strided": lambda y: y.as_strided((3, 3), (7, 2), 5),
    "reshaped": lambda y: y.view(2, -1, 4).transpose(0, 2),
    "number": lambda y: y[2, 3],
    "empty": lambda y: y[:0],
    "unsqueezed": lambda y: y[:, None].squeeze(1),
    "detached": lambda y: y.detach().requires_grad_(),
    "real view": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)).abs(),
    "bytes": lambda y: y.detach().view(torch.int32).float().log1p().requires_grad_() * y,
}


class Consumed(nn.Module):
    """``norm``'s output, or what ``source`` makes of it, saved by ops through ``view``."""

    def __init__(self, view: Callable[[Tensor], Tensor], source: Callable[[Tensor], Tensor] = lambda y: y):
        super().__init__()
        self.view = view
        self.norm = type("Body", (nn.Module,), {"forward": lambda self, x: source(self.inner(x))})()
        self.norm.inner = RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.view(y).sin() * self.view(y).abs().sum() + y.cos().sum()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_dropped_output_comes_back_as_that_view(view: Callable[[Tensor], Tensor]) -> None:
    assert_as_plain(Consumed(view), policy(("norm", "recompute")), tokens())


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda y: y.t().contiguous().t(),
    "slice of more": lambda y: torch.cat([y, y], -1)[:, 1 : HIDDEN + 1],
    "expanded": lambda y: y[:1].sin().expand(TOKENS, -1),
    "with an offset": lambda y: torch.cat([y, y])[TOKENS:],
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("view", ["itself", "transposed", "strided slice", "row"])
def test_a_view_of_a_dropped_output_of_odd_layout(view: str, source: Callable[[Tensor], Tensor]) -> None:
    assert_as_plain(Consumed(VIEWS[view], source), policy(("norm", "recompute")), tokens())


def test_chunks_of_one_dropped_output_saved_by_different_consumers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split = type("Body", (nn.Module,), {"forward": lambda self, x: x.exp().chunk(4, -1)})()

        def forward(self, x: Tensor) -> Tensor:
            a, b, c, d = self.split(x)
            return (a @ b.t()).sin() @ (c * d)

    assert_as_plain(Model(), policy(("split", "recompute")), tokens())


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y * y.conj(),
        lambda y: y.conj() * y.sin(),
        lambda y: y.real * y.imag,
        lambda y: y.conj().imag.sin() * y.imag,
        lambda y: torch.view_as_real(y.resolve_conj()).sin(),
    ],
    ids=["y y*", "y* sin y", "re im", "im y*", "as real"],
)
@pytest.mark.parametrize("conjugated", [False, True])
def test_complex_outputs_and_their_conjugates(use: Callable[[Tensor], Tensor], conjugated: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            body = (lambda self, z: z.exp().conj()) if conjugated else (lambda self, z: z.exp())
            self.norm = type("Body", (nn.Module,), {"forward": body})()

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(torch.complex(x, x.cos()))
            return use(y) * y.conj().abs()[..., None] if use(y).dim() == 3 else use(y) * y.conj().abs()

    assert_as_plain(Model(), policy(("norm", "recompute")), tokens())


def test_complex_conjugated_inputs_of_a_checkpointed_region() -> None:
    model = holding(lambda self, x, z: (torch.complex(x, x).conj() * z.conj() * z.exp()).imag.sin())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model.inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x.conj(), torch.complex(x, 2 * x).conj())

    assert_as_plain(Model(), INSIDE, tokens())


@both_actions
@pytest.mark.parametrize("around", ["save_on_cpu", "contiguous copies"])
def test_users_hooks_that_give_inputs_back_in_another_layout(action: str, around: str) -> None:
    """As ``save_on_cpu`` does: what it gives back of a transposed tensor is contiguous."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = RMSNorm(TOKENS), nn.Linear(TOKENS, TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm((x * 1.0).t())
            return self.linear(y).sin() * y.t().sin().sum()

    def hooks() -> Any:
        if around == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        copy = lambda tensor: tensor.clone(memory_format=torch.contiguous_format)  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor)

    assert_as_plain(Model(), policy(("norm", action)), tokens(), around=hooks)


# Subclasses and other tensors


class Tagged(Tensor):
    """Takes part in no dispatch: only its type says what it is."""


@both_actions
def test_tensor_subclasses_keep_their_type_inside_the_region(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (x.exp() * (2.0 if isinstance(x, Tagged) else 3.0)).sin().as_subclass(Tensor)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = holding(forward).inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside((x * 1.0).as_subclass(Tagged))

    assert_as_plain(Model(), policy(("inside", action)), tokens())


@both_actions
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_a_region(action: str, layout: torch.layout) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor([x[:2] * 2, x[2:] * 2], layout=layout)
        return torch.cat(self.linear(nested).relu().unbind()).sin()

    model = holding(forward, linear=nn.Linear(HIDDEN, HIDDEN))
    assert_as_plain(model, policy(("inside", action)), tokens())


@both_actions
def test_models_on_the_meta_device_run_without_values(action: str) -> None:
    with torch.device("meta"):
        model = holding(lambda self, x: self.batch(x).exp().sin(), batch=nn.BatchNorm1d(HIDDEN))
        x = torch.empty(TOKENS, HIDDEN, requires_grad=True)
    policed(model, action)
    model(x).sum().backward()
    assert x.grad.shape == x.shape


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
    assert {name: id(value) for name, value in vars(given.log).items()} == {name: id(value) for name, value in before.items()}


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
    model, x = policed(holding(lambda self, x: x.detach().exp() * self.scale, scale=nn.Parameter(torch.ones(())))), tokens()
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
