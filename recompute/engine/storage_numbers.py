"""Numbers for the contents of storages: a tape, a recording and a compiler's partitioner know tensors by these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class StorageNumbers(dict[int, int]):
    """The number of the content of each storage, by the address of the StorageImpl.

    It holds no memory. As long as it has a storage, no other one gets the address (invariant 3).
    """

    def __init__(self) -> None:
        self._references: list[Any] = []

    def of(self, tensor: Tensor) -> int | None:
        """The number of the content of the tensor's storage, if one has been seen there."""
        return self.get(tensor.untyped_storage()._cdata)

    def bind(self, storage: torch.UntypedStorage, number: int) -> int | None:
        """From now on the storage's content has this number. Returns the number before."""
        key = storage._cdata
        before = self.get(key)
        if before is None:
            self._references.append(storage._weak_ref())
        self[key] = number
        return before

    def clear(self) -> None:
        super().clear()
        for reference in self._references:
            torch.UntypedStorage._free_weak_ref(reference)
        self._references = []

    __del__ = clear
