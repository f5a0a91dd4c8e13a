"""A language model's head and the cross-entropy of its logits, computed together by ``kernels.linear_cross_entropy``.

The head returns ``LazyLogits``. A cross-entropy that gets these computes its loss from the head's input and weight, and
the logits are never made as a whole. For anything else that reads the logits they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from recompute.compiled.runner import Forward
from recompute.engine.dtensors import has_layout
from recompute.engine.thread_state import is_fake, local
from recompute.errors import warn
from recompute.kernels.linear_cross_entropy import held_nbytes
from recompute.kernels.linears import autocast_dtype, cast, check_dtypes
from recompute.substitution.head_operands import LossObserver
from recompute.substitution.held_memory import HeldMemory
from recompute.substitution.kernel_runner import (
    PLAIN_TENSORS,
    KernelRunner,
    is_plain_linear,
    is_transformed,
    only_argument,
)
from recompute.substitution.lazy_logits import LazyLogits
from recompute.units import humanize


@dataclass
class KernelHeadRunner(KernelRunner):
    """Runs a Linear that a rule names. In training, and without gradients, its output is lazy."""

    logits_bytes: int | None = None
    """The memory for logits, as ``linear_cross_entropy`` takes it."""
    observe: LossObserver | None = field(default=None, init=False)
    observe_logits: Callable[[], None] | None = field(default=None, init=False)
    """Called whenever logits are computed because something other than a loss reads them."""
    _readers: list[str] = field(default_factory=list, init=False)
    """The names of these functions."""

    def _what(self) -> str:
        room = "" if self.logits_bytes is None else f", with {humanize(self.logits_bytes)} for logits"
        return f"kernel: linear_cross_entropy{room} (if nothing else reads the logits)"

    @property
    def note(self) -> str:  # type: ignore[override]
        note, readers = super().note, ", ".join(self._readers)
        return f"{note}; logits were made for {readers}" if readers else note

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if (is_fake() and not local.simulates_cuda) or not is_plain_linear(module):
            return forward(*args, **kwargs)
        if type(module.weight) not in PLAIN_TENSORS:
            return forward(*args, **kwargs)
        x = only_argument(args, kwargs)
        weight, bias, narrow = module.weight, module.bias, autocast_dtype(x.device.type)
        check_dtypes("linear_cross_entropy", {"hidden": x, "weight": weight, "bias": bias}, narrow)
        (hidden,) = cast((x,), narrow)  # the logits have its dtype
        observe = self.observe if torch.is_grad_enabled() else None
        made = LazyLogits.of(hidden, weight, bias, observe, self._count, self.logits_bytes)
        if torch.is_grad_enabled():
            made.tell(self._note_reader)
        return made

    def _note_reader(self, name: str) -> None:
        if name not in self._readers:
            self._readers.append(name)
        if self.observe_logits is not None:
            self.observe_logits()

    def run_kernel_compiled(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        _warn_of_logits(self.statistics.name)
        return forward(*args, **kwargs)

    def run_plain(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or is_transformed():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        return self.run_kernel(module, forward, args, kwargs)  # as for a reference model

    def _count(self, hidden: Tensor, weight: Tensor, logits_nbytes: int) -> None:
        """Count a loss that was computed without logits. With them it would hold ``logits_nbytes``."""
        kernels = HeldMemory(held_nbytes(hidden, weight, self.logits_bytes), 0, holds_input=True)
        self.held.count_known(hidden, kernels, HeldMemory(logits_nbytes, 0, holds_input=weight.requires_grad))


def is_head(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether kernels compute losses in place of ``module``. When it runs, FSDP has gathered a sharded weight."""
    return is_plain_linear(module) and (type(module.weight) in PLAIN_TENSORS or has_layout(module.weight))


def why_no_head(module: nn.Module) -> str:
    """Why ``module`` is no head."""
    if not is_plain_linear(module):
        return f"a {type(module).__name__}, or has hooks; expected a plain nn.Linear"
    return f"a Linear with a {type(module.weight).__name__} as its weight, which no kernel takes"


def held_by_loss(logits: Tensor, weight: Tensor, logits_bytes: float | None = None) -> int:
    """The bytes that a head's loss holds until backward, beside its arguments, if it is computed without the logits.

    logits: the head's, (..., V), on any device. weight: (V, H).
    logits_bytes: the memory for logits, as ``linear_cross_entropy`` takes it.
    """
    hidden = torch.empty((*logits.shape[:-1], weight.shape[1]), dtype=logits.dtype, device="meta")
    return held_nbytes(hidden, weight, logits_bytes)


def _warn_of_logits(name: str) -> None:
    warn(
        f"{name} is compiled, so its logits are made and held for backward, although its rule asks for a loss without "
        "logits. Compile only the layers (`layer.compile()` for each), or give the head no rule, or `action: keep`."
    )


# torch._dynamo.assume_constant_result does this, too, but loads the compiler. It is called when code is compiled.
_warn_of_logits._dynamo_marked_constant = True  # type: ignore[attr-defined]
