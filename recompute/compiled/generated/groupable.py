"""Which calls a generated kernel can compute, which of them pay alone, and the space of a kernel of several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.dropout import DropoutMask
from recompute.compiled.generated.pointwise_ops import (
    COPIES,
    DOUBLES,
    FLOATS,
    FLOATS8,
    PLACED,
    REPLACED,
    ROWS,
    TRITON_DTYPES,
    arguments_of,
    operand_dtypes,
)
from recompute.compiled.generated.row_ops import ROW_OPS, adds_up, can_run_by_rows, operands_of, row_width
from recompute.compiled.generated.spaces import TILE, Elements, Rows, Tiles
from recompute.compiled.recording import Recording
from recompute.engine.cut.layout import is_dense

_ATEN = torch.ops.aten
_NUMBERS = (int, float, bool)
MAX_ADDRESS = 2**31 - 1
LARGE = 2**20
"""With so many elements it matters how fast they are moved."""


class NotOneKernel(Exception):
    """One kernel cannot compute these calls."""


def can_be_generated(call: Call, recording: Recording) -> bool:
    """Whether a generated kernel can compute a call."""
    if isinstance(call.op, DropoutMask):
        return True
    by_rows = can_run_by_rows(call, recording)
    if call.written or not call.results or None in call.results or (call.is_sequence and not by_rows):
        return False
    outputs = [recording.buffers[number] for number in call.results if number is not None]
    output = outputs[0]
    for each in outputs:
        if each.device != recording.device or each.layout.dtype not in TRITON_DTYPES:
            return False
        if not each.nbytes or not is_dense(each.layout, each.nbytes):
            return False
    for use in call.uses():
        buffer = recording.buffers[use.buffer]
        if use.is_conjugate or use.layout.dtype is not buffer.layout.dtype or use.layout.dtype not in TRITON_DTYPES:
            return False
        if buffer.device != recording.device:
            return False
    dtypes = [output.layout.dtype, *[use.layout.dtype for use in call.uses()]]
    if not FLOATS8.keys().isdisjoint(dtypes):  # most other calls on it are ATen's
        return turned_by(call) is not None or (call.op is _ATEN._to_copy.default and dtypes[1] in FLOATS)
    if torch.float64 in dtypes and call.op not in DOUBLES:
        return False
    if by_rows:
        return True
    values = arguments_of(call)
    if call.op in COPIES:
        return _can_be_cast(values["self"].layout.dtype, output.layout.dtype)
    if call.op in REPLACED:
        return _replaces_one(values)
    if call.op in PLACED:
        if call.op in (_ATEN.cat.default, _ATEN.stack.default):
            alike = {(len(use.layout.shape), use.layout.dtype) for use in values["tensors"]}
            return len(alike) == 1 and len(values["tensors"]) <= 8
        if call.op is _ATEN.as_strided_scatter.default:
            source = values["src"].layout.dtype
            return _can_be_cast(source, output.layout.dtype) and _box_of(values) is not None
        return True
    row = ROWS.get(call.op)
    if row is None or any(type(values[name]) not in (Use, *_NUMBERS) for name in row.operands):
        return False
    _, dtype = operand_dtypes(row, values, output.layout.dtype)
    if not row.takes_all and dtype not in (torch.float32, torch.float64):
        return False
    if row.promotion is None and any(
        type(value := values[name]) is Use and value.layout.dtype is not dtype
        for name in row.operands
        if name not in row.masks
    ):
        return False
    if callable(row.expression):
        probe = {name: "x" if type(value) is Use else value for name, value in values.items()}
        return row.expression(probe | {"dtype": TRITON_DTYPES[dtype]}) is not None
    return True


def _can_be_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast is reviewed: those of floating-point numbers to integers are not."""
    if torch.float64 in (source, target):
        return source in FLOATS or target is torch.float32
    return source is target or target in (*FLOATS, torch.bool) or source not in FLOATS


class _Span(NamedTuple):
    """Where a part of a tensor lies along one of the tensor's dimensions."""

    start: int
    stop: int
    dimension: int | None
    """The part's own dimension there; None if it has none."""
    step: int = 1


Parts = tuple[Use | None, list[tuple[Use, list[_Span]]]]
"""The tensor around some parts, None for zeros; and the parts, each with a span for each dimension of the whole."""


def parts_of(call: Call, shape: Sequence[int]) -> Parts | None:
    """The parts that a ``PLACED`` op makes a tensor of this shape from; None if ``as_strided_scatter`` fills no box."""
    values = arguments_of(call)
    if call.op is _ATEN.as_strided_scatter.default:
        spans = _box_of(values)
        if spans is None:
            return None
        is_all = all(span.stop - span.start == size for span, size in zip(spans, shape, strict=True))
        return None if is_all else values["self"], [(values["src"], spans)]
    dim = values["dim"] % len(shape)
    tensors: list[Use] = values["tensors"] if "tensors" in values else [values["grad_output"]]
    without = len(tensors[0].layout.shape) < len(shape)
    if call.op is _ATEN.slice_backward.default:
        start, stop, step = slice(values["start"], values["end"], values["step"]).indices(shape[dim])
        own = [_Span(start, stop, dim, step)]
    else:
        first = values["index"] % shape[dim] if "index" in values else 0
        sizes = [1 if without else use.layout.shape[dim] for use in tensors]
        starts = list(itertools.accumulate(sizes, initial=first))
        own = [_Span(*each, None if without else dim) for each in itertools.pairwise(starts)]
    before = [_Span(0, size, place) for place, size in enumerate(shape[:dim])]
    after = [_Span(0, size, place + dim + (not without)) for place, size in enumerate(shape[dim + 1 :])]
    return None, [(use, [*before, span, *after]) for use, span in zip(tensors, own, strict=True)]


def _box_of(values: dict[str, Any]) -> list[_Span] | None:
    """Where ``as_strided_scatter`` puts its elements: a span for each dimension; None if that is no box."""
    whole, rest, spans = values["self"].layout, values["storage_offset"], []
    sizes = zip(values["size"], values["stride"], strict=True)
    own = {stride: place for place, (size, stride) in enumerate(sizes) if size > 1}
    starts = {}
    for each in sorted(range(len(whole.shape)), key=lambda each: -whole.stride[each]):
        if whole.shape[each] > 1:
            starts[each], rest = divmod(rest, whole.stride[each])
    for each, (size, stride) in enumerate(zip(whole.shape, whole.stride, strict=True)):
        place, start = own.pop(stride, None) if size > 1 else None, starts.get(each, 0)
        span = _Span(start, start + (1 if place is None else values["size"][place]), place)
        if span.stop > size:
            return None
        spans.append(span)
    return None if own or rest else spans


def is_slow_alone(call: Call | None, recording: Recording) -> bool:
    """Whether ATen moves a call's elements slowly, so that a kernel of its own pays.

    It closes gaps between parts, pads with zeros, turns a matrix, repeats an operand over many elements, or takes new
    memory for a tensor that was written in place.
    """
    if call is None or call.op in ROW_OPS:
        return False
    count, number = elements_of(call, recording), call.results[0]
    if number is not None and recording.buffers[number].root != number:  # it was in place, as it is for a kernel
        return True
    is_repeating = count >= LARGE and any(_is_repeated(use, count) for use in call.uses())
    return is_repeating or call.op in PLACED or turned_by(call) is not None


def turned_by(call: Call | None) -> Tiles | None:
    """The space of a kernel that turns a matrix of float8 for a GEMM; None for any other call. ATen reads it slowly."""
    if call is None or call.op is not _ATEN.clone.default:
        return None
    values = arguments_of(call)
    shape, stride, _, dtype = values["self"].layout
    if dtype not in FLOATS8 or values["memory_format"] is not torch.contiguous_format or len(shape) != 2:
        return None
    if stride[0] != 1 or stride[1] < shape[0] or min(shape) < TILE or shape[1] * stride[1] > MAX_ADDRESS:
        return None
    return Tiles(shape[1], shape[0])


def _is_repeated(use: Use, count: int) -> bool:
    """Whether an operand is broadcast, and is no single number."""
    own = [size for size, stride in zip(use.layout.shape, use.layout.stride, strict=True) if stride]
    return 1 < math.prod(own) < count


def equal_parts(call: Call | None) -> list[Use]:
    """The tensors of a ``cat``, if all have one shape: a kernel computes an element of each at a time. Else none."""
    if call is None or call.op is not _ATEN.cat.default:
        return []
    tensors = arguments_of(call)["tensors"]
    return tensors if len({tuple(use.layout.shape) for use in tensors}) == 1 else []


def _replaces_one(values: dict[str, Any]) -> bool:
    """Whether ``scatter`` replaces one element along its dimension, everywhere in the others."""
    shape, index, source = (list(values[name].layout.shape) for name in ("self", "index", "src"))
    if not shape or values["index"].layout.dtype is not torch.int64:
        return False
    shape[values["dim"] % len(shape)] = 1
    return shape == index == source


def elements_of(call: Call | None, recording: Recording) -> int:
    """The elements of a kernel that writes the output of a call."""
    assert call is not None
    number = call.results[0]
    assert number is not None
    return int(recording.buffers[number].layout.shape.numel()) // max(1, len(equal_parts(call)))


def space_of(calls: Sequence[Call], stored: Sequence[int], recording: Recording) -> Elements | Rows:
    """The space of a kernel that computes ``calls`` and fills the buffers ``stored``.

    Raises ``NotOneKernel`` if there is none.
    """
    by_rows = [call for call in calls if call.op in ROW_OPS]
    written = [recording.buffers[number].layout.shape.numel() for number in stored]
    if tiles := {found for call in calls if (found := turned_by(call)) is not None}:
        space = tiles.pop()
        if by_rows or tiles or any(count != space.rows * space.width for count in written):
            raise NotOneKernel
        return space
    if not by_rows:
        makers = {number: call for call in calls for number in call.results}
        sizes = {elements_of(makers[number], recording) for number in stored}
        if len(sizes) != 1:
            raise NotOneKernel
        return Elements(sizes.pop())
    counts = {operands_of(call)[0].layout.shape.numel() // row_width(call) for call in by_rows}
    rows = counts.pop()
    if counts or any(count % rows for count in written):
        raise NotOneKernel
    width = max([*map(row_width, by_rows), *[count // rows for count in written]])
    if width > 2 * max(map(row_width, by_rows)):
        raise NotOneKernel
    return Rows(rows, width, any(adds_up(call, recording) for call in by_rows))
