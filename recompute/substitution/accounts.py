"""What kernels hold for backward, and what the code in whose place they stand would hold: counted, not measured.

Kernels save what they need past any region, so nobody sees what was not saved. But each of the modules that they stand
in for treats every row of its input alike. So the bytes are a number a row and a fixed one (of weights that are cast,
say), which two runs on tensors without values tell: once for all modules that are alike, whatever their inputs' sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from recompute.engine.recipes import local, open_book
from recompute.engine.saved_tensors import RegionStatistics, is_inside_checkpoint
from recompute.engine.scopes import is_recording

Compute = Callable[[Tensor], Any]
"""Of a tensor of rows, what a module or the kernels in its place give."""

_ROWS = 16  # of the first run; the second has twice as many
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class Held(NamedTuple):
    """What is alive after forward because backward needs it, without parameters."""

    fixed_nbytes: int
    """However many rows there are."""
    row_nbytes: int
    """For each row of the input."""
    holds_input: bool
    """Whether the input is held, too."""

    def of(self, rows: int, input_nbytes: int) -> int:
        return self.fixed_nbytes + rows * self.row_nbytes + (input_nbytes if self.holds_input else 0)


class Account(NamedTuple):
    kernels: Held
    eager: Held


class Accounts:
    """Counts what kernels hold and what the module's own code would, for the statistics of a runner."""

    def __init__(self, statistics: RegionStatistics):
        self._statistics = statistics
        self._known: dict[Hashable, Account | None] = {}

    def add(
        self,
        part: tuple[Any, ...],
        x: Tensor,
        weights: Sequence[Tensor | None],
        kernels: Compute,
        eager: Compute,
        *,
        is_frame: bool = True,
    ) -> None:
        """Count a run on ``x``, (..., width), each of whose rows is computed by itself, before it runs.

        part: what code computes it, beside ``weights``: equal parts hold the same for tensors of one dtype.
        kernels, eager: compute it of another such tensor, (rows, width). is_frame: whether this is a run of its own.
        """
        if not _is_new():
            return
        trains = x.requires_grad, *[each is not None and each.requires_grad for each in weights]
        autocast = _autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None
        key = part, x.dtype, x.shape[-1:], trains, autocast
        if key not in self._known:
            self._known[key] = _account(key, x, weights, kernels, eager)
        account = self._known[key]
        if account is not None:
            self._count(x, account, is_frame)

    def add_run(self) -> None:
        """Count a run of kernels that hold what the module's own code would."""
        if _is_new() and not local.active_frames:
            self._statistics.frames += 1

    def add_known(self, x: Tensor, kernels: Held, eager: Held) -> None:
        """As ``add``, where it is known what is held."""
        if _is_new():
            self._count(x, Account(kernels, eager), True)

    def _count(self, x: Tensor, account: Account, is_frame: bool) -> None:
        numel = x.numel()
        rows, nbytes = numel // x.shape[-1], numel * x.itemsize
        book = open_book() if account.kernels.holds_input else None
        if book is not None and book.is_given_to_a_kernel(x, is_eager=account.eager.holds_input):
            nbytes = 0  # whoever gave it counts it
        kept_nbytes = account.kernels.of(rows, nbytes)
        self._statistics.eager_nbytes += account.eager.of(rows, nbytes)
        if local.active_frames:  # a tape or a checkpoint around counts what is saved, in both ways
            self._statistics.eager_nbytes -= kept_nbytes
        else:
            self._statistics.kept_nbytes += kept_nbytes
            self._statistics.frames += is_frame


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _is_new() -> bool:
    """Whether autograd records something, and not for the second time, as a checkpoint has it do."""
    is_eager = not torch.compiler.is_compiling() and is_recording() and not local.regenerating
    return is_eager and (
        bool(local.active_frames) or not is_inside_checkpoint()
    )  # torch's, which does not say which time


_accounts: dict[Hashable, Account | None] = {}


def _account(
    key: Hashable, x: Tensor, weights: Sequence[Tensor | None], kernels: Compute, eager: Compute
) -> Account | None:
    """From runs on tensors without values; None where those cannot stand for the tensors."""
    given = [each for each in (x, *weights) if each is not None]
    if any(type(each) not in _PLAIN or each.is_meta for each in given) or not all(x.shape[-1:] or (0,)):
        return None
    key = key, x.device.type, *[(each.shape, each.dtype) for each in given[1:]]
    if key not in _accounts:
        try:
            _accounts[key] = Account(_held(kernels, x), _held(eager, x))
        except Exception:
            # A user's forward may raise anything on tensors without values. Training goes on, and counts less.
            _accounts[key] = None
    return _accounts[key]


def _held(compute: Compute, x: Tensor) -> Held:
    with _apart(x):
        few, many = (_held_nbytes(compute, x, rows) for rows in (_ROWS, 2 * _ROWS))
    a_row = (many[0] - few[0]) // _ROWS
    return Held(few[0] - _ROWS * a_row, a_row, few[1])


def _held_nbytes(compute: Compute, like: Tensor, rows: int) -> tuple[int, bool]:
    """The bytes of what ``compute`` makes that its graph holds, and whether that holds what it is given."""
    leaf = torch.empty(rows, like.shape[-1], dtype=like.dtype, device=like.device, requires_grad=like.requires_grad)
    x = leaf * 1  # a graph holds its leaves anyway
    known = StorageWeakRef(x.untyped_storage())
    with _Made() as made:
        outputs = tree_leaves(compute(x))
    graph = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    del x, outputs
    held = sum(nbytes for storage, nbytes in made.storages.values() if not storage.expired())
    is_held = not known.expired()
    del graph
    return held, is_held


class _Made(TorchDispatchMode):
    """Notes the storages that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        if not _gives_views(op):
            given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in given:
                        self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return output


@functools.cache
def _gives_views(op: Any) -> bool:
    return any(each.alias_info is not None for each in op._schema.returns)


@contextmanager
def _apart(x: Tensor) -> Iterator[None]:
    """Where tensors have no values, and nobody sees what is done with them: no mode, no hooks, no cache of casts."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    caches = torch.is_autocast_cache_enabled()
    local.books.append(None)
    torch.set_autocast_cache_enabled(False)  # it would give fake weights to those who compute
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
