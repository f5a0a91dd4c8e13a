"""Root-mean-square norms: recognized by their formula, computed by ``kernels.rms_norm``.

The kernel holds the norm's input and one number for each row. It also records how to make the output again, so that a
scope around may drop the output wherever autograd saves it. In decoder layers ``LazyNorm`` goes further: the Linears
that read a norm are computed together with it, by ``kernels.norm_linears``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from recompute.compiled.runner import Forward
from recompute.engine.checkpoint.module_state import base_of
from recompute.substitution.kernel_runner import KernelRunner, only_argument
from recompute.substitution.lazy_tensors import LazyTensor, mode_of
from recompute.substitution.module_formula import Formula, formula_of


@dataclass(frozen=True)
class Norm:
    """``rms_norm(x, weight, eps, casting)``, where ``weight`` is the name of an attribute, or None."""

    weight: str | None
    eps: float
    casting: str

    def weight_of(self, module: nn.Module) -> Tensor | None:
        return None if self.weight is None else getattr(module, self.weight)


def find_norm(module: nn.Module) -> Norm | None:
    """The root-mean-square norm that ``module`` computes, if that is all it does."""
    if type(module) is nn.RMSNorm:
        if len(module.normalized_shape) != 1 or module.eps is None:
            return None
        return Norm(None if module.weight is None else "weight", module.eps, "none")
    formula = formula_of(module)
    if formula is None:
        return None
    for pattern, casting in _patterns():
        if formula.tree == pattern.tree:
            numbers = dict(zip(pattern.numbers, formula.numbers, strict=True))
            eps = numbers.pop(_EPS)
            if all(expected == found for expected, found in numbers.items()):
                return Norm(formula.names[0] if formula.names else None, eps, casting)
    return None


_EPS = 0.1234567  # stands for any epsilon in the patterns


class _LlamaPattern(nn.Module):
    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1)) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + _EPS)
        return hidden.to(x.dtype) if self.weight is None else self.weight * hidden.to(x.dtype)


class _GemmaPattern(_LlamaPattern):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        return hidden.type_as(x) if self.weight is None else (hidden * (1.0 + self.weight.float())).type_as(x)


@functools.cache
def _patterns() -> tuple[tuple[Formula, str], ...]:
    modules = [(_LlamaPattern(True), "llama"), (_GemmaPattern(True), "gemma"), (_LlamaPattern(False), "llama")]
    return tuple((formula, casting) for module, casting in modules if (formula := formula_of(module)) is not None)


@dataclass
class KernelNormRunner(KernelRunner):
    norm: Norm

    def _what(self) -> str:
        return f"rms_norm ({self.norm.casting} casting)"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        from recompute.kernels.rms_norm import rms_norm

        x = only_argument(args, kwargs)
        weight = self.norm.weight_of(module)
        if weight is not None and weight.shape != x.shape[-1:]:
            return forward(*args, **kwargs)  # the weight is broadcast, which the kernel does not do

        def kernel(x: Tensor) -> Tensor:
            return rms_norm(x, weight, self.norm.eps, self.norm.casting)

        return self.compute((base_of(module),), (x,), [weight], kernel, forward)


LinearOperands = tuple[Tensor, Tensor | None]
"""A Linear's weight and bias."""

_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class LearnedLinears:
    """The Linears that read a norm's output: one run of a layer learns them, the next computes them with the norm."""

    def __init__(self) -> None:
        self._known: tuple[tuple[weakref.ref[Tensor], weakref.ref[Tensor] | None], ...] = ()

    @property
    def count(self) -> int:
        return len(self._known)

    def together_with(self, weight: Tensor) -> list[LinearOperands] | None:
        """All of them, if ``weight`` is one of theirs, and none of them is gone or sharded away; else None."""
        found = [(reference(), None if bias is None else bias()) for reference, bias in self._known]
        known = [(each, bias) for each, bias in found if each is not None and each.untyped_storage().nbytes()]
        is_whole = len(known) == len(found) and any(each is weight for each, _ in known)
        return known if is_whole else None

    def learn(self, normed: LazyNorm) -> None:
        """Call this at the end of a run. The Linears that read this norm are expected to read it in the next, too."""
        read = [] if normed.is_needed_whole else normed.read
        is_as_known = len(read) == len(self._known) and all(
            [reference() is weight for (reference, _), (weight, _) in zip(self._known, read, strict=True)]
        )
        if not is_as_known:
            suited = read if all(map(normed.suits, read)) else []
            self._known = tuple(
                (weakref.ref(weight), None if bias is None else weakref.ref(bias)) for weight, bias in suited
            )


class LazyNorm(LazyTensor):
    """A norm's output. The Linears that are known to read it are computed all at once, together with the norm."""

    stream: Tensor
    """The norm's input, to be used in the residual sum. If the Linears are fused, their autograd node returns it."""
    read: list[LinearOperands]
    """Weight and bias of the Linears that were applied to this."""
    is_needed_whole: bool
    """Whether anything but a Linear has asked for its values."""
    _linears: LearnedLinears
    _together: Callable[[Tensor, list[LinearOperands]], tuple[Sequence[Tensor], Tensor]]
    _outputs: dict[tuple[int, int], Tensor] | None

    @staticmethod
    def of(
        x: Tensor,
        weight: Tensor | None,
        compute: Callable[[], Tensor],
        linears: LearnedLinears,
        together: Callable[[Tensor, list[LinearOperands]], tuple[Sequence[Tensor], Tensor]],
    ) -> LazyNorm:
        """Defer ``compute()``, the norm of ``x``.

        Args:
            weight: the norm's.
            linears: the Linears that are expected to read the norm.
            together: computes from ``x`` and these Linears their outputs, and ``stream``.
        """
        made = LazyNorm(tuple(x.shape), (x, weight), compute)
        made.stream, made.read, made.is_needed_whole = x, [], False
        made._linears, made._together, made._outputs = linears, together, None
        return made

    def suits(self, operands: LinearOperands) -> bool:
        """Whether a Linear may be computed with the norm: its tensors are plain and have the norm's dtype."""
        return all(each is None or (type(each) in _PLAIN and each.dtype is self.dtype) for each in operands)

    @property
    def is_lazy(self) -> bool:
        return not self.is_needed_whole

    def value(self) -> Tensor:
        self.is_needed_whole = True
        return super().value()

    def fused(self, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function is not F.linear or not args or args[0] is not self:
            return NotImplemented
        weight, bias = _linear_operands(*args[1:], **kwargs)
        self.read.append((weight, bias))
        if mode_of(self.device) != self._mode:  # such as in a no_grad block, which the other Linears are not in
            return F.linear(super().value(), weight, bias)
        if self._outputs is None and (known := self._linears.together_with(weight)) is not None:
            outputs, self.stream = self._together(self.stream, known)
            self._outputs = {_identity(*each): output for each, output in zip(known, outputs, strict=True)}
        output = None if self._outputs is None else self._outputs.pop(_identity(weight, bias), None)
        return F.linear(super().value(), weight, bias) if output is None else output


def _identity(weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    return id(weight), id(bias)


def _linear_operands(weight: Tensor, bias: Tensor | None = None) -> LinearOperands:
    return weight, bias
