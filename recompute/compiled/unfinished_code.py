"""What code that stops in its middle leaves changed, and how that is put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recompute.engine.numerics import Autocast, Numerics
from recompute.engine.rng import RngState


class GlobalState:
    """Random states, and switches of torch."""

    def __init__(self) -> None:
        self._rng = RngState()
        self._numerics = Numerics()
        self._grad = torch.is_grad_enabled()
        self._autocast = Autocast()
        self._nesting = _autocast_nesting()

    def put_back(self) -> None:
        self._rng.restore()
        self._numerics.put()
        torch.set_grad_enabled(self._grad)
        self._autocast.put()
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def leaving_vmaps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A graph's ``forward``, which leaves no ``vmap`` open if it raises: a graph has no ``finally``."""

    def run(*inputs: Any) -> Any:
        transforms = torch._C._functorch
        depth = transforms.get_dynamic_layer_stack_depth()
        try:
            return forward(*inputs)
        finally:
            while transforms.get_dynamic_layer_stack_depth() > depth:
                transforms._vmap_decrement_nesting()

    return run
