"""The gradient of a bias: as exact as torch's sum, the same in every run, whatever the strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_testing import FLOAT32_ROUNDING, each_dtype, make, relative_error, same_bits
from torch import Tensor

from recompute.kernels import column_sum as kernels
from recompute.kernels import launch, norm_kernels
from recompute.kernels.column_sum import column_sum

SHAPES = [(70, 48), (1, 1), (33, 257), (300, 16), (0, 5), (5, 0)]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("multiprocessors")
def test_errors_are_no_larger_than_torchs(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    x = make(*shape, device=device, dtype=dtype) + 0.5  # the sum of values about zero would be lost in cancellation
    found, exact = column_sum(x, False), x.double().sum(0)
    assert (found.shape, found.dtype) == (exact.shape, dtype)
    assert relative_error(found, exact) <= 1.05 * relative_error(x.sum(0), exact) + FLOAT32_ROUNDING
    assert same_bits([found], [column_sum(x, False)])


def test_the_dimension_is_kept_where_that_is_asked_for(device: str) -> None:
    x = make(40, 32, device=device)
    assert same_bits([column_sum(x, True)], [column_sum(x, False)[None]])


def with_gaps(x: Tensor) -> Tensor:
    return torch.cat([x, x], 1)[:, : x.shape[1]]


def from_an_odd_address(x: Tensor) -> Tensor:
    return torch.cat([x.new_empty(1), x.flatten()])[1:].view(x.shape)


STRIDES = {
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": with_gaps,
    "from an odd address": from_an_odd_address,
}


@pytest.mark.parametrize("width", [32, 24])
@pytest.mark.parametrize("strides", STRIDES)
def test_the_bits_hang_on_no_strides(strides: str, width: int, device: str) -> None:
    x = make(100, width, device=device)
    if launch.uses_triton(x):  # torch's own sum takes another order
        assert same_bits([column_sum(STRIDES[strides](x), False)], [column_sum(x, False)])


def test_an_expanded_gradient_is_summed(device: str) -> None:
    x = make(1, 32, device=device)
    assert relative_error(column_sum(x.expand(64, 32), False), 64 * x[0].double()) <= 1e-6


def test_it_is_two_launches(device: str, launched: list[Any]) -> None:
    x = make(40, 32, device=device)
    column_sum(x, False)
    expected = [kernels._parts_kernel, norm_kernels._sum_kernel] if launch.uses_triton(x) else []
    assert [kernel for kernel, _ in launched] == expected


def test_float64_stays_float64(device: str) -> None:
    x = make(50, 8, device=device, dtype=torch.float64)
    assert same_bits([column_sum(x, False)], [x.sum(0)])
