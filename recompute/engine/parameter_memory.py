"""Whether the memory of a parameter is its own, or a library's, which lends it for each use and takes it back.

The engine holds the parameter object. It holds its memory only if that is the parameter's own. A library that swaps the
memory, as sharded training does, has an adapter in ``recompute.integrations``. The adapter knows the library's
parameters, and is imported here as soon as the library is. To support another library, write such an adapter, which
calls ``register``, and name it in ``_ADAPTERS``.

torch's own sharded parameters need no adapter: they are DTensors (``dtensors``).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from torch import Tensor

from recompute.engine.dtensors import has_layout

_ADAPTERS: tuple[tuple[str, str], ...] = (("deepspeed", "recompute.integrations.deepspeed"),)
"""The module of a library, and its adapter. As long as nobody has imported the library there are no such parameters."""

_waiting = _ADAPTERS
_managers: list[Callable[[Tensor], bool]] = []


def register(manages: Callable[[Tensor], bool]) -> None:
    """manages: says of a parameter whether a library swaps or frees its memory at times of its own choice."""
    _managers.append(manages)


def is_managed_elsewhere(parameter: Tensor) -> bool:
    """Whether a library swaps or frees the memory of a parameter at times of its own choice."""
    for library, _ in _waiting:
        if library in sys.modules:
            _load_adapters()
    return bool(_managers) and any(manages(parameter) for manages in _managers)


def may_hold_memory(parameter: Tensor) -> bool:
    """Whether the memory of a parameter may be held apart from it: if it is neither a library's nor a DTensor's."""
    return not (has_layout(parameter) or is_managed_elsewhere(parameter))


def _load_adapters() -> None:
    global _waiting
    for library, adapter in _waiting:
        if library in sys.modules:
            importlib.import_module(adapter)
    _waiting = tuple([(library, adapter) for library, adapter in _waiting if adapter not in sys.modules])
