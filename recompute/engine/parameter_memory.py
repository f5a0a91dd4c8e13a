"""Whose memory a parameter has: its own, or memory that a library gives it for each use and takes back.

The engine holds a parameter by the object that it is, and its memory only where that is the parameter's own. A library
that swaps the memory, as sharded training does, has an adapter in ``recompute.integrations``: that knows the library's
parameters, and is imported here as soon as the library is. To support another library, write such an adapter, which
calls ``register``, and name it in ``_ADAPTERS``.

Sharded parameters of torch's own need no adapter: they are DTensors (``dtensors``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch import Tensor

from recompute.engine.dtensors import has_layout

_ADAPTERS: tuple[tuple[str, str], ...] = (("deepspeed", "recompute.integrations.deepspeed"),)
"""The module of a library, and its adapter. Who has not imported the library has none of its parameters."""

_waiting = _ADAPTERS
_managers: list[Callable[[Tensor], bool]] = []


def register(manages: Callable[[Tensor], bool]) -> None:
    """manages: whether a library swaps the memory of a parameter, or frees it, whenever it sees fit."""
    _managers.append(manages)


def is_managed_elsewhere(parameter: Tensor) -> bool:
    """Whether a library swaps the memory of a parameter, or frees it, whenever it sees fit."""
    for library, _ in _waiting:
        if library in sys.modules:
            _load_adapters()
    return bool(_managers) and any(manages(parameter) for manages in _managers)


def may_hold_memory(parameter: Tensor) -> bool:
    """Whether the memory of a parameter may be held apart from it: it is neither a library's nor a DTensor's."""
    return not (has_layout(parameter) or is_managed_elsewhere(parameter))


def _load_adapters() -> None:
    global _waiting
    for library, adapter in _waiting:
        if library in sys.modules:
            importlib.import_module(adapter)
    _waiting = tuple([(library, adapter) for library, adapter in _waiting if adapter not in sys.modules])
