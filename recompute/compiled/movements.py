"""What backward moves from memory to memory more than once, moved once.

Where one Linear gives q, k and v, for one, ``cat`` puts their gradients beside each other. A copy in another order may
follow, or come before. No value changes on the way. So a call that only moves, and whose result nothing but another
such call reads, is left out: ``kernels.join`` moves the parts straight to where they end up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from recompute.compiled.recording import Buffer, Call, Recording, Use
from recompute.engine.cut.layout import Layout
from recompute.kernels import join

_ATEN = torch.ops.aten
_TOGETHER = (_ATEN.cat.default, _ATEN.stack.default)


class _Piece(NamedTuple):
    """What a call has moved to a part of a buffer."""

    source: Use
    stride: tuple[int, ...]
    """Of its dimensions, in the buffer."""
    offset: int


def moved_once(recording: Recording, start: int, others: Iterable[Use | None]) -> list[Call]:
    """The calls from ``start`` on, without those that only move what another moves on.

    others: what is read beside what these calls read.
    """
    calls = recording.calls[start:]
    reads = Counter(use.buffer for call in calls for use in call.uses())
    reads.update(use.buffer for use in others if use is not None)
    moves: dict[int, tuple[int, list[_Piece]]] = {}
    """For each buffer that a call has only moved something to: the place of the call, and the pieces."""
    changed: dict[int, Call | None] = {}
    for place, call in enumerate(calls):
        pieces = _pieces(call, recording)
        if pieces is None:
            continue
        (number,) = call.results
        assert number is not None
        joined: list[_Piece] = []
        left_out: list[int] = []
        for piece in pieces:
            first, parts = moves.get(piece.source.buffer, (place, []))
            moved = None
            if parts and reads[piece.source.buffer] == 1:
                moved = _moved_on(parts, piece, recording, calls[first:place])
            joined += moved or [piece]
            left_out += [first] if moved else []
        if len(joined) > join.MAX_PARTS:
            joined, left_out = pieces, []
        moves[number] = place, joined
        # torch is slow where it puts beside each other what has gaps, and else as fast as it can be.
        if left_out or (call.op in _TOGETHER and not all(map(_is_dense, pieces))):
            changed |= dict.fromkeys(left_out)
            changed[place] = _join_call(joined, number, recording.buffers[number].layout)
    return [now for place, call in enumerate(calls) if (now := changed.get(place, call)) is not None]


def _join_call(pieces: Sequence[_Piece], number: int, layout: Layout) -> Call:
    parts = [piece.source for piece in pieces] + [None] * (join.MAX_PARTS - len(pieces))
    places = tuple([value for piece in pieces for value in (*piece.stride, piece.offset)])
    arguments = (*parts, tuple(layout.shape), layout.stride, places)
    return Call(torch.ops.recompute.join.default, arguments, {}, (number,), (), is_sequence=False)


def _pieces(call: Call, recording: Recording) -> list[_Piece] | None:
    """What a call moves; None if it does anything else, or moves more pieces than one call could."""
    if call.op is not _ATEN.clone.default and call.op not in _TOGETHER:
        return None
    (number,) = call.results
    assert number is not None
    buffer = recording.buffers[number]
    layout, sources = buffer.layout, list(call.uses())
    if not _is_whole(buffer) or len(sources) > join.MAX_PARTS:
        return None
    if any(use.is_conjugate or use.layout.dtype is not layout.dtype for use in sources):
        return None
    if call.op is _ATEN.clone.default:
        return [_Piece(sources[0], layout.stride, 0)]
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % len(layout.shape)
    step, stride, offset, pieces = layout.stride[dim], layout.stride, 0, []
    if call.op is _ATEN.stack.default:
        stride = stride[:dim] + stride[dim + 1 :]
    for use in sources:
        if len(use.layout.shape) != len(stride):
            return None  # cat passes over what is empty and has one dimension
        pieces.append(_Piece(use, stride, offset))
        offset += step if call.op is _ATEN.stack.default else step * use.layout.shape[dim]
    return pieces


def _is_whole(buffer: Buffer) -> bool:
    """Whether the tensor of a buffer has all of its memory."""
    layout = buffer.layout
    is_all = bool(layout.offset == 0 and buffer.nbytes == layout.shape.numel() * layout.dtype.itemsize > 0)
    return is_all and _digits(layout) is not None


def _is_dense(piece: _Piece) -> bool:
    layout, expected = piece.source.layout, 1
    for size, stride in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Digit(NamedTuple):
    """A dimension of a tensor without gaps: a digit of an element's place in memory."""

    dim: int
    size: int
    stride: int


def _digits(layout: Layout) -> list[_Digit] | None:
    """The dimensions, from the innermost in memory outwards; None if there are gaps, or elements that share a place."""
    dims = map(_Digit, range(len(layout.shape)), layout.shape, layout.stride)
    digits = sorted((digit for digit in dims if digit.size != 1), key=lambda digit: digit.stride)
    expected = 1
    for digit in digits:
        if digit.stride != expected:
            return None
        expected *= digit.size
    return digits


def _moved_on(
    parts: Sequence[_Piece], piece: _Piece, recording: Recording, between: Sequence[Call]
) -> list[_Piece] | None:
    """The parts of a buffer that is moved on as ``piece``, as pieces of what it is moved to; None if that cannot be.

    between: the calls from that which has moved the parts until that which moves them on.
    """
    buffers, whole, layout = recording.buffers, recording.buffers[piece.source.buffer], piece.source.layout
    digits = _digits(layout)
    if digits is None or layout.offset or layout.shape.numel() != whole.layout.shape.numel():
        return None
    sources = {part.source.buffer for part in parts}
    if sum(buffers[number].nbytes for number in sources) > whole.nbytes:
        return None  # something larger would live on in its place
    if any(before in sources for call in between for before, _ in call.written):
        return None
    found = [_placed(part, piece, digits) for part in parts]
    return None if None in found else found  # type: ignore[return-value]


def _placed(part: _Piece, piece: _Piece, digits: Sequence[_Digit]) -> _Piece | None:
    """A part of a buffer, as a piece of what the buffer is moved to as ``piece``, which reads it by ``digits``."""
    highest, rest, offset = {}, part.offset, piece.offset
    for digit in reversed(digits):
        highest[digit], rest = divmod(rest, digit.stride)
        offset += highest[digit] * piece.stride[digit.dim]
    sides: list[tuple[int, int, int]] = []
    for size, stride, source in zip(part.source.layout.shape, part.stride, part.source.layout.stride, strict=True):
        split = list(_split(size, stride, digits))
        if size != _product(split):
            return None
        inner = 1
        for count, step, digit in split:
            highest[digit] += (count - 1) * step
            sides.append((count, step * piece.stride[digit.dim], source * inner))
            inner *= count
    if any(last >= digit.size for digit, last in highest.items()):
        return None  # a digit would carry over
    shape, strides, sources = ([side[index] for side in sides] for index in range(3))
    layout = part.source.layout._replace(shape=torch.Size(shape), stride=tuple(sources))
    return _Piece(part.source._replace(layout=layout), tuple(strides), offset)


def _split(size: int, stride: int, digits: Sequence[_Digit]) -> Iterator[tuple[int, int, _Digit]]:
    """A dimension, by the digits in which it counts: how far, and in which steps. It ends where these are uneven."""
    for digit in digits:
        step, uneven = divmod(stride, digit.stride)
        if size == 1 or uneven:
            return
        if step >= digit.size:
            continue
        count = min(size, -(-digit.size // step))
        if size % count or (count < size and digit.size % step):
            return
        yield count, step, digit
        size //= count
        stride *= count


def _product(split: Iterable[tuple[int, int, _Digit]]) -> int:
    product = 1
    for count, _, _ in split:
        product *= count
    return product
