"""How logits are cut into blocks of columns, where each block is held, and the matrix products of it.

Blocks may be held in the memory of the weight's gradient, as ``linear_cross_entropy`` describes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from recompute.errors import KernelError
from recompute.kernels import launch
from recompute.kernels.linears import cast
from recompute.kernels.loss_settings import wide_dtype

WIDTH = 8448
"""Columns of a block: 64 · 132, which makes matrix products whole waves of tiles on an H200, of 132 multiprocessors."""

WIDTH_STEP = 256
"""The widths of narrower blocks are multiples of this, which is the width of a matrix product's tile."""


class BlockPlan(NamedTuple):
    """How the logits are cut into blocks of columns, and where each block is held from forward to backward."""

    width: int
    """Columns of each block; the last may have fewer."""
    stride: int
    """Elements from one row of a block to the next."""
    blocks: int
    in_gradient: int
    """How many blocks, from the first one on, are held in the memory of the weight's gradient."""
    beside: int
    """How many of the next blocks are held in memory of their own. Backward makes the others again."""


def plan_blocks(
    tokens: int, vocabulary: int, hidden: int, itemsize: int, logits_bytes: int, hold: bool, trains_weight: bool
) -> BlockPlan:
    """Cut the logits into blocks, so that ``logits_bytes`` hold at least one.

    Args:
        logits_bytes: memory for logits. If it is less than the narrowest block takes, that much is used.
        hold: whether forward is to hold logits for backward.
        trains_weight: whether the weight has a gradient. Its memory can hold some of them.
    """
    column_nbytes = max(tokens, 1) * itemsize
    columns = logits_bytes // column_nbytes
    stride = -(-vocabulary // 64) * 64  # rows that begin at multiples of 128 bytes, of an odd vocabulary too
    if columns >= stride or vocabulary <= WIDTH_STEP or tokens == 0:
        return BlockPlan(vocabulary, stride, 1, 0, int(hold))
    width = min(max(columns // WIDTH_STEP, 1) * WIDTH_STEP, WIDTH)
    blocks = -(-vocabulary // width)
    in_gradient = beside = 0
    if hold and trains_weight:
        # Block i of n is at `room - (n - i) * size`, and must not be reached by the gradients of blocks 0 to i: both
        # sides are linear in i, so that the first and the last block decide.
        room, size, rows = _aligned(vocabulary * hidden), tokens * width, width * hidden
        in_gradient = max(0, min((room - rows) // size, (room - size) // rows, blocks))
    if hold:
        fit = max(columns // width, 1)
        # Memory for one block is left for making the others again, unless all are held.
        beside = blocks - in_gradient if in_gradient + fit >= blocks else fit - 1
    return BlockPlan(width, width, blocks, in_gradient, beside)


def _aligned(elements: int) -> int:
    return elements // 64 * 64


def logits_nbytes(op: str, logits_bytes: float | None, tokens: int, vocabulary: int, itemsize: int) -> int:
    """The memory for logits that ``logits_bytes`` of the op called ``op`` allows: None is one block."""
    if logits_bytes is None:
        return tokens * itemsize * WIDTH
    if not logits_bytes >= 0:
        raise KernelError(f"{op}: logits_bytes is {logits_bytes}; expected at least 0 bytes.")
    return int(min(logits_bytes, tokens * itemsize * (vocabulary + 64)))


class Head(NamedTuple):
    """The operands of a head, as ops take them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    thin: Tensor | None = None
    """(..., R): an adapter adds its product with ``up``."""
    up: Tensor | None = None
    """(V, R)"""

    @property
    def adapter(self) -> tuple[Tensor, Tensor] | None:
        return None if self.thin is None or self.up is None else (self.thin, self.up)

    @property
    def tokens(self) -> int:
        return math.prod(self.hidden.shape[:-1])

    def plan(self, logits_bytes: int, hold: bool, trains_weight: bool) -> BlockPlan:
        (vocabulary, hidden), itemsize = self.weight.shape, self.hidden.dtype.itemsize
        return plan_blocks(self.tokens, vocabulary, hidden, itemsize, logits_bytes, hold, trains_weight)

    def narrowed(self, narrow: torch.dtype | None) -> Head:
        """The same head, with parameters and ``thin`` as autocast to ``narrow`` casts them."""
        return Head(self.hidden, *cast(self[1:], narrow))

    def held(self, plan: BlockPlan) -> tuple[Tensor | None, Tensor | None]:
        """Memory for the logits that are held until backward: that of the weight's gradient, and more beside it."""
        dweight = self.weight.new_empty(self.weight.shape) if plan.in_gradient > 0 else None
        size = plan.beside * self.tokens * plan.stride
        return dweight, self.hidden.new_empty(size) if plan.beside > 0 else None

    def blocks(self, plan: BlockPlan, dweight: Tensor | None, kept: Tensor | None) -> Blocks:
        return Blocks(plan, self.of_rows(), dweight, kept)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Head:
        """The same head on the rows that ``move`` returns, (..., any)."""
        return self._replace(hidden=move(self.hidden), thin=None if self.thin is None else move(self.thin))

    def of_rows(self) -> Head:
        """The same head with tokens in one dimension."""
        return self.moved(lambda rows: rows.reshape(-1, rows.shape[-1]))

    def logits(self) -> Tensor:
        """All of them, in plain PyTorch."""
        logits = F.linear(self.hidden, self.weight, self.bias)
        return logits if self.adapter is None else logits + F.linear(*self.adapter)


def may_hold(head: Head) -> bool:
    """Whether a backward is to come, and logits may be held for it."""
    trains = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in head)
    # Compiled code would have to copy the memory that backward writes over.
    return trains and not torch.compiler.is_compiling()


class HeadBackward:
    """The two ops of a head's backward: one makes all logits again, the other reads those that forward has held."""

    def __init__(self, name: str, operands: slice, held: str, schema: str, gradients: Callable[..., Any]):
        """Register the ops.

        Args:
            operands: which arguments are hidden states, the weight, and others, each with a gradient if it is wanted.
                The last arguments say so of each.
            held: the memory that forward has left, as a schema has it. The weight's gradient comes first.
            schema: all other arguments.
            gradients: called with what is ``held`` and the other arguments, and with ``holds=False`` if forward has
                left no logits. It writes the weight's gradient, and returns those of the others.
        """
        count, parts = operands.stop - operands.start, held.count(",") + 1

        def outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
            pairs = zip(arguments[operands], arguments[-count:], strict=True)
            return tuple(like.new_empty(like.shape) if like is not None and needed else None for like, needed in pairs)

        def again(*arguments: Any) -> tuple[Tensor | None, ...]:
            weight, needs_weight = arguments[operands][1], arguments[1 - count]
            dweight = weight.new_empty(weight.shape) if needs_weight else None
            dhidden, *others = gradients(dweight, *[None] * (parts - 1), *arguments, holds=False)
            return dhidden, dweight, *others

        def held_outputs(*arguments: Any) -> tuple[Tensor | None, ...]:
            dhidden, _, *others = outputs(*arguments[parts:])
            return dhidden, *others

        of = ["Tensor? dhidden", *("Tensor? dbias", "Tensor? dthin", "Tensor? dup")[: count - 2]]
        results = ", ".join([of[0], "Tensor? dweight", *of[1:]])
        self._again = launch.register(f"{name}_backward({schema}) -> ({results})", again, outputs)
        held_schema = f"{name}_backward_held({held}, {schema}) -> ({', '.join(of)})"
        self._held = launch.register(held_schema, gradients, held_outputs)

    def run(self, ctx: Any, weight: Tensor, arguments: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, of ``weight`` and others.

        This writes over the memory that forward has left in ``ctx.held``: the weight's gradient, then logits. So a
        second backward has none of it.
        """
        if ctx.held is None or torch.compiler.is_compiling():
            return self._again(*arguments)
        (dweight, *kept), ctx.held = ctx.held, None
        if dweight is None and ctx.needs_input_grad[1]:
            dweight = weight.new_empty(weight.shape)
        dhidden, *others = self._held(dweight, *kept, *arguments)
        return dhidden, dweight if ctx.needs_input_grad[1] else None, *others


class Blocks:
    """The blocks of a plan's logits: where each is, and the matrix product that makes it."""

    def __init__(self, plan: BlockPlan, head: Head, dweight: Tensor | None, kept: Tensor | None):
        """head: with tokens in one dimension."""
        self.plan, self.head = plan, head
        self.size = head.tokens * plan.stride
        self.dweight = None if dweight is None else dweight.view(-1)[: _aligned(dweight.numel())]
        self.kept = kept
        self.spare = head.hidden.new_empty(self.size) if self.held < plan.blocks else None

    @property
    def held(self) -> int:
        return self.plan.in_gradient + self.plan.beside

    def columns(self, block: int) -> slice:
        first = block * self.plan.width
        return slice(first, min(first + self.plan.width, len(self.head.weight)))

    def place(self, block: int) -> Tensor:
        """The memory of a block: (tokens, columns)."""
        memory: Tensor | None
        if block < self.plan.in_gradient:
            memory, index = self.dweight, block - self.plan.in_gradient
        elif block < self.held:
            memory, index = self.kept, block - self.held
        else:
            memory, index = self.spare, -1
        assert memory is not None, "a block is held nowhere that the plan does not name"
        start = memory.numel() + index * self.size
        columns = self.columns(block)
        width = columns.stop - columns.start
        # cuBLAS rounds twice where it adds a bias to rows that are apart (H200, torch 2.11: 1.3 of the error), and
        # oneDNN's bfloat16 products read what is between these (torch 2.14).
        is_dense = self.head.bias is not None or not launch.is_on_cuda(memory)
        stride = width if is_dense else self.plan.stride
        return memory[start : start + self.head.tokens * stride].view(-1, stride)[:, :width]

    def make(self, block: int) -> Tensor:
        """The logits of a block, in its place."""
        columns, logits, (hidden, weight, bias, thin, up) = self.columns(block), self.place(block), self.head
        if bias is None:
            torch.mm(hidden, weight[columns].t(), out=logits)
        else:
            torch.addmm(bias[columns], hidden, weight[columns].t(), out=logits)
        if thin is not None and up is not None:
            torch.addmm(logits, thin, up[columns].t(), out=logits)
        return logits

    def get(self, block: int) -> Tensor:
        """The logits of a block: those that are held, or made again."""
        return self.place(block) if block < self.held else self.make(block)

    def gradients(
        self,
        differentiate: Callable[[int, Tensor], None],
        dweight: Tensor | None,
        needs_hidden: bool,
        needs_bias: bool,
        needs_thin: bool = False,
        needs_up: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of hidden states and ``thin``, in the dtype they are summed in, of the bias and of ``up``.

        differentiate: turns the logits of a block, of that number, into their gradient.
        dweight: the weight's gradient is written to it, and so over the logits that are held there.
        """
        hidden, weight, bias, thin, up = self.head
        sum_dtype = wide_dtype(hidden) if self.plan.blocks > 1 else hidden.dtype
        dhidden = hidden.new_zeros(hidden.shape, dtype=sum_dtype) if needs_hidden else None
        dthin = thin.new_zeros(thin.shape, dtype=sum_dtype) if needs_thin and thin is not None else None
        dbias = bias.new_empty(bias.shape) if needs_bias and bias is not None else None
        dup = up.new_empty(up.shape) if needs_up and up is not None else None
        for block in range(self.plan.blocks):
            columns, tile = self.columns(block), self.get(block)
            differentiate(block, tile)
            if dhidden is not None:
                _add_product(dhidden, tile, weight[columns])
            if dthin is not None and up is not None:
                _add_product(dthin, tile, up[columns])
            if dbias is not None:
                torch.sum(tile, 0, out=dbias[columns])
            if dup is not None and thin is not None:
                torch.mm(tile.t(), thin, out=dup[columns])
            if dweight is not None:
                torch.mm(tile.t(), hidden, out=dweight[columns])
        return dhidden, dthin, dbias, dup


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, where ``total`` may have a wider dtype than the others."""
    if launch.is_on_cuda(total) and total.dtype is not left.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), out=total)
