"""Whether kernels are generated at all."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from recompute.engine.thread_state import local
from recompute.kernels.launch import triton


class Generates(enum.IntEnum):
    """Which kernels may be generated for a region."""

    NOTHING = 0
    EXACT = 1
    """Those that give ATen's bits."""
    ROUNDED = 2
    """Those too that sum up the elements of a row in another order than ATen."""


_is_off = os.environ.get("RECOMPUTE_GENERATE", "1") in ("", "0")
_devices = {"cuda"}


def is_generating(device: torch.device) -> bool:
    """Whether kernels are generated for code that runs on a device: on CUDA, as eager code is the faster on a CPU."""
    return not _is_off and (local.simulates_cuda or (triton is not None and device.type in _devices))


@contextmanager
def generating_on(device_type: str) -> Iterator[None]:
    """Generate for devices of this type, too: on a CPU, Triton's interpreter runs the kernels."""
    added = {device_type} - _devices
    _devices.update(added)
    try:
        yield
    finally:
        _devices.difference_update(added)
