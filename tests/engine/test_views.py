"""Aliases, views and layouts of what goes into a region and comes out of it; tensors that are not plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_testing import (
    HIDDEN,
    INSIDE,
    TOKENS,
    ExpWith,
    RMSNorm,
    assert_as_plain,
    assert_as_without,
    assert_step_as_without,
    bits,
    both_actions,
    every_rule,
    holding,
    leaves,
    module_of,
    policed,
    policy,
    tokens,
)
from tiers import one_in, slow
from torch import Tensor, nn

import recompute

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
    model = holding(lambda self, x: (x, x.exp().sin().cos()))
    handle = recompute.apply(model, policy(("inside", "recompute")))
    hidden = tokens() * 1.0
    result = model(hidden)[0].sin() + model(hidden)[1]
    assert handle.stats().dropped_nbytes == 2 * TOKENS * HIDDEN * 4  # each call's sine
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
            self.norm = RMSNorm(TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm((x * 1.0).t())
            return y.sin() * y.t().cos().t()

    def hooks() -> Any:
        if around == "save_on_cpu":
            return torch.autograd.graph.save_on_cpu()
        copy = lambda tensor: tensor.clone(memory_format=torch.contiguous_format)  # noqa: E731
        return torch.autograd.graph.saved_tensors_hooks(copy, lambda tensor: tensor)

    assert_as_plain(Model(), policy(("norm", action)), tokens(), around=hooks)


@pytest.mark.parametrize(
    ("first", "follows"),
    [
        (lambda x: x.view(-1, HIDDEN), True),
        (lambda x: x.view(-1), True),
        (lambda x: x[:, 1:], False),
        (lambda x: x.transpose(0, 1), False),
    ],
    ids=["rows", "flat", "a part", "transposed"],
)
def test_an_input_that_autograd_saves_in_another_shape_than_the_first_op_reads(
    first: Callable[[Tensor], Tensor], follows: bool
) -> None:
    """As a kernel does that reads the rows of what it saves. Later frames follow the plan if both see the same."""

    def forward(self: Any, x: Tensor) -> Tensor:
        first(x).sum()
        return (x * x).exp()

    model = holding(forward)
    x = torch.randn(2, TOKENS // 2, HIDDEN, requires_grad=True)
    rules = policy(("inside", "recompute"))
    assert_as_without(model, rules, lambda model: [loss_and_gradient(model, x) for _ in range(3)])
    handle = recompute.apply(model, rules)
    loss_and_gradient(model, x)
    assert "inside" in handle.plans()
    loss_and_gradient(model, x)
    assert ("inside" in handle.plans()) is follows


def loss_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).sum()
    return loss.detach(), torch.autograd.grad(loss, x)[0]


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


def test_data_that_forward_gives_to_a_tensor_that_autograd_has_saved_in_a_checkpoint() -> None:
    """Plain autograd goes on to use the new data, which running again would not bring back."""

    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = x.detach() * 2
        product = x * hidden
        hidden.data = torch.ones_like(hidden)
        return product + x.sin()

    assert_as_plain(holding(forward), policy(("inside", "checkpoint")), tokens())


# Views

SAVED_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
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


@every_rule
@pytest.mark.parametrize("kind", one_in(2, list(SAVED_VIEWS)))
@pytest.mark.parametrize("source", ["regenerated", "input", *slow("parameter")])
def test_a_saved_view_comes_back_as_that_view(rules: dict[str, Any], kind: str, source: str) -> None:
    looks: list[Any] = []

    def look(saved: Tensor) -> None:
        looks.append((saved.shape, saved.stride(), saved.is_conj(), bits(saved)))

    def forward(self: Any, x: Tensor) -> Tensor:
        whole = {"regenerated": x.exp().mul(2.0), "input": x, "parameter": self.weight.view(TOKENS, HIDDEN)}[source]
        return ExpWith.apply(x.cos(), SAVED_VIEWS[kind](whole), look).sin()

    model, x = holding(forward, weight=nn.Parameter(tokens(TOKENS * HIDDEN))), tokens()

    def run(model: nn.Module) -> Any:
        looks.clear()
        result = model(x * 1.0)
        grads = [torch.autograd.grad(result.sum(), x, retain_graph=True) for _ in range(2)]
        return [*looks], grads

    assert_as_without(model, rules, run)
    assert len(looks) == 2


@every_rule
@pytest.mark.parametrize("kind", ["transposed", "slice with an offset", "expanded", "overlapping", "imaginary part"])
def test_a_view_of_a_region_output_that_others_save_comes_back_as_that_view(rules: dict[str, Any], kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x)
            view = SAVED_VIEWS[kind](y)
            return view.sin() * view.abs().sum() + y.cos().sum()

    assert_step_as_without(Model(), rules, tokens())


@every_rule
def test_an_expanded_tensor_comes_back_as_small_as_it_was(rules: dict[str, Any]) -> None:
    sizes: list[int] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        small = x[:1].exp().mul(2.0)
        return ExpWith.apply(x, small.expand(1000, -1), lambda seen: sizes.append(seen.untyped_storage().nbytes()))

    model = holding(forward)
    recompute.apply(model, rules)
    model(tokens() * 1.0).sum().backward()
    assert sizes == [HIDDEN * 4]


# Aliases

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


@every_rule
@pytest.mark.parametrize("kind", one_in(2, list(ALIASES)))
def test_a_region_output_that_aliases_its_input_is_not_freed(rules: dict[str, Any], kind: str) -> None:
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


@every_rule
def test_a_chain_of_regions_that_return_what_they_are_given(rules: dict[str, Any]) -> None:
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
