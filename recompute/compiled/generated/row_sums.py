"""Adds up rows that go to the same place: the gradient of indexing, as where experts take their tokens.

ATen adds the rows of one place after each other, and rounds each sum. That takes long where many rows go to one place,
as for the biases of a few experts. This adds up blocks of rows in float32, in an order that is always the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from recompute.compiled.generated.pointwise_ops import FLOATS, arguments_of
from recompute.compiled.recording import Call, Recording, Use
from recompute.kernels.launch import jit, run, tl

_ATEN = torch.ops.aten
_ZEROS = (_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default)
ROWS_AT_ONCE, COLUMNS_AT_ONCE, BLOCK = 16, 256, 1024


@jit
def _sums(
    initial, order, starts, values, sums, width,
    TIMES: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS_AT_ONCE)
    place, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    columns = block * COLUMNS_AT_ONCE + tl.arange(0, COLUMNS_AT_ONCE)
    inside = columns < width
    total = tl.load(initial + place * width + columns, inside, 0.0).to(tl.float32)
    if TIMES == 0:
        first, stop = tl.load(starts + place), tl.load(starts + place + 1)
    else:
        first, stop = place * TIMES, (place + 1) * TIMES
    while first < stop:
        positions = first + tl.arange(0, ROWS_AT_ONCE)
        rows = tl.load(order + positions, positions < stop, 0)[:, None]
        wanted = (positions < stop)[:, None] & inside[None, :]
        total += tl.sum(tl.load(values + rows * width + columns[None, :], wanted, 0.0).to(tl.float32), 0)
        first += ROWS_AT_ONCE
    tl.store(sums + place * width + columns, total, inside)


@jit
def _inverses(permutation, inverse, count, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse + tl.load(permutation + position, position < count), position, position < count)


def rows_added(call: Call, recording: Recording, has: Callable[[int], bool]) -> Call | None:
    """The call whose arguments ``index_put_rows`` takes, if that does what ``call`` does, but for the order of sums.

    has: whether it may read a buffer.
    """
    if call.op is not _ATEN.index_put.default:
        return None
    values = arguments_of(call)
    initial, rows, indices = values["self"], values["values"], values["indices"]
    if not values["accumulate"] or len(indices) != 1 or type(indices[0]) is not Use:
        return None
    (index,) = indices
    fits = (
        len(index.layout.shape) == 1
        and index.layout.dtype is torch.int64
        and initial.layout.dtype is rows.layout.dtype
        and initial.layout.dtype in FLOATS
        and rows.layout.shape == (*index.layout.shape, *initial.layout.shape[1:])
        and initial.layout.shape.numel() * rows.layout.shape.numel() > 0
        and all(use.layout.is_contiguous for use in (initial, rows, index))
        and all(recording.buffers[use.buffer].device == recording.device for use in (initial, rows, index))
    )
    if not fits:
        return None
    permutation, times = _permutation_of(index, initial, recording)
    if permutation is not None and not has(permutation.buffer):
        permutation, times = None, 0
    return call._replace(args=(initial, index, rows, permutation, times))


def keeps_bits(call: Call) -> bool:
    """Whether such a call gives ATen's bits, as a single row goes to each place."""
    return call.args[4] == 1


def _permutation_of(index: Use, initial: Use, recording: Recording) -> tuple[Use | None, int]:
    """The permutation of which ``index`` is a multiple, rounded down, and how often each place comes; or None and 0.

    So it is where tokens are sorted by their experts.
    """
    if index.layout != recording.buffers[index.buffer].layout:
        return None, 0
    maker, times = _maker(index, recording), 1
    if maker is not None and maker.op is _ATEN.floor_divide.default and type(maker.args[0]) is Use:
        (index, times), maker = maker.args, _maker(maker.args[0], recording)
    zeros = _maker(initial, recording)
    if zeros is None or zeros.op not in _ZEROS or type(times) is not int or times < 1:
        return None, 0
    if initial.layout.shape[0] * times != index.layout.shape[0] or not _permutes(index, maker, recording):
        return None, 0
    return index, times


def _permutes(index: Use, maker: Call | None, recording: Recording) -> bool:
    """Whether a tensor has each number below its length once: what ``sort`` gives, and the inverse of that."""
    if maker is None or len(index.layout.shape) != 1 or index.layout != recording.buffers[index.buffer].layout:
        return False
    if maker.op in (_ATEN.sort.default, _ATEN.sort.stable):
        return maker.results[1] == index.buffer
    if maker.op is not _ATEN.index_put_.default or len(maker.args) > 3 or len(maker.args[1]) != 1:
        return False
    (order,), counted = maker.args[1], maker.args[2]
    made = _maker(counted, recording) if type(counted) is Use else None
    return (
        type(order) is Use
        and counted.layout.shape == order.layout.shape == index.layout.shape
        and made is not None
        and made.op is _ATEN.arange.default
        and _permutes(order, _maker(order, recording), recording)
    )


def _maker(use: Use, recording: Recording) -> Call | None:
    """The call that made, or wrote, all of a tensor."""
    buffer = recording.buffers[use.buffer]
    return None if buffer.call is None else recording.calls[buffer.call]


def index_put_rows(
    initial: Tensor, index: Tensor, values: Tensor, permutation: Tensor | None = None, times: int = 0
) -> Tensor:
    """``initial.index_put([index], values, accumulate=True)``.

    initial: (places, ...); index: int64, (rows,); values: (rows, ...); all of them contiguous. permutation: int64,
    (rows,), if ``index`` is that, divided by ``times`` and rounded down.
    """
    count = len(initial)
    if permutation is None:
        places, order = index.remainder(count).sort()
        starts = torch.searchsorted(places, torch.arange(count + 1, device=places.device))
    else:
        order = starts = torch.empty_like(permutation)
        run(_inverses, -(-len(order) // BLOCK), permutation, order, len(order), BLOCK=BLOCK, num_warps=4)
    sums, width = torch.empty_like(initial), initial[0].numel()
    settings = {"TIMES": times, "ROWS_AT_ONCE": ROWS_AT_ONCE, "COLUMNS_AT_ONCE": COLUMNS_AT_ONCE, "num_warps": 4}
    programs = count * -(-width // COLUMNS_AT_ONCE)
    run(_sums, programs, initial, order, starts, values, sums, width, **settings)
    return sums
