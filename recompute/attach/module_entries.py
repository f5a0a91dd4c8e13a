"""The modules that a policy may govern, as plain data, and which of them are the model's repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from torch import nn

from recompute.compiled.unwrap import uncompiled
from recompute.policy.matching import ModuleEntry
from recompute.substitution.module_formula import is_decorated

_NAMES = ("Layer", "Block")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Place = tuple[int | None, int | None]
"""Of a module in a list: its index, and the list's length."""


def module_entries(model: nn.Module, name: str) -> tuple[list[ModuleEntry], dict[str, nn.Module]]:
    """The modules that a policy on ``model`` may govern: those with a forward, not in a decorated class's.

    name: stands for the model's class's.
    """
    blocks = _blocks(model, name)
    entries: list[ModuleEntry] = []
    modules: dict[str, nn.Module] = {}
    pending: list[tuple[str, nn.Module, Place]] = [("", model, (None, None))]
    while pending:
        path, parent, around = pending.pop()
        for child_path, child, place in reversed(list(_children(parent, path))):
            is_item = isinstance(parent, nn.ModuleList) and child_path.rpartition(".")[2].isdigit()
            pending.append((child_path, child, place if is_item else blocks.get(child_path, around)))
        if _has_forward(parent):
            entries.append(ModuleEntry(path, type(parent).__name__ if path else name, *around, path in blocks))
            modules[path] = parent
    return entries, modules


class _Block(NamedTuple):
    path: str
    module: nn.Module
    place: Place

    @property
    def is_whole(self) -> bool:
        """Whether this is named a layer, or has a norm as layers do: heads and experts seldom have."""
        return _is_named(self.module) or any(map(_is_norm, self.module.modules()))


def _blocks(model: nn.Module, name: str) -> dict[str, Place]:
    """The model's repeated layers, by path, which ``type: block`` selects: the model itself where it is named one.

    A block is a child of a ModuleList, ModuleDict or Sequential whose class is named a layer or a block, or repeats
    there and has a norm; if a model has none of these, what repeats without a norm. It is outermost: what repeats
    inside of it, as experts and attention heads do, is part of it.
    """
    if name.endswith(_NAMES):
        return {"": (None, None)}
    found = list(_repeated(model))
    return {block.path: block.place for block in [block for block in found if block.is_whole] or found}


def _repeated(parent: nn.Module, path: str = "") -> Iterator[_Block]:
    """The outermost modules inside of ``parent`` that repeat, or are named a layer.

    One that is not named so, and that holds others which are whole, is a stage of a vision model, say: these count.
    """
    children = list(_children(parent, path))
    counts = Counter(type(child) for _, child, _ in children)
    is_list = isinstance(parent, _LISTS)
    for child_path, child, place in children:
        block = _Block(child_path, child, place)
        if is_list and _is_named(child) and _has_forward(child):
            yield block
            continue
        inside = list(_repeated(child, child_path))
        repeats = counts[type(child)] > 1
        if isinstance(child, _LISTS):
            # A Sequential among other modules is a part that is written so: a stem, a head, a stage.
            repeats = repeats and len(counts) == 1
        elif isinstance(parent, nn.ModuleList):
            repeats = repeats or len(counts) == 1  # a list of one is a stack that is one layer deep
        if is_list and repeats and _has_parts(child) and not any(each.is_whole for each in inside):
            yield block
        else:
            yield from inside


def _has_parts(module: nn.Module) -> bool:
    """Whether it computes more than one module inside of it does, as what wraps a Linear or a convolution."""
    return _has_forward(module) and len(list(islice(module.modules(), 3))) == 3


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Norm" in name and not name.startswith("_")  # as torch's _WeightNorm, which is of a Linear or a convolution


def _is_named(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_NAMES)


def _children(parent: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, Place]]:
    """Those that a policy may govern, by path, and their places in ``parent``."""
    for index, (key, child) in enumerate(parent._modules.items()):
        if child is not None and not is_decorated(child := uncompiled(child)):
            yield f"{path}.{key}" if path else key, child, (index, len(parent._modules))


def _has_forward(module: nn.Module) -> bool:
    """Whether it runs anything itself, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)
