"""Dropout in generated kernels: they make ATen's random numbers where these are read.

A captured program runs ``native_dropout`` in three steps. It takes the generator's state, a seed and an offset, and
moves the generator on as ATen's kernel would. It makes a mask from that state, and it scales the input where the mask
is set. The last two are pointwise, so that a group computes them. A mask that only groups read never reaches memory,
and no generator is put back to draw it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from recompute.compiled.calls import Call, Use
from recompute.compiled.generated.pointwise_ops import FLOATS, arguments_of
from recompute.compiled.recording import Recording
from recompute.engine.cut.layout import Layout, is_dense
from recompute.engine.rng import CudaSource
from recompute.engine.thread_state import is_fake, local
from recompute.kernels.launch import multiprocessors

_ATEN = torch.ops.aten
MAX_ELEMENTS = 2**31 - 1
BLOCK_THREADS = 256
"""In a block of ATen's kernel."""

DropoutState = tuple[int, int]
"""A generator's seed and offset where the random numbers of a dropout begin."""


@dataclass(frozen=True)
class DropoutMask:
    """The op that makes the mask of a dropout of a dense tensor.

    ATen's kernel gives each thread ``vector`` elements that lie side by side, then those so many further on as all
    threads have together. Philox gives a thread four numbers at a time.
    """

    layout: Layout
    """The input's."""
    device: torch.device
    p: float

    @property
    def threads(self) -> int:
        """The threads of ATen's kernel."""
        if local.simulates_cuda:
            return BLOCK_THREADS  # nobody draws
        resident = torch.cuda.get_device_properties(self.device).max_threads_per_multi_processor // BLOCK_THREADS
        blocks = -(-self.layout.shape.numel() // BLOCK_THREADS)
        return min(multiprocessors(self.device) * resident, blocks) * BLOCK_THREADS

    @property
    def vector(self) -> int:
        """The elements that a thread loads at once."""
        most = 16 // self.layout.dtype.itemsize
        return most if self.layout.shape.numel() % most == 0 else 4

    @property
    def kept(self) -> float:
        """The probability that an element is kept, as ATen's kernel has it: a float32."""
        return torch.tensor(1.0 - self.p, dtype=torch.float32).item()

    @property
    def scale(self) -> float:
        """The factor of each element that is kept."""
        return 1.0 / self.kept

    def __str__(self) -> str:
        return "recompute.dropout_mask.default"

    def taken(self) -> DropoutState:
        """The state for one dropout. The generator moves past its random numbers."""
        if is_fake():
            return 0, 0
        source = self._source()
        seed, offset = source.state()
        per_thread = -(-self.layout.shape.numel() // (self.threads * 4)) * 4
        source.generator.set_offset(offset + per_thread)
        return seed, offset

    def __call__(self, state: DropoutState) -> Tensor:
        """The mask, by ATen's kernel."""
        like = self.layout.empty(self.device)
        if is_fake():
            return _ATEN.native_dropout.default(like, self.p, True)[1]
        source = self._source()
        present = source.state()
        try:
            source.restore(state)
            return _ATEN.native_dropout.default(like, self.p, True)[1]
        finally:
            source.restore(present)

    def _source(self) -> CudaSource:
        return CudaSource(torch.cuda.default_generators[self.device.index])


def mask_of(call: Call, recording: Recording) -> DropoutMask | None:
    """The op that makes the mask of ``call``, if that is a dropout that generated kernels can compute."""
    if call.op is not _ATEN.native_dropout.default or not recording.is_generated or None in call.results:
        return None
    values = arguments_of(call)
    use, p, device = values["input"], values["p"], recording.device
    if type(use) is not Use or not 0 < p < 1 or values["train"] is False or use.is_conjugate:
        return None
    assert device is not None
    layout, count = use.layout, use.layout.shape.numel()
    outputs = [recording.buffers[number].layout for number in call.results if number is not None]
    is_alike = all((each.shape, each.stride) == (layout.shape, layout.stride) for each in outputs)
    is_aligned = int(layout.offset) * layout.dtype.itemsize % 16 == 0 and count % 4 == 0
    if not (is_alike and is_aligned and is_dense(layout, count * layout.dtype.itemsize) and count <= MAX_ELEMENTS):
        return None
    is_there = (device.type == "cuda" or local.simulates_cuda) and recording.buffers[use.buffer].device == device
    return DropoutMask(layout, device, p) if is_there and layout.dtype in FLOATS else None


def flat(states: Iterable[DropoutState]) -> list[int]:
    """The states as arguments of a kernel, in int64."""
    return [value for seed, offset in states for value in (seed - (seed >> 63 << 64), offset)]
