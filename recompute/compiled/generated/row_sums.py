"""Adds up rows that go to the same place: the gradient of indexing, as where experts take their tokens.

ATen adds the rows of one place after each other, from memory to memory, and rounds each sum. That takes long where many
rows go to one place, as for the biases of a few experts. ``index_put_rows`` adds up blocks of rows in float32, in an
order that is always the same; ``InTurn`` adds as ATen, with the sum in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.pointwise_ops import FLOATS, arguments_of
from recompute.compiled.generated.safe_softmax import is_safe_softmax, safe_softmax
from recompute.compiled.generated.switch import Generates
from recompute.compiled.recording import Recording
from recompute.engine.bit_comparison import count_different
from recompute.engine.thread_state import is_fake, is_in_cuda_graph
from recompute.kernels.launch import jit, run, tl
from recompute.kernels.launch_plan import PlannedCall

_ATEN = torch.ops.aten
_ZEROS = (_ATEN.zeros.default, _ATEN.zeros_like.default, _ATEN.new_zeros.default)
ROWS_AT_ONCE, BLOCK = 16, 1024
WARP = 32
"""ATen adds up rows of at most so many elements in other orders."""


@jit
def _sums(
    values, initial, order, starts, sums, width,
    TIMES: tl.constexpr, IN_TURN: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLUMNS_AT_ONCE)
    place, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    columns = block * COLUMNS_AT_ONCE + tl.arange(0, COLUMNS_AT_ONCE)
    inside = columns < width
    total = tl.zeros((COLUMNS_AT_ONCE,), tl.float32)
    if initial is not None:
        total = tl.load(initial + place * width + columns, inside, 0.0).to(tl.float32)
    if TIMES == 0:
        first, stop = tl.load(starts + place), tl.load(starts + place + 1)
    else:
        first, stop = place * TIMES, (place + 1) * TIMES
    while first < stop:
        positions = first + tl.arange(0, ROWS_AT_ONCE)
        rows = tl.load(order + positions, positions < stop, 2**62)
        if IN_TURN:
            row = tl.min(rows, 0) * 0 - 1
            for _ in tl.static_range(ROWS_AT_ONCE):
                row = tl.min(tl.where(rows > row, rows, 2**62), 0)
                value = tl.load(values + row * width + columns, inside & (row < 2**62), 0.0)
                total = (total + value.to(tl.float32)).to(sums.dtype.element_ty).to(tl.float32)
        else:
            wanted = (positions < stop)[:, None] & inside[None, :]
            total += tl.sum(tl.load(values + rows[:, None] * width + columns[None, :], wanted, 0.0).to(tl.float32), 0)
        first += ROWS_AT_ONCE
    tl.store(sums + place * width + columns, total, inside)


@jit
def _inverses(permutation, inverse, count, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(inverse + tl.load(permutation + position, position < count), position, position < count)


def by_kernel(call: Call, recording: Recording, has: Callable[[int], bool]) -> tuple[Call, Callable[..., Any] | None]:
    """A call, and a function that runs it in the place of ATen's op, by arguments of its own; None if there is none.

    has: whether it may read a buffer.
    """
    if is_safe_softmax(call, recording):
        return call, safe_softmax
    if (order := inverted(call, recording)) is not None:
        call = call._replace(args=(order,), results=(call.written[0][1],), written=())
        return call, PlannedCall(inverse_permutation)
    added = rows_added(call, recording, has)
    if added is None:
        return call, None
    start, _, rows, times, _ = added.args
    in_turn = recording.generates is not Generates.ROUNDED and times != 1  # of one row, any order gives ATen's bits
    if in_turn and (type(start) is not int or rows.layout.shape[1:].numel() <= WARP or times > ROWS_AT_ONCE):
        return call, None
    return added._replace(args=(*added.args, in_turn)), InTurn() if in_turn else PlannedCall(index_put_rows)


def rows_added(call: Call, recording: Recording, has: Callable[[int], bool]) -> Call | None:
    """A call with arguments for ``index_put_rows``, if that computes ``call``, but for the order of sums.

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
    order = None if permutation is None else _inverse_of(permutation, recording, has)
    zeros = recording.maker(initial)
    is_zero = zeros is not None and zeros.op in _ZEROS
    start = int(initial.layout.shape[0]) if is_zero else initial
    return call._replace(args=(start, (permutation or index) if order is None else None, rows, times, order), kwargs={})


def _permutation_of(index: Use, initial: Use, recording: Recording) -> tuple[Use | None, int]:
    """The permutation that gives ``index`` if divided by a number and rounded down; and the number; or None and 0.

    So it is where tokens are sorted by their experts.
    """
    if index.layout != recording.buffers[index.buffer].layout:
        return None, 0
    maker, times = recording.maker(index), 1
    if maker is not None and maker.op is _ATEN.floor_divide.default and type(maker.args[0]) is Use:
        (index, times), maker = maker.args, recording.maker(maker.args[0])
    zeros = recording.maker(initial)
    if zeros is None or zeros.op not in _ZEROS or type(times) is not int or times < 1:
        return None, 0
    if initial.layout.shape[0] * times != index.layout.shape[0] or not _permutes(index, maker, recording):
        return None, 0
    return index, times


def _permutes(index: Use, maker: Call | None, recording: Recording) -> bool:
    """Whether a tensor has each number below its length once: the order of a ``sort``, or the inverse of that."""
    if maker is None or len(index.layout.shape) != 1 or index.layout != recording.buffers[index.buffer].layout:
        return False
    if maker.op in (_ATEN.sort.default, _ATEN.sort.stable):
        return maker.results[1] == index.buffer
    if maker.op is not _ATEN.index_put_.default or len(maker.args) > 3 or len(maker.args[1]) != 1:
        return False
    (order,), counted = maker.args[1], maker.args[2]
    made = recording.maker(counted) if type(counted) is Use else None
    return (
        type(order) is Use
        and counted.layout.shape == order.layout.shape == index.layout.shape
        and made is not None
        and made.op is _ATEN.arange.default
        and _permutes(order, recording.maker(order), recording)
    )


def inverted(call: Call, recording: Recording) -> Use | None:
    """The permutation whose inverse a call writes; None if it does anything else."""
    if call.op is not _ATEN.index_put_.default or len(call.written) != 1:
        return None
    ((before, number),) = call.written
    made = Use(number, recording.buffers[number].layout)
    is_whole = call.args[0] == Use(before, recording.buffers[before].layout)
    order: Use = call.args[1][0]
    return order if is_whole and _permutes(made, call, recording) else None


def _inverse_of(permutation: Use, recording: Recording, has: Callable[[int], bool]) -> Use | None:
    """The known inverse of a permutation, if it can be read."""
    made = [(order, call.written[0][1]) for call in recording.calls if (order := inverted(call, recording))]
    pairs = [(order, Use(number, recording.buffers[number].layout)) for order, number in made]
    both = [pair for one, other in pairs for pair in ((one, other), (other, one))]
    return next((each for own, each in both if own == permutation and has(each.buffer)), None)


def inverse_permutation(permutation: Tensor) -> Tensor:
    """Where each number below its length stands in ``permutation``: int64, (rows,), contiguous."""
    inverse, count = torch.empty_like(permutation), len(permutation)
    run(_inverses, -(-count // BLOCK), permutation, inverse, count, BLOCK=BLOCK, num_warps=4)
    return inverse


def index_put_rows(
    initial: Tensor | int,
    index: Tensor | None,
    values: Tensor,
    times: int = 0,
    order: Tensor | None = None,
    in_turn: bool = False,
) -> Tensor:
    """``initial.index_put([index], values, accumulate=True)``.

    initial: (places, ...), or the number of places, which are zeros; index: int64, (rows,); values: (rows, ...); all of
    them contiguous. times: if it is not 0, ``index`` is a permutation, and its rows go where that leads, divided by
    ``times`` and rounded down. order: the inverse of it, if that is known. in_turn: whether to round each sum.
    """
    count = initial if isinstance(initial, int) else len(initial)
    starts = order
    if order is None:
        assert index is not None
        if times:
            order = starts = inverse_permutation(index)
        else:
            places, order = index.remainder(count).sort(stable=True)
            starts = torch.searchsorted(places, torch.arange(count + 1, device=places.device))
    sums = values.new_empty((count, *values.shape[1:]))
    width, start = values[:1].numel(), None if isinstance(initial, int) else initial
    at_once = ROWS_AT_ONCE if times == 0 else 1 << (min(times, ROWS_AT_ONCE) - 1).bit_length()
    columns = 128 if in_turn else min(2048, 256 * ROWS_AT_ONCE // at_once)
    settings = {"TIMES": times, "IN_TURN": in_turn, "ROWS_AT_ONCE": at_once, "COLUMNS_AT_ONCE": columns}
    programs = count * -(-width // columns)
    run(_sums, programs, values, start, order, starts, sums, width, **settings, num_warps=1 if in_turn else 4)
    return sums


class InTurn:
    """``index_put_rows`` in turn, if its first call gives ATen's bits: other releases may add up in other orders."""

    def __init__(self) -> None:
        self._run: Callable[..., Tensor] = PlannedCall(index_put_rows) if is_fake() else self._compared

    def __call__(self, *arguments: Any) -> Tensor:
        return self._run(*arguments)

    def _compared(self, *arguments: Any) -> Tensor:
        expected = self._aten(*arguments)
        if not is_in_cuda_graph():
            is_exact = not count_different(expected, index_put_rows(*arguments))
            self._run = PlannedCall(index_put_rows) if is_exact else self._aten
        return expected

    @staticmethod
    def _aten(count: int, index: Any, values: Tensor, times: int, order: Any, in_turn: bool) -> Tensor:
        index = order.argsort() if index is None else index
        index = index.div(times, rounding_mode="floor") if times else index
        return values.new_zeros((count, *values.shape[1:])).index_put([index], values, accumulate=True)
