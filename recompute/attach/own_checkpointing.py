"""Finds checkpointing that a model brings along, of transformers, diffusers, timm or torch, and turns it off and on."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from recompute.attach.check_effect import listed
from recompute.errors import warn

_FLAGS = ("gradient_checkpointing", "grad_checkpointing")
"""These are True on a module that checkpoints: the flag of transformers and diffusers, and that of timm."""
_WRAPS = "checkpoint_fn"
"""The attribute of torch's ``CheckpointWrapper`` that runs what it wraps."""


class Checkpointing:
    """A module that runs again as a whole in backward, or whose parts do, whatever a policy keeps."""

    def __init__(self, path: str, module: nn.Module, attribute: str, off: object):
        """attribute: the one that turns it on. off: the value that turns it off."""
        self.path, self._module = path, weakref.ref(module)
        self.attribute, self._off = attribute, off

    def turn_off(self) -> Callable[[], None]:
        """Returns a function that turns it on again."""
        module = self._module()
        assert module is not None, "found in a model that lives"
        attribute, is_of_class = self.attribute, self.attribute not in vars(module)
        before = getattr(module, attribute)
        module.__dict__[attribute] = self._off

        def undo() -> None:
            module = self._module()
            if module is None or vars(module).get(attribute) is not self._off:  # somebody else has set it since
                return
            if is_of_class:
                del module.__dict__[attribute]
            else:
                module.__dict__[attribute] = before

        return undo


def find_checkpointing(model: nn.Module) -> list[Checkpointing]:
    """All of the model's own checkpointing that is on now and that an attribute shows."""
    torchs = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")  # else nothing is one
    found = []
    for path, module in model.named_modules():
        if torchs is not None and isinstance(module, torchs.CheckpointWrapper):
            found += [Checkpointing(path, module, _WRAPS, _call)] if module.checkpoint_fn is not _call else []
        else:
            found += [Checkpointing(path, module, flag, False) for flag in _FLAGS if getattr(module, flag, 0) is True]
    return found


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def said_of(found: Sequence[Checkpointing], name: str) -> str:
    """A sentence that says what checkpoints where. name: the name of the model's class."""
    paths: dict[str, list[str]] = {}
    for each in found:
        what = "CheckpointWrapper" if each.attribute == _WRAPS else each.attribute
        paths.setdefault(what, []).append(each.path or "the model")
    where = "; ".join(f"{what} in {listed(of_what)}" for what, of_what in paths.items())
    return (
        f"{name} has its own checkpointing on ({where}). It runs these modules again as a whole, so a policy has no "
        "effect there."
    )


def how_to_turn_off(found: Sequence[Checkpointing]) -> str:
    """How to turn it off: an imperative sentence without its end."""
    return " and ".join(dict.fromkeys(_WAYS[each.attribute] for each in found))


_WAYS = {
    _WRAPS: "Remove checkpoint_wrapper, or apply_activation_checkpointing",
    "gradient_checkpointing": "Call model.gradient_checkpointing_disable() (diffusers: disable_gradient_checkpointing)",
    "grad_checkpointing": "Call model.set_grad_checkpointing(False)",
}


def warn_of_checkpointing(found: Sequence[Checkpointing], name: str) -> None:
    """name: the name of the model's class."""
    if found:
        warn(
            f"{said_of(found, name)} {how_to_turn_off(found)}. Or let recompute turn it off until remove(): "
            "recompute.apply(model, policy, replace_checkpointing=True)"
        )
