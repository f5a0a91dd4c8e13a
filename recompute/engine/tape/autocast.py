"""Autocast for the ops that an op's own kernel calls. torch leaves it out as soon as a dispatch mode, as a tape, is on.

For a module's own ops autocast works as without a mode: it comes first, and the mode sees the arguments that it has
cast. But an op that a mode runs is run without autocast, and so are the ops that its kernel calls.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey

from recompute.engine.cut.ops import CASTS_INSIDE, PINV
from recompute.errors import UnsupportedError

_KEYS = (DispatchKey.AutocastCPU, DispatchKey.AutocastCUDA)
_is_off = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_off = torch._C._dispatch_tls_set_dispatch_key_excluded


def left_out() -> list[DispatchKey]:
    """The kinds of autocast that were in force when the op was called, and are off now that a mode handles it."""
    off = [key for key in _KEYS if _is_off(key)]
    with torch.overrides.enable_reentrant_dispatch():
        return [key for key in off if not _is_off(key)]


def run_as_called(op: Any, args: tuple, kwargs: dict[str, Any], name: str) -> Any:
    """``op(*args, **kwargs)`` under a mode that only looks on, in the module called ``name``."""
    if (op in CASTS_INSIDE or torch.is_inference_mode_enabled()) and (keys := left_out()):
        with in_force(keys, op, kwargs, name):
            return op(*args, **kwargs)
    return op(*args, **kwargs)


@contextmanager
def in_force(keys: Collection[DispatchKey], op: Any, kwargs: dict[str, Any], name: str) -> Iterator[None]:
    """Inside, autocast is as it was when ``op`` was called, in the module called ``name``."""
    if op is PINV and DispatchKey.AutocastCPU in keys and kwargs.get("rtol") is not None:
        raise UnsupportedError(
            f"in {name}: torch.linalg.pinv with a tolerance, or torch.pinverse, under autocast on the CPU. Autocast "
            "treats the two differently, and a policy cannot tell them apart. Call it under "
            'torch.autocast("cpu", enabled=False).'
        )
    for key in keys:
        _set_off(key, False)
    try:
        yield
    finally:
        for key in keys:
            _set_off(key, True)
