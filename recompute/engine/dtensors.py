"""DTensors: a tensor of this rank, and a layout over all of them.

An op on DTensors is ops on what each rank has, and collectives between those. A tape sees these, below the DTensor,
and drops and regenerates them as any others; of the DTensor only its layout is held. What a rank has counts no version
when the DTensor is changed in place, so the DTensor's own count is watched (invariant 5).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def are_sharded(kinds: Iterable[type]) -> bool:
    """Whether tensors of one of these classes have others inside that the ops are carried out on."""
    ours = _kinds()
    return any(kind in ours for kind in kinds)


def has_layout(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    return type(tensor) is _class_in("torch.distributed.tensor", "DTensor")


def local_of(tensor: Any) -> Tensor:
    """What this rank has of ``tensor``, as soon as the collective that fills it is done: itself, if it is plain."""
    if type(tensor) in (Tensor, nn.Parameter) or type(tensor) not in _kinds():
        return tensor
    if has_layout(tensor):
        tensor = tensor._local_tensor
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def _kinds() -> tuple[Any, ...]:
    """DTensors, and what stands for the result of a collective until somebody waits for it."""
    return (
        _class_in("torch.distributed.tensor", "DTensor"),
        _class_in("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )


def _class_in(module: str, name: str) -> Any:
    """A class of a module that is slow to import, or not there at all; of what was not imported there is no tensor."""
    return getattr(sys.modules.get(module), name, _class_in)
