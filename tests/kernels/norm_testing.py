"""What the tests of norms have in common."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

INTERPRETERS_ROUNDING = 2**-23
"""NumPy adds rows one after the other, where the kernels that it interprets add them in a tree."""

HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda packed: packed[..., :4, :].contiguous().transpose(1, 2),
    "sliced": lambda packed: packed[..., 1:5, :],
    "sliced and transposed": lambda packed: packed[..., 1:5, :].transpose(1, 2),
    "sequence first": lambda packed: packed[..., :4, :].contiguous().transpose(0, 1),
    "shared": lambda packed: packed[:1].expand(packed.shape),
}
