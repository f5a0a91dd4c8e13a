"""Parts are moved to their places, whatever their strides are here and there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_testing import make, same_bits
from torch import Tensor

from recompute.kernels import join as kernels
from recompute.kernels import launch
from recompute.kernels.join import join

B, S, HEADS = 2, 5, 3


def heads(width: int, seed: int, order: tuple[int, ...] = (0, 2, 1, 3)) -> Tensor:
    """(B, HEADS, S, width), which lies in memory as ``order`` says."""
    sizes = (B, HEADS, S, width)
    back = [order.index(dim) for dim in range(4)]
    return make(*[sizes[dim] for dim in order], seed=seed).permute(back)


PARTS = {
    "heads of one width": [heads(16, 0, (0, 1, 2, 3)), heads(16, 1), heads(16, 2)],
    "heads of several widths": [heads(40, 0), heads(8, 1, (0, 1, 2, 3)), heads(2, 2, (1, 0, 2, 3))],
    "one part": [heads(7, 0, (2, 0, 1, 3))],
    "four parts": [heads(8, seed) for seed in range(4)],
    "the last dimension has gaps": [heads(16, 0, (0, 3, 1, 2)), heads(16, 1)],
    "a last dimension of one": [heads(16, 0), heads(1, 1, (1, 0, 2, 3))],
    "an expanded part": [heads(16, 0), heads(16, 1)[:, :1].expand(-1, HEADS, -1, -1)],
    "wide rows": [make(2, 1, 1, 1500, seed=seed) for seed in range(2)],
    "nothing": [torch.empty(B, HEADS, 0, 4), torch.empty(B, HEADS, 0, 4)],
}


def given(part: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """The part, with its strides."""
    memory = part.as_strided((part.untyped_storage().nbytes() // 4,), (1,)).to(device, dtype)
    return memory.as_strided(part.shape, part.stride())


def arguments(parts: list[Tensor]) -> tuple[Any, ...]:
    """For parts beside each other in the last dimension, of a result whose heads of a token lie together."""
    batch, count, length, _ = parts[0].shape
    width = sum(part.shape[-1] for part in parts)
    stride = (length * count * width, width, count * width, 1)
    places: list[int] = []
    for place in range(len(parts)):
        places += (*stride, sum(part.shape[-1] for part in parts[:place]))
    return *parts, *[None] * (4 - len(parts)), (batch, count, length, width), stride, tuple(places)


def expected(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_it_is_cat_and_a_copy(name: str, dtype: torch.dtype, device: str) -> None:
    parts = [given(part, device, dtype) for part in PARTS[name]]
    found = join(*arguments(parts))
    assert same_bits([found], [expected(parts)])
    assert found.is_contiguous() or found.transpose(1, 2).is_contiguous()


def test_bits_that_are_no_numbers_are_moved_as_they_are(device: str) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(2, 4, 64, 128)
    part = bits.view(torch.bfloat16).to(device).transpose(1, 2).contiguous().transpose(1, 2)
    found = join(*arguments([part, part]))
    assert torch.equal(found.view(torch.int16), expected([part.view(torch.int16)] * 2))


@pytest.mark.parametrize(("name", "launches"), [("four parts", 1), ("heads of several widths", 3), ("nothing", 0)])
def test_parts_of_the_same_sizes_are_one_launch(name: str, launches: int, device: str, launched: list[Any]) -> None:
    parts = [part.to(device) for part in PARTS[name]]
    join(*arguments(parts))
    runs_kernels = launch.uses_triton(parts[0])
    assert [kernel for kernel, _ in launched] == [kernels._kernel] * (launches if runs_kernels else 0)


def test_dimensions_that_are_one_here_and_there_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "uses_triton", lambda *tensors: True)
    side, one = kernels._Side, kernels._Side(1, 0, 0)
    part = torch.empty(2, 5, 3, 1, 8)
    assert kernels._sides(part, (240, 48, 16, 7, 1)) == [one, one, side(30, 16, 8), side(8, 1, 1)]
    assert kernels._sides(part.transpose(1, 2), (240, 80, 16, 7, 1)) == [
        *(side(2, 240, 120), side(3, 80, 8), side(5, 16, 24), side(8, 1, 1)),
    ]
    assert kernels._sides(torch.empty(1), (1,)) == [one, one, one, side(1, 1, 1)]
    assert kernels._sides(part.transpose(2, 4), (120, 24, 3, 7, 1)) is None


def test_a_compiler_and_a_mode_see_the_op() -> None:
    parts = PARTS["heads of one width"]
    compiled = torch.compile(lambda *parts: join(*arguments(list(parts))), backend="aot_eager", fullgraph=True)
    assert same_bits([compiled(*parts)], [expected(parts)])
