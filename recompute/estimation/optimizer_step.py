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
from recompute.estimation.storage_tracker import BLOCK_NBYTES, StorageTrace

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters: ``functools.partial(torch.optim.AdamW, fused=True)``, say."""


class OptimizerStep(NamedTuple):
    """The bytes of a step: the most beside parameters, gradients and states; and the states."""

    peak_nbytes: int
    state_nbytes: int


class _WithoutAddresses(TorchDispatchMode):
    """Has what ops make refuse to tell its address. Of a meta tensor that would be 0, and a kernel launched there."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        for each in tensors_in(output):
            if each.is_meta:
                torch._C._set_throw_on_mutable_data_ptr(each)
        return output


def simulate_optimizer(
    make: OptimizerFactory,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    on_run: Callable[[Any, Any, Any, Any], None] | None = None,
) -> OptimizerStep:
    """What a step takes that updates parameters of these shapes and dtypes. Call it under the mode of fake tensors.

    on_run: as ``StorageTrace`` has it.
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
        trace = StorageTrace(BLOCK_NBYTES)
        trace.on_run = on_run or trace.on_run
        with trace:
            optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return OptimizerStep(trace.peak_nbytes, sum(value.nbytes for value in states))


def optimizer_peak_nbytes(make: OptimizerFactory, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """The most that a step of torch's own optimizer takes beside parameters, gradients and its states.

    A ``foreach`` optimizer runs each op on all parameters before the next one, so that each shape takes what it takes
    by itself, as many times as there are parameters of it.
    """
    rows = [(shape, dtype) for shape in shapes]
    if make([nn.Parameter(torch.empty(1, device="meta"))]).defaults.get("foreach") is False:
        return simulate_optimizer(make, rows).peak_nbytes
    return sum(count * simulate_optimizer(make, [row]).peak_nbytes for row, count in Counter(rows).items())


def optimizer_seconds(
    make: OptimizerFactory,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    timed: Callable[[Any, Any, Any, Any], float],
) -> float:
    """The seconds of the ops of an optimizer's step, as ``timed`` tells them of each. Equal shapes run once."""
    found = 0.0
    for shape, count in Counter(shapes).items():

        def add(*ran: Any, count: int = count) -> None:
            nonlocal found
            found += count * timed(*ran)

        simulate_optimizer(make, [(shape, dtype)], add)
    return found
