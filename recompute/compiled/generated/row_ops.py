"""The ATen ops along a dimension that a generated kernel computes by rows: reductions, and softmax.

They sum up in another order than ATen's kernels, so that they round in another way. Only a policy that may round, such
as ``auto``, runs them; but for the greatest absolute value of a row, which has ATen's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.pointwise_ops import FLOATS, arguments_of
from recompute.compiled.generated.spaces import MAX_WIDTH
from recompute.compiled.generated.switch import Generates
from recompute.compiled.recording import Recording

_ATEN = torch.ops.aten
MIN_ROWS = 256
"""With fewer rows, programs that take one each leave most of a GPU without work."""


class RowWriter(NamedTuple):
    """Writes the lines of an op on a row. Elements beyond the last count for nothing."""

    width: int
    write: Callable[[str], str]
    """Writes a line that names an expression; returns the name."""

    def filled(self, x: str, number: str) -> str:
        """The elements of a row, and ``number`` beyond."""
        return self.write(f"tl.where(c < {self.width}, {x}, {number})")

    def total(self, x: str) -> str:
        return self.write(f"tl.sum({self.filled(x, '0.0')}, 1, keep_dims=True)")


_LEAST = 'float("-inf")'


def _softmax(x: str, row: RowWriter) -> str:
    x = row.filled(x, _LEAST)
    powers = row.write(f"tl.exp({x} - tl.max({x}, 1, keep_dims=True))")
    return row.write(f"{powers} / {row.total(powers)}")


def _safe_softmax(x: str, row: RowWriter) -> str:
    """Zeros where all elements are minus infinity."""
    is_masked = row.write(f"tl.min(({row.filled(x, _LEAST)} == {_LEAST}).to(tl.int32), 1, keep_dims=True) > 0")
    return row.write(f"tl.where({is_masked}, 0.0, {_softmax(x, row)})")


def _log_softmax(x: str, row: RowWriter) -> str:
    x = row.filled(x, _LEAST)
    shifted = row.write(f"{x} - tl.max({x}, 1, keep_dims=True)")
    return row.write(f"{shifted} - tl.log({row.total(f'tl.exp({shifted})')})")


def _amax(x: str, row: RowWriter) -> str:
    """A NaN is greater than any number."""
    x = row.filled(x, _LEAST)
    most = row.write(f"tl.max({x}, 1, keep_dims=True)")
    return row.write(f'tl.where(tl.max(({x} != {x}).to(tl.int32), 1, keep_dims=True) > 0, float("nan"), {most})')


def _max(x: str, row: RowWriter) -> tuple[str, str]:
    """The greatest element, and where it is first."""
    most = _amax(x, row)
    is_most = row.filled(f"({x} != {x}) | ({x} == {most})", "False")
    return most, row.write(f"tl.min(tl.where({is_most}, c, {row.width}), 1, keep_dims=True)")


ROW_OPS: dict[Any, tuple[tuple[str, ...], Callable[..., Any]]] = {
    _ATEN._softmax.default: (("self",), _softmax),
    _ATEN._safe_softmax.default: (("self",), _safe_softmax),
    _ATEN._log_softmax.default: (("self",), _log_softmax),
    _ATEN._softmax_backward_data.default: (
        ("grad_output", "output"),
        lambda gradient, y, row: row.write(f"({gradient} - {row.total(f'{gradient} * {y}')}) * {y}"),
    ),
    _ATEN._log_softmax_backward_data.default: (
        ("grad_output", "output"),
        lambda gradient, y, row: row.write(f"{gradient} - tl.exp({y}) * {row.total(gradient)}"),
    ),
    _ATEN.sum.dim_IntList: (("self",), lambda x, row: row.total(x)),
    _ATEN.mean.dim: (("self",), lambda x, row: row.write(f"{row.total(x)} / {float(row.width)}")),
    _ATEN.amax.default: (("self",), _amax),
    _ATEN.max.dim: (("self",), _max),
}
"""For each op the operands, and a function that writes its result, or results, from the operands in float32."""


def operands_of(call: Call) -> list[Use]:
    names, _ = ROW_OPS[call.op]
    values = arguments_of(call)
    return [values[name] for name in names]


def row_dim(call: Call) -> int:
    """The dimension that an op goes along."""
    dim = arguments_of(call)["dim"]
    return (dim if isinstance(dim, int) else dim[0]) % len(operands_of(call)[0].layout.shape)


def row_width(call: Call) -> int:
    """The elements of a row that an op goes over."""
    return int(operands_of(call)[0].layout.shape[row_dim(call)])


def adds_up(call: Call, recording: Recording) -> bool:
    """Whether an op on rows may round in another way than ATen's: the greatest of absolute values is what it is."""
    maker = recording.maker(operands_of(call)[0])
    return call.op is not _ATEN.amax.default or maker is None or maker.op is not _ATEN.abs.default


def can_run_by_rows(call: Call, recording: Recording) -> bool:
    """Whether a generated kernel can compute a call by rows. Whether its operands and outputs fit is not looked at."""
    if call.op not in ROW_OPS:
        return False
    dims, operands = arguments_of(call)["dim"], operands_of(call)
    shape = operands[0].layout.shape
    if not shape or any(use.layout.dtype not in FLOATS or use.layout.shape != shape for use in operands):
        return False
    if dims is None or (not isinstance(dims, int) and len(dims) != 1):
        return False
    if any(use.layout.stride[row_dim(call)] > 1 for use in operands):  # a program would read a sector for each element
        return False
    is_sum = adds_up(call, recording)
    if is_sum and recording.generates is not Generates.ROUNDED:
        return False
    outputs = [recording.buffers[number].layout.dtype for number in call.results[:1] if number is not None]
    width, most = row_width(call), MAX_WIDTH if is_sum else MAX_WIDTH // 2  # ATen's maxima of longer rows are faster
    return outputs[0] in FLOATS and 1 < width <= most and shape.numel() // width >= MIN_ROWS
