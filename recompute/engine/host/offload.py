"""Offloading: tensors that a region would hold for backward leave the device, and come back ahead of use.

A scope around the region gets each tensor that autograd saves there, as every saved-tensor hook does. Tapes and
checkpoints inside pass it each tensor that they keep. It copies the tensor's storage off the device, once. It frees the
device's memory when the next region with such a scope has ended: by then the copy is done, or the device waits for it.
Nothing waits on the CPU.

In backward, a hook on the region's output starts the copies back: this region's, and those of the region before, which
are copied while this one computes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from recompute.engine.cut.layout import Layout
from recompute.engine.dtensors import has_layout, local_of
from recompute.engine.host.host_memory import POOL, HostBuffer
from recompute.engine.modes import count_dispatch_modes, count_function_modes, has_foreign_modes
from recompute.engine.recipe_book import open_book
from recompute.engine.recipes import Recipe, RecipeGroup
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import (
    KeptTensor,
    PackedDTensor,
    PackedTensor,
    checked,
    has_only_our_hooks,
    pack_through,
    seen_as,
    top_hooks,
    version_of,
)
from recompute.engine.scopes import Scope, let_transforms_in
from recompute.engine.tape.op_arguments import is_plain, parameter_of
from recompute.engine.thread_state import alive, is_in_cuda_graph, local, working
from recompute.errors import UnsupportedError
from recompute.policy.meaning import Offloading, travelling


class OffloadRegion:
    """A module's forward under a rule that offloads."""

    def __init__(self, statistics: RegionStatistics, offloading: Offloading, *, counts: bool):
        """counts: whether it counts its frames and what it saves, as nothing inside does."""
        let_transforms_in()
        self.statistics = statistics
        self.offloading = offloading
        self.counts = counts
        self.last_sizes: list[int] = []
        """Bytes of each storage that could travel in the last frame, in order."""

    def run(self, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """``function(*args, **kwargs)``.

        Inside of a tape or a checkpoint, and under saved-tensor hooks of others, it offloads nothing: these decide what
        they do with saved tensors.
        """
        if local.active_frames or not has_only_our_hooks(top_hooks()):
            return function(*args, **kwargs)
        if is_in_cuda_graph():
            raise UnsupportedError(
                f"in {self.statistics.name}: offloading copies to other host memory in each step, which a CUDA graph "
                "cannot capture. Leave the module out of the graph, or give it a rule that does not offload."
            )
        frame = OffloadFrame(self)
        with frame:
            result = function(*args, **kwargs)
        frame.end(result)
        return result


class OffloadFrame(Scope):
    """One execution of a region, and the scope that offloads the tensors saved in it."""

    holds_elsewhere = True

    def __init__(self, region: OffloadRegion):
        self.outer, self.book = top_hooks(), open_book()
        self._region = region
        self._sizes: list[int] = []
        """Bytes of each storage that could travel, so far."""
        self._gone = 0
        """Bytes that travel, so far."""
        self._stays: dict[int, StorageWeakRef] = {}
        """The storages that stay, by the addresses of their StorageImpls (invariant 3)."""
        self._last_sizes = region.last_sizes
        self._share = travelling(region.last_sizes, region.offloading.fraction)
        """The positions of the storages that travel, if this frame saves storages as the last one did."""
        self._copies: list[weakref.ref[OffloadedStorage]] = []
        self._late: list[weakref.ref[OffloadedStorage]] = []
        """Copies that start when the region has ended: an op may yet fill a tensor that it saved, as rrelu does."""
        self._group = RecipeGroup()
        self._statistics = RegionStatistics(region.statistics.name)
        """The statistics of the copies as recipes: coming back is no regeneration."""
        self._before: weakref.ref[OffloadFrame] | None = None
        self._task = -1
        """The last backward that started its copies."""

    def end(self, result: Any) -> None:
        """The region has returned ``result``."""
        region = self._region
        region.last_sizes = self._sizes
        if region.counts:
            region.statistics.frames += 1
        if not self._copies:
            return
        for copy in alive(self._late):
            copy.start()
        self._before, local.offloaded = local.offloaded, weakref.ref(self)
        if self._before is not None and (before := self._before()) is not None:
            before.let_go()  # its copies have had the time to get done
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:  # a leaf would keep its hook for good
                tensor.register_hook(self._reached)

    def _reached(self, _: Tensor) -> None:
        """Backward has come to the region's output."""
        self.fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before.fetch()

    def fetch(self) -> None:
        """Start the copies back, once in a backward. The last saved tensor comes first, as backward needs it first."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        self._task = task
        for copy in alive(reversed(self._copies)):
            copy.fetch()

    def let_go(self) -> None:
        """Free the device's memory of the copied storages, as soon as the copies are done."""
        for copy in alive(self._copies):
            copy.let_go()

    def pack(self, tensor: Tensor) -> PackedTensor:
        if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
            return self.pack_hidden(tensor)
        packed = pack_through(self.outer, tensor.detach(), self._region.statistics.name)
        if type(packed) is not KeptTensor or parameter_of(tensor) is not None:
            return packed  # a recipe gives it back, or it lives anyway
        whole = packed.tensor
        if has_layout(whole):
            part = self._hold(local_of(whole), is_late=not tensor.requires_grad)
            return packed if part is None else PackedDTensor(whole, part, self._region.statistics.name)
        return self._hold(whole, is_late=not tensor.requires_grad) or packed

    def _hold(self, tensor: Tensor, *, is_late: bool) -> PackedTensor | None:
        """A handle for a tensor that travels; None for one that stays."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() % tensor.dtype.itemsize or storage._cdata in self._stays:
            return None
        if not storage.resizable():
            return None  # an array has its memory, and what comes back would have other memory
        copy = _copies.get(storage._cdata)
        if copy is None or copy.version != version_of(tensor):
            travels, nbytes = self._travels(storage.nbytes()), storage.nbytes()
            self._count(nbytes, travels=travels)
            if not travels:
                self._stays[storage._cdata] = StorageWeakRef(storage)
                return None
            copy = OffloadedStorage(tensor, self._region, self._statistics, self._group)
            _copies[copy.source.cdata] = copy
            self._copies.append(weakref.ref(copy))
            if is_late:
                self._late.append(weakref.ref(copy))
            else:
                copy.start()
        return copy.handle(0, (Layout.of(tensor), copy.whole))

    def _travels(self, nbytes: int) -> bool:
        """Whether the next storage that is saved, of ``nbytes``, travels: the largest do, up to the rule's share."""
        offloading = self._region.offloading
        if nbytes < max(offloading.min_bytes, 1):
            return False
        self._sizes.append(nbytes)
        if offloading.fraction == 1:
            return True
        if self._is_as_last():
            travels = len(self._sizes) - 1 in self._share
        else:  # nobody knows the storages to come
            travels = self._gone + nbytes <= offloading.fraction * sum(self._sizes)
        self._gone += travels * nbytes
        return travels

    def _is_as_last(self) -> bool:
        """Whether the newest storage's ratio to the first one is the last frame's: longer batches have larger ones."""
        position, last = len(self._sizes) - 1, self._last_sizes
        return position < len(last) and self._sizes[-1] * last[0] == self._sizes[0] * last[position]

    def _count(self, nbytes: int, *, travels: bool) -> None:
        statistics = self._region.statistics
        if travels:
            statistics.offloaded_tensors += 1
            statistics.offloaded_nbytes += nbytes
        if self._region.counts:
            statistics.eager_nbytes += nbytes
            statistics.kept_nbytes += nbytes


class OffloadedStorage(Recipe):
    """A storage that was copied off the device; its only value, 0, is the memory as bytes.

    The handles that stand for views of it share the memory that came back, as any recipe's handles share a value.
    """

    __slots__ = ("_buffer", "_came_back", "_copied", "_device", "_guard", "_here", "source", "version", "whole")

    def __init__(self, tensor: Tensor, region: OffloadRegion, statistics: RegionStatistics, group: RecipeGroup):
        """tensor: any view of the storage. statistics: for coming back."""
        super().__init__(statistics, "a copy off the device", group)
        storage = tensor.untyped_storage()
        self.source = StorageWeakRef(storage)
        self.version = version_of(tensor)
        self._guard = None if isinstance(tensor, FakeTensor) else _shell_of(tensor)
        self._device = tensor.device
        self.whole = Layout(torch.Size((storage.nbytes(),)), (1,), 0, torch.uint8)
        self._here: Tensor | None = seen_as(tensor, self.whole)
        """The memory itself, as long as it is on the device."""
        self._copied: torch.cuda.Event | None = None
        """When the copy is done."""
        self._came_back: tuple[Tensor, torch.cuda.Event | None] | None = None
        """The memory that was fetched ahead of use, and the event when it is there."""
        offloading = region.offloading
        self._buffer: HostBuffer | None = None
        if not isinstance(tensor, FakeTensor):
            self._buffer = POOL.buffer(
                storage.nbytes(), offloading.max_host_bytes, pin=tensor.is_cuda, who=region.statistics.name
            )

    def start(self) -> None:
        """Start the copy."""
        if self._buffer is not None and self._here is not None:
            self._copied = _copy(self._buffer.memory, self._here, out_of_device=True, after=self._buffer.busy)
            self._note_use(self._copied)

    def let_go(self) -> None:
        """Free the device's memory as soon as the copy is done. The device's later work waits for that."""
        if self._here is not None:
            if self._copied is not None:
                torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._here = None

    def fetch(self) -> None:
        """Start the copy back, if anybody may ask for it."""
        with self.group.lock:
            if self._here is None and self._came_back is None and self.dropped():
                self._came_back = self._copy_back()
                self.group.filled(self)  # to be released at the end of the backward, if nobody comes for it

    def _copy_back(self) -> tuple[Tensor, torch.cuda.Event | None]:
        with working("offloading"):
            memory = torch.empty(self.whole.shape, dtype=torch.uint8, device=self._device)
            if self._buffer is None:
                return memory, None
            after = () if self._copied is None else (self._copied,)
            event = _copy(memory, self._buffer.memory, out_of_device=False, after=after)
            self._note_use(event)
            return memory, event

    def _note_use(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            assert self._buffer is not None
            self._buffer.busy = (event,) if self._copied in (None, event) else (self._copied, event)

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        name = self.statistics.name
        if self._guard is not None:
            checked(self._guard, self.version, name)
        if self._here is not None:
            return dict.fromkeys(wanted, KeptTensor(self._here, name))
        memory, event = self._came_back or self._copy_back()
        self._came_back = None
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
        return dict.fromkeys(wanted, KeptTensor(memory, name))

    def release(self) -> None:
        super().release()
        self._forget()

    def _forget(self) -> None:
        """No handle took the memory that was fetched: it must not be used again before the copy is done."""
        if self._came_back is not None:
            _, event = self._came_back
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
            self._came_back = None

    def __del__(self) -> None:
        self._forget()


_copies: weakref.WeakValueDictionary[int, OffloadedStorage] = weakref.WeakValueDictionary()
"""The offloaded storages that may be needed, by the addresses of the StorageImpls that they were copied from.

An address is not used again as long as it is here, because the copy holds a weak reference (invariant 3).
"""


def _shell_of(tensor: Tensor) -> Tensor:
    """A tensor that counts versions with ``tensor`` and has its shape, but not its memory (invariant 5)."""
    shell = tensor.detach()
    shell.data = _element(tensor.device, tensor.dtype).expand(tensor.shape)
    return shell


@functools.cache
def _element(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty((), dtype=dtype, device=device)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams for copies out of a device and back, beside its computation."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _copy(
    target: Tensor, source: Tensor, *, out_of_device: bool, after: tuple[torch.cuda.Event, ...]
) -> torch.cuda.Event | None:
    """Copy on a stream of its own, once the computation so far and ``after`` are done.

    Returns when it is done; None if it is done now.
    """
    device = source.device if out_of_device else target.device
    if device.type != "cuda":
        target.copy_(source)
        return None
    out, back = _streams(device)
    stream = out if out_of_device else back
    stream.wait_stream(torch.cuda.current_stream(device))  # which has made it, or may still use its memory
    for event in after:
        stream.wait_event(event)
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return stream.record_event()
