"""The buffers of the modules that a frame runs, as they were when it began."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

from recompute.engine.saved_tensors import version_of

_SMALL = 1 << 16
"""In bytes: copying a buffer of this size takes no longer than launching a kernel."""


class _Copy(NamedTuple):
    buffer: Tensor
    value: Tensor
    version: int

    @property
    def has_moved(self) -> bool:
        """Whether the buffer has been changed in place since, as far as its version tells."""
        return version_of(self.buffer) != self.version


class LearnedBuffers:
    """What a region's frames have found out about its buffers, which are numbered, for later frames."""

    __slots__ = ("changing", "copies", "may_change_unseen")

    def __init__(self) -> None:
        self.may_change_unseen = False
        """Whether its code names a batch norm, whose kernels write to statistics without a new version."""
        self.changing: dict[tuple[bool, ...], frozenset[int]] = {}
        """The buffers that a frame has changed, by the modules' training flags: training may change others."""
        self.copies: dict[int, _Copy] = {}
        """Copies of the small buffers that no frame has changed. All frames share them until somebody does."""


class HeldBuffers:
    """Buffers are of three kinds:

    - Those that forward itself changes in place, such as batch-norm statistics. They are copied before each frame. The
      first frame with the same training flags finds out which these are. It compares values and not only versions,
      because kernels write to some buffers without a new version. Those of a batch norm count as changed anyway: it
      may write the same value at first.
    - Small ones that forward does not change. All frames share one copy of them, as long as nobody changes them.
    - Large ones that forward does not change. They are not copied; the replay is refused if somebody changes them.
    """

    __slots__ = ("_changing", "_copies", "_flags", "_is_first", "_learned", "all")

    def __init__(self, buffers: list[Tensor], modules: Sequence[nn.Module], learned: LearnedBuffers):
        self.all = buffers
        self._learned = learned
        self._flags = tuple([module.training for module in modules])
        known = learned.changing.get(self._flags)
        self._is_first = known is None
        self._changing = frozenset(range(len(buffers))) if known is None else known
        self._copies: dict[int, _Copy] = {}
        for index, buffer in enumerate(buffers):
            if index in self._changing:
                self._copies[index] = _copy_of(buffer)
            elif _is_small(buffer):
                shared = learned.copies.get(index)
                if shared is None or shared.buffer is not buffer or shared.has_moved:
                    shared = learned.copies[index] = _copy_of(buffer)
                self._copies[index] = shared

    def uncopied(self) -> list[Tensor]:
        """Those whose versions have to be checked: in the first frame, as long as it runs, all of them."""
        return [each for index, each in enumerate(self.all) if self._is_first or index not in self._copies]

    def settle(self, modules: Sequence[nn.Module]) -> bool:
        """The frame has ended: note which buffers it has changed. Returns whether others are ``uncopied`` now."""
        learned, was_first, before = self._learned, self._is_first, self._changing
        unseen = set(self._copies) if learned.may_change_unseen else set()
        if was_first:
            before = frozenset()
            norms = [module for module in modules if isinstance(module, _NormBase) and module.training]
            statistics = {id(buffer) for norm in norms for buffer in norm._buffers.values()}
            unseen = {index for index in unseen if _is_small(self.all[index])}
            unseen.update(index for index, buffer in enumerate(self.all) if id(buffer) in statistics)
        elif not unseen and not any(copy.has_moved for copy in self._copies.values()):
            return False
        self._changing = before.union(
            index
            for index, copy in self._copies.items()
            if index not in before and (index in unseen or copy.has_moved or _differ(copy.value, copy.buffer))
        )
        self._is_first = False
        self._copies = {i: c for i, c in self._copies.items() if i in self._changing or _is_small(c.buffer)}
        for index, copy in self._copies.items():
            if index in self._changing:
                learned.copies.pop(index, None)
            else:
                learned.copies[index] = copy
        learned.changing[self._flags] = self._changing
        return was_first

    def unlearn(self) -> None:
        """The frame changed something that earlier ones with these flags did not: let the next one learn anew."""
        self._learned.changing.pop(self._flags, None)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """The span in which the buffers are as they were when the frame began. Afterwards they are as they are now."""
        copies = [copy for index, copy in self._copies.items() if index in self._changing or copy.has_moved]
        buffers = [copy.buffer for copy in copies]
        if not buffers:
            yield
            return
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            present = [buffer.detach().clone() for buffer in buffers]
            _assign(buffers, [copy.value for copy in copies])
            try:
                yield
            finally:
                _assign(buffers, present)


def _copy_of(buffer: Tensor) -> _Copy:
    return _Copy(buffer, buffer.detach().clone(), version_of(buffer))


def _is_small(buffer: Tensor) -> bool:
    return buffer.layout is torch.strided and buffer.nbytes <= _SMALL


def _differ(before: Tensor, now: Tensor) -> bool:
    if before.is_meta or isinstance(before, FakeTensor):
        return False
    if before.layout is not torch.strided:
        before, now = before.to_dense(), now.to_dense()
    return not torch.equal(before, now)


def _assign(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
