"""RMSNorms and LayerNorms: recognized by their formula, computed by ``kernels.rms_norm`` and ``kernels.layer_norm``.

A kernel holds the norm's input and one number for each row, or two. It also records how to make the output again, so
that a scope around may drop the output wherever autograd saves it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recompute.compiled.runner import Forward
from recompute.engine.reachable_objects import base_of
from recompute.engine.thread_state import local
from recompute.substitution.formula_tracer import TracerInDtype
from recompute.substitution.kernel_runner import PLAIN_TENSORS, KernelRunner, only_argument
from recompute.substitution.module_formula import Formula, formula_of
from recompute.substitution.settings import ANY_SETTINGS, Settings
from recompute.substitution.trial import computes_the_same

Operands = tuple[Tensor | None, ...]
"""What a norm's kernel reads beside the input: a weight, and for a LayerNorm a bias."""


@dataclass(frozen=True)
class KernelRMSNorm:
    """``rms_norm(x, weight, eps, casting)``, where ``weight`` is the name of an attribute, or None."""

    weight: str | None
    eps: float | None
    """None: that of ``torch.nn.RMSNorm``, the epsilon of the dtype in which it computes."""
    casting: str
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that the module computes this for, of both its input and its weight; None: for all."""
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    def __str__(self) -> str:
        return f"rms_norm ({self.casting} casting)"

    def operands(self, module: nn.Module, x: Tensor) -> Operands | None:
        """The weight; None where ``module`` is another than it was, or broadcasts it, which the kernel does not do."""
        if not self.settings.are_those_of(module) or not self.takes(x.dtype):
            return None
        if self.weight is None:
            return (None,)
        weight = getattr(module, self.weight)
        if self.dtypes is not None and weight.dtype is not x.dtype:
            return None
        return (weight,) if type(weight) in PLAIN_TENSORS and weight.shape == x.shape[-1:] else None

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the module computes this for an input of a dtype."""
        return self.dtypes is None or dtype in self.dtypes

    def compute(self, x: Tensor, weight: Tensor | None) -> Tensor:
        from recompute.kernels.rms_norm import rms_norm

        return rms_norm(x, weight, self._eps_for(x), self.casting)

    def _eps_for(self, x: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps


@dataclass(frozen=True)
class KernelLayerNorm:
    """``layer_norm(x, weight, bias, eps)``, where ``weight`` and ``bias`` are names of attributes, or None."""

    weight: str | None
    bias: str | None
    eps: float
    width: int | None
    """How many columns the module takes; None: as many as the weight has."""
    is_functional: bool
    """Whether the module calls ``torch.nn.functional.layer_norm`` on what it is given. That wants parameters of the
    input's dtype, and autocast casts all of them. Else the module itself computes in float32."""
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    def __str__(self) -> str:
        return "layer_norm"

    def operands(self, module: nn.Module, x: Tensor) -> Operands | None:
        """Weight and bias; None where the kernel does not take what the module takes, or takes what it refuses.

        None also where ``module`` is another than it was.
        """
        operands = tuple([None if name is None else getattr(module, name) for name in (self.weight, self.bias)])
        if self.width is not None and x.shape[-1:] != (self.width,):
            return None
        given = [each for each in operands if each is not None]
        casts = not self.is_functional or _autocasts_layer_norm(x)
        fit = [each.shape == x.shape[-1:] and (casts or each.dtype is x.dtype) for each in given]
        plain = [type(each) in PLAIN_TENSORS for each in given]
        return operands if all(fit) and all(plain) and self.settings.are_those_of(module) else None

    def compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        from recompute.kernels.layer_norm import layer_norm

        return layer_norm(self._cast(x), weight, bias, self.eps)

    def _cast(self, x: Tensor) -> Tensor:
        """What autocast makes of ``x``."""
        is_narrow = x.dtype in (torch.bfloat16, torch.float16)
        return x.float() if self.is_functional and is_narrow and _autocasts_layer_norm(x) else x


KernelNorm = KernelRMSNorm | KernelLayerNorm


def _autocasts_layer_norm(x: Tensor) -> bool:
    """Whether autocast runs PyTorch's layer_norm in float32 here. On the CPU it does not (torch 2.11 to 2.15)."""
    device = x.device.type
    return device != "meta" and (device != "cpu" or local.simulates_cuda) and torch.is_autocast_enabled(device)


def find_norm(module: nn.Module) -> KernelNorm | None:
    """The norm over the last dimension that ``module`` computes, if that is all it does."""
    norm = _find_norm(module)
    if norm is None or type(module) is nn.RMSNorm:
        return None if norm is None else replace(norm, settings=Settings.of(module))
    weight = next(module.parameters(), None)
    width = 8 if weight is None else weight.numel()
    if isinstance(norm, KernelLayerNorm) and norm.width is not None:
        width = norm.width

    def compute(x: Tensor) -> Tensor | None:
        operands = norm.operands(module, x)
        return None if operands is None else norm.compute(x, *operands)

    if (weight is None or weight.dim() == 1) and not computes_the_same(module, norm, compute, width):
        return None
    return replace(norm, settings=Settings.of(module))


def _find_norm(module: nn.Module) -> KernelNorm | None:
    if type(module) is nn.RMSNorm:
        if len(module.normalized_shape) != 1:
            return None
        return KernelRMSNorm(None if module.weight is None else "weight", module.eps, "none")
    formula = formula_of(module)
    return _norm_that_asks(module) if formula is None else _norm_of(formula)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _norm_that_asks(module: nn.Module) -> KernelRMSNorm | None:
    """The norm that ``module`` computes if it asks for the dtype of its weight or of its input, and both have one."""
    if len(list(module.parameters())) != 1:
        return None
    formulas = {dtype: formula_of(module, functools.partial(TracerInDtype, dtype)) for dtype in _DTYPES}
    norms = {dtype: None if formula is None else _norm_of(formula) for dtype, formula in formulas.items()}
    found = {
        dtype: replace(norm, dtypes=None)
        for dtype, norm in norms.items()
        if isinstance(norm, KernelRMSNorm) and norm.weight is not None and norm.takes(dtype)
    }
    if len(set(found.values())) != 1:
        return None
    return replace(next(iter(found.values())), dtypes=frozenset(found))


def _norm_of(formula: Formula) -> KernelNorm | None:
    if (found := _functional_layer_norm(formula) or _functional_rms_norm(formula)) is not None:
        return found
    for pattern, make_norm in _patterns():
        if formula.tree == pattern.tree:
            numbers = dict(zip(pattern.numbers, formula.numbers, strict=True))
            eps = numbers.pop(_EPS)
            if all(expected == found for expected, found in numbers.items()):
                return make_norm(formula.names, eps)
    return None


def _functional_layer_norm(formula: Formula) -> KernelLayerNorm | None:
    """A call of ``torch.nn.functional.layer_norm``, or one on all in float32, whose result is cast back."""
    x: Any = ("input", 0)
    match formula.tree:
        case ("layer_norm", given, shape, weight, bias, ("number", 0)) if given == x:
            parameters, is_functional = (weight, bias), True
        case ("to", ("layer_norm", ("to", given, torch.float32), shape, weight, bias, ("number", 0)), dtype) if (
            given == x and dtype == ("dtype", x)
        ):
            parameters, is_functional = (weight, bias), False
        case _:
            return None
    names: list[str | None] = []
    for parameter in parameters:
        match parameter:
            case None:
                names.append(None)
            case ("attribute", int(index)) if is_functional:
                names.append(formula.names[index])
            case ("to", ("attribute", int(index)), torch.float32) if not is_functional:
                names.append(formula.names[index])
            case _:
                return None
    width: int | None = None
    match shape:
        case (int(width),):
            pass
        case ("getattr", ("attribute", int(index)), "shape") if formula.names[index] == names[0]:
            pass
        case _:
            return None
    return KernelLayerNorm(names[0], names[1], formula.numbers[0], width, is_functional)


def _functional_rms_norm(formula: Formula) -> KernelRMSNorm | None:
    """A call of ``torch.nn.functional.rms_norm`` over the last dimension."""
    match formula.tree:
        case ("rms_norm", ("input", 0), shape, weight, None | ("number", 0)):
            eps = formula.numbers[0] if formula.numbers else None
        case _:
            return None
    match weight:
        case None:
            name = None
        case ("attribute", int(index)):
            name = formula.names[index]
        case _:
            return None
    of_input = ("getattr", ("input", 0), "shape")
    match shape:
        case (int(),) | (("size", ("input", 0), -1),):
            pass
        case (("getitem", given, -1),) | ("getitem", given, slice(start=-1, stop=None, step=None)) if given == of_input:
            pass
        case ("getattr", ("attribute", int(index)), "shape") if formula.names[index] == name:
            pass
        case _:
            return None
    return KernelRMSNorm(name, eps, "none")


_EPS = 0.1234567  # stands for any epsilon in the patterns


class _LlamaPattern(nn.Module):
    def __init__(self, weight: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1)) if weight else None
        self.bias = nn.Parameter(torch.empty(1)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + _EPS)
        return hidden.to(x.dtype) if self.weight is None else self.weight * hidden.to(x.dtype)


class _T5Pattern(_LlamaPattern):
    """As T5's: what is normalized is not rounded, unless its dtype is narrower than that in which it was normalized."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        assert self.weight is not None
        return self.weight * (x * torch.rsqrt(variance + _EPS))


class _LateCastPattern(_LlamaPattern):
    """As CPM-Ant's: only the square is computed in a wider dtype by name, and the product because of that."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        assert self.weight is not None
        return self.weight * (x * torch.rsqrt(variance + _EPS)).to(x.dtype)


class _NarrowT5Pattern(_LlamaPattern):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        assert self.weight is not None
        return self.weight * (x * torch.rsqrt(variance + _EPS)).to(self.weight.dtype)


class _GemmaPattern(_LlamaPattern):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        return hidden.type_as(x) if self.weight is None else (hidden * (1.0 + self.weight.float())).type_as(x)


class _RoundedOncePattern(_LlamaPattern):
    """As Olmo2RMSNorm: the weight scales before the result is rounded."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        assert self.weight is not None
        return (self.weight * hidden).to(x.dtype)


class _HeliumPattern(_LlamaPattern):
    """The same, in which the weight is cast by name. In a product with float32 it is cast anyway."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPS)
        assert self.weight is not None
        return (self.weight.to(torch.float32) * hidden).to(x.dtype)


class _Gemma4Pattern(_LlamaPattern):
    """As Gemma 3n and Gemma 4 write it, with a power in the place of a root, and no 1 beside the weight."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        hidden = hidden * torch.pow(hidden.pow(2).mean(-1, keepdim=True) + _EPS, -0.5)
        return hidden.type_as(x) if self.weight is None else (hidden * self.weight.float()).type_as(x)


class _CoherePattern(_LlamaPattern):
    def forward(self, x: Tensor) -> Tensor:
        hidden = x.float()
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        hidden = (hidden - mean) * torch.rsqrt(variance + _EPS)
        if self.weight is not None:
            hidden = self.weight.float() * hidden
        if self.bias is not None:
            hidden = hidden + self.bias.float()
        return hidden.type_as(x)


@functools.cache
def _patterns() -> tuple[tuple[Formula, Callable[[tuple[str, ...], float], KernelNorm]], ...]:
    """Formulas, and what makes of the names of attributes and of an epsilon the norm that each computes."""

    def rms_norm(casting: str, *dtypes: torch.dtype) -> Callable[[tuple[str, ...], float], KernelNorm]:
        those = frozenset(dtypes) if dtypes else None
        return lambda names, eps: KernelRMSNorm(names[0] if names else None, eps, casting, those)

    def layer_norm(names: tuple[str, ...], eps: float) -> KernelNorm:
        weight, bias = (*names, None, None)[:2]
        return KernelLayerNorm(weight, bias, eps, width=None, is_functional=False)

    modules = [
        (_LlamaPattern(), rms_norm("llama")),
        (_GemmaPattern(), rms_norm("gemma")),
        (_LlamaPattern(weight=False), rms_norm("llama")),
        (_LateCastPattern(), rms_norm("llama")),
        (_T5Pattern(), rms_norm("llama", torch.float32, torch.float64)),
        (_NarrowT5Pattern(), rms_norm("llama", *_DTYPES)),
        (_RoundedOncePattern(), rms_norm("none")),
        (_HeliumPattern(), rms_norm("none")),
        (_Gemma4Pattern(), rms_norm("none")),
        (_Gemma4Pattern(weight=False), rms_norm("none")),
        (_CoherePattern(), layer_norm),
        (_CoherePattern(bias=True), layer_norm),
        (_CoherePattern(weight=False), layer_norm),
    ]
    return tuple((formula, make_norm) for module, make_norm in modules if (formula := formula_of(module)) is not None)


@dataclass
class KernelNormRunner(KernelRunner):
    norm: KernelNorm

    def _what(self) -> str:
        return str(self.norm)

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        x = only_argument(args, kwargs)
        operands = self.norm.operands(module, x)
        if operands is None:
            return forward(*args, **kwargs)

        def kernel(x: Tensor) -> Tensor:
            return self.norm.compute(x, *operands)

        return self.compute((base_of(module),), (x,), operands, kernel, forward)
