"""What runs a module under a rule, in place of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from recompute.engine.saved_tensors import RegionStatistics
from recompute.engine.scopes import is_recording

Forward = Callable[..., Any]


class Runner(Protocol):
    """Runs ``forward(*args, **kwargs)``, the module's own, or what stands in for it."""

    statistics: RegionStatistics
    note: str
    """What it does, for ``explain``."""

    def run(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any: ...


def is_active(module: nn.Module) -> bool:
    """Whether a policy does anything: the module trains, and autograd records."""
    return module.training and is_recording()
