"""What torch's frontend traces in the place of functions of libraries, which a graph could not have as they are.

A stand-in makes the calls that its function makes where a region runs alike.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from recompute.engine.thread_state import local


def traced_as(translator: Any, function: Any) -> Any:
    """What stands for a function, or for the ``apply`` of an ``autograd.Function``, in a traced region; else None."""
    if not local.is_tracing or function is None:
        return None
    other = _unwaited(translator, function) or _settled(function)
    if other is None:
        return None
    from torch._dynamo.variables.base import VariableTracker  # it takes a second to load

    return VariableTracker.build(translator, other)


def _unwaited(translator: Any, function: Any) -> Any:
    """For what wraps a collective's result: to a compiler torch gives a result that was waited for.

    Eager code waits for it where it is read. Where another dimension than the first is gathered, it waits at once.
    """
    collectives: Any = sys.modules.get("torch.distributed._functional_collectives")
    wraps = [getattr(collectives, name, None) for name in ("_maybe_wrap_tensor", "_FromTorchTensor")]
    if not any(each is function for each in wraps):
        return None
    dim = translator.symbolic_locals.get("gather_dim")
    return collectives.wait_tensor if dim is not None and value_of(dim) != 0 else _wrapped


def _wrapped(result: Tensor) -> Any:
    return torch.ops._c10d_functional._wrap_tensor_autograd(result)


def _settled(function: Any) -> Any:
    """For the forward of bitsandbytes' Linear of 8 bits, which moves its codes about in each call."""
    kind = getattr(sys.modules.get("bitsandbytes.nn.modules"), "Linear8bitLt", None)
    return _of_codes if kind is not None and function is kind.forward else None


def _of_codes(self: Any, x: Tensor) -> Any:
    from bitsandbytes import matmul

    state = self.state
    has_moved = self.weight.CB is None and state.CB is not None and not state.has_fp16_weights
    is_cast = self.bias is None or self.bias.dtype == x.dtype
    if not has_moved or not is_cast or state.is_training != self.training:
        raise NotImplementedError("its first call moves the codes of its weight")
    return matmul(x, self.weight, bias=self.bias, state=state)


def value_of(variable: Any) -> Any:
    """The object or the class that a variable of torch's frontend stands for; None for a tensor, say.

    To look at it must not guard it: the code that is traced may never do so.
    """
    return vars(variable.realize()).get("value") if variable.is_realized() else variable.peek_value()
