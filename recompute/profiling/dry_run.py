"""Runs training steps that change nothing: model, gradients and random state are afterwards as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from recompute.attach.apply import AppliedPolicy
from recompute.compiled.generated.generated_kernel import wait_for_kernels
from recompute.compiled.settle import settle
from recompute.counters import Clock, MemoryTrace, memory_trace
from recompute.engine.thread_state import local, swapped
from recompute.errors import ModelError
from recompute.estimation.optimizer_step import OptimizerFactory
from recompute.profiling.model_run import Loss, arguments_of, fixed_signs, left_as_it_was, roots, sources_of
from recompute.profiling.step_trace import StepClock, StepTrace, trace_step


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
    microbatches: int = 1
    """In a step. If there are several, a step whose bytes are counted runs beside the gradients of one before it."""
    microbatches_in_flight: int = 1
    """The most that are between forward and backward. A step whose bytes are counted is the last one's."""
    output_gradients: dict[Any, Tensor] = field(default_factory=dict)
    """The gradients of outputs where there is no loss, by the output's dtype and shape.

    In a pipeline they come from the next stage, into memory that is there all the time. So here they are made once.
    """
    outputs_let_go: list[int] = field(default_factory=list)
    """The bytes of the model's output that each forward freed when it returned."""
    is_calculated: ClassVar[bool] = False
    """Whether times are calculated and not measured. Then all steps are equal, and one is enough."""

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.optimizer.param_groups[0]["params"][0].device

    @property
    def via(self) -> str:
        """The ``via`` of rules with kernels here: on other devices than CUDA, "auto" uses none."""
        return "auto" if self.device.type == "cuda" else "kernel"

    @property
    def static_nbytes(self) -> int:
        """Bytes alive between steps."""
        own = self.args, self.kwargs, list(self.output_gradients.values())
        found = static_nbytes(self.model, self.optimizer, own)
        if self.microbatches > 1:
            found += self.microbatches * self.microbatch_nbytes + self.microbatches_in_flight * self.output_nbytes
        return found

    @property
    def microbatch_nbytes(self) -> int:
        """The bytes of one microbatch that are alive between steps: its batch, and the gradients of outputs."""
        return nbytes_of([self.args, self.kwargs, list(self.output_gradients.values())])

    @property
    def output_nbytes(self) -> int:
        """The most bytes of the model's output that a forward freed."""
        return max(self.outputs_let_go, default=0)

    def forward(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """Run forward. Returns the tensors where backward starts and their gradients, and frees the other outputs."""
        output = self.model(*self.args, **self.kwargs)
        leaves = output.values() if isinstance(output, Mapping) else [output]
        tensors = [leaf for leaf in tree_leaves(list(leaves)) if type(leaf) in (Tensor, FakeTensor)]
        storages = [(StorageWeakRef(each.untyped_storage()), each.untyped_storage().nbytes()) for each in tensors]
        found = roots(output, self.loss, self._gradient_of)
        del output, leaves, tensors
        self.outputs_let_go.append(sum(nbytes for reference, nbytes in storages if reference.expired()))
        return found

    def _gradient_of(self, output: Tensor) -> Tensor:
        key = output.dtype, output.shape
        if key not in self.output_gradients:
            self.output_gradients[key] = fixed_signs(output)
        return self.output_gradients[key]

    @property
    def warmup(self) -> int:
        """Steps of captured code before others are measured. Kernels are compiled in one and compared in two more."""
        return 3 if self.device.type == "cuda" else 1

    def settle(self, handle: AppliedPolicy, regions: Mapping[str, nn.Module] | None = None) -> list[StepTrace]:
        """Run steps under a policy until its regions are captured, if they can be, and until their kernels run.

        Returns counted ones of them, where ``regions`` are given, as ``step`` takes them, and something is captured:
        two on tapes, of which the second follows plans, and one in which captured code runs ATen's kernels.
        """
        found: list[StepTrace] = []
        counts = regions is not None and handle._regions and (self.is_calculated or self.device.type == "cuda")
        if counts:
            found += [self.step(regions, counted=True) for _ in range(2)]
        settle(handle._regions, self._run)
        if counts:
            with swapped(local, "until_captured", "ATen"):
                found.append(self.step(regions, counted=True))
        for _ in range(self.warmup):
            self.step(None)
            wait_for_kernels()
        return found

    def _run(self, backward: bool) -> None:
        """Run a forward, or with backward a step without its optimizer."""
        roots, gradients = self.forward()
        if backward:
            torch.autograd.backward(roots, gradients)
            self._drop_gradients()

    def step(self, regions: Mapping[str, nn.Module] | None, *, counted: bool = False, timed: bool = False) -> StepTrace:
        """One training step, as ``trace_step`` runs it; no gradients are left.

        counted, timed: whether its bytes and its seconds are measured.
        """
        memory = memory_trace(self.device) if counted else None
        return self._traced(regions, memory, Clock(self.device) if timed else None)

    def _traced(
        self, regions: Mapping[str, nn.Module] | None, memory: MemoryTrace | None, clock: StepClock | None
    ) -> StepTrace:
        earlier = self._earlier_microbatches if memory is not None and self.microbatches > 1 else None
        try:
            return trace_step(self.forward, self.optimizer, regions, memory=memory, clock=clock, earlier=earlier)
        finally:
            self._drop_gradients()  # there are some if the step failed

    def _earlier_microbatches(self) -> Any:
        """Leave the gradients of one microbatch, and return the graphs of the others in flight."""
        torch.autograd.backward(*self.forward())
        self._drop_gradients_of_inputs()
        return [self.forward() for _ in range(self.microbatches_in_flight - 1)]

    def _drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self._drop_gradients_of_inputs()

    def _drop_gradients_of_inputs(self) -> None:
        """As a pipeline does once they are sent. They would add up in the next step."""
        for leaf in tree_leaves((self.args, self.kwargs)):
            if isinstance(leaf, Tensor):
                leaf.grad = None


def nbytes_of(values: Any) -> int:
    """The bytes of the storages of all tensors in ``values``; tensors that share one count once."""
    storages = [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@contextmanager
def dry_run(
    model: nn.Module,
    batch: Any,
    microbatches: int = 1,
    microbatches_in_flight: int = 1,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Iterator[DryRun]:
    """A ``with`` block in which ``model`` trains on ``batch``, and its weights stay as they are.

    The optimizer gets a learning rate of 0 and gradients of zero. At the end the model with its gradients, buffers,
    attributes and training flags, the batch and the random state are as before, also after an exception. Policies may
    come and go inside.

    batch, loss: as ``recompute.verify`` takes them.
    optimizer: makes one of the parameters that require a gradient; by default ``torch.optim.AdamW``.
    microbatches, microbatches_in_flight: as ``recompute.plan`` takes them.

    Raises ``ModelError`` where nothing requires a gradient, and ``MutationError`` where running the model changes a
    parameter.
    """
    parameters = list({id(each): each for each in model.parameters() if each.requires_grad}.values())
    if not parameters:
        raise ModelError(f"expected a model to train; none of {type(model).__name__}'s parameters requires a gradient")
    with torch.inference_mode(False), torch.enable_grad(), left_as_it_was(model, sources_of(model, batch)):
        args, kwargs = arguments_of(batch)
        made = (optimizer or AdamW)(parameters)
        for group in made.param_groups:
            rate = group.get("lr", 0.0)
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        yield DryRun(model, args, kwargs, loss, made, microbatches, microbatches_in_flight)
