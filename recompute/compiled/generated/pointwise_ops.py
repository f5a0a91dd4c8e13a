"""The ATen ops that generated kernels compute, one row each: anything else stays ATen's.

A row is trusted because ``tests/compiled/test_generated_ops.py`` has compared it on a GPU with ATen's kernel, over all
patterns of bits that the operands can have in 16-bit dtypes, and over millions in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes

from recompute.compiled.calls import Call, Use
from recompute.engine.cut.filled_memory import ALLOCATE

_ATEN = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOATS8 = {torch.float8_e4m3fn: 464.0, torch.float8_e5m2: 61439.99609375}
"""The dtypes that a kernel may cast to at its end, and the largest number that rounds to a finite one of each."""
TRITON_DTYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
}
"""The dtypes of tensors that a generated kernel may read and write."""


@dataclass(frozen=True)
class Row:
    """How to compute one element of an op's output."""

    operands: tuple[str, ...]
    """The arguments that are tensors, or numbers in their place."""
    expression: str | Callable[[dict[str, Any]], str | None]
    """In terms of the operands, in the dtype that they are computed in; or a function that makes it of all arguments.

    The function returns None if ATen does something else on such arguments.
    """
    promotion: Promotion | None = Promotion.DEFAULT
    """How the dtype to compute in follows from the operands; None: they have the output's."""
    takes_all: bool = False
    """Whether operands may be bool and integers, too."""
    masks: tuple[str, ...] = ()
    """The operands that are read as they are, and not in the dtype that is computed in."""


def cast_to_float8(x: str, dtype: torch.dtype) -> str:
    """The cast of a number in float32. ATen's releases differ on numbers that are too large."""
    special = torch.tensor([1e30, torch.inf, torch.nan]).to(dtype).view(torch.uint8).tolist()
    settings = ", ".join(map(str, [TRITON_DTYPES[dtype], FLOATS8[dtype], *special]))
    return f"functions.to_float8({x}, {settings})"


def text_of(number: float, dtype: str = "tl.float32") -> str:
    """A number as it stands in a kernel that computes in float32, or in float64 if that is ``dtype``."""
    number = float(number)
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {text}, {dtype})" if dtype == TRITON_DTYPES[torch.float64] else text


def _add_scaled(values: dict[str, Any], alpha: float) -> str:
    if alpha in (1, -1):
        return f"{values['self']} {'+' if alpha == 1 else '-'} {values['other']}"
    return f"functions.add_scaled({values['self']}, {values['other']}, {text_of(alpha)})"


def _div(values: dict[str, Any]) -> str | None:
    """ATen multiplies by the reciprocal of a number, in float32."""
    number = values["other"]
    if isinstance(number, str):
        return f"tl.div_rn({values['self']}, {number})"
    if isinstance(values["self"], (int, float)) or number == 0 or not math.isfinite(number):
        return None
    inverse = torch.tensor(1.0) / torch.tensor(float(number), dtype=torch.float32)
    return f"{values['self']} * {text_of(inverse.item())}"


def _pow(values: dict[str, Any]) -> str | None:
    x, dtype = values["self"], values["dtype"]
    powers = {
        1: x,
        2: f"{x} * {x}",
        3: f"functions.cube({x}, {dtype})",
        0.5: f"tl.sqrt_rn({x})",
        -0.5: f"functions.reciprocal_square_root({x})",
        -1: f"tl.div_rn(1.0, {x})",
    }
    return powers.get(values["exponent"])


def _gelu(values: dict[str, Any]) -> str:
    tanh = "_tanh" if values["approximate"] == "tanh" else ""
    if (gradient := values.get("grad_output")) is not None:
        return f"functions.gelu{tanh}_backward({gradient}, {values['self']})"
    return f"functions.gelu{tanh}({values['self']})"


def _floor_divide(values: dict[str, Any]) -> str | None:
    """Of integers, which Triton rounds towards zero."""
    number = values["other"]
    if values["dtype"] not in ("tl.int32", "tl.int64") or type(number) is not int or number <= 0:
        return None
    return f"functions.floor_divide({values['self']}, {number})"


def _clamp(values: dict[str, Any]) -> str | None:
    x, low, high = values["self"], values["min"], values["max"]
    found = x if low is None else f"tl.maximum({x}, {text_of(low, values['dtype'])})"
    found = found if high is None else f"tl.minimum({found}, {text_of(high, values['dtype'])})"
    return f"tl.where({x} != {x}, {x}, {found})"


def _threshold_backward(values: dict[str, Any]) -> str | None:
    return f"tl.where({values['self']} <= 0.0, 0.0, {values['grad_output']})" if values["threshold"] == 0 else None


def _unary(function: str) -> Row:
    return Row(("self",), f"{function}({{self}})", Promotion.INT_TO_FLOAT)


def _constant(number: float) -> Row:
    return Row((), f"tl.full((), {number}, {{dtype}})", None, takes_all=True)


def _compare(operator: str) -> Row:
    return Row(("self", "other"), f"{{self}} {operator} {{other}}", Promotion.ALWAYS_BOOL, takes_all=True)


_BINARY, _OF_OUTPUT = ("self", "other"), ("grad_output", "output")
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
ROWS: dict[Any, Row] = {
    _ATEN.add.Tensor: Row(_BINARY, lambda v: _add_scaled(v, v["alpha"])),
    _ATEN.add.Scalar: Row(_BINARY, lambda v: _add_scaled(v, v["alpha"])),
    _ATEN.sub.Tensor: Row(_BINARY, lambda v: _add_scaled(v, -v["alpha"])),
    _ATEN.sub.Scalar: Row(_BINARY, lambda v: _add_scaled(v, -v["alpha"])),
    _ATEN.rsub.Scalar: Row(_BINARY, lambda v: f"{v['other']} - {v['self']}" if v["alpha"] == 1 else None),
    _ATEN.mul.Tensor: Row(_BINARY, "{self} * {other}"),
    _ATEN.mul.Scalar: Row(_BINARY, "{self} * {other}"),
    _ATEN.div.Tensor: Row(_BINARY, _div, Promotion.INT_TO_FLOAT),
    _ATEN.div.Scalar: Row(_BINARY, _div, Promotion.INT_TO_FLOAT),
    _ATEN.pow.Tensor_Scalar: Row(("self",), _pow),
    _ATEN.neg.default: Row(("self",), "functions.negate({self})"),
    _ATEN.reciprocal.default: _unary("functions.reciprocal"),
    _ATEN.exp.default: _unary("math.exp"),
    _ATEN.exp2.default: _unary("functions.exp2"),
    _ATEN.log.default: _unary("math.log"),
    _ATEN.log2.default: _unary("math.log2"),
    # Triton's own takes a negative number without full precision for -0.
    _ATEN.floor.default: Row(("self",), "tl.where(({self} < 0) & ({self} > -1), -1.0, tl.floor({self}))"),
    _ATEN.sin.default: _unary("functions.sine"),
    _ATEN.cos.default: _unary("math.cos"),
    _ATEN.sqrt.default: _unary("tl.sqrt_rn"),
    _ATEN.rsqrt.default: _unary("functions.reciprocal_square_root"),
    _ATEN.tanh.default: _unary("functions.tanh"),
    _ATEN.sigmoid.default: _unary("functions.sigmoid"),
    _ATEN.silu.default: _unary("functions.silu"),
    _ATEN.gelu.default: Row(("self",), _gelu),
    _ATEN.silu_backward.default: Row(("grad_output", "self"), "functions.silu_backward({grad_output}, {self})"),
    _ATEN.sigmoid_backward.default: Row(_OF_OUTPUT, "functions.sigmoid_backward({grad_output}, {output}, {dtype})"),
    _ATEN.tanh_backward.default: Row(_OF_OUTPUT, "functions.tanh_backward({grad_output}, {output}, {dtype})"),
    _ATEN.gelu_backward.default: Row(("grad_output", "self"), _gelu),
    _ATEN.relu.default: Row(("self",), "functions.relu({self})"),
    _ATEN.abs.default: Row(("self",), "functions.magnitude({self})"),
    _ATEN.threshold_backward.default: Row(("grad_output", "self"), _threshold_backward),
    _ATEN.native_dropout_backward.default: Row(
        ("grad_output", "mask"), lambda v: f"{v['grad_output']} * {v['mask']} * {text_of(v['scale'])}"
    ),
    _ATEN.where.self: Row(
        ("condition", "self", "other"), "tl.where({condition}, {self}, {other})", None, True, ("condition",)
    ),
    _ATEN.masked_fill.Scalar: Row(
        ("self", "mask", "value"), "tl.where({mask}, {value}, {self})", None, True, ("mask",)
    ),
    _ATEN.clamp.default: Row(("self",), _clamp),
    _ATEN.zeros.default: _constant(0),
    _ATEN.new_zeros.default: _constant(0),
    _ATEN.zeros_like.default: _constant(0),
    **dict.fromkeys(ALLOCATE, _constant(0)),
    _ATEN.ones.default: _constant(1),
    _ATEN.ones_like.default: _constant(1),
    _ATEN.logical_and.default: Row(_BINARY, "({self} != 0) & ({other} != 0)", Promotion.ALWAYS_BOOL, takes_all=True),
    _ATEN.logical_or.default: Row(_BINARY, "({self} != 0) | ({other} != 0)", Promotion.ALWAYS_BOOL, takes_all=True),
    _ATEN.logical_not.default: Row(("self",), "{self} == 0", Promotion.ALWAYS_BOOL, takes_all=True),
    _ATEN.bitwise_not.default: Row(
        ("self",), lambda v: f"{v['self']} == 0" if v["dtype"] == "tl.int1" else None, takes_all=True
    ),
    _ATEN.floor_divide.default: Row(_BINARY, _floor_divide, takes_all=True),
    **{getattr(_ATEN, name).Tensor: _compare(sign) for name, sign in _SIGNS.items()},
    **{getattr(_ATEN, name).Scalar: _compare(sign) for name, sign in _SIGNS.items()},
}

DOUBLES = (_ATEN._to_copy.default, _ATEN.clamp.default, _ATEN.mul.Tensor, _ATEN.reciprocal.default)
"""The ops that are computed in float64, too: torchao makes the scales of float8 so."""
COPIES = (_ATEN._to_copy.default, _ATEN.clone.default)
"""Ops that return the same elements, perhaps in another dtype, or in another order in memory."""
REPLACED = (_ATEN.scatter.src,)
"""Ops that return the elements of a tensor, but for one of each row."""
PLACED = (
    _ATEN.cat.default,
    _ATEN.slice_backward.default,
    _ATEN.select_backward.default,
    _ATEN.stack.default,
    _ATEN.as_strided_scatter.default,
)
"""Ops that return elements at other places, and zeros or another tensor's elements elsewhere."""


def arguments_of(call: Call) -> dict[str, Any]:
    """The arguments of a call by their names, defaults among them."""
    values: dict[str, Any] = {}
    for index, argument in enumerate(call.op._schema.arguments):
        if index < len(call.args):
            values[argument.name] = call.args[index]
        else:
            values[argument.name] = call.kwargs.get(argument.name, argument.default_value)
    return values


def operand_dtypes(row: Row, values: dict[str, Any], output: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The dtype that ATen reads the operands in, and the one that it computes in, which may be wider."""
    if row.promotion is None:
        return output, output
    operands = [values[name] for name in row.operands if name not in row.masks]
    operands = [value.layout.empty() if type(value) is Use else value for value in operands]
    promotion = Promotion.DEFAULT if row.promotion is Promotion.ALWAYS_BOOL else row.promotion
    computed, common = elementwise_dtypes(*operands, type_promotion_kind=promotion)
    return common, computed
