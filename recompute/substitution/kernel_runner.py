"""What all runners of kernels share: when the kernels run, what runs instead, and which modules they may replace."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from recompute.compiled.runner import Forward, Runner
from recompute.compiled.under_torch_compile import CompiledRegion
from recompute.engine.dtensors import has_layout
from recompute.engine.reachable_objects import base_of
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.thread_state import local
from recompute.errors import warn
from recompute.policy.matching import pattern_of
from recompute.substitution.held_memory import Compute, HeldMemoryCounter
from recompute.substitution.lazy_tensors import values_of


@dataclass
class KernelRunner(Runner, ABC):
    """Runs kernels in the place of a module's code.

    Kernels run also where no gradients are wanted, so that training and inference compute the same function.
    """

    statistics: RegionStatistics
    fallback: Runner | None
    """Runs in place of the kernels where the input is not on CUDA; None: the kernel's reference runs there."""
    held: HeldMemoryCounter = field(init=False)
    compiled_region: CompiledRegion | None = field(default=None, init=False)
    """Applies the rule in compiled code; None where a runner around this one does."""
    compresses: bool = field(default=False, init=False)
    """Whether the kernels save tensors that tolerate rounding as codes of 8 bits."""
    tile: int | None = field(default=None, init=False)
    """The tokens that kernels compute at a time where they can; None: all."""
    has_mlp = False
    """Whether it computes an MLP by a kernel, which may do so in tiles of tokens."""
    wants_tape = False
    """Whether a tape around the kernels saves fewer of the other tensors than autograd does by itself."""

    def __post_init__(self) -> None:
        self.held = HeldMemoryCounter(self.statistics)

    @property
    def note(self) -> str:  # type: ignore[override]
        return self._what() if self.fallback is None else f"{self._what()} on CUDA, else {self.fallback.note}"

    @abstractmethod
    def _what(self) -> str:
        """The name of the kernels, for explanations."""

    @abstractmethod
    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Compute ``forward(*args, **kwargs)`` by the kernels, or call it where they do not fit the arguments."""

    def run_kernel_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """The same, for ``torch.compile`` to trace in training."""
        return self.run_kernel(module, forward, args, kwargs)

    def run(self, module: Any, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self.fallback is not None and not self.is_where_kernels_are(args, kwargs):
            return self.fallback.run(module, forward, args, kwargs)
        return super().run(module, forward, args, kwargs)

    def run_training(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (has_layout(value) or value.is_nested):
                return self._run_without(module, forward, args, kwargs)
        self.statistics.dropped_outputs = []
        return self.run_kernel(module, forward, args, kwargs)

    def run_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_transformed():
            return forward(*args, **kwargs)
        if self.compiled_region is None:
            return self.run_kernel_compiled(module, forward, args, kwargs)
        return self.compiled_region.run(self.run_kernel_compiled, (module, forward, args, kwargs), {})

    def run_plain(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if is_transformed():
            return forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            return self.run_training(module, forward, args, kwargs)  # training and inference compute the same
        return self.run_kernel(module, forward, args, kwargs)

    def _run_without(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run without kernels: none knows how a DTensor is laid out over ranks, or a nested tensor over rows."""
        if self.fallback is not None:
            return self.fallback.run(module, forward, args, kwargs)
        name = pattern_of(self.statistics.name)  # one warning for all layers
        warn(f"{name} gets DTensors or nested tensors, which no kernel takes, so the module itself runs.")
        return forward(*args, **kwargs)

    def is_where_kernels_are(self, args: tuple, kwargs: dict) -> bool:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        return first is not None and (first.is_cuda or local.simulates_cuda)

    def compute(
        self, kind: tuple[Any, ...], x: Tensor, weights: Sequence[Tensor | None], kernels: Compute, as_written: Compute
    ) -> Any:
        """``kernels(x)``, with what they hold for backward counted: see ``HeldMemoryCounter.count``.

        The recipes that they record count for this runner's statistics.
        """
        self.held.count(kind, x, weights, kernels, as_written)
        if torch.compiler.is_compiling():  # compiled code records nothing
            return kernels(x)
        outer, local.statistics = local.statistics, self.statistics
        try:
            return kernels(x)
        finally:
            local.statistics = outer


class PlainRunner(Runner):
    """Runs forward as it is: in the place of a kernel off CUDA, where a tape around sees the module's ops."""

    def __init__(self, statistics: RegionStatistics, note: str = "its ops are on the tape around it"):
        self.statistics = statistics
        self.note = note

    def run(self, module: nn.Module | None, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work, which our Functions do not support."""
    if torch.compiler.is_compiling():  # the compiler always has an interpreter of torch.func (torch 2.11 and 2.13)
        return forward_ad._current_level >= 0
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def kernel_of(runner: Runner | None) -> KernelRunner | None:
    """The runner itself if it runs kernels, or else the one inside of it that does; None if there is none."""
    while runner is not None and not isinstance(runner, KernelRunner):
        runner = getattr(runner, "inner", None)
    return runner


PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)
"""The types of tensors that kernels take. Another may compute something else where it is the weight of a Linear."""


def is_plain_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether ``module`` is a Linear, and calling it does nothing else."""
    return module is not None and base_of(module) is nn.Linear and not is_hooked(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling ``module`` does more than its class's forward does."""
    return bool(
        not callable(module.forward)  # torch's frontend guards this, and nothing in ``vars``
        or "forward" in vars(module)
        or type(module).__call__ is not nn.Module.__call__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _has_any_global_hook()
    )


def only_argument(args: tuple, kwargs: dict) -> Tensor:
    (x,) = (*args, *kwargs.values())
    return values_of(x)
