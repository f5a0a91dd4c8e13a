"""How the code of a captured forward holds its inputs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recompute.engine.tape.op_arguments import copied

Versioned = tuple[Tensor, int]
"""A tensor, and its version when it was held."""

# The memory of a parameter is held as autograd holds that of a view: its ``data`` may be replaced.
_HOLDS = {
    "saved": "None",
    "itself": "(t{0}, t{0}._version)",
    "memory": "versioned(t{0}.detach())",
    "copy": "versioned(copied(t{0}))",
}
_FINDS = {
    "itself": "t{0}, None",
    "memory": "weak(t{0}), t{0}.detach()",
    "weak": "weak(t{0}), None if is_sure else t{0}.detach()",
}


def held_of(held: Sequence[tuple[int, str, str]], others: Sequence[tuple[int, str]]) -> str:
    """The last three results of forward's code: the inputs to be saved by autograd, to be held, and to be looked at.

    held, others: as ``Program`` has them, with the variables of the former.
    """
    saved = [name for _, how, name in held if how == "saved"]
    kept = [_HOLDS[how].format(position) for position, how, _ in held]
    seen = [f"({_FINDS[how]}, (t{{0}}._version, address(t{{0}})))".format(position) for position, how in others]
    return f"[{', '.join(saved)}], [{', '.join(kept)}], [{', '.join(seen)}]"


def _versioned(tensor: Tensor) -> Versioned:
    return tensor, tensor._version


HELPERS: dict[str, Any] = {
    "versioned": _versioned,
    "copied": copied,
    "weak": weakref.ref,
    "address": torch._C.TensorBase.data_ptr,
}
"""The objects that the text of ``held_of`` refers to by name."""
