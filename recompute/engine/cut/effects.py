"""Ops that are registered as having an effect, which is to happen once."""

from __future__ import annotations

from typing import Any

from torch._library import simple_registry
from torch._ops import OpOverload

from recompute.engine.cut.reviewed_ops import names


def is_effectful(op: Any) -> bool:
    """Whether an op is registered as having an effect; torch takes one that is given a ScriptObject for one, too."""
    name = op.name() if isinstance(op, OpOverload) else f"{op.namespace}::{op.name()}"
    return simple_registry.singleton.find(name).effect.effect is not None


def is_effect_registered() -> bool:
    """Whether some op has been registered as having an effect, other than those of torch's own. It takes 2 us."""
    entries = simple_registry.singleton._data
    if len(entries) != len(_effects):  # an entry stays, and what it holds of an effect is what changes
        _effects[:] = [None if name in _EFFECTS_OF_TORCH else entry.effect for name, entry in entries.items()]
    return [holder for holder in _effects if holder is not None and holder._effect is not None] != []


_effects: list[Any] = []
"""What holds the effect of each registered op; None for torch's own."""
_EFFECTS_OF_TORCH = names("""
    aten::_print aten::_linalg_check_errors
    higher_order::call_torchbind higher_order::print higher_order::invoke_leaf_function
""")
