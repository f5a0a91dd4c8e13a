"""Which ops tolerate values that come back a little off, as from codes of 8 bits.

Their gradients are linear in the saved tensors, or as smooth as the activation's slope. So an error in a saved tensor
becomes an error of about the same size, relatively, in a gradient, and does not grow in between. Norms divide by saved
tensors, softmax and attention exponentiate them, routers compare them: none of these ops is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from recompute.engine.cut.layout import Layout, is_dense

_TOLERATE = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "_grouped_mm", "convolution"),
        *("mul", "silu", "gelu"),
    )
)
_PASS_ON = frozenset(f"aten.{name}" for name in ("add", "sub", "neg", "_to_copy", "clone", "native_dropout"))

LEAST_NUMEL = 1 << 12
"""Smaller tensors are held as they are."""


def tolerates(name: str, inputs: Sequence[int]) -> bool:
    """Whether an op's backward tolerates saved values that are off. inputs: the values that it reads.

    A product of a value with itself does not: norms begin with one.
    """
    return name in _TOLERATE and not (name == "aten.mul" and len(inputs) != len(set(inputs)))


def passes_on(name: str, inputs: Sequence[int]) -> bool:
    """Whether an op's outputs are off by about as much as its inputs.

    None of these ops saves its output, but for the mask of a dropout, which is no number.
    """
    return name in _PASS_ON or tolerates(name, inputs)


def can_be_codes(layout: Layout, nbytes: int) -> bool:
    """Whether a tensor is of numbers that codes stand for, and fills its memory.

    nbytes: of that memory.
    """
    is_of_numbers = layout.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return is_of_numbers and layout.shape.numel() >= LEAST_NUMEL and is_dense(layout, nbytes)
