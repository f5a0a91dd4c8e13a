"""Parts of tensors, moved to their places in a new one: what ``cat``, ``clone`` and chains of these do, in one go.

    joined[places[i]] = part_i, for each i

Every part has strides of its own where it is read, and where it is written. So a ``cat`` of transposed parts, whose
result is then copied into another order, moves 2N elements and not 4N. Parts are moved by whole rows, in the order in
which these lie in the result; those that have the same sizes by one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from recompute.kernels import launch
from recompute.kernels.launch import jit, tl

MAX_PARTS = 4


@jit
def _kernel(
    target,
    target_outer,
    target_middle,
    target_inner,
    tiles,
    N,
    middle,
    inner,
    width,
    first,
    first_place,
    first_outer,
    first_middle,
    first_inner,
    second,
    second_place,
    second_outer,
    second_middle,
    second_inner,
    third,
    third_place,
    third_outer,
    third_middle,
    third_inner,
    fourth,
    fourth_place,
    fourth_outer,
    fourth_middle,
    fourth_inner,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Parts of the same sizes, which have ``tiles`` programs each. place: where a part begins in target.

    The N rows of a part have three leading dimensions. ``middle`` and ``inner`` are the sizes of the last two.
    """
    part = tl.program_id(0) // tiles
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    mask = (rows < N)[:, None]
    last, rest = rows % inner, rows // inner
    leading = rest // middle, rest % middle, last
    writes = target + _starts(leading, (target_outer, target_middle, target_inner))
    strides = first_outer, first_middle, first_inner
    _move(part == 0, first, strides, leading, writes + first_place, mask, width, BLOCK)
    if second is not None:
        strides = second_outer, second_middle, second_inner
        _move(part == 1, second, strides, leading, writes + second_place, mask, width, BLOCK)
    if third is not None:
        strides = third_outer, third_middle, third_inner
        _move(part == 2, third, strides, leading, writes + third_place, mask, width, BLOCK)
    if fourth is not None:
        strides = fourth_outer, fourth_middle, fourth_inner
        _move(part == 3, fourth, strides, leading, writes + fourth_place, mask, width, BLOCK)


@jit
def _starts(leading, strides):
    outer, middle, inner = leading[0].to(tl.int64), leading[1].to(tl.int64), leading[2].to(tl.int64)
    return (outer * strides[0] + middle * strides[1] + inner * strides[2])[:, None]


@jit
def _move(is_ours, source, strides, leading, writes, mask, width, BLOCK: tl.constexpr):
    if is_ours:
        reads = source + _starts(leading, strides)
        for start in range(0, width, BLOCK):
            columns = (start + tl.arange(0, BLOCK))[None, :]
            inside = mask & (columns < width)
            tl.store(writes + columns, tl.load(reads + columns, mask=inside), mask=inside)


TILE, MAX_BLOCK = 4096, 1024
"""Elements that a program moves at once, and of one row. On an H100, tiles of 1024 to 8192 take the same time."""
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
    together: dict[tuple[int, ...], list[Any]] = {}
    """The arguments for parts, by what those that one launch moves have in common."""
    for part in (first, second, third, fourth):
        if part is None:
            continue
        strides, place = [next(numbers) for _ in part.shape], next(numbers)
        sides = _sides(part, strides)
        if sides is None:
            joined.as_strided(part.shape, strides, joined.storage_offset() + place).copy_(part)
        elif part.numel():
            shared = tuple([side.size for side in sides] + [side.target for side in sides])
            together.setdefault(shared, []).extend((part, place, *[side.source for side in sides[:3]]))
    for (outer, middle, inner, width, *strides), parts in together.items():
        rows, block = outer * middle * inner, min(max(16, 1 << (width - 1).bit_length()), MAX_BLOCK)
        tiles = -(-rows // (TILE // block))
        arguments = (joined, *strides[:3], tiles, rows, middle, inner, width)
        missing = (None, 0, 0, 0, 0) * (MAX_PARTS - len(parts) // 5)
        constants = {"ROWS": TILE // block, "BLOCK": block, **SETTINGS}
        launch.run(_kernel, tiles * (len(parts) // 5), *arguments, *parts, *missing, **constants)
    return joined


def _sides(part: Tensor, strides: Sequence[int]) -> list[_Side] | None:
    """Three leading dimensions of a part, and its rows; None if the kernel does not move it.

    strides: in the result. Dimensions are in the order that they have there. Those that are one here and there are
    merged.
    """
    if not launch.uses_triton(part):
        return None
    sides: list[_Side] = []
    given = [side for side in map(_Side, part.shape, strides, part.stride()) if side.size != 1]
    for side in sorted(given, key=lambda side: side.target, reverse=True):
        before = sides[-1] if sides else None
        if before and (before.target, before.source) == (side.size * side.target, side.size * side.source):
            sides[-1] = side._replace(size=before.size * side.size)
        else:
            sides.append(side)
    *leading, (width, *inner) = sides or [_Side(1, 1, 1)]
    if inner != [1, 1] or len(leading) > 3 or part.numel() >= 2**30 * width:
        return None
    return [_Side(1, 0, 0)] * (3 - len(leading)) + (sides or [_Side(1, 1, 1)])


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
