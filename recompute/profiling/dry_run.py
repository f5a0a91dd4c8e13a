"""Runs training steps that change nothing: model, gradients and random state are afterwards as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from recompute import counters
from recompute.counters import Clock, MemoryTrace
from recompute.profiling.model_run import Loss, arguments_of, left_as_it_was, roots, sources_of
from recompute.profiling.step_trace import StepTrace, trace_step

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters: ``functools.partial(torch.optim.AdamW, fused=True)``, say."""


def static_nbytes(model: nn.Module, optimizer: Optimizer, batch: Any) -> int:
    """Bytes alive between training steps: on CUDA all that is allocated; else parameters, buffers, states and batch."""
    device = optimizer.param_groups[0]["params"][0].device
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    states = [list(state.values()) for state in optimizer.state.values()]
    return nbytes_of([*model.parameters(), *model.buffers(), states, batch])


@dataclass(frozen=True)
class DryRun:
    """A model, a batch for it and an optimizer that changes nothing, to run as many training steps as one likes."""

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    loss: Loss | None
    optimizer: Optimizer
    is_calculated: ClassVar[bool] = False
    """Whether times are calculated and not measured. Then every step gives the same bytes and times: one is enough."""

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.optimizer.param_groups[0]["params"][0].device

    @property
    def via(self) -> str:
        """The ``via`` by which rules have kernels stand in here: on other devices than CUDA, "auto" uses none."""
        return "auto" if self.device.type == "cuda" else "kernel"

    def memory_trace(self) -> MemoryTrace:
        return counters.memory_trace(self.device)

    def clock(self) -> Clock:
        return counters.clock(self.device)

    @property
    def static_nbytes(self) -> int:
        """Bytes alive between steps."""
        return static_nbytes(self.model, self.optimizer, (self.args, self.kwargs))

    def forward(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Run forward; returns the tensors where backward starts and the gradients that it starts with.

        The rest of the output is let go of.
        """
        return roots(self.model(*self.args, **self.kwargs), self.loss)

    def warm_up(self, regions: Mapping[str, nn.Module]) -> float:
        """Run a training step before others are measured. Returns the seconds that it took."""
        return self.step(regions, clock=self.clock()).seconds

    def step(
        self, regions: Mapping[str, nn.Module] | None, *, memory: MemoryTrace | None = None, clock: Clock | None = None
    ) -> StepTrace:
        """One training step, as ``trace_step`` runs and measures it; no gradients are left."""
        try:
            return trace_step(self.forward, self.optimizer, regions, memory=memory, clock=clock)
        finally:
            self.optimizer.zero_grad(set_to_none=True)  # there are some if the step failed


def nbytes_of(values: Any) -> int:
    """The bytes of the storages of all tensors in ``values``; tensors that share one count once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextmanager
def dry_run(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, optimizer: OptimizerFactory | None = None
) -> Iterator[DryRun]:
    """A ``with`` block in which ``model`` trains on ``batch``, and its weights stay as they are.

    The optimizer gets a learning rate of 0 and gradients of zero. At the end the model with its gradients, buffers,
    attributes and training flags, the batch and the random state are as before, also after an exception. Policies may
    come and go inside.

    batch, loss: as ``recompute.verify`` takes them.
    optimizer: makes one of the parameters that require a gradient; by default ``torch.optim.AdamW``.

    Raises ``ValueError`` where nothing requires a gradient, and ``MutationError`` where running the model changes a
    parameter.
    """
    parameters = list({id(each): each for each in model.parameters() if each.requires_grad}.values())
    if not parameters:
        raise ValueError(f"expected a model to train; none of {type(model).__name__}'s parameters requires a gradient")
    with torch.inference_mode(False), torch.enable_grad(), left_as_it_was(model, sources_of(model, batch)):
        args, kwargs = arguments_of(batch)
        made = (optimizer or AdamW)(parameters)
        for group in made.param_groups:
            rate = group.get("lr", 0.0)
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        yield DryRun(model, args, kwargs, loss, made)
