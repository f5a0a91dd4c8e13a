"""DeepSpeed: ZeRO-3 gives a parameter its memory for each use, and frees it as it sees fit."""

from __future__ import annotations

from torch import Tensor

from recompute.engine import parameter_memory


def _is_partitioned(parameter: Tensor) -> bool:
    return hasattr(parameter, "ds_id")  # set by ``deepspeed.zero.Init`` and ``deepspeed.initialize``


parameter_memory.register(_is_partitioned)
