"""RMSNorms and LayerNorms: recognized by their formula, computed by ``kernels.rms_norm`` and ``kernels.layer_norm``.

A kernel holds the norm's input and one number for each row, or two. It also records how to make the output again, so
that a scope around may drop the output wherever autograd saves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from recompute.compiled.runner import Forward
from recompute.engine.reachable_objects import base_of
from recompute.engine.thread_state import local
from recompute.kernels.layer_norm import layer_norm
from recompute.kernels.norm_ops import CASTINGS, LAYER_NORM
from recompute.kernels.rms_norm import rms_norm
from recompute.substitution.formula_writer import INPUT, Formula, add, cast, mul, parameters_in
from recompute.substitution.formulas import Conditions, formula_of, takes_one_argument
from recompute.substitution.kernel_runner import PLAIN_TENSORS, KernelRunner, only_argument
from recompute.substitution.settings import ANY_SETTINGS, Settings

Operands = tuple[Tensor | None, Tensor | None]
"""A norm's kernel reads these beside the input: a weight and a bias."""


@dataclass(frozen=True)
class KernelNorm:
    """A norm that the kernels compute. ``weight`` and ``bias`` are names of the module's attributes, or None."""

    weight: str | None
    bias: str | None
    eps: float | None
    """None: the epsilon of the dtype that it computes in, as ``torch.nn.RMSNorm`` has it."""
    casting: str
    """Of an RMSNorm, as ``rms_norm`` takes it; or ``LAYER_NORM``."""
    width: int | None = None
    """How many columns the module takes; None: as many as the weight has."""
    is_functional: bool = False
    """Whether the module calls ``torch.nn.functional.layer_norm`` on its input. That wants parameters of the
    input's dtype, and autocast casts all of them. Else the module itself computes in float32."""
    dtypes: frozenset[torch.dtype] | None = None
    """The dtypes that the module computes this for, of both its input and its weight; None: for all."""
    settings: Settings = field(default=ANY_SETTINGS, compare=False)

    @property
    def is_rms(self) -> bool:
        return self.casting != LAYER_NORM

    def __str__(self) -> str:
        return f"rms_norm ({self.casting} casting)" if self.is_rms else "layer_norm"

    def operands(self, module: nn.Module, x: Tensor) -> Operands | None:
        """Weight and bias; None where only one of kernel and module takes ``x``, or where ``module`` has changed."""
        if not self.settings.are_those_of(module) or (self.width is not None and x.shape[-1:] != (self.width,)):
            return None
        weight, bias = [None if name is None else getattr(module, name) for name in (self.weight, self.bias)]
        given = [each for each in (weight, bias) if each is not None]
        if not all([type(each) in PLAIN_TENSORS and each.shape == x.shape[-1:] for each in given]):
            return None
        casts = self.dtypes is None and not (self.is_functional and not _autocasts_layer_norm(x))
        if not (casts or all([each.dtype is x.dtype for each in given])):
            return None
        return (weight, bias) if self.dtypes is None or x.dtype in self.dtypes else None

    def compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
        if self.is_rms:
            return rms_norm(x, weight, eps, self.casting)
        is_narrow = x.dtype in (torch.bfloat16, torch.float16)
        x = x.float() if self.is_functional and is_narrow and _autocasts_layer_norm(x) else x  # as autocast does
        return layer_norm(x, weight, bias, eps)


def _autocasts_layer_norm(x: Tensor) -> bool:
    """Whether autocast runs PyTorch's layer_norm in float32 here. On the CPU it does not (torch 2.11 to 2.15)."""
    device = x.device.type
    return device != "meta" and (device != "cpu" or local.simulates_cuda) and torch.is_autocast_enabled(device)


def find_norm(module: nn.Module, *, written_out: bool = True) -> KernelNorm | None:
    """The norm over the last dimension that ``module`` computes, if that is all it does.

    written_out: whether it may be one that is written out in several ops.
    """
    if type(module) in (nn.RMSNorm, nn.LayerNorm):
        norm = _torchs_own(module)
    else:
        norm = _norm_of(_Formulas(module), written_out) if _may_be_a_norm(module) else None
    return None if norm is None else replace(norm, settings=Settings.of(module))


def _torchs_own(module: Any) -> KernelNorm | None:
    if len(module.normalized_shape) != 1:
        return None
    weight, bias = (None if getattr(module, name, None) is None else name for name in ("weight", "bias"))
    if type(module) is nn.RMSNorm:
        return KernelNorm(weight, None, module.eps, "none")
    return KernelNorm(weight, bias, module.eps, LAYER_NORM, module.normalized_shape[0], is_functional=True)


def _may_be_a_norm(module: nn.Module) -> bool:
    """Whether it may be one, as far as can be told without looking at its forward."""
    if any(module.children()) or any(True for _ in module.buffers()):
        return False
    return all(each.dim() == 1 for each in module.parameters()) and takes_one_argument(module)


class _Formulas:
    """The formulas of a module in several dtypes, each looked for when it is first asked for."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.parameters = len(list(module.parameters()))
        own = next((each.dtype for each in module.parameters()), torch.float32)
        self.own = own if own in _DTYPES else torch.float32
        """The dtype of the module, if norms are traced in it; else float32."""
        self._known: dict[Conditions, Formula | None] = {}

    def of(self, x: torch.dtype, weight: torch.dtype | None = None, **others: Any) -> Formula | None:
        conditions = Conditions(dtype=x, parameters=x if weight is None else weight, **others)
        if conditions not in self._known:
            self._known[conditions] = formula_of(self._module, conditions)
        return self._known[conditions]

    def are_the_same_everywhere(self) -> bool:
        """Whether the module computes the same of any rows, and in ``eval()`` of a single one."""
        expected = self.of(self.own)
        return self.of(self.own, rows=None) == expected == self.of(self.own, training=False, rows=(1, 1))


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""A norm is traced with input and weight in each of these. Then they get two of these, so that casts differ."""


def _norm_of(formulas: _Formulas, written_out: bool) -> KernelNorm | None:
    formula = formulas.of(formulas.own)
    names = parameters_in(formula)
    if formula is None or len(names) > 2 or any("." in name for name in names):
        return None
    found = _functional(formulas)
    if found is None and written_out:
        found = _written_out(formulas, names)
    return found if found is not None and formulas.are_the_same_everywhere() else None


def _functional(formulas: _Formulas) -> KernelNorm | None:
    """A norm that calls torch's function, or casts all to float32 for ``layer_norm``, and the result back."""

    def are_alike() -> bool:
        return len({formulas.of(dtype) for dtype in _DTYPES}) == 1

    match formulas.of(torch.float32):
        case ("rms_norm", ("input",), (float(),), None | ("parameter", str()) as weight, eps) if are_alike():
            return KernelNorm(weight and weight[1], None, eps, "none")
        case (
            "layer_norm",
            ("input",),
            (float(width),),
            None | ("parameter", str()) as weight,
            None | ("parameter", str()) as bias,
            float(eps),
        ):
            names = weight and weight[1], bias and bias[1]
            norm = KernelNorm(*names, eps, LAYER_NORM, int(width), is_functional=are_alike())
            return norm if norm.is_functional or _matched(formulas, _in_float32, norm) is not None else None
    return None


_EPS = math.nan
"""Stands for any epsilon in a pattern."""
Pattern = Callable[..., Formula]
"""A formula of an input and parameters of given dtypes."""


def _matched(formulas: _Formulas, pattern: Pattern, *given: Any) -> float | None:
    """The epsilon of a module, if it computes what the pattern does in all dtypes; else None."""
    eps = None
    for dtypes in (*zip(_DTYPES, _DTYPES, strict=True), (torch.float16, torch.bfloat16)):
        found = _epsilon(formulas.of(*dtypes), pattern(*dtypes, *given))
        if found is None or eps not in (None, found):
            return None  # most modules are no norms: each formula takes a trace
        eps = found
    return eps


def _epsilon(formula: Formula, pattern: Formula) -> float | None:
    """The number that a formula has in place of a pattern's epsilon; None if it is another formula."""
    if pattern is _EPS:
        return formula if type(formula) is float else None
    if not isinstance(pattern, tuple) or not isinstance(formula, tuple) or len(pattern) != len(formula):
        return None
    found = {_epsilon(one, other) for one, other in zip(formula, pattern, strict=True) if one != other}
    return found.pop() if len(found) == 1 else None


def _of(name: str, dtype: torch.dtype, to: torch.dtype) -> Formula:
    return cast(("parameter", name), dtype, to)


def _in_float32(x: torch.dtype, weight: torch.dtype, norm: KernelNorm) -> Formula:
    parameters = (None if name is None else _of(name, weight, torch.float32) for name in (norm.weight, norm.bias))
    wide = cast(INPUT, x, torch.float32)
    return cast(("layer_norm", wide, (float(norm.width or 0),), *parameters, _EPS), torch.float32, x)


def _layer_norm_by(x: torch.dtype, parameters: torch.dtype, weight: str | None, bias: str | None) -> Formula:
    """A LayerNorm as Cohere writes it."""
    wide = cast(INPUT, x, torch.float32)
    centered = ("sub", wide, ("mean", wide))
    normed = mul(centered, ("rsqrt", add(("mean", mul(centered, centered)), _EPS)))
    normed = normed if weight is None else mul(normed, _of(weight, parameters, torch.float32))
    normed = normed if bias is None else add(normed, _of(bias, parameters, torch.float32))
    return cast(normed, torch.float32, x)


def _rms_norm_by(x: torch.dtype, parameter: torch.dtype, weight: str | None, casting: str) -> Formula:
    """``llama`` rounds what is normalized, and then what the weight scales; the others round once."""
    wide = cast(INPUT, x, torch.float32)
    normed = mul(wide, ("rsqrt", add(("mean", mul(wide, wide)), _EPS)))
    if weight is None:
        return cast(normed, torch.float32, x)
    if casting == "llama":
        dtype = torch.promote_types(x, parameter)
        return mul(_of(weight, parameter, dtype), cast(cast(normed, torch.float32, x), x, dtype))
    gain = _of(weight, parameter, torch.float32)
    return cast(mul(normed, add(1.0, gain) if casting == "gemma" else gain), torch.float32, x)


def _written_out(formulas: _Formulas, names: list[str]) -> KernelNorm | None:
    for weight, bias in itertools.permutations([*names, None, None][:2]):
        if (eps := _matched(formulas, _layer_norm_by, weight, bias)) is not None:
            return KernelNorm(weight, bias, eps, LAYER_NORM)
    if len(names) > 1:
        return None
    weight = names[0] if names else None
    for casting in CASTINGS if names else ("none",):
        if (eps := _matched(formulas, _rms_norm_by, weight, casting)) is not None:
            return KernelNorm(weight, None, eps, casting)
    return _norm_in_one_dtype(formulas, weight) if formulas.parameters == 1 else None


def _norm_in_one_dtype(formulas: _Formulas, weight: str | None) -> KernelNorm | None:
    """The norm that a module computes where input and weight have one dtype, as T5's does, which asks for that."""
    best: KernelNorm | None = None
    for casting in CASTINGS:
        found = {dtype: _epsilon(formulas.of(dtype), _rms_norm_by(dtype, dtype, weight, casting)) for dtype in _DTYPES}
        eps = found[formulas.own]
        dtypes = {dtype for dtype, each in found.items() if each is not None and each == eps}
        dtypes |= {torch.float64} if torch.float32 in dtypes else set()
        if eps is not None and len(dtypes) > len((best and best.dtypes) or ()):
            best = KernelNorm(weight, None, eps, casting, dtypes=frozenset(dtypes))
    return best


@dataclass
class KernelNormRunner(KernelRunner):
    norm: KernelNorm

    def _what(self) -> str:
        return f"kernel: {self.norm}"

    def run_kernel(self, module: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> Any:
        x = only_argument(args, kwargs)
        operands = self.norm.operands(module, x)
        if operands is None:
            return forward(*args, **kwargs)

        def kernel(x: Tensor) -> Tensor:
            return self.norm.compute(x, *operands)

        return self.compute((base_of(module),), x, operands, kernel, forward)
