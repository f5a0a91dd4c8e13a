"""Makes two runs of a model comparable, and says by how much their tensors differ."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recompute.engine.bit_comparison import count_different

COMPRESSION_TOLERANCE = 0.125
"""How far a gradient may be from the exact one, relative to its norm, where what backward reads was held in 8 bits.

A number that comes back from codes of fp8 is off by at most 1/16 (``kernels.blockwise_8bit``), and a product of two by
twice that. Errors that were all that large and of one sign would add up to this. They are smaller, of either sign, and
cancel out in a gradient's sums: on the models of the tests the worst gradient is off by 2 to 6 per cent.
"""


def max_difference(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are equal bit for bit, or both are None. A NaN equals itself, and 0 does not equal -0."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype is other.dtype and count_different(one, other) == 0


def relative_error(tensors: Iterable[Tensor], reference: Iterable[Tensor]) -> float:
    """‖tensors - reference‖ / ‖reference‖ over all of them together, in float64."""
    difference = norm = 0.0
    for one, other in zip(tensors, reference, strict=True):
        difference += (one.double() - other.double()).square().sum().item()
        norm += other.double().square().sum().item()
    return math.sqrt(difference / norm) if norm else math.inf if difference else 0.0


def wider_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that shows ``model``'s rounding errors: float32 if it calculates in less, else float64.

    For bfloat16 and float16, float32 is exact enough, and has the fused attention without which memory runs out.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_narrow = torch._C._is_any_autocast_enabled() or dtypes & {torch.bfloat16, torch.float16}
    return torch.float32 if is_narrow else torch.float64


class Widened(TorchFunctionMode):
    """Has code that casts to float32 cast to `dtype` instead: Hugging Face's norms, rotary tables and losses do.

    Attention with fewer heads of keys than of queries runs over copies of them. On CUDA it has no other fused kernel in
    float32, and without one it holds every pair of positions.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(value: Any) -> Any:
            return self._dtype if value is torch.float32 else value

        if func is Tensor.float:
            func, args = Tensor.to, (*args, torch.float32)
        elif func is F.scaled_dot_product_attention:
            func = _attention_with_a_key_for_each_query
        return func(*map(widened, args), **{name: widened(value) for name, value in (kwargs or {}).items()})


def _attention_with_a_key_for_each_query(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
) -> Tensor:
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (each.repeat_interleave(heads // each.shape[-3], dim=-3) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


@contextmanager
def deterministic(on_cuda: bool) -> Iterator[None]:
    """On CUDA, have ops such as attention's backward add in a fixed order; otherwise two equal runs differ.

    It costs time. On the CPU they add in a fixed order anyway.
    """
    if not on_cuda:
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch._C._get_cudnn_benchmark()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic algorithms require it
    torch.use_deterministic_algorithms(True)  # cuDNN's attention ignores this if warn_only is set
    # Otherwise two runs may choose different algorithms. ``torch.backends.cudnn`` refuses to be set once a library has
    # frozen its flags, as torch's own testing tools do.
    torch._C._set_cudnn_benchmark(False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch._C._set_cudnn_benchmark(before[1])
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
