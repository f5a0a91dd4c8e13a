"""What trials of many architectures as captured code have found, each in a module with the cause and little else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor, nn
from torch.nn import functional as F

import recompute
from recompute.attach.runners import region_in
from recompute.compiled.captured_function import CapturedFrame
from recompute.compiled.captured_region import MAX_SHARED_GRAPHS, CapturedRegion

SIZE = 4
SETTLING = 6
"""Steps after which a region that can be captured is."""


class Model(nn.Module):
    """Layers in a row, of which a policy governs each."""

    def __init__(self, layers: Sequence[nn.Module], between: Callable[[Tensor], Tensor] = torch.sin):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._between = between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self._between(x))
        return x


class Pair:
    """A model in plain PyTorch and its copy under a policy."""

    def __init__(self, model: nn.Module, kind: str):
        self.plain = model
        self.policed = copy.deepcopy(model)
        policy = {"version": 1, "name": "layers", "rules": [{"type": kind, "action": "recompute"}]}
        self.handle = recompute.apply(self.policed, policy)

    def step(self, run: Callable[[nn.Module, Tensor], Any], shape: Sequence[int] = (2, 3, SIZE), seed: int = 0) -> None:
        """Both run backward by ``run``, and all that comes of it must be the same to the bit."""
        found = []
        for model in (self.plain, self.policed):
            torch.manual_seed(seed)
            x = torch.randn(shape).requires_grad_()
            result = run(model, x)
            found.append([result, x.grad, *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
        for plain, policed in zip(*found, strict=True):
            assert (plain is None) == (policed is None)
            assert plain is None or torch.equal(plain, policed)

    def settle(self, run: Callable[[nn.Module, Tensor], Any]) -> None:
        for seed in range(SETTLING):
            self.step(run, seed=seed)

    @property
    def regions(self) -> list[CapturedRegion]:
        found = [region_in(attachment.runner) for attachment in self.handle._attachments]
        return [region for region in found if region is not None]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().sum()
    loss.backward()
    return loss.detach()


class Affine(nn.Module):
    """Its weight is read through a view, and its output's gradient has the strides of what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x)).sigmoid()


class Branches(nn.Module):
    """Two outputs, each with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(SIZE, SIZE)
        self.other = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x).sin().exp(), self.other(x).sin().exp()


class Chosen(nn.Module):
    """Gives those outputs of ``Branches`` that are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = Branches()
        self.chosen = [0]

    def forward(self, x: Tensor) -> Tensor:
        found = self.branches(x.sin())
        return torch.stack([found[position] for position in self.chosen])


def transposed(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x).transpose(0, 2).contiguous() * torch.arange(SIZE * 6.0).view(SIZE, 3, 2)).sum()
    loss.backward()
    return loss.detach()


def weighted(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) * torch.arange(6.0 * SIZE).view(2, 3, SIZE)).sum()
    loss.backward()
    return loss.detach()


def test_a_gradient_of_other_strides_than_before_gives_the_same_bits() -> None:
    pair = Pair(Model([Affine()]), "Affine")
    pair.settle(weighted)
    assert pair.regions[0].is_captured
    for seed in range(3):
        pair.step(transposed, seed=seed)


@pytest.mark.parametrize("first", [[0], *slow([1], [0, 1])], ids=str)
@pytest.mark.parametrize("then", [*slow([0]), [1], [0, 1]], ids=str)
def test_outputs_that_were_of_no_use_before_take_gradients(first: list[int], then: list[int]) -> None:
    pair = Pair(Chosen(), "Branches")
    for chosen in (first, then, first):
        pair.plain.chosen = pair.policed.chosen = chosen  # type: ignore[assignment]
        pair.settle(backward)


def test_gradients_of_some_tensors_alone_do_not_limit_what_comes_after() -> None:
    def of_the_input(model: nn.Module, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        return gradient

    pair = Pair(Model([Affine()]), "Affine")
    pair.settle(of_the_input)
    pair.settle(backward)


class Sometimes(nn.Module):
    """Every third call leaves nothing to recompute, as a layer that is dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.is_dropped = False

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.is_dropped else F.gelu(self.linear(x)).sigmoid()


def test_a_layer_that_is_dropped_now_and_then_is_captured() -> None:
    pair = Pair(Model([Sometimes()]), "Sometimes")
    for number in range(15):
        for model in (pair.plain, pair.policed):
            model.layers[0].is_dropped = number % 3 == 2  # type: ignore[index]
        pair.step(backward, seed=number)
    assert pair.regions[0].is_captured


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(x)).sigmoid()


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(x))
        return y.sigmoid() if float(y.detach().sum()) < 1e6 else y


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(Averages, "aten.add_ writes to a tensor that it did not make"), (DataDependent, "depends on data")],
)
def test_what_cannot_be_recorded_says_why_and_is_not_traced(layer: type[nn.Module], reason: str) -> None:
    pair = Pair(Model([layer()]), layer.__name__)
    pair.settle(backward)
    (region,) = pair.regions
    assert region.was_tried
    assert not region.is_captured
    assert reason in region.failure
    assert region._graphs() == []


def test_a_layer_whose_gradient_has_other_strides_than_those_of_its_like_gets_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[str] = []
    replay = CapturedFrame._replay
    monkeypatch.setattr(
        CapturedFrame, "_replay", lambda self, *given: runs.append(self.statistics.name) or replay(self, *given)
    )
    pair = Pair(Model([Affine() for _ in range(MAX_SHARED_GRAPHS + 1)]), "Affine")
    for seed in range(16):
        pair.step(transposed, seed=seed)
    assert all(region.is_captured for region in pair.regions)
    assert not runs
