"""Parts of tensors, moved to their places in a new one: what ``cat``, ``clone`` and chains of these do, in one go.

    joined[places[i]] = part_i, for each i

Every part has strides of its own where it is read, and where it is written. So a ``cat`` of transposed parts, whose
result is then copied into another order, moves 2N elements and not 4N. Each part is moved by a launch of its own: by
whole rows, in the order in which these lie in the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

MAX_PARTS = 4


@jit
def _move_kernel(
    source,
    target,
    offset,
    N,
    middle,
    inner,
    width,
    source_outer,
    source_middle,
    source_inner,
    target_outer,
    target_middle,
    target_inner,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS of the N rows of a part. Rows have three leading dimensions, of which ``middle`` and ``inner`` are the sizes
    of the last two. ``offset``: where the part begins in target."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (rows < N)[:, None]
    last = (rows % inner).to(tl.int64)
    rows = rows // inner
    second, first = (rows % middle).to(tl.int64), (rows // middle).to(tl.int64)
    reads = source + (first * source_outer + second * source_middle + last * source_inner)[:, None]
    writes = target + (first * target_outer + second * target_middle + last * target_inner + offset)[:, None]
    for start in range(0, width, BLOCK):
        columns = (start + tl.arange(0, BLOCK))[None, :]
        mask = inside & (columns < width)
        tl.store(writes + columns, tl.load(reads + columns, mask=mask), mask=mask)


TILE, MAX_BLOCK = 4096, 1024
"""Elements that a program moves at once, and of one row. Not measured."""
SETTINGS = {"num_warps": 4}


class _Side(NamedTuple):
    """A dimension of a part: its size, and its strides in the result and in what it is read from."""

    size: int
    target: int
    source: int


def _join(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    places: Sequence[int],
) -> Tensor:
    joined = _outputs(first, second, third, fourth, size, stride, places)
    numbers = iter(places)
    for part in (first, second, third, fourth):
        if part is not None:
            strides = [next(numbers) for _ in part.shape]
            _move(part, joined, strides, next(numbers))
    return joined


def _move(part: Tensor, joined: Tensor, places: list[int], offset: int) -> None:
    if not part.numel():
        return
    sides = _merged(map(_Side, part.shape, places, part.stride()))
    *leading, (width, *last) = sides or [_Side(1, 1, 1)]
    rows = part.numel() // width
    if not launch.uses_triton(part) or last != [1, 1] or len(leading) > 3 or rows >= 2**30:
        joined.as_strided(part.shape, places, joined.storage_offset() + offset).copy_(part)
        return
    outer, middle, inner = [_Side(1, 0, 0)] * (3 - len(leading)) + leading
    block = min(max(16, 1 << (width - 1).bit_length()), MAX_BLOCK)
    tile = TILE // block
    sizes = rows, middle.size, inner.size, width
    strides = outer.source, middle.source, inner.source, outer.target, middle.target, inner.target
    arguments = part, joined, offset, *sizes, *strides
    launch.run(_move_kernel, -(-rows // tile), *arguments, ROWS=tile, BLOCK=block, **SETTINGS)


def _merged(sides: Iterable[_Side]) -> list[_Side]:
    """Dimensions in the order that they have in the result, with those merged that are one here and there."""
    merged: list[_Side] = []
    for side in sorted((side for side in sides if side.size > 1), key=lambda side: side.target, reverse=True):
        before = merged[-1] if merged else None
        if before and (before.target, before.source) == (side.size * side.target, side.size * side.source):
            merged[-1] = side._replace(size=before.size * side.size)
        else:
            merged.append(side)
    return merged


def _outputs(
    first: Tensor,
    second: Tensor | None,
    third: Tensor | None,
    fourth: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    places: Sequence[int],
) -> Tensor:
    return first.new_empty_strided(size, stride)


join = launch.register(
    "join(Tensor first, Tensor? second, Tensor? third, Tensor? fourth, int[] size, int[] stride, int[] places)"
    " -> Tensor",
    _join,
    _outputs,
)
"""A new tensor of this size and these strides, in whose memory the parts are written to their places. All have one
dtype. ``places``: for each part the strides in the result of its dimensions, and then the offset at which it begins."""
