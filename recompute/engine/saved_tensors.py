"""Autograd holds these objects in the place of saved tensors, and the hooks here put them there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from recompute.engine.cut.layout import Layout
from recompute.engine.dtensors import local_of, may_hold_memory
from recompute.engine.modes import count_dispatch_modes, count_function_modes, has_foreign_modes, hidden_from_modes
from recompute.engine.thread_state import unseen_by_tapes
from recompute.engine.wrapper_tensors import inner_tensors
from recompute.errors import MutationError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class PackedTensor:
    """Stands in the place of a tensor until backward wants it."""

    __slots__ = ()

    def get(self) -> Tensor:
        raise NotImplementedError


class KeptTensor(PackedTensor):
    """A tensor held as it is. Autograd checks no versions under saved-tensor hooks, so this does (invariant 5)."""

    __slots__ = ("name", "tensor", "version")

    def __init__(self, tensor: Tensor, name: str, version: int | None = None):
        self.tensor = tensor
        self.version = version_of(tensor) if version is None else version
        self.name = name

    def get(self) -> Tensor:
        tensor = self.tensor
        return tensor if version_of(tensor) == self.version else checked(tensor, self.version, self.name)


class ParameterReference(PackedTensor):
    """A parameter, or a view of one. The object is held and not its memory, which libraries that gather weights swap.

    It returns this rank's part of a DTensor.

    memory: the memory that the parameter has now, for a view. Autograd holds the memory of a view, so this is used even
    if ``parameter.data`` is replaced later. None for the parameter itself: autograd holds only the object.
    """

    __slots__ = ("layout", "memory", "name", "parameter", "version")

    def __init__(
        self, parameter: Tensor, layout: Layout, version: int, name: str, memory: torch.UntypedStorage | None = None
    ):
        self.parameter = parameter
        self.layout = layout
        self.version = version
        self.name = name
        self.memory = memory if memory is not None and may_hold_memory(parameter) else None

    def get(self) -> Tensor:
        tensor = local_of(checked(self.parameter, self.version, self.name)).detach()
        memory = self.memory
        if memory is not None and memory._cdata != tensor.untyped_storage()._cdata and memory.nbytes():
            tensor = torch.empty(0, dtype=self.layout.dtype, device=memory.device)
            return tensor.set_(memory, self.layout.offset, self.layout.shape, self.layout.stride)
        return seen_as(tensor, self.layout)


class VersionGuard:
    """Refuses a DTensor that was changed in place. Its part on this rank counts no such change."""

    __slots__ = ("_name", "_shell", "_version")

    def __init__(self, alias: Any, name: str):
        """alias: an alias of the DTensor, of its own. It is emptied, but still shares the version counter."""
        alias._local_tensor = None
        self._shell = alias
        self._version = version_of(alias)
        self._name = name

    def check(self) -> None:
        checked(self._shell, self._version, self._name)


class PackedDTensor(PackedTensor):
    """A DTensor, made again from this rank's part."""

    __slots__ = ("_guard", "_kind", "_spec", "whole")

    def __init__(self, alias: Any, part: PackedTensor, name: str):
        """alias: as ``VersionGuard`` takes it."""
        self._kind, self._spec = type(alias), alias._spec
        self._guard = VersionGuard(alias, name)
        self.whole = part

    def get(self) -> Tensor:
        self._guard.check()
        return self._kind(self.whole.get(), self._spec, requires_grad=False)


class KeptShard(KeptTensor):
    """This rank's part of a DTensor, held as it is."""

    __slots__ = ("_guard",)

    def __init__(self, tensor: Tensor, name: str, guard: VersionGuard):
        super().__init__(tensor, name)
        self._guard = guard

    def get(self) -> Tensor:
        self._guard.check()
        return super().get()


class PackedByOuterHook(PackedTensor):
    """A tensor, as the saved-tensor hooks of others around the region hold it."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]):
        self.packed = packed
        self.unpack = unpack

    def get(self) -> Tensor:
        return self.unpack(self.packed)


class PackedView(PackedTensor):
    """Another view of a saved tensor's memory."""

    __slots__ = ("layout", "whole")

    def __init__(self, whole: PackedTensor, layout: Layout):
        self.whole = whole
        self.layout = layout

    def get(self) -> Tensor:
        return seen_as(self.whole.get(), self.layout)


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``tensor`` with this stride. Hooks like save_on_cpu return another stride, and sums may differ in that."""
    if tensor.stride() == stride or 0 in stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def seen_as(tensor: Tensor, layout: Layout) -> Tensor:
    """The view of ``tensor``'s memory that has ``layout``. It shares the version counter of ``tensor``."""
    if Layout.of(tensor) == layout:
        return tensor
    if tensor.dtype is not layout.dtype:  # see the memory from its start, in whole elements of both dtypes
        larger = max(tensor.dtype.itemsize, layout.dtype.itemsize)
        count = tensor.untyped_storage().nbytes() // larger * (larger // tensor.dtype.itemsize)
        tensor = tensor.as_strided((count,), (1,), 0).view(layout.dtype)
    return tensor.as_strided(layout.shape, layout.stride, layout.offset)


def pack_tensor(tensor: Tensor, name: str) -> PackedTensor:
    """Hold ``tensor`` for backward as autograd would: through the saved-tensor hooks in force (invariant 9)."""
    return pack_through(top_hooks(), tensor.detach(), name)


def pack_through(hooks: Hooks | None, tensor: Tensor, name: str) -> PackedTensor:
    if hooks is None:
        return KeptTensor(tensor, name)
    pack, unpack = hooks
    packed = pack(tensor)
    return packed if unpack is unpack_saved else PackedByOuterHook(packed, unpack)


def fetch(value: Any) -> Any:
    """``value`` with the tensor in the place of each ``PackedTensor``, also inside of lists and dicts."""
    if isinstance(value, PackedTensor):
        return value.get()
    if isinstance(value, (list, tuple)):
        return [fetch(item) for item in value]
    return {key: fetch(item) for key, item in value.items()} if isinstance(value, dict) else value


def packed_in(value: Any) -> Iterator[PackedTensor]:
    """Each ``PackedTensor`` in ``value``. A view or a DTensor counts as the one that it is made from."""
    if isinstance(value, PackedTensor):
        yield value.whole if isinstance(value, (PackedView, PackedDTensor)) else value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from packed_in(item)


def unpack_saved(saved: PackedTensor) -> Tensor:
    """The unpack hook of everything that this package packs."""
    if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
        with hidden_from_modes():
            return saved.get()
    return saved.get()


def top_hooks() -> Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _scopes_of(hooks: Hooks | None) -> tuple[list[Any], Hooks | None]:
    """The scopes of ours that have these hooks, from the innermost one; and the hooks of others around them."""
    scopes: list[Any] = []
    while hooks is not None and hooks[1] is unpack_saved:
        scopes.append(hooks[0].__self__)  # type: ignore[attr-defined]
        hooks = scopes[-1].outer
    return scopes, hooks


def has_only_our_hooks(hooks: Hooks | None) -> bool:
    """Whether these hooks are a scope of ours, or there are none, and there are none of others around them."""
    return _scopes_of(hooks)[1] is None


def are_held_as_they_are(hooks: Hooks | None) -> bool:
    """Whether these hooks hold a tensor as it is and where it is, unless a recipe regenerates it."""
    scopes, others = _scopes_of(hooks)
    return others is None and not any(scope.holds_elsewhere for scope in scopes)


def is_inside_checkpoint() -> bool:
    """Whether a checkpoint, ours or torch's, gets the tensors saved now, in its first run or in a replay."""
    scopes, others = _scopes_of(top_hooks())
    is_torchs = others is not None and others[0].__module__ == "torch.utils.checkpoint"
    return is_torchs or any(scope.is_checkpoint for scope in scopes)


def checked(tensor: Tensor, version: int, name: str) -> Tensor:
    """``tensor``, unless it has been modified in place since it was at ``version``."""
    if version_of(tensor) != version:
        node = torch._C._current_autograd_node()
        reader = "backward" if node is None else node.name()
        raise MutationError(
            f"in {name}: {reader} needs a {describe(tensor)} that was modified in place after it was saved: it is at "
            f"version {version_of(tensor)}, expected version {version}. Replace the in-place operation, or let it "
            "modify a clone."
        )
    return tensor


def version_of(tensor: Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor keeps no count
        return -1


def without_graph(tensor: Tensor, *, copy: bool = False) -> Tensor:
    """The tensor, or a copy of it, without its graph."""
    with unseen_by_tapes:
        return tensor.detach().clone() if copy else tensor.detach()


_STRIDED = (Tensor, torch.nn.Parameter)
_storages: dict[int, StorageWeakRef] = {}


def storage_of(tensor: Tensor) -> StorageWeakRef | None:
    """The storage of a parameter or buffer, to compare by its ``cdata``; None where that may change by itself.

    The reference keeps the address from being used again (invariant 3). References are remembered by the tensor's id.
    Another tensor may have that id later, but then its storage has another address, and the reference is replaced.
    """
    if type(tensor) not in _STRIDED or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    storage, number = tensor.untyped_storage(), id(tensor)
    known = _storages.get(number)
    if known is None or known.cdata != storage._cdata:
        # Most references are of tensors that are gone. No weak reference may tell us which, because
        # torch.utils.swap_tensors refuses a parameter that has one.
        if len(_storages) >= 1 << 16:
            _storages.clear()
        known = _storages[number] = StorageWeakRef(storage)
    return known


StorageKey = int | tuple["StorageKey", ...] | None


def storage_key(tensor: Tensor) -> StorageKey:
    """The address of the StorageImpl of a tensor, or of a DTensor's part on this rank; None if it has none (sparse).

    A wrapper has the keys of all tensors that it holds.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if type(tensor) is not Tensor:
        tensor = local_of(tensor)
        if inner := inner_tensors(tensor):
            return tuple([storage_key(each) for each in inner])
    return tensor.untyped_storage()._cdata


def describe(tensor: Tensor) -> str:
    return f"tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
