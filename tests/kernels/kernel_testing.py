"""What the tests of all ops have in common: dtypes, inputs, errors against float64, and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

FLOAT32_ROUNDING = 2**-24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def same_bits(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(left, right, strict=True))
