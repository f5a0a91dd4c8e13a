"""Compression: a region holds tensors for backward as codes of 8 bits. A codec makes and reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from recompute.engine.recipes import Recipe, RecipeGroup, missing_in
from recompute.engine.region_statistics import RegionStatistics
from recompute.engine.saved_tensors import Hooks, KeptTensor, PackedTensor, pack_through
from recompute.engine.thread_state import packing_for_recipe, working


class Codes(NamedTuple):
    """A tensor in 8 bits, and the worst error of the decoded tensor."""

    codes: Tensor
    scales: Tensor
    error: Tensor
    """The worst error, relative to the largest value of its block: a float32 of no dimensions on the device."""

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and the scales."""
        return self.codes.nbytes + self.scales.nbytes


class Codec(Protocol):
    """Makes codes of tensors, and tensors of codes, on whatever device these are."""

    def encode(self, tensor: Tensor) -> Codes: ...

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of the shape and the strides of ``codes``."""
        ...


class CompressedTensor(Recipe):
    """A tensor that is held as codes. Its only value, 0, is the decoded tensor."""

    __slots__ = ("_codec", "_dtype", "_parts")

    def __init__(
        self, tensor: Tensor, codec: Codec, statistics: RegionStatistics, outer: Hooks | None, group: RecipeGroup
    ):
        """tensor: dense, and without a graph. outer: the saved-tensor hooks that hold the codes."""
        super().__init__(RegionStatistics(statistics.name), "codes of 8 bits", group)  # this is no regeneration
        with working("compression"):
            encoded = codec.encode(tensor)
        self._codec = codec
        self._dtype = tensor.dtype
        with packing_for_recipe():
            self._parts = [pack_through(outer, part, statistics.name) for part in (encoded.codes, encoded.scales)]
        note_compressed(statistics, encoded, tensor.nbytes)
        statistics.kept_nbytes += encoded.nbytes - tensor.nbytes

    def missing_inputs(self) -> Iterator[Recipe]:
        return missing_in(self._parts)

    def regenerate(self, wanted: Collection[int]) -> dict[int, PackedTensor]:
        codes, scales = (part.get() for part in self._parts)
        with working("compression"):
            tensor = self._codec.decode(codes, scales, self._dtype)
        return dict.fromkeys(wanted, KeptTensor(tensor, self.statistics.name))


def note_compressed(statistics: RegionStatistics, encoded: Codes, nbytes: int) -> None:
    """Count a tensor of ``nbytes`` that is held as codes. In a dry run, on tensors without values, nothing is held."""
    if isinstance(encoded.error, FakeTensor):
        return
    statistics.compressed_tensors += 1
    statistics.compressed_nbytes += nbytes
    statistics.codes_nbytes += encoded.nbytes
    worst = statistics.worst_code_error
    with working("compression"):
        error = encoded.error.detach()
        statistics.worst_code_error = error if worst is None else torch.maximum(worst.to(error.device), error)
