"""Whether the memory of a parameter is its own, or a library's, which lends it for each use and takes it back.

The engine holds the parameter object. It holds its memory only if that is the parameter's own.
"""

from __future__ import annotations

from torch import Tensor

from recompute.engine.dtensors import has_layout


def is_managed_elsewhere(parameter: Tensor) -> bool:
    """Whether a library swaps or frees the memory of a parameter at times of its own choice, as DeepSpeed's ZeRO-3."""
    return hasattr(parameter, "ds_id")  # set by ``deepspeed.zero.Init`` and ``deepspeed.initialize``


def may_hold_memory(parameter: Tensor) -> bool:
    """Whether the memory of a parameter may be held apart from it: if it is neither a library's nor a DTensor's."""
    return not (has_layout(parameter) or is_managed_elsewhere(parameter))
