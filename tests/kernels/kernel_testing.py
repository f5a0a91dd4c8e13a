"""What the tests of all ops have in common: dtypes, inputs, errors against float64, and bits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor

FLOAT32_ROUNDING = 2**-24
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_device_of_compiled_code = pytest.mark.parametrize(
    "device",
    [
        "reference",
        *([] if torch.cuda.is_available() or find_spec("triton") is None else slow("interpreter")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
"""A compiler sees the same ops whatever runs in them: the interpreter is slow here, but for one op's test."""

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def make(*shape: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


def same_bits(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(left, right, strict=True))
