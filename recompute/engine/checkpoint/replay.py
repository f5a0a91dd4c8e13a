"""The second run of a checkpoint's frame. It collects the tensors that autograd saves until it has all wanted ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from recompute.engine.dtensors import has_layout, local_of
from recompute.engine.modes import count_dispatch_modes, count_function_modes, has_foreign_modes
from recompute.engine.saved_tensors import KeptTensor, PackedDTensor, PackedTensor, StorageKey, describe, storage_key
from recompute.engine.scopes import Scope


class ReplayComplete(Exception):
    """All wanted tensors are saved again. It is no BaseException, so that module hooks see it and clean up."""


ExpectedTensor = tuple[torch.Size, torch.dtype, StorageKey]
"""The shape and dtype of a slot's tensor, and the key of its storage, which means nothing once that is freed."""


class Replay(Scope):
    """A frame being run again, to collect the values of the slots in ``wanted``.

    name: of the region, for messages.
    pinned: takes n and the tensor that the n-th ``recompute.keep`` gets now; returns the one that it got in the frame.
    expected: the tensor that belongs in each slot; None where it may be any.
    living: by slot, the parameter or input that the tensor there shares its storage with.
    """

    is_checkpoint = is_frame = True

    def __init__(
        self,
        name: str,
        pinned: Callable[[int, Tensor], Tensor],
        expected: list[ExpectedTensor | None],
        living: dict[int, Tensor],
        wanted: Collection[int],
    ):
        self.name = name
        self._pinned = pinned
        self.expected = expected
        self.living = living
        self.wanted = wanted
        self._storages: dict[StorageKey, StorageKey] = {}  # in this run, by the storage in forward
        self.values: dict[int, PackedTensor] = {}
        self._missing = len(wanted)
        self.count = 0
        self._unfilled = -2  # the last slot with a tensor that has no gradient
        self.mismatch: str | None = None
        self.is_done = False
        self.op = "an op"
        self._ops: dict[int, str] = {}  # the op that saved each value
        self._pins = 0
        self._refusal: str | None = None

    def __enter__(self) -> None:
        self._refusal = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if self._refusal is not None:  # backward may run where hooks are disabled, though forward did not
            torch._C._autograd._saved_tensors_hooks_enable()
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if self._refusal is not None:
            torch._C._autograd._saved_tensors_hooks_disable(self._refusal)

    def pack(self, tensor: Tensor) -> PackedTensor:
        if (count_dispatch_modes() or count_function_modes()) and has_foreign_modes():
            return self.pack_hidden(tensor)
        slot = self.count
        self.count += 1
        if not self._missing:
            self._stop_if_filled(slot)
        if not tensor.requires_grad:
            self._unfilled = slot
        alias = None
        if type(tensor) is not Tensor:
            alias = tensor.detach() if has_layout(tensor) else None
            tensor = local_of(tensor)
        tensor = tensor.detach()  # to hold an op's own output with its graph would be a reference cycle
        is_wanted = slot in self.wanted
        if slot < len(self.expected) and (expected := self.expected[slot]) is not None:
            shape, dtype, storage = expected
            if tensor.shape != shape or tensor.dtype is not dtype:
                self._stop(
                    f"tensor {slot} that autograd saved was a {dtype} of shape {tuple(shape)} in forward, and when run "
                    f"again a {tensor.dtype} of shape {tuple(tensor.shape)}, from {self.op}"
                )
            # Other tensors may be freed by now, and the addresses of their storages used again.
            if (is_wanted or slot in self.living) and storage_key(tensor) != self._key_in(slot, storage, tensor):
                what = f"tensor {slot} that autograd saved, a {describe(tensor)} from {self.op}"
                self._stop(f"{what}, was another one in forward")
        kept = KeptTensor(tensor, self.name)
        if is_wanted:
            self.values[slot] = kept
            self._ops[slot] = self.op
            self._missing -= 1
            if not self._missing:
                self._stop_if_filled(slot)
        return kept if alias is None else PackedDTensor(alias, kept, self.name)

    def _stop(self, mismatch: str | None = None) -> NoReturn:
        """mismatch: how a tensor differs from the one that belongs there, if it does."""
        self.mismatch, self.is_done = mismatch or self.mismatch, True
        raise ReplayComplete

    def described(self, slot: int, tensor: Tensor) -> str:
        """A tensor that was received, in words, for messages."""
        return f"tensor {slot} that autograd saved, a {describe(tensor)} from {self._ops[slot]}"

    def _key_in(self, slot: int, storage: StorageKey, tensor: Tensor) -> StorageKey:
        """This run's key of the storage that had the key ``storage`` in forward. The first tensor in it decides."""
        if (key := self._storages.get(storage)) is None:
            key = self._storages[storage] = storage_key(self.living.get(slot, tensor))
        return key

    def _stop_if_filled(self, slot: int) -> None:
        """Stop, unless the op that saves this may still have to fill it. RReLU, say, saves its noise before that."""
        if slot > self._unfilled + 1:
            self._stop()

    def hand_out(self, memory: Any, is_array: bool) -> None:
        """Nothing to do: the replay writes to the array as forward did."""

    def pin(self, tensor: Tensor, name: str | None) -> Tensor:
        if name is not None:
            return tensor
        self._pins += 1
        return self._pinned(self._pins - 1, tensor)


class OpNames(TorchFunctionMode):
    """Tells a replay which function is running."""

    def __init__(self, replay: Replay):
        super().__init__()
        self._replay = replay

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._replay.op = resolve_name(function) or getattr(function, "__name__", str(function))
        return function(*args, **(kwargs or {}))
