"""How the kernels of norms are launched, for rows of each width on each device."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from recompute.kernels import launch


class TileSettings(NamedTuple):
    """How a kernel is launched for rows up to some width."""

    rows: int
    """How many rows make a tile, which a program computes at once."""
    warps: int
    """How many warps a program has."""
    stages: int
    """Depth of the pipeline: one tile is computed while ``stages - 1`` are loaded, if shared memory has room."""
    programs: int
    """How many programs each multiprocessor runs. Each takes tile after tile; 0: one program for each tile."""


WIDE = -1
WIDE_BLOCK = 8192
"""Columns of a tile of rows that are wider than the widest of the table."""

# Measured on an H200 in bfloat16, for rows at most so wide.
FORWARD = {
    64: TileSettings(64, 4, 1, 0),
    128: TileSettings(16, 2, 1, 0),
    256: TileSettings(8, 2, 1, 0),
    512: TileSettings(4, 4, 1, 0),
    1024: TileSettings(2, 4, 1, 0),
    2048: TileSettings(1, 4, 1, 0),
    4096: TileSettings(1, 4, 1, 0),
    6144: TileSettings(1, 4, 1, 0),
    8192: TileSettings(1, 8, 1, 0),
    16384: TileSettings(1, 8, 1, 0),
    32768: TileSettings(1, 16, 1, 0),
    WIDE: TileSettings(1, 4, 3, 0),
}
BACKWARD = {
    64: TileSettings(32, 4, 3, 3),
    128: TileSettings(64, 8, 3, 1),
    256: TileSettings(8, 4, 3, 3),
    512: TileSettings(4, 4, 4, 2),
    1024: TileSettings(2, 4, 4, 2),
    2048: TileSettings(1, 4, 4, 2),
    4096: TileSettings(2, 8, 3, 1),
    6144: TileSettings(1, 8, 4, 1),
    8192: TileSettings(1, 8, 3, 1),
    16384: TileSettings(1, 16, 1, 1),
    WIDE: TileSettings(1, 8, 3, 1),
}
# Not measured. With the sums of a bias's gradient the settings above spill no register on a Hopper GPU (ptxas 13.4) but
# at 16384 columns, 368 bytes a thread. So such rows are wide ones.
LAYER_NORM_BACKWARD = {width: settings for width, settings in BACKWARD.items() if width != 16384}


class _Tiles(NamedTuple):
    """``TileSettings`` for one width of rows on one device."""

    wide: bool
    rows: int
    columns: int
    resident: int
    """The most programs that there may be; 0: as many as there are tiles."""
    constants: dict[str, int]

    def programs(self, M: int, H: int) -> tuple[int, int]:
        """How many programs there are for each block of columns, and in all."""
        tiles, blocks = -(-M // self.rows), -(-H // self.columns)
        each = min(tiles, max(1, self.resident // blocks)) if self.resident else tiles
        return each, each * blocks


@functools.cache
def tiles_of(is_forward: bool, hidden: int, nbytes: int, device: torch.device, is_layer_norm: bool = False) -> _Tiles:
    """How to launch a kernel that loads ``nbytes`` for each of the ``hidden`` columns of a row."""
    table = FORWARD if is_forward else LAYER_NORM_BACKWARD if is_layer_norm else BACKWARD
    width = next((width for width in table if hidden <= width), WIDE)
    rows, warps, stages, programs = table[width]
    columns = WIDE_BLOCK if width == WIDE else max(64, 1 << max(hidden - 1, 0).bit_length())
    room = _shared_memory(device) // max(programs, 1) - 4096  # the rest is for a few numbers a row, and for CUDA
    # One stage needs no buffer but registers. In loops over columns Triton may give each stage one.
    buffers = room // (rows * columns * nbytes)
    stages = min(stages, max(1, buffers) if width == WIDE else 1 + buffers)
    constants = {"BLOCK_H": columns, "STAGES": stages, "num_warps": warps}
    return _Tiles(width == WIDE, rows, columns, programs * launch.multiprocessors(device), constants)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that each multiprocessor has."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor if device.type == "cuda" else 2**20
