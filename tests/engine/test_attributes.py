"""What modules and arguments remember: attributes, buffers, objects whose parts refer to each other."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_testing import (
    HIDDEN,
    INSIDE,
    TOKENS,
    assert_as_plain,
    bits,
    both_actions,
    calls,
    holding,
    policed,
    tokens,
)
from torch import Tensor, nn

from recompute.errors import PolicyWarning

# Attributes


@both_actions
def test_a_number_that_forward_advances_is_the_old_one_when_the_region_runs_again(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.step += 1
        return (x * self.step).exp().sin()

    model, x = holding(forward, step=0), tokens()

    def run() -> list[Any]:
        model.inside.step = 0
        results = [model(x) for _ in range(3)]
        grads = [bits(torch.autograd.grad(result.sum(), x)[0]) for result in results]
        return [*grads, model.inside.step]

    expected = run()
    policed(model, action)
    assert run() == expected


@pytest.mark.parametrize("kind", ["number", "tensor", "function", "list", "string", "module"])
def test_an_attribute_replaced_between_forward_and_backward_is_the_old_one_when_the_region_runs_again(
    kind: str,
) -> None:
    uses: dict[str, tuple[Any, Any, Callable[[Tensor, Any], Tensor]]] = {
        "number": (2.0, 3.0, lambda x, value: x * value),
        "tensor": (torch.rand(HIDDEN), torch.rand(HIDDEN), lambda x, value: x + value),
        "function": (torch.sin, torch.cos, lambda x, value: value(x)),
        "list": ([2.0], [3.0], lambda x, value: x * value[0]),
        "string": ("sin", "cos", lambda x, value: getattr(x, value)()),
        "module": (nn.Softplus(), nn.Tanh(), lambda x, value: value(x)),
    }
    before, after, use = uses[kind]
    model, x = holding(lambda self, x: use(x, self.value).exp().sin()), tokens()

    def run() -> Any:
        model.inside.value = before
        result = model(x)
        model.inside.value = after
        found = bits(torch.autograd.grad(result.sum(), x)[0])
        assert model.inside.value is after
        return found

    expected = run()
    policed(model)
    assert run() == expected


def grow_inner_list(value: Any) -> None:
    value["losses"].append([len(value["losses"])])
    value["losses"][-1].append(0)


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "list": (list, lambda value: value.append(0)),
    "dict": (dict, lambda value: value.update({len(value): 0})),
    "ordered dict": (OrderedDict, lambda value: value.update({len(value): 0})),
    "set": (set, lambda value: value.add(len(value))),
    "deque": (lambda: deque([0], maxlen=3), lambda value: value.append(len(value))),
    "counter": (Counter, lambda value: value.update("a")),
    "dict of lists": (lambda: defaultdict(list), grow_inner_list),
    "list that has itself": (lambda: (one := [], one.append(one))[0], lambda value: value[0].append(0)),
}


@pytest.mark.parametrize(("make", "change"), CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("name", ["seen", "_seen"])
def test_a_container_that_forward_changes_is_changed_once(
    name: str, make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        change(getattr(self, name))
        return (x * len(str(getattr(self, name)))).exp().sin()

    model, x = holding(forward), tokens()

    def run() -> list[Any]:
        value = make()
        setattr(model.inside, name, value)
        results = [model(x) for _ in range(3)]
        change(value)
        grads = [bits(torch.autograd.grad(result.sum(), x)[0]) for result in results]
        assert getattr(model.inside, name) is value
        return [*grads, str(value)]

    expected = run()
    policed(model)
    assert run() == expected


def test_a_module_that_the_first_run_makes_is_there_when_the_region_runs_again() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "made"):
            self.made = nn.Linear(HIDDEN, HIDDEN)
        return self.made(x).exp().sin()

    def run(model: nn.Module) -> list[Any]:
        torch.manual_seed(0)
        grads = [bits(torch.autograd.grad(model(x).sum(), x)[0]) for _ in range(2)]
        return [*grads, bits(model.inside.made.weight)]

    x = tokens()
    assert run(policed(holding(forward))) == run(holding(forward))


def test_an_auxiliary_loss_left_on_the_module_is_still_forwards_after_a_backward() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x.exp()
        self.loss = y.mean()
        self.losses.append(y.std())
        self.table["last"] = y.sum()
        return y.sin()

    model, x = holding(forward, losses=[], table={}), tokens()

    def run() -> list[Any]:
        model.inside.losses.clear()
        result = model(x * 2)
        found = [*torch.autograd.grad(result.sum(), x, retain_graph=True)]
        assert len(model.inside.losses) == 1
        for loss in (model.inside.loss, *model.inside.losses, model.inside.table["last"]):
            found += torch.autograd.grad(loss, x, retain_graph=True)
        return [bits(grad) for grad in found]

    expected = run()
    policed(model)
    assert run() == expected


@both_actions
def test_statistics_that_a_module_makes_for_itself_in_its_first_run_and_updates_in_place(action: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros(HIDDEN)
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        return (x - self.mean).exp().sin()

    model, x = holding(forward, mean=None), tokens()

    def run() -> list[Any]:
        model.inside.mean = None
        found = []
        for _ in range(3):
            found += torch.autograd.grad(model(x).sum(), x)
        return [bits(value) for value in (*found, model.inside.mean)]

    expected = run()
    policed(model, action)
    with pytest.warns(PolicyWarning) if action == "checkpoint" else nullcontext():
        assert run() == expected


def test_a_hidden_state_that_a_module_carries_from_run_to_run_with_its_graph() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.state = (x + self.state).exp().sin()
        self.states.append(self.state)
        return self.state * self.states[0]

    model, x = holding(forward, state=torch.zeros(HIDDEN), states=[]), tokens()

    def run() -> list[Any]:
        model.inside.state = torch.zeros(HIDDEN)
        model.inside.states = []
        result = sum(model(x * scale) for scale in (0.5, 1.0, 2.0))
        found = torch.autograd.grad(result.sum(), x)
        return [bits(value) for value in (*found, model.inside.state, *model.inside.states)]

    expected = run()
    policed(model)
    assert run() == expected


# Buffers


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_buffer_such_as_a_graphs_adjacency(layout: torch.layout) -> None:
    model = holding(lambda self, x: (self.adjacency @ x.exp()).sin())
    dense = torch.eye(TOKENS) + torch.eye(TOKENS).roll(1)
    model.inside.register_buffer("adjacency", dense.to_sparse(layout=layout))
    x, expected = tokens(), []
    for _ in range(2):
        expected.append(bits(torch.autograd.grad(model(x).sum(), x)[0]))
        if len(expected) == 1:
            policed(model)
    assert expected[0] == expected[1]


def test_a_buffer_of_nan() -> None:
    model = holding(lambda self, x: (x.exp() * self.unset.nan_to_num(2.0)).sin())
    model.inside.register_buffer("unset", torch.full((HIDDEN,), float("nan")))
    assert_as_plain(model, INSIDE, tokens())


def test_a_buffer_and_an_argument_made_in_inference_mode() -> None:
    with torch.inference_mode():
        bias, shift = torch.rand(HIDDEN), torch.rand(HIDDEN)
    model = holding(lambda self, x, shift: (x + self.bias + shift).exp().sin())
    model.inside.register_buffer("bias", bias)
    x = tokens()
    (expected,) = torch.autograd.grad(model(x, shift).sum(), x)
    policed(model)
    (found,) = torch.autograd.grad(model(x, shift).sum(), x)
    assert bits(found) == bits(expected)


def test_statistics_of_one_norm_used_inside_and_outside_of_a_region() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(HIDDEN)
            self.inside = nn.Sequential(self.norm, nn.Sigmoid())

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(self.norm(self.inside(self.norm(x)))).sin()

    assert_as_plain(Model(), INSIDE, tokens())


# Objects that are passed


class Node:
    """A tree whose nodes know their parent."""

    def __init__(self, parent: Node | None, children: int):
        self.parent = parent
        self.children = [Node(self, 0) for _ in range(children)]
        self.scale = 2.0


def test_an_object_whose_parts_refer_to_each_other_comes_back_with_the_same_references() -> None:
    def forward(self: Any, x: Tensor, tree: Node, again: Node) -> Tensor:
        tree.scale += 1.0
        same = tree.children[0].parent is tree and again is tree
        return (x * tree.children[0].parent.scale * (1.0 if same else 5.0)).exp().sin()

    model, x = holding(forward), tokens()

    def run() -> Any:
        tree = Node(None, 3)
        return bits(torch.autograd.grad(model(x, tree, tree).sum(), x)[0])

    expected = run()
    policed(model)
    assert run() == expected


def test_an_object_with_many_parts_costs_as_many_steps_as_it_has_parts() -> None:
    model, x = policed(holding(lambda self, x, tree: (x * tree.scale).exp())), tokens()

    def cost(parts: int) -> int:
        tree = Node(None, parts)
        return calls(lambda: model(x, tree))

    cost(1)
    assert cost(40) < 10 * cost(4)
