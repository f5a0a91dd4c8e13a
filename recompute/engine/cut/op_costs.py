"""The cost of an op: its arithmetic and its traffic, and the seconds that they take on the accelerator of ``ops``."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from recompute.engine.cut.ops import BANDWIDTH, FLOPS, OpFacts, facts, tensors_in


def seconds(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """The time of ``output = op(*args, **kwargs)`` on the nominal accelerator: its arithmetic's or its traffic's.

    The longer one of the two counts.
    """
    flops, nbytes = work(op, args, kwargs, output)
    return max(flops / FLOPS, nbytes / BANDWIDTH)


def work(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[float, int]:
    """The floating-point operations of ``output = op(*args, **kwargs)``, if it is costly, and the bytes that it moves.

    ``torch.utils.flop_counter`` does not serve for this: its formulas refuse some shapes (attention with grouped
    heads), read lengths back from the device, and know no op of other libraries.
    """
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, kwargs, output)))
    return _flops(facts(op), args, output), nbytes


def _flops(known: OpFacts, args: tuple[Any, ...], output: Any) -> float:
    """The arithmetic of a costly op; 0 for other ops, and for arguments that its family does not expect."""
    operands = [value for value in args if isinstance(value, Tensor)]
    result = next(iter(tensors_in(output)), None)
    if result is None or len(operands) < 2:
        return 0.0
    if known.family == "gemm":
        left = operands["add" in known.name]  # the first operand of ``addmm`` and its like is added
        return 2.0 * result.numel() * math.prod(left.shape[-1:])
    if known.family == "convolution":
        data, weight = operands[:2]
        is_transposed = known.name == "aten.convolution" and args[6]
        return 2.0 * (data if is_transposed else result).numel() * math.prod(weight.shape[1:])
    if known.family == "attention":
        query, key = operands[:2]  # (batch, heads, tokens, size), or ([batch,] tokens, heads, size)
        tokens = -2 if "scaled_dot_product" in known.name else -3
        return 4.0 * query.numel() * math.prod(key.shape[tokens:][:1])
    return 0.0
