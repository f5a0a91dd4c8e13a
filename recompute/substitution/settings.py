"""The attributes of a module that its forward may branch on: a norm's epsilon, or an adapter that is None."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from recompute.engine.reachable_objects import base_of, taken_apart


@dataclass(frozen=True)
class Settings:
    """The numbers, texts and flags that a module had when it was recognized, and its attributes that were None.

    These are the module's own attributes, and those of its class, config and submodules that forward names.
    """

    values: tuple[tuple[str, Any], ...] = ()
    """Paths of attributes, and copies of their values."""

    @staticmethod
    def of(module: nn.Module) -> Settings:
        own = dict(vars(module))
        for part in (module._modules, module._parameters, module._buffers):
            own |= part
        found = {name: value for name, value in own.items() if _is_plain(value)}
        names = names_in(base_of(module))
        for name in names:
            value = own[name] if name in own else inspect.getattr_static(base_of(module), name, _Missing)
            if _is_plain(value):
                found[name] = value
            elif not isinstance(value, (type, Tensor, FunctionType, property)):
                inner = {key: inspect.getattr_static(value, key, _Missing) for key in names}
                found |= {f"{name}.{key}": each for key, each in inner.items() if _is_plain(each)}
        settings = {path: each for path, each in found.items() if path.rpartition(".")[2] not in _NO_SETTINGS}
        for name in checkpoint_switch(module):
            settings.pop(name, None)
        return Settings(tuple([(path, _copy(value)) for path, value in settings.items()]))

    def are_those_of(self, module: nn.Module) -> bool:
        # Not by ``vars``: torch's frontend makes no guards of it.
        try:
            return all([_value(module, path) == value for path, value in self.values])
        except AttributeError:  # one is gone
            return False


def checkpoint_switch(module: nn.Module) -> dict[str, bool]:
    """The attribute that has transformers checkpoint ``module``, with the value that turns it off.

    transformers' layers checkpoint around all else: around their ``__call__``, and since 5.24 around the outermost
    ``forward`` of their classes, which under a policy is the policy's. It does not change what they compute.
    """
    layer = transformers_layer()
    return {"gradient_checkpointing": False} if layer is not None and isinstance(module, layer) else {}


def transformers_layer() -> type[nn.Module] | None:
    """The class of the layers that transformers may checkpoint; None where it has none, or is not loaded."""
    return getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)


class _Missing:
    """Stands for an attribute that does not exist."""


ANY_SETTINGS = Settings()
_PLAIN = (bool, int, float, str, type(None))
_NO_SETTINGS = frozenset(vars(nn.Module())) | {
    "_is_hf_initialized"
}  # a formula is the same in ``eval()``; the others are torch's own business
_MOST_ITEMS = 16
"""Longer lists and dicts are data, and no settings. To compare them takes time."""


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return len(value) <= _MOST_ITEMS and all(type(each) in _PLAIN for each in value)
    if type(value) is dict:
        return len(value) <= _MOST_ITEMS and all(type(each) in _PLAIN for each in (*value, *value.values()))
    return type(value) in _PLAIN


def _copy(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value


def _value(module: nn.Module, path: str) -> Any:
    return attrgetter(path)(module) if "." in path else getattr(module, path)


def names_in(cls: type[nn.Module]) -> set[str]:
    """The names in the code of a class's forward, and in the code of those methods of the class that forward names."""
    names: set[str] = set()
    pending, _ = taken_apart(cls.forward)
    while pending:
        new = set(pending.pop().__code__.co_names) - names
        names |= new
        for name in new - vars(nn.Module).keys():
            pending += taken_apart(inspect.getattr_static(cls, name, None))[0]
    return names
