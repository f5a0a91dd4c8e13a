"""Lists the modules that a policy may govern, as plain data, and says which of them are blocks, and which a head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from torch import nn

from recompute.compiled.under_torch_compile import uncompiled
from recompute.policy.matching import ModuleEntry
from recompute.substitution.formulas import is_decorated

_NAMES = ("Layer", "Block")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Place = tuple[int | None, int | None]
"""A module's index in the list that it is in, and the list's length; both None for a module in no list."""


def module_entries(
    model: nn.Module, name: str, *, decorated: bool = False
) -> tuple[list[ModuleEntry], dict[str, nn.Module]]:
    """The modules that a policy on ``model`` may govern, and the same by their paths.

    Each has a forward of its own. Decorated modules and their parts are left out: they have a policy of their own.

    name: the model's class has this name to the rules.
    decorated: whether a decorator is on the model, which makes it a block.
    """
    blocks = _blocks(model, name, decorated)
    heads = set(_heads(model, blocks, _size_of_words(model)))
    entries: list[ModuleEntry] = []
    modules: dict[str, nn.Module] = {}
    pending: list[tuple[str, nn.Module, Place]] = [("", model, (None, None))]
    while pending:
        path, parent, around = pending.pop()
        for child_path, child, place in reversed(list(_children(parent, path))):
            is_item = isinstance(parent, nn.ModuleList) and child_path.rpartition(".")[2].isdigit()
            pending.append((child_path, child, place if is_item else blocks.get(child_path, around)))
        if _has_forward(parent):
            entries.append(
                ModuleEntry(path, type(parent).__name__ if path else name, *around, path in blocks, path in heads)
            )
            modules[path] = parent
    return entries, modules


def paths_around(path: str) -> Iterator[str]:
    """The paths of the modules around the one at ``path``, the nearest first; the last one is the model's."""
    while path:
        path = path.rpartition(".")[0]
        yield path


class _Block(NamedTuple):
    path: str
    module: nn.Module
    place: Place

    @property
    def is_whole(self) -> bool:
        """Whether its name or a norm in it says that this is a whole layer. Heads and experts seldom have a norm."""
        return _is_named(self.module) or any(map(_is_norm, self.module.modules()))


def _blocks(model: nn.Module, name: str, decorated: bool) -> dict[str, Place]:
    """The places of the model's repeated layers by their paths: what ``type: block`` selects.

    Where the model's own class is called a layer or a block, it is the model itself. Elsewhere a block is a child of a
    ModuleList, ModuleDict or Sequential whose class is called so, or occurs there several times and has a norm. A model
    without such blocks is the block itself if it is decorated. Otherwise modules that repeat without a norm are its
    blocks. If no list holds any, the blocks are siblings of one class that have a norm and numbers in their names, as
    timm's RegNet has them.

    Blocks are outermost: what repeats inside of one, as experts and attention heads do, is part of it.
    """
    if name.endswith(_NAMES):
        return {"": (None, None)}
    found = list(_repeated(model))
    whole = [block for block in found if block.is_whole]
    if decorated and not whole:
        return {"": (None, None)}
    return {block.path: block.place for block in whole or found or _numbered(model)}


def _heads(parent: nn.Module, blocks: Collection[str], size: tuple[int, int] | None, path: str = "") -> Iterator[str]:
    """The paths of the modules that compute a language model's logits: ``type: head`` selects them.

    Such a module is a Linear as large as the words' Embedding, in no block. Weights need not be tied. Otherwise it is a
    module called lm_head. Kernels stand in for Linears alone, so if lm_head has such a Linear inside, as RoBERTa's has,
    the Linear counts in its place.
    A thinner Linear beside it with as many outputs is the second half of an adapter. Its logits are added.

    size: rows and columns of the words' Embedding.
    """
    children = list(_children(parent, path))
    adapted = bool(path) and any(_is_as_large(child, size) for _, child, _ in children)
    for child_path, child, _ in children:
        if _is_as_large(child, size):
            yield child_path
            continue
        if adapted:
            for name, part in child.named_modules(prefix=child_path):
                if isinstance(part, nn.Linear) and size is not None and part.out_features == size[0]:
                    yield name
            continue
        inside = [] if child_path in blocks else list(_heads(child, blocks, size, child_path))
        is_named = child_path.rpartition(".")[2] == "lm_head"
        yield from [child_path] if is_named and not inside else inside


def _is_as_large(module: nn.Module, size: tuple[int, int] | None) -> bool:
    return isinstance(module, nn.Linear) and (module.out_features, module.in_features) == size


def _size_of_words(model: nn.Module) -> tuple[int, int] | None:
    """Rows and columns of the Embedding of a model's words: what transformers takes for it, or else the largest."""
    words = None
    with suppress(AttributeError, NotImplementedError, TypeError):  # other models, and transformers' models of images
        words = model.get_input_embeddings()  # type: ignore[operator]
    embeddings = [words] if isinstance(words, nn.Embedding) else model.modules()
    sizes = [(each.num_embeddings, each.embedding_dim) for each in embeddings if isinstance(each, nn.Embedding)]
    return max(sizes, default=None)


def _repeated(parent: nn.Module, path: str = "") -> Iterator[_Block]:
    """The outermost modules inside of ``parent`` that repeat, or are called a layer or a block.

    If a module that repeats is not called so and has whole layers inside, as a stage of a vision model has, these
    layers count in its place.
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
            # Sequentials beside modules of other classes are no layers: people write a stem, a head or a stage so.
            repeats = repeats and len(counts) == 1
        elif isinstance(parent, nn.ModuleList):
            repeats = repeats or len(counts) == 1  # a list of one is a stack that is one layer deep
        if is_list and repeats and _has_parts(child) and not any(each.is_whole for each in inside):
            yield block
        else:
            yield from inside


def _numbered(parent: nn.Module, path: str = "") -> Iterator[_Block]:
    """The outermost siblings of one class, with a norm, whose names differ in their numbers: ``b1`` and ``b2``.

    If all children of such a module are called so, too, the module is a stage, and its children count in its place.
    """
    series = _series(parent, path)
    counts = Counter(series.values())
    for child_path, child, _ in _children(parent, path):
        repeats = child_path in series and counts[series[child_path]] > 1
        if not repeats or not _Block(child_path, child, (None, None)).is_whole:
            yield from _numbered(child, child_path)
            continue
        inside = _series(child, child_path).values()
        is_stage = len(inside) == len(child._modules) and len(set(inside)) == 1
        blocks = _children(child, child_path) if is_stage else [(child_path, child, None)]
        yield from [_Block(block_path, module, (None, None)) for block_path, module, _ in blocks]


def _series(parent: nn.Module, path: str) -> dict[str, tuple[type[nn.Module], str]]:
    """For each child that has parts, and a number in its name: its class, and its name without the number."""
    found = {}
    for child_path, child, _ in _children(parent, path):
        name = child_path.rpartition(".")[2]
        stem = name.rstrip("0123456789")
        if stem not in ("", name) and _has_parts(child):
            found[child_path] = type(child), stem
    return found


def _has_parts(module: nn.Module) -> bool:
    """Whether it has a forward and at least two modules inside. With one, it merely wraps a Linear or a convolution."""
    return _has_forward(module) and len(list(islice(module.modules(), 3))) == 3


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Norm" in name and not name.startswith("_")  # torch's _WeightNorm is part of a Linear or a convolution


def _is_named(module: nn.Module) -> bool:
    return type(module).__name__.endswith(_NAMES)


def _children(parent: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, Place]]:
    """The path, module and place in ``parent`` of each child that is not decorated."""
    for index, (key, child) in enumerate(parent._modules.items()):
        if child is not None and not is_decorated(child := uncompiled(child)):
            yield f"{path}.{key}" if path else key, child, (index, len(parent._modules))


def _has_forward(module: nn.Module) -> bool:
    """Whether it has a forward to run. A ModuleList has none."""
    own = getattr(type(module), "forward", None)  # the class of a ScriptModule has none
    return own is not nn.Module.forward or "forward" in vars(module)
