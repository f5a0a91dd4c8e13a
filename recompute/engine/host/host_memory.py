"""Host memory for offloaded storages: bounded, and used again from step to step.

It is mapped and not allocated, so that each buffer has pages of its own. They are pinned for CUDA, which copies pinned
memory without waiting.

Pinning takes long, and happens in the first step under offloading. It takes far less time for large pages that are
private to the process and that all threads have written to before.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import weakref
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from recompute.errors import HostMemoryError
from recompute.units import humanize

SHARE = 0.5
"""The share of the machine's free memory that its processes may offload to by default."""

_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

Events = tuple[torch.cuda.Event, ...]


class HostBuffer:
    """A buffer of a pool. It goes back when nobody refers to it."""

    __slots__ = ("__weakref__", "_is_pinned", "_pool", "_whole", "busy", "memory")

    def __init__(self, pool: HostPool, whole: Tensor, nbytes: int, busy: Events, is_pinned: bool):
        """whole: the memory that the pool has mapped. It may be larger than ``nbytes``."""
        self._pool = pool
        self._is_pinned = is_pinned
        self._whole = whole
        self.memory = whole if whole.numel() == nbytes else whole[:nbytes]
        """uint8, of shape (nbytes,)."""
        self.busy: Events = busy
        """The last copies to it and from it: only after these may it be written to again."""

    def __del__(self) -> None:
        with self._pool.lock:
            self._pool.unused.append(_Unused(self._whole, self.busy, self._is_pinned))


class _Unused(NamedTuple):
    """A buffer that nobody refers to."""

    memory: Tensor
    busy: Events
    is_pinned: bool

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostPool:
    """Buffers in host memory.

    A buffer serves for at least half of its bytes, so that batches of other lengths find buffers, too. Before a new one
    would make the pool larger than twice its largest use so far, the buffers that were unused for the longest time are
    freed. Lengths that are each less than half of the next have buffers of their own, and all of these fit.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a buffer may come back from the garbage collector, inside of any call
        self.unused: list[_Unused] = []
        """The last one that came back is at the end. The garbage collector may append to it inside of any call."""
        self._most_in_use = 0
        """Bytes of the buffers that were in use at one time, when a new one was made."""
        self.nbytes = 0
        """Bytes of all buffers, in use or not."""

    @functools.cached_property
    def default_limit(self) -> int:
        """As the function. It is asked once, because the pool's own memory is not free any more."""
        return default_limit()

    def buffer(self, nbytes: int, limit: int | None, *, pin: bool, who: str) -> HostBuffer:
        """A buffer of ``nbytes``. Raises ``HostMemoryError`` if the pool would have more than ``limit`` bytes.

        limit: None is the default one. pin: for copies from and to CUDA. who: asks, for the error.
        """
        limit = self.default_limit if limit is None else limit
        with self.lock:
            self._free_oldest(limit)  # another rule was allowed more
            place = self._place_of_one_for(nbytes, pin, limit)
            if place is None:
                return HostBuffer(self, self._new(nbytes, pin, limit, who), nbytes, (), pin)
            unused = self.unused.pop(place)
        return HostBuffer(self, unused.memory, nbytes, unused.busy, pin)

    def free_unused(self) -> None:
        """Return the buffers that are not in use to the system."""
        with self.lock:
            self._free_oldest(0)

    def _place_of_one_for(self, nbytes: int, pin: bool, limit: int) -> int | None:
        """The place of the unused buffer to take for ``nbytes``: the smallest that serves; None if there is none.

        Those that are too large do not get more than half of the limit, so that the others find room below it.
        """
        best, most = None, 2 * nbytes
        for place in reversed(range(len(self.unused))):
            unused = self.unused[place]
            if unused.is_pinned == pin and nbytes <= unused.nbytes <= most:
                if unused.nbytes == nbytes:
                    return place
                best, most = place, unused.nbytes - 1
        if best is not None and self._nbytes_in_use() + self.unused[best].nbytes > limit // 2:
            return None
        return best

    def _nbytes_in_use(self) -> int:
        return self.nbytes - sum(unused.nbytes for unused in self.unused)

    def _free_oldest(self, most: int) -> None:
        """Free unused buffers until the pool has at most ``most`` bytes, or none is left to free."""
        while self.nbytes > most and self.unused:
            unused = self.unused.pop(0)
            for event in unused.busy:
                event.synchronize()
            self.nbytes -= unused.nbytes

    def _new(self, nbytes: int, pin: bool, limit: int, who: str) -> Tensor:
        most_in_use = max(self._most_in_use, self._nbytes_in_use() + nbytes)
        self._free_oldest(min(limit, 2 * most_in_use) - nbytes)
        if self.nbytes + nbytes > limit:
            raise HostMemoryError(
                f"in {who}: no room to offload {humanize(nbytes)} more: {humanize(self.nbytes)} of at most "
                f"{humanize(limit)} of host memory are in use. Raise the rule's max_host_bytes, offload less "
                "(fraction, min_bytes), or let fewer layers offload."
            )
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes)
        if pin:
            _pin(memory, mapped)
        self.nbytes += nbytes
        self._most_in_use = most_in_use
        return memory


POOL = HostPool()
"""The process's buffers."""


def _pin(memory: Tensor, mapped: mmap.mmap) -> None:
    """Pin a buffer's pages as long as they are mapped.

    A process forked from this one does not get them. If it did, whichever of the two wrote to a page first would get
    another page for it, and the device would not know of that.
    """
    with contextlib.suppress(OSError):  # this system has no large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    mapped.madvise(mmap.MADV_DONTFORK)
    memory.zero_()
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, memory.numel(), 0))
    weakref.finalize(mapped, runtime.cudaHostUnregister, address)


def default_limit() -> int:
    """The bytes that may be offloaded unless a rule says otherwise: a share of what is free, for each local process."""
    return int(free_host_nbytes() * SHARE) // max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def free_host_nbytes() -> int:
    """The memory that this machine has free, or that is left to the container that this process runs in."""
    free: int = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # there is no such group, or it has no limit ("max")
            continue
    return max(free, 0)
