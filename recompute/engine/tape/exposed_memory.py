"""Memory that others can write to without an op: it was handed out as an array, a capsule or an address.

Whoever has an array or an address may write at any time, and no dispatcher sees it. So a tape holds a tensor whose
memory has been handed out as autograd would hold it, and runs nothing again that reads it.

The few methods that hand memory out are wrapped once the first region is made. Memory that was handed out before that,
or came from an array by ``torch.from_numpy``, is recognized too: torch does not let it be resized. Only a region's
arguments are checked for this, because an array that its own code makes into a tensor is mostly used for nothing else.
Nothing here sees a C++ extension that takes the tensor itself and writes to it without saying so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.thread_state import local, unseen_by_tapes

_ARRAYS: tuple[tuple[Any, str], ...] = (
    (Tensor, "numpy"),  # which ``__array__`` and ``np.asarray`` call
    (Tensor, "__dlpack__"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
)
_ADDRESSES: tuple[tuple[Any, str], ...] = (
    (Tensor, "data_ptr"),  # which ``__cuda_array_interface__`` and Triton's launches call
    (torch.UntypedStorage, "data_ptr"),  # and a TypedStorage's
    (torch.UntypedStorage, "__setitem__"),
    (torch.UntypedStorage, "fill_"),
)

_lock = threading.Lock()
_is_watching = False
_exposed: dict[int, StorageWeakRef] = {}
"""The storages that were seen handed out, by the address of the StorageImpl. The weak reference keeps the address from
being used again (invariant 3)."""
_most = 256


def watch() -> None:
    """From now on, tapes learn of memory that is handed out while they run."""
    global _is_watching
    with _lock:
        if _is_watching:
            return
        for doors, is_array in ((_ARRAYS, True), (_ADDRESSES, False)):
            for place, name in doors:
                setattr(place, name, _telling(getattr(place, name), is_array))
        _is_watching = True


def _telling(door: Callable[..., Any], is_array: bool) -> Callable[..., Any]:
    @functools.wraps(door)
    def method(memory: Any, *args: Any, **kwargs: Any) -> Any:
        if local.active_frames:
            for frame in local.active_frames:
                frame.hand_out(memory, is_array)
        elif is_array and type(memory) is Tensor and memory.layout is torch.strided:
            expose(memory.untyped_storage())
        return door(memory, *args, **kwargs)

    return method


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A tensor that sees all of a storage."""
    with unseen_by_tapes:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def expose(storage: torch.UntypedStorage) -> None:
    """Remember, for as long as it lives, that others may write to a storage."""
    global _most
    with _lock:
        if len(_exposed) >= _most:
            for key in [key for key, reference in _exposed.items() if reference.expired()]:
                del _exposed[key]
            _most = max(256, 2 * len(_exposed))
        _exposed[storage._cdata] = StorageWeakRef(storage)


def is_exposed(storage: torch.UntypedStorage) -> bool:
    """Whether a storage has been seen handed out."""
    return storage._cdata in _exposed


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor shares its memory with an array, or with others who know its address, who may write to it."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    storage = tensor.untyped_storage()
    return not storage.resizable() or is_exposed(storage)


def expose_arrays(arguments: Iterable[Any]) -> None:
    """Have ``expose`` remember the arguments of a region, also those in containers, that share memory with an array."""
    pending = list(arguments)
    seen: set[int] = set()  # a list may contain itself
    for value in pending:  # the loop appends to it
        if isinstance(value, Tensor):
            if is_shared(value):
                expose(value.untyped_storage())
        elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
