"""DTensors: each is a part that this rank has, a plain tensor, and a layout over all ranks.

An op on DTensors becomes ops on the parts, and collectives between ranks. A tape sees these, below the DTensor, and
drops and regenerates their outputs as those of any other op. It holds no DTensor, but its layout alone. A part does not
count it when its DTensor is changed in place, so the DTensor's own version is checked (invariant 5).

Other libraries lend a parameter its memory for each use and take it back. The engine holds the parameter object. It
holds its memory only if that is the parameter's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def are_sharded(kinds: Iterable[type]) -> bool:
    """Whether one of these classes has another tensor inside, and ops run on that."""
    ours = _kinds()
    return any(kind in ours for kind in kinds)


def has_layout(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    kind = type(tensor)
    return kind not in _PLAIN and kind is _class_in("torch.distributed.tensor", "DTensor")


def local_of(tensor: Any) -> Tensor:
    """This rank's part of ``tensor``, once the collective that fills it is done; ``tensor`` itself if it is plain."""
    if type(tensor) in _PLAIN or type(tensor) not in _kinds():
        return tensor
    if has_layout(tensor):
        tensor = tensor._local_tensor
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def is_managed_elsewhere(parameter: Tensor) -> bool:
    """Whether a library swaps or frees the memory of a parameter at times of its own choice, as DeepSpeed's ZeRO-3."""
    return hasattr(parameter, "ds_id")  # set by ``deepspeed.zero.Init`` and ``deepspeed.initialize``


def may_hold_memory(parameter: Tensor) -> bool:
    """Whether the memory of a parameter may be held apart from it: if it is neither a library's nor a DTensor's."""
    return not (has_layout(parameter) or is_managed_elsewhere(parameter))


def _kinds() -> tuple[Any, ...]:
    """The classes of DTensors, and of collectives' results that are not waited for yet."""
    return (
        _class_in("torch.distributed.tensor", "DTensor"),
        _class_in("torch.distributed._functional_collectives", "AsyncCollectiveTensor"),
    )


def _class_in(module: str, name: str) -> Any:
    """A class of a module that may be slow to import, or missing, so it is not imported here.

    If nobody has imported it there are no such tensors, and this returns something that is no tensor's class.
    """
    return getattr(sys.modules.get(module), name, _class_in)
