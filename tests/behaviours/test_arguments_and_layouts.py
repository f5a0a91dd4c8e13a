"""What goes into a region and comes out of it, whatever it is and in whatever layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from behaviour_testing import (
    ExpWith,
    Setting,
    assert_as_without,
    assert_step_as_without,
    every_policy,
    every_setting,
    module_of,
)
from engine_testing import HIDDEN, TOKENS, RMSNorm, bits, holding, leaves, tokens
from torch import Tensor, nn

import recompute

# 6. Arguments and results


@dataclasses.dataclass
class Batch:
    hidden: Tensor
    mask: Tensor | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def double(x: Tensor) -> Tensor:
    return x * 2


class Passes(nn.Module):
    """Passes ``make(x)`` to what is inside, which does ``use(value)`` with it."""

    def __init__(self, make: Callable[[Tensor], Any], use: Callable[[Any], Any], by_name: bool):
        super().__init__()
        self.inside = module_of(
            lambda self, x, value=None, *, offset=0.0: (self.norm(x).exp() * use(value) + offset).sin(), norm=RMSNorm()
        )
        self.make, self.by_name = make, by_name

    def forward(self, x: Tensor) -> Tensor:
        value = self.make(x)
        return self.inside(x=x, value=value) if self.by_name else self.inside(x, value, offset=1.0)


ARGUMENTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda x: x * 3, lambda v: v.sin()),
    "tensor without gradient": (lambda x: x.detach() > 0, lambda v: v.float() + 1),
    "none": (lambda x: None, lambda v: 2.0 if v is None else 1.0),
    "dict": (lambda x: {"a": x, "b": {"c": [x * 2, None]}}, lambda v: v["a"] * v["b"]["c"][0]),
    "dataclass": (lambda x: Batch(x, extra={"w": x * 2}), lambda v: v.hidden * v.extra["w"]),
    "int": (lambda x: 3, lambda v: v),
    "callable": (lambda x: double, lambda v: v(2.0)),
    "string": (lambda x: "sin", lambda v: 2.0 if v == "sin" else 1.0),
}


@every_policy
@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_06_arguments_of_any_kind_go_in(rules: dict[str, Any], kind: str, by_name: bool) -> None:
    assert_step_as_without(Passes(*ARGUMENTS[kind], by_name), rules, tokens())


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y.sin(),
    "none": lambda y: (None, y.sin()),
    "dict": lambda y: {"a": y.sin(), "b": {"c": [y.exp(), None]}},
    "dataclass": lambda y: (Batch(y.sin(), extra={"w": y.exp()}), y.cos()),
    "int, callable and string": lambda y: (3, double, "text", y.sin()),
    "the same twice": lambda y: (y, y, y.sin()),
    "without gradient": lambda y: (y.argmax(), y > 0, y.detach(), y.exp()),
}


@every_policy
@pytest.mark.parametrize("kind", RESULTS)
def test_06_results_of_any_kind_come_out(rules: dict[str, Any], kind: str) -> None:
    model = holding(lambda self, x: RESULTS[kind](self.norm(x).cos()), norm=RMSNorm())
    assert_step_as_without(model, rules, tokens())
    x = tokens()
    plain = model(x)
    recompute.apply(model, rules)
    result = model(x)
    assert type(result) is type(plain)
    for found, expected in zip(leaves(result), leaves(plain), strict=True):
        assert found is expected or type(found) is type(expected) is Tensor


@every_setting
def test_06_a_decorated_function_takes_and_gives_them_all_at_once(setting: Setting) -> None:
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


# 13. Views

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda y: y,
    "view": lambda y: y.view(2, -1, 4),
    "transposed": lambda y: y.t(),
    "permuted": lambda y: y.view(2, -1, 4).permute(2, 0, 1),
    "slice with an offset": lambda y: y[1:4, 2:],
    "strided slice": lambda y: y[::2, ::3],
    "last chunk": lambda y: y.chunk(3)[2],
    "expanded": lambda y: y[2:3].expand(5, -1),
    "expanded from a number": lambda y: y[2, 3].expand(3, 4),
    "overlapping": lambda y: y.unfold(1, 3, 1),
    "overlapping as strided": lambda y: y.as_strided((5, 4), (3, 1), 2),
    "diagonal": lambda y: y.diagonal(1),
    "complex": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)),
    "conjugate": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)).conj(),
    "imaginary part": lambda y: torch.view_as_complex(y.view(TOKENS, -1, 2)).imag,
    "bytes": lambda y: y.detach().view(torch.int32),
    "empty": lambda y: y[:0],
}


@every_policy
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("source", ["regenerated", "input", "parameter"])
def test_13_a_saved_view_comes_back_as_that_view(rules: dict[str, Any], kind: str, source: str) -> None:
    looks: list[Any] = []

    def look(saved: Tensor) -> None:
        looks.append((saved.shape, saved.stride(), saved.is_conj(), bits(saved)))

    def forward(self: Any, x: Tensor) -> Tensor:
        whole = {"regenerated": x.exp().mul(2.0), "input": x, "parameter": self.weight.view(TOKENS, HIDDEN)}[source]
        return ExpWith.apply(x.cos(), VIEWS[kind](whole), look).sin()

    model, x = holding(forward, weight=nn.Parameter(tokens(TOKENS * HIDDEN))), tokens()

    def run(model: nn.Module) -> Any:
        looks.clear()
        result = model(x * 1.0)
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True) for _ in range(2)]
        return [*looks], grads

    assert_as_without(model, rules, run)
    assert len(looks) == 2


@every_policy
@pytest.mark.parametrize("kind", ["transposed", "slice with an offset", "expanded", "overlapping", "imaginary part"])
def test_13_a_view_of_a_region_output_that_others_save_comes_back_as_that_view(
    rules: dict[str, Any], kind: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x)
            view = VIEWS[kind](y)
            return view.sin() * view.abs().sum() + y.cos().sum()

    assert_step_as_without(Model(), rules, tokens())


@every_policy
def test_13_an_expanded_tensor_comes_back_as_small_as_it_was(rules: dict[str, Any]) -> None:
    sizes: list[int] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        small = x[:1].exp().mul(2.0)
        return ExpWith.apply(x, small.expand(1000, -1), lambda seen: sizes.append(seen.untyped_storage().nbytes()))

    model = holding(forward)
    recompute.apply(model, rules)
    model(tokens() * 1.0).sum().backward()
    assert sizes == [HIDDEN * 4]


# 14. Aliases

ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "view": lambda x: x.view(-1, HIDDEN),
    "transposed": lambda x: x.t(),
    "slice": lambda x: x[1:],
    "chunks": lambda x: x.chunk(2, -1),
    "detached": lambda x: x.detach(),
    "dropout of nothing": lambda x: F.dropout(x, 0.0),
    "among others": lambda x: (x.exp().sin(), x, x.cos()),
}


@every_policy
@pytest.mark.parametrize("kind", ALIASES)
def test_14_a_region_output_that_aliases_its_input_is_not_freed(rules: dict[str, Any], kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inside = nn.Linear(HIDDEN, HIDDEN), module_of(lambda self, x: ALIASES[kind](x))
            self.last = RMSNorm()

        def forward(self, x: Tensor) -> Any:
            given = self.first(x).sigmoid()
            result = self.inside(given)
            return given, result, [part.exp().sin() for part in leaves(result)], self.last(given)

    assert_step_as_without(Model(), rules, tokens(), drops=False)
    model = holding(lambda self, x: ALIASES[kind](x))
    recompute.apply(model, rules)
    given = tokens() * 1.0
    before = bits(given), given._version
    result = leaves(model(given))
    for part in result:
        if part.requires_grad:
            torch.autograd.grad(part.exp().sum(), given, retain_graph=True)
    assert (bits(given), given._version) == before
    aliases = [part for part in result if part.untyped_storage()._cdata == given.untyped_storage()._cdata]
    assert aliases or kind == "dropout of nothing"
    del given
    assert all(alias.untyped_storage().nbytes() == TOKENS * HIDDEN * 4 for alias in aliases)


@every_policy
def test_14_a_chain_of_regions_that_return_what_they_are_given(rules: dict[str, Any]) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            through = [lambda self, x: x, lambda self, x: x.view_as(x), lambda self, x: self.norm(x), lambda self, x: x]
            self.layers = nn.ModuleList(module_of(forward, norm=RMSNorm()) for forward in through)

        def forward(self, x: Tensor) -> Tensor:
            results = [x * 1.0]
            for layer in self.layers:
                results.append(layer(results[-1]))
            return torch.stack([result.sin() for result in results]).exp()

    assert_step_as_without(Chain(), rules, tokens())
