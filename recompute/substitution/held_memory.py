"""Counts what kernels hold for backward, and what the code that they stand in for would hold.

A region cannot see in a run what a kernel did not save. But each module that kernels stand in for computes every row of
its input by itself. So what is held is some number of bytes for each row, and a fixed number of bytes (such as weights
that autocast has cast). Two dry runs on tensors without values tell both numbers. They are made once for all modules
that are alike, and hold for inputs of any size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from recompute.engine.fake_mode import FakeMode
from recompute.engine.recipe_book import open_book
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import is_inside_checkpoint
from recompute.engine.scopes import is_recording
from recompute.engine.tape.op_arguments import PLAIN
from recompute.engine.thread_state import local
from recompute.kernels.linears import autocast_dtype

Compute = Callable[..., Any]
"""A module's computation on a tensor of rows, or that of the kernels in its place."""

_ROWS = 16  # the first dry run has so many; the second has twice as many


class HeldMemory(NamedTuple):
    """The bytes that are alive after forward because backward needs them, without parameters."""

    fixed_nbytes: int
    """Bytes that do not depend on the number of rows."""
    row_nbytes: int
    """Bytes for each row of the input."""
    holds_input: bool
    """Whether the input is held, too."""

    def nbytes(self, rows: int, input_nbytes: int) -> int:
        return self.fixed_nbytes + rows * self.row_nbytes + (input_nbytes if self.holds_input else 0)


class KernelAndEager(NamedTuple):
    """The memory that the kernels hold, and that the module's own code would hold."""

    kernels: HeldMemory
    eager: HeldMemory


class HeldMemoryCounter:
    """Adds what a runner's kernels hold, and what the module's own code would, to the statistics of the region."""

    def __init__(self, statistics: RegionStatistics):
        self._statistics = statistics
        self._known: dict[Hashable, KernelAndEager | None] = {}

    def count(
        self, kind: tuple[Any, ...], x: Tensor, weights: Sequence[Tensor | None], kernels: Compute, as_written: Compute
    ) -> None:
        """Count a run of ``kernels(x)``, which is about to come.

        Args:
            kind: names the code that this stands in for. Equal kinds hold the same for inputs and weights that are
                alike.
            x: (..., width).
            weights: what the code reads beside it.
            kernels, as_written: compute the result by the kernels, and by the module's own code, of (rows, width).
        """
        if not _is_counted():
            return
        trains = x.requires_grad, *[each is not None and each.requires_grad for each in weights]
        autocast = autocast_dtype(x.device.type) if torch._C._is_any_autocast_enabled() else None
        key = kind, x.dtype, x.shape[-1:], trains, autocast
        if key not in self._known:
            self._known[key] = _measured(key, x, weights, kernels, as_written)
        held = self._known[key]
        if held is not None:
            self._add(x, held)

    def count_known(self, x: Tensor, kernels: HeldMemory, eager: HeldMemory) -> None:
        """Count a run on ``x``. What it holds is known."""
        if _is_counted():
            self._add(x, KernelAndEager(kernels, eager))

    def _add(self, x: Tensor, held: KernelAndEager) -> None:
        numel = x.numel()
        rows, nbytes = numel // x.shape[-1], numel * x.itemsize
        book = open_book() if held.kernels.holds_input else None
        if book is not None and book.is_given_to_a_kernel(x, is_eager=held.eager.holds_input):
            nbytes = 0  # the region whose recipe regenerates x counts it
        kept_nbytes = held.kernels.nbytes(rows, nbytes)
        self._statistics.eager_nbytes += held.eager.nbytes(rows, nbytes)
        if local.active_frames:  # a tape or a checkpoint around counts what the kernels save, as kept and as eager
            self._statistics.eager_nbytes -= kept_nbytes
        else:
            self._statistics.kept_nbytes += kept_nbytes
            self._statistics.frames += 1


def _is_counted() -> bool:
    """Whether autograd records this run, and this is not the second run that a checkpoint makes."""
    if torch.compiler.is_compiling() or not is_recording() or local.regenerating:
        return False
    return bool(local.active_frames) or not is_inside_checkpoint()  # torch's checkpoint does not say which run it is


_measurements: dict[Hashable, KernelAndEager | None] = {}


def _measured(
    key: Hashable, x: Tensor, weights: Sequence[Tensor | None], kernels: Compute, as_written: Compute
) -> KernelAndEager | None:
    """The result of dry runs; None where tensors without values cannot stand for these."""
    given = [each for each in (x, *weights) if each is not None]
    if any(type(each) not in PLAIN or each.is_meta for each in given) or not all(x.shape[-1:] or (0,)):
        return None
    key = key, x.device.type, *[(each.shape, each.dtype) for each in given[1:]]
    if key not in _measurements:
        try:
            _measurements[key] = KernelAndEager(_dry_runs(kernels, x), _dry_runs(as_written, x))
        except Exception:
            # A user's forward may raise anything on tensors without values. Training goes on, and counts less.
            _measurements[key] = None
    return _measurements[key]


def _dry_runs(compute: Compute, like: Tensor) -> HeldMemory:
    with _without_values(like):
        (few, holds_input), (many, _) = (_dry_run(compute, like, rows) for rows in (_ROWS, 2 * _ROWS))
    a_row = (many - few) // _ROWS
    return HeldMemory(few - _ROWS * a_row, a_row, holds_input)


def _dry_run(compute: Compute, like: Tensor, rows: int) -> tuple[int, bool]:
    """How many of the bytes that ``compute`` allocates its graph holds, and whether the graph holds the input."""
    leaf = torch.empty(rows, like.shape[-1], dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)
    x = leaf * 1  # no leaf, since a graph holds its leaves anyway
    known = StorageWeakRef(x.untyped_storage())
    with _NewStorages() as new:
        outputs = tree_leaves(compute(x))
    # Sums hold nothing. Before torch 2.13 the node of a custom Function does not keep its graph alive.
    graph = [each.sum() for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    del x, outputs
    held = sum(nbytes for storage, nbytes in new.storages.values() if not storage.expired())
    is_held = not known.expired()
    del graph
    return held, is_held


class _NewStorages(TorchDispatchMode):
    """Notes the storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if not _gives_views(op):  # a fake view of a real parameter has a storage of its own, which is not new memory
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in _storages(output):
                if storage._cdata not in given:
                    self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return output


@functools.cache
def _gives_views(op: Any) -> bool:
    return any(each.alias_info is not None for each in op._schema.returns)


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor)]


@contextmanager
def _without_values(x: Tensor) -> Iterator[None]:
    """Inside, tensors are fake, and no mode, hook, recipe book or cache of autocast sees what runs."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeMode()
    caches = torch.is_autocast_cache_enabled()
    local.books.append(None)
    torch.set_autocast_cache_enabled(False)  # or the fake weights in it would be given to the real run
    try:
        with (
            _disable_current_modes(),
            mode,
            torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor),
        ):
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        local.books.pop()
