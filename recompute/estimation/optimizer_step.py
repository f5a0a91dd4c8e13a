"""Runs a step of an optimizer on tensors without values, as on CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from recompute.engine.cut.ops import tensors_in
from recompute.estimation.storage_tracker import BLOCK_NBYTES, OpClock, StorageTrace

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters: ``functools.partial(torch.optim.AdamW, fused=True)``, say."""


class OptimizerStep(NamedTuple):
    """The bytes and the seconds of an optimizer's step."""

    peak_nbytes: int
    """The most beside parameters, gradients and states."""
    state_nbytes: int
    seconds: float
    """Of its ops; 0 where nobody times them."""


class _WithoutAddresses(TorchDispatchMode):
    """Has outputs of ops refuse to tell their address. A meta tensor's is 0, and a kernel might be launched there."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        for each in tensors_in(output):
            if each.is_meta:
                torch._C._set_throw_on_mutable_data_ptr(each)
        return output


def simulate_optimizer(
    make: OptimizerFactory, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], timed: OpClock | None = None
) -> OptimizerStep:
    """A step that updates parameters of these shapes and dtypes. Call it under the mode of fake tensors.

    timed: None where nobody asks for seconds.
    """

    def given(device: str) -> list[nn.Parameter]:
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape, dtype in shapes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        return parameters

    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_WithoutAddresses())
        optimizer = make(given("cpu"))
        if not any(group.get("fused") for group in optimizer.param_groups):  # a fused optimizer refuses meta tensors
            # Meta tensors take a third of the time of fake ones, and let the optimizer read its step counts.
            stack.enter_context(unset_fake_temporarily())
            optimizer = make(given("meta"))
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None:
                    group["foreach"] = True  # as torch chooses on CUDA
        optimizer.step()  # makes the states
        with StorageTrace(BLOCK_NBYTES, timed) as trace:
            optimizer.step()
            trace.mark("step")
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return OptimizerStep(trace.peak_nbytes, sum(value.nbytes for value in states), trace.seconds["step"])


def simulate_by_shape(
    make: OptimizerFactory, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], timed: OpClock | None = None
) -> OptimizerStep:
    """``simulate_optimizer`` for an optimizer of torch's, in a fiftieth of the time: equal shapes run once.

    A ``foreach`` optimizer runs each op on all parameters before the next one, and a fused one is one op. So each
    parameter takes as much as by itself. A loop's peak needs all of them to run.
    """
    rows = [(simulate_optimizer(make, [shape], timed), count) for shape, count in Counter(shapes).items()]
    peak = sum(count * step.peak_nbytes for step, count in rows)
    if make([nn.Parameter(torch.empty(1))]).defaults["foreach"] is False:
        peak = simulate_optimizer(make, shapes).peak_nbytes
    states = sum(count * step.state_nbytes for step, count in rows)
    return OptimizerStep(peak, states, sum(count * step.seconds for step, count in rows))
