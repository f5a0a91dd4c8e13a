"""The ops of a node in autograd's graph, as they run where nobody watches."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.tape.autocast import run_as_called
from recompute.engine.thread_state import local
from recompute.engine.wrapper_tensors import SEE, passed_on

_ATEN = torch.ops.aten


class BackwardOps(TorchDispatchMode):
    """Shows the calls of a node of the graph to an observation.

    Under a mode some formulas fill a fresh result of ``where`` out of place, which makes it contiguous. Without one
    they fill it in place, and it keeps its strides, which decide in which order later sums go. So here, too, it is
    filled in place.
    """

    supports_higher_order_operators = True

    def __init__(self, observe: Callable[..., Any], name: str):
        """observe: the method of the observation, ``(op, args, kwargs, run) -> output``. name: the region's."""
        super().__init__()
        self._observe = weakref.WeakMethod(observe)  # weakly, because its object holds this
        self._name = name
        self._chosen: Callable[[], Tensor | None] = lambda: None
        """What the last ``where`` gave, as long as it lives."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (passed := passed_on(self, op, types, args, kwargs)) is not SEE:
            return passed
        observe = self._observe()
        if local.regenerating or observe is None:
            return op(*args, **kwargs)
        if op is _ATEN.masked_fill.Scalar and args[0] is self._chosen():
            op = _ATEN.masked_fill_.Scalar
        output = observe(op, args, kwargs, partial(run_as_called, op, args, kwargs, self._name))
        if op is _ATEN.where.self:
            self._chosen = weakref.ref(output)
        return output
