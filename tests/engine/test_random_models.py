"""Random small models under random policies: everything is bit for bit what it is without the policy."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from engine_testing import HIDDEN, TOKENS, GatedMLP, RMSNorm, assert_same, outcome
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import recompute

ACTIONS = (None, "keep", "recompute", "recompute", "checkpoint", "checkpoint")


class Chunked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([right.sin(), left * right], -1)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 0.5
        y[1:].add_(1.0)
        y.mul_(x.cos())
        return y.tanh_() + y[:1]


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp().clamp(max=3.0).t()
        return y.reshape(2, -1).flip(0).flatten().view(HIDDEN, TOKENS).t() * x.flip(0)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.rand(TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.t() + self.bias).softmax(-1) @ x


class Sums(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.std() + 1
        return x / scale + x.mean(0, keepdim=True).exp().clamp(max=2.0).expand_as(x)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(x * (0.5 + torch.rand(())), training=self.training)


class BatchNorm(nn.BatchNorm1d):
    pass


LEAVES: dict[str, Any] = {
    "linear": lambda: nn.Linear(HIDDEN, HIDDEN),
    "rms norm": RMSNorm,
    "layer norm": lambda: nn.LayerNorm(HIDDEN),
    "batch norm": lambda: nn.BatchNorm1d(HIDDEN),
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.3),
    "identity": nn.Identity,
    "gated mlp": GatedMLP,
    "chunked": Chunked,
    "in place": InPlace,
    "views": Views,
    "softmax": Softmax,
    "sums": Sums,
    "noisy": Noisy,
}


class Block(nn.Module):
    """Runs its parts one after the other, with a skip around them if ``skip``; ``twice`` runs them again."""

    def __init__(self, parts: list[nn.Module], skip: bool, twice: bool):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.skip, self.twice = skip, twice

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + self.twice):
            before = x
            for part in self.parts:
                x = part(x)
            x = before + x if self.skip else x
        return x


leaf = st.sampled_from(sorted(LEAVES))
blueprint = st.recursive(
    leaf,
    lambda inner: st.tuples(st.lists(inner, min_size=1, max_size=4), st.booleans(), st.booleans()),
    max_leaves=8,
)


def build(plan: Any) -> nn.Module:
    if isinstance(plan, str):
        return LEAVES[plan]()
    parts, skip, twice = plan
    return Block([build(part) for part in parts], skip, twice)


def rules_for(model: nn.Module, actions: list[str | None]) -> dict[str, Any]:
    """Gives each module below the root one of ``actions``, in turn; None leaves it alone."""
    rules = []
    for index, (path, _) in enumerate(list(model.named_modules())[1:]):
        if (action := actions[index % len(actions)]) is not None:
            rules.append({"match": path, "action": action, **({"via": "hook"} if action == "recompute" else {})})
    return {"rules": rules}


class Watched(torch.autograd.graph.saved_tensors_hooks):
    """Hooks of the user's that refuse what autograd refuses without hooks."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)

    @staticmethod
    def pack(tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach(), tensor._version

    @staticmethod
    def unpack(packed: tuple[Tensor, int]) -> Tensor:
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError("modified in place")
        return tensor


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "hooks": Watched,
}


def trial(
    model: nn.Module, x: Tensor, around: Callable[[], AbstractContextManager[Any]]
) -> list[dict[str, Any] | None]:
    """Two steps of two backwards each; None for a step that is refused, for what it modifies in place."""
    steps: list[dict[str, Any] | None] = []
    for _ in range(2):
        try:
            steps.append(outcome(model, x, backwards=2, around=around()))
        except RuntimeError as error:
            if not re.search("inplace operation|modified in place", str(error)):
                raise
            steps.append(None)
    return steps


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(blueprint, min_size=1, max_size=4),
    actions=st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=12),
    grad=st.booleans(),
    around=st.sampled_from(sorted(AROUND)),
)
def test_any_model_under_any_policy_is_bit_for_bit_the_plain_model(
    parts: list[Any], actions: list[str | None], grad: bool, around: str
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), *(build(part) for part in parts))
    under = copy.deepcopy(plain)
    rules = rules_for(under, actions)
    note(f"{plain}\n{rules}")
    x = torch.randn(TOKENS, HIDDEN, requires_grad=grad)
    expected = trial(plain, x, AROUND[around])
    with recompute.apply(under, rules):
        found = trial(under, x, AROUND[around])
    for plain_step, step in zip(expected, found, strict=True):
        if plain_step is not None:
            assert step is not None
            assert_same(step, plain_step)
