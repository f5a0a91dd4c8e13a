"""Comparing tensors bit for bit, and the debug switch that so compares regenerated tensors with the dropped ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_PIECE_NBYTES = 2**22
_verifying = os.environ.get("RECOMPUTE_VERIFY", "0") not in ("", "0")


@contextmanager
def verifying() -> Iterator[None]:
    """Compare every regenerated tensor, bit for bit, with the dropped one, which is held for that: a debug switch.

    Holds for tensors that forward drops inside. ``RECOMPUTE_VERIFY=1`` in the environment does it for the process.
    A difference raises ``RegenerationError`` that names the module and the op.
    """
    global _verifying
    before, _verifying = _verifying, True
    try:
        yield
    finally:
        _verifying = before


def is_verifying() -> bool:
    return _verifying


def count_different(value: Tensor, original: Tensor) -> int:
    """How many elements of two tensors of one shape and dtype differ in any bit."""
    if isinstance(value, FakeTensor):
        return 0
    # A single element may have any stride, and with some it cannot be viewed as bytes.
    flat = (each.detach().contiguous().as_strided((each.numel(),), (1,)) for each in (value, original))
    return sum(_count_different(one, other, value.element_size()) for one, other in in_pieces(*flat))


def _count_different(value: Tensor, original: Tensor, element_nbytes: int) -> int:
    found, expected = value.view(torch.uint8), original.view(torch.uint8)
    if torch.equal(found, expected):
        return 0
    return int((found != expected).view(-1, element_nbytes).any(1).sum())


def in_pieces(one: Tensor, other: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Two flat tensors of one dtype, a part of both at a time: comparing makes tensors as large as what it compares."""
    elements = _PIECE_NBYTES // one.element_size()
    if one.numel() <= elements:
        return [(one, other)]
    return zip(one.split(elements), other.split(elements), strict=True)
